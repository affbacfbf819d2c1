"""What a training loop does that works, but not as its author thinks. It is told of once."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

from ..core.buffers import Slot
from ..core.extension import Extension
from ..mistakes import DividedTwice, StepCalled, warn_if_never_stepped
from ..warn import warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.apply import Conclusion
    from ..core.sums import Sums
    from ..core.window import MicroBatch

HALF_PRECISION = attrgetter("half_precision")


class LoopWarnings(Extension):
    """Looks at what the wrapper is called for, and changes nothing."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._divided: DividedTwice | None = None
        self._step_called: StepCalled | None = None
        # True if the last counted micro-batch of the window had a weight; None before the first.
        self._weighed: bool | None = None
        self._not_zeroed = False  # True if the open window began where plain PyTorch would have gone on adding

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn(message)

    def parameters_added(self, slots: Sequence[Slot]) -> None:
        if self._step_called is None:  # the wrapper has just been built
            ledger, stepped = self.accumulation.ledger, vars(self.inner).get("_opt_called") is True
            self._step_called = StepCalled(ledger, stepped)
            self.inner._opt_called = self._step_called  # type: ignore[attr-defined]
            if ledger.reduction == "mean":
                self._divided = DividedTwice(ledger)

    # -- a micro-batch -----------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor) -> None:
        if self._divided is not None:
            self._divided.look(loss)

    def micro_batch_ends(self, micro: MicroBatch) -> None:
        window, reduction = self.accumulation.ledger.window, self.accumulation.settings.reduction
        # Two are often of two losses.
        if 2 < micro.parts == window.length and window.index == 0 and window.empty and micro.parts_alike:
            warn(
                f"the first micro-batch had {micro.parts} backward passes, and accum_steps={micro.parts} such "
                f"micro-batches make a window: is step() called only after every {micro.parts} (`if (i + 1) % "
                f"{micro.parts} == 0:`)? Call it after each; it counts. If a framework decides when, and divides the "
                "loss, leave out accum_steps and pass reduction='none'. If the passes do belong to one micro-batch "
                "(several losses of it, adversarial steps), put them into one `with opt.micro_batch():`"
            )
        if micro.passes and reduction == "mean":
            before, self._weighed = self._weighed, micro.weight is not None
            asked = self.accumulation.settings.schedule.window_weight
            if before is not None and before is not self._weighed:
                self._tell_unweighed("some micro-batches of this window were given a weight and others were not")
            elif asked is not None and not self._weighed:
                self._tell_unweighed(f"window_weight={asked:g}, but this micro-batch was given no weight")

    def _tell_unweighed(self, how: str) -> None:
        """A micro-batch with no weight, which counts as 1, meets others' weights or a window's."""
        self._tell(
            "unweighed",
            f"{how}: without one it counts as 1. Give every micro-batch its weight, opt.backward(loss, weight=n); two "
            "losses of one micro-batch belong into one `with opt.micro_batch(weight=n):`",
        )

    # -- a window ----------------------------------------------------------------------------------

    def window_begins(self, backward: bool) -> None:
        accumulation = self.accumulation
        self._weighed = None
        self._not_zeroed = backward and accumulation.settings.drop_in and _left_in_place(accumulation.sums)

    def window_kept(self) -> None:
        micro = self.accumulation.ledger.micro
        if micro is not None and micro.passes and not micro.rejected:
            self._tell(
                "kept",
                "opt.zero_grad() inside a window keeps the gradients of a backward not yet followed by opt.step(), "
                "which plain PyTorch drops: they are part of the next micro-batch. Keep another model's loss (GAN, "
                "actor and critic) out of these parameters by requires_grad_(False) for that forward, or "
                "backward(inputs=...); take gradients that you combine or only look at (PCGrad, an adversarial "
                "attack) by torch.autograd.grad(loss, parameters), and add what is to be stepped by "
                "torch.autograd.backward(parameters, gradients); leave bad ones (NaN) out by "
                "nonfinite='skip_micro_batch'. opt.reset() drops the whole window. (Further cases are not reported.)",
            )

    def window_goes_on(self) -> None:
        if self.accumulation.sums.written_by_user:
            self._tell_written("to which more micro-batches are added")

    def flush_begins(self) -> None:
        warn_if_never_stepped(self.accumulation.ledger)

    def closing(self, end: Conclusion) -> None:
        # 16-bit buffers hold the mean already.
        if self.accumulation.sums.written_by_user and not all(map(HALF_PRECISION, end.slots)):
            divisor = 1.0 if end.window.empty else self.accumulation.ledger.divisor(end.window.weight)
            if isinstance(divisor, Tensor) or divisor != 1.0:
                self._tell_written("which is divided after that")

    def window_closed(self) -> None:
        if self._not_zeroed:
            self._tell(
                "not zeroed",
                "a backward came after step() with no zero_grad() between: it has begun a new window, where plain "
                "PyTorch would have added to the gradient that the step had left. Call opt.zero_grad() between the "
                "two. (Further cases are not reported.)",
            )

    def window_reported(self, end: Conclusion) -> None:
        if self._divided is not None:
            self._divided.closed = end.window.micro_batches

    def _tell_written(self, so: str) -> None:
        """Other code has written to the sums as if they were this micro-batch's, or a mean."""
        self._tell(
            "written",
            "p.grad was written to (by clip_grad_norm_, zero_grad(set_to_none=False) or p.grad = ...?), but it is the "
            f"window's sum, {so}. Instead, clip with max_grad_norm= or after opt.normalize_(), zero with "
            "opt.zero_grad(), add gradients of your own with torch.autograd.backward(parameters, gradients), or "
            "divide the losses yourself under reduction='none'.",
        )


def _left_in_place(sums: Sums) -> bool:
    """True if ``p.grad`` shows some of the closed window's gradient: no ``zero_grad()`` since."""
    return sums.begun_at_close == sums.begun and any(
        slot.shown is not None and slot.holder.grad is slot.shown and not slot.private for slot in sums.buffers.slots
    )
