"""What the ranks of a process group tell each other about a window at its end."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..window.amp import LossScale
from ..window.window import Window


class Numbers(NamedTuple):
    """What a rank reports about its window, or the sum of what all ranks report."""

    weight: float
    micro_batches: float
    dropped: float
    nonfinite: float
    overflow: float  # a GradScaler has found one at the window's end
    overflowed: float  # or before it
    unit: float  # 0 without a loss scale, and on ranks that took no part, whatever theirs is
    unit_square: float
    scale: float  # what a GradScaler multiplies losses with now; 0 without one, and on ranks that took no part
    scale_square: float
    scales: float  # is the scale known?
    parts: float  # has the rank accumulated, or dropped, anything?

    @classmethod
    def of(cls, window: Window, overflow: bool | Tensor, loss_scale: LossScale) -> Numbers:
        """Waits for the device."""
        # A rank that has only dropped micro-batches takes part, too: its scaler.unscale_() has divided the rejected gradient, while on
        # other ranks it has divided the sums, so that what these carry may differ.
        part = window.has_any
        unit = float(window.unit) if part and window.unit is not None else 0.0
        scale = float(loss_scale.live) if part and loss_scale.live is not None else 0.0
        return cls(
            weight=float(window.weight),
            micro_batches=window.micro_batches,
            dropped=window.dropped,
            nonfinite=float(window.nonfinite),
            overflow=bool(overflow),
            overflowed=window.overflowed,
            unit=unit,
            unit_square=unit**2,
            scale=scale,
            scale_square=scale**2,
            scales=scale > 0,
            parts=part,
        )

    def of_equal_units(self) -> bool:
        """Do the sums of all ranks that took part carry the same loss scale?"""
        return _equal(self.unit, self.unit_square, self.parts)

    def of_equal_scales(self) -> bool:
        """Do the ranks' scalers have the same scale now?"""
        return _equal(self.scale, self.scale_square, self.scales)

    def put_into(self, window: Window) -> None:
        """Make ``window`` that of all ranks."""
        if not window.has_any:
            window.unit = self.unit / self.parts if self.unit else None
        window.weight, window.micro_batches, window.dropped = self.weight, int(self.micro_batches), int(self.dropped)
        window.nonfinite, window.overflowed = int(self.nonfinite), bool(self.overflowed)


def _equal(total: float, total_of_squares: float, count: float) -> bool:
    """Are ``count`` numbers with this total all the same? Exactly then their squares add up to this, but for the rounding of sums."""
    return math.isclose(total**2, count * total_of_squares, rel_tol=1e-12)
