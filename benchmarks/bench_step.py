"""How much of a training step is accumulation?

Windows of 8 micro-batches of one sequence each, with real models in bf16. The share is what a way
takes beyond forward and backward alone, whose gradients are dropped; the optimizer itself does
nothing. On a GPU, buffers in CPU memory are a way too, compared with the time that the link to the
CPU alone takes for a window's gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fusedaccum as fa
import torch
from torch import Tensor, nn

from . import environment, peers
from .gradients import Hold
from .harness import OURS, Contestant, Options, Row, Sink, race, rows_of
from .models import SIZES, Size, language_model

NAME = "step"
MICRO_BATCHES = 8
# Model, and tokens per sequence; short on a CPU, where the whole step is slow.
CASES = {
    "cpu": (("gpt2-124m", 64),),
    "cuda": (("gpt2-124m", 1024), ("llama-1b", 1024), ("llama-1b", 4096)),
}
ALONE = "forward and backward alone"
OFFLOADED = f"{OURS}, buffers in CPU memory"
LINK = "gradients to pinned memory, alone"


def run(options: Options) -> list[Row]:
    """Race the ways; returns the rows."""
    cases = (("tiny", 64),) if options.quick else CASES[environment.device.type]
    with Sink(NAME, options, len(cases)) as sink:
        for name, length in cases:
            sink.case(f"{name}, {length} tokens")
            size = {"tiny": Size(100, 64, 4, 128, 2), **SIZES}[name]
            tokens = torch.arange(length + 1, device=environment.device)[None] % size.vocabulary
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
                share = 1 - timings[ALONE].median / timings[str(row["contestant"])].median
                row["accumulation_share"] = None if row["contestant"] == LINK else share
            sink.add(rows)
    return sink.rows


def _contestants(net: nn.Module, tokens: Tensor, backend: str) -> list[Contestant]:
    ours = wrapped(copy.deepcopy(net), tokens, backend=backend)  # a model of its own, for its hooks
    contestants = [
        Contestant(OURS, ours, kind="ours"),
        Contestant("p.grad in bf16", plain(net, tokens)),
        Contestant("add after backward", added_after(net, tokens)),
        Contestant(ALONE, lambda _: alone(net, tokens), kind="variant"),
    ]
    if environment.device.type != "cpu":
        offloaded = wrapped(copy.deepcopy(net), tokens, buffer_device="cpu")
        contestants.append(Contestant(OFFLOADED, offloaded, kind="variant"))
        contestants.append(Contestant(LINK, over_the_link(net), kind="variant"))
    return contestants


def over_the_link(net: nn.Module) -> Callable[[int], object]:
    """As many bytes as a window's gradients, copied to pinned memory."""
    grads = [torch.empty_like(p) for p in net.parameters()]
    pinned = [torch.empty_like(grad, device="cpu", pin_memory=True) for grad in grads]

    def window(_: int) -> None:
        for _ in range(MICRO_BATCHES):
            for there, grad in zip(pinned, grads):
                there.copy_(grad, non_blocking=True)

    return window


def wrapped(net: nn.Module, tokens: Tensor, **settings: Any) -> Callable[[int], object]:
    """A window through the wrapper: FP32 sums, clipped."""
    opt = fa.AccumulatingOptimizer(
        Hold(list(net.parameters())), accum_steps=MICRO_BATCHES, max_grad_norm=1.0, **settings
    )

    def window(_: int) -> None:
        for _ in range(MICRO_BATCHES):
            opt.backward(net(tokens))
            opt.step()
            opt.zero_grad()

    return window


def plain(net: nn.Module, tokens: Tensor) -> Callable[[int], object]:
    """A window of PyTorch's own accumulation: sums rounded to bf16, clipped."""

    def window(_: int) -> None:
        for _ in range(MICRO_BATCHES):
            (net(tokens) / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        net.zero_grad()

    return window


def added_after(net: nn.Module, tokens: Tensor) -> Callable[[int], object]:
    """A window of FP32 sums, added to by one call after each backward, clipped."""
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
    """The part that all the others have in common."""
    for _ in range(MICRO_BATCHES):
        net(tokens).backward()
        net.zero_grad()
