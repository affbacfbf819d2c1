"""What a complete window comes to: its gradient, and whether that may be applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..scalars import Scalar, as_tensor, to_device_of, widened
from ..warn import warn
from .buffers import Slot
from .closures import Evaluated
from .window import LastWindow, Window

if TYPE_CHECKING:
    from .accumulation import Accumulation


UNKNOWN: dict[str, Any] = dict.fromkeys(of.name for of in fields(LastWindow))


@dataclass
class Conclusion:
    """A complete window: its gradient is ``coef * sum / divisor`` in every slot, and ``skip`` forbids applying it."""

    window: Window
    slots: list[Slot]
    divisor: Scalar
    weightless: bool  # is the sum of its weights 0?
    begun: int  # Sums.begun, which tells whether the buffers still hold it
    coef: Scalar = 1.0
    skip: bool | Tensor = False
    norm: Tensor | None = None  # of its gradient, before coef
    report: dict[str, Tensor | None] = field(default_factory=dict)  # what extensions say of it, by names of LastWindow
    closure: Evaluated | None = None  # what the inner optimizer's step() gets
    finished: bool = False  # has the gradient been made, so that applying it again only steps?
    applied: bool | Tensor = False  # has it stepped all, so that applying it again only tells the extensions?
    params_broadcast: bool = False  # have the ranks been given what others have stepped?

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
    divides = isinstance(divisor, Tensor) or divisor != 1.0
    if divides and not all(slot.low_precision for slot in slots):  # those hold the mean already
        sums.warn_written("which is divided after that")
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
