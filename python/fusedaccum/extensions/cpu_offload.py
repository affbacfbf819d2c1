"""Buffers in CPU memory for parameters on another device: a ring of pinned memory between the two, and a thread that adds.

A gradient is packed into the ring's half on its device, in the order of the current stream, and may then be freed or
overwritten. It leaves the device on a separate stream while backward continues, and the CPU's kernels add it once it has arrived.
The ring bounds the memory that gradients take on the device, whatever the model's size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.memory import is_dense
from ..scalars import Scalar

STAGES = 3  # one that fills, one on its way, one that is being added
STAGE_BYTES = 32 << 20  # a power of two, because PyTorch rounds pinned memory up to one
LINE = 64  # bytes: everything in a stage starts at a cache line
HEAD = 2 * LINE  # a stage begins with the scale and the decay, in a line each


class Stage:
    """One piece of the ring: pinned memory, and as much on the device."""

    def __init__(self, device: torch.device):
        self.here = torch.empty(STAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.there = torch.empty(STAGE_BYTES, dtype=torch.uint8, device=device)
        self.busy: Future | torch.Event | None = None  # what still uses it

    def wait(self) -> None:
        """Wait until nothing uses it."""
        if isinstance(self.busy, Future):
            self.busy.result()
        elif self.busy is not None:
            self.busy.synchronize()
        self.busy = None


def view(memory: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements from byte ``begin`` on."""
    return memory[begin : begin + count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Cut:
    """Elements [begin, end) of a tensor of a list, in the order of memory, and where in a stage they lie, in bytes."""

    tensor: int
    begin: int
    end: int
    place: int
    dtype: torch.dtype

    def of(self, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """These elements of a list of dense tensors."""
        tensor = tensors[self.tensor]
        return tensor.as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)

    def within(self, memory: Tensor) -> Tensor:
        """Their place in a stage's memory."""
        return view(memory, self.place, self.end - self.begin, self.dtype)


def loads(tensors: Sequence[Tensor]) -> Iterator[tuple[list[Cut], int]]:
    """Cut all tensors, in order, into lists that fit into a stage; yields each list and the bytes that it fills."""
    load: list[Cut] = []
    used = HEAD
    for number, tensor in enumerate(tensors):
        most = (STAGE_BYTES - HEAD) // tensor.itemsize
        for begin in range(0, tensor.numel(), most):
            end = min(begin + most, tensor.numel())
            needed = -(-(end - begin) * tensor.itemsize // LINE) * LINE
            if used + needed > STAGE_BYTES:
                yield load, used
                load, used = [], HEAD
            load.append(Cut(number, begin, end, used, tensor.dtype))
            used += needed
    if load:
        yield load, used


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the strides of the dense ``like``: itself, if it has them."""
    if (tensor.stride() == like.stride() or tensor.numel() < 2) and not tensor._is_zerotensor():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def recorded(device: torch.device) -> torch.Event:
    """An event on the current stream; where PyTorch can, one that keeps no processor busy while it is waited for."""
    if device.type == "cuda":
        blocking = torch.cuda.Event(blocking=True)
        blocking.record(torch.cuda.current_stream(device))  # older versions take no torch.Stream
        return blocking
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


class Offload:
    """Two of the ops, between another device and the CPU."""

    def __init__(self) -> None:
        self._rings: dict[torch.device, list[Stage]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._thread = ThreadPoolExecutor(1, "fusedaccum-offload")
        self._last: Future | None = None  # the last work that the thread was given
        self._failure: BaseException | None = None

    def accumulate_(
        self,
        buffers: Sequence[Tensor],
        grads: Sequence[Tensor],
        scale: Scalar,
        *,
        overwrite: bool,
        decay: Scalar,
        rounding: ops.StochasticRounding | None,
        stats: ops.Stats | None,
        backend: str,
    ) -> None:
        """:func:`ops.accumulate_` into dense ``buffers`` in CPU memory, of ``grads`` and scalars on one device; ``stats`` must be zeros.

        Gradients are read in the order of the current stream. The buffers and ``stats`` have been written when :meth:`wait`
        returns. Waits if the ring is full. If an exception breaks it off in the middle, :meth:`wait` raises.
        """
        device = grads[0].device
        ring = self._ring(device)
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.Stream(device))
        begun = False
        fitting: dict[int, Tensor] = {}  # the current load's gradients, laid out like their buffers
        try:
            for load, used in loads(grads):
                stage = _free_stage(ring)
                fitting = {
                    n: fitting[n] if n in fitting else laid_out(grads[n], buffers[n])
                    for n in dict.fromkeys(cut.tensor for cut in load)
                }
                torch._foreach_copy_([cut.within(stage.there) for cut in load], [cut.of(fitting) for cut in load])
                numbers = {"scale": _number(scale, 0, stage), "decay": _number(decay, LINE, stage)}
                stream.wait_stream(torch.accelerator.current_stream(device))
                with stream:
                    stage.here[:used].copy_(stage.there[:used], non_blocking=True)
                    arrived = recorded(device)
                draws = None
                if rounding is not None:
                    counters = [(rounding.counters[cut.tensor] + cut.begin) % (1 << 64) for cut in load]
                    draws = ops.StochasticRounding(rounding.seed, counters)
                targets, staged = [cut.of(buffers) for cut in load], [cut.within(stage.here) for cut in load]
                how = {"overwrite": overwrite, "rounding": draws, "backend": backend}
                begun = True
                stage.busy = self.soon(functools.partial(_add, arrived, targets, staged, stats, **numbers, **how))
        except BaseException as error:
            if begun:
                self._failure = error
            raise

    def cast_(self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, backend: str) -> None:
        """:func:`ops.cast_` of ``ins`` in CPU memory to ``outs`` on one device.

        ``ins`` may be overwritten when it returns; the outputs are ready for the current stream, which it does not wait for.
        """
        device = outs[0].device
        ring = self._ring(device)
        dense = [out if is_dense(out) else torch.empty_like(out) for out in outs]
        ins = [laid_out(x, out) for x, out in zip(ins, dense, strict=True)]
        for load, _ in loads(dense):
            stage = _free_stage(ring)
            staged = [cut.within(stage.here) for cut in load]
            ops.cast_(staged, [cut.of(ins) for cut in load], backend=backend)
            for cut, arriving in zip(load, staged, strict=True):
                cut.of(dense).copy_(arriving, non_blocking=True)
            stage.busy = recorded(device)
        for out, filled in zip(outs, dense, strict=True):
            if out is not filled:
                out.copy_(filled)

    def soon(self, work: Callable[[], None]) -> Future:
        """Have the thread do ``work``, after all that it was given before."""

        def guarded() -> None:
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                self._failure = error

        self._last = self._thread.submit(guarded)
        return self._last

    @property
    def failed(self) -> bool:
        """Is it known that something could not be added? Does not wait."""
        return self._failure is not None

    def check(self) -> None:
        """Raises RuntimeError if the thread is known to have failed, until :meth:`forget_failure`; does not wait for it."""
        if self._failure is not None:
            raise RuntimeError(
                "gradients could not be added to the buffers in CPU memory, so what the open window holds is not their sum; "
                "call opt.reset() to drop it, then continue"
            ) from self._failure

    def wait(self) -> None:
        """Wait until the thread has done everything; raises as :meth:`check` does."""
        if self._last is not None:
            self._last.result()
            self._last = None
        self.check()

    def forget_failure(self) -> None:
        """Forget any failure, because what the buffers hold no longer matters."""
        if self._last is not None:
            self._last.result()
        self._failure = None

    def _ring(self, device: torch.device) -> list[Stage]:
        """The device's ring, made with the first gradients, before anything is added."""
        return self._rings.get(device) or self._rings.setdefault(device, [Stage(device) for _ in range(STAGES)])


def _free_stage(ring: list[Stage]) -> Stage:
    """The stage that was used longest ago, once nothing uses it any more."""
    ring[0].wait()
    ring.append(ring.pop(0))
    return ring[-1]


def _add(
    arrived: torch.Event,
    targets: list[Tensor],
    staged: list[Tensor],
    stats: ops.Stats | None,
    **how: Any,
) -> None:
    """Add a load to its buffers, and what it measures to ``stats``."""
    arrived.synchronize()
    part = None if stats is None else ops.Stats.empty("cpu")
    ops.accumulate_(targets, staged, stats=part, **how)
    if stats is not None and part is not None:
        stats.sq_norm.add_(part.sq_norm)
        stats.nonfinite.add_(part.nonfinite)


def _number(scalar: Scalar, place: int, stage: Stage) -> Scalar:
    """The number; if it is on a device, the place in pinned memory where it arrives with the gradients."""
    if not isinstance(scalar, Tensor) or scalar.device.type == "cpu":
        return scalar
    view(stage.there, place, 1, scalar.dtype).copy_(scalar.view(1))
    return view(stage.here, place, 1, scalar.dtype).view(())
