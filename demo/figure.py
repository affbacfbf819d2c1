"""The demo's figure: a panel per task, with every way's distance from the big batch's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.style import STYLE

from .ways import WAYS, Run, Task

# Okabe and Ito's colours, for the colour-blind, and different dashes, for print in black and white.
LINES = {
    "b": ("#0072B2", "-", 3.0),
    "c": ("#D55E00", "--", 1.8),
    "d": ("#E69F00", ":", 2.2),
    "e": ("#009E73", "-.", 1.8),
}


def draw(results: Sequence[tuple[Task, dict[str, Run]]], path: Path) -> None:
    """Write the figure, which can be read at the width of a phone."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            len(results), figsize=(5.5, 3.9 * len(results)), squeeze=False, layout="constrained"
        )
        for panel, (task, runs) in zip(panels.flat, results, strict=True):
            for key, (colour, dashes, width) in LINES.items():
                if key not in runs:
                    continue
                apart = drift(runs[key], runs["a"])
                label = f"({key}) {WAYS[key].name}"
                panel.semilogy(range(1, len(apart) + 1), apart, color=colour, ls=dashes, lw=width, label=label)
            panel.set(title=task.title, xlabel="step", ylabel="distance / way of (a)")
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        figure.suptitle("Distance from the big batch's weights")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def drift(run: Run, reference: Run) -> list[float]:
    """The weights' distance from the reference's by step, as a share of how far those moved."""
    return [
        ((mine - other).norm() / (other - reference.start).norm()).item()
        for mine, other in zip(run.parameters, reference.parameters, strict=True)
    ]
