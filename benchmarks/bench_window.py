"""A whole window of 8 micro-batches: zero, adds, norm, clip, rescale.

Every contestant, ours and the best plain-PyTorch ways, turns the gradients of 8 micro-batches,
weighted by their tokens, into the finished FP32 gradient: divided by the window's tokens and
clipped to a norm. Bytes per element for 2-byte gradients and FP32 buffers:

    as usual    4 (zero) + 8 x 10 (add) + 8 (rescale) + 4 (norm) + 8 (clip)                    = 104
    cast first  the same with 8 x 18                                                           = 168
    folded      6 + 8 (copy, weight) + 7 x 10 + 4 (norm) + 8 (rescale and clip at once)        = 96
    fusedaccum  6 (overwrite) + 7 x 10, the norm from the last of them, + 8 (rescale and clip) = 84
    handed on   the same without the last pass, as a fused optimizer takes the coefficient     = 76
"""

from __future__ import annotations

import fusedaccum as fa
import torch
from torch import Tensor

from . import peers
from .bandwidth import streams
from .bench_accumulate import DTYPES
from .harness import OURS, Contestant, Options, Row, Sink, filled, race, rows_of
from .shapes import ShapeSet

NAME = "window"
MICRO_BATCHES = 8
PAIRS = (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"))
SET_NAMES = ("gpt2-124m", "resnet-101", "2000x64x64")
TOKENS = (1024.0,) * MICRO_BATCHES  # equal, because torch.compile would recompile for every new number
MAX_NORM = 1.0


def run(options: Options) -> list[Row]:
    """Race the windows; returns the rows."""
    pairs = PAIRS[:1] if options.quick else PAIRS
    todo = [(s, *pair) for s in options.chosen(SET_NAMES) for pair in pairs]
    with Sink(NAME, options, len(todo)) as sink:
        for name, grads, buffers in todo:
            sink.case(f"{name} {grads}→{buffers}")
            shapes = options.shapes_of(name)
            per_element = bytes_per_element(grads, buffers)
            case: Row = {"set": name, "set_note": shapes.note, "grads": grads, "buffers": buffers}
            case |= {"micro_batches": MICRO_BATCHES, "tensors": len(shapes.shapes), "elements": shapes.elements}
            case["bytes_per_element"] = per_element
            moved = shapes.elements * per_element
            grad, buffer = DTYPES[grads].itemsize, DTYPES[buffers].itemsize
            contestants = _contestants(shapes, grads, buffers, options) + streams(
                grad, buffer, False, moved, options.quick
            )
            sink.add(rows_of(case, contestants, race(contestants, options.rounds), moved))
    return sink.rows


def bytes_per_element(grads: str, buffers: str) -> int:
    """Bytes per element that a window has to move: overwrite, other adds, one pass to rescale."""
    grad, buffer = DTYPES[grads].itemsize, DTYPES[buffers].itemsize
    return (grad + buffer) + (MICRO_BATCHES - 1) * (grad + 2 * buffer) + 2 * buffer


def _contestants(shapes: ShapeSet, grads: str, buffers: str, options: Options) -> list[Contestant]:
    micro_batches = [filled(shapes.shapes, DTYPES[grads], seed) for seed in range(MICRO_BATCHES)]
    sums = filled(shapes.shapes, DTYPES[buffers])
    entries = [
        Contestant(OURS, lambda _: fused(sums, micro_batches, options.backend), kind="ours"),
        Contestant(
            "fusedaccum, coefficient handed on",
            lambda _: fused(sums, micro_batches, options.backend, rescale=False),
            kind="variant",
        ),
        Contestant("add_ per tensor", lambda _: as_usual(sums, micro_batches, peers.add_each)),
        Contestant("torch._foreach_add_", lambda _: as_usual(sums, micro_batches, peers.add_foreach)),
        Contestant("add_ per tensor, folded", lambda _: folded(sums, micro_batches, peers.add_each)),
    ]
    if grads != buffers:
        entries.append(Contestant("cast then add", lambda _: as_usual(sums, micro_batches, peers.cast_then_add)))
    entries.append(_compiled(shapes, sums, micro_batches, options))
    return entries


def fused(
    sums: list[Tensor], micro_batches: list[list[Tensor]], backend: str | None = None, rescale: bool = True
) -> Tensor:
    """The window with fusedaccum's functional layer. The coefficient stays on the device."""
    stats = fa.ops.Stats.empty(sums[0].device)
    last = len(micro_batches) - 1
    for k, grads in enumerate(micro_batches):
        fa.ops.accumulate_(
            sums, grads, TOKENS[k], overwrite=k == 0, stats=stats if k == last else None, backend=backend
        )
    tokens = sum(TOKENS)
    norm = stats.sq_norm.sqrt() / tokens
    coefficient = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0) / tokens
    if rescale:
        fa.ops.scale_(sums, coefficient, backend=backend)
    return coefficient


def as_usual(sums: list[Tensor], micro_batches: list[list[Tensor]], way: peers.Way) -> None:
    """The window as loops write it: zero, add, rescale, ``clip_grad_norm_``'s norm and product."""
    torch._foreach_zero_(sums)
    for k, grads in enumerate(micro_batches):
        way(sums, grads, TOKENS[k])
    torch._foreach_mul_(sums, 1 / sum(TOKENS))
    norm, _ = peers.norm_and_finite(sums)
    torch._foreach_mul_(sums, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))


def folded(sums: list[Tensor], micro_batches: list[list[Tensor]], way: peers.Way) -> None:
    """The fewest passes in plain PyTorch: the first copies, and one product rescales and clips."""
    peers.copy_each(sums, micro_batches[0], TOKENS[0])
    for k, grads in enumerate(micro_batches[1:], start=1):
        way(sums, grads, TOKENS[k])
    tokens = sum(TOKENS)
    norm, _ = peers.norm_and_finite(sums)
    torch._foreach_mul_(sums, (MAX_NORM / (norm / tokens + 1e-6)).clamp(max=1.0) / tokens)


def _compiled(shapes: ShapeSet, sums: list[Tensor], micro_batches: list[list[Tensor]], options: Options) -> Contestant:
    name = "torch.compile of the adds, folded"
    reason = peers.why_not_compile(len(shapes.shapes), options.compile)
    if reason:
        return Contestant(name, skipped=reason)
    way = peers.compiled_adds()
    return Contestant(name, lambda _: folded(sums, micro_batches, way))
