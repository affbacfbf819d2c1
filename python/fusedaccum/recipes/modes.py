"""What a window holds and moves under each mode.

The formulas of docs/memory.md and docs/performance.md, over real parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import limits
from ..core.buffers import buffer_dtype, gradient_dtype, padded
from ..extensions.ring import STAGES
from ..inner import dtypes_of_groups, scales_gradients, steps_each_alone
from ..parts import local_of
from .fuse import Embedding, Linear, has_product, has_unfused_option


class Kernel(NamedTuple):
    """A kind of pass over memory: operation, dtypes, and place ("link": between device and CPU)."""

    op: str
    source: torch.dtype
    into: torch.dtype
    lane: str = "device"
    stochastic: bool = False
    low: int = 0  # bytes that are kept beside a bf16 number

    @property
    def bytes(self) -> int:
        """Bytes that it reads and writes per element."""
        g, b = self.source.itemsize, self.into.itemsize + self.low  # of the two, one is bf16
        return {"add": g + 2 * b, "add_": g + 2 * b, "scale": 2 * b, "read": g, "zero": b, "link": g}.get(
            self.op, g + b
        )

    def __str__(self) -> str:
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
        into = "24 bits" if self.low == 1 else short[self.into]
        return f"{self.op} {short[self.source]}→{into}{' stochastic' if self.stochastic else ''}"


class Pass(NamedTuple):
    """A kernel that goes over this many elements, ``times`` times per window."""

    kernel: Kernel
    elements: int
    times: int
    closing: bool = False  # at the window's end, and not during its backward passes

    @property
    def bytes(self) -> int:
        return self.kernel.bytes * self.elements * self.times


@dataclass(frozen=True)
class Way:
    """The wrapper's arguments for a mode, and what they mean here, before anything is priced."""

    name: str
    arguments: str = ""
    buffers: torch.dtype | None = torch.float32
    masters: bool = False
    split: bool = False
    held: bool = False
    offloaded: bool = False
    away: bool = False  # the optimizer, with its masters
    fused: bool = False
    plain: bool = False

    def low(self, buffers: torch.dtype) -> int:
        """How many bytes there are beside a sum in ``buffers`` of this dtype."""
        return int("compensated" in self.arguments and buffers == torch.bfloat16)

    def stepped(self, dtype: torch.dtype) -> torch.dtype:
        """What the inner optimizer steps in place of a parameter of ``dtype``."""
        return torch.promote_types(dtype, torch.float32) if self.masters else dtype


DEFAULT = Way("FP32 buffers")
FUSED = Way("fused layers", fused=True)
COMPENSATED = Way("24-bit sums", 'buffer_dtype=torch.bfloat16, rounding="compensated"', buffers=torch.bfloat16)
STOCHASTIC = Way("16-bit buffers", 'buffer_dtype=None, rounding="stochastic"', buffers=None)
MASTERS = Way("master weights", "master_weights=True", masters=True)
SPLIT = Way("split masters", 'master_weights="split"', masters=True, split=True)
SMALLEST = Way(
    "24-bit sums, split masters",
    'buffer_dtype=torch.bfloat16, rounding="compensated", master_weights="split"',
    buffers=torch.bfloat16,
    masters=True,
    split=True,
)
HELD = Way("skip_micro_batch", 'nonfinite="skip_micro_batch"', held=True)
OFFLOADED = Way("buffers in CPU memory", 'buffer_device="cpu"', offloaded=True)
AWAY = Way("optimizer on the CPU", 'optimizer_device="cpu"', masters=True, away=True)
AWAY_COMPENSATED = Way(
    "24-bit sums, optimizer on the CPU",
    'buffer_dtype=torch.bfloat16, rounding="compensated", optimizer_device="cpu"',
    buffers=torch.bfloat16,
    masters=True,
    away=True,
)
ALL_OFFLOADED = Way("masters there too", 'buffer_device="cpu", master_weights=True', offloaded=True, masters=True)
PLAIN = Way("plain p.grad", plain=True)


