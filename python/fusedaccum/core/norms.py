"""Squared norms that came free with the adds: which still hold, and what is left to measure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..scalars import Scalar, to_device, widest
from .buffers import Slot, by_divisor


@dataclass(eq=False)
class _Reading:
    sq_norm: Tensor
    divisor: Scalar  # of the slots it covers: they hold the sum divided by this
    covers: set[Slot]


class SquaredNorms:
    """The sums of squares that :func:`ops.accumulate_` took of the buffers it had just written.

    Args:
        backend: for measuring what no add has.

    Attributes:
        readings: those that still hold, by slot.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.readings: dict[Slot, _Reading] = {}

    def record(self, stats: ops.Stats, slots: Iterable[Slot], divisor: Scalar) -> None:
        """Record ``stats``, which were taken over the buffers of ``slots`` after the call."""
        reading = _Reading(stats.sq_norm, divisor, set(slots))
        for slot in reading.covers:
            self.readings[slot] = reading

    def invalidate(self, slots: Iterable[Slot] | None) -> None:
        """Forget the readings of ``slots``, or all, because their buffers have changed."""
        for slot in list(self.readings) if slots is None else slots:
            self.readings.pop(slot, None)

    def total(self, slots: Iterable[Slot]) -> Tensor:
        """Sum of squares of the sums of ``slots``, 0-d and float64; reads what no add measured."""
        slots = list(slots)
        wanted = set(slots)
        known = dict.fromkeys(self.readings[slot] for slot in slots if slot in self.readings)
        # A reading is void if it covers more than is asked for, or if other code has written since.
        readings = [reading for reading in known if self._still_true(reading, wanted)]
        covered = set().union(*(reading.covers for reading in readings))
        for unread in by_divisor(slot for slot in slots if slot not in covered):
            sq_norm = unread[0].ops.stats([slot.buffer for slot in unread], backend=self._backend).sq_norm
            readings.append(_Reading(sq_norm, unread[0].divisor, set()))
        device = slots[0].device if slots else torch.device("cpu")
        parts = [
            reading.sq_norm.to(device, widest(device)) * to_device(reading.divisor, device) ** 2 for reading in readings
        ]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)

    def save(self) -> list[dict[str, Any]]:
        """The readings as plain values: a sum's bits depend on what was summed together."""
        return [
            {"sq_norm": r.sq_norm.clone(), "divisor": r.divisor, "covers": sorted(slot.index for slot in r.covers)}
            for r in dict.fromkeys(self.readings.values())
            if self._still_true(r, r.covers)
        ]

    def load(self, saved: list[dict[str, Any]], slots: Sequence[Slot]) -> None:
        """Load what :meth:`save` returned."""
        for entry in saved:
            stats = ops.Stats(entry["sq_norm"].clone(), torch.zeros((), dtype=torch.int64))
            self.record(stats, [slots[i] for i in entry["covers"]], entry["divisor"])

    def _still_true(self, reading: _Reading, wanted: set[Slot]) -> bool:
        return reading.covers <= wanted and all(
            self.readings.get(slot) is reading and slot.block.untouched_by_user for slot in reading.covers
        )
