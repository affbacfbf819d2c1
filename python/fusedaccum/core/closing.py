"""A window's end: it is concluded, applied by the inner optimizer, and reported."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .accumulation import Accumulation
from .apply import apply
from .closures import Evaluated, evaluates_itself, refused, required_by_step, takes_closure
from .conclusion import Conclusion, conclude
from .config import Settings
from .window import LastWindow


class Closing:
    """Closes a wrapper's windows, one after another.

    Args:
        inner: the optimizer that applies them.
        accumulation: of the windows. settings: of the wrapper.

    Attributes:
        last_window: what is known about the last one.
        reported: the last window, where step() may apply it again.
    """

    def __init__(self, inner: Optimizer, accumulation: Accumulation, settings: Settings):
        self._inner = inner
        self._accumulation, self._settings = accumulation, settings
        self._extensions = accumulation.extensions
        self._sums, self._ledger = accumulation.sums, accumulation.ledger
        self.last_window: LastWindow | None = None
        self._unapplied: Conclusion | None = None  # a closed window, until it is applied and reported
        self.reported: Conclusion | None = None
        self._needs_loss = "closure" in required_by_step(inner)

    def close(self, evaluated: Evaluated | None = None) -> None:
        """The window is over: the next gradient begins a new one, and this one is applied, unless something forbids it.

        Args:
            evaluated: the closure that ``step()`` was given and has called; None if it was given none.
        """
        self._accumulation.ranks.agree()
        end = conclude(self._accumulation)
        end.closure = self._handed_on(evaluated, end)
        self._unapplied = end
        self._ledger.close_window()
        self._accumulation.warn_not_zeroed()
        self._apply(end)

    def check_closure(self, closure: Callable[[], Any] | None) -> None:
        """Raises TypeError if the inner optimizer could not step with what ``step()`` has been given."""
        if closure is not None and evaluates_itself(self._inner):
            raise refused(self._inner, ["closure"])
        if closure is None and self._needs_loss and self._accumulation.lacks_loss:
            raise self._lacks_loss()

    def _lacks_loss(self) -> TypeError:
        return TypeError(
            f"the step() of {type(self._inner).__name__} needs the loss: call opt.step(closure), or opt.backward(loss) in place of "
            "loss.backward(), for every micro-batch"
        )

    def _handed_on(self, evaluated: Evaluated | None, end: Conclusion) -> Evaluated | None:
        """What the inner optimizer's ``step()`` gets for a closure: one that returns the loss of what it steps with."""
        if evaluated is None and not self._needs_loss:
            return None
        if evaluated is not None and not takes_closure(self._inner):
            return None
        several = not self._settings.schedule.caller_owned and end.window.micro_batches > 1
        loss = end.report.get("loss")
        if loss is not None and (several or evaluated is None):
            return Evaluated(loss) if evaluated is None else evaluated.of_all(loss)
        if evaluated is None and end.skip is not True:
            raise self._lacks_loss()
        return evaluated

    def step_again(self, evaluated: Evaluated | None) -> bool:
        """A ``step()`` with no backward since the last: in a drop-in, step with the same gradient again, as plain PyTorch does.

        Returns False if that is not what it is: there are gradients to come to a window's end with, if only such as were set by hand.
        """
        end = self.reported
        if end is None or not self.still_shows(end):
            return False
        again = dataclasses.replace(end, applied=False, params_broadcast=False)
        again.closure = self._handed_on(evaluated, end)
        # PyTorch's fused optimizers have written the scaled gradient back.
        again.finished = end.finished or type(self._inner).step.__module__.startswith("torch.optim.")
        if not self._accumulation.ranks.alone:
            if self._others_close():
                return True
            again.begun = self._sums.begun
        self._unapplied = again
        self._apply(again)
        return True

    def _others_close(self) -> bool:
        """If a rank has had a backward since the last step(), close the window that it has begun. Else return False: ``p.grad`` then shows
        again what it has shown, from memory of its own, because the buffers are what the ranks find it out with.
        """
        ranks, slots = self._accumulation.ranks, self._sums.buffers.slots
        shown = [(slot, slot.shown.clone()) for slot in slots if slot.shown is not None]
        stepped = ranks.slots_with_grad
        self._accumulation.begin_window()
        ranks.agree()
        if self._ledger.has_any:
            self.close()
            return True
        self._accumulation.reset()
        for slot, grad in shown:
            slot.show(grad)
        ranks.slots_with_grad = stepped
        return False

    def apply_again(self) -> bool:
        """Go on with the window that a call closed before it raised. Returns False if there is none, or its gradient was dropped since."""
        if not self.broke_off:
            return False
        assert self._unapplied is not None
        self._apply(self._unapplied)
        return True

    @property
    def broke_off(self) -> bool:
        """Would the next call of :meth:`apply_again` apply a window?"""
        return (
            not self._accumulation.at_work and self._unapplied is not None and self._unapplied.begun == self._sums.begun
        )

    def _apply(self, end: Conclusion) -> None:
        # When the inner optimizer raises, or anything after it, the next step() or flush() goes on from there.
        with self._inner_at_work():
            applied = apply(end, self._inner, self._accumulation)
        if not end.params_broadcast:
            self._accumulation.ranks.broadcast_params(applied)
            end.params_broadcast = True
        self._report(end, applied)

    @contextmanager
    def _inner_at_work(self) -> Iterator[None]:
        accumulation, here = self._accumulation, sys._getframe(2)
        before = accumulation.refuses_backward, accumulation.inner_call
        # The backward of an inner optimizer that steps the parameters themselves (SAM), with the sums that p.grad shows, is an ordinary one
        # in a caller-owned window.
        apart = self._extensions.stand_in or self._sums.buffers.private
        accumulation.refuses_backward = here if apart or not self._settings.schedule.caller_owned else None
        accumulation.inner_call = here
        try:
            yield
        finally:
            accumulation.refuses_backward, accumulation.inner_call = before

    def _report(self, end: Conclusion, applied: bool | Tensor) -> None:
        if not self._accumulation.ranks.anything(end.slots):
            applied = False
        self._accumulation.updated = applied
        for closed in self._accumulation.extensions.closed:
            closed(end)
        self.last_window = end.last_window(applied)
        adaptive = self._settings.schedule.adaptive
        if adaptive is not None:
            adaptive.window_closed(self.last_window, self._ledger.ranks)
        self._sums.shown_as_is()
        for released in self._accumulation.extensions.buffers_released:
            released()
        end.closure = None  # which may hold a loss with its graph
        self._unapplied, self.reported = None, end if self._settings.drop_in else None

    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the inner optimizer (``eval()``, ``second_step()``) on what it steps."""
        self._accumulation.end_open_pass()
        with self._inner_at_work(), self._extensions.inner_called(self._sums.buffers.slots):
            result = method(*args, **kwargs)
        if self._settings.schedule.caller_owned and self._sums.taken_away:
            self._accumulation.reset()  # as its zero_grad() does, which SAM's steps call if asked to
        return result

    def show_gradient(self) -> Conclusion:
        """The open window is complete: make ``p.grad`` its gradient, for an extension that has the inner optimizer step with it."""
        end = conclude(self._accumulation)
        self._sums.finish_(end.slots, end.divisor, end.coef)
        self._sums.shown_as_is()
        return end

    def stepped_with(self, end: Conclusion) -> None:
        """The inner optimizer has stepped with the gradient of this window."""
        self._accumulation.warn_not_zeroed()
        self._ledger.close_window()
        self._report(end, not end.skip)

    def still_shows(self, end: Conclusion | None) -> bool:
        """True if ``p.grad`` still is the gradient of this window, which has closed: neither a backward nor other code has changed it."""
        return end is not None and self._ledger.window is None and end.begun == self._sums.begun and self._sums.as_shown
