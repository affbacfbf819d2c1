"""Loss terms with denominators of their own.

The gradient's error by the number of micro-batches, on one rank and on two. A small language model
with three terms, each a mean over other tokens: the next token of the answer, the one after that
(multi-token prediction), and the squared logarithm of a router's normaliser (MoE's z-loss), over
all tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import fusedaccum as fa
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, ORANGE, PURPLE, label_ends

SUBTITLE = "error of the gradient of three loss terms"
SEQUENCES, LENGTH, VOCABULARY = 16, 48, 64  # of a window
COEFFICIENTS = torch.tensor([1.0, 0.3, 0.1])
MICRO_BATCHES = (1, 2, 4, 8)
MEANS, WEIGHED = "own means, loss / N", "own means, weight=tokens"
COLOURS = {MEANS: ORANGE, WEIGHED: PURPLE, OURS: BLUE}
SEEDS = 5  # windows


class LanguageModel(nn.Module):
    """What a token has seen is the mean over itself and those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.next, self.after, self.router = nn.Linear(32, VOCABULARY), nn.Linear(32, VOCABULARY), nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = self.embedding(tokens)
        seen = own.cumsum(1) / torch.arange(1, tokens.shape[1] + 1).unsqueeze(1)
        hidden = self.body(torch.cat([own, seen], 2))
        return self.next(hidden), self.after(hidden), self.router(hidden)


def window(seed: int) -> tuple[Tensor, Tensor]:
    """A window's padded sequences, and where the answer is in each: 1 token to nearly all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    length = (LENGTH * torch.rand(SEQUENCES, 1, generator=generator) ** 2).long().clamp(min=4)
    prompt = ((length - 2) * torch.rand(SEQUENCES, 1, generator=generator)).long()
    at = torch.arange(LENGTH)
    return torch.where(at < length, tokens, 0), (at >= prompt) & (at < length)


def terms(net: nn.Module, tokens: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each term, and how many tokens it is over."""
    following, after, router = net(tokens)
    one, two = answer[:, 1:], answer[:, 2:] & answer[:, 1:-1]
    sums = [
        F.cross_entropy(following[:, :-1][one], tokens[:, 1:][one], reduction="sum"),
        F.cross_entropy(after[:, :-2][two], tokens[:, 2:][two], reduction="sum"),
        router.logsumexp(2).square().sum(),
    ]
    return torch.stack(sums), counted(tokens, answer)


def counted(tokens: Tensor, answer: Tensor) -> Tensor:
    """How many tokens each term is over: known before any forward."""
    return torch.stack([answer[:, 1:].sum(), (answer[:, 2:] & answer[:, 1:-1]).sum(), torch.tensor(tokens.numel())])


def measure(quick: bool) -> list[Row]:
    """Each way's gradient against the big batch's. Of two ranks, each has half of every window."""
    seeds = 1 if quick else SEEDS
    errors = {1: _errors(seeds, 0, 1)}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (seeds, folder), nprocs=2)  # type: ignore[attr-defined]
        errors[2] = torch.load(Path(folder) / "errors")
    return [
        {"contestant": way, "ranks": ranks, "micro_batches": list(MICRO_BATCHES), "windows": seeds, "errors": of[way]}
        for ranks, of in errors.items()
        for way in COLOURS
    ]


