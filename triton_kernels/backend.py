"""The backend ``triton``: the ops of :mod:`fusedaccum.ops.reference`, with the same arguments, on any GPU that Triton compiles for.

A call makes one launch for every combination of dtypes and alignment that occurs among its tensors, and one small copy to the
device: the table of pointers. Nothing waits for the device.
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
from torch import Tensor

from . import kernels

if TYPE_CHECKING:
    from fusedaccum.ops import Scalar, Stats, StochasticRounding

BLOCK = 2048  # elements per program: 16 per thread, two to eight accesses of 16 bytes each way; docs/performance.md
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # of every launch: a product is rounded before it is added
AT_ONCE = (64 << 10) // 8  # numbers of a table
DTYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def accumulate_(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: Scalar,
    overwrite: bool,
    decay: Scalar,
    rounding: StochasticRounding | None,
    stats: Stats | None,
) -> None:
    """``buffer = buffer * decay + grad * scale``, or ``grad * scale`` with ``overwrite``."""
    _run(buffers, grads, scale, decay, rounding, stats, overwrite=overwrite, cast=False)


def scale_(tensors: Sequence[Tensor], scale: Scalar, stats: Stats | None) -> None:
    """``x = x * scale``."""
    cast_(tensors, tensors, scale, stats)


def cast_(outs: Sequence[Tensor], ins: Sequence[Tensor], scale: Scalar, stats: Stats | None) -> None:
    """``out = cast(in * scale)``."""
    _run(outs, ins, scale, 1.0, None, stats, overwrite=True, cast=True)


def stats(tensors: Sequence[Tensor], into: Stats) -> None:
    """Squared norm and non-finite count."""
    tally = _Tally(tensors)
    with _device_of(tensors[0]):
        for (_, dtype, aligned), rows in _rows(tensors, tensors, None).items():
            table = _Table(rows, (1.0, 1.0), 0, tensors[0].device)
            kernels.measure[(table.blocks,)](
                table.on_device, len(rows), *tally.take(table.blocks), DTYPES[dtype], aligned, BLOCK, **OPTIONS
            )  # fmt: skip
    tally.finish(into)


def _run(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    scale: Scalar,
    decay: Scalar,
    rounding: StochasticRounding | None,
    stats: Stats | None,
    *,
    overwrite: bool,
    cast: bool,
) -> None:
    tally = None if stats is None else _Tally(outs)
    numbers = (1.0 if isinstance(scale, Tensor) else scale, 1.0 if isinstance(decay, Tensor) else decay)
    # Before the launches, so that if one fails, nobody takes the outputs to be unchanged.
    torch.autograd.graph.increment_version([x for x in outs if not x.is_inference()])
    with _device_of(outs[0]):
        doubles = any(x.dtype == torch.float64 for x in outs)  # of which a number may be an element: read from a copy
        device_scale, device_decay = (
            x.to(torch.float64, copy=doubles) if isinstance(x, Tensor) else None for x in (scale, decay)
        )
        for (out, dtype, aligned), rows in _rows(outs, ins, rounding).items():
            table = _Table(rows, numbers, 0 if rounding is None else rounding.seed, outs[0].device)
            # Without statistics nothing is written there, but a kernel's argument must point to something.
            partials, bad = (table.number(0), table.on_device) if tally is None else tally.take(table.blocks)
            kernels.write[(table.blocks,)](
                table.on_device,
                len(rows),
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
                BLOCK,
                **OPTIONS,
            )
    if tally is not None and stats is not None:
        tally.finish(stats)


# The dtypes of an output and of what is read, and may all accesses be of 16 bytes?
Kind = tuple[torch.dtype, torch.dtype, bool]
# The addresses of the two, their elements, the first element's random number.
Row = tuple[int, int, int, int]


def _rows(outs: Sequence[Tensor], ins: Sequence[Tensor], rounding: StochasticRounding | None) -> dict[Kind, list[Row]]:
    """The tensors, by what can share a launch. Each is asked for everything once: that is most of a call's time on the host."""
    rows: dict[Kind, list[Row]] = defaultdict(list)
    counters = itertools.repeat(0) if rounding is None else rounding.counters
    for out, x, counter in zip(outs, ins, counters, strict=False):  # counters may be endless
        if elements := out.numel():
            there, here = out.data_ptr(), x.data_ptr()
            rows[out.dtype, x.dtype, (there | here) % 16 == 0].append((there, here, elements, counter))
    return rows


class _Table:
    """The kernels' table of some tensors, on their device."""

    def __init__(self, rows: list[Row], numbers: tuple[float, float], seed: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "backend='triton' cannot be captured in a CUDA graph, whose replays would read a table of pointers that is gone; "
                "use backend='cuda', or capture without these calls"
            )
        outs, ins, elements, counters = zip(*rows, strict=True)
        ends = list(itertools.accumulate(map(_blocks_of, elements)))
        host = struct.pack(
            f"=2dQ{4 * len(rows)}q{len(rows)}Q", *numbers, seed, *outs, *ins, *elements, 0, *ends[:-1], *counters
        )
        self.blocks = ends[-1]
        # From pageable memory, of which the driver immediately takes a copy, without waiting, if it is at most 64 KiB.
        table = torch.frombuffer(bytearray(host), dtype=torch.int64)
        self.on_device = torch.empty_like(table, device=device)
        for there, piece in zip(self.on_device.split(AT_ONCE), table.split(AT_ONCE), strict=True):
            there.copy_(piece, non_blocking=True)

    def number(self, place: int) -> Tensor:
        """A number of the header, where a kernel reads it as FP64."""
        return self.on_device.view(torch.float64)[place]


def _blocks_of(elements: int) -> int:
    return -(-elements // BLOCK)


class _Tally:
    """The blocks' statistics, which the launches of a call share out among them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        blocks = sum(_blocks_of(x.numel()) for x in tensors)
        device = tensors[0].device
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
