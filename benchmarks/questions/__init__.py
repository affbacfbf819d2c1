"""The questions that every newcomer asks (docs/questions), measured: a file a question, each with

- ``measure(quick) -> list[Row]``: deterministic (PyTorch is seeded before), a minute at most; ``quick`` runs the same code in a second and
  measures nothing. Of a row, ``contestant`` names the way that was gone.
- ``finding(rows) -> str``: what was found, in a line or two with figures from the rows. It is the plot's title, and stands on the page.
- ``draw(rows, axes)``: the plot, from the rows alone.

A file here is a question; what several of them share lies outside.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from matplotlib.axes import Axes

from ..harness import Row


class Question(Protocol):
    """What a file here has to have."""

    def measure(self, quick: bool) -> list[Row]:
        """Rows of everything that is compared."""

    def finding(self, rows: Sequence[Row]) -> str:
        """What the rows say."""

    def draw(self, rows: Sequence[Row], axes: Axes) -> None:
        """Draw the rows; the title is set by the caller."""


QUESTIONS: dict[str, Question] = {m.name: import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}
