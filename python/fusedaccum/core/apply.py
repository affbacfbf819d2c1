"""A window's end: what it comes to, whether to apply it, and the inner optimizer's step.

A window that has closed stays until it is applied and reported: if something raises on the way, the
next call goes on from there.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..last_window import LastWindow
from ..scalars import Scalar, as_tensor, or_one, product, to_device_of, widened
from ..warn import warn
from .buffers import Slot
from .closures import Evaluated, evaluates_itself, refused, required_by_step, takes_closure
from .extension import InnerScaling
from .ledger import NO_GRADIENT
from .window import Window, WindowState

if TYPE_CHECKING:
    from .accumulation import Accumulation

UNKNOWN: dict[str, Any] = dict.fromkeys(of.name for of in fields(LastWindow))


@dataclass
class Conclusion:
    """A complete window: its gradient is ``coef * sum / divisor``; ``skip`` forbids applying it.

    An extension that skips joins its own decision with what ``skip`` is already. A tensor is read
    when the window is applied, if not left to an inner optimizer that decides on its device.
    """

    window: Window
    slots: list[Slot]
    divisor: Scalar
    weightless: bool  # True if the sum of its weights is 0
    begun: int  # Sums.begun, which tells whether the buffers still hold it
    coef: Scalar = 1.0
    skip: bool | Tensor = False
    norm: Tensor | None = None  # of its gradient, before coef
    report: dict[str, Tensor | None] = field(default_factory=dict)  # what extensions say of it, by names of LastWindow
    closure: Evaluated | None = None  # what the inner optimizer's step() gets
    state: WindowState = WindowState.CLOSED
    finished: bool = False  # True if p.grad is its gradient: not if the inner optimizer divides by itself
    applied: bool | Tensor = False  # True if the inner optimizer has stepped with it

    def last_window(self, applied: bool | Tensor) -> LastWindow:
        values: dict[str, Any] = UNKNOWN | {
            "micro_batches": self.window.micro_batches,
            "weight": widened(as_tensor(self.window.weight)),
            "grad_norm": self.norm,
            "applied": as_tensor(applied),
            **self.report,
        }
        return LastWindow(**values)


def conclude(accumulation: Accumulation) -> Conclusion:
    """What the open window comes to. Waits for the device if weights are tensors on it."""
    ledger, sums = accumulation.ledger, accumulation.sums
    window, slots = ledger.window, sums.slots_with_grad()
    divisor = 1.0 if window.empty else ledger.divisor(window.weight)
    weightless = float(divisor) == 0
    if weightless:
        warn(f"window {window.index} has weight 0 (no tokens?): nothing is applied")
        divisor = 1.0
    end = Conclusion(window, slots, divisor, weightless, sums.begun)
    for closing in accumulation.extensions.closing:
        closing(end)
    if accumulation.wants_norm:
        sq_norm = sums.sq_norm(slots)
        end.norm = as_tensor(to_device_of(sq_norm.sqrt(), end.divisor)) / end.divisor
        if window.void:  # then the sums are not the window's
            end.norm = torch.full_like(end.norm, math.inf)
        for normed in accumulation.extensions.normed:
            normed(end, sq_norm)
    if weightless or window.void:
        end.skip = True
    end.coef = clip_coef(accumulation.settings.max_grad_norm, end.norm)
    return end


def clip_coef(limit: float | None, norm: Tensor | None) -> Scalar:
    """``min(1, limit / (norm + 1e-6))``, as torch.nn.utils.clip_grad_norm_ has it."""
    if limit is None or norm is None or math.isinf(limit):
        return 1.0
    return (limit / (norm + 1e-6)).clamp(max=1.0)


class Closing:
    """Closes a wrapper's windows, one after another.

    Args:
        inner: the optimizer that applies them.
        accumulation: of the windows.

    Attributes:
        last_window: what is known about the last one.
    """

    def __init__(self, inner: Optimizer, accumulation: Accumulation):
        self._inner = inner
        self._accumulation, self._settings = accumulation, accumulation.settings
        self._sums, self._ledger = accumulation.sums, accumulation.ledger
        self.last_window: LastWindow | None = None
        self._unapplied: Conclusion | None = None  # a closed window, until it is applied and reported
        self._needs_loss = "closure" in required_by_step(inner)

    def close(self, evaluated: Evaluated | None = None) -> None:
        """The window is over: a new one begins, and this one is applied, if nothing forbids it.

        Args:
            evaluated: the closure that ``step()`` was given, which has been called; None without.
        """
        self._accumulation.ranks.agree()
        end = conclude(self._accumulation)
        end.closure = self.handed_on(evaluated, end)
        self._unapplied = end  # first: where warnings are errors, an extension may raise when it hears of the end
        self._ledger.close_window()
        self.apply(end)

    def anything_to_flush(self) -> bool:
        """True if the open window has accumulated anything, on any rank. With several ranks, it is
        that of all of them afterwards.
        """
        ranks = self._accumulation.ranks
        if ranks.alone:
            return self._ledger.is_open
        if self._ledger.window is None:
            self._accumulation.begin_window()
        ranks.flushes()
        ranks.agree()
        if not self._ledger.has_any:
            self._ledger.drop_window()
        # Dropped micro-batches make a window, too: a rank in step() meanwhile has closed one.
        return self._ledger.has_any

    def evaluate(self, closure: Callable[[], Any] | None) -> Evaluated | None:
        """Call the closure that ``step()`` was given, and record its loss.

        Raises TypeError if the inner optimizer cannot step with what ``step()`` was given.
        """
        if closure is None:
            if self._needs_loss and self._accumulation.lacks_loss:
                raise self._lacks_loss()
            return None
        if evaluates_itself(self._inner):
            raise refused(self._inner, ["closure"])
        micro = self._ledger.micro
        whole = micro is None or not micro.passes  # else the loss is that of a part of a micro-batch
        with torch.enable_grad():
            evaluated = Evaluated(closure())
        if whole:
            self._accumulation.record_result(evaluated.result)
        return evaluated

    def _lacks_loss(self) -> TypeError:
        return TypeError(
            f"the step() of {type(self._inner).__name__} needs the loss: call opt.step(closure), or opt.backward(loss) "
            "in place of loss.backward(), for every micro-batch"
        )

    def handed_on(self, evaluated: Evaluated | None, end: Conclusion) -> Evaluated | None:
        """The inner optimizer's closure, if it gets one: it returns the loss of the window."""
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

    def apply_again(self) -> bool:
        """Go on with the window that a call closed before it raised. Returns False if there is
        none, or its gradient was dropped since.
        """
        end = self._unapplied
        if end is None or not self.broke_off:
            return False
        self.apply(end)
        return True

    @property
    def broke_off(self) -> bool:
        """True if the next call of :meth:`apply_again` would apply a window."""
        end, sums = self._unapplied, self._sums
        if end is None or end.window is self._ledger.window:  # the latter if Ctrl-C came before it was closed
            return False
        return end.begun == sums.begun and not self._accumulation.at_work

    def apply(self, end: Conclusion) -> None:
        """Apply a closed window and report it. When the inner optimizer raises, or anything after
        it, the next ``step()`` or ``flush()`` goes on from there.
        """
        self._unapplied = end
        with self._inner_at_work():
            if end.state is WindowState.CLOSED:
                end.applied = step_with(end, self._inner, self._accumulation)
                end.state = WindowState.STEPPED
            if end.applied is not False and self._accumulation.stand_ins is not None:
                self._accumulation.stand_ins.stepped(end.slots)
        if end.state < WindowState.BROADCAST:
            self._accumulation.ranks.broadcast_params(end.applied)
            end.state = WindowState.BROADCAST
        self._report(end, end.applied)

    @contextmanager
    def _inner_at_work(self) -> Iterator[None]:
        accumulation, here = self._accumulation, sys._getframe(2)
        before = accumulation.passes.refused_in, accumulation.inner_call
        # The backward of an inner optimizer that steps the parameters themselves (SAM), with the
        # sums that p.grad shows, is an ordinary one in a caller-owned window.
        apart = accumulation.stands_in or self._sums.buffers.private
        accumulation.passes.refused_in = here if apart or not self._settings.schedule.caller_owned else None
        accumulation.inner_call = here
        try:
            yield
        finally:
            accumulation.passes.refused_in, accumulation.inner_call = before

    def _report(self, end: Conclusion, applied: bool | Tensor) -> None:
        if not self._accumulation.ranks.anything(end.slots):
            applied = False
        self._accumulation.updated = applied
        for reported in self._accumulation.extensions.window_reported:
            reported(end)
        self.last_window = end.last_window(applied)
        adaptive = self._settings.schedule.adaptive
        if adaptive is not None:
            adaptive.window_closed(self.last_window, self._ledger.ranks)
        self._sums.shown_as_is()
        for released in self._accumulation.extensions.buffers_released:
            released()
        end.closure = None  # which may hold a loss with its graph
        self._unapplied = None

    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call another of the inner optimizer's methods (``second_step()``) on what it steps."""
        self._accumulation.passes.end_open_pass()
        with self._inner_at_work(), self._accumulation.inner_called():
            result = method(*args, **kwargs)
        if self._settings.schedule.caller_owned and self._sums.taken_away:
            self._accumulation.reset()  # as its zero_grad() does, which SAM's steps call if asked to
        return result

    def normalize_(self) -> None:
        """Make ``p.grad`` the gradient of the complete window, which stays open."""
        ranks = self._accumulation.ranks
        # First for its errors, before ranks communicate. (Where this one has nothing, others, which
        # close the window too, may have gradients.)
        if ranks.alone or self._ledger.is_open or not self._settings.schedule.caller_owned:
            divisor = self._ledger.divisor_at_end()
        if not ranks.alone:
            self._accumulation.end_micro_batch(None)
            ranks.agree()
            if not self._ledger.window.has_any:
                self._accumulation.reset()
                raise RuntimeError(NO_GRADIENT)
            divisor = self._ledger.divisor(self._ledger.window.weight)
        factors = [normalizing() for normalizing in self._accumulation.extensions.normalizing]
        self._sums.normalize_(or_one(divisor), product(factors))

    def stepped_with(self, end: Conclusion) -> None:
        """The inner optimizer has stepped with the gradient of this window."""
        self._ledger.close_window()
        self._report(end, not end.skip)

    def still_shows(self, end: Conclusion) -> bool:
        """True if ``p.grad`` still is the gradient of this window, which has closed."""
        return self._ledger.window is None and end.begun == self._sums.begun and self._sums.as_shown


