"""What keeps other code from stepping or zeroing the inner optimizer in the middle of a window."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..core.extension import Extension
from ..inner import GUARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.accumulation import Accumulation
    from ..core.buffers import Slot


class Guard:
    """Patches an optimizer's ``step()`` and ``zero_grad()``, as schedulers patch ``step()``.

    What is in ``p.grad`` inside a window is neither a gradient to step with nor one to drop.

    Attributes:
        patches: the functions that it has put there.
        step: what other code had put in the place of ``step()`` before; None for the class's own.
    """

    def __init__(self, inner: Optimizer):
        self.step: Any = vars(inner).get("step")
        self._of: weakref.ref[InnerGuard] | None = None
        self.patches: list[Callable[..., Any]] = []
        self._patch(inner, "step", self._check_step)
        self._patch(inner, "zero_grad", self._check_zero_grad)

    def _patch(self, inner: Optimizer, name: str, check: Callable[[], None]) -> None:
        before, alive = vars(inner).get(name), weakref.ref(inner)  # the optimizer must not hold itself

        @functools.wraps(before or getattr(type(inner), name))
        def guarded(*args: Any, **kwargs: Any) -> Any:
            check()
            if before is not None:
                return before(*args, **kwargs)
            optimizer = alive()
            assert optimizer is not None  # its attribute has been called
            return getattr(type(optimizer), name)(optimizer, *args, **kwargs)

        @functools.wraps(guarded)
        def as_function(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return guarded(*args, **kwargs)

        guarded.__signature__ = inspect.signature(getattr(inner, name))  # type: ignore[attr-defined]
        guarded.__func__ = as_function  # type: ignore[attr-defined]  # schedulers patch bound methods
        self.patches += [guarded, as_function]
        setattr(inner, name, guarded)

    def watch(self, extension: InnerGuard) -> None:
        """Guard the windows of this extension's wrapper."""
        self._of = weakref.ref(extension)

    def _interrupted(self) -> Accumulation | None:
        """The windows, if one is open and this call interrupts it; else None.

        A call that the inner optimizer makes at work interrupts only a window that its caller ends.
        """
        extension = None if self._of is None else self._of()
        accumulation = None if extension is None else extension.accumulation
        if accumulation is None or not accumulation.ledger.is_open:
            return None
        return accumulation if accumulation.ledger.schedule.caller_owned or not accumulation.at_work else None

    def _check_step(self) -> None:
        accumulation = self._interrupted()
        if accumulation is not None and not accumulation.ledger.schedule.caller_owned:
            raise RuntimeError(
                f"step() of the optimizer inside an AccumulatingOptimizer was called in {_where(accumulation)}, when "
                "p.grad holds a sum; call step() of the wrapper, which steps the other at the window's end. Where a "
                "library calls it, leave out accum_steps and window_weight, and pass reduction='none'"
            )

    def _check_zero_grad(self) -> None:
        accumulation = self._interrupted()
        if accumulation is None:
            return
        if accumulation.ledger.keeps:
            raise RuntimeError(
                f"zero_grad() of the optimizer inside an AccumulatingOptimizer was called in {_where(accumulation)}, "
                "which would lose them; call zero_grad() of the wrapper, which keeps them, or reset(). Where a library "
                "calls it between two backward passes of a micro-batch (Opacus' ghost clipping), leave out accum_steps "
                "and window_weight, pass reduction='none', and let the library add up the micro-batches: "
                "optimizer.signal_skip_step(True) before each but the last"
            )
        accumulation.passes.end_open_pass()
        if accumulation.ledger.reduction != "none":  # there p.grad is all that counts, whether it is removed or zeroed
            accumulation.reset()


def _where(accumulation: Accumulation) -> str:
    ledger = accumulation.ledger
    return f"window {ledger.index}, of which {ledger.progress['micro_batch']} micro-batches are in"


class InnerGuard(Extension):
    """Guards the inner optimizer of the last wrapper built for it, for as long as that lives."""

    def parameters_added(self, slots: Sequence[Slot]) -> None:
        found = vars(self.inner).get(GUARD)  # of a wrapper before
        if found is None:
            found = Guard(self.inner)
            setattr(self.inner, GUARD, found)
        found.watch(self)
