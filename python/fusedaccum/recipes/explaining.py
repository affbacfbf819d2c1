"""``fa.explain``: what a window will cost here under each mode, and which one to take."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..parts import local_of
from ..scalars import checked_count
from . import calibration
from .modes import FUSED, HELD, MASTERS, PLAIN, Kernel, Mode, Parameters, priced

# The share of the memory that is kept for what is unknown: activations, and what the step takes.
ROOM = 0.2


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`explain` found. Its ``repr()`` is the text, so ``print()`` and a REPL show it.

    Attributes:
        modes: the modes to choose from.
        recommended: one of them. reason: why. call: code to paste, for the requested window.
        micro_batches: per window. micro_batch: samples in each. last: samples in the last.
        available: bytes on the parameters' :attr:`device`, for the model and all that comes with
            it; None if not known.
        bandwidths: bytes per second of each pass, as measured.
        hook_seconds: what the wrapper adds to a window's backward passes, besides
            :attr:`Mode.seconds`; None if not measured.
    """

    modes: list[Mode]
    recommended: Mode
    reason: str
    call: str
    micro_batches: int
    micro_batch: int
    last: int
    available: int | None
    device: torch.device
    bandwidths: dict[Kernel, float]
    hook_seconds: float | None

    def __repr__(self) -> str:
        return "\n".join(_text(self))


