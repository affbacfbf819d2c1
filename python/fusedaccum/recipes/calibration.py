"""How fast this device runs a window's passes: measured in memory laid out like the model's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import limits, ops
from ..core.buffers import Block, padded
from ..core.optimizer import AccumulatingOptimizer
from ..extensions.ring import recorded
from .modes import Kernel, buckets

SAMPLE = 1 << 26  # elements, of the parameters whose gradients come first
ROUNDS = 5
HOOKED = 256  # parameters of one element, on which the cost of hooks is measured


def bandwidths(kernels: Iterable[Kernel], sizes: Sequence[int], device: torch.device) -> dict[Kernel, float]:
    """Bytes per second of every kernel. ``sizes``: in elements, in the order of the gradients."""
    sample = _sample(sizes)
    return {kernel: _bandwidth(kernel, sample, device) for kernel in dict.fromkeys(kernels)}


def _sample(sizes: Sequence[int]) -> list[int]:
    taken: list[int] = []
    left = SAMPLE
    for size in sizes:
        taken.append(min(size, left))
        left -= taken[-1]
        if not left:
            break
    return taken


def _bandwidth(kernel: Kernel, sizes: list[int], device: torch.device) -> float:
    seconds = median_seconds(_one_pass(kernel, sizes, device), device)
    return kernel.bytes * sum(sizes) / seconds


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Duration of a call, which ends when the device is idle again."""
    found = []
    for _ in range(ROUNDS + 1):  # the first is a warm-up, which touches the memory
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        recorded(device).synchronize()


def _one_pass(kernel: Kernel, sizes: list[int], device: torch.device) -> Callable[[], object]:
    """The pass over tensors of these sizes, in a window's calls for parameters on this device."""
    op, source, into = kernel.op, kernel.source, kernel.into
    where = torch.device("cpu") if kernel.lane == "cpu" else device
    flat, views = _flat(sizes, into, where)
    if op in ("overwrite", "add", "add_", "pack"):
        # Each bucket's gradients have their own memory: data left in the cache would look too fast.
        grads = _flat(sizes, source, where)[1]
        sent = kernel.lane == "cpu" or op == "pack"
        calls = [(views[i:j], grads[i:j]) for i, j in buckets([size * source.itemsize for size in sizes], device, sent)]
        return {"add_": _adds, "pack": _packs}.get(op, _accumulations)(kernel, calls)
    if kernel.low:
        low = _flat(sizes, torch.int8 if kernel.low == 1 else torch.int16, where)[1]
        others = _flat(sizes, source, where)[1]
        return {
            "round": lambda: ops.cast_(views, views, 0.999, low=low),
            "scale": lambda: ops.scale_(views, 0.999, low=low),
            "join": lambda: ops.cast_(views, others, low=low),
            "split": lambda: ops.accumulate_(views, others, 1.0, overwrite=True, low=low),
        }[op]
    if op == "scale":
        return lambda: ops.scale_(views, 0.999)
    if op == "narrow":
        wide = Block(_flat(sizes, source, where)[0], private=False)
        return lambda: wide.cast_in_place_(into, 0.999, [], "auto")
    if op == "cast":
        others = _flat(sizes, source, where)[1]
        return lambda: ops.cast_(views, others)
    if op == "read":
        return lambda: ops.stats(views)
    if op == "zero":
        return flat.zero_
    return _over_link(kernel, sum(sizes), device)


def _flat(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor of ones, and views of it of these sizes."""
    places = [padded(size) for size in sizes]
    flat = torch.ones(sum(places), dtype=dtype, device=device)
    return flat, [part[:size] for part, size in zip(flat.split(places), sizes, strict=True)]


Calls = list[tuple[list[Tensor], list[Tensor]]]


def _accumulations(kernel: Kernel, calls: Calls) -> Callable[[], object]:
    overwrite = kernel.op == "overwrite"
    # 16-bit buffers hold a running mean, unless there is a byte more.
    mean = 0.5 if kernel.into.itemsize < 4 and not (overwrite or kernel.low) else 1.0
    low = [[torch.zeros_like(x, dtype=torch.int8) for x in buffers] if kernel.low else None for buffers, _ in calls]

    def run() -> None:
        for (buffers, grads), theirs in zip(calls, low, strict=True):
            draws = ops.StochasticRounding(1, [0] * len(buffers)) if kernel.stochastic else None
            ops.accumulate_(buffers, grads, mean, overwrite=overwrite, decay=mean, rounding=draws, low=theirs)

    return run


def _adds(_: Kernel, calls: Calls) -> Callable[[], object]:
    return lambda: [sums.add_(grad) for call in calls for sums, grad in zip(*call, strict=True)]


def _packs(_: Kernel, calls: Calls) -> Callable[[], object]:
    def run() -> None:
        for call in calls:
            torch._foreach_copy_(*call)

    return run


def _over_link(kernel: Kernel, elements: int, device: torch.device) -> Callable[[], object]:
    here = torch.ones(limits.STAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.ones(limits.STAGE, dtype=torch.uint8, device=device)
    left = [
        min(limits.STAGE, elements * kernel.bytes - begin) for begin in range(0, elements * kernel.bytes, limits.STAGE)
    ]
    return lambda: [here[:n].copy_(there[:n], non_blocking=True) for n in left]


class _Ones(torch.autograd.Function):
    """A scalar whose backward gives every parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.params = params
        return torch.zeros((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ones_like(p) for p in ctx.params)


def hook_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """What the wrapper adds to a backward pass per parameter, whatever the parameter's size.

    That is the hooks, the queue, and a share of the call that adds.
    """

    def alone() -> None:
        _Ones.apply(*plain).backward()
        for p in plain:
            p.grad = None

    def wrapped() -> None:
        _Ones.apply(*ours).backward()
        opt.step()

    with torch.inference_mode(False), torch.enable_grad():
        ours, plain = (
            [nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) for _ in range(HOOKED)] for _ in range(2)
        )
        opt = AccumulatingOptimizer(torch.optim.SGD(ours), accum_steps=1 << 30)
        difference = median_seconds(wrapped, device) - median_seconds(alone, device)
    return max(0.0, difference / HOOKED)