def step_with(end: Conclusion, inner: Any, accumulation: Accumulation) -> bool | Tensor:
    """Step the inner optimizer with the window's gradient, unless that is to be skipped.

    Returns whether it was applied.
    """
    sums, extensions, stand_ins = accumulation.sums, accumulation.extensions, accumulation.stand_ins

    scaling: InnerScaling | None = None
    if not end.finished:
        for inner_scales in extensions.inner_scales:
            scaling = inner_scales(end)
    applied = True if scaling is None else scaling.applied
    if not isinstance(applied, Tensor) and bool(end.skip):
        return False
    if stand_ins is not None:
        stand_ins.others_may_have_written(())
    if not end.finished and (scaling is None or not scaling.divides):
        sums.finish_(end.slots, end.divisor, end.coef)
        end.finished = True
    for may_apply in extensions.may_apply:
        # If each rank steps a part, all must ask, even those that cast nothing.
        cast = [slot for slot in end.slots if end.finished and slot.stepped.dtype == torch.float16]
        if not may_apply(cast):
            return False

    def pre_hooks_have_run() -> None:
        if stand_ins is not None:
            stand_ins.others_may_have_written(end.slots)
        if end.closure is not None:
            end.closure.begin(inner)

    def post_hooks_follow() -> None:  # which look at the model, and may raise
        end.applied, end.state = applied, WindowState.STEPPED
        if stand_ins is not None:
            stand_ins.stepped(end.slots)

    around = nullcontext() if scaling is None else scaling.around
    with around, accumulation.inner_steps(end.slots):
        with among_hooks(inner, pre_hooks_have_run, post_hooks_follow):
            once = functools.partial(step_once, inner, end.closure)
            for step_inner in extensions.step_inner:
                if step_inner(end, once):
                    break
            else:
                once()
            end.applied, end.state = applied, WindowState.STEPPED
        if stand_ins is not None:
            stand_ins.others_may_have_written(())
    return applied


@contextmanager
def among_hooks(
    inner: Optimizer, pre_hooks_have_run: Callable[[], None], post_hooks_follow: Callable[[], None]
) -> Iterator[None]:
    """In the block, ``inner.step()`` calls the first after its step pre-hooks, if it has any.

    It calls the second before its post-hooks, if it has any.
    """
    handles = []
    calls_hooks = hasattr(inner, "_optimizer_step_post_hooks")  # one that hands all to another optimizer need not
    if calls_hooks and (inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks):
        handles.append(inner.register_step_pre_hook(lambda *_: pre_hooks_have_run()))
    if calls_hooks and (inner._optimizer_step_post_hooks or _global_optimizer_post_hooks):
        handles.append(inner.register_step_post_hook(lambda *_: post_hooks_follow()))
        inner._optimizer_step_post_hooks.move_to_end(handles[-1].id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def step_once(inner: Optimizer, closure: Evaluated | None) -> None:
    if closure is None:
        inner.step()
    else:
        closure.begin(inner)
        inner.step(closure)
