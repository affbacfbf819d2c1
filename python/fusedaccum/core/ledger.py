"""The open window: what its micro-batches weigh, when it is complete, what divides its sum.

Counts and weights only; the sums themselves are in :mod:`fusedaccum.core.sums`. ``complete()`` is
asked when a micro-batch has been counted, ``is_last()`` and ``may_be_last()`` while it is open, for
what has to be done before it ends (send its sums, measure their norm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..scalars import Scalar, add, checked_weight
from .window import MicroBatch, Schedule, Window

if TYPE_CHECKING:
    from .extension import Extension, Extensions

MISSING_WEIGHT = (
    "reduction='sum' divides by the sum of the weights, and this micro-batch was given none; "
    "pass the number of items: opt.backward(loss, weight=n) or opt.step(weight=n)"
)
TERMS = (
    "; terms of a loss that are means over different things need reduction='none', each divided by the window's count "
    "(the documentation's question, 'Loss terms with different denominators')"
)
NO_GRADIENT = "normalize_() found no gradient; call it after the window's last backward and before step()"


class Ledger:
    """Windows, one after another.

    Attributes:
        index: of the open window, or else of the next one.
        window: the open one; None from its end, while its gradient can still be read, to the next.
        micro: the open micro-batch; None between two.
        restored: True if a checkpoint has brought the open window.
        ranks: how many share a window.
        over_ranks: sums a weight over them.
        mixes_ranks: True if gradients arrive summed over ranks: weight 0 must not drop them.
    """

    def __init__(self, schedule: Schedule, reduction: str, extensions: Extensions):
        self.schedule = schedule
        self.reduction = reduction
        self._extensions = extensions
        self.ranks = 1
        self.over_ranks: Callable[[Scalar], Scalar] = lambda weight: weight
        self.mixes_ranks = False
        self.restored = False
        self.index = 0
        # Any stands for None: nearly all uses are where there is one.
        self.window: Window | Any = None
        self.micro: MicroBatch | Any = None
        # What had been counted before the first micro-batch whose gradients are still held back.
        self._before_held: tuple[dict[str, Any], dict[Extension, Any]] | None = None

    @property
    def is_open(self) -> bool:
        """True if the window has accumulated anything, or begun to."""
        return self.micro is not None or (self.window is not None and not self.window.empty)

    @property
    def has_any(self) -> bool:
        """True if the window is open, or has at least dropped a micro-batch."""
        return self.micro is not None or (self.window is not None and self.window.has_any)

    @property
    def keeps(self) -> bool:
        """True if ``zero_grad()`` must keep the window: some are counted, and more will follow.

        A window of one micro-batch holds nothing worth that, except for the count of those that
        were left out.
        """
        if self.schedule.caller_owned or not self.has_any:
            return False
        return self.window.length != 1 or not self.is_open

    def begin_window(self) -> None:
        self.window = Window(self.index, self.schedule.length(self.index))
        self.restored, self._before_held = False, None
        for opened in self._extensions.window_opened:
            opened()

    def begin_micro_batch(self) -> None:
        self.micro = MicroBatch()
        for opened in self._extensions.micro_batch_opened:
            opened()

    def drop_micro_batch(self) -> None:
        """Drop forwards since it was opened, too, which would else belong to the next one."""
        self.micro = None
        self.drop_forwards()

    def drop_forwards(self) -> None:
        """What the extensions have seen since a micro-batch was counted belongs to none."""
        for dropped in self._extensions.micro_batch_dropped:
            dropped()

    def drop_window(self) -> None:
        if self.micro is not None:
            self.drop_micro_batch()
        self.window = None
        for dropped in self._extensions.window_dropped:
            dropped()

    def close_window(self) -> None:
        listeners, self.window, self.index = self._extensions.window_closed, None, self.index + 1
        for closed in listeners:
            closed()

    def restore(self, index: int, window: Window | None, micro: MicroBatch | None) -> None:
        """Continue from a checkpoint."""
        self.index, self.window, self.micro, self._before_held = index, window, micro, None
        self.restored = window is not None

    def weigh(self, weight: Scalar) -> None:
        """Give the open micro-batch a weight.

        Raises:
            ValueError: it differs from the one given before, or comes after gradients were scaled
                without it.
        """
        micro = self.micro
        if micro.weight is weight:
            return
        if micro.weight is None and (micro.adds == 0 or self.reduction != "mean"):
            if micro.adds == 0:  # else it is late, and only divides
                micro.factor = self._factor(weight)
            micro.weight = weight
        elif micro.weight is None:
            raise ValueError(
                f"weight {float(weight):.12g} comes too late: part of this micro-batch was added with weight 1 "
                f"already; give it with the first backward of the micro-batch{TERMS}"
            )
        elif float(micro.weight) != float(weight):
            raise ValueError(
                f"weight {float(weight):.12g} differs from {float(micro.weight):.12g}, which this micro-batch was "
                "given before; several backward() before one step() are parts of one micro-batch and share its "
                f"weight{TERMS}"
            )

    def late_weight(self, weight: Scalar) -> Scalar:
        """``step(weight=)``, checked. Raises ValueError if it comes too late."""
        if self.reduction == "mean":
            raise ValueError(
                "step(weight=) comes too late under reduction='mean': the weight scales the gradient as it is added; "
                "use opt.backward(loss, weight=...) or `with opt.micro_batch(weight=...)`"
            )
        return checked_weight(weight)

    def commit(self, late: Scalar | None, held: bool) -> None:
        """The micro-batch is over: count it, with the weight it was given, now or before. One that
        was rejected counts for nothing.

        ``held``: True if its gradients come with those of a later micro-batch, so that the two can
        only be rejected together.
        """
        window, micro = self.window, self.micro
        if micro.rejected:
            before = self._before_held
            window.drop(None if before is None else before[0])
            if before is not None:
                self._extensions.roll_back(before[1])
            self._before_held = None
            self.drop_micro_batch()
            for rejected in self._extensions.micro_batch_rejected:
                rejected()
            return
        # Listeners are looked up first, because a call would come between, where Ctrl-C could.
        weight, listeners = self._weight_of(micro, late), self._extensions.micro_batch_counted
        self._before_held = (self._before_held or (window.counted, self._extensions.snapshot())) if held else None
        window.commit(micro, weight)
        self.micro, micro.weight = None, weight
        for counted in listeners:
            counted(micro)

    def _weight_of(self, micro: MicroBatch, late: Scalar | None) -> Scalar | None:
        """A micro-batch's weight at its end; None if the caller's window may still get it."""
        if micro.weight is not None and late is not None and float(micro.weight) != float(late):
            raise ValueError(
                f"step(weight={float(late):.12g}) differs from {float(micro.weight):.12g}, given with backward()"
            )
        weight = late if micro.weight is None else micro.weight
        if weight is not None:
            return weight
        if self.schedule.caller_owned and self.reduction != "mean":
            return None
        if self.reduction == "sum":
            raise ValueError(MISSING_WEIGHT)
        return 1.0

    def _factor(self, weight: Scalar) -> Scalar:
        if self.reduction == "mean":
            return weight
        if self.mixes_ranks:
            return 1.0
        return (weight != 0).to(weight.dtype) if isinstance(weight, Tensor) else float(weight != 0)

    def weigh_the_rest(self, late: Scalar | None) -> None:
        """Before a window closes: ``late`` is the weight of all its micro-batches that were given
        none.

        Raises ValueError if it is missing under ``reduction="sum"``, or if there is nothing left to
        weigh.
        """
        window = self.window
        if not window.unweighed:
            if late is not None and not window.empty:
                raise ValueError(
                    f"step(weight={float(late):.12g}) has nothing to weigh: every micro-batch of the window was given "
                    "its weight"
                )
            return
        if late is None:
            if self.reduction == "sum":
                raise ValueError(MISSING_WEIGHT)
            late = float(window.unweighed)
        else:
            for weighed in self._extensions.weighed_late:
                weighed()
        window.weight, window.unweighed = window.weight + late, 0

    def complete(self) -> bool:
        """True if the window is full, or any call closes it. Reads a tensor weight that decides."""
        return self._complete(self.window.steps(self.ranks), self.window.weight)

    @property
    def progress(self) -> dict[str, int | str]:
        """The open window's index, or the next one's, and how far it is, as the host knows."""
        window = self.window
        shown: dict[str, int | str] = {"window": self.index}
        length = self.schedule.length(self.index) if window is None else window.length
        count = 0 if window is None else self.steps
        shown["micro_batch"] = f"{count}/{length}" if length is not None else count
        weight = 0.0 if window is None else window.weight
        if self.schedule.window_weight is not None and self.ranks == 1 and not isinstance(weight, Tensor):
            shown["weight"] = f"{weight:.12g}/{self.schedule.window_weight:.12g}"
        return shown

    @property
    def steps(self) -> int:
        """Micro-batches in the open window, as ``accum_steps`` counts them."""
        return self.window.steps(self.ranks)

    def _complete(self, steps: int, weight: Scalar) -> bool:
        if self.schedule.window_weight is not None:
            weight = self.over_ranks(weight)
        return self.schedule.complete(self.window.length, steps, weight)

    def may_be_last(self) -> bool:
        """True if the open micro-batch may complete the window, or in doubt; never waits."""
        window, in_doubt = self.window, self.schedule.window_weight is not None and self.ranks > 1
        weight = add(window.weight, self.micro.value())  # this rank's alone: over ranks, in doubt
        return in_doubt or self.schedule.may_complete(window.length, self.steps + 1, weight)

    def is_last(self) -> bool:
        """True if the open micro-batch is known to be the last. Never if weights decide that."""
        if self.schedule.window_weight is not None:
            return False
        length = self.window.length
        return self.micro.last or (length is not None and self.steps + 1 >= length)

    def divisor(self, weight: Scalar) -> Scalar:
        """What the sum is divided by in a window of this weight."""
        return 1.0 if self.reduction == "none" else weight

    def divisor_at_end(self) -> Scalar:
        """The divisor of the window that ends, or has ended, with the open micro-batch.

        Raises:
            RuntimeError: the window is empty or not complete by then. ValueError: a weight is
                missing.
        """
        if not self.is_open:
            raise RuntimeError(NO_GRADIENT)
        window = self.window
        count, weight = self.steps, window.weight
        last: Scalar | None = 0.0
        if self.micro is not None and not self.micro.rejected:
            count, last = count + 1, self._weight_of(self.micro, None)
            weight = add(weight, 0.0 if last is None else last)
        elif self.micro is not None and self.ranks > 1:
            count += 1
        if self.reduction == "sum" and (window.unweighed or last is None):
            raise ValueError(MISSING_WEIGHT)
        if not self._complete(count, weight):
            raise RuntimeError(
                f"normalize_() is for a window's end, and this one is not complete: it holds {count} micro-batches of "
                f"weight {float(weight):.12g}, and closes at {window.length or self.schedule.window_weight}. To change "
                "the gradient of a partial window, do it in a hook (opt.register_step_pre_hook), and call opt.flush()"
            )
        return self.divisor(weight)
