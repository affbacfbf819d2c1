"""The demo's figure: one row per task, with its loss curves and how far every way drifts from the big batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .ways import WAYS, Run, Task

# Okabe and Ito's colours, for readers who cannot tell red from green, and different dashes for readers in black and white.
LINES = {
    "a": ("black", "-", 2.6),
    "b": ("#0072B2", "-", 1.6),
    "c": ("#D55E00", "--", 1.4),
    "d": ("#E69F00", ":", 1.8),
    "e": ("#009E73", "-.", 1.4),
}


def draw(results: Sequence[tuple[Task, dict[str, Run]]], path: Path) -> None:
    """Write the figure; its titles give the results."""
    style = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#DDDDDD",
    }
    with plt.rc_context({**style, "axes.axisbelow": True, "svg.hashsalt": "fusedaccum"}):
        figure, panels = plt.subplots(
            len(results), 2, figsize=(10, 3.4 * len(results) + 0.6), squeeze=False, layout="constrained"
        )
        for (losses, drifts), (task, runs) in zip(panels, results):
            for key, run in runs.items():
                colour, dashes, width = LINES[key]
                label = f"({key}) {WAYS[key][0]}"
                steps = range(1, len(run.losses) + 1)
                losses.plot(steps, run.losses, color=colour, ls=dashes, lw=width, label=label)
                if key != "a":
                    drifts.semilogy(steps, drift(run, runs["a"]), color=colour, ls=dashes, lw=width, label=label)
            losses.set(title=task.title, xlabel="optimizer step", ylabel="training loss")
            ours, plain = drift(runs["b"], runs["a"])[-1], drift(runs["c"], runs["a"])[-1]
            drifts.set_title(f"drift from the big batch: ours {ours:.1e}, plain {plain:.1e}")
            drifts.set(xlabel="optimizer step", ylabel="largest parameter difference")
            losses.legend(frameon=False)
        figure.suptitle("Micro-batches through fusedaccum train like the big batch", fontsize=13, fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def drift(run: Run, reference: Run) -> list[float]:
    """The largest difference of any parameter from the reference's, after every step."""
    return [(mine - other).abs().max().item() for mine, other in zip(run.parameters, reference.parameters, strict=True)]
