"""What does a window hold in memory? Every allocation of two micro-batches and the step, by PyTorch's own accounting.

The model is the 12 blocks of GPT-2 124M in bf16 (85 million parameters) on a short sequence, so that activations are small
beside gradients. A way's excess is its peak less the parameters, and less the FP32 sums where it has any: what the gradients
of a backward pass take on their way, with activations and temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fusedaccum as fa
import torch
from torch import Tensor, nn

from .harness import OURS, Options, Row, Sink
from .memory import Timeline, mark, recorded
from .models import SIZES, Block

NAME = "memory"
SIZE, TOKENS = SIZES["gpt2-124m"], 8
POINTS = 1500  # of a timeline, in the results


def run(options: Options) -> list[Row]:
    """Record one window a way; the rows, each with its timeline."""
    blocks = 2 if options.quick else SIZE.blocks
    with Sink(NAME, options, len(WAYS)) as sink:
        for name, (note, way, has_sums) in WAYS.items():
            sink.case(name)
            timeline, parameters = _record(blocks, way, options.backend)
            sums = 2 * parameters if has_sums else 0  # FP32 for bf16
            peak = timeline.peak_of("micro-batch", "step")
            row: Row = {"contestant": name, "kind": "ours" if name == OURS else "peer", "note": note, "blocks": blocks}
            row |= {"parameter_bytes": parameters, "sum_bytes": sums, "peak_bytes": peak}
            row |= {"excess_bytes": peak - parameters - sums, "backward_peak_bytes": timeline.peak_of("micro-batch")}
            row |= {"largest_parameter_bytes": 2 * SIZE.width * SIZE.inner, "timeline": _thinned(timeline)}
            row["marks"] = [[label, round(a, 5), round(b, 5)] for label, a, b in timeline.marks]
            sink.add([row])
    return sink.rows


def _record(blocks: int, way: Callable, backend: str) -> tuple[Timeline, int]:
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, SIZE.width, dtype=torch.bfloat16)
    with recorded() as timeline:
        with mark("build"):
            model = nn.Sequential(*(Block(SIZE) for _ in range(blocks))).to(torch.bfloat16)
            parameters = sum(p.numel() * p.itemsize for p in model.parameters())
        with way(model, backend) as (finish, step):
            for _ in range(2):
                with mark("micro-batch"):
                    model(x).float().square().mean().backward()
                    finish()
            with mark("step"):
                step()
        del model
    return timeline, parameters


Window = tuple[Callable[[], object], Callable[[], object]]  # after a micro-batch's backward, at the window's end


@contextmanager
def _plain(model: nn.Module, _: str) -> Iterator[Window]:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    yield (lambda: None), opt.step


@contextmanager
def _copied_afterwards(model: nn.Module, _: str) -> Iterator[Window]:
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]

    def finish() -> None:
        for total, p in zip(sums, model.parameters()):
            total.add_(p.grad)
            p.grad = None

    yield finish, lambda: _sgd(model, sums)


@contextmanager
def _hooked(model: nn.Module, _: str) -> Iterator[Window]:
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        sums[p].add_(p.grad)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    yield (lambda: None), lambda: _sgd(model, list(sums.values()))
    for handle in handles:
        handle.remove()


@contextmanager
def _fused(model: nn.Module, backend: str) -> Iterator[Window]:
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), accum_steps=2, backend=backend)
    micro_batches = 0

    def finish() -> None:
        nonlocal micro_batches
        micro_batches += 1
        if micro_batches == 1:
            opt.step()  # counts the micro-batch; the second one's closes the window, under the mark "step"

    yield finish, opt.step


def _sgd(model: nn.Module, sums: list[Tensor]) -> None:
    """No torch optimizer takes FP32 gradients of bf16 parameters: step by hand, without a copy."""
    with torch.no_grad():
        for p, total in zip(model.parameters(), sums):
            p.add_(total, alpha=-0.05)


WAYS: dict[str, tuple[str, Callable, bool]] = {
    OURS: ("FP32 sums, one bucket of bf16 gradients at a time", _fused, True),
    "p.grad in bf16": ("PyTorch's own accumulation: sums rounded to bf16", _plain, False),
    "add after backward": ("all bf16 gradients of a micro-batch, then FP32 sums", _copied_afterwards, True),
    "a hook a parameter": ("FP32 sums, one gradient at a time, one add_ each", _hooked, True),
}


def _thinned(timeline: Timeline) -> list[list[float]]:
    """At most ``POINTS`` points; of every stretch the highest, so that no peak is lost."""
    points = list(zip(timeline.seconds, timeline.allocated))
    size = max(1, -(-len(points) // POINTS))
    parts = (points[i : i + size] for i in range(0, len(points), size))
    return [[round(s, 5), b] for s, b in (max(part, key=lambda p: p[1]) for part in parts)]
