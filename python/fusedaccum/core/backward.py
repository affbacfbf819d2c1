"""Backward passes: each opens or joins a micro-batch, and brings it gradients until it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from torch import Tensor

from ..autograd.passes import passes_seen, saw_pass
from ..engine import runs, within_backward, without_grad
from ..scalars import Scalar
from ..warn import warn
from . import adding
from .buffers import Slot
from .extension import Judge
from .window import MicroBatchState

if TYPE_CHECKING:
    from .accumulation import Accumulation


class BackwardPasses:
    """The passes of one wrapper, one after another. A GradCollector's Owner.

    Attributes:
        inside: True if the caller is within ``micro_batch()``.
        refused_in: the call in which the inner optimizer is at work on a window that has closed, so
            that a backward would belong to the next one.
    """

    def __init__(self, accumulation: Accumulation):
        self._accumulation: Callable[[], Accumulation] = accumulation.reference  # weak, because it holds this
        self.inside = False
        self.refused_in: FrameType | None = None
        self._adds_before = 0  # of the open micro-batch, when the pass (or group of passes) under way began
        self._block: tuple[Scalar | None, bool, bool] = (None, False, False)  # what the latest grouped() gave to open()

    def end_open_pass(self) -> None:
        """Every public call begins here: no pass is under way, and ``p.grad`` is ours again."""
        accumulation = self._accumulation()
        for check in accumulation.extensions.check_call:
            check()
        if within_backward():
            raise RuntimeError(
                "the wrapper was called from inside a backward pass (by a hook?); call it when backward has returned"
            )
        accumulation.collector.end_open_pass()
        for over in accumulation.extensions.passes_over:
            over()
        if self._unfinished():
            self._break_off("was broken off by an exception (or its gradients were taken by torch.autograd.grad)")
        accumulation.unhide()

    @contextmanager
    def grouped(self, weight: Scalar | None = None, last: bool = False, in_loss: bool = False) -> Iterator[None]:
        """Make all passes in the block one micro-batch, as open() has it; an exception drops it."""
        accumulation = self._accumulation()
        self._block = weight, last, in_loss
        thread = threading.get_ident()
        before, begins = passes_seen(thread), accumulation.open(*self._block)
        try:
            self.inside, self._adds_before = True, accumulation.ledger.micro.adds
            accumulation.ledger.micro.begin_part()
            for begun in accumulation.extensions.block_begins:
                begun(thread)
            yield
            accumulation.collector.end_open_pass()
            self.inside = False
            if begins and passes_seen(thread) == before and not self.set_by_hand:
                accumulation.ledger.micro.state = MicroBatchState.IDLE
                accumulation.ledger.drop_forwards()
            if accumulation.settings.schedule.caller_owned:
                accumulation.drop_idle()
            self.pass_ends()
        except BaseException:
            accumulation.collector.end_open_pass()
            accumulation.collector.drop()
            self.pass_failed()
            raise
        finally:
            self.inside = False
            for ended in accumulation.extensions.block_ends:
                ended()

    @property
    def set_by_hand(self) -> bool:
        """True if other code has put a gradient into a ``p.grad``."""
        accumulation = self._accumulation()
        return any(slot.holder.grad is not slot.shown for slot in accumulation.sums.buffers.slots_with_grad())

    def drop_micro_batch(self) -> None:
        """Drop the open micro-batch and its queued gradients. What was added stays in the sums."""
        accumulation = self._accumulation()
        accumulation.collector.drop()
        if accumulation.ledger.micro is not None:
            accumulation.ledger.drop_micro_batch()

    @property
    def tells_passes_apart(self) -> bool:
        """True if several backward passes now would be more than one micro-batch, or be refused."""
        accumulation = self._accumulation()
        return not self.inside and (accumulation.settings.schedule.caller_owned or accumulation.judge is not None)

    # -- what the collector calls (its Owner) ------------------------------------------------------

    def pass_begins(self, thread: int | None) -> None:
        accumulation = self._accumulation()
        saw_pass(thread)
        for comes in accumulation.extensions.pass_comes:
            comes()
        if runs(self.refused_in):
            raise RuntimeError(
                "the inner optimizer, or a hook of its step, ran a backward inside step(), and its gradients would "
                "join the next window; for an optimizer that evaluates gradients itself, leave out accum_steps, "
                "window_weight, master_weights and buffer_device"
            )
        if accumulation.ranks.agreed:
            raise RuntimeError(
                "opt.normalize_() has added up this window's sums over the ranks, so no gradient can join it any more; "
                "call opt.step() before the next backward"
            )
        if not self.inside:
            accumulation.open(None)
            self._adds_before = accumulation.ledger.micro.adds
        elif accumulation.ledger.window is None:
            raise RuntimeError(
                "a backward of this block, `with opt.micro_batch():`, was broken off after part of its gradients had "
                "been added, which dropped the window, so that nothing can join it; let the exception leave the block, "
                "and repeat the window"
            )
        elif accumulation.ledger.micro is None:
            accumulation.open(*self._block)  # again: one that was broken off has left nothing
        for begins in accumulation.extensions.pass_begins:
            begins(thread)
        if accumulation.sums.normalized_by is not None:
            accumulation.sums.sum_again()
        micro = accumulation.ledger.micro
        micro.passes += 1
        if not self.inside:
            micro.begin_part()

    def part_begins(self) -> None:
        accumulation = self._accumulation()
        if accumulation.ledger.micro is not None:
            accumulation.ledger.micro.nested = True

    @without_grad
    def add(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        accumulation = self._accumulation()
        adding.add(accumulation, slots, grads)

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        accumulation = self._accumulation()
        return any(added(slot, grad) for added in accumulation.extensions.added_already)

    def pass_ends(self) -> None:
        accumulation = self._accumulation()
        if self.inside or accumulation.ledger.micro is None:
            return
        for over in accumulation.extensions.passes_over:
            over()
        if accumulation.judge is not None:
            self._judge(accumulation.judge)
        accumulation.ranks.pass_ends(self._sums_are_shown)
        if accumulation.settings.schedule.caller_owned:
            accumulation.commit(None)

    def _sums_are_shown(self) -> None:
        accumulation = self._accumulation()
        if accumulation.judge is not None:
            accumulation.judge.sums_shown()

    def pass_failed(self) -> None:
        accumulation = self._accumulation()
        for failed in accumulation.extensions.pass_failed:
            failed()
        if accumulation.ledger.micro is None or accumulation.ledger.micro.repeatable:
            return
        if accumulation.ledger.micro.adds > self._adds_before or self._unfinished():
            self._break_off("was broken off by an exception")
        elif accumulation.ledger.micro.adds == 0:
            accumulation.ledger.drop_micro_batch()

    def _unfinished(self) -> str | None:
        """Why no pass can follow one that broke off and left what no hook has told of."""
        accumulation = self._accumulation()
        for unfinished in accumulation.extensions.unfinished:
            if why := unfinished():
                return why
        return None

    def _break_off(self, how: str) -> None:
        accumulation = self._accumulation()
        refused = self._unfinished() if within_backward() else None
        accumulation.reset()
        instead = "; nonfinite='skip_micro_batch' adds a micro-batch only when it is complete, and loses nothing"
        warn(
            f"backward {how} after part of its gradients had been added, so the open window was dropped"
            + ("" if accumulation.sums.written_by_layers else instead)  # which that policy refuses
        )
        if refused:
            raise RuntimeError(refused)

    def _judge(self, judge: Judge) -> None:
        """Add the held gradients, or drop the micro-batch."""
        accumulation = self._accumulation()
        micro, held = accumulation.ledger.micro, accumulation.collector.held
        added, micro.in_place = micro.in_place, []
        if not micro.rejected:  # first: a judge may raise, and what was held cannot be judged again
            micro.state = MicroBatchState.ADDED if held or added else MicroBatchState.OPEN
        if judge.accepts(held, added):
            accumulation.collector.release()
            return
        micro.state, batches = MicroBatchState.REJECTED, accumulation.collector.drop()
        judge.rejected(batches)
