"""How do I log a window's loss?

What three ways log while a model trains, against the loss of the window as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import fusedaccum as fa
import torch
from matplotlib.figure import Figure

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, ORANGE, PURPLE

SUBTITLE = "what is logged while a model trains"
BATCH, PARTS = 128, 8  # samples and micro-batches per window; the micro-batches are not of one size
LAST, MEAN = "the last micro-batch's loss", "mean of the micro-batches' losses"
COLOURS = {LAST: ORANGE, MEAN: PURPLE, OURS: BLUE}


def measure(quick: bool) -> list[Row]:
    """Train with weights, and log what each way would log."""
    x, y = digits.samples(512)
    net = digits.model()
    opt = fa.AccumulatingOptimizer(digits.sgd(net, lr=0.05), accum_steps=PARTS)
    logged: dict[str, list[float]] = {way: [] for way in COLOURS}
    wanted = []
    for epoch in range(1 if quick else 20):
        for number, batch in enumerate(digits.batches(len(x), epoch, BATCH)):
            with torch.no_grad():
                wanted.append(digits.loss(net, x[batch], y[batch]).item())
            losses = []
            for i in digits.unequal(batch, PARTS, seed=1000 * epoch + number):
                loss = digits.loss(net, x[i], y[i])
                opt.backward(loss, weight=len(i))
                opt.step()
                losses.append(loss.item())
            logged[LAST].append(losses[-1])
            logged[MEAN].append(sum(losses) / PARTS)
            logged[OURS].append(opt.last_window.loss.item())
    errors = {way: [abs(a - b) / b for a, b in zip(values, wanted)] for way, values in logged.items()}
    return [{"contestant": way, "logged": logged[way], "wanted": wanted, "errors": errors[way]} for way in COLOURS]


def finding(rows: Sequence[Row]) -> str:
    """The largest error of each way."""
    off = {r["contestant"]: max(r["errors"]) for r in rows}
    return (
        f"With unequal micro-batches, the last one's loss is up to {off[LAST]:.0%} off the big batch's, and the plain "
        f"mean of all up to {off[MEAN]:.0%}; last_window.loss is at most {off[OURS]:.0e} off."
    )


def title(rows: Sequence[Row]) -> str:
    """The largest error of the last micro-batch's loss."""
    (worst,) = (max(r["errors"]) for r in rows if r["contestant"] == LAST)
    return f"The last micro-batch's loss: up to {worst:.0%} off"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """What is logged, by window, over the big batch's loss; one panel per way."""
    figure.set_figheight(5.6)
    panels = figure.subplots(len(rows), 1, sharex=True, sharey=True)
    windows = range(1, len(rows[0]["wanted"]) + 1)
    for axes, r in zip(panels, rows, strict=True):
        axes.plot(windows, r["wanted"], color="black", lw=5, alpha=0.25, label="big batch")
        axes.plot(windows, r["logged"], lw=1.4, color=COLOURS[r["contestant"]])
        axes.set_title("last_window.loss" if r["contestant"] == OURS else r["contestant"])
        axes.set(ylabel="loss", ylim=(0, None))
    panels[0].legend(loc="upper right")
    panels[-1].set_xlabel("window")