def _on_rank(rank: int, seeds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = _errors(seeds, rank, 2)
    if rank == 0:
        torch.save(found, Path(folder) / "errors")
    dist.destroy_process_group()


def _errors(seeds: int, rank: int, ranks: int) -> dict[str, list[float]]:
    """For every way, the mean error over the windows, by the micro-batches that a rank has."""
    found = {}
    for way, gradient in WAYS.items():
        found[way] = [
            sum(_error(gradient, seed, n, rank, ranks) for seed in range(seeds)) / seeds for n in MICRO_BATCHES
        ]
    return found


def _error(gradient: Way, seed: int, n: int, rank: int, ranks: int) -> float:
    big, net = _model(), _model()
    whole = window(seed)
    sums, counts = terms(big, *whole)
    (COEFFICIENTS * sums / counts).sum().backward()
    own = [part.tensor_split(ranks)[rank] for part in whole]
    gradient(net, list(zip(*(part.tensor_split(n) for part in own))), ranks)
    return digits.error(digits.gradient(net), digits.gradient(big))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel()


def finding(rows: Sequence[Row]) -> str:
    """The errors of each way."""
    errors = {(r["contestant"], r["ranks"]): r["errors"] for r in rows}
    several = errors[WEIGHED, 1][1:] + errors[WEIGHED, 2]
    plain = errors[MEANS, 1][1:] + errors[MEANS, 2]
    ours = max(errors[OURS, 1] + errors[OURS, 2])
    return (
        "Three loss terms, each the mean over its own tokens: weighted by the answer's tokens, the gradient is "
        f"{min(several):.0%} to {max(several):.0%} off the big batch's; unweighted, {min(plain):.0%} to "
        f"{max(plain):.0%}. With each term divided by the window's count, it is at most {ours:.0e} off, in 1 to 8 "
        "micro-batches, on one rank and on two."
    )


def title(rows: Sequence[Row]) -> str:
    """The largest error of the terms' own means."""
    worst = max(max(r["errors"]) for r in rows if r["contestant"] == MEANS)
    return f"Three terms' own means: up to {worst:.0%} off"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """Error by micro-batches, on one rank and on two."""
    figure.set_figheight(5.6)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, ranks in zip(panels, (1, 2)):
        for r in (r for r in rows if r["ranks"] == ranks):
            way = r["contestant"]
            axes.semilogx(r["micro_batches"], r["errors"], "o-", ms=4, color=COLOURS[way], label=way)
        axes.set_yscale("symlog", linthresh=1e-8)  # one micro-batch of one rank is the big batch: 0
        axes.set_xticks(MICRO_BATCHES, MICRO_BATCHES)
        axes.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2, 1])
        axes.minorticks_off()
        axes.set(ylabel="relative error", ylim=(-2e-9, 2), title=f"{ranks} rank{'s' * (ranks > 1)}")
        label_ends(axes)
    panels[-1].set_xlabel("micro-batches of a rank")


Parts = Sequence[tuple[Tensor, Tensor]]
Way = Callable[[nn.Module, Parts, int], None]


def _wrapped(net: nn.Module, n: int, ranks: int, reduction: str) -> fa.AccumulatingOptimizer:
    group = dist.group.WORLD if ranks > 1 else None
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    return fa.AccumulatingOptimizer(sgd, accum_steps=n, reduction=reduction, process_group=group)


def _means(net: nn.Module, parts: Parts, ranks: int) -> None:
    for part in parts:
        sums, counts = terms(net, *part)
        ((COEFFICIENTS * sums / counts).sum() / len(parts)).backward()
    for p in net.parameters() if ranks > 1 else ():
        dist.all_reduce(p.grad)
        p.grad /= ranks


def _weighed(net: nn.Module, parts: Parts, ranks: int) -> None:
    opt = _wrapped(net, len(parts), ranks, "mean")
    for part in parts:
        sums, counts = terms(net, *part)
        opt.backward((COEFFICIENTS * sums / counts).sum(), weight=counts[0])
        opt.step()


def _divided(net: nn.Module, parts: Parts, ranks: int) -> None:
    opt = _wrapped(net, len(parts), ranks, "none")
    counts = sum(counted(*part) for part in parts)
    if ranks > 1:
        dist.all_reduce(counts)
    for part in parts:
        sums, _ = terms(net, *part)
        (ranks * COEFFICIENTS * sums / counts).sum().backward()
        opt.step()


WAYS: dict[str, Way] = {MEANS: _means, WEIGHED: _weighed, OURS: _divided}
