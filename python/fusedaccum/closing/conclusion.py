"""What a complete window comes to: its gradient, and whether that may be applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..buffers.buffers import Slot
from ..buffers.sums import Sums
from ..closures import Evaluated
from ..scalars import Scalar, as_tensor, to_device, to_device_of, widened
from ..warn import warn
from ..window.ledger import Ledger
from ..window.settings import Settings
from ..window.window import LastWindow, Window


@dataclass
class Conclusion:
    """A complete window: its gradient is ``coef * sum / divisor`` in every slot, and ``skip`` forbids applying it."""

    window: Window
    slots: list[Slot]
    divisor: Scalar
    coef: Scalar
    norm: Tensor | None
    overflow: bool | Tensor  # of the last micro-batch, as a GradScaler saw it
    skip: bool | Tensor
    loss: Tensor | None
    begun: int  # Sums.begun, which tells whether the buffers still hold it
    closure: Evaluated | None = None  # what the inner optimizer's step() gets
    finished: bool = False  # has the gradient been made, so that applying it again only steps?
    stepped: set[Slot] = field(default_factory=set)  # slots stepped already, if the optimizer steps in parts
    applied: bool | Tensor = False  # has it stepped all, so that applying it again only tells the extensions?
    params_broadcast: bool = False  # have the ranks been given what others have stepped?
    measured: bool = False  # has the noise scale been told of it?

    def report(self, settings: Settings, applied: bool | Tensor, noise_scale: Tensor | None) -> LastWindow:
        window = self.window
        nonfinite = as_tensor(window.nonfinite + window.dropped)
        # A scaler's overflow is one more bad micro-batch, unless adds have counted it: under "skip_window" they always do.
        if settings.nonfinite != "skip_window":
            nonfinite = nonfinite + to_device_of(self.overflow, nonfinite) * (window.nonfinite == 0)
        looked = settings.nonfinite != "propagate" or window.overflowed or self.overflow is not False
        return LastWindow(
            window.micro_batches,
            widened(as_tensor(window.weight)),
            self.norm,
            nonfinite if looked else None,
            as_tensor(applied),
            self.loss,
            noise_scale,
        )


def conclude(ledger: Ledger, sums: Sums, settings: Settings, overflow: bool | Tensor) -> Conclusion:
    """What the open window comes to. Waits for the device if weights are tensors on it."""
    window, slots = ledger.window, sums.slots_with_grad()
    if sums.changed_by_user:  # clipped by hand, say: then the two norms are of different things
        window.small_sq_norm = None
    divisor = 1.0 if window.empty else ledger.divisor(window.weight)
    divides = isinstance(divisor, Tensor) or divisor != 1.0
    if divides and not all(slot.low_precision for slot in slots):  # those hold the mean already
        sums.warn_written("which is divided after that")
    weightless = float(divisor) == 0
    if weightless:
        warn(f"window {window.index} has weight 0 (no tokens?): nothing is applied")
        divisor = 1.0
    known = 0 < window.losses == window.micro_batches and not weightless
    loss = widened(as_tensor(to_device_of(window.loss.total, divisor) / divisor)) if known else None
    if window.unit is not None:
        divisor = divisor * to_device_of(window.unit, divisor)
    skip, norm = overflow, None
    if settings.wants_norm:
        sq_norm = sums.sq_norm(slots)
        norm = as_tensor(to_device_of(sq_norm.sqrt(), divisor)) / divisor
        if window.overflowed:  # then the sums are not the window's
            norm = torch.full_like(norm, math.inf)
        if settings.nonfinite == "skip_window":
            bad = to_device(window.nonfinite, sq_norm.device) > 0
            skip = ~torch.isfinite(sq_norm) | bad | to_device(skip, sq_norm.device)
    if weightless or window.overflowed:
        skip = True
    coef = clip_coef(settings.max_grad_norm, norm)
    return Conclusion(window, slots, divisor, coef, norm, overflow, skip, loss, sums.begun)


def clip_coef(limit: float | None, norm: Tensor | None) -> Scalar:
    """``min(1, limit / (norm + 1e-6))``, as torch.nn.utils.clip_grad_norm_ has it."""
    if limit is None or norm is None or math.isinf(limit):
        return 1.0
    return (limit / (norm + 1e-6)).clamp(max=1.0)
