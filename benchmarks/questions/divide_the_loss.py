"""Divide the loss by the number of micro-batches, or not?

Drift from the big batch, with equal and with unequal micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fusedaccum as fa
from matplotlib.figure import Figure
from torch import Tensor, nn

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, GREEN, ORANGE, PURPLE, label_ends

SUBTITLE = "distance from the big batch's weights / distance trained"
BATCH, PARTS = 128, 8  # samples and micro-batches per window
COLOURS = {"loss / N": ORANGE, "not divided": PURPLE, OURS: BLUE, "fusedaccum, sum": GREEN}


def measure(quick: bool) -> list[Row]:
    """Train with every way on the same windows; the drift after each window."""
    x, y = digits.samples(512)
    windows = [batch for epoch in range(1 if quick else 10) for batch in digits.batches(512, epoch, BATCH)]
    rows: list[Row] = []
    for sizes, cut in {
        "equal": lambda batch, i: batch.tensor_split(PARTS),
        "unequal": lambda batch, i: digits.unequal(batch, PARTS, seed=i),
    }.items():
        nets = {way: digits.model() for way in ("big batch", *COLOURS)}
        steps = {way: WAYS[way](net, x, y) for way, net in nets.items()}
        drifts: dict[str, list[float]] = {way: [] for way in COLOURS}
        for i, batch in enumerate(windows):
            for way, step in steps.items():
                step([batch] if way == "big batch" else cut(batch, i))
            for way in COLOURS:
                drifts[way].append(digits.drift(nets[way], nets["big batch"]))
        rows += [
            {"contestant": way, "sizes": sizes, "drifts": drifts[way], "drift": drifts[way][-1]} for way in COLOURS
        ]
    return rows


def finding(rows: Sequence[Row]) -> str:
    """The final drift of the ways that people believe to be right."""
    last = {(r["contestant"], r["sizes"]): r["drift"] for r in rows}
    return (
        f"With unequal micro-batches, training on loss / N ends {last['loss / N', 'unequal']:.0%} of the distance "
        f"trained away from the big batch's result, and on weighted losses {last[OURS, 'unequal']:.0e}. Means that are "
        f"added and never divided end {last['not divided', 'equal']:.0%} away, even with equal micro-batches."
    )


def title(rows: Sequence[Row]) -> str:
    """The final drift of loss / N with unequal micro-batches."""
    (r,) = (r for r in rows if (r["contestant"], r["sizes"]) == ("loss / N", "unequal"))
    return f"Unequal micro-batches: loss / N ends {r['drift']:.0%} off"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Drift by window, for unequal micro-batches and for equal ones.

    Of curves that coincide, each is drawn thinner than the one below.
    """
    figure.set_figheight(5.6)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, sizes in zip(panels, ("unequal", "equal")):
        for r, width in zip((r for r in rows if r["sizes"] == sizes), (6, 1.6, 4, 1.6)):
            windows = range(1, len(r["drifts"]) + 1)
            axes.semilogy(windows, r["drifts"], lw=width, color=COLOURS[r["contestant"]], label=r["contestant"])
        axes.set_title(f"{sizes} micro-batches")
    panels[-1].set_xlabel("window")
    for axes in panels:
        label_ends(axes)


Step = Callable[[Sequence[Tensor]], object]  # the micro-batches of a window


def _plain(net: nn.Module, x: Tensor, y: Tensor, divide_by: int = 1) -> Step:
    opt = digits.sgd(net)

    def step(parts: Sequence[Tensor]) -> None:
        for i in parts:
            (digits.loss(net, x[i], y[i]) / divide_by).backward()
        opt.step()
        opt.zero_grad()

    return step


def _ours(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    opt = fa.AccumulatingOptimizer(digits.sgd(net), accum_steps=PARTS)

    def step(parts: Sequence[Tensor]) -> None:
        for i in parts:
            opt.backward(digits.loss(net, x[i], y[i]), weight=len(i))
            opt.step()

    return step


def _summed(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    opt = fa.AccumulatingOptimizer(digits.sgd(net), accum_steps=PARTS, reduction="sum")

    def step(parts: Sequence[Tensor]) -> None:
        for i in parts:
            digits.loss(net, x[i], y[i], reduction="sum").backward()
            opt.step(weight=len(i))

    return step


WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "big batch": _plain,
    "loss / N": lambda net, x, y: _plain(net, x, y, divide_by=PARTS),
    "not divided": _plain,
    OURS: _ours,
    "fusedaccum, sum": _summed,
}
