"""Micro-batches from their first gradient to their place in the window: opened, added or rejected, counted."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from ..autograd.collector import GradCollector
from ..autograd.passes import passes_seen, saw_pass
from ..engine import recording, runs, within_backward, without_grad
from ..scalars import Scalar
from ..warn import warn
from .buffers import Slot
from .config import Settings
from .extension import Extensions, LossFrom
from .rejected import Rejected
from .window import MicroBatch
from .windows import Windows

_ACCUMULATION_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to a Accumulation


class Accumulation(Windows):
    """Windows that accumulate the gradients of backward passes, micro-batch by micro-batch. A GradCollector's Owner.

    Attributes:
        inside: is the caller within ``micro_batch()``?
        refuses_backward: the call in which the inner optimizer is at work on a window that has closed, so that a backward would belong
            to the next one.
        rejected: the micro-batches that were rejected since the last ``step()``.
    """

    def __init__(self, settings: Settings, seed: int | None, extensions: Extensions):
        super().__init__(settings, seed, extensions)
        self.inside = False
        self.refuses_backward: FrameType | None = None
        self._adds_before = 0  # of the open micro-batch, when the pass (or group of passes) under way began
        self._holds = any(e.holds for e in extensions.all)
        self._collector = GradCollector(self, hold=self._holds)
        self.rejected = Rejected()
        self._idle: MicroBatch | None = None  # one whose block was left without a backward
        self._block: tuple[Scalar | None, bool, bool] = (None, False, False)  # what the latest grouped() gave to open()
        self._warned_unweighed = self._warned_kept = False

    def add_parameters(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Accumulate the gradients of these parameters, too, from now on. Raises as extensions do."""
        before = list(self.sums.buffers.slots)
        slots = self.sums.buffers.add(parameters)
        try:
            for come in self.extensions.parameters_come:
                come(slots, False)
        except Exception:
            self.sums.buffers.replace(before)
            raise
        self._hook(slots)
        self._tell_added(slots)

    def _tell_added(self, slots: Sequence[Slot]) -> None:
        for added in self.extensions.parameters_added:
            added(slots)

    def replace(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """Accumulate the gradients of these parameters, which checkpoints will know in this order, and of no others.

        Raises ValueError if the ranks' parameters differ, RuntimeError if they share an open window.
        """
        if self.ledger.is_open and not self.ranks.alone:
            raise RuntimeError(
                "inside a window that ranks share, an assignment to opt.param_groups can only add parameters after the others; this one "
                "removes, replaces or reorders some: assign when a step(), flush() or reset() has closed the window on all ranks"
            )
        buffers = self.sums.buffers
        places = {slot: slot.index for slot in buffers.slots}
        slots = buffers.arrange(parameters)
        buffers.replace(slots)
        try:
            for come in self.extensions.parameters_come:
                come(slots, True)
        except Exception:
            buffers.replace(list(places))
            raise
        for moved in self.extensions.parameters_moved:
            moved({places[slot]: slot.index for slot in slots if slot in places})
        gone = [slot for slot in places if slot.param not in buffers.of]
        self.sums.drop(gone)
        self._unhook(gone)
        if not self.ledger.is_open:
            self.sums.begin()
            buffers.free()
        new = [slot for slot in slots if slot not in places]
        self._hook(new)
        self._tell_added(new)

    def shows(self, parameter: Parameter) -> bool:
        """True if what is in ``p.grad`` is what this wrapper has accumulated, and not other code's."""
        slot = self.sums.buffers.of[parameter]
        return slot.holder.grad is slot.shown

    def let_go(self) -> None:
        """Have no parameters any more; the open window is dropped."""
        self._collector.drop()
        self.rejected.withdraw()
        self.ledger.drop_window()
        self.sums.begin()  # the gradient that a closed window has left in p.grad is gone
        self._unhook(self.sums.buffers.slots)
        self.sums.buffers.replace([])
        self._tell_changed([])
        self.sums.buffers.free()

    def _hook(self, slots: Sequence[Slot]) -> None:
        self._tell_changed(slots)
        with recording():
            for slot in slots:
                self._collector.hook(slot)
                _ACCUMULATION_OF[slot.param] = weakref.ref(self)
        self._collector.size_buckets(self.sums.buffers.slots, shared=not self.ranks.alone)

    def _tell_changed(self, new: Sequence[Slot]) -> None:
        for changed in self.extensions.parameters_changed:
            changed(new)

    def _unhook(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._collector.unhook(slot)
            del _ACCUMULATION_OF[slot.param]

    def check_call(self) -> None:
        """Raises RuntimeError if the wrapper is not to be called."""
        for check in self.extensions.check_call:
            check()

    def end_open_pass(self) -> None:
        """Every public call begins here: a pass that still seems open is over, or was broken off; ``p.grad`` is ours again."""
        self.check_call()
        if within_backward():
            raise RuntimeError(
                "the wrapper was called from inside a backward pass (by a hook?); call it when backward has returned"
            )
        self._collector.end_open_pass()
        self._tell_over()
        if self._unfinished():
            self._break_off("was broken off by an exception (or its gradients were taken by torch.autograd.grad)")
        self.rejected.withdraw()

    def check(self) -> None:
        """Raises RuntimeError if a parameter has changed, gradients have gone past the hooks, or sums are lost."""
        self.sums.check()
        self._collector.check_hooked()
        self.sums.follow_copied()

    @property
    def outdated(self) -> bool:
        """True if the wrapper must be built again, for parameters that were moved, or cast, or for what extensions have found."""
        moved = self.sums.buffers.moved or bool(self._collector.unhooked)
        return moved or any(outdated() for outdated in self.extensions.outdated)

    def reset(self) -> None:
        self._collector.drop()
        self.rejected.withdraw()
        self.rejected = Rejected()
        super().reset()

    # -- a micro-batch -----------------------------------------------------------------------------------------

    def open(self, weight: Scalar | None, last: bool = False, in_loss: bool = False) -> bool:
        """Open a micro-batch (and return True), or join the one that is open already. Raises as Ledger.weigh does.

        ``in_loss``: the losses of its passes are multiplied by the weight.
        """
        ledger = self.ledger
        if weight is None and self.idle_is_open and ledger.micro.weight is not None:
            self._idle = None
            warn(
                "a backward without a weight joins the micro-batch of a block, `with opt.micro_batch(weight=...)`, that had ended without "
                "one; put the backward into its block, or give it a weight of its own"
            )
        self.drop_idle()
        if weight is not None:
            for check in self.extensions.check_weight:
                check(weight)
        begins = ledger.micro is None
        if begins:
            self.updated = False
            self.rejected.withdraw()
            self.rejected.put_away = False
            self.sums.follow_copied()
            self.drop_taken_away()
            if ledger.window is None:
                self.begin_window(backward=True)
            if not self.ranks.alone:
                self.sums.bring_back()  # before anything is sent
            ledger.begin_micro_batch()
        if weight is not None:
            ledger.weigh(weight)
        ledger.micro.last = ledger.micro.last or last
        ledger.micro.in_loss = ledger.micro.in_loss or in_loss
        return begins

    def drop_taken_away(self) -> None:
        """Drop a window that its caller ends if all that it had accumulated has been taken out of ``p.grad``, as in plain PyTorch (by the
        model's ``zero_grad()``, or SAM's ``first_step(zero_grad=True)``). Warn if a checkpoint has brought it.
        """
        if self.settings.schedule.caller_owned and self.ledger.is_open and self.sums.taken_away:
            if self.ledger.restored:
                self.sums.warn_dropped("every p.grad", "the window, which a checkpoint has brought, is dropped")
            self.reset()

    @contextmanager
    def grouped(self, weight: Scalar | None = None, last: bool = False, in_loss: bool = False) -> Iterator[None]:
        """Make all passes in the block one micro-batch, as :meth:`open` has it; an exception drops it."""
        self._block = weight, last, in_loss
        thread = threading.get_ident()
        before, begins = passes_seen(thread), self.open(*self._block)
        try:
            self.inside, self._adds_before = True, self.ledger.micro.adds
            self.ledger.micro.begin_part()
            for begun in self.extensions.block_begins:
                begun(thread)
            yield
            self._collector.end_open_pass()
            self.inside = False
            if begins and passes_seen(thread) == before and not self.set_by_hand:
                self._idle = self.ledger.micro
                self.ledger.drop_forwards()
            if self.settings.schedule.caller_owned:
                self.drop_idle()
            self.pass_ends()
        except BaseException:
            self._collector.end_open_pass()
            self._collector.drop()
            self.pass_failed()
            raise
        finally:
            self.inside = False
            for ended in self.extensions.block_ends:
                ended()

    @property
    def set_by_hand(self) -> bool:
        """Has other code put a gradient into a ``p.grad``?"""
        return any(slot.holder.grad is not slot.shown for slot in self.sums.buffers.slots_with_grad())

    @property
    def idle_is_open(self) -> bool:
        """Does the open micro-batch count for nothing, unless ``step()`` follows?"""
        return self.ledger.micro is not None and self.ledger.micro is self._idle

    def drop_idle(self) -> None:
        """Forget a micro-batch that was opened and left without a backward (by ``continue``), unless a ``step()`` has counted it."""
        if self.idle_is_open:
            self.ledger.withdraw_micro_batch()

    def keep_micro_batch(self) -> None:
        """``zero_grad()`` was called inside a window. Warn if that leaves in it what plain PyTorch would have dropped."""
        kept = self.ledger.micro is not None and self.ledger.micro.passes and not self.ledger.micro.bad
        if kept and not self._warned_kept:
            self._warned_kept = True
            warn(
                "opt.zero_grad() inside a window keeps the gradients of a backward not yet followed by opt.step(), which plain PyTorch "
                "drops: they are part of the next micro-batch. Keep another model's loss (GAN, actor and critic) out of these parameters "
                "by requires_grad_(False) for that forward, or backward(inputs=...); take gradients that you combine or only look at "
                "(PCGrad, an adversarial attack) by torch.autograd.grad(loss, parameters), and add what is to be stepped by "
                "torch.autograd.backward(parameters, gradients); leave bad ones (NaN) out by nonfinite='skip_micro_batch'. opt.reset() "
                "drops the whole window. (Further cases are not reported.)"
            )

    def end_micro_batch(self, weight: Scalar | None) -> None:
        """What ``step()`` and ``flush()`` do before they check whether the window is complete: count the micro-batch, or refuse."""
        ledger, caller_owned = self.ledger, self.settings.schedule.caller_owned
        if self.ranks.agreed:  # normalize_() has done this already
            if weight is not None:
                raise ValueError(
                    f"step(weight={float(weight):.12g}) comes too late: opt.normalize_() has added up the weights of all ranks; give it "
                    "with the backward: opt.backward(loss, weight=n)"
                )
            return
        between = self.ranks.alone and ledger.window is not None and ledger.micro is None
        if between and not caller_owned and (self.step_under_way or ledger.complete()):
            return  # a step() has done this, and broke off later
        if ledger.window is None:
            # No backward has followed, so this step() is meant for it.
            self.sums.part_with_written(self.settings.drop_in)
            self.begin_window()
        nothing = not ledger.window.has_any
        if ledger.micro is None and (
            not caller_owned or (nothing and set(self.sums.slots_with_grad()) - self.ranks.shown_for_others)
        ):
            # One without gradients; or, if passes are counted and there was none, with gradients that were put into p.grad by hand.
            ledger.begin_micro_batch()
        if ledger.micro is not None:
            try:
                self._commit(None if caller_owned else weight)
            finally:
                self.step_under_way = ledger.micro is None
        rejected, self.rejected = self.rejected, Rejected()
        try:
            for ended in self.extensions.ended:
                ended(rejected)
        except BaseException:
            self.step_under_way = False
            raise
        if caller_owned:
            ledger.weigh_the_rest(weight)

    def record_loss(self, loss: Scalar, source: LossFrom) -> None:
        """The loss of the open micro-batch, or of the one counted last. Raises RuntimeError if that has one already."""
        self.check_call()
        for given in self.extensions.loss_given:
            given(loss, source)

    @property
    def lacks_loss(self) -> bool:
        """True if the loss of the micro-batch that is open, or was counted last, is wanted and has not come."""
        return any(lacks() for lacks in self.extensions.lacks_loss)

    def drop_micro_batch(self) -> None:
        """Drop the open micro-batch, if any, and its gradients that are queued. What was added stays in the sums."""
        self._collector.drop()
        if self.ledger.micro is not None:
            self.ledger.drop_micro_batch()

    # -- what layers and recipes ask for -----------------------------------------------------------------------

    @staticmethod
    def of_parameter(parameter: Tensor) -> Accumulation | None:
        """The one that accumulates this parameter's gradients, if any."""
        accumulation = _ACCUMULATION_OF.get(parameter)
        return None if accumulation is None else accumulation()

    def end_returned_pass(self) -> None:
        """End a pass that still seems open, if its backward has returned."""
        self._collector.end_returned_pass()

    @property
    def tells_passes_apart(self) -> bool:
        """Would several backward passes now be more than one micro-batch, or be refused?"""
        return not self.inside and (self.settings.schedule.caller_owned or self._holds)

    # -- the way in for layers that write a gradient into its buffer themselves ---------------------------------

    def takes_directly(self, slot: Slot) -> bool:
        """True if the pass that is running here has a gradient for the slot's ``p.grad`` that may be added at once, unseen, for good."""
        seen_whole = self._holds or slot.low_precision or slot.private or slot.part is not None
        again = self.ledger.micro is not None and self.ledger.micro.repeatable
        return not (seen_whole or again) and self._collector.accumulates(slot)

    def begin_pass(self) -> None:
        """Begin a pass for the backward that is running here, even if it has not brought a gradient yet."""
        self._collector.begin_pass()

    def within_pass(self, device: torch.device) -> AbstractContextManager[None]:
        """A block that is a part of the backward pass running here, and in which sums on ``device`` may be written."""
        return self._collector.within_pass(device)

    def prepare(self, slot: Slot) -> None:
        """Within a pass: the slot's buffer is about to be written. If ``slot.shown`` is not None, it then holds a plain sum to add to."""
        for adding in self.extensions.adding:
            adding([slot])
        self.accumulator.prepare(slot)

    @without_grad
    def count_added(self, slot: Slot, prepared: bool = True) -> None:
        """Within a pass: a gradient was added to the slot's buffer, scaled as the open window needs it. ``prepared``: after prepare()."""
        if not prepared:
            self.sums.norms.invalidate_block(slot.block)
            if self.ledger.window.void:  # it will not be applied: nothing more is added
                slot.buffer.zero_()
        self.accumulator.count_added(slot, self.measures)

    def put(self, slot: Slot, grad: Tensor) -> None:
        """Queue a gradient that nothing else will write to, as if a hook had brought it."""
        self._collector.put(slot, grad)

    # -- what the collector calls (its Owner) -----------------------------------------------------------------

    def pass_begins(self, thread: int | None) -> None:
        saw_pass(thread)
        for comes in self.extensions.pass_comes:
            comes()
        if runs(self.refuses_backward):
            raise RuntimeError(
                "the inner optimizer, or a hook of its step, ran a backward inside step(), and its gradients would join the next window; "
                "for an optimizer that evaluates gradients itself, leave out accum_steps, window_weight, master_weights and buffer_device"
            )
        if self.ranks.agreed:
            raise RuntimeError(
                "opt.normalize_() has added up this window's sums over the ranks, so no gradient can join it any more; call opt.step() "
                "before the next backward"
            )
        if not self.inside:
            self.open(None)
            self._adds_before = self.ledger.micro.adds
        elif self.ledger.window is None:
            raise RuntimeError(
                "a backward of this block, `with opt.micro_batch():`, was broken off after part of its gradients had been added, which "
                "dropped the window, so that nothing can join it; let the exception leave the block, and repeat the window"
            )
        elif self.ledger.micro is None:
            self.open(*self._block)  # again: one that was broken off has left nothing
        for begins in self.extensions.pass_begins:
            begins(thread)
        self.sums.sum_again()
        micro = self.ledger.micro
        micro.passes += 1
        if not self.inside:
            micro.begin_part()

    def part_begins(self) -> None:
        if self.ledger.micro is not None:
            self.ledger.micro.nested = True

    @without_grad
    def add(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        for select in self.extensions.select:
            slots, grads = select(slots, grads)
        if not slots:
            return
        self.ledger.micro.arrived += len(slots)
        for adding in self.extensions.adding:
            adding(slots)
        self.accumulator.add(slots, grads, self.measures)
        self.tell_arrived(slots)

    def tell_arrived(self, slots: Sequence[Slot]) -> None:
        for arrived in self.extensions.arrived:
            arrived(slots)

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        return any(added(slot, grad) for added in self.extensions.added_already)

    def pass_ends(self) -> None:
        if self.inside or self.ledger.micro is None:
            return
        self._tell_over()
        bad = self._judge() if self._holds else None
        self.ranks.pass_ends(functools.partial(self._reject, bad))
        if self.settings.schedule.caller_owned:
            self._commit(None)

    def _tell_over(self) -> None:
        for over in self.extensions.passes_over:
            over()

    def _reject(self, bad: dict[Slot, Tensor] | None) -> None:
        if bad is not None:
            self.rejected.reject(bad, self.sums.buffers.slots)

    def _commit(self, weight: Scalar | None) -> None:
        # Where nothing asks for the count, this need not wait for adds that end late.
        if self.counts or not self.sums.buffers.private:
            self.accumulator.count()
        window, micro = self.ledger.window, self.ledger.micro
        if not micro.passes and self.sums.normalized_by is None:
            # What was put into p.grad by hand may have taken the place of the window's sum; step() warns of that.
            self.sums.adopt_all(self.sums.buffers.slots)
        first, sent, held = window.empty, self.ranks.sent, self.ranks.holds_back
        # Two are often of two losses.
        if first and window.index == 0 and window.length == micro.parts > 2 and micro.parts_alike:
            warn(
                f"the first micro-batch had {micro.parts} backward passes, and accum_steps={micro.parts} such micro-batches make a window: "
                f"is step() called only after every {micro.parts} (`if (i + 1) % {micro.parts} == 0:`)? Call it after each; it counts. "
                "If a framework decides when, and divides the loss, leave out accum_steps and pass reduction='none'. If the passes do "
                "belong to one micro-batch (several losses of it, adversarial steps), put them into one `with opt.micro_batch():`"
            )
        if micro.passes and self.settings.reduction == "mean":
            self._note_unweighed(micro.weight is not None)
        self.ledger.commit(weight, held)
        if first and not (micro.bad or sent or held or micro.partial):
            for alone in self.extensions.counted_alone:
                alone(micro)

    def _note_unweighed(self, weighed: bool) -> None:
        """Warn, once, if a micro-batch that was given no weight, and counts as 1, meets weights of others or of a window's end."""
        before, self._weighed = self._weighed, weighed
        if self._warned_unweighed:
            return
        if before is not None and before != weighed:
            how = "some micro-batches of this window were given a weight and others were not"
        elif not weighed and self.settings.schedule.window_weight is not None:
            how = f"window_weight={self.settings.schedule.window_weight:g}, but this micro-batch was given no weight"
        else:
            return
        self._warned_unweighed = True
        warn(
            f"{how}: without one it counts as 1. Give every micro-batch its weight, opt.backward(loss, weight=n); two losses of one "
            "micro-batch belong into one `with opt.micro_batch(weight=n):`"
        )

    def pass_failed(self) -> None:
        for failed in self.extensions.pass_failed:
            failed()
        if self.ledger.micro is None or self.ledger.micro.repeatable:
            return
        if self.ledger.micro.adds > self._adds_before or self._unfinished():
            self._break_off("was broken off by an exception")
        elif self.ledger.micro.adds == 0:
            self.ledger.drop_micro_batch()

    def _unfinished(self) -> str | None:
        """Why a pass cannot follow one that was broken off, if that has left what no hook has told of."""
        return next((why for unfinished in self.extensions.unfinished if (why := unfinished())), None)

    def _break_off(self, how: str) -> None:
        refused = self._unfinished() if within_backward() else None
        self.reset()
        instead = "; nonfinite='skip_micro_batch' adds a micro-batch only when it is complete, and loses nothing"
        warn(
            f"backward {how} after part of its gradients had been added, so the open window was dropped"
            + ("" if self.sums.written_by_layers else instead)  # which that policy refuses
        )
        if refused:
            raise RuntimeError(refused)

    def _judge(self) -> dict[Slot, Tensor] | None:
        """Add the held gradients, or drop the micro-batch and return those for which it was rejected."""
        micro, held = self.ledger.micro, self._collector.held
        added, micro.in_place = micro.in_place, []
        micro.judged = bool(held or added)
        if all(judge(held, added) for judge in self.extensions.judge):
            self._collector.release()
            return None
        micro.bad, batches = True, self._collector.drop()
        return {
            slot: grad
            for rejects in self.extensions.rejects
            for slots, grads in batches
            for slot, grad in rejects(slots, grads).items()
        }
