"""The backend ``triton``: :mod:`fusedaccum.ops.reference` on any GPU that Triton compiles for.

The ops take the same arguments. A call makes one launch for every combination of dtypes and
alignment that occurs among its tensors, and one small copy to the device: the table of pointers.
Nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton.language as tl
from fusedaccum.ops import memory
from torch import Tensor

from . import kernels

if TYPE_CHECKING:
    from fusedaccum.ops import Scalar, Stats, StochasticRounding

BLOCK = 2048  # elements per program: 16 per thread, two to eight accesses of 16 bytes each way; docs/performance.md
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # of every launch: a product is rounded before it is added
AT_ONCE = (64 << 10) // 8  # numbers of a table
TAKES_LOW = True
DTYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def accumulate_(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: Scalar,
    overwrite: bool,
    decay: Scalar,
    rounding: StochasticRounding | None,
    stats: Stats | None,
    low: Sequence[Tensor] | None = None,
) -> None:
    """``buffer = buffer * decay + grad * scale``, or ``grad * scale`` with ``overwrite``."""
    _run(buffers, grads, scale, decay, rounding, stats, low, overwrite=overwrite, cast=False, writes_low=True)


def scale_(tensors: Sequence[Tensor], scale: Scalar, stats: Stats | None, low: Sequence[Tensor] | None = None) -> None:
    """``x = x * scale``."""
    _run(tensors, tensors, scale, 1.0, None, stats, low, overwrite=True, cast=True, writes_low=True)


def cast_(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    scale: Scalar,
    stats: Stats | None,
    low: Sequence[Tensor] | None = None,
) -> None:
    """``out = cast(in * scale)``."""
    _run(outs, ins, scale, 1.0, None, stats, low, overwrite=True, cast=True, writes_low=False)


def stats(tensors: Sequence[Tensor], into: Stats, low: Sequence[Tensor] | None = None) -> None:
    """Squared norm and non-finite count."""
    device = tensors[0].device
    plan = _plan(tensors, tensors, None, low)
    bits, low_aligned = _low_parts(low)
    tally = _Tally(plan, device)
    with _device_of(tensors[0]):
        for _, dtype, aligned, count, blocks, rows in plan:
            table = _Table(rows, (1.0, 1.0), 0, device)
            kernels.measure[(blocks,)](
                table.on_device, count, *tally.take(blocks), DTYPES[dtype], aligned, bits, low_aligned, BLOCK, **OPTIONS
            )  # fmt: skip
    tally.finish(into)


def _run(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    scale: Scalar,
    decay: Scalar,
    rounding: StochasticRounding | None,
    stats: Stats | None,
    low: Sequence[Tensor] | None,
    *,
    overwrite: bool,
    cast: bool,
    writes_low: bool,
) -> None:
    device = outs[0].device
    plan = _plan(outs, ins, rounding, low)
    bits, low_aligned = _low_parts(low)
    writes_low = writes_low and low is not None
    tally = None if stats is None else _Tally(plan, device)
    numbers = (1.0 if isinstance(scale, Tensor) else scale, 1.0 if isinstance(decay, Tensor) else decay)
    # Before the launches, so that if one fails, nobody takes the outputs to be unchanged.
    memory.increment_version([*outs, *low] if low is not None and writes_low else outs)
    with _device_of(outs[0]):
        doubles = any(out == torch.float64 for out, *_ in plan)  # of which a number may be an element: read from a copy
        device_scale, device_decay = (
            x.to(torch.float64, copy=doubles) if isinstance(x, Tensor) else None for x in (scale, decay)
        )
        for out, dtype, aligned, count, blocks, rows in plan:
            table = _Table(rows, numbers, 0 if rounding is None else rounding.seed, device)
            # Without statistics nothing is written there, but an argument must point to something.
            partials, bad = (table.number(0), table.on_device) if tally is None else tally.take(blocks)
            kernels.write[(blocks,)](
                table.on_device,
                count,
                table.number(kernels.SCALE) if device_scale is None else device_scale,
                table.number(kernels.DECAY) if device_decay is None else device_decay,
                partials,
                bad,
                DTYPES[out],
                DTYPES[dtype],
                aligned,
                cast,
                overwrite,
                rounding is not None and out.itemsize == 2,
                tally is not None,
                bits,
                low_aligned,
                writes_low,
                BLOCK,
                **OPTIONS,
            )
    if tally is not None and stats is not None:
        tally.finish(stats)


# Dtypes of outputs and inputs, whether all accesses may be of 16 bytes, tensors, blocks, rows.
Launch = tuple[torch.dtype, torch.dtype, bool, int, int, bytes]


def _plan(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    rounding: StochasticRounding | None,
    low: Sequence[Tensor] | None,
) -> list[Launch]:
    """The launches of a call, listed in C++ if that was built.

    In Python, this is most of a call's time on the host. The row of counters has the addresses of
    low parts, where there are some.
    """
    compiled = memory.native_lists()
    counters = [x.data_ptr() for x in low] if low is not None else None if rounding is None else rounding.counters
    return (launches if compiled is None else compiled.launches)(outs, ins, counters, BLOCK)


def _low_parts(low: Sequence[Tensor] | None) -> tuple[int, bool]:
    """How many bits low parts have, 0 for none, and whether all of them are aligned.

    Then accesses to them may be as wide as those to what they belong to.
    """
    if low is None:
        return 0, False
    return 8 * low[0].itemsize, all(x.data_ptr() % 16 == 0 for x in low)


def launches(outs: Sequence[Tensor], ins: Sequence[Tensor], counters: Sequence[int] | None, block: int) -> list[Launch]:
    """One launch for every combination of dtypes and alignment, tensors in their order.

    csrc/bindings_lists.h has the same in C++.
    """
    # The addresses of the two, their elements, the first element's random number.
    tensors: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, int, int, int]]] = defaultdict(list)
    for out, x, counter in zip(outs, ins, itertools.repeat(0) if counters is None else counters, strict=False):
        if elements := out.numel():
            there, here = out.data_ptr(), x.data_ptr()
            tensors[out.dtype, x.dtype, (there | here) % 16 == 0].append((there, here, elements, counter))
    plan: list[Launch] = []
    for kind, alike in tensors.items():
        starts, sources, elements_of, counters_of = zip(*alike, strict=True)
        ends = list(itertools.accumulate(-(-n // block) for n in elements_of))
        count = len(alike)
        rows = struct.pack(f"={4 * count}q{count}Q", *starts, *sources, *elements_of, 0, *ends[:-1], *counters_of)
        plan.append((*kind, count, ends[-1], rows))
    return plan


class _Table:
    """The kernels' table of some tensors, on their device."""

    def __init__(self, rows: bytes, numbers: tuple[float, float], seed: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "backend='triton' cannot be captured in a CUDA graph, whose replays would read a table of pointers "
                "that is gone; use backend='cuda', or capture without these calls"
            )
        # From pageable memory: the driver copies pieces of up to 64 KiB at once, without waiting.
        table = torch.frombuffer(bytearray(struct.pack("=2dQ", *numbers, seed) + rows), dtype=torch.int64)
        self.on_device = torch.empty_like(table, device=device)
        for there, piece in zip(self.on_device.split(AT_ONCE), table.split(AT_ONCE), strict=True):
            there.copy_(piece, non_blocking=True)

    def number(self, place: int) -> Tensor:
        """A number of the header, where a kernel reads it as FP64."""
        return self.on_device.view(torch.float64)[place]


class _Tally:
    """The blocks' statistics, which the launches of a call share out among them."""

    def __init__(self, plan: Sequence[Launch], device: torch.device) -> None:
        blocks = sum(blocks for *_, blocks, _ in plan)
        self.squares = torch.empty(blocks, dtype=torch.float64, device=device)
        self.bad = torch.empty(blocks, dtype=torch.int64, device=device)
        self.taken = 0

    def take(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Room for the next launch."""
        here = slice(self.taken, self.taken + blocks)
        self.taken += blocks
        return self.squares[here], self.bad[here]

    def finish(self, into: Stats) -> None:
        """Add them up. PyTorch's sum takes an order that depends on their number alone."""
        into.sq_norm.copy_(self.squares.sum())
        into.nonfinite.copy_(self.bad.sum())


def _device_of(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
