"""Is there a limit to the batch?

Peak memory over the desired batch, for one big batch and for windows of micro-batches.
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
from ..style import BLUE, GREY, label_ends

SUBTITLE = "peak memory by size of the batch"
TOKENS, MICRO_BATCH = 64, 4  # tokens per sequence, sequences per micro-batch
BIG = "big batch"
COLOURS = {BIG: GREY, OURS: BLUE}


def measure(quick: bool) -> list[Row]:
    """A step's peak at every batch size, by both ways, and how far apart their gradients are."""
    rows: list[Row] = []
    for batch in (4, 8) if quick else (4, 8, 16, 32, 64, 128, 256):
        tokens = torch.randint(0, 256, (batch, TOKENS))
        gradients = {}
        for name, way in ((BIG, _big), (OURS, _windows)):
            torch.manual_seed(0)
            with recorded("cpu") as timeline:
                with mark("build"):
                    net = SmallGPT(32 if quick else 128, 2, 4, TOKENS)
                    window = way(net, batch)
                with mark("window"):
                    window(tokens)
            gradients[name] = digits.gradient(net)
            error = digits.error(gradients[name], gradients[BIG])
            elements = sum(p.numel() for p in net.parameters())
            row: Row = {"contestant": name, "batch": batch, "peak_bytes": timeline.peak_of("window"), "error": error}
            rows.append(row | {"parameter_bytes": 4 * elements, "sum_bytes": 4 * elements})
            del net, window
    return rows


def finding(rows: Sequence[Row]) -> str:
    """The peaks at the smallest batch and at the largest."""
    peaks = {name: [r["peak_bytes"] / 2**20 for r in rows if r["contestant"] == name] for name in COLOURS}
    sizes = [r["batch"] for r in rows]
    error = max(r["error"] for r in rows)
    return (
        f"From a batch of {min(sizes)} sequences to {max(sizes)}, peak memory goes from {peaks[BIG][0]:.0f} to "
        f"{peaks[BIG][-1]:.0f} MiB with the big batch, and from {peaks[OURS][0]:.1f} to {peaks[OURS][-1]:.1f} MiB in "
        f"micro-batches of {MICRO_BATCH}, for a gradient at most {error:.0e} off."
    )


def title(rows: Sequence[Row]) -> str:
    """The peaks at the largest batch."""
    largest = max(r["batch"] for r in rows)
    peak = {r["contestant"]: f"{r['peak_bytes'] / 2**20:.0f}" for r in rows if r["batch"] == largest}
    return f"Batch of {largest}: {peak[OURS]} MiB instead of {peak[BIG]}"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Peaks by batch, above their floors."""
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        batches, peaks = zip(*((r["batch"], r["peak_bytes"] / 2**20) for r in rows if r["contestant"] == name))
        axes.loglog(batches, peaks, "o-", color=colour, label=name)
    floor = rows[0]["parameter_bytes"] / 2**20
    axes.axhline(floor, color="black", lw=0.9, ls=":", label="parameters")
    axes.axhline(floor + rows[0]["sum_bytes"] / 2**20, color="black", lw=0.9, ls=":", label="parameters, and sums")
    axes.set_xticks(batches, batches)
    axes.set_yticks([1, 10, 100], [1, 10, 100])
    axes.minorticks_off()
    axes.set(xlabel=f"desired batch, sequences of {TOKENS} tokens", ylabel="peak of a step, MiB")
    label_ends(axes)


Window = Callable[[Tensor], object]


def _loss(net: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _big(net: nn.Module, _: int) -> Window:
    return lambda tokens: _loss(net, tokens).backward()


def _windows(net: nn.Module, batch: int) -> Window:
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), accum_steps=batch // MICRO_BATCH)

    def window(tokens: Tensor) -> None:
        for part in tokens.split(MICRO_BATCH):
            _loss(net, part).backward()
            opt.step()

    return window