@dataclass(frozen=True)
class Mode:
    """A mode with its price: what a window holds, moves and takes under it.

    Attributes:
        name: of the mode. arguments: the wrapper's arguments that select it.
        memory: bytes by purpose ("model", "buffers", "gradients", "masters", "optimizer"), on the
            parameters' device, at the peak; excludes activations and what the inner step takes.
        cpu: the same in CPU memory, if the parameters are elsewhere.
        elements: number of trained elements. passes: a window's passes over memory.
        seconds: time of the passes per window; None if not measured.
    """

    name: str
    arguments: str
    memory: dict[str, int]
    cpu: dict[str, int]
    elements: int
    passes: list[Pass] = field(repr=False)
    seconds: float | None = None

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def moved(self) -> int:
        """Bytes that accumulation reads and writes per window, in any memory."""
        return sum(p.bytes for p in self.passes)

    @property
    def formula(self) -> str:
        """:attr:`moved` per element, by pass; "of 12%" where a pass covers part of the elements."""
        terms = []
        for p in self.passes:
            share = p.elements / self.elements
            term = f"{p.times} × {p.kernel.bytes}" if p.times > 1 else f"{p.kernel.bytes}"
            terms.append(term if share > 0.995 else f"{term} of {share:.0%}")
        return " + ".join(terms) or "0"


@dataclass(frozen=True)
class Parameters:
    """What to accumulate for: the model's trained parameters and its size."""

    known: Sequence[Tensor]  # all, with frozen ones, which may have masters too
    trained: list[Tensor]
    model_bytes: int
    device: torch.device
    linear: frozenset[Tensor]  # weights that fuse_linear (below: fuse_embedding) would fuse: no gradient on its way
    embedding: frozenset[Tensor]
    tied: frozenset[Tensor]  # those that several layers share
    asked: Mapping[Tensor, torch.dtype | None]  # of those whose group asks for a buffer dtype: which

    @classmethod
    def of(cls, model: nn.Module | Iterable[Tensor], optimizer: Any = None) -> Parameters:
        """Raises TypeError or ValueError: not a model, nothing to train, or several devices."""
        if isinstance(model, Tensor) or not isinstance(model, (nn.Module, Iterable)):
            raise TypeError(
                f"model must be a torch.nn.Module or its parameters, got {type(model).__name__}; pass "
                "model.parameters()"
            )
        module = model if isinstance(model, nn.Module) else nn.Module()
        known = list(model.parameters() if isinstance(model, nn.Module) else model)
        wrong = [p for p in known if not isinstance(p, Tensor)]
        if wrong:
            raise TypeError(f"model holds a {type(wrong[0]).__name__}, not a parameter; pass model.parameters()")
        known = list(dict.fromkeys(known))
        trained = [p for p in known if p.requires_grad]
        if not trained:
            raise ValueError(
                "model has no parameter that requires a gradient, so there is nothing to accumulate; unfreeze what is "
                "trained"
            )
        devices = {p.device for p in trained}
        if len(devices) > 1:
            raise ValueError(
                f"the model's parameters are on {' and '.join(sorted(map(str, devices)))}; explain those of one device "
                "at a time"
            )
        for p in trained:
            if not p.is_floating_point() or p.dtype.itemsize < 2:
                raise ValueError(f"a parameter is {p.dtype}; FP64, FP32, bf16 and fp16 parameters can be accumulated")
        size = nbytes([*known, *module.buffers()])
        device = devices.pop()
        asked = dtypes_of_groups(optimizer) if isinstance(optimizer, Optimizer) else {}
        linear: set[Tensor] = set()
        embedding: set[Tensor] = set()
        layers: Iterable[Any] = module.modules()
        for layer in layers:
            if type(layer) in (nn.Linear, Linear) and _product(layer.weight, asked, device):
                linear.add(layer.weight)
            elif type(layer) in (nn.Embedding, Embedding) and not has_unfused_option(layer):
                embedding.add(layer.weight)
        wanted = set(trained)
        means = {p for p, dtype in asked.items() if buffer_dtype(gradient_dtype(p), dtype).itemsize < 4}
        linear, embedding = linear & wanted - means, embedding & wanted - linear - means  # layers add to sums alone
        uses: Counter[Tensor] = Counter(p for m in module.modules() for p in m.parameters(recurse=False))
        tied = frozenset(p for p in wanted if uses[p] > 1)
        return cls(known, trained, size, device, frozenset(linear), frozenset(embedding), tied, asked)

    @property
    def narrow(self) -> bool:
        """True if any parameters are 16 bits wide."""
        return any(p.dtype.itemsize < 4 for p in self.trained)

    def buffers(self, p: Tensor, way: Way) -> torch.dtype:
        """The dtype in which the gradients of ``p`` accumulate."""
        return buffer_dtype(gradient_dtype(p), self.asked.get(p, way.buffers))

    def ways(self) -> list[Way]:
        """The modes to choose from, ours in the order of preference if memory allows."""
        ways = [DEFAULT]
        ways += [FUSED] if self.linear or self.embedding else []
        ways += [COMPENSATED] if any(p.dtype == torch.bfloat16 for p in self.trained) else []
        ways += [STOCHASTIC] if self.narrow else []
        if self.device.type != "cpu":
            ways += [AWAY, *([AWAY_COMPENSATED] if COMPENSATED in ways else []), OFFLOADED, ALL_OFFLOADED]
        ways += [MASTERS] if self.narrow else []
        splits = {p.dtype for p in self.known if p.dtype.itemsize < 4} == {torch.bfloat16}
        ways += [SPLIT, SMALLEST] if splits else []
        ways += [HELD, PLAIN]
        # Masters take FP32 gradients, or sums of 24 bits.
        return [way for way in ways if not way.masters or all(self._wide(p, way) for p in self.asked)]

    def _wide(self, p: Tensor, way: Way) -> bool:
        buffers = self.buffers(p, way)
        return buffers.itemsize >= 4 or way.low(buffers) > 0


