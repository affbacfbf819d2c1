"""A window of 8 micro-batches on each of several ranks.

What is sent between them, how often, and behind how much of backward? The backward pass only copies
given bf16 gradients (gradients.py), so that what lies between it and the optimizer is what is
timed. Ranks are processes on this machine: with a GPU each when GPUs are measured, else with one
thread each, communicating through gloo. Plain DDP adds in bf16, within a rank and between ranks;
the others add in FP32.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fusedaccum as fa
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import environment
from .gradients import Hold, loss_with, main_grad_hook
from .harness import OURS, Contestant, Options, Row, Sink, filled, race, rows_of
from .shapes import Shape

NAME = "ranks"
SET_NAMES = ("gpt2-124m", "resnet-101")
WINDOW = 8
WAYS = {
    OURS: "ours",
    "fusedaccum, bf16 between ranks": "variant",
    "fusedaccum, shard": "variant",
    "DDP, every micro-batch": "peer",
    "DDP, no_sync": "peer",
    "a hook per parameter, one FP32 all-reduce": "peer",
}


def run(options: Options) -> list[Row]:
    """Race windows over two ranks, or over all GPUs where there are more; returns the rows."""
    ranks = max(2, torch.cuda.device_count()) if environment.device.type == "cuda" else 2
    names = options.chosen(SET_NAMES)
    with Sink(NAME, options, len(names)) as sink:
        for name in names:
            sink.case(name)
            shapes = options.shapes_of(name)
            case: Row = {"set": name, "ranks": ranks, "micro_batches": WINDOW, "elements": shapes.elements}
            case["tensors"] = len(shapes.shapes)
            if environment.device.type == "cuda" and torch.cuda.device_count() < ranks:
                reason = f"needs {ranks} GPUs, but there is only one"
                sink.add(rows_of(case, [Contestant(way, kind=k, skipped=reason) for way, k in WAYS.items()], {}, 0))
                continue
            with Team(ranks, shapes.shapes, options.backend) as team:
                contestants = [Contestant(way, team.window(way), kind=kind) for way, kind in WAYS.items()]
                timings = race(contestants, options.rounds)
            sink.add(rows_of(case, contestants, timings, shapes.elements * (6 + 7 * 10)))
    return sink.rows


class Team:
    """The ranks, each a process that has prepared all ways and runs the one that it is sent."""

    def __init__(self, ranks: int, shapes: tuple[Shape, ...], backend: str):
        self._folder = tempfile.TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            arguments = (
                rank,
                ranks,
                Path(self._folder.name) / "store",
                environment.device.type,
                shapes,
                backend,
                theirs,
            )
            process = spawn.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def window(self, way: str) -> Callable[[int], object]:
        """A function that runs one window in this way on all ranks."""

        def together(_: int) -> None:
            for pipe in self._pipes:
                pipe.send(way)
            for pipe in self._pipes:
                pipe.recv()

        return together

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def serve(
    rank: int, ranks: int, store: Path, kind: str, shapes: tuple[Shape, ...], backend: str, pipe: Connection
) -> None:
    """What a rank's process does until it receives None."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
        environment.device = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    ways = prepared(shapes, backend)
    while (way := pipe.recv()) is not None:
        ways[way]()
        if kind == "cuda":
            torch.cuda.synchronize()
        pipe.send(way)
    dist.destroy_process_group()


class Parameters(nn.Module):
    """Parameters whose backward gives them copies of given gradients."""

    def __init__(self, shapes: tuple[Shape, ...]):
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(p) for p in filled(shapes, torch.bfloat16)])

    def forward(self, grads: list[Tensor]) -> Tensor:
        return loss_with(grads, list(self.params))


def prepared(shapes: tuple[Shape, ...], backend: str) -> dict[str, Callable[[], object]]:
    """Every way to do a window, by name."""
    grads = filled(shapes, torch.bfloat16, seed=1)
    return {
        OURS: _ours(shapes, grads, backend, {}),
        "fusedaccum, bf16 between ranks": _ours(shapes, grads, backend, {"comm_dtype": torch.bfloat16}),
        "fusedaccum, shard": _ours(shapes, grads, backend, {"shard": True}),
        "DDP, every micro-batch": _ddp(shapes, grads, True),
        "DDP, no_sync": _ddp(shapes, grads, False),
        "a hook per parameter, one FP32 all-reduce": _main_grad(shapes, grads),
    }


def _ours(
    shapes: tuple[Shape, ...], grads: list[Tensor], backend: str, settings: dict[str, Any]
) -> Callable[[], object]:
    module = DistributedDataParallel(Parameters(shapes))
    opt = fa.AccumulatingOptimizer(Hold(list(module.parameters())), accum_steps=WINDOW, backend=backend, **settings)

    def window() -> None:
        for _ in range(WINDOW):
            module(grads).backward()
            opt.step()
            opt.zero_grad()

    return window


def _ddp(shapes: tuple[Shape, ...], grads: list[Tensor], every: bool) -> Callable[[], object]:
    module = DistributedDataParallel(Parameters(shapes))
    opt = Hold(list(module.parameters()))

    def window() -> None:
        for k in range(WINDOW):
            with nullcontext() if every or k == WINDOW - 1 else module.no_sync():
                (module(grads) / WINDOW).backward()
        opt.step()
        opt.zero_grad()

    return window


def _main_grad(shapes: tuple[Shape, ...], grads: list[Tensor]) -> Callable[[], object]:
    """As in Megatron-LM: FP32 ``main_grad`` in one flat buffer, to which hooks add."""
    module = Parameters(shapes)
    params = list(module.parameters())
    flat = torch.zeros(sum(p.numel() for p in params), device=params[0].device)
    sums = [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in params]), params)]
    for p, total in zip(params, sums):
        p.register_post_accumulate_grad_hook(main_grad_hook(total))
    opt = Hold(params)

    def window() -> None:
        for _ in range(WINDOW):
            module(grads).backward()
        dist.all_reduce(flat)
        flat.div_(WINDOW * dist.get_world_size())
        for p, total in zip(params, sums):
            p.grad = total.to(p.dtype)
        opt.step()
        opt.zero_grad()
        flat.zero_()

    return window
