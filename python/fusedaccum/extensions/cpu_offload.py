"""Buffers in CPU memory for parameters elsewhere: a ring of pinned memory, and a thread that adds.

A gradient is packed into the ring's half on its device, in the order of the current stream, and may
then be freed or overwritten. It leaves the device on a separate stream while backward continues,
and the CPU's kernels add it once it has arrived. The ring bounds the memory that gradients take on
the device, whatever the model's size.

``p.grad`` cannot be on another device than its parameter, so it is None but for the inner
optimizer's step. To this the sums are brought part by part, unless what it steps are master
weights, which are in CPU memory themselves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import limits, ops
from ..core.apply import Conclusion
from ..core.buffers import BufferOps, Slot
from ..core.extension import Extension
from ..distributed.shards import is_shard
from ..inner import steps_each_alone
from ..ops import backends
from ..scalars import Scalar
from .ring import LINE, Rings, Stage, free_stage, laid_out, loads, recorded, send, view

if TYPE_CHECKING:
    from ..core.config import Settings


class StandIn:
    """Shows the sum of a parameter that is on another device."""

    grad: Tensor | None = None


class CpuOffload(BufferOps, Extension):
    """Has buffers in CPU memory for parameters on other devices, and two ops between these."""

    def __init__(self) -> None:
        self._rings = Rings()
        self._streams: dict[torch.device, torch.Stream] = {}
        self._thread = ThreadPoolExecutor(1, "fusedaccum-offload")
        self._last: Future | None = None  # the last work that the thread was given
        self._failure: BaseException | None = None  # why something could not be added
        self._stepped: frozenset[int] = frozenset()  # indices of the slots that the window being applied has stepped

    # -- what it does not work with ----------------------------------------------------------------

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        backend = backends.check(settings.backend)
        if backend in ("cuda", "triton"):
            how = "backend" if settings.backend == backend else "the environment variable FUSEDACCUM_BACKEND"
            raise ValueError(f"{how}={backend!r} adds on a GPU, and with buffer_device='cpu' the CPU does; use 'auto'")

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        if is_shard(parameter):
            raise ValueError(
                f"buffer_device='cpu' does not work with parameter {name}, which is a DTensor; leave it out, or use "
                "FSDP2's CPUOffloadPolicy"
            )

    def check_shared(self) -> None:
        if self.accumulation.settings.shard:
            raise ValueError("shard=True does not work with buffer_device='cpu'; leave one of them out")

    def check_shown(self, why: str, instead: str) -> None:
        if self.accumulation.sums.buffers.private:
            raise RuntimeError(f"{why}, which is None with buffer_device='cpu'; {instead}, or leave buffer_device out")

    # -- parameters --------------------------------------------------------------------------------

    def slot_made(self, slot: Slot) -> None:
        device = self.accumulation.settings.buffer_device
        if device is not None and slot.device != device:
            slot.device, slot.holder, slot.private, slot.ops = device, StandIn(), True, self

    # -- adding ------------------------------------------------------------------------------------

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
        """:func:`ops.accumulate_` into dense ``buffers`` in CPU memory.

        ``grads`` and scalars are on one device. Gradients are read in the order of the current
        stream. The buffers and ``stats`` have been written when :meth:`finish_adds` returns. Waits
        if the ring is full. If an exception breaks it off in the middle, that raises.
        """
        device = grads[0].device
        ring = self._rings[device]
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.Stream(device))
        if stats is not None:
            stats.sq_norm.zero_(), stats.nonfinite.zero_()
        begun = False
        fitting: dict[int, Tensor] = {}  # the current load's gradients, laid out like their buffers
        try:
            for load, used in loads(grads):
                stage = free_stage(ring)
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

        As :func:`ring.send` has it.
        """
        send(self._rings[outs[0].device], outs, ins, backend)

    def scale_(self, buffers: Sequence[Tensor], scale: Scalar, *, backend: str) -> None:
        """:func:`ops.scale_` of buffers, which are in CPU memory; so is all that it needs."""
        ops.scale_(buffers, scale, backend=backend)

    def stats(self, buffers: Sequence[Tensor], *, backend: str) -> ops.Stats:
        """:func:`ops.stats` of buffers."""
        return ops.stats(buffers, backend=backend)

    def soon(self, work: Callable[[], None]) -> Future:
        """Have the thread do ``work``, after all that it was given before."""

        this = weakref.ref(self)  # because work that is left when the wrapper goes must not keep the model

        def guarded() -> None:
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                if (offload := this()) is not None:
                    offload._failure = error

        self._last = self._thread.submit(guarded)
        return self._last

    def finish_adds(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None
        self._check_added()

    def half_added(self) -> bool:
        return self._failure is not None

    def check_sums(self) -> None:
        for slot in self.accumulation.sums.buffers.slots:
            if slot.private and slot.param.grad is not None:
                raise RuntimeError(
                    f"{slot.name}.grad was set by hand, but its gradients accumulate on the {slot.device} "
                    "(buffer_device); set it to None, or leave buffer_device out"
                )
        self._check_added()

    def _check_added(self) -> None:
        """Raises RuntimeError if the thread is known to have failed, until :meth:`sums_dropped`.

        Does not wait for it.
        """
        if self._failure is not None:
            raise RuntimeError(
                "gradients could not be added to the buffers in CPU memory, so what the open window holds is not their "
                "sum; call opt.reset() to drop it, then continue"
            ) from self._failure

    def sums_dropped(self) -> None:
        if self._last is not None:
            self._last.result()
        self._failure, self._stepped = None, frozenset()

    # -- the inner optimizer's step ----------------------------------------------------------------

    def step_inner(self, end: Conclusion, step: Callable[[], None]) -> bool:
        """One call for each part of the gradients, where sums have to be brought to the device."""
        away = [slot for slot in end.slots if slot.private and slot.stepped is slot.param]
        if not away:
            return False
        left = [slot for slot in away if slot.index not in self._stepped]
        brought = set(away)
        here = [slot for slot in end.slots if slot not in brought]  # stepped with the first part
        for part in (
            limits.in_parts(left, _nbytes, limits.STAGE) if steps_each_alone(self.inner) else filter(None, [left])
        ):
            with without_gradients([slot for slot in here if slot.index in self._stepped]), self.brought(part):
                done = self._stepped.union([slot.index for slot in (*part, *here)])
                step()
                self._stepped = done  # no call comes between, where Ctrl-C could
        return True

    def window_reported(self, end: Conclusion) -> None:
        self._stepped = frozenset()

    @contextmanager
    def brought(self, slots: Sequence[Slot]) -> Iterator[None]:
        """In the block, ``p.grad`` is a copy of what the slot shows, on the parameter's device."""
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in slots:
            by_device.setdefault(slot.param.device, []).append(slot)
        try:
            for device, members in by_device.items():
                shown = [slot.shown for slot in members if slot.shown is not None]
                grads = [torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device=device) for g in shown]
                self.cast_(grads, shown, backend=self.accumulation.sums.backend)
                for slot, grad in zip(members, grads, strict=True):
                    slot.assign(slot.param, grad)
            yield
        finally:
            for slot in slots:
                slot.param.grad = None


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


def _nbytes(slot: Slot) -> int:
    return slot.param.nbytes


def _number(scalar: Scalar, place: int, stage: Stage) -> Scalar:
    """The number; if it is on a device, where in pinned memory it arrives with the gradients."""
    if not isinstance(scalar, Tensor) or scalar.device.type == "cpu":
        return scalar
    view(stage.there, place, 1, scalar.dtype).copy_(scalar.view(1))
    return view(stage.here, place, 1, scalar.dtype).view(())


@contextmanager
def without_gradients(slots: list[Slot]) -> Iterator[None]:
    """In the block, ``p.grad`` of these slots is None."""
    grads = [slot.param.grad for slot in slots]
    for slot in slots:
        slot.param.grad = None
    try:
        yield
    finally:
        for slot, grad in zip(slots, grads, strict=True):
            slot.param.grad = grad
