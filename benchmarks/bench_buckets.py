"""What does holding gradients in buckets cost on a CPU?

Process time and page faults of windows of 8, steps included. Memory that is freed in one piece goes
back to the system, and the next backward faults it in again: how often depends on all that a
process has allocated. So here every contestant is a process of its own, and they take turns. Time
is the process's own, on all its threads, because that is what faults cost; a neighbour on the same
cores disturbs it less than the clock on the wall.

"Buckets of 8 MiB" is what the wrapper did for every model once; it goes below the public API.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from unittest import mock

import fusedaccum as fa
import torch
from torch import Tensor, nn

from .harness import OURS, Options, Row, Sink, Timing, ratios, spread
from .models import LanguageModel, Size

NAME = "buckets"
MICRO_BATCHES = 8
AT_LEAST = 0.2  # seconds of a measurement
MODELS = {
    "gpt-50k": Size(256, 32, 2, 128, 3),
    "gpt-1m": Size(1024, 128, 4, 512, 5),
    "gpt-3m": Size(2048, 192, 6, 768, 6),
    "gpt-11m": Size(4096, 320, 5, 1280, 8),
}
# Models, sequences in a micro-batch, and tokens in each; fewer where a processor without bf16
# instructions takes long. Larger models have gradients of more than 8 MiB, and buckets of that size
# then as now: bench_step.py measures one.
CASES = {
    "fp32": {"gpt-50k": (8, 64), "gpt-1m": (4, 64), "gpt-3m": (4, 64), "gpt-11m": (2, 64)},
    "bf16": {"gpt-1m": (1, 16), "gpt-3m": (1, 16)},
}
EIGHT, BF16_SUMS = f"{OURS}, buckets of 8 MiB", f"{OURS}, bf16 sums"
PLAIN, BY_HAND = "plain p.grad", "FP32 sums by hand"
WAYS = {"fp32": (OURS, EIGHT, PLAIN), "bf16": (OURS, EIGHT, BF16_SUMS, BY_HAND, PLAIN)}
KINDS = {OURS: "ours", EIGHT: "variant", BF16_SUMS: "variant"}
# What a way of ours does as much for as these: it is held against them.
PEERS = {OURS: {"fp32": PLAIN, "bf16": BY_HAND}, EIGHT: {"fp32": PLAIN, "bf16": BY_HAND}, BF16_SUMS: {"bf16": PLAIN}}


def run(options: Options) -> list[Row]:
    """Race the windows; returns the rows."""
    threads = sorted({1, torch.get_num_threads()})
    todo = [(w, name, t) for w in CASES for name in CASES[w] for t in threads]
    if options.quick:
        todo = todo[:1]
    with Sink(NAME, options, len(todo)) as sink:
        for weights, name, count in todo:
            sink.case(f"{name} {weights}, {count} threads")
            sequences, tokens = CASES[weights][name]
            case: Row = {"set": name, "weights": weights, "with_threads": count, "micro_batches": MICRO_BATCHES}
            sink.add(_raced(case | {"sequences": sequences, "tokens": tokens}, options))
    return sink.rows


def _raced(case: Row, options: Options) -> list[Row]:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    weights = str(case["weights"])
    pipes: dict[str, Connection] = {}
    processes = []
    for way in WAYS[weights]:
        pipes[way], theirs = server.Pipe()
        processes.append(server.Process(target=_serve, args=(theirs, way, case, options.backend), daemon=True))
        processes[-1].start()
        theirs.close()
    sizes = {way: pipe.recv() for way, pipe in pipes.items()}[OURS]

    def measure(way: str, windows: int) -> tuple[float, float]:
        pipes[way].send(windows)
        return pipes[way].recv()

    for way in pipes:
        measure(way, 3)  # the optimizer's state, and the heap as it will be
    windows = max(1, round(AT_LEAST / measure(OURS, 1)[0]))
    timings = {way: Timing() for way in pipes}
    faults: dict[str, list[float]] = {way: [] for way in pipes}
    shuffled = random.Random(0)
    for _ in range(options.rounds):
        for way in shuffled.sample(list(pipes), len(pipes)):
            seconds, faulted = measure(way, windows)
            timings[way].seconds.append(seconds)
            faults[way].append(faulted)
    for pipe, process in zip(pipes.values(), processes):
        pipe.close()
        process.join()
    rows = []
    for way, t in timings.items():
        row: Row = {**case, **sizes, "contestant": way, "kind": KINDS.get(way, "peer")}
        row |= {"median_ms": 1e3 * t.median, "p10_ms": 1e3 * t.percentile(10), "p90_ms": 1e3 * t.percentile(90)}
        row |= {"least_ms": 1e3 * min(t.seconds), "rounds": len(t.seconds), "faults": statistics.median(faults[way])}
        peer = PEERS.get(way, {}).get(weights)
        if peer:
            row |= {"against": peer, **spread("takes", ratios(t, timings[peer]))}
            row["least_takes"] = min(t.seconds) / min(timings[peer].seconds)
        rows.append(row)
    return rows


def _serve(pipe: Connection, way: str, case: Row, backend: str) -> None:
    """A contestant's process.

    For each number that it is sent, it runs as many windows, and answers with the CPU seconds and
    page faults of one.
    """
    torch.set_num_threads(int(str(case["with_threads"])))
    torch.manual_seed(0)
    size = MODELS[str(case["set"])]
    net = LanguageModel(size).to({"bf16": torch.bfloat16, "fp32": torch.float32}[str(case["weights"])])
    shape = int(str(case["sequences"])), int(str(case["tokens"])) + 1
    batches = [torch.randint(size.vocabulary, shape) for _ in range(MICRO_BATCHES)]
    grads = [p.nbytes for p in net.parameters()]
    sizes = {"parameters": sum(p.numel() for p in net.parameters()), "tensors": len(grads)}
    with mock.patch("fusedaccum.limits.full_at", lambda *_: 8 << 20) if way == EIGHT else mock.MagicMock():
        window = _window(way, net, batches, backend)
    pipe.send(sizes | {"gradient_bytes": sum(grads), "largest_gradient_bytes": max(grads)})
    while True:
        try:
            windows = pipe.recv()
        except EOFError:
            return
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        for _ in range(windows):
            window()
        seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pipe.send((seconds / windows, (after - before) / windows))


def _window(way: str, net: nn.Module, batches: list[Tensor], backend: str) -> Callable[[], None]:
    params = list(net.parameters())
    opt: torch.optim.Optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    if way.startswith(OURS):
        dtype = None if way == BF16_SUMS else torch.float32
        opt = fa.AccumulatingOptimizer(opt, accum_steps=MICRO_BATCHES, buffer_dtype=dtype, backend=backend)

        def ours() -> None:
            for x in batches:
                net(x).backward()
                opt.step()
                opt.zero_grad()

        return ours

    def plain() -> None:
        for x in batches:
            (net(x) / MICRO_BATCHES).backward()
        opt.step()
        opt.zero_grad()

    if way == PLAIN:
        return plain
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in params]

    def by_hand() -> None:
        torch._foreach_zero_(sums)
        for x in batches:
            (net(x) / MICRO_BATCHES).backward()
            torch._foreach_add_(sums, [p.grad for p in params])
            opt.zero_grad()
        for p, total in zip(params, sums):
            p.grad = total.to(p.dtype)
        opt.step()
        opt.zero_grad()

    return by_hand
