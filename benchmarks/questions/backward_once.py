"""Backward once on a summed loss, or once per micro-batch?

What each holds while it runs, and whether the gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fusedaccum as fa
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from demo.models import SmallGPT

from .. import digits
from ..harness import OURS, Row
from ..memory import mark, recorded
from ..style import BLUE, GREY, ORANGE, PURPLE

SUBTITLE = "memory of one step, over its course"
PARTS, SEQUENCES, TOKENS = 8, 4, 64  # micro-batches, and what each holds
BIG, ONCE, EACH = "big batch", "one backward, of the sum", "a backward per micro-batch"
COLOURS = {BIG: GREY, ONCE: ORANGE, EACH: PURPLE, OURS: BLUE}


def measure(quick: bool) -> list[Row]:
    """A window by every way: what is allocated throughout, its gradient against the big batch's."""
    batch = torch.randint(0, 256, (PARTS * SEQUENCES, TOKENS))
    rows: list[Row] = []
    big = None
    for name, way in WAYS.items():
        torch.manual_seed(0)
        with recorded("cpu") as timeline:
            with mark("build"):
                net = SmallGPT(32 if quick else 128, 2, 4, TOKENS)
                window = way(net)
            with mark("window"):
                window(batch)
        gradient = digits.gradient(net)
        big = gradient if big is None else big
        error = digits.error(gradient, big)
        peak, levels = timeline.peak_of("window"), timeline.highest("window", 300)
        rows.append({"contestant": name, "peak_bytes": peak, "error": error, "allocated": levels})
        del net, window
    return rows


def finding(rows: Sequence[Row]) -> str:
    """The peaks, and how far apart the gradients are."""
    peak = {r["contestant"]: f"{r['peak_bytes'] / 2**20:.0f} MiB" for r in rows}
    error = max(r["error"] for r in rows)
    return (
        f"One backward of the sum of {PARTS} losses peaks at {peak[ONCE]} of memory (the big batch at {peak[BIG]}); "
        f"one backward per micro-batch peaks at {peak[EACH]}, and with fusedaccum at {peak[OURS]}. The gradients "
        f"differ by at most {error:.0e}."
    )


def title(rows: Sequence[Row]) -> str:
    """The peaks of one backward and of one per micro-batch."""
    peak = {r["contestant"]: r["peak_bytes"] / 2**20 for r in rows}
    return f"Backward once: {peak[ONCE]:.0f} MiB; per micro-batch: {peak[EACH]:.0f} MiB"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Allocated bytes from the window's start to its end, one panel per way."""
    figure.set_figheight(5.4)
    panels = figure.subplots(len(rows), 1, sharex=True, sharey=True)
    for axes, r in zip(panels, rows, strict=True):
        levels = [b / 2**20 for b in r["allocated"]]
        at = [i / (len(levels) - 1) for i in range(len(levels))]
        axes.fill_between(at, levels, color=COLOURS[r["contestant"]])
        axes.set_title(f"{r['contestant']}: peak {r['peak_bytes'] / 2**20:.0f} MiB")
        axes.set(ylabel="MiB", ylim=(0, None), xlim=(0, 1), xticks=[])
    panels[-1].set_xlabel("from the window's start to its end")


Window = Callable[[Tensor], object]


def _loss(net: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _once(net: nn.Module) -> Window:
    return lambda batch: sum(_loss(net, part) / PARTS for part in batch.split(SEQUENCES)).backward()


def _each(net: nn.Module) -> Window:
    def window(batch: Tensor) -> None:
        for part in batch.split(SEQUENCES):
            (_loss(net, part) / PARTS).backward()

    return window


def _ours(net: nn.Module) -> Window:
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), accum_steps=PARTS)

    def window(batch: Tensor) -> None:
        for part in batch.split(SEQUENCES):
            _loss(net, part).backward()
            opt.step()

    return window


WAYS: dict[str, Callable[[nn.Module], Window]] = {
    BIG: lambda net: lambda batch: _loss(net, batch).backward(),
    ONCE: _once,
    EACH: _each,
    OURS: _ours,
}
