"""Gathering a window's gradient: every arrival is scaled and added to its parameter's buffer, which ``p.grad`` is."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from . import main_grad, ops
from .amp import LossScale
from .buffers import Block, Buffers, Slot
from .norms import SquaredNorms
from .offload import Offload
from .scalars import Scalar, beside, identity, on
from .shards import ShardHolder, alike, local_gradient, local_of, sum_over_shards
from .streams import capturing
from .window import MicroBatch, Window

Write = Callable[
    [Tensor, float, bool], None
]  # (buffer, scale, overwrite): buffer = (overwrite ? 0 : buffer) + scale * gradient
DRAWS_APART = 1 << 44  # random numbers set aside for one add of all parameters, when rounding stochastically


class Accumulator:
    """The buffers of one optimizer and the sums in them.

    Args:
        buffer_dtype, buffer_device, reduction, backend: as :class:`~fusedaccum.AccumulatingOptimizer` has them.
        seed: of the stochastic rounding of 16-bit buffers; None rounds to nearest.
    """

    def __init__(
        self,
        buffer_dtype: torch.dtype | None,
        buffer_device: torch.device | None,
        reduction: str,
        backend: str,
        seed: int | None,
    ):
        self.buffers = Buffers(buffer_dtype, buffer_device)
        self.offload = Offload()
        self.norms = SquaredNorms()
        self.loss_scale = LossScale()
        self.seed = seed
        self._reduction = reduction
        self._backend = backend
        self._warned_dropped = False
        self.changed_by_user = False  # has somebody else written to the window's sums?
        self._first_draw: dict[Slot, int] = {}
        self.lent: list[Slot] = []
        self.sharded = False  # is any slot?
        self.owned_apart = False  # do ranks step a part of the parameters each?
        self.over_owners: Callable[[Tensor], Tensor] = lambda mine: mine  # the sum over such ranks

    def take(self, parameters: Iterable[tuple[str, Parameter]]) -> list[Slot]:
        """Make room for these parameters."""
        slots = self.buffers.add(parameters)
        self.sharded = any(slot.sharded for slot in self.buffers.slots)
        end = sum(local_of(slot.param).numel() for slot in self._first_draw)
        for slot in slots:
            self._first_draw[slot] = end
            end += local_of(slot.param).numel()
        lent = [slot for slot in slots if slot.lent]
        if lent:
            self.lent += lent
            weakref.finalize(self, main_grad.take_back, [slot.param for slot in lent]).atexit = False
        return slots

    def leave(self, slots: Sequence[Slot]) -> None:
        """Undo :meth:`take` of the last ones, which cannot be gathered."""
        del self.buffers.slots[-len(slots) :]
        for slot in slots:
            del self.buffers.of[slot.param], self._first_draw[slot]

    # -- adding ------------------------------------------------------------------------------------------------

    def add(
        self, slots: Sequence[Slot], grads: Sequence[Tensor], window: Window, micro: MicroBatch, measure: bool
    ) -> None:
        """``buffer += c * g`` for a bucket: one call a device and kind of add; the first touch of a parameter overwrites.

        ``measure``: take the buffers' squared norm, and count what is not finite, on the way.
        """
        self.place(slots)
        self._added_before(slots, window, micro, measure)
        self.adopt_all(slots)
        if self.sharded:
            grads = [local_gradient(grad, slot.param) for slot, grad in zip(slots, grads, strict=True)]
        if micro.divisor is None:
            micro.divisor = running_divisor(self._reduction, window, micro)
        scale = self._contribution(window, micro)
        for (device, first, narrow, *_), members, theirs in one_call_each(slots, grads):
            divisor = micro.divisor if narrow else 1.0
            here = scale * members[0].factor
            stats = ops.Stats.empty(members[0].device) if measure else None
            accumulate_ = self.offload.accumulate_ if members[0].offloaded else ops.accumulate_
            accumulate_(
                [slot.buffer for slot in members],
                theirs,
                on(here / divisor if narrow else here, device),
                overwrite=first,
                decay=1.0 if first else on(members[0].divisor / divisor, device),
                rounding=self._rounding(members) if narrow else None,
                stats=stats,
                backend=self._backend,
            )
            micro.adds += 1  # after a call: one that raises, for want of memory say, has added nothing
            if micro.attempt is not None:
                micro.attempt.taken.update(members)
            self.written(members, divisor, shown=not first)
            if stats is not None:
                self._measured(stats, members, divisor, micro)

    def add_by(self, write: Write, slot: Slot, window: Window, micro: MicroBatch, measure: bool) -> bool:
        """Let ``write`` add a gradient that it makes itself to a buffer of 32 bits or more.

        False, and nothing done, where the gradient's factor is 0, or not known to the host.
        """
        scale = self._contribution(window, micro)
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            return False
        scale = float(scale)
        if scale == 0:
            return False
        self.place([slot])
        self._added_before([slot], window, micro, measure)
        self.adopt(slot)
        if slot.shown is not None:
            self.divide_([slot], 1.0)  # normalize_() may have made it a mean
        write(slot.buffer, scale, slot.shown is None)
        micro.adds += 1
        self.written([slot], 1.0)
        if measure:
            self._measure(slot, micro)
        return True

    def added(self, slot: Slot, window: Window, micro: MicroBatch, measure: bool) -> None:
        """The layer of a slot that is lent has added its gradient, times 1. Waits for the device where a loss scale is there."""
        scale = float(self._contribution(window, micro))
        slot.check_added(scale)
        self._notice_writes(slot)
        if scale == 0.0:  # the window is not going to be applied: nothing more is let in
            slot.buffer.zero_()
        micro.adds += 1
        self.written([slot], 1.0)
        if measure:
            self._measure(slot, micro)

    def _added_before(self, slots: Sequence[Slot], window: Window, micro: MicroBatch, measure: bool) -> None:
        """Something else comes for ``slots``, to be added to what their layers have added in this pass."""
        if self.lent:
            for slot in slots:
                if slot.lent and main_grad.added(slot.param):
                    self.added(slot, window, micro, measure)

    @property
    def added_unseen(self) -> bool:
        """Has a layer added a gradient that never arrived, because its pass was broken off?"""
        return any(main_grad.added(slot.param) for slot in self.lent)

    def lend(self, slots: Sequence[Slot]) -> None:
        """Give the layers of ``slots`` that add by themselves their buffers for the next window, filled with zeros."""
        self.buffers.allocate(slots)  # by themselves: they are zeroed while p.grad of others is still shown
        stale = [slot for slot in slots if not slot.clean or main_grad.added(slot.param)]
        if stale:
            torch._foreach_zero_([slot.buffer for slot in stale])
            self.written(stale, 1.0)
        for slot in slots:
            slot.show(None)
            slot.clean = True
            main_grad.lend(slot.param, slot.buffer)

    def _measure(self, slot: Slot, micro: MicroBatch) -> None:
        self._measured(ops.stats([slot.buffer], backend=self._backend), [slot], 1.0, micro)

    def _measured(self, stats: ops.Stats, slots: Sequence[Slot], divisor: Scalar, micro: MicroBatch) -> None:
        """``stats`` are of the buffers of ``slots``, which this micro-batch was the last to write."""
        self.norms.record(stats, slots, divisor)
        micro.counts.append(stats.nonfinite)

    def count(self, micro: MicroBatch) -> None:
        """Make what the adds of a micro-batch have counted its number of what is not finite. Waits where gradients are offloaded."""
        self.offload.wait()
        for found in micro.counts:
            there = micro.nonfinite.device if isinstance(micro.nonfinite, Tensor) else found.device
            micro.nonfinite = micro.nonfinite + on(found, there)
        micro.counts = []

    def check(self) -> None:
        """Raises RuntimeError where a parameter has changed, or its gradients could not be added."""
        self.buffers.check_unchanged()
        self.offload.check()

    @property
    def half_written(self) -> bool:
        """Has a call that raised written some of what it was to write?"""
        return self.offload.failed or not all(block.untouched_by_user for block in self.buffers.blocks)

    def place(self, slots: Sequence[Slot]) -> None:
        """Give ``slots`` storage: together with all trainable parameters, so that these share it."""
        if not all(slot.placed for slot in slots):
            self.buffers.allocate([slot for slot in self.buffers.slots if slot.param.requires_grad])
            self.buffers.allocate(slots)

    def _contribution(self, window: Window, micro: MicroBatch) -> Scalar:
        """The factor of this micro-batch's gradients: its weight, in the window's unit; 0 where nothing more shall be added."""
        if window.overflowed:
            return 0.0
        scale = micro.value() if self._reduction == "mean" and not micro.in_loss else 1.0
        if window.unit is not None:
            scale = scale * beside(window.unit, scale)
            if self.loss_scale.live is not None:
                scale = scale / beside(self.loss_scale.live, scale)
        return scale

    def _rounding(self, slots: Sequence[Slot]) -> ops.StochasticRounding | None:
        if self.seed is None:
            return None
        if capturing(slots[0].device):
            raise RuntimeError(
                "rounding='stochastic' cannot be captured in a CUDA graph: every replay would draw the same numbers; "
                "use rounding='nearest', or FP32 buffers (buffer_dtype=torch.float32)"
            )
        counters = [(slot.draws * DRAWS_APART + self._first_draw[slot]) % (1 << 64) for slot in slots]
        for slot in slots:
            slot.draws += 1
        return ops.StochasticRounding(self.seed, counters)

    def written(self, slots: Sequence[Slot], divisor: Scalar, shown: bool = False) -> None:
        """``slots`` now hold a sum of ours, over ``divisor``, and show it (have shown it before)."""
        self.norms.forget(slots)
        for block in {slot.block for slot in slots}:
            block.written()
        for slot in slots:
            slot.divisor, slot.clean = divisor, False
            if not shown:
                slot.show(slot.buffer)

    def adopt_all(self, slots: Sequence[Slot]) -> None:
        """:meth:`adopt` every slot; at once where, as nearly always, nobody else has touched any."""
        untouched = all(block.untouched_by_user for block in self.buffers.blocks)
        if not (untouched and all(slot.holder.grad is slot.shown for slot in slots)):
            for slot in slots:
                self.adopt(slot)

    def adopt(self, slot: Slot) -> None:
        """Take over what somebody else has put into ``p.grad``, as part of the running sum; notice what he took away."""
        if slot.placed:
            self._notice_writes(slot)
        grad, shown = slot.holder.grad, slot.shown
        if grad is shown:
            return
        self.changed_by_user = True
        if grad is None:
            slot.shown = None
            self._warn_dropped(slot)
            return
        if grad.layout is not torch.strided:
            raise RuntimeError(f"{slot.name}.grad is {grad.layout}; only dense gradients can be accumulated")
        self.place([slot])
        if self._is_ours(grad):
            # In our own storage: a view of some p.grad, two that were swapped. All such get memory of their own first.
            for other in self.buffers.slots:
                theirs = other.param.grad
                if theirs is not None and theirs is not other.shown and self._is_ours(theirs):
                    other.param.grad = theirs.clone()
            return self.adopt(slot)
        ops.cast_([slot.buffer], [grad.detach()], backend=self._backend)
        self.written([slot], slot.divisor if shown is not None else 1.0)

    def _notice_writes(self, slot: Slot) -> None:
        if not slot.block.untouched_by_user:
            self.changed_by_user = True
            self.norms.forget_block(slot.block)
            slot.block.written()

    def _is_ours(self, grad: Tensor) -> bool:
        memory = grad.untyped_storage().data_ptr()
        return any(memory == block.flat.untyped_storage().data_ptr() for block in self.buffers.blocks)

    def _warn_dropped(self, slot: Slot) -> None:
        if not self._warned_dropped:
            self._warned_dropped = True
            warnings.warn(
                f"{slot.name}.grad was set to None inside an open window (by model.zero_grad()?): what the window had gathered for such "
                "parameters is dropped. opt.zero_grad() keeps it; opt.reset() drops the whole window. Said once.",
                RuntimeWarning,
                stacklevel=3,
            )

    # -- the window's ends -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start from nothing: the gradients of the window before, still shown, go; the user's own stay, to be adopted."""
        for slot in self.buffers.slots:
            if slot.shown is not None and slot.holder.grad is slot.shown:
                slot.holder.grad = None
            slot.shown, slot.divisor = None, 1.0
        self.changed_by_user = False
        self.norms.forget_all()
        self.offload.forget_failure()

    def clear(self) -> None:
        """Take every gradient out of ``p.grad``, whoever put it there."""
        for slot in self.buffers.slots:
            slot.holder.grad = slot.shown = None

    def shown_as_is(self) -> None:
        """Whatever ``p.grad`` is now belongs to the window that has closed, also where a step hook has replaced it."""
        for slot in self.buffers.slots:
            slot.shown = slot.holder.grad

    def gathered(self) -> list[Slot]:
        """The slots that hold a gradient now, each in its buffer."""
        self.offload.wait()
        self.adopt_all(self.buffers.slots)
        return self.buffers.gathered()

    def restore(self, slot: Slot, saved: Tensor, divisor: Scalar) -> None:
        """Put a saved sum back."""
        self.place([slot])
        slot.buffer.copy_(saved)
        self.written([slot], divisor)

    def zero_(self, slots: Sequence[Slot]) -> None:
        """Make the sums of ``slots`` zero."""
        self.place(slots)
        torch._foreach_zero_([slot.buffer for slot in slots])
        self.written(slots, 1.0)

    def sq_norm(self, slots: Sequence[Slot]) -> Tensor:
        """Sum of squares of the sums of ``slots``; free where the last adds have measured it. Shards are summed over their ranks."""
        if not self.sharded:
            return self.over_owners(self.norms.total(slots, self._backend))
        groups: dict[tuple | None, list[Slot]] = {
            alike(slot): [] for slot in self.buffers.slots
        }  # the same on all ranks
        for slot in slots:
            groups[alike(slot)].append(slot)
        parts = []
        for key, members in groups.items():
            part = self.norms.total(members, self._backend)
            if key is not None:
                first = next(slot for slot in self.buffers.slots if alike(slot) == key)
                part = sum_over_shards(part.to(first.device), first)
            parts.append(part)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum()

    def unhide(self) -> None:
        """Show what is hidden from FSDP2."""
        for slot in self.buffers.slots if self.sharded else ():
            if isinstance(slot.holder, ShardHolder):
                slot.holder.unhide()

    def hide(self) -> None:
        """Hide the sums of shards while a pass may bring gradients."""
        for slot in self.buffers.slots:
            if isinstance(slot.holder, ShardHolder):
                slot.holder.hide()

    def count_nonfinite(self, grads: Iterable[Tensor]) -> int:
        """How many elements are NaN or infinite; waits for the device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in grads:
            by_device.setdefault(grad.device, []).append(grad)
        return sum(int(ops.stats(batch, backend=self._backend).nonfinite) for batch in by_device.values())

    def divide_(self, slots: Sequence[Slot], divisor: Scalar, coef: Scalar = 1.0) -> None:
        """Make each buffer ``coef * sum / divisor``: one pass, and none where that changes nothing."""
        calls: dict[tuple, list[Slot]] = {}
        for slot in slots:
            calls.setdefault((slot.device, identity(slot.divisor)), []).append(slot)
        for members in calls.values():
            scale = coef * members[0].divisor / divisor
            if isinstance(scale, Tensor) or scale != 1.0:
                ops.scale_([slot.buffer for slot in members], on(scale, members[0].device), backend=self._backend)
            self.written(members, divisor)

    @contextmanager
    def brought(self, slots: Sequence[Slot]) -> Iterator[None]:
        """Within, ``p.grad`` of offloaded ``slots`` is a copy of what their buffers show, on the parameters' device."""
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in slots:
            by_device.setdefault(slot.param.device, []).append(slot)
        try:
            for device, members in by_device.items():
                shown = [slot.shown for slot in members if slot.shown is not None]
                grads = [torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device=device) for g in shown]
                self.offload.cast_(grads, shown, backend=self._backend)
                for slot, grad in zip(members, grads, strict=True):
                    slot.param.grad = grad
            yield
        finally:
            for slot in slots:
                slot.param.grad = None

    def finish_(
        self, slots: Sequence[Slot], divisor: Scalar, coef: Scalar, masters: Mapping[Parameter, Parameter]
    ) -> None:
        """Make ``p.grad`` the gradient ``coef * sum / divisor`` that the inner optimizer takes, in the dtype of what it steps.

        A dtype narrower than the buffer's goes into the buffer's own storage; the scaling is part of that cast.
        """
        same: list[Slot] = []
        cast: dict[Block, list[Slot]] = {}
        for slot in slots:
            if slot.dtype == masters.get(slot.param, slot.param).dtype:
                same.append(slot)
            else:
                cast.setdefault(slot.block, []).append(slot)
        self.divide_(same, divisor, coef)
        for block, members in cast.items():
            if len({identity(slot.divisor) for slot in members}) > 1:
                self.divide_(members, divisor)
            stepped = masters.get(members[0].param, members[0].param)
            scale = on(coef * members[0].divisor / divisor, members[0].device)
            block.narrow_(stepped.dtype, scale, members, self._backend)
            self._notice_writes(members[0])
            for slot in self.lent:
                slot.clean = slot.clean and slot.block is not block


