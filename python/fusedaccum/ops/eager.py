"""Running the ops: check the arguments, pick the backend, run it.

:mod:`fusedaccum.ops` calls these unless a call is to be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..scalars import Scalar
from . import arguments, backends, memory
from .arguments import Layout, Stats, StochasticRounding


def accumulate_(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: Scalar,
    overwrite: bool,
    decay: Scalar,
    rounding: StochasticRounding | None,
    low: Sequence[Tensor] | None,
    stats: Stats | None,
    backend: str | None,
) -> None:
    module, device = _backend("accumulate_", "buffers", buffers, backend, low)
    scale = arguments.check_scalar("scale", scale, device)
    decay = arguments.check_scalar("decay", decay, device)
    if rounding is not None:
        arguments.check_rounding(rounding, len(buffers), low)
    arguments.check_stats(stats, device)
    lists = {"buffers": buffers, "grads": grads}
    _run(module, "accumulate_", lists, scale, overwrite, decay, rounding, stats, low=low, of="buffers")


def scale_(
    tensors: Sequence[Tensor], scale: Scalar, low: Sequence[Tensor] | None, stats: Stats | None, backend: str | None
) -> None:
    module, device = _backend("scale_", "tensors", tensors, backend, low)
    scale = arguments.check_scalar("scale", scale, device)
    arguments.check_stats(stats, device)
    _run(module, "scale_", {"tensors": tensors}, scale, stats, low=low, of="tensors")


def cast_(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    scale: Scalar,
    low: Sequence[Tensor] | None,
    stats: Stats | None,
    backend: str | None,
) -> None:
    module, device = _backend("cast_", "outs", outs, backend, low)
    scale = arguments.check_scalar("scale", scale, device)
    arguments.check_stats(stats, device)
    _run(module, "cast_", {"outs": outs, "ins": ins}, scale, stats, low=low, of="ins")


def stats(tensors: Sequence[Tensor], low: Sequence[Tensor] | None, backend: str | None) -> Stats:
    module, device = _backend("stats", "tensors", tensors, backend, low)
    into = Stats.empty(device or "cpu")
    _run(module, "stats", {"tensors": tensors}, into, low=low, of="tensors", written=False)
    return into


def _backend(op: str, name: str, tensors: Any, backend: str | None, low: Any) -> tuple[ModuleType, torch.device | None]:
    device = arguments.device_of(name, tensors)
    return backends.select(backend, device, op, low is not None), device


def _run(
    module: ModuleType,
    op: str,
    lists: dict[str, Any],
    *others: Any,
    low: Sequence[Tensor] | None,
    of: str,
    written: bool = True,
) -> None:
    """Run the op, through copies of what is not flat in memory.

    Raises for lists that no kernel can take, before anything is written.

    Args:
        lists: the first is what the op writes, or with ``written=False`` reads.
        low: the low parts of the list ``of``, if it has any.
    """
    parts = () if low is None else (low,)
    run = getattr(module, op)
    if getattr(module, "CHECKS_LISTS", False):
        layout = run(*lists.values(), *others, *parts)
        if layout == Layout.FLAT:  # it has run
            return
    else:
        layout = _layout(lists, written, low, of)
        if layout == Layout.FLAT:
            run(*lists.values(), *others, *parts)
            return
    if layout == Layout.REFUSED:
        # Raises, unless it was for interleaved views, which only the check in Python recognises.
        arguments.check_lists(lists, written, low=low, of=of)
    outs, *ins = lists.values()
    flat_outs = [x if memory.is_flat(x) else _flat_copy(x, x) for x in outs]
    flat_ins = [_like(flat_outs, x) for x in ins]
    flat_parts = [_like(flat_outs, part) for part in parts]
    if run(flat_outs, *flat_ins, *others, *flat_parts):
        raise RuntimeError(f"{op} of {module.__name__} refused flat copies; please report this")
    if written:
        _copy_back(outs, flat_outs)
        for part, flat_part in zip(parts, flat_parts, strict=True):
            _copy_back(part, flat_part)  # nothing to do where the op only reads it


def _layout(lists: dict[str, Any], written: bool, low: Sequence[Tensor] | None, of: str) -> int:
    native = memory.native_lists()
    if native is None:
        return arguments.check_lists(lists, written, low=low, of=of)
    return native.predicate(*lists.values(), written, low, of == "ins")


def _flat_copy(x: Tensor, like: Tensor) -> Tensor:
    """A copy of ``x`` without gaps, its elements in the memory order of ``like``."""
    return torch.empty_like(like, dtype=x.dtype, requires_grad=False).copy_(x.detach())


def _like(flat_outs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies in place of those that a kernel cannot take beside these outputs."""
    pairs = zip(flat_outs, tensors, strict=True)
    return [x if memory.is_flat_pair(out, x) else _flat_copy(x, out) for out, x in pairs]


@torch.no_grad()
def _copy_back(outs: Sequence[Tensor], flat_outs: Sequence[Tensor]) -> None:
    for out, flat in zip(outs, flat_outs, strict=True):
        if out is not flat:
            out.copy_(flat)
