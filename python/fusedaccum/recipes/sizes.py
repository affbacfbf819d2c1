"""The micro-batch size that fits: found by trial and error for each shape, retried now and then."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..scalars import checked_count
from . import nested

GROW_AFTER = 16  # windows without an error, after which twice the size is tried


def checked_size(size: Any) -> int | None:
    """``micro_batch_size`` as an int, None for "auto". Raises TypeError or ValueError otherwise."""
    if isinstance(size, str) and size == "auto":
        return None
    return checked_count(size, "micro_batch_size", "; 'auto' finds what fits")


@dataclass
class Size:
    """What is known about batches of one shape.

    Attributes:
        elements: in one sample.
        limit: the most samples that a micro-batch gets; None while there has been no error.
        clean: windows in a row in which ``limit`` has fitted.
        patience: clean windows after which ``limit`` doubles; doubles if ``limit`` then fails.
        trial: True if ``limit`` has doubled, and not fitted since.
    """

    elements: int
    limit: int | None = None
    clean: int = 0
    patience: int = GROW_AFTER
    trial: bool = False

    def failed(self, samples: int) -> int:
        """Record that so many samples did not fit; returns how many to try next."""
        fitted, half = 0, -(-samples // 2)
        if self.trial and self.limit is not None:
            self.patience *= 2
            fitted = self.limit // 2
        self.limit, self.clean, self.trial = max(half, fitted) if fitted < samples else half, 0, False
        return self.limit

    def fitted(self, samples: int) -> None:
        """Record that a window of ``samples`` fitted in micro-batches of the limit."""
        if self.limit is None or samples <= self.limit:
            return  # that tells nothing about the limit
        self.clean, self.trial = self.clean + 1, False
        if self.clean >= self.patience:
            self.limit, self.clean, self.trial = 2 * self.limit, 0, True


class Sizes:
    """The sizes for batches of all shapes met so far."""

    def __init__(self) -> None:
        self._known: dict[str, Size] = {}

    def of(self, batch: Any) -> Size:
        """What is known about such batches, to be changed in place.

        A new shape starts with as many elements as fitted in the nearest.
        """
        key, elements = _described(batch)
        if key not in self._known:
            size = self._known[key] = Size(elements)
            near = [known for known in self._known.values() if known.limit is not None]
            if near:
                like = min(near, key=lambda known: abs(math.log(known.elements / elements)))
                size.limit = max(1, (like.limit or 1) * like.elements // elements)
        return self._known[key]

    def state(self) -> dict[str, dict[str, Any]]:
        """All sizes in plain values, by shape."""
        return {key: dataclasses.asdict(size) for key, size in self._known.items()}

    def load(self, state: dict[str, dict[str, Any]]) -> None:
        """Load what :meth:`state` returned."""
        self._known = {key: Size(**size) for key, size in state.items()}


def _described(batch: Any) -> tuple[str, int]:
    """A sample's shape as text (``float32[3, 224, 224] int64[]``), and its number of elements."""
    arrays = [leaf for _, leaf in nested.leaves(batch) if nested.is_array(leaf)]
    shapes = [tuple(array.shape[1:]) for array in arrays]
    texts = [
        f"{str(array.dtype).removeprefix('torch.')}{list(shape)}" for array, shape in zip(arrays, shapes, strict=True)
    ]
    return " ".join(texts), max(1, sum(math.prod(shape) for shape in shapes))
