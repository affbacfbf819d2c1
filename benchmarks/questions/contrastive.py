"""Is there a loss that cannot be accumulated?

A contrastive one, on two views of handwritten digits: the gradient's error, and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fusedaccum as fa
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from demo import data
from demo.models import DigitsCNN

from .. import digits
from ..harness import OURS, Row
from ..memory import recorded
from ..style import BLUE, GREY, ORANGE, label_ends

SUBTITLE = "error and memory, by size of the micro-batch"
BIG, ACCUMULATED, CHECKPOINTED = "big batch", "accumulated", "checkpointed micro-batches, one backward"
IN_FP64 = "added up in FP64"
COLOURS = {BIG: GREY, ACCUMULATED: ORANGE, OURS: BLUE}


def measure(quick: bool) -> list[Row]:
    """A batch's gradient by way and micro-batch size, and peak memory, model and data included."""
    samples, sizes = (16, (4, 16)) if quick else (512, (4, 16, 64, 256, 512))
    exact = _gradient(Pair(samples, torch.float64), BIG, samples)
    rows: list[Row] = []
    for way, own_sizes in {BIG: (samples,), ACCUMULATED: sizes, OURS: sizes}.items():
        for size in own_sizes:
            with recorded("cpu") as timeline:
                found = _gradient(Pair(samples, torch.float32), way, size)
            rows.append(
                {"contestant": way, "dtype": "fp32", "micro_batch_size": size, "error": digits.error(found, exact)}
            )
            rows[-1] |= {"samples": samples, "peak_bytes": timeline.peak}
    return rows + [row for size in sizes[:2] for row in _sums_in_bf16(samples, size)]


def _sums_in_bf16(samples: int, size: int) -> list[Row]:
    """The error of adding up the micro-batches' gradients in bf16, against adding them in FP64."""
    exact = _gradient(Pair(samples, torch.bfloat16), IN_FP64, size)
    ways = (CHECKPOINTED, OURS)
    found = [_gradient(Pair(samples, torch.bfloat16), way, size) for way in ways]
    same = {"dtype": "bf16", "micro_batch_size": size, "samples": samples}
    return [{"contestant": way, **same, "error": digits.error(g, exact)} for way, g in zip(ways, found)]


def finding(rows: Sequence[Row]) -> str:
    """Errors when accumulated and when cached, memory at the smallest size, the error in bf16."""
    accumulated, cached = ([r["error"] for r in _of(rows, way)[:-1]] for way in (ACCUMULATED, OURS))
    (big,), small = _of(rows, BIG), _of(rows, OURS)[0]
    in_bf16 = max(r["error"] for r in rows if r["contestant"] == CHECKPOINTED)
    return (
        f"Accumulated over micro-batches, a contrastive loss has a gradient {min(accumulated):.0%} to "
        f"{max(accumulated):.0%} off the big batch's. That of fa.cached_backward is {max(cached):.0e} off, in "
        f"{small['peak_bytes'] / big['peak_bytes']:.0%} of the memory ({small['samples']} samples in micro-batches of "
        f"{small['micro_batch_size']}). Checkpointing the micro-batches in one backward would sum their gradients in "
        f"bf16, {in_bf16:.1%} off."
    )


def title(rows: Sequence[Row]) -> str:
    """The largest error when accumulated."""
    worst = max(r["error"] for r in _of(rows, ACCUMULATED))
    return f"A contrastive loss, accumulated: up to {worst:.0%} off"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Errors and peaks in memory by micro-batch size, one panel each; the big batch as a level."""
    figure.set_figheight(5.2)
    panels = figure.subplots(2, 1, sharex=True)
    (big,) = _of(rows, BIG)
    for axes, key, unit in zip(panels, ("error", "peak_bytes"), (1, 2**20)):
        axes.axhline(big[key] / unit, color=GREY, ls="--", label=BIG)
        for way in (ACCUMULATED, OURS):
            # One micro-batch is the big batch.
            mine = [r for r in _of(rows, way) if r["micro_batch_size"] < r["samples"]]
            sizes = [r["micro_batch_size"] for r in mine]
            axes.loglog(sizes, [r[key] / unit for r in mine], "o-", ms=4, color=COLOURS[way], label=way)
        axes.set_xticks(sizes, sizes)
        axes.minorticks_off()
    panels[0].set(ylabel="error of the gradient", ylim=(1e-8, 1))
    panels[1].set(ylabel="peak, MiB", xlabel=f"samples per micro-batch, of {big['samples']}")
    panels[1].set_yticks([1, 2, 5, 10, 20], [1, 2, 5, 10, 20])
    for axes in panels:
        label_ends(axes)


def _of(rows: Sequence[Row], way: str) -> list[Row]:
    return [r for r in rows if r["contestant"] == way and r["dtype"] == "fp32"]


class Pair:
    """An encoder, two views of every digit, and a SimCLR-like loss with a learned temperature."""

    def __init__(self, samples: int, dtype: torch.dtype):
        torch.manual_seed(0)
        images = data.digits()[0][:samples]
        shifted = [torch.roll(images, shift, dims=3) for shift in (1, -1)]
        self.views = [(view + 0.1 * torch.randn_like(view)).to(dtype) for view in shifted]
        self.encoder = DigitsCNN(16).to(dtype)
        self.scale = nn.Parameter(torch.tensor(10.0).to(dtype))
        self.parameters = [*self.encoder.parameters(), self.scale]

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        logits = self.scale * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _big(pair: Pair, _: int) -> list[Tensor]:
    pair.loss(*map(pair.encoder, pair.views)).backward()
    return [p.grad for p in pair.parameters]


def _accumulated(pair: Pair, size: int) -> list[Tensor]:
    parts = list(zip(*(view.split(size) for view in pair.views)))
    for part in parts:
        (pair.loss(*map(pair.encoder, part)) / len(parts)).backward()
    return [p.grad for p in pair.parameters]


def _cached(pair: Pair, size: int) -> list[Tensor]:
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(pair.parameters, lr=0.1))
    fa.cached_backward(pair.loss, [pair.encoder] * 2, pair.views, micro_batch_size=size, opt=opt)
    return [p.grad for p in pair.parameters]


def _checkpointed(pair: Pair, size: int) -> list[Tensor]:
    def embed(view: Tensor) -> Tensor:
        return torch.cat([checkpoint(pair.encoder, part, use_reentrant=False) for part in view.split(size)])

    pair.loss(*map(embed, pair.views)).backward()
    return [p.grad for p in pair.parameters]


def _in_fp64(pair: Pair, size: int) -> list[Tensor]:
    sums = {p: torch.zeros_like(p, dtype=torch.float64) for p in pair.parameters}

    def take(p: Tensor) -> None:
        sums[p].add_(p.grad)
        p.grad = None

    for p in pair.parameters:
        p.register_post_accumulate_grad_hook(take)
    fa.cached_backward(pair.loss, [pair.encoder] * 2, pair.views, micro_batch_size=size)
    return list(sums.values())


WAYS: dict[str, Callable[[Pair, int], list[Tensor]]] = {
    BIG: _big,
    ACCUMULATED: _accumulated,
    OURS: _cached,
    CHECKPOINTED: _checkpointed,
    IN_FP64: _in_fp64,
}


def _gradient(pair: Pair, way: str, size: int) -> Tensor:
    return torch.cat([g.double().flatten() for g in WAYS[way](pair, size)])