def _product(weight: Tensor, asked: Mapping[Tensor, torch.dtype | None], device: torch.device) -> bool:
    dtype, wide = weight.dtype, buffer_dtype(weight.dtype, asked.get(weight, torch.float32))
    return dtype == wide if device.type == "meta" else has_product(dtype, wide, device.type)


def priced(way: Way, of: Parameters, micro_batches: int, optimizer: Any) -> Mode:
    """The mode with its bytes, in memory and moved, but not its seconds."""
    on_the_way = [p for p in of.trained if not (way.fused and p in of.linear | of.embedding)]
    memory: dict[str, int] = {"model": of.model_bytes}
    cpu: dict[str, int] = {}
    there = cpu if way.offloaded else memory
    if way.plain:
        memory["buffers"] = nbytes(of.trained)
        memory["gradients"] = max(local_of(p).nbytes for p in of.trained) if micro_batches > 1 else 0
    else:
        dtypes = {p: of.buffers(p, way) for p in of.trained}
        there["buffers"] = sum(
            padded(local_of(p).numel()) * (dtype.itemsize + way.low(dtype)) for p, dtype in dtypes.items()
        )
        memory["gradients"] = nbytes(on_the_way) if way.held else largest_bucket(on_the_way, of.device, way.offloaded)
    # Those that autograd adds up from the parts of several layers before they arrive.
    memory["gradients"] += 2 * nbytes(of.tied.intersection(on_the_way))
    if way.masters:
        theirs = [p for p in of.known if way.offloaded or way.away or p.dtype.itemsize < 4]
        beside = {p: 2 if way.split else way.stepped(p.dtype).itemsize for p in theirs}
        (cpu if way.away else there)["masters"] = sum(local_of(p).numel() * taken for p, taken in beside.items())
        if way.split:  # FP32 masters of a part, with their gradients if these are not in FP32 already
            fp32 = [4 * local_of(p).numel() for p in of.trained if p.dtype == torch.bfloat16]
            alone = not isinstance(optimizer, Optimizer) or steps_each_alone(_inner(optimizer))
            most = max([*fp32, limits.stepped(of.device)])
            part = min(sum(fp32), most) if alone else sum(fp32)
            taken = part * (1 + max(map(way.low, dtypes.values())))
            kept = taken if of.device.type == "cpu" and alone else 0
            there["masters"] += kept
            memory["gradients"] = max(memory["gradients"], taken - kept)
    if way.away:  # their sums are there, too, and parameters pass a ring on their way back
        cpu["buffers"] = sum(padded(local_of(p).numel()) * way.stepped(p.dtype).itemsize for p in of.trained)
        cpu["ring"] = STAGES * limits.STAGE
        wide = [4 * local_of(p).numel() for p, dtype in dtypes.items() if way.low(dtype)]
        memory["gradients"] = max([memory["gradients"], *wide])
    if way.offloaded:
        memory["ring"] = cpu["ring"] = STAGES * limits.STAGE
        if not way.masters:
            memory["gradients"] = max(memory["gradients"], part_brought(of.trained))
    state = state_bytes(optimizer, of.trained, way.stepped)
    if state is not None:
        (cpu if way.away or (way.offloaded and way.masters) else memory)["optimizer"] = state
    return Mode(way.name, way.arguments, memory, cpu, numel(of.trained), passes(way, of, micro_batches, optimizer))


