"""Sums of 24 bits, in a BF16 tensor and 8 bits beside it, against FP32 sums.

The calls of a window of BF16 gradients. Bytes that have to move per element, for 24 bits and for
FP32: add 8 and 10 (with or without the norm), overwrite 5 and 6, finish (the scaled sums as BF16) 5
and 6, a window of 8 micro-batches 66 and 82. The stream beside a case has the mix of its 24-bit
sums, for the window that of an add.
"""

from __future__ import annotations

from collections.abc import Callable

import fusedaccum as fa
import torch
from torch import Tensor

from . import environment
from .bandwidth import streams
from .harness import OURS, Contestant, Options, Row, Sink, filled, race, rotations, rows_of

NAME = "parts"
SET_NAMES = ("gpt2-124m", "2000x64x64")
FP32 = "fusedaccum, FP32 sums"
MICRO_BATCHES = 8
# Bytes per element of 24-bit sums; and a memory stream of the same mix: bytes per element of what
# is read, of what is written, and whether that is not read, too.
CASES = {
    "add": (8, (2, 3, False)),
    "add +norm": (8, (2, 3, False)),
    "overwrite": (5, (2, 3, True)),
    "finish": (5, (3, 2, True)),
    "window of 8": (66, (2, 3, False)),
}

Sums = tuple[list[Tensor], list[Tensor] | None]  # and their low parts


def run(options: Options) -> list[Row]:
    """Race the calls; returns the rows."""
    sets = options.chosen(SET_NAMES)
    with Sink(NAME, options, len(sets) * len(CASES)) as sink:
        for name in sets:
            shapes = options.shapes_of(name)
            copies = rotations(shapes.elements * 5)
            grads = [filled(shapes.shapes, torch.bfloat16, 100 + i) for i in range(copies)]
            narrow = [_split(filled(shapes.shapes, torch.float32, i)) for i in range(copies)]
            wide = [(filled(shapes.shapes, torch.float32, i), None) for i in range(copies)]
            outs = [torch.empty_like(x) for x in grads[0]]
            for case, (per_element, (source, destination, overwrite)) in CASES.items():
                sink.case(f"{name} {case}")
                moved = shapes.elements * per_element
                contestants = [
                    Contestant(OURS, _call(case, narrow, grads, outs, options.backend), kind="ours"),
                    Contestant(FP32, _call(case, wide, grads, outs, options.backend), kind="variant"),
                    *streams(source, destination, overwrite, moved, options.quick),
                ]
                columns: Row = {"set": name, "set_note": shapes.note, "case": case, "elements": shapes.elements}
                columns |= {"tensors": len(shapes.shapes), "bytes_per_element": per_element}
                sink.add(rows_of(columns, contestants, race(contestants, options.rounds), moved))
    return sink.rows


def _split(sums: list[Tensor]) -> Sums:
    parts = (
        [torch.empty_like(x, dtype=torch.bfloat16) for x in sums],
        [torch.empty_like(x, dtype=torch.int8) for x in sums],
    )
    fa.ops.accumulate_(parts[0], sums, 1.0, overwrite=True, low=parts[1])
    return parts


def _call(
    case: str, sums: list[Sums], grads: list[list[Tensor]], outs: list[Tensor], backend: str
) -> Callable[[int], object]:
    """What one call of a contestant does."""
    stats = fa.ops.Stats.empty(environment.device)

    def add(i: int, overwrite: bool = False, measured: fa.ops.Stats | None = None, into: int | None = None) -> None:
        buffers, low = sums[(i if into is None else into) % len(sums)]
        fa.ops.accumulate_(
            buffers, grads[i % len(grads)], 0.125, overwrite=overwrite, low=low, stats=measured, backend=backend
        )

    def finish(i: int) -> None:
        buffers, low = sums[i % len(sums)]
        fa.ops.cast_(outs, buffers, 0.5, low=low, backend=backend)

    def window(i: int) -> None:
        for k in range(MICRO_BATCHES):
            add(i + k, k == 0, stats if k == MICRO_BATCHES - 1 else None, into=i)
        finish(i)

    calls: dict[str, Callable[[int], object]] = {
        "add": add,
        "add +norm": lambda i: add(i, measured=stats),
        "overwrite": lambda i: add(i, overwrite=True),
        "finish": finish,
        "window of 8": window,
    }
    return calls[case]
