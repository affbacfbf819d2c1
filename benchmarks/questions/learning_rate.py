"""Must the learning rate change?

Training curves of the big batch, of windows with its rate, and of a batch four times as large.
"""

from __future__ import annotations

from collections.abc import Sequence

import fusedaccum as fa
from matplotlib.figure import Figure
from torch import Tensor

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, label_ends

SUBTITLE = "training loss over all samples"
LR, BATCH, PARTS, GROWN = 0.06, 32, 4, 4
BIG, SUMMED = "big batch", "loss not divided"
UNCHANGED, ROOT, LINEAR = "batch × 4, lr × 1", "batch × 4, lr × 2", "batch × 4, lr × 4"
# reduction, batch, learning rate
WAYS = {
    BIG: (None, BATCH, LR),
    OURS: ("mean", BATCH, LR),
    SUMMED: ("none", BATCH, LR),
    LINEAR: ("mean", GROWN * BATCH, GROWN * LR),
    ROOT: ("mean", GROWN * BATCH, GROWN**0.5 * LR),
    UNCHANGED: ("mean", GROWN * BATCH, LR),
}
COLOURS = {BIG: GREY, OURS: BLUE, SUMMED: ORANGE, LINEAR: GREEN, ROOT: SKY, UNCHANGED: PURPLE}


def measure(quick: bool) -> list[Row]:
    """Train with every way; the loss over all samples after every epoch."""
    x, y = digits.samples(1024)
    epochs = 1 if quick else 8
    return [
        {
            "contestant": name,
            "reduction": str(reduction),
            "batch": batch,
            "lr": lr,
            "losses": losses,
            "loss": losses[-1],
        }
        for name, (reduction, batch, lr) in WAYS.items()
        for losses in [_trained(x, y, epochs, reduction, batch, lr)]
    ]


def finding(rows: Sequence[Row]) -> str:
    """How far windows are from the big batch, and where the other ways end."""
    losses = {r["contestant"]: r["losses"] for r in rows}
    return (
        f"With the window's mean the learning rate stays as it is: the loss is within {_apart(rows):.0e} of the big "
        f"batch's, which ends at {losses[BIG][-1]:.3f}. Without the division it ends at {losses[SUMMED][-1]:.3f}. A "
        f"batch {GROWN} times as large ends at {losses[LINEAR][-1]:.3f} with {GROWN} times the rate, at "
        f"{losses[ROOT][-1]:.3f} with {GROWN**0.5:g} times (the square root), and at {losses[UNCHANGED][-1]:.3f} with "
        "the same rate."
    )


def _apart(rows: Sequence[Row]) -> float:
    losses = {r["contestant"]: r["losses"] for r in rows}
    return max(abs(a - b) / a for a, b in zip(losses[BIG], losses[OURS]))


def title(rows: Sequence[Row]) -> str:
    """How far windows with the same rate are from the big batch."""
    return f"The same rate, the same loss: within {_apart(rows):.0e}"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Loss by epoch: the ways with the big batch, and those with a larger one."""
    figure.set_figheight(5.6)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, batch in zip(panels, (BATCH, GROWN * BATCH)):
        for r in (r for r in rows if r["batch"] == batch):
            epochs = range(1, len(r["losses"]) + 1)
            width = 5 if r["contestant"] == BIG else 1.6  # it shows below the one that coincides with it
            axes.semilogy(epochs, r["losses"], color=COLOURS[r["contestant"]], lw=width, label=r["contestant"])
        axes.set(title=f"batch {batch}", ylabel="loss")
        axes.set_yticks([0.01, 0.1, 1], [0.01, 0.1, 1])
        axes.minorticks_off()
    panels[-1].set_xlabel("epoch")
    for axes in panels:
        label_ends(axes)


def _trained(x: Tensor, y: Tensor, epochs: int, reduction: str | None, batch: int, lr: float) -> list[float]:
    net = digits.model()
    inner = digits.sgd(net, lr)
    opt = inner if reduction is None else fa.AccumulatingOptimizer(inner, accum_steps=PARTS, reduction=reduction)
    losses = []
    for epoch in range(epochs):
        for window in digits.batches(len(x), epoch, batch):
            for part in window.tensor_split(1 if reduction is None else PARTS):
                digits.loss(net, x[part], y[part]).backward()
                opt.step()
                opt.zero_grad()
        losses.append(digits.loss(net, x, y).item())
    return losses
