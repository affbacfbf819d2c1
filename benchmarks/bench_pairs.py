"""Is a training step as fast as the best plain way's?

Windows of 8 micro-batches of real models in bf16: eagerly, with the model compiled, and, on a GPU,
as one CUDA graph. All ways of a case take turns for 30 rounds, and what counts of the ratios within
a round is the median, with the interval that holds it with 95% confidence: so a percent shows even
where rounds differ by ten. Where ours is slower for certain, its row has a profile of one window,
kernel by kernel, beside the best plain way's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import environment
from .bench_step import MICRO_BATCHES, added_after, plain, wrapped
from .harness import OURS, Contestant, Options, Row, Sink, race, rows_of, wait_for_device
from .models import SIZES, Size, language_model
from .peers import why_no_compile

NAME = "pairs"
ROUNDS = 30
SHOWN = 12  # kernels of a profile
Way = Callable[[nn.Module, Tensor], Callable[[int], object]]
PLAIN: dict[str, Way] = {"p.grad in bf16": plain, "add after backward": added_after}
EAGER, COMPILED, GRAPH = "eager", "compiled", "one graph"


@dataclass(frozen=True)
class Batch:
    """A model, and the sequences of a micro-batch."""

    model: str
    sequences: int
    length: int


BATCHES = {
    "cpu": (Batch("gpt2-124m", 1, 64),),
    "cuda": (
        Batch("gpt2-124m", 1, 1024),
        Batch("gpt2-124m", 4, 1024),
        Batch("gpt2-124m", 16, 1024),
        Batch("llama-1b", 1, 1024),
        Batch("llama-1b", 1, 4096),
    ),
}


def run(options: Options) -> list[Row]:
    """Race ours against the plain ways; returns the rows."""
    of_device = (Batch("tiny", 2, 32),) if options.quick else BATCHES[environment.device.type]
    names = options.chosen(dict.fromkeys(batch.model for batch in of_device))
    todo = [(batch, how) for batch in of_device if batch.model in names for how in _hows(options)]
    with Sink(NAME, options, len(todo)) as sink:
        for batch, how in todo:
            sink.case(f"{batch.model}, {batch.sequences} × {batch.length}, {how}")
            net = language_model({"tiny": Size(100, 64, 4, 128, 2), **SIZES}[batch.model])
            tokens = torch.arange(batch.length + 1, device=environment.device) % net.embedding.num_embeddings
            contestants = _contestants(net, tokens.expand(batch.sequences, -1), how, options.backend)
            parameters = sum(p.numel() for p in net.parameters())
            case: Row = {"set": batch.model, "sequences": batch.sequences, "length": batch.length, "how": how}
            case |= {"micro_batches": MICRO_BATCHES, "parameters": parameters}
            timings = race(contestants, options.rounds if options.quick else max(options.rounds, ROUNDS))
            rows = rows_of(case, contestants, timings, parameters * 10 * MICRO_BATCHES)
            _explain(rows, contestants)
            sink.add(rows)
            torch._dynamo.reset()
    return sink.rows


def _hows(options: Options) -> list[str]:
    compiles = [COMPILED] if options.compile and not why_no_compile() else []
    return [EAGER, *compiles, *([GRAPH] if environment.device.type == "cuda" else [])]


def _contestants(net: nn.Module, tokens: Tensor, how: str, backend: str) -> list[Contestant]:
    def ours(net: nn.Module, tokens: Tensor) -> Callable[[int], object]:
        return wrapped(net, tokens, backend=backend)

    def made(way: Way) -> Callable[[int], object]:
        own = copy.deepcopy(net)  # for its hooks, and what it leaves in p.grad
        if how == GRAPH:
            return graphed(lambda: way(own, tokens))
        return way(torch.compile(own) if how == COMPILED else own, tokens)

    peers = [Contestant(name, made(way)) for name, way in PLAIN.items()]
    return [Contestant(OURS, made(ours), kind="ours"), *peers]


def graphed(make: Callable[[], Callable[[int], object]]) -> Callable[[int], object]:
    """A window that replays what ``make`` returns, as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # on which the model was made
    with torch.cuda.stream(stream):
        window, graph = make(), torch.cuda.CUDAGraph()
        for _ in range(2):  # makes what later windows only use
            window(0)
        with torch.cuda.graph(graph, stream=stream):
            window(0)
    wait_for_device()
    return lambda _: graph.replay()


def _explain(rows: list[Row], contestants: list[Contestant]) -> None:
    """Where ours is slower for certain, add to its row where a window's time goes, in ms."""
    ours = next(row for row in rows if row["contestant"] == OURS)
    if ours["speedup_high"] >= 1:
        return
    of = {c.name: _profiled(c) for c in contestants if c.name in (OURS, ours["best_peer"])}
    mine, theirs = of[OURS], of[str(ours["best_peer"])]
    differs = sorted(mine | theirs, key=lambda name: -abs(mine.get(name, 0.0) - theirs.get(name, 0.0)))
    ours["profile"] = [
        [name, round(mine.get(name, 0.0), 3), round(theirs.get(name, 0.0), 3)] for name in differs[:SHOWN]
    ]


def _profiled(contestant: Contestant) -> dict[str, float]:
    """Milliseconds of a window by kernel, or, on a CPU, by operator."""
    on_gpu = environment.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        contestant.run(0)
        wait_for_device()
    took = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return {event.key: getattr(event, took) / 1e3 for event in profile.key_averages()}
