"""Does accumulating in bf16 lose precision?

The window's gradient against the FP64 sum of the same micro-batches' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fusedaccum as fa
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, GREEN, NAVY, ORANGE, PURPLE, SKY, label_ends

SUBTITLE = "error of a bf16 model's gradient"
SAMPLES = 4  # of a micro-batch
PLAIN, STOCHASTIC, MASTERS = "p.grad in bf16", f"{OURS}, bf16 sums, stochastic", f"{OURS}, master weights"
COMPENSATED, SPLIT = f"{OURS}, 24-bit sums", f"{OURS}, 24-bit sums, split masters"
IN_24_BITS: dict[str, Any] = {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}
SETTINGS: dict[str, dict[str, Any]] = {
    OURS: {},
    MASTERS: {"master_weights": True},
    COMPENSATED: IN_24_BITS,
    SPLIT: {**IN_24_BITS, "master_weights": "split"},
    STOCHASTIC: {"buffer_dtype": torch.bfloat16, "rounding": "stochastic"},
}
COLOURS = {PLAIN: ORANGE, STOCHASTIC: SKY, OURS: BLUE, MASTERS: NAVY, COMPENSATED: PURPLE, SPLIT: GREEN}
NAMED = 16, 256  # micro-batches of which the finding speaks


def measure(quick: bool) -> list[Row]:
    """Windows of 4 to 1,024 micro-batches of a bf16 model, with the gradient that a way leaves."""
    windows = [*NAMED] if quick else [4**k for k in range(1, 6)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).bfloat16()
    batches = _micro_batches(max(windows))
    sums = torch.stack([_alone(net, *batch) for batch in batches]).cumsum(0)
    exact = [sums[n - 1] / n for n in windows]
    rows: list[Row] = []
    for way in COLOURS:
        errors = [digits.error(_window(way, net, batches[:n]), right) for n, right in zip(windows, exact, strict=True)]
        rows.append({"contestant": way, "windows": windows, "errors": errors})
    return rows


def finding(rows: Sequence[Row]) -> str:
    """The errors at two lengths of the window."""
    few, many = ({r["contestant"]: r["errors"][r["windows"].index(n)] for r in rows} for n in NAMED)
    most = {r["contestant"]: max(r["errors"]) for r in rows}
    return (
        f"After {NAMED[0]} micro-batches a bf16 p.grad is {few[PLAIN]:.1%} off their exact sum, after {NAMED[1]} "
        f"{many[PLAIN]:.1%}. An FP32 sum that is rounded once, to bf16 for the step, is at most {most[OURS]:.1%} off, "
        f"and with master weights, which take it unrounded, {most[MASTERS]:.0e}. With stochastic rounding, bf16 sums "
        f"are {few[STOCHASTIC]:.1%} and {many[STOCHASTIC]:.1%} off. Sums of 24 bits, rounded once to bf16, are at most "
        f"{most[COMPENSATED]:.1%} off, too; unrounded, as split masters take them, {few[SPLIT]:.0e} and "
        f"{many[SPLIT]:.0e}."
    )


def title(rows: Sequence[Row]) -> str:
    """The error of sums in bf16 in the longest window."""
    (plain,) = (r for r in rows if r["contestant"] == PLAIN)
    return f"{plain['windows'][-1]:,} micro-batches in bf16: {plain['errors'][-1]:.0%} off"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Relative error by micro-batches in the window, both logarithmic."""
    axes = figure.subplots()
    for r in rows:
        # An error of exactly 0 has no place on a logarithmic axis.
        points = [(n, error) for n, error in zip(r["windows"], r["errors"], strict=True) if error]
        exact = [n for n, error in zip(r["windows"], r["errors"], strict=True) if not error]
        label = r["contestant"].removeprefix(f"{OURS}, ") + (f", exact up to {exact[-1]}" if exact else "")
        # Sums of 24 bits end where FP32 sums do, so their curve is dashed.
        dashes = "o--" if r["contestant"] == COMPENSATED else "o-"
        axes.loglog(*zip(*points, strict=True), dashes, ms=4, base=2, color=COLOURS[r["contestant"]], label=label)
    axes.set_yscale("log", base=10)
    axes.set_xticks(rows[0]["windows"], [f"{n:,}" for n in rows[0]["windows"]])
    axes.set(xlabel="micro-batches in the window", ylabel="relative error")
    label_ends(axes)


def _micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` micro-batches, of images in a new order each time that all have been seen."""
    images, labels = digits.samples(1536)
    epochs = -(-count * SAMPLES // len(images))
    order = torch.cat([batch for epoch in range(epochs) for batch in digits.batches(len(images), epoch, len(images))])
    return [(images[part].bfloat16(), labels[part]) for part in order[: count * SAMPLES].split(SAMPLES)]


def _alone(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One micro-batch's bf16 gradient, in FP64."""
    return torch.cat(
        [g.double().flatten() for g in torch.autograd.grad(digits.loss(net, x, y), list(net.parameters()))]
    )


def _window(way: str, net: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient that the optimizer steps with after these micro-batches."""
    net.zero_grad()
    if way == PLAIN:
        for x, y in batches:
            (digits.loss(net, x, y) / len(batches)).backward()
        return digits.gradient(net)
    inner, found = torch.optim.SGD(net.parameters(), lr=0.0), []
    inner.register_step_pre_hook(
        lambda *_: found.extend(p.grad.double().flatten() for p in inner.param_groups[0]["params"])
    )
    opt = fa.AccumulatingOptimizer(inner, len(batches), **SETTINGS[way])
    for x, y in batches:
        digits.loss(net, x, y).backward()
        opt.step()
    return torch.cat(found)
