"""Does ``fa.explain`` predict the time of accumulation?

Its seconds, and those that a real window spends accumulating, in the same round. A window of 8
micro-batches goes through autograd and the wrapper. What is measured is the time within the
library's calls: adds, the pass that closes the window, and masters on their way back; for plain
``p.grad``, the time within autograd's AccumulateGrad. Each round asks explain again, right before
the windows, so that both find the machine in the same state; a ratio is the median over the rounds.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import fusedaccum as fa
import torch
from torch.nn import Parameter

from .bench_accumulate import DTYPES
from .gradients import Hold, loss_with
from .harness import Options, Row, Sink, filled, percentile, wait_for_device

NAME = "explain"
MICRO_BATCHES = 8
SET_NAMES = ("gpt2-124m", "resnet-101")
SETTINGS: dict[str, dict[str, object]] = {
    "FP32 buffers": {},
    "24-bit sums": {"buffer_dtype": torch.bfloat16, "rounding": "compensated"},
    "16-bit buffers": {"buffer_dtype": None, "rounding": "stochastic"},
    "master weights": {"master_weights": True},
    "split masters": {"master_weights": "split"},
    "24-bit sums, split masters": {
        "buffer_dtype": torch.bfloat16,
        "rounding": "compensated",
        "master_weights": "split",
    },
    "skip_micro_batch": {"nonfinite": "skip_micro_batch"},
    "buffers in CPU memory": {"buffer_device": "cpu"},
    "masters there too": {"buffer_device": "cpu", "master_weights": True},
}
PLAIN = "plain p.grad"
MEASURED = ("accumulate_", "scale_", "cast_", "stats")
Window = Callable[[], float]  # runs a window, and returns the seconds that accumulation took


def run(options: Options) -> list[Row]:
    """Predict and measure in turn; returns the rows, one per mode."""
    dtypes = ("bf16",) if options.quick else ("bf16", "fp32")
    todo = [(s, d) for s in options.chosen(SET_NAMES) for d in dtypes]
    with Sink(NAME, replace(options, backend="auto"), len(todo)) as sink:  # as explain and its modes have it
        for name, dtype in todo:
            sink.case(f"{name} {dtype}")
            shapes = options.shapes_of(name)
            grads = filled(shapes.shapes, DTYPES[dtype])
            windows, found = {}, ask(grads)
            for mode in found.modes:
                if mode.name in SETTINGS:
                    windows[mode.name] = wrapped(grads, SETTINGS[mode.name])
            windows[PLAIN] = plain(grads)
            case: Row = {"set": name, "weights": dtype, "micro_batches": MICRO_BATCHES, "tensors": len(grads)}
            sink.add(_rows(case, grads, windows, options.rounds))
    return sink.rows


def ask(grads: list[torch.Tensor]) -> fa.Explanation:
    """What explain says about parameters like these."""
    return fa.explain([Parameter(g) for g in grads], desired_batch=MICRO_BATCHES, micro_batch=1)


def _rows(case: Row, grads: list[torch.Tensor], windows: dict[str, Window], rounds: int) -> list[Row]:
    for window in windows.values():
        window()  # page faults, thread pools
    said: dict[str, list[float]] = {name: [] for name in windows}
    measured: dict[str, list[float]] = {name: [] for name in windows}
    asking = []
    for _ in range(rounds):
        start = time.perf_counter()
        modes = {mode.name: mode for mode in ask(grads).modes}
        asking.append(time.perf_counter() - start)
        for name, window in windows.items():
            said[name].append(modes[name].seconds)
            measured[name].append(window())
    rows = []
    for name in windows:
        ratios = [a / b for a, b in zip(said[name], measured[name])]
        row: Row = {**case, "contestant": name, "kind": "ours" if name != PLAIN else "peer", "rounds": rounds}
        row |= {"said_ms": 1e3 * statistics.median(said[name]), "median_ms": 1e3 * statistics.median(measured[name])}
        row |= {
            "said_of_measured": statistics.median(ratios),
            "p10": percentile(ratios, 10),
            "p90": percentile(ratios, 90),
        }
        row |= {"bytes": modes[name].moved, "asking_s": statistics.median(asking)}
        rows.append(row)
    return rows


def wrapped(grads: list[torch.Tensor], settings: dict[str, object]) -> Window:
    """A window through the wrapper."""
    params = [Parameter(g.clone()) for g in grads]
    opt = fa.AccumulatingOptimizer(Hold(params), accum_steps=MICRO_BATCHES, **settings)  # type: ignore[arg-type]

    def window() -> float:
        with clocked() as seconds:
            for _ in range(MICRO_BATCHES):
                loss_with(grads, params).backward()
                opt.step()
        return sum(seconds)

    return window


@contextmanager
def clocked() -> Iterator[list[float]]:
    """Within the block, the seconds of every call of ours are recorded."""
    seconds: list[float] = []
    before = {name: getattr(fa.ops, name) for name in MEASURED}

    def timed(op: Callable) -> Callable:
        @functools.wraps(op)
        def call(*args: object, **kwargs: object) -> object:
            wait_for_device()
            start = time.perf_counter()
            result = op(*args, **kwargs)
            wait_for_device()
            seconds.append(time.perf_counter() - start)
            return result

        return call

    for name, op in before.items():
        setattr(fa.ops, name, timed(op))
    try:
        yield seconds
    finally:
        for name, op in before.items():
            setattr(fa.ops, name, op)


def plain(grads: list[torch.Tensor]) -> Window:
    """A window of PyTorch's own accumulation, timed from AccumulateGrad's beginning to its end.

    A gradient that is added is held for so long: to free it is no part of adding, and takes about
    as long where malloc gives its memory back to the system.
    """
    params = [Parameter(g.clone()) for g in grads]
    began, seconds, held = [0.0], [0.0], [torch.empty(0)]

    def begins(grad: torch.Tensor, p: Parameter) -> None:
        if p.grad is not None:  # else AccumulateGrad takes the gradient itself if nothing else holds it
            held[0] = grad
        wait_for_device()
        began[0] = time.perf_counter()

    def ends(_: object) -> None:
        wait_for_device()
        seconds[0] += time.perf_counter() - began[0]
        held[0] = torch.empty(0)

    for p in params:
        p.register_hook(functools.partial(begins, p=p))
        p.register_post_accumulate_grad_hook(ends)

    def window() -> float:
        seconds[0] = 0.0
        for _ in range(MICRO_BATCHES):
            loss_with(grads, params).backward()
        for p in params:
            p.grad = None
        return seconds[0]

    return window