def explain(
    model: nn.Module | Iterable[Tensor],
    *,
    desired_batch: int,
    micro_batch: int,
    optimizer: Any = None,
    memory: int | None = None,
) -> Explanation:
    """A window's memory, bytes moved and time under each mode, and which mode to use.

    ``print(fa.explain(...))`` shows them. A window has ``N = ceil(desired_batch / micro_batch)``
    micro-batches. For parameters of p bytes per element, buffers of b::

        bytes in memory = model + buffers + gradients on their way (a bucket) + masters
                          + optimizer's state
        bytes moved     = (p + b) + (N - 1) * (p + 2b) + closing
                          (closing: b + p to cast, 2b to scale, 0 for neither)
        seconds         = sum over the passes of bytes / measured bandwidth
                          (+ hooks, per parameter and micro-batch)

    counted over the parameters as they are; docs/memory.md and docs/performance.md explain each
    term. Gradients are assumed to arrive from the last parameter to the first. Not counted, because
    no input is known: activations, the rows of a fused embedding, the extra time of fused layers'
    GEMMs, and what the inner step takes for itself. (``fa.MicroBatcher(model, opt)`` finds the
    largest micro-batch that fits.)

    Args:
        model: a module, or its parameters, on one device. On ``"meta"`` it takes no memory, and
            nothing is measured.
        desired_batch: samples per window.
        micro_batch: samples that go through the model at once.
        optimizer: an instance or a class, whose state is counted as it will be after the first
            step; None leaves it out. An instance's groups may ask for buffer dtypes
            (``"buffer_dtype"``).
        memory: bytes available on the device, another machine's for example; None asks this device.

    Raises:
        TypeError, ValueError: no model, nothing to train, several devices; sizes that are not
            whole numbers or below 1, or a micro-batch larger than the batch.

    Measures with the library's own calls on memory of its own: this takes about a second on a CPU
    and at most 1 GiB (of FP64), which is freed. (If a device is too full for that, explain a copy
    on ``"meta"``.) Waits for the device. Parameters, gradients and the optimizer stay untouched.
    """
    desired_batch = checked_count(desired_batch, "desired_batch", "; it counts samples")
    micro_batch = checked_count(micro_batch, "micro_batch", "; it counts samples")
    if micro_batch > desired_batch:
        raise ValueError(
            f"micro_batch is {micro_batch}, more than desired_batch ({desired_batch}); a window is made of "
            f"micro-batches: use micro_batch={desired_batch} (which needs no accumulation), or a larger desired_batch"
        )
    if memory is not None:
        memory = checked_count(memory, "memory", "; it is in bytes: 80 * 2**30")
    if optimizer is not None and not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise TypeError(f"optimizer must be an optimizer or its class, got {optimizer!r}; try torch.optim.AdamW")
    of = Parameters.of(model, optimizer)
    micro_batches = -(-desired_batch // micro_batch)
    last = desired_batch - (micro_batches - 1) * micro_batch
    modes = [priced(way, of, micro_batches, optimizer) for way in of.ways()]
    speeds: dict[Kernel, float] = {}
    hooks = None
    if of.device.type != "meta":
        sizes = [local_of(p).numel() for p in reversed(of.trained)]
        speeds = calibration.bandwidths((p.kernel for mode in modes for p in mode.passes), sizes, of.device)
        hooks = calibration.hook_seconds(of.trained[0].dtype, of.device) * len(sizes) * micro_batches
        modes = [dataclasses.replace(mode, seconds=_seconds(mode, speeds)) for mode in modes]
    available = memory if memory is not None else _available(of)
    recommended, reason = _recommend(modes, of.narrow, micro_batches, available)
    call = _call(recommended, desired_batch, micro_batches, last == micro_batch)
    return Explanation(
        modes, recommended, reason, call, micro_batches, micro_batch, last, available, of.device, speeds, hooks
    )


def _seconds(mode: Mode, speeds: dict[Kernel, float]) -> float:
    """Device, link and CPU work in parallel while gradients arrive, in turn at the window's end."""
    lanes: dict[str, float] = {}
    closing = 0.0
    for p in mode.passes:
        seconds = p.bytes / speeds[p.kernel]
        if p.closing:
            closing += seconds
        else:
            lanes[p.kernel.lane] = lanes.get(p.kernel.lane, 0.0) + seconds
    return max(lanes.values(), default=0.0) + closing


def _available(of: Parameters) -> int | None:
    """Free memory of the device, plus what the model takes of it already."""
    if of.device.type == "cuda":
        unused = torch.cuda.memory_reserved(of.device) - torch.cuda.memory_allocated(of.device)
        return torch.cuda.mem_get_info(of.device)[0] + unused + of.model_bytes
    known = Path("/proc/meminfo")
    if of.device.type == "cpu" and known.exists():
        lines = dict(line.split(":", 1) for line in known.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024 + of.model_bytes
    return None


def _recommend(modes: list[Mode], narrow: bool, micro_batches: int, available: int | None) -> tuple[Mode, str]:
    """The mode to use, and why: the first in the order of preference that leaves room."""
    named = {mode.name: mode for mode in modes}
    if micro_batches == 1:
        return named[PLAIN.name], "one micro-batch is the whole batch, so there is nothing to accumulate"
    policies = (HELD.name, PLAIN.name, MASTERS.name)  # chosen for what they do, not for what they cost
    ours = [mode for mode in modes if mode.name not in policies]
    for mode in ours:
        if available is None or mode.peak <= (1 - ROOM) * available:
            if mode is not ours[0]:
                return mode, "every mode above it in the table leaves less than a fifth of the memory for activations"
            if narrow:
                return mode, "16-bit sums lose what is small beside them (in bf16 256 + 1 is 256), FP32 sums do not"
            return mode, "sums as precise as p.grad's own, with weights, clipping and checks of whole windows"
    least = min(ours, key=lambda mode: mode.peak)
    return least, "the least of all, but it leaves less than a fifth for activations: shard, or train less of the model"


def _call(mode: Mode, desired_batch: int, micro_batches: int, even: bool) -> str:
    if mode.name == PLAIN.name:
        return "optimizer.step() after every batch"
    window = f"accum_steps={micro_batches}" if even else f"window_weight={desired_batch}"
    call = f"opt = fa.AccumulatingOptimizer(optimizer, {', '.join(filter(None, [window, mode.arguments]))})"
    return call + ("; fa.fuse_embedding(fa.fuse_linear(model))" if mode.name == FUSED.name else "")


# -- the text --------------------------------------------------------------------------------------


def _text(found: Explanation) -> Iterator[str]:
    n, size, modes = found.micro_batches, found.micro_batch, found.modes
    batch = (n - 1) * size + found.last
    yield f"Take {found.recommended.name}: {found.reason}."
    yield f"{_price(found)}."
    yield f"    {found.call}"
    yield ""
    smaller = "" if found.last == size else f", the last of {found.last}"
    micro_batches = f"{n} micro-batch{'es' if n > 1 else ''} of {size}{smaller}"
    yield f"A window of {batch} samples: {micro_batches}. Parameters on {found.device}."
    if smaller:
        yield f"With opt.backward(loss, weight=len(x)), the window is the mean over its {batch} samples."
    yield ""
    yield (
        "Memory at a window's peak. Gradients: those not added yet. Activations, and what the step takes, come on top."
    )
    yield from _memory(found)
    if any(mode.cpu for mode in modes):
        yield "* in CPU memory. Ring: what gradients pass through on their way there."
    if "optimizer" not in modes[0].memory:
        yield (
            "The optimizer's state is left out: no optimizer was given (optimizer=torch.optim.AdamW), or a trial step "
            "failed."
        )
    yield "fa.MicroBatcher finds by trial how many samples fit, activations included."
    yield ""
    yield (
        "What accumulating a window reads and writes. n × b: b bytes per element in each of n micro-batches; else once."
    )
    header = ["mode", "bytes per element", "in all", *(["ms"] if found.bandwidths else [])]
    yield from _table([header, *([mode.name, mode.formula, _size(mode.moved), *_ms(found, mode)] for mode in modes)])
    if not found.bandwidths:
        yield "Time is not measured, because the model has no device."
        return
    yield f"ms = bytes / bandwidth + hooks ({1e3 * (found.hook_seconds or 0):.1f} ms, in all modes but {PLAIN.name})."
    speeds = ", ".join(f"{kernel} {speed / 1e9:.1f}" for kernel, speed in found.bandwidths.items())
    yield from textwrap.wrap(f"GB/s measured here: {speeds}.", 100)


def _price(found: Explanation) -> str:
    """What the recommended mode takes, beside plain accumulation."""

    def costs(mode: Mode) -> str:
        return "".join(f" and {ms} ms" for ms in _ms(found, mode)) or f" and moves {_size(mode.moved)}"

    mode, plain = found.recommended, found.modes[-1]
    free = found.available
    room = " (how much is free is not known here)" if free is None else f" of the {_size(free)} available"
    other = "" if mode is plain else f"; {plain.name} takes {_size(plain.peak)}{costs(plain)}"
    return f"It takes {_size(mode.peak)}{room}{costs(mode)} per window{other}"


def _ms(found: Explanation, mode: Mode) -> list[str]:
    """A window's milliseconds, hooks included; nothing if they were not measured."""
    if mode.seconds is None:
        return []
    hooks = 0.0 if mode.name == PLAIN.name else found.hook_seconds or 0.0
    return [f"{1e3 * (mode.seconds + hooks):.1f}"]


def _memory(found: Explanation) -> Iterator[str]:
    columns = list(dict.fromkeys(part for mode in found.modes for part in (*mode.memory, *mode.cpu)))
    away = found.device.type != "cpu"
    lines = [["mode", *columns, "in all", *(["CPU memory"] if away else [])]]
    for mode in found.modes:
        parts = [
            _size(mode.memory.get(part, 0)) + ("*" if part in mode.cpu and part not in mode.memory else "")
            for part in columns
        ]
        lines.append([mode.name, *parts, _size(mode.peak), *([_size(sum(mode.cpu.values()))] if away else [])])
    return _table(lines)


def _table(lines: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        yield "  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return "0" if not count else f"{count / 2**10:.1f} KiB"
