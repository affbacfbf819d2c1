"""Buffers in CPU memory for parameters on another device: a ring of pinned memory between the two, and a thread that adds.

Gradients leave their device on a stream of their own while backward goes on, and the CPU's kernels add them as they arrive. What they
take on the device is bounded by the ring, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .buffers import is_dense
from .window import Scalar

STAGES = 3  # one that fills, one on its way, one that is being added
STAGE_BYTES = 32 << 20
LINE = 64  # bytes: what starts in a stage starts at a cache line


class Stage:
    """One piece of the ring."""

    def __init__(self) -> None:
        self._memory = torch.empty(STAGE_BYTES + 2 * LINE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.busy: Future | torch.Event | None = None  # what uses it still

    def view(self, begin: int, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` elements from byte ``begin`` on."""
        return self._memory[begin : begin + count * dtype.itemsize].view(dtype)

    def wait(self) -> None:
        """Until nobody uses it."""
        if isinstance(self.busy, Future):
            self.busy.result()
        elif self.busy is not None:
            self.busy.synchronize()
        self.busy = None


@dataclass(frozen=True)
class Cut:
    """Elements [begin, end) of a list's tensor, and where in a stage they lie, in bytes."""

    tensor: int
    begin: int
    end: int
    place: int


def loads(tensors: Sequence[Tensor]) -> Iterator[list[Cut]]:
    """The elements of all tensors, in order, in lists that fit into a stage."""
    load: list[Cut] = []
    used = 0
    for number, tensor in enumerate(tensors):
        most = STAGE_BYTES // tensor.itemsize
        for begin in range(0, tensor.numel(), most):
            end = min(begin + most, tensor.numel())
            needed = -(-(end - begin) * tensor.itemsize // LINE) * LINE
            if used + needed > STAGE_BYTES:
                yield load
                load, used = [], 0
            load.append(Cut(number, begin, end, used))
            used += needed
    if load:
        yield load


def flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the strides of the dense ``like``: itself, where it has them."""
    if (tensor.stride() == like.stride() or tensor.numel() < 2) and not tensor._is_zerotensor():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Offload:
    """Two of the ops, between another device and the CPU."""

    def __init__(self) -> None:
        self._ring: list[Stage] = []
        self._streams: dict[torch.device, torch.Stream] = {}
        self._thread = ThreadPoolExecutor(1, "fusedaccum-offload")
        self._last: Future | None = None  # of what the thread was given
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
        """:func:`ops.accumulate_` into ``buffers`` in CPU memory, of ``grads`` and scalars on a device; ``stats`` must be zeros.

        Returns when the gradients are on their way: the buffers, and ``stats``, are written by the time that :meth:`wait` returns. Waits
        where the ring is full. Gradients are read on the current stream's time, and may be freed at once.
        """
        device = grads[0].device
        self._make_ring()  # first, with all else that may fail: what raises has added nothing
        grads = [flat(laid_out(grad, buffer)) for grad, buffer in zip(grads, buffers, strict=True)]
        buffers = [flat(buffer) for buffer in buffers]
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.Stream(device))
        for load in loads(grads):
            stage = self._free_stage()
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                staged = []
                for cut in load:
                    grad = grads[cut.tensor]
                    staged.append(stage.view(cut.place, cut.end - cut.begin, grad.dtype))
                    staged[-1].copy_(grad[cut.begin : cut.end], non_blocking=True)
                    grad.record_stream(stream)
                numbers = [
                    _fetched(scalar, stage, STAGE_BYTES + k * LINE, stream) for k, scalar in enumerate((scale, decay))
                ]
                arrived = torch.Event(device, blocking=True)  # which does not take a processor to wait
                arrived.record(stream)
            targets = [buffers[cut.tensor][cut.begin : cut.end] for cut in load]
            draws = None
            if rounding is not None:
                counters = [(rounding.counters[cut.tensor] + cut.begin) % (1 << 64) for cut in load]
                draws = ops.StochasticRounding(rounding.seed, counters)

            def add(
                arrived: torch.Event = arrived,
                targets: list[Tensor] = targets,
                staged: list[Tensor] = staged,
                numbers: list[Scalar] = numbers,
                draws: ops.StochasticRounding | None = draws,
            ) -> None:
                arrived.synchronize()
                part = None if stats is None else ops.Stats.empty("cpu")
                scale, decay = numbers
                ops.accumulate_(
                    targets,
                    staged,
                    scale,
                    overwrite=overwrite,
                    decay=decay,
                    rounding=draws,
                    stats=part,
                    backend=backend,
                )
                if stats is not None and part is not None:
                    stats.sq_norm.add_(part.sq_norm)
                    stats.nonfinite.add_(part.nonfinite)

            stage.busy = self.soon(add)

    def cast_(self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, backend: str) -> None:
        """:func:`ops.cast_` of ``ins`` in CPU memory to ``outs`` on a device.

        ``ins`` may be overwritten when it returns; the outputs are there for the current stream, which nobody waits for.
        """
        self._make_ring()
        dense = [out if is_dense(out) else torch.empty_like(out) for out in outs]
        ins = [flat(laid_out(x, out)) for x, out in zip(ins, dense, strict=True)]
        flat_outs = [flat(out) for out in dense]
        for load in loads(flat_outs):
            stage = self._free_stage()
            staged = [stage.view(cut.place, cut.end - cut.begin, flat_outs[cut.tensor].dtype) for cut in load]
            ops.cast_(staged, [ins[cut.tensor][cut.begin : cut.end] for cut in load], backend=backend)
            for cut, there in zip(load, staged, strict=True):
                flat_outs[cut.tensor][cut.begin : cut.end].copy_(there, non_blocking=True)
            stage.busy = torch.accelerator.current_stream(outs[0].device).record_event()
        for out, filled in zip(outs, dense, strict=True):
            if out is not filled:
                out.copy_(filled)

    def soon(self, work: Callable[[], None]) -> Future:
        """Have ``work`` done by the thread, after all that it was given before."""

        def guarded() -> None:
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                self._failure = error

        self._last = self._thread.submit(guarded)
        return self._last

    def wait(self) -> None:
        """Until the thread has done everything. Raises RuntimeError where it could not, until :meth:`forget_failure`."""
        if self._last is not None:
            self._last.result()
            self._last = None
        if self._failure is not None:
            raise RuntimeError(
                "gradients could not be added to the buffers in CPU memory, so what the open window holds is not their sum; "
                "call opt.reset() to drop it, then go on"
            ) from self._failure

    def forget_failure(self) -> None:
        """What the buffers hold does not matter any more."""
        if self._last is not None:
            self._last.result()
        self._failure = None

    def _make_ring(self) -> None:
        if not self._ring:
            self._ring = [Stage() for _ in range(STAGES)]

    def _free_stage(self) -> Stage:
        """The stage that was used longest ago, when nobody uses it any more."""
        stage = self._ring.pop(0)
        self._ring.append(stage)
        stage.wait()
        return stage


def _fetched(scalar: Scalar, stage: Stage, place: int, stream: torch.Stream) -> Scalar:
    """A number that is on its way to ``stage`` too, where a device has it."""
    if not isinstance(scalar, Tensor) or scalar.device.type == "cpu":
        return scalar
    scalar.record_stream(stream)
    return stage.view(place, 1, scalar.dtype).copy_(scalar.view(1), non_blocking=True).view(())
