"""LBFGS decides how often a step evaluates its closure, which runs a whole window each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..core.apply import conclude
from ..core.extension import Extension
from ..engine import without_grad
from ..scalars import Scalar

if TYPE_CHECKING:
    from ..core.apply import Closing, Conclusion
    from ..core.config import Settings


class EvaluatedWindows(Extension):
    """Runs ``step()`` for LBFGS.

    Whenever the closure has run, p.grad is made a window's gradient, and the last one counts.
    """

    def __init__(self) -> None:
        self._last: Conclusion | None = None  # in a drop-in: what p.grad goes on to show, to step with again

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        if not settings.schedule.caller_owned:
            raise ValueError(
                "optimizer is LBFGS, which evaluates its closure several times per step, so one step() cannot be one "
                "micro-batch; leave out accum_steps and window_weight and run the window's micro-batches inside the "
                "closure"
            )
        if settings.nonfinite == "skip_window":
            raise ValueError(
                "nonfinite='skip_window' does not work with LBFGS, which evaluates and applies within one step; "
                "use 'skip_micro_batch' or 'raise'"
            )
        if settings.skip_norm is not None:
            raise ValueError(
                "skip_norm does not work with LBFGS, which evaluates and applies within one step; leave it out, and "
                "pass line_search_fn='strong_wolfe', which looks for a step that lowers the loss"
            )
        if settings.buffer_device is not None:
            raise ValueError(
                "buffer_device='cpu' does not work with LBFGS, which reads p.grad while it evaluates; leave it out"
            )
        if settings.master_weights:
            raise ValueError(
                f"master_weights={settings.master_weights!r} does not work with LBFGS, which keeps its own list of "
                "parameters; keep the model in FP32"
            )

    def check_shared(self) -> None:
        raise ValueError(
            "optimizer is LBFGS, which decides by itself how often it evaluates, so ranks (of process_group, or of a "
            "DistributedDataParallel or FSDP2 module) cannot share its windows; use another optimizer"
        )

    def flush_begins(self) -> None:
        if self.accumulation.ledger.is_open:
            raise TypeError("flush(): LBFGS steps only in step(closure), whose closure runs the window's micro-batches")

    def window_reported(self, end: Conclusion) -> None:
        self._last = end if self.accumulation.settings.drop_in else None

    def run_step(self, closing: Closing, closure: Callable[[], Any] | None, weight: Scalar | None) -> Any:
        if closure is None:
            raise TypeError(
                "step() with LBFGS needs a closure that runs the window's micro-batches and returns the loss"
            )
        accumulation, ledger = self.accumulation, self.accumulation.ledger
        end = self._last

        def evaluate() -> Any:
            nonlocal end
            if ledger.reduction != "none":
                accumulation.reset()
            elif end is not None and end.begun == accumulation.sums.begun:
                ledger.drop_window()  # its gradient stays until a backward comes, as in plain PyTorch
            loss = closure()
            accumulation.passes.end_open_pass()
            if end is None or not closing.still_shows(end):
                end = self._finished(weight)
            return loss

        loss = self.inner.step(evaluate)
        assert end is not None  # LBFGS has evaluated it
        closing.stepped_with(end)
        return loss

    @without_grad
    def _finished(self, weight: Scalar | None) -> Conclusion:
        """What the window comes to that the closure has run; ``p.grad`` is its gradient then."""
        accumulation = self.accumulation
        accumulation.end_micro_batch(weight)
        end = conclude(accumulation)
        accumulation.sums.finish_(end.slots, end.divisor, end.coef)
        accumulation.sums.shown_as_is()
        return end
