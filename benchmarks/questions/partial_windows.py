"""A last window that is not full, or a batch that is no multiple of the micro-batch.

The gradient's error by what the window holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fusedaccum as fa
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, ORANGE, PURPLE, label_ends

SUBTITLE = "error of the gradient, by what the last window holds"
DESIRED, MICRO_BATCH = 100, 32  # three of 32 samples and one of 4
N = -(-DESIRED // MICRO_BATCH)
FULL, HELD = "loss / N", "loss / micro-batches held"
COLOURS = {FULL: ORANGE, HELD: PURPLE, OURS: BLUE}


def measure(quick: bool) -> list[Row]:
    """Windows of 4 to ``DESIRED`` samples: each way's gradient against that of one batch."""
    x, y = digits.samples(DESIRED)
    held = [4, 50, DESIRED] if quick else list(range(4, DESIRED + 1, 4))
    rows: list[Row] = []
    for way in COLOURS:
        errors = []
        for n in held:
            big, net = digits.model(), digits.model()
            digits.loss(big, x[:n], y[:n]).backward()
            WAYS[way](net, x[:n].split(MICRO_BATCH), y[:n].split(MICRO_BATCH))
            errors.append(digits.error(digits.gradient(net), digits.gradient(big)))
        rows.append({"contestant": way, "samples": held, "errors": errors})
    return rows


def finding(rows: Sequence[Row]) -> str:
    """The largest error of every way, and the error of ``loss / N`` even in a full window."""
    errors = {r["contestant"]: r["errors"] for r in rows}
    return (
        f"The gradient of loss / {N} is up to {max(errors[FULL]):.0%} off, and still {errors[FULL][-1]:.0%} in a full "
        f"window, because {DESIRED} is not {N} × {MICRO_BATCH}. Divided by the number of micro-batches held, it is up "
        f"to {max(errors[HELD]):.0%} off; weighted and flushed, at most {max(errors[OURS]):.0e}."
    )


def title(rows: Sequence[Row]) -> str:
    """The largest error of the two divisors."""
    worst = max(max(r["errors"]) for r in rows if r["contestant"] != OURS)
    return f"Partial windows, divided: up to {worst:.0%} off"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Relative error by samples in the window."""
    axes = figure.subplots()
    for r, size in zip(rows, (3, 7, 3), strict=True):  # the second shows below the third where both are 0
        label = r["contestant"].replace(" / micro", " /\nmicro")
        axes.plot(r["samples"], r["errors"], "o-", ms=size, color=COLOURS[r["contestant"]], label=label)
    for edge in range(MICRO_BATCH, DESIRED, MICRO_BATCH):
        axes.axvline(edge, color="black", lw=0.8, ls=":")
    axes.set(xlabel=f"samples (dotted: a micro-batch of {MICRO_BATCH} is full)", ylabel="relative error")
    label_ends(axes)


Way = Callable[[nn.Module, Sequence[Tensor], Sequence[Tensor]], object]


def _divided(net: nn.Module, xs: Sequence[Tensor], ys: Sequence[Tensor], by: int) -> None:
    for x, y in zip(xs, ys):
        (digits.loss(net, x, y) / by).backward()


def _flushed(net: nn.Module, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), window_weight=DESIRED)
    for x, y in zip(xs, ys):
        opt.backward(digits.loss(net, x, y), weight=len(x))
        opt.step()
    if not opt.updated:
        opt.flush()


WAYS: dict[str, Way] = {
    FULL: lambda net, xs, ys: _divided(net, xs, ys, by=N),
    HELD: lambda net, xs, ys: _divided(net, xs, ys, by=len(xs)),
    OURS: _flushed,
}
