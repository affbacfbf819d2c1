"""A limit in units of a running mean: what ``skip_norm`` can be, beside a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .scalars import checked_count, is_number


@dataclass(frozen=True)
class TimesMean:
    """A limit that follows what it limits: ``factor`` times the running mean.

    Args:
        factor: greater than 1.
        decay: of the exponential average, per window: 0.98 averages over about the last 50.
        after: windows to look at before the limit holds.

    Raises:
        TypeError, ValueError: not a number, or out of range.
    """

    factor: float
    decay: float = 0.98
    after: int = 20

    def __post_init__(self) -> None:
        for name, value in (("factor", self.factor), ("decay", self.decay)):
            if not is_number(value):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not 1 < self.factor < math.inf:
            raise ValueError(
                f"factor must be greater than 1, and finite, got {self.factor}; half of all values are above their mean"
            )
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"decay must be at least 0 and less than 1, got {self.decay}; 0.98 averages over about 50 windows"
            )
        checked_count(self.after, "after", "; it is the number of windows that the mean is of before it decides")
