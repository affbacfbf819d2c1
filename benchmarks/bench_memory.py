"""What does a window hold in memory?

Every allocation of two micro-batches and the step, by PyTorch's own accounting. The model is the 12
blocks of GPT-2 124M (85 million parameters), in bf16 and in FP32, on a short sequence, so that
activations are small compared with gradients. A way's excess is its peak less the parameters, and
less the sums where it has any: what the gradients of a backward pass take until they are added,
with activations and temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import fusedaccum as fa
import torch
from torch import Tensor, nn

from . import environment
from .gradients import main_grad_hook
from .harness import OURS, Options, Row, Sink
from .memory import Timeline, mark, recorded
from .models import SIZES, Block

NAME = "memory"
SIZE, TOKENS = SIZES["gpt2-124m"], 8
POINTS = 1500  # per timeline, in the results
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run(options: Options) -> list[Row]:
    """Record one window of every way; returns the rows, each with its timeline."""
    blocks = 2 if options.quick else SIZE.blocks
    ways = WAYS | (OFFLOADED if environment.device.type != "cpu" else {})
    for name in ("p.grad in bf16", "p.grad in FP32") if environment.device.type != "cpu" else ():
        _record(1, ways[name], options.backend)  # so that what cuBLAS allocates once and keeps is in no way's peak
    with Sink(NAME, options, len(ways)) as sink:
        for name, way in ways.items():
            sink.case(name)
            timeline, elements = _record(blocks, way, options.backend)
            parameters, sums = elements * DTYPES[way.weights].itemsize, elements * way.sum_bytes
            peak = timeline.peak_of("micro-batch", "step")
            kind = "ours" if name.startswith(OURS) else "peer"
            row: Row = {"contestant": name, "kind": kind, "note": way.note, "weights": way.weights, "blocks": blocks}
            row |= {"parameter_bytes": parameters, "sum_bytes": sums, "peak_bytes": peak}
            row |= {"excess_bytes": peak - parameters - sums, "backward_peak_bytes": timeline.peak_of("micro-batch")}
            largest = SIZE.width * SIZE.inner * DTYPES[way.weights].itemsize
            row |= {"largest_parameter_bytes": largest, "timeline": _thinned(timeline)}
            row["marks"] = [[label, round(a, 5), round(b, 5)] for label, a, b in timeline.marks]
            sink.add([row])
    return sink.rows


def _record(blocks: int, way: Way, backend: str) -> tuple[Timeline, int]:
    torch.manual_seed(0)
    made = {"dtype": DTYPES[way.weights], "device": environment.device}
    x = torch.randn(1, TOKENS, SIZE.width).to(**made)
    with recorded(environment.device.type) as timeline:
        with mark("build"):
            model = nn.Sequential(*(Block(SIZE) for _ in range(blocks))).to(**made)
            elements = sum(p.numel() for p in model.parameters())
        with way.window(model, backend) as (finish, step):
            for _ in range(2):
                with mark("micro-batch"):
                    model(x).float().square().mean().backward()
                    finish()
            with mark("step"):
                step()
        del model
    return timeline, elements


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
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for p, total in zip(model.parameters(), sums):
        p.register_post_accumulate_grad_hook(main_grad_hook(total))
    yield (lambda: None), lambda: _sgd(model, sums)


def _ours(fused: bool = False, **settings: object) -> Callable:
    @contextmanager
    def window(model: nn.Module, backend: str) -> Iterator[Window]:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = fa.AccumulatingOptimizer(inner, accum_steps=2, **{"backend": backend, **settings})  # type: ignore[arg-type]
        if fused:
            fa.fuse_linear(model)
        micro_batches = 0

        def finish() -> None:
            nonlocal micro_batches
            micro_batches += 1
            if micro_batches == 1:
                opt.step()  # counts the micro-batch; the second one's closes the window, under the mark "step"

        yield finish, opt.step

    return window


def _sgd(model: nn.Module, sums: list[Tensor]) -> None:
    """Step by hand, without a copy: no torch optimizer takes FP32 gradients of bf16 parameters."""
    with torch.no_grad():
        for p, total in zip(model.parameters(), sums):
            p.add_(total, alpha=-0.05)


@dataclass(frozen=True)
class Way:
    """A way to accumulate; ``sum_bytes``: bytes per element of its sums, in p.grad or elsewhere."""

    note: str
    window: Callable[[nn.Module, str], AbstractContextManager[Window]]
    sum_bytes: int
    weights: str = "bf16"


WAYS: dict[str, Way] = {
    OURS: Way("FP32 sums, one bucket of bf16 gradients at a time", _ours(), 4),
    "fusedaccum, bf16 sums": Way("buffer_dtype=None", _ours(buffer_dtype=None), 2),
    "fusedaccum, skip_micro_batch": Way(
        "all gradients of a micro-batch until it is judged", _ours(nonfinite="skip_micro_batch"), 4
    ),
    "p.grad in bf16": Way("PyTorch's own accumulation: sums rounded to bf16", _plain, 2),
    "add after backward": Way("all bf16 gradients of a micro-batch, then FP32 sums", _copied_afterwards, 4),
    "a hook per parameter": Way("FP32 sums, one gradient at a time, one add_ each", _hooked, 4),
    "fusedaccum, FP32 weights": Way("one bucket of gradients at a time", _ours(), 4, "fp32"),
    "fusedaccum, fused layers": Way("Linear layers add by themselves", _ours(fused=True), 4, "fp32"),
    "p.grad in FP32": Way("PyTorch's own accumulation", _plain, 4, "fp32"),
}

# Where a CPU has a part in it; the sums take no memory on the device, but in the first.
OFFLOADED: dict[str, Way] = {
    "fusedaccum, optimizer in CPU memory": Way("optimizer_device='cpu'", _ours(optimizer_device="cpu"), 4),
    "fusedaccum, buffers in CPU memory": Way("buffer_device='cpu'", _ours(buffer_device="cpu", backend="auto"), 0),
    "fusedaccum, masters in CPU memory": Way(
        "buffer_device='cpu', master_weights=True", _ours(buffer_device="cpu", master_weights=True, backend="auto"), 0
    ),
}


def _thinned(timeline: Timeline) -> list[list[float]]:
    """At most ``POINTS`` points: the highest of every stretch, so that no peak is lost."""
    points = list(zip(timeline.seconds, timeline.allocated))
    size = max(1, -(-len(points) // POINTS))
    parts = (points[i : i + size] for i in range(0, len(points), size))
    return [[round(s, 5), b] for s, b in (max(part, key=lambda p: p[1]) for part in parts)]
