"""How many bytes a parameter does training take at its peak?

AdamW, a bf16 model, every allocation of two windows. The model is that of
:mod:`benchmarks.bench_memory`. Buckets, activations and temporaries are in the peak; ``fa.explain``
leaves out activations, and what the step takes for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import fusedaccum as fa
import torch
from torch import nn

from . import environment
from .bench_memory import SIZE, TOKENS
from .bf16_moments import AdamWInBF16
from .harness import OURS, Options, Row, Sink
from .memory import Timeline, mark, recorded
from .models import Block

NAME = "states"
MICRO_BATCHES = 2
COMPENSATED: dict[str, object] = {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}


class Way(NamedTuple):
    """What trains: a mode, as ``fa.explain`` names it, and an optimizer.

    ``settings`` are the wrapper's arguments for the mode, or None without a wrapper.
    """

    mode: str
    settings: dict[str, object] | None
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW


WAYS = {
    "p.grad in bf16": Way("plain p.grad", None),
    f"{OURS}, master weights": Way("master weights", {"master_weights": True}),
    f"{OURS}, split masters": Way("split masters", {"master_weights": "split"}),
    f"{OURS}, 24-bit sums, split masters": Way(
        "24-bit sums, split masters", {**COMPENSATED, "master_weights": "split"}
    ),
    f"{OURS}, and moments in bf16": Way(
        "24-bit sums, split masters", {**COMPENSATED, "master_weights": "split"}, AdamWInBF16
    ),
}


def run(options: Options) -> list[Row]:
    """Record two windows of every way; returns the rows."""
    blocks = 2 if options.quick else SIZE.blocks
    with Sink(NAME, options, len(WAYS)) as sink:
        for name, way in WAYS.items():
            sink.case(name)
            predicted, elements = _explained(blocks, way)
            peak = _record(blocks, way, options.backend).peak_of("window")
            row: Row = {"contestant": name, "kind": "peer" if way.settings is None else "ours", "blocks": blocks}
            row |= {"elements": elements, "peak_bytes": peak, "predicted_bytes": predicted}
            sink.add([row])
    return sink.rows


def _explained(blocks: int, way: Way) -> tuple[int, int]:
    model = _model(blocks)
    optimizer = way.optimizer(model.parameters(), fused=True)
    found = fa.explain(model, desired_batch=MICRO_BATCHES, micro_batch=1, optimizer=optimizer)
    (mode,) = (mode for mode in found.modes if mode.name == way.mode)
    return mode.peak, mode.elements


def _record(blocks: int, way: Way, backend: str) -> Timeline:
    x = torch.randn(1, TOKENS, SIZE.width, dtype=torch.bfloat16, device=environment.device)
    with recorded(environment.device.type) as timeline:
        model = _model(blocks)
        micro_batch_done, window_done = _stepping(way.optimizer(model.parameters(), fused=True), way, backend)
        for _ in range(2):
            with mark("window"):
                for _ in range(MICRO_BATCHES):
                    model(x).float().square().mean().backward()
                    micro_batch_done()
                window_done()
        del model, micro_batch_done, window_done
    return timeline


def _stepping(inner: torch.optim.Optimizer, way: Way, backend: str) -> tuple[Callable, Callable]:
    """What is called after every micro-batch, and at the window's end."""
    if way.settings is None:
        return lambda: None, lambda: (inner.step(), inner.zero_grad())
    opt = fa.AccumulatingOptimizer(inner, MICRO_BATCHES, **{"backend": backend, **way.settings})  # type: ignore[arg-type]
    return opt.step, lambda: None


def _model(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(SIZE) for _ in range(blocks))).to(dtype=torch.bfloat16, device=environment.device)
