"""What the ranks of a process group tell each other about a window at its end."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..window.amp import LossScale
from ..window.ledger import Ledger
from ..window.window import Loss, Window


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
    loss: float
    losses: float
    small_sq_norm: float  # of the one micro-batch that was measured by itself
    small_weight: float
    small_square: float
    small: float  # was one measured?

    @classmethod
    def of(cls, window: Window, overflow: bool | Tensor, loss_scale: LossScale) -> Numbers:
        """Waits for the device."""
        # A rank that has only dropped micro-batches takes part, too: its scaler.unscale_() has divided the rejected gradient, while on
        # other ranks it has divided the sums, so that what these carry may differ.
        part = window.has_any
        unit = float(window.unit) if part and window.unit is not None else 0.0
        scale = float(loss_scale.live) if part and loss_scale.live is not None else 0.0
        sq_norm, weight, square = window.small or (0.0, 0.0, 0.0)
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
            loss=float(window.loss.total),
            losses=window.losses,
            small_sq_norm=float(sq_norm),
            small_weight=float(weight),
            small_square=float(square),
            small=window.small is not None,
        )

    def of_equal_units(self) -> bool:
        """Do the sums of all ranks that took part carry the same loss scale?"""
        return _equal(self.unit, self.unit_square, self.parts)

    def of_equal_scales(self) -> bool:
        """Do the ranks' scalers have the same scale now?"""
        return _equal(self.scale, self.scale_square, self.scales)

    def put_into(self, window: Window, ledger: Ledger) -> None:
        """Make ``window`` that of all ranks."""
        ranks, normalised = ledger.ranks, ledger.reduction == "none"
        if not window.has_any:
            window.unit = self.unit / self.parts if self.unit else None
        window.weight, window.micro_batches, window.dropped = self.weight, int(self.micro_batches), int(self.dropped)
        window.nonfinite, window.overflowed = int(self.nonfinite), bool(self.overflowed)
        # Losses that come normalised are averaged over the ranks, as their gradients are.
        window.loss, window.losses = Loss(self.loss / (ranks if normalised else 1)), int(self.losses)
        window.small_sq_norm = window.small_weight = window.small_square = None
        if self.small == ranks:
            window.small_sq_norm, window.small_weight = self.small_sq_norm, self.small_weight
            window.small_square = self.small_square
            if ledger.mixes_ranks:  # all ranks have measured the same sum, or mean, of their micro-batches
                window.small_sq_norm *= ranks if normalised else 1 / ranks
                window.small_square = self.small_weight**2


def _equal(total: float, total_of_squares: float, count: float) -> bool:
    """Are ``count`` numbers with this total all the same? Exactly then their squares add up to this, but for the rounding of sums."""
    return math.isclose(total**2, count * total_of_squares, rel_tol=1e-12)
