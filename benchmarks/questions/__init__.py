"""The questions that newcomers ask (docs/questions), measured: one file per question, each with

- ``measure(quick) -> list[Row]``: deterministic (PyTorch is seeded before), a minute at most;
  ``quick`` runs the same code in seconds and measures nothing. A row's ``contestant`` names the way
  that was used.
- ``finding(rows) -> str``: the result, in a line or two with figures from the rows. It stands on
  the page, above the plot.
- ``title(rows) -> str``: the result in at most eight words, with a figure from the rows;
  ``SUBTITLE`` says what is drawn.
- ``draw(rows, figure)``: the plot, from the rows alone.

Every file here is a question; code that several of them share is elsewhere.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from matplotlib.figure import Figure

from ..harness import Row


class Question(Protocol):
    """What every file here has to define."""

    SUBTITLE: str

    def measure(self, quick: bool) -> list[Row]:
        """Measure everything that is compared; returns the rows."""

    def finding(self, rows: Sequence[Row]) -> str:
        """The result, in words."""

    def title(self, rows: Sequence[Row]) -> str:
        """The result, as the plot's title."""

    def draw(self, rows: Sequence[Row], figure: Figure) -> None:
        """Draw the rows; the caller sets title and subtitle."""


QUESTIONS: dict[str, Question] = {m.name: import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}
