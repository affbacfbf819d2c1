"""How much of a training step is accumulation? Windows of 8 micro-batches of one sequence, of real models in bf16.

The share is what a way takes beyond forward and backward alone, whose gradients are dropped; the optimizer itself does nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import fusedaccum as fa
import torch
from torch import Tensor, nn

from . import environment, peers
from .gradients import Hold
from .harness import OURS, Contestant, Options, Row, Sink, race, rows_of
from .models import SIZES, Size, language_model

NAME = "step"
MICRO_BATCHES = 8
TOKENS = {"cpu": 64, "cuda": 1024}  # a sequence; short on a CPU, where the whole step is slow
ALONE = "forward and backward alone"


def run(options: Options) -> list[Row]:
    """Race the ways; the rows."""
    on_gpu = environment.device.type == "cuda"
    sizes = (
        {"tiny": Size(100, 64, 4, 128, 2)}
        if options.quick
        else {k: v for k, v in SIZES.items() if on_gpu or k != "llama-1b"}
    )
    with Sink(NAME, options, len(sizes)) as sink:
        for name, size in sizes.items():
            sink.case(name)
            tokens = (
                torch.arange(TOKENS[environment.device.type] + 1, device=environment.device)[None] % size.vocabulary
            )
            net = language_model(size)
            parameters = sum(p.numel() for p in net.parameters())
            contestants = _contestants(net, tokens, options.backend)
            timings = race(contestants, options.rounds)
            case: Row = {
                "set": name,
                "tokens": tokens.numel() - 1,
                "micro_batches": MICRO_BATCHES,
                "parameters": parameters,
            }
            rows = rows_of(case, contestants, timings, parameters * 10 * MICRO_BATCHES)
            for row in rows:
                row["accumulation_share"] = 1 - timings[ALONE].median / timings[str(row["contestant"])].median
            sink.add(rows)
    return sink.rows


def _contestants(net: nn.Module, tokens: Tensor, backend: str) -> list[Contestant]:
    return [
        Contestant(
            OURS, wrapped(copy.deepcopy(net), tokens, backend), kind="ours"
        ),  # a model of its own, for its hooks
        Contestant("p.grad in bf16", plain(net, tokens)),
        Contestant("add after backward", added_after(net, tokens)),
        Contestant(ALONE, lambda _: alone(net, tokens), kind="variant"),
    ]


def wrapped(net: nn.Module, tokens: Tensor, backend: str | None = None) -> Callable[[int], object]:
    """Through the wrapper: FP32 sums, clipped."""
    opt = fa.AccumulatingOptimizer(
        Hold(list(net.parameters())), accum_steps=MICRO_BATCHES, max_grad_norm=1.0, backend=backend or "auto"
    )

    def window(_: int) -> None:
        for _ in range(MICRO_BATCHES):
            opt.backward(net(tokens))
            opt.step()
            opt.zero_grad()

    return window


def plain(net: nn.Module, tokens: Tensor) -> Callable[[int], object]:
    """PyTorch's own: sums rounded to bf16, clipped."""

    def window(_: int) -> None:
        for _ in range(MICRO_BATCHES):
            (net(tokens) / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        net.zero_grad()

    return window


def added_after(net: nn.Module, tokens: Tensor) -> Callable[[int], object]:
    """FP32 sums, a list at a time after each backward, clipped."""
    params = list(net.parameters())
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in params]

    def window(_: int) -> None:
        torch._foreach_zero_(sums)
        for _ in range(MICRO_BATCHES):
            net(tokens).backward()
            peers.add_foreach(sums, [p.grad for p in params], 1 / MICRO_BATCHES)
            net.zero_grad()
        norm, _ = peers.norm_and_finite(sums)
        torch._foreach_mul_(sums, (1.0 / (norm + 1e-6)).clamp(max=1.0))

    return window


def alone(net: nn.Module, tokens: Tensor) -> None:
    """What all the others have in common."""
    for _ in range(MICRO_BATCHES):
        net(tokens).backward()
        net.zero_grad()
