"""How much faster are layers that add their weight's gradient into its buffer?

A micro-batch of one layer: forward, backward, accumulation. The window stays open, so no optimizer
steps. The sums are FP32.
"""

from __future__ import annotations

from collections.abc import Callable

import fusedaccum as fa
import torch
from torch import nn

from . import environment
from .gradients import Hold
from .harness import OURS, Contestant, Options, Row, Sink, race, rows_of

NAME = "fused"
# Of a micro-batch; few on a CPU, where the layers are slow.
TOKENS = {"cpu": {"embedding": 1024, "linear": 256}, "cuda": {"embedding": 16_384, "linear": 16_384}}
NOT_FUSED = "fusedaccum, not fused"
NOTHING_ADDED = "p.grad, nothing accumulated"


def run(options: Options) -> list[Row]:
    """Race fused, unfused and plain layers; returns the rows."""
    shrink = 16 if options.quick else 1
    cases = [
        ("embedding", 50_257 // shrink, 768, torch.bfloat16),
        ("embedding", 50_257 // shrink, 768, torch.float32),
        ("linear", 4096 // shrink, 4096 // shrink, torch.bfloat16),
        ("linear", 4096 // shrink, 4096 // shrink, torch.float32),
    ]
    with Sink(NAME, options, len(cases)) as sink:
        for layer, rows, columns, dtype in cases:
            name = str(dtype).removeprefix("torch.")
            sink.case(f"{layer} {rows}x{columns} {name}")
            contestants = _contestants(layer, rows, columns, dtype, options.backend)
            timings = race(contestants, options.rounds)
            tokens = TOKENS[environment.device.type][layer]
            case: Row = {"layer": layer, "rows": rows, "columns": columns, "dtype": name, "tokens": tokens}
            sink.add(rows_of(case, contestants, timings, rows * columns * (dtype.itemsize + 2 * 4)))
    return sink.rows


def _contestants(layer: str, rows: int, columns: int, dtype: torch.dtype, backend: str) -> list[Contestant]:
    make = _Layer(layer, rows, columns, dtype, backend)
    return [
        Contestant(OURS, make.wrapped(fuse=True), kind="ours"),
        Contestant(NOT_FUSED, make.wrapped(fuse=False), kind="variant"),
        Contestant("add after backward", make.added_after()),
        Contestant(NOTHING_ADDED, make.overwritten(), kind="variant"),
    ]


class _Layer:
    """One layer, its input, and the gradient of its output, the same for all contestants."""

    def __init__(self, layer: str, rows: int, columns: int, dtype: torch.dtype, backend: str):
        self._make: Callable[[], nn.Module] = {
            "embedding": lambda: nn.Embedding(rows, columns, dtype=dtype, device=environment.device),
            "linear": lambda: nn.Linear(columns, rows, bias=False, dtype=dtype, device=environment.device),
        }[layer]
        generator = torch.Generator().manual_seed(0)
        tokens = TOKENS[environment.device.type][layer]
        if layer == "embedding":
            self._input = torch.randint(0, rows, (tokens,), generator=generator).to(environment.device)
            width = columns
        else:
            self._input = torch.randn(tokens, columns, generator=generator).to(environment.device, dtype)
            self._input.requires_grad_(True)
            width = rows
        self._gradient = torch.randn(tokens, width, generator=generator).to(environment.device, dtype)
        self._backend = backend

    def wrapped(self, fuse: bool) -> Callable[[int], object]:
        module = self._make()
        opt = fa.AccumulatingOptimizer(Hold(list(module.parameters())), accum_steps=1 << 40, backend=self._backend)
        if fuse:
            fa.fuse_embedding(fa.fuse_linear(module))

        def micro_batch(_: int) -> None:
            self._input.grad = None
            module(self._input).backward(self._gradient)
            opt.step()

        return micro_batch

    def added_after(self) -> Callable[[int], object]:
        module = self._make()
        weight = next(module.parameters())
        main_grad = torch.zeros(weight.shape, device=weight.device)

        def micro_batch(_: int) -> None:
            self._input.grad = weight.grad = None
            module(self._input).backward(self._gradient)
            main_grad.add_(weight.grad)

        return micro_batch

    def overwritten(self) -> Callable[[int], object]:
        module = self._make()
        weight = next(module.parameters())

        def micro_batch(_: int) -> None:
            self._input.grad = weight.grad = None
            module(self._input).backward(self._gradient)

        return micro_batch
