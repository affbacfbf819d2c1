"""How fast is one accumulation?

Every dtype pair and shape set, against plain PyTorch's ways in the same run. Bytes that the
operation has to move per element, for a gradient of g and a buffer of b bytes: g + 2b to add (both
read, the buffer written), g + b to overwrite. Statistics are taken in the same pass and count
nothing; a peer that wants them reads the buffers once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import fusedaccum as fa
import torch
from torch import Tensor

from . import environment, peers
from .bandwidth import streams
from .harness import GRAPH, HEADLINES, OURS, TRITON, Contestant, Options, Row, Sink, filled, race, rotations, rows_of
from .shapes import SETS, ShapeSet

NAME = "accumulate"
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADLINES_ONLY = ("llama3-8b",)
ADD_SCALE, OVERWRITE_SCALE = 0.125, 1.0  # with 1.0, a peer needs no more than a plain copy to overwrite


@dataclass(frozen=True)
class Case:
    """One row group: a dtype pair on a shape set, add or overwrite, with or without statistics."""

    set: str
    grads: str
    buffers: str
    mode: str
    stats: bool

    @property
    def label(self) -> str:
        return f"{self.set} {self.grads}→{self.buffers} {self.mode}{' +stats' if self.stats else ''}"

    @property
    def bytes_per_element(self) -> int:
        grad, buffer = DTYPES[self.grads].itemsize, DTYPES[self.buffers].itemsize
        return grad + (1 if self.mode == "overwrite" else 2) * buffer


def cases(options: Options) -> list[Case]:
    """All cases, grouped by set and pair so that inputs are made once."""

    def of_set(name: str) -> Iterator[Case]:
        for grads in DTYPES:
            for buffers in DTYPES:
                headline = (grads, buffers) in HEADLINES
                headlines_only = options.headlines or name in HEADLINES_ONLY
                if (grads, buffers) not in HEADLINES[:1] if options.quick else headlines_only and not headline:
                    continue
                yield Case(name, grads, buffers, "add", stats=False)
                yield Case(name, grads, buffers, "overwrite", stats=False)
                if headline:
                    yield Case(name, grads, buffers, "add", stats=True)

    return [case for name in options.chosen(SETS) for case in of_set(name)]


def run(options: Options) -> list[Row]:
    """Race every case; returns the rows."""
    todo = cases(options)
    with Sink(NAME, options, len(todo)) as sink:
        pair, inputs, shapes = None, [], None
        for case in todo:
            sink.case(case.label)
            if pair != (case.set, case.grads, case.buffers):
                pair, inputs = (case.set, case.grads, case.buffers), []
                shapes = options.shapes_of(case.set)
                inputs = _inputs(shapes, DTYPES[case.grads], DTYPES[case.buffers])
            moved = shapes.elements * case.bytes_per_element
            contestants = _contestants(case, shapes, inputs, moved, options)
            timings = race(contestants, options.rounds)
            columns: Row = {
                **case.__dict__,
                "set_note": shapes.note,
                "tensors": len(shapes.shapes),
                "elements": shapes.elements,
                "bytes_per_element": case.bytes_per_element,
            }
            sink.add(rows_of(columns, contestants, timings, moved))
    return sink.rows


Inputs = list[tuple[list[Tensor], list[Tensor]]]


def _inputs(shapes: ShapeSet, grads: torch.dtype, buffers: torch.dtype) -> Inputs:
    """Pairs of (buffers, gradients), so many that no call finds its own in the cache."""
    copies = rotations(shapes.elements * (grads.itemsize + buffers.itemsize))
    return [(filled(shapes.shapes, buffers, i), filled(shapes.shapes, grads, i + 100)) for i in range(copies)]


def _contestants(case: Case, shapes: ShapeSet, inputs: Inputs, moved: int, options: Options) -> list[Contestant]:
    overwrite = case.mode == "overwrite"
    scale = OVERWRITE_SCALE if overwrite else ADD_SCALE

    def ours(i: int, stats: fa.ops.Stats | None) -> None:
        buffers, grads = inputs[i % len(inputs)]
        fa.ops.accumulate_(buffers, grads, scale, overwrite=overwrite, stats=stats, backend=options.backend)

    def peer(way: peers.Way) -> Callable[[int], object]:
        def call(i: int) -> None:
            buffers, grads = inputs[i % len(inputs)]
            way(buffers, grads, scale)
            if case.stats:
                peers.norm_and_finite(buffers)

        return call

    measured = fa.ops.Stats.empty(environment.device) if case.stats else None
    entries = [Contestant(OURS, lambda i: ours(i, measured), kind="ours")]
    if case.stats:
        entries.append(Contestant("fusedaccum without stats", lambda i: ours(i, None), kind="variant"))
    if inputs[0][0][0].is_cuda:
        entries += _on_gpu(inputs, scale, overwrite, measured)
    if overwrite:
        entries.append(Contestant("copy_ per tensor", peer(peers.copy_each)))
        entries.append(Contestant("torch._foreach_copy_", peer(peers.copy_foreach)))
    else:
        entries.append(Contestant("add_ per tensor", peer(peers.add_each)))
        entries.append(Contestant("torch._foreach_add_", peer(peers.add_foreach)))
        if case.grads != case.buffers:
            entries.append(Contestant("cast then add", peer(peers.cast_then_add)))
    if (case.grads, case.buffers) in HEADLINES and not overwrite and not case.stats:
        entries.append(_compiled(shapes, peer, options))
    bandwidth = streams(DTYPES[case.grads].itemsize, DTYPES[case.buffers].itemsize, overwrite, moved, options.quick)
    return entries + bandwidth


def _on_gpu(inputs: Inputs, scale: float, overwrite: bool, stats: fa.ops.Stats | None) -> list[Contestant]:
    """Only on a GPU: calls with Triton's kernels, and from CUDA graphs without the host's time."""

    def add(i: int, backend: str) -> None:
        buffers, grads = inputs[i]
        fa.ops.accumulate_(buffers, grads, scale, overwrite=overwrite, stats=stats, backend=backend)

    names = {"triton": TRITON, "cuda": GRAPH}
    missing = {backend: _why_missing(backend) for backend in names}
    graphs: list[torch.cuda.CUDAGraph] = []
    for i in () if missing["cuda"] else range(len(inputs)):
        add(i, "cuda")  # what the first call loads cannot be captured
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            add(i, "cuda")
    runs = {"triton": lambda i: add(i % len(inputs), "triton"), "cuda": lambda i: graphs[i % len(inputs)].replay()}
    return [
        Contestant(names[backend], None if missing[backend] else run, kind="variant", skipped=missing[backend])
        for backend, run in runs.items()
    ]


def _why_missing(backend: str) -> str:
    """Empty if it is there."""
    try:
        fa.ops.scale_([], 1.0, backend=backend)
    except RuntimeError as error:
        return str(error)
    return ""


def _compiled(shapes: ShapeSet, peer: Callable[[peers.Way], Callable[[int], object]], options: Options) -> Contestant:
    name = "torch.compile of the list"
    reason = peers.why_not_compile(len(shapes.shapes), options.compile)
    if reason:
        return Contestant(name, skipped=reason)
    return Contestant(name, peer(peers.compiled_adds()))