def numel(tensors: Iterable[Tensor]) -> int:
    """Elements on this rank."""
    return sum(local_of(x).numel() for x in tensors)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes on this rank."""
    return sum(local_of(x).nbytes for x in tensors)


def largest_bucket(gradients: Sequence[Tensor], device: torch.device, sent: bool) -> int:
    """The most bytes that a bucket holds. ``sent``: True if sums leave the device.

    Gradients are taken to arrive from the last parameter to the first.
    """
    sizes = [local_of(p).nbytes for p in reversed(gradients)]
    return max((sum(sizes[i:j]) for i, j in buckets(sizes, device, sent)), default=0)


def buckets(sizes: Sequence[int], device: torch.device, sent: bool) -> list[tuple[int, int]]:
    """Where each bucket begins and ends, among gradients of these sizes (in bytes) on a device."""
    found, begin, held, full = [], 0, 0, limits.full_at(device, sizes, sent)
    for i, taken in enumerate(sizes):
        held += taken
        if held >= full or i == len(sizes) - 1:
            found.append((begin, i + 1))
            begin, held = i + 1, 0
    return found


def part_brought(gradients: Sequence[Tensor]) -> int:
    """The most bytes of gradients on the device at once, for an optimizer stepped in parts."""
    sizes = [local_of(p).nbytes for p in gradients]
    return max(*sizes, min(sum(sizes), limits.STAGE)) if sizes else 0


def passes(way: Way, of: Parameters, micro_batches: int, optimizer: Any) -> list[Pass]:
    """The passes of accumulation in a window, dtype by dtype."""
    handed_on = (
        not way.away
        and isinstance(optimizer, Optimizer)
        and scales_gradients(_inner(optimizer))
        and all(of.buffers(p, way) == way.stepped(p.dtype) and p.dtype.itemsize <= 4 for p in of.trained)
        and not any(way.low(of.buffers(p, way)) for p in of.trained)
    )
    found: list[Pass] = []
    kinds: dict[tuple[torch.dtype, torch.dtype], list[Tensor]] = {}
    for p in of.trained:
        kinds.setdefault((p.dtype, of.buffers(p, way)), []).append(p)
    for (dtype, buffers), alike in kinds.items():
        fused = [p for p in alike if way.fused and p in of.linear | of.embedding]
        elements = numel(alike)
        if way.plain:
            found.append(Pass(Kernel("add_", dtype, dtype), elements, micro_batches - 1))
            continue
        if fused:
            zeroed = numel(p for p in fused if p in of.embedding)
            found.append(Pass(Kernel("zero", buffers, buffers), zeroed, 1))
        here = elements - numel(fused)
        found += _accumulation(way, dtype, buffers, here, micro_batches)
        found += _closing(way, dtype, buffers, elements, micro_batches == 1, handed_on)
    return [p for p in found if p.times and p.elements]


def _accumulation(way: Way, dtype: torch.dtype, buffers: torch.dtype, elements: int, times: int) -> list[Pass]:
    lane = "cpu" if way.offloaded else "device"
    stochastic = "stochastic" in way.arguments and buffers.itemsize < 4
    found = [Pass(Kernel("read", dtype, dtype), elements, times)] if way.held else []
    if way.offloaded:  # a gradient leaves its device
        found.append(Pass(Kernel("pack", dtype, dtype), elements, times))
        found.append(Pass(Kernel("link", dtype, dtype, "link"), elements, times))
    low = way.low(buffers)
    found.append(Pass(Kernel("overwrite", dtype, buffers, lane, stochastic, low), elements, 1))
    found.append(Pass(Kernel("add", dtype, buffers, lane, stochastic, low), elements, times - 1))
    return found


def _closing(
    way: Way, dtype: torch.dtype, buffers: torch.dtype, elements: int, alone: bool, handed_on: bool
) -> list[Pass]:
    lane = "cpu" if way.offloaded else "device"
    stepped = way.stepped(dtype)
    kernels = []
    low = way.low(buffers)
    divided = (buffers.itemsize >= 4 or low) and not (alone or handed_on)  # narrower buffers hold the mean already
    if low and buffers == stepped:
        kernels.append(Kernel("round", buffers, stepped, lane, low=low))
    elif buffers.itemsize > stepped.itemsize:
        kernels.append(Kernel("narrow", buffers, stepped, lane))
    elif divided:
        kernels.append(Kernel("scale", buffers, buffers, lane, low=low))
    if low and stepped != buffers:
        kernels.append(Kernel("join", buffers, stepped, lane, low=low))
    if way.split and stepped != dtype:
        kernels += [Kernel("join", dtype, stepped, lane, low=2), Kernel("split", stepped, dtype, lane, low=2)]
    early = way.away and buffers == stepped  # sums that leave during the last backward, and are scaled on both sides
    if early and divided:
        kernels.append(Kernel("scale", stepped, stepped, "cpu"))
    if not way.split and (way.offloaded or way.away or stepped != dtype):  # back: the gradient, or the stepped masters
        kernels.append(Kernel("cast", stepped, dtype, "cpu" if way.away else lane))
    if way.offloaded or way.away:
        kernels.append(Kernel("link", dtype, dtype, "link"))
    sums = [Pass(Kernel("link", stepped, stepped, "link"), elements, 1, closing=not early)] if way.away else []
    return [*sums, *(Pass(kernel, elements, 1, closing=True) for kernel in kernels)]


def state_bytes(optimizer: Any, trained: Sequence[Tensor], stepped: Callable[[torch.dtype], torch.dtype]) -> int | None:
    """The optimizer's bytes of state, by a trial step on meta tensors; None if that fails."""
    if optimizer is None:
        return None
    kind: Any
    if isinstance(optimizer, Optimizer):
        inner = _inner(optimizer)
        groups, kind = [dict(group) for group in inner.param_groups], type(inner)
    else:
        groups, kind = [{"params": trained}], optimizer
    for group in groups:
        for choice in ("fused", "foreach", "capturable"):  # ways to compute, which are refused for such tensors
            group.pop(choice, None)
        group["params"] = [
            nn.Parameter(torch.empty(local_of(p).shape, dtype=stepped(p.dtype), device="meta"), p.requires_grad)
            for p in group["params"]  # frozen ones too: Adagrad's constructor makes state for all
        ]
    try:
        trial = kind(groups)
        for group in trial.param_groups:
            for p in group["params"]:
                p.grad = torch.empty_like(p) if p.requires_grad else None
        trial.step()
    except Exception:  # other people's code, which may need anything
        return None
    return sum(x.nbytes for entry in trial.state.values() for x in entry.values() if isinstance(x, Tensor))


def _inner(optimizer: Any) -> Any:
    """What a wrapper, which keeps no state of its own, is around."""
    while getattr(optimizer, "optimizer", None) is not None and optimizer.optimizer.state is optimizer.state:
        optimizer = optimizer.optimizer
    return optimizer
