"""What keeps other code from stepping or zeroing the inner optimizer behind the wrapper, in the middle of a window."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from .accumulation import Accumulation

NAME = "_fusedaccum_guard"  # the inner optimizer's attribute


class Guard:
    """Patches ``step()`` and ``zero_grad()`` of an optimizer, as learning-rate schedulers patch ``step()``: what is in ``p.grad`` inside a
    window is neither a gradient to step with nor one to drop.

    Attributes:
        patches: the functions that it has put there.
        step: what other code had put in the place of ``step()`` before; None for the class's own.
    """

    def __init__(self, inner: Optimizer):
        self.step: Any = vars(inner).get("step")
        self._accumulation: weakref.ref[Accumulation] | None = None
        self.patches: list[Callable[..., Any]] = []
        self._patch(inner, "step", self._check_step)
        self._patch(inner, "zero_grad", self._check_zero_grad)

    def _patch(self, inner: Optimizer, name: str, check: Callable[[], None]) -> None:
        before, alive = vars(inner).get(name), weakref.ref(inner)  # the optimizer must not hold itself

        @functools.wraps(before or getattr(type(inner), name))
        def guarded(*args: Any, **kwargs: Any) -> Any:
            check()
            return (before or functools.partial(getattr(type(inner_now()), name), inner_now()))(*args, **kwargs)

        def inner_now() -> Optimizer:
            optimizer = alive()
            assert optimizer is not None  # its attribute has been called
            return optimizer

        @functools.wraps(guarded)
        def as_function(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return guarded(*args, **kwargs)

        guarded.__signature__ = inspect.signature(getattr(inner, name))  # type: ignore[attr-defined]
        guarded.__func__ = as_function  # type: ignore[attr-defined]  # schedulers patch bound methods
        self.patches += [guarded, as_function]
        setattr(inner, name, guarded)

    def watch(self, accumulation: Accumulation) -> None:
        """Guard these windows, of the last wrapper that was built for the optimizer, for as long as they live."""
        self._accumulation = weakref.ref(accumulation)

    def _interrupted(self) -> Accumulation | None:
        """The windows, if other code has called, and one of them is open."""
        accumulation = None if self._accumulation is None else self._accumulation()
        return None if accumulation is None or accumulation.at_work or not accumulation.ledger.is_open else accumulation

    def _check_step(self) -> None:
        accumulation = self._interrupted()
        if accumulation is not None and not accumulation.ledger.schedule.caller_owned:
            raise RuntimeError(
                f"step() of the optimizer inside an AccumulatingOptimizer was called in {_where(accumulation)}, when p.grad holds a sum; "
                "call step() of the wrapper, which steps the other at the window's end. Where a library calls it, leave out accum_steps "
                "and window_weight, and pass reduction='none'"
            )

    def _check_zero_grad(self) -> None:
        accumulation = self._interrupted()
        if accumulation is None:
            return
        if accumulation.ledger.keeps:
            raise RuntimeError(
                f"zero_grad() of the optimizer inside an AccumulatingOptimizer was called in {_where(accumulation)}, which would lose "
                "them; call zero_grad() of the wrapper, which keeps them, or reset(). Where a library calls it between two backward passes "
                "of a micro-batch (Opacus' ghost clipping), leave out accum_steps and window_weight, pass reduction='none', and let the "
                "library add up the micro-batches: optimizer.signal_skip_step(True) before each but the last"
            )
        accumulation.end_open_pass()
        if accumulation.ledger.reduction != "none":  # there p.grad is all that counts, whether it is removed or zeroed
            accumulation.reset()


def _where(accumulation: Accumulation) -> str:
    ledger = accumulation.ledger
    return f"window {ledger.index}, of which {ledger.progress['micro_batch']} micro-batches are in"


def guard(inner: Optimizer, accumulation: Accumulation) -> None:
    """Guard the inner optimizer of these windows. One that was wrapped before has a guard already."""
    found = vars(inner).get(NAME)
    if found is None:
        found = Guard(inner)
        setattr(inner, NAME, found)
    found.watch(accumulation)


def is_patched(inner: Optimizer) -> bool:
    """True if other code has put a ``step()`` of its own into this optimizer. (A scheduler only notes that it was called at all.)"""
    patch, found = vars(inner).get("step"), vars(inner).get(NAME)
    while patch is not None:
        if found is not None and patch in found.patches:
            patch = found.step
        elif hasattr(patch, "_wrapped_by_lr_sched"):
            patch = patch.__wrapped__
        else:
            return patch is not type(inner).step
    return False
