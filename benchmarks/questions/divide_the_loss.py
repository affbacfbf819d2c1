"""Divide the loss by the number of micro-batches, or not? Drift from the big batch, with equal and with unequal micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fusedaccum as fa
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, GREEN, ORANGE, PURPLE

PARTS = 8  # micro-batches a window
COLOURS = {"loss / N": ORANGE, "not divided": PURPLE, OURS: BLUE, "fusedaccum, sum": GREEN}


def measure(quick: bool) -> list[Row]:
    """Train by every way on the same windows; the drift after each."""
    x, y = digits.samples(512)
    windows = list(digits.batches(512, 1 if quick else 10))
    rows: list[Row] = []
    for sizes, cut in {
        "equal": lambda batch, i: batch.tensor_split(PARTS),
        "unequal": lambda batch, i: digits.unequal(batch, PARTS, seed=i),
    }.items():
        nets = {way: digits.model() for way in ("big batch", *COLOURS)}
        steps = {way: WAYS[way](net, x, y) for way, net in nets.items()}
        for i, batch in enumerate(windows):
            for way, step in steps.items():
                step([batch] if way == "big batch" else cut(batch, i))
            for way in COLOURS:
                apart = digits.drift(nets[way], nets["big batch"])
                rows.append({"contestant": way, "sizes": sizes, "window": i + 1, "drift": apart})
    return rows


def finding(rows: Sequence[Row]) -> str:
    """The drift at the end, of the ways that people take for right."""
    last = {(r["contestant"], r["sizes"]): r["drift"] for r in rows}
    return (
        f"With unequal micro-batches, loss / N ends {last['loss / N', 'unequal']:.1%} of the way away from the big batch "
        f"(weighed: {last[OURS, 'unequal']:.0e}); not divided at all, {last['not divided', 'equal']:.0%}."
    )


def draw(rows: Sequence[Row], axes: Axes) -> None:
    """Drift by window; unequal micro-batches drawn through, equal ones dashed."""
    for way, colour in COLOURS.items():
        for sizes, dashes in (("unequal", "-"), ("equal", "--")):
            mine = [r for r in rows if (r["contestant"], r["sizes"]) == (way, sizes)]
            label = f"{way}, {sizes}"
            axes.semilogy([r["window"] for r in mine], [r["drift"] for r in mine], dashes, color=colour, label=label)
    axes.set(xlabel="window", ylabel="distance from the big batch / distance trained")
    axes.legend(frameon=False, ncols=2, fontsize=8.5)


Step = Callable[[Sequence[Tensor]], object]  # the micro-batches of a window


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


def _plain(net: nn.Module, x: Tensor, y: Tensor, divide_by: int = 1) -> Step:
    opt = _sgd(net)

    def step(parts: Sequence[Tensor]) -> None:
        for i in parts:
            (digits.loss(net, x[i], y[i]) / divide_by).backward()
        opt.step()
        opt.zero_grad()

    return step


def _ours(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    opt = fa.AccumulatingOptimizer(_sgd(net), accum_steps=PARTS)

    def step(parts: Sequence[Tensor]) -> None:
        for i in parts:
            opt.backward(digits.loss(net, x[i], y[i]), weight=len(i))
            opt.step()

    return step


def _summed(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    opt = fa.AccumulatingOptimizer(_sgd(net), accum_steps=PARTS, reduction="sum")

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
