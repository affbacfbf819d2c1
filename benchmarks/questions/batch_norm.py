"""Why did accuracy fall at micro-batch size 1?

BatchNorm with and without pooled statistics, and GroupNorm, at one desired batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import mean

import fusedaccum as fa
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from demo import data
from demo.models import DigitsCNN

from .. import digits
from ..harness import Row
from ..style import BLUE, GREEN, ORANGE, label_ends

SUBTITLE = "test accuracy: no accumulation can fix it; GroupNorm does"
DESIRED = 32
MICRO_BATCHES = (1, 2, 4, 32)
TRAINED = 640  # images, of 1,797; the others are the test set
PLAIN, POOLED, GROUPS = "BatchNorm", "BatchNorm, accumulate_batchnorm", "GroupNorm"
WAYS = {PLAIN: ORANGE, POOLED: BLUE, GROUPS: GREEN}


def measure(quick: bool) -> list[Row]:
    """Train with every way, at every micro-batch size, from a few seeds."""
    epochs, seeds = (1, 1) if quick else (4, 2)
    x, y = (each[: 2 * DESIRED] if quick else each for each in data.digits())
    trained = DESIRED if quick else TRAINED
    rows: list[Row] = []
    for seed in range(seeds):
        for way in WAYS:
            for size in MICRO_BATCHES:
                net = _model(way, seed)
                big = _train(net, x[:trained], y[:trained], size, epochs, way == POOLED)
                told = {"seed": seed, **_told(net, big, x, y, trained)}
                rows.append({"contestant": way, "micro_batch": size, **told})
    return rows


def finding(rows: Sequence[Row]) -> str:
    """Test accuracy at micro-batch 1 and at the desired batch."""
    one, all_ = ({way: _mean(rows, way, size, "accuracy") for way in WAYS} for size in (1, DESIRED))
    plain, pooled = (_mean(rows, way, 1, "variance_error") for way in (PLAIN, POOLED))
    return (
        f"Training with micro-batches of 1 instead of {DESIRED} takes BatchNorm's test accuracy from {all_[PLAIN]:.1%} "
        f"to {one[PLAIN]:.1%} ({one[POOLED]:.1%} with accumulate_batchnorm), and GroupNorm's from {all_[GROUPS]:.1%} "
        f"to {one[GROUPS]:.1%}. The first layer's running variance is then {plain:.0%} off the big batch's, and "
        f"{pooled:.0e} off with accumulate_batchnorm."
    )


def title(rows: Sequence[Row]) -> str:
    """The accuracies at micro-batch 1."""
    of = {way: f"{_mean(rows, way, 1, 'accuracy'):.0%}" for way in WAYS}
    return f"BatchNorm at micro-batch 1: {of[POOLED]}; GroupNorm: {of[GROUPS]}"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Accuracy by micro-batch: the mean of the seeds, and every seed."""
    axes = figure.subplots()
    for way, colour in WAYS.items():
        means = [_mean(rows, way, size, "accuracy") for size in MICRO_BATCHES]
        # BatchNorm's two curves nearly coincide: the first is wide, and shows below the second.
        width, size = (5, 9) if way == PLAIN else (1.6, 5)
        axes.plot(MICRO_BATCHES, means, "o-", lw=width, ms=size, color=colour, label=way)
        mine = [r for r in rows if r["contestant"] == way]
        axes.plot([r["micro_batch"] for r in mine], [r["accuracy"] for r in mine], ".", color=colour, alpha=0.4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(MICRO_BATCHES, [str(size) for size in MICRO_BATCHES])
    axes.set(xlabel=f"samples per micro-batch, of {DESIRED} per window", ylabel="test accuracy", ylim=(0, 1))
    label_ends(axes)


def _model(way: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = DigitsCNN(8)
    if way != GROUPS:
        for i, layer in enumerate(net):
            if isinstance(layer, nn.GroupNorm):
                net[i] = nn.BatchNorm2d(layer.num_channels)
    return net


def _train(net: nn.Module, x: Tensor, y: Tensor, size: int, epochs: int, pooled: bool) -> nn.Module:
    """Train; returns a BatchNorm given whole windows where the model's first got micro-batches."""
    big = nn.BatchNorm2d(net[0].out_channels)
    if pooled:
        fa.accumulate_batchnorm(net)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), accum_steps=DESIRED // size)
    # To zero, so that every way's statistics end where the model does, not some windows behind.
    decay = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, epochs * len(x) // DESIRED)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*BatchNorm layer")  # what it warns of is what is measured
        for epoch in range(epochs):
            for batch in digits.batches(len(x), epoch, DESIRED):
                with torch.no_grad():
                    big(net[0](x[batch]))
                for i in batch.split(size):
                    F.cross_entropy(net(x[i]), y[i]).backward()
                    opt.step()
                decay.step()
    return big


@torch.no_grad()
def _told(net: nn.Module, big: nn.Module, x: Tensor, y: Tensor, trained: int) -> Row:
    """Accuracy and loss in eval(); distance of the first norm's running variance from ``big``'s."""
    norm = net.eval()[1]
    right = (net(x[trained:]).argmax(1) == y[trained:]).double().mean().item()
    error = 0.0
    if isinstance(norm, nn.BatchNorm2d):
        error = digits.error(norm.running_var, big.running_var)
    return {"accuracy": right, "loss": F.cross_entropy(net(x[:trained]), y[:trained]).item(), "variance_error": error}


def _mean(rows: Sequence[Row], way: str, size: int, name: str) -> float:
    return mean(float(r[name]) for r in rows if r["contestant"] == way and r["micro_batch"] == size)