def one_call_each(
    slots: Sequence[Slot], grads: Sequence[Tensor]
) -> Iterator[tuple[tuple, Sequence[Slot], Sequence[Tensor]]]:
    """``(gradients' device, first touch, narrow, divisor, factor)`` of each call that an add takes, and its slots and gradients."""
    calls: dict[tuple, list[int]] = {}
    firsts = [slot.shown is None for slot in slots]
    same = len({slot.block for slot in slots}) == len(set(firsts)) == 1 and not (slots[0].narrow or slots[0].sharded)
    for i in [0] if same else range(len(slots)):
        slot, first = slots[i], firsts[i]
        key = (slot.made_for[1], first, slot.narrow, None if first else identity(slot.divisor), slot.factor)
        calls.setdefault(key, []).append(i)
    if len(calls) == 1:  # as nearly always
        yield key, slots, grads
        return
    for key, members in calls.items():
        yield key, [slots[i] for i in members], [grads[i] for i in members]


def running_divisor(reduction: str, window: Window, micro: MicroBatch) -> Scalar:
    """What 16-bit buffers are divided by after this micro-batch, so that they hold a mean that cannot overflow where the window's fits."""
    if reduction == "none":
        return 1.0
    if reduction == "sum":
        return window.micro_batches + 1.0
    total = window.weight + micro.value()
    return torch.where(total > 0, total, 1.0) if isinstance(total, Tensor) else total or 1.0
