"""Micro-batches from their first gradient to their place in the window: opened, added or rejected, counted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch import Tensor

from ..autograd.collector import GradCollector
from ..autograd.passes import passes_seen, saw_pass
from ..engine import runs, within_backward, without_grad
from ..scalars import Scalar
from ..warn import warn
from . import adding, grad_views
from .buffers import Slot
from .config import Settings
from .extension import Extensions, LossFrom
from .ledger import Ledger
from .ranks import Alone
from .sums import Sums
from .window import MicroBatchState


class Accumulation:
    """Windows that accumulate the gradients of backward passes, micro-batch by micro-batch. A GradCollector's Owner.

    Joins the ledger (what micro-batches count for), the sums (where their gradients go) and the ranks (who has the others).

    Args:
        settings: of the wrapper. extensions: of the wrapper, not attached yet.
        seed: of the stochastic rounding of 16-bit buffers, below 2**53, and the same on all ranks; None rounds to nearest.

    Attributes:
        rank: is added to the seed.
        wants_norm, counts, holds: as the extensions have them; the norm is also wanted for clipping.
        step_under_way: has a step() ended the micro-batch counted last, and not returned?
        inner_call: the call in which the inner optimizer steps, or another of its methods runs.
        updated: did the last step() or flush() change the parameters, and has no micro-batch begun since?
        inside: is the caller within ``micro_batch()``?
        refuses_backward: the call in which the inner optimizer is at work on a window that has closed, so that a backward would belong
            to the next one.
        rejected: the parameters whose gradients micro-batches were rejected for since the last ``step()``, by name.
    """

    def __init__(self, settings: Settings, seed: int | None, extensions: Extensions):
        self.reference = weakref.ref(self)  # extensions have a proxy, of which none can be made
        self.settings, self.extensions = settings, extensions
        self.sums = Sums(settings.buffer_dtype, extensions, settings.backend)
        self.ledger = Ledger(settings.schedule, settings.reduction, extensions)
        self.ranks = Alone()  # until an extension finds others that share the windows
        self.wants_norm = settings.max_grad_norm is not None or any(e.wants_norm for e in extensions.all)
        self.counts = any(e.counts for e in extensions.all)
        self.holds = any(e.holds for e in extensions.all)
        self.collector = GradCollector(self, hold=self.holds)
        self.seed, self.rank = seed, 0
        self.inside = self.step_under_way = False
        self.inner_call: FrameType | None = None
        self.refuses_backward: FrameType | None = None
        self.updated: bool | Tensor = False
        self.rejected: list[str] = []
        self._adds_before = 0  # of the open micro-batch, when the pass (or group of passes) under way began
        self._block: tuple[Scalar | None, bool, bool] = (None, False, False)  # what the latest grouped() gave to open()

    @property
    def at_work(self) -> bool:
        """True while the inner optimizer is at work."""
        return self.inner_call is not None and runs(self.inner_call)

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
        self.collector.end_open_pass()
        self._tell_over()
        if self._unfinished():
            self._break_off("was broken off by an exception (or its gradients were taken by torch.autograd.grad)")
        self.unhide()

    def unhide(self) -> None:
        """Have ``p.grad`` show the sums again, where an extension has put something else there."""
        for unhide in self.extensions.unhide:
            unhide()

    def check(self) -> None:
        """Raises RuntimeError if a parameter has changed, gradients have gone past the hooks, or sums are lost."""
        self.sums.check()
        self.collector.check_hooked()
        grad_views.follow_copied(self.sums)

    def begin_window(self, backward: bool = False) -> None:
        """``backward``: because a backward begins, for which plain PyTorch would leave what is in ``p.grad``."""
        if backward and self.settings.drop_in:
            grad_views.part_with_written(self.sums, False)  # zeroed, perhaps
        for begins in self.extensions.window_begins:
            begins(backward)
        self.sums.begin()
        self.step_under_way = False
        self.ledger.begin_window()  # last: if anything above raises, the next call begins it

    def reset(self) -> None:
        """Drop what the open window has accumulated, and what was put into ``p.grad`` meanwhile."""
        self.collector.drop()
        self.unhide()
        self.rejected = []
        if self.ledger.is_open:
            self.sums.clear()
        self.ledger.drop_window()
        self.step_under_way = False
        self.sums.begin()
        for released in self.extensions.buffers_released:
            released()

    @property
    def weighs_loss(self) -> bool:
        """True if a weight must be in the loss, because the ranks' gradients are added up before they get here."""
        return self.ledger.mixes_ranks and self.settings.reduction == "mean"

    def complete(self) -> bool:
        """Does the window end here?"""
        self.ranks.before_weighing()
        return self.ranks.agreed or self.ledger.complete()

    # -- a micro-batch -----------------------------------------------------------------------------------------

    def open(self, weight: Scalar | None, last: bool = False, in_loss: bool = False) -> bool:
        """Open a micro-batch (and return True), or join the one that is open already. Raises as Ledger.weigh does.

        ``in_loss``: the losses of its passes are multiplied by the weight.
        """
        ledger = self.ledger
        if weight is None and self.idle_is_open and ledger.micro.weight is not None:
            ledger.micro.state = MicroBatchState.OPEN
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
            self.unhide()
            grad_views.follow_copied(self.sums)
            self.drop_taken_away()
            if ledger.window is None:
                self.begin_window(backward=True)
            if not self.ranks.alone:
                grad_views.bring_back(self.sums)  # before anything is sent
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
                grad_views.warn_dropped(
                    self.sums, "every p.grad", "the window, which a checkpoint has brought, is dropped"
                )
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
            self.collector.end_open_pass()
            self.inside = False
            if begins and passes_seen(thread) == before and not self.set_by_hand:
                self.ledger.micro.state = MicroBatchState.IDLE
                self.ledger.drop_forwards()
            if self.settings.schedule.caller_owned:
                self.drop_idle()
            self.pass_ends()
        except BaseException:
            self.collector.end_open_pass()
            self.collector.drop()
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
        return self.ledger.micro is not None and self.ledger.micro.state is MicroBatchState.IDLE

    def drop_idle(self) -> None:
        """Forget a micro-batch that was opened and left without a backward (by ``continue``), unless a ``step()`` has counted it."""
        if self.idle_is_open:
            self.ledger.withdraw_micro_batch()

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
            grad_views.part_with_written(self.sums, self.settings.drop_in)
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
        rejected, self.rejected = self.rejected, []
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
        self.collector.drop()
        if self.ledger.micro is not None:
            self.ledger.drop_micro_batch()

    # -- what layers and recipes ask for -----------------------------------------------------------------------

    def end_returned_pass(self) -> None:
        """End a pass that still seems open, if its backward has returned."""
        self.collector.end_returned_pass()

    @property
    def tells_passes_apart(self) -> bool:
        """Would several backward passes now be more than one micro-batch, or be refused?"""
        return not self.inside and (self.settings.schedule.caller_owned or self.holds)

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
        adding.add(self, slots, grads)

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        return any(added(slot, grad) for added in self.extensions.added_already)

    def pass_ends(self) -> None:
        if self.inside or self.ledger.micro is None:
            return
        self._tell_over()
        if self.holds:
            self._judge()
        self.ranks.pass_ends(self._sums_are_shown)
        if self.settings.schedule.caller_owned:
            self._commit(None)

    def _tell_over(self) -> None:
        for over in self.extensions.passes_over:
            over()

    def _sums_are_shown(self) -> None:
        for shown in self.extensions.sums_shown:
            shown()

    def _commit(self, weight: Scalar | None) -> None:
        # Where nothing asks for the count, this need not wait for adds that end late.
        if self.counts or not self.sums.buffers.private:
            adding.count_nonfinite(self)
        window, micro = self.ledger.window, self.ledger.micro
        if not micro.passes and self.sums.normalized_by is None:
            # What was put into p.grad by hand may have taken the place of the window's sum; step() warns of that.
            grad_views.adopt_all(self.sums, self.sums.buffers.slots)
        first, sent, held = window.empty, self.ranks.sent, self.ranks.holds_back
        self.ledger.commit(weight, held)
        if first and not (micro.rejected or sent or held or micro.partial):
            for alone in self.extensions.counted_alone:
                alone(micro)

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
        for unfinished in self.extensions.unfinished:
            if why := unfinished():
                return why
        return None

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

    def _judge(self) -> None:
        """Add the held gradients, or drop the micro-batch."""
        micro, held = self.ledger.micro, self.collector.held
        added, micro.in_place = micro.in_place, []
        if all(judge(held, added) for judge in self.extensions.judge):
            if held or added:
                micro.state = MicroBatchState.ADDED
            self.collector.release()
            return
        micro.state, batches = MicroBatchState.REJECTED, self.collector.drop()
        for rejected in self.extensions.rejected:
            self.rejected += rejected(batches)
