"""Micro-batches from their first gradient until they are counted: opened, added or rejected."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from torch import Tensor

from ..autograd.collector import GradCollector
from ..engine import runs
from ..scalars import Scalar, checked_loss, is_number
from ..warn import warn
from . import adding, grad_views
from .backward import BackwardPasses
from .buffers import Slot
from .config import Settings
from .extension import Extensions, Judge, LossFrom, StandIns
from .ledger import Ledger
from .ranks import Alone
from .sums import Sums
from .window import MicroBatchState


class Accumulation:
    """Windows that accumulate the gradients of backward passes, micro-batch by micro-batch.

    Joins the ledger (what micro-batches count for), the sums (where their gradients go) and the
    ranks (who has the others).

    Args:
        settings: of the wrapper. extensions: of the wrapper, not attached yet.

    Attributes:
        wants_norm, counts: as the extensions have them; clipping wants the norm, too.
        judge: the extension that decides on whole micro-batches, if any.
        stand_ins: the extension that makes what is stepped in the place of parameters, if any.
        step_under_way: True if a step() has ended the micro-batch counted last, and not returned.
        inner_call: the call in which the inner optimizer steps, or another of its methods runs.
        updated: True if the last step() or flush() changed the parameters, until the next backward.
        rejected: names of parameters whose gradients were rejected since the last ``step()``.
    """

    def __init__(self, settings: Settings, extensions: Extensions):
        self.reference: Any = weakref.ref(self)  # for what this holds; of a proxy, none can be made
        self.settings, self.extensions = settings, extensions
        self.sums = Sums(settings.buffer_dtype, extensions, settings.backend)
        self.ledger = Ledger(settings.schedule, settings.reduction, extensions)
        self.ranks = Alone()  # until an extension finds others that share the windows
        self.wants_norm = settings.max_grad_norm is not None or any(e.wants_norm for e in extensions.all)
        self.counts = any(e.counts for e in extensions.all)
        self.judge: Judge | None = next((e for e in extensions.all if isinstance(e, Judge)), None)
        self.stand_ins: StandIns | None = next((e for e in extensions.all if isinstance(e, StandIns)), None)
        self.passes = BackwardPasses(self)
        self.collector = GradCollector(self.passes, hold=self.judge is not None)
        self.step_under_way = False
        self.inner_call: FrameType | None = None
        self.updated: bool | Tensor = False
        self.rejected: list[str] = []

    @property
    def at_work(self) -> bool:
        """True while the inner optimizer is at work."""
        return self.inner_call is not None and runs(self.inner_call)

    @property
    def stands_in(self) -> bool:
        """True if the inner optimizer steps other tensors than the model's parameters."""
        return self.stand_ins is not None and self.stand_ins.stands_in()

    def inner_steps(self, slots: Sequence[Slot]) -> AbstractContextManager[None]:
        """The caller's block in which the inner optimizer is at work, and may step ``slots``."""
        return nullcontext() if self.stand_ins is None else self.stand_ins.stepping(slots, sys._getframe(1))

    def inner_called(self) -> AbstractContextManager[None]:
        """The caller's block in which another method of the inner optimizer runs."""
        stand_ins, slots = self.stand_ins, self.sums.buffers.slots
        return nullcontext() if stand_ins is None else stand_ins.calling(slots, sys._getframe(1))

    def unhide(self) -> None:
        """Have ``p.grad`` show the sums again, where an extension has put something else there."""
        if self.judge is not None:
            self.judge.unhide()

    def check(self) -> None:
        """Raises RuntimeError if a parameter changed, gradients missed hooks, or sums are lost."""
        self.sums.check()
        self.collector.check_hooked()
        if self.sums.copied:
            grad_views.follow_copied(self.sums)

    def begin_window(self, backward: bool = False) -> None:
        """``backward``: a pass begins it, and plain PyTorch would leave what is in ``p.grad``."""
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
        """True if weights must be in the loss: ranks add up gradients before they get here."""
        return self.ledger.mixes_ranks and self.settings.reduction == "mean"

    def complete(self) -> bool:
        """True if the window ends here."""
        self.ranks.before_weighing()
        return self.ranks.agreed or self.ledger.complete()

    # -- a micro-batch -----------------------------------------------------------------------------

    def open(self, weight: Scalar | None, last: bool = False, in_loss: bool = False) -> bool:
        """Open a micro-batch (and return True), or join the one that is open already. Raises as
        Ledger.weigh does.

        ``in_loss``: the losses of its passes are multiplied by the weight.
        """
        ledger = self.ledger
        if self.idle_is_open and (weight is not None or ledger.micro.weight is None):
            ledger.micro = None  # as if it had not been opened: forwards since then belong to the next one
        elif self.idle_is_open:
            ledger.micro.state = MicroBatchState.OPEN
            warn(
                "a backward without a weight joins the micro-batch of a block, `with opt.micro_batch(weight=...)`, "
                "that had ended without one; put the backward into its block, or give it a weight of its own"
            )
        if weight is not None:
            for check in self.extensions.check_weight:
                check(weight)
        begins = ledger.micro is None
        if begins:
            self.updated = False
            self.unhide()
            if self.sums.copied:
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
        """Drop a window that its caller ends if all that it had accumulated has been taken out of
        ``p.grad``, as in plain PyTorch (by the model's ``zero_grad()``, or SAM's
        ``first_step(zero_grad=True)``). Warn if a checkpoint has brought it.
        """
        if self.settings.schedule.caller_owned and self.ledger.is_open and self.sums.taken_away:
            if self.ledger.restored:
                grad_views.warn_dropped(
                    self.sums, "every p.grad", "the window, which a checkpoint has brought, is dropped"
                )
            self.reset()

    @property
    def idle_is_open(self) -> bool:
        """True if the open micro-batch counts for nothing, unless ``step()`` follows."""
        return self.ledger.micro is not None and self.ledger.micro.state is MicroBatchState.IDLE

    def drop_idle(self) -> None:
        """Forget a micro-batch whose block had no backward, if no ``step()`` has counted it."""
        if self.idle_is_open:
            self.ledger.micro = None

    def end_micro_batch(self, weight: Scalar | None) -> None:
        """Count the micro-batch, or refuse, before ``step()`` or ``flush()`` checks the window."""
        ledger, caller_owned = self.ledger, self.settings.schedule.caller_owned
        if self.ranks.agreed:  # normalize_() has done this already
            if weight is not None:
                raise ValueError(
                    f"step(weight={float(weight):.12g}) comes too late: opt.normalize_() has added up the weights of "
                    "all ranks; give it with the backward: opt.backward(loss, weight=n)"
                )
            return
        between = self.ranks.alone and ledger.window is not None and ledger.micro is None
        if between and not caller_owned and (self.step_under_way or ledger.complete()):
            return  # a step() has done this, and broke off later
        if ledger.window is None:
            # No backward has followed, so this step() is meant for it.
            grad_views.part_with_written(self.sums, self.settings.drop_in)
            self.begin_window()
        if ledger.micro is None and (not caller_owned or (not ledger.window.has_any and self._gradients_by_hand())):
            # One without gradients; or, if passes are counted and there was none, with those.
            ledger.begin_micro_batch()
        if ledger.micro is not None:
            try:
                self.commit(None if caller_owned else weight)
            finally:
                self.step_under_way = ledger.micro is None
        rejected, self.rejected = self.rejected, []
        try:
            for ended in self.extensions.ended:
                ended(rejected)
        except Exception:  # after Ctrl-C the next step() goes on
            self.step_under_way = False
            raise
        if caller_owned:
            ledger.weigh_the_rest(weight)

    def _gradients_by_hand(self) -> bool:
        """True if other code has put gradients into ``p.grad`` which no pass has brought."""
        return bool(set(self.sums.slots_with_grad()) - self.ranks.shown_for_others)

    def record_loss(self, loss: Scalar, source: LossFrom) -> None:
        """The loss of the open micro-batch, or the last. Raises RuntimeError if it has one."""
        for check in self.extensions.check_call:
            check()
        for given in self.extensions.loss_given:
            given(loss, source)

    def record_result(self, result: Any) -> None:
        """Record what a closure returned, if it is a single number and no loss was recorded."""
        one = result.numel() == 1 if isinstance(result, Tensor) else is_number(result)
        if one and self.lacks_loss:
            self.record_loss(checked_loss(result), LossFrom.CALLER)

    @property
    def lacks_loss(self) -> bool:
        """True if the loss of the open micro-batch, or of the last, is wanted and has not come."""
        return any(lacks() for lacks in self.extensions.lacks_loss)

    def commit(self, weight: Scalar | None) -> None:
        """The micro-batch is over: count it, with a ``weight`` that comes late, or leave it out."""
        # Where nothing asks for the count, this need not wait for adds that end late.
        if self.counts or not self.sums.buffers.private:
            adding.count_nonfinite(self)
        window, micro = self.ledger.window, self.ledger.micro
        if not micro.passes and self.sums.normalized_by is None:
            # What was put into p.grad by hand may have taken the place of the window's sum; step()
            # warns of that.
            grad_views.adopt_all(self.sums, self.sums.buffers.slots)
        held = self.ranks.holds_back
        alone = self.extensions.counted_alone and window.empty and not (self.ranks.sent or held or micro.partial)
        for ends in self.extensions.micro_batch_ends:
            ends(micro)
        self.ledger.commit(weight, held)
        if alone and not micro.rejected:
            for counted in self.extensions.counted_alone:
                counted(micro)
