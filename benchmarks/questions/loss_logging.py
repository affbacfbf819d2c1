"""How do I log a window's loss? What three ways log while a model trains, against the loss of the window as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import fusedaccum as fa
import torch
from matplotlib.axes import Axes

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, ORANGE, PURPLE

TITLE = "The loss that is logged"
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
        f"With unequal micro-batches, the last one's loss is up to {off[LAST]:.0%} off the big batch's, and the plain mean of all "
        f"up to {off[MEAN]:.0%}; last_window.loss is at most {off[OURS]:.0e} off."
    )


def draw(rows: Sequence[Row], axes: Axes) -> None:
    """What is logged, by window, over the big batch's loss."""
    windows = range(1, len(rows[0]["wanted"]) + 1)
    axes.plot(windows, rows[0]["wanted"], color="black", lw=4, alpha=0.25, label="big batch")
    for r in rows:
        name = "last_window.loss" if r["contestant"] == OURS else r["contestant"]
        axes.plot(windows, r["logged"], "-", lw=1.4, color=COLOURS[r["contestant"]], label=name)
    axes.set(xlabel="window", ylabel="loss")
    axes.legend(frameon=False)
