"""What does the end of a window take when the optimizer is in CPU memory?

AdamW, fused, on bf16 parameters, with a window's sums given. On a GPU the floor is what takes
longer of the two that have to be done: the sums over the link one way while the parameters come the
other, or AdamW's pass over FP32 numbers in CPU memory. Without a GPU nothing crosses a link: what
is left is the step in parts, which split masters take, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fusedaccum as fa
import torch
from torch import Tensor, nn

from . import environment
from .harness import OURS, Contestant, Options, Row, Sink, filled, race, rows_of

NAME = "cpu_optimizer"
SET_NAMES = {"cpu": ("resnet-101", "gpt2-124m"), "cuda": ("gpt2-124m", "llama3-8b")}  # the last takes 40 GB of memory
AWAY = {"optimizer_device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "masters beside the parameters": {"master_weights": True},
    "split masters": {"master_weights": "split"},
    "masters and buffers in CPU memory": {"master_weights": True, "buffer_device": "cpu"},
}
LINK = "link, both ways at once"
ALONE = "AdamW in CPU memory, alone"
MOVED = 28  # bytes an element that AdamW reads and writes: gradient, weight and two averages in FP32


def run(options: Options) -> list[Row]:
    """Race the ways; returns the rows."""
    sets = options.chosen(SET_NAMES[environment.device.type])
    with Sink(NAME, options, len(sets)) as sink:
        for name in sets:
            sink.case(name)
            shapes = options.shapes_of(name)
            grads = filled(shapes.shapes, torch.bfloat16)
            contestants = [Contestant(OURS, _window(grads, options.backend, AWAY), kind="ours")]
            for way, settings in WAYS.items():
                if environment.device.type != "cpu" or "buffer_device" not in settings:
                    contestants.append(Contestant(way, _window(grads, options.backend, settings), kind="variant"))
            contestants.append(Contestant(ALONE, _alone(grads), kind="floor"))
            if environment.device.type != "cpu":
                contestants.append(Contestant(LINK, _link(grads), kind="floor"))
            case: Row = {"set": name, "set_note": shapes.note, "elements": shapes.elements}
            moved = shapes.elements * MOVED
            sink.add(rows_of(case, contestants, race(contestants, options.rounds), moved))
    return sink.rows


def _window(grads: list[Tensor], backend: str, settings: dict[str, Any]) -> Callable[[int], object]:
    """A window of one micro-batch, whose gradients are given to autograd."""
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    if "buffer_device" not in settings:  # there a CPU adds
        settings = settings | {"backend": backend}
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW(params, lr=1e-3, fused=True), 1, max_grad_norm=1.0, **settings)

    def window(_: int) -> None:
        torch.autograd.backward(params, grads)
        opt.step()
        opt.zero_grad()

    return window


def _alone(grads: list[Tensor]) -> Callable[[int], object]:
    """AdamW with FP32 parameters and gradients that are in CPU memory already."""
    params = [nn.Parameter(torch.zeros_like(grad, dtype=torch.float32, device="cpu")) for grad in grads]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    return lambda _: optimizer.step()


def _link(grads: list[Tensor]) -> Callable[[int], object]:
    """FP32 sums to pinned memory, and bf16 parameters from there, on a stream each."""
    down, up = torch.cuda.Stream(), torch.cuda.Stream()
    sizes = [grad.numel() for grad in grads]
    sums, parameters = (
        torch.empty(max(sizes), dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16)
    )
    arriving, leaving = (torch.empty_like(x, device="cpu", pin_memory=True) for x in (sums, parameters))

    def both(_: int) -> None:
        for stream, target, source in ((down, arriving, sums), (up, parameters, leaving)):
            with torch.cuda.stream(stream):
                for n in sizes:
                    target[:n].copy_(source[:n], non_blocking=True)

    return both
