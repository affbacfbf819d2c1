"""The ops at work: check the arguments, pick the backend, run it. What :mod:`fusedaccum.ops` calls unless the call is to be recorded."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import arguments, backends
from .arguments import Layout, Scalar, Stats, StochasticRounding
from .memory import is_flat, is_flat_pair


def accumulate_(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: Scalar,
    overwrite: bool,
    decay: Scalar,
    rounding: StochasticRounding | None,
    stats: Stats | None,
    backend: str | None,
) -> None:
    layout = _checked("buffers", buffers, "grads", grads)
    module, device = _backend("accumulate_", buffers, backend)
    scale = arguments.check_scalar("scale", scale, device)
    decay = arguments.check_scalar("decay", decay, device)
    if rounding is not None:
        arguments.check_rounding(rounding, len(buffers))
    if stats is not None:
        arguments.check_stats(stats, device)
    if layout is Layout.FLAT:
        return module.accumulate_(buffers, grads, scale, overwrite, decay, rounding, stats)
    outs, ins = _flattened(buffers, grads)
    module.accumulate_(outs, ins, scale, overwrite, decay, rounding, stats)
    _copy_back(buffers, outs)


def scale_(tensors: Sequence[Tensor], scale: Scalar, stats: Stats | None, backend: str | None) -> None:
    layout = _checked("tensors", tensors)
    module, device = _backend("scale_", tensors, backend)
    scale = arguments.check_scalar("scale", scale, device)
    if stats is not None:
        arguments.check_stats(stats, device)
    if layout is Layout.FLAT:
        return module.scale_(tensors, scale, stats)
    outs = [x if is_flat(x) else _flat_copy(x, x.dtype, x) for x in tensors]
    module.scale_(outs, scale, stats)
    _copy_back(tensors, outs)


def cast_(
    outs: Sequence[Tensor], ins: Sequence[Tensor], scale: Scalar, stats: Stats | None, backend: str | None
) -> None:
    layout = _checked("outs", outs, "ins", ins)
    module, device = _backend("cast_", outs, backend)
    scale = arguments.check_scalar("scale", scale, device)
    if stats is not None:
        arguments.check_stats(stats, device)
    if layout is Layout.FLAT:
        return module.cast_(outs, ins, scale, stats)
    flat_outs, flat_ins = _flattened(outs, ins)
    module.cast_(flat_outs, flat_ins, scale, stats)
    _copy_back(outs, flat_outs)


def stats(tensors: Sequence[Tensor], backend: str | None) -> Stats:
    layout = _checked("tensors", tensors, written=False)
    module, device = _backend("stats", tensors, backend)
    into = Stats.empty(device)
    if layout is not Layout.FLAT:
        tensors = [x if is_flat(x) else _flat_copy(x, x.dtype, x) for x in tensors]
    module.stats(tensors, into)
    return into


def _checked(outs_name: str, outs: Any, ins_name: str | None = None, ins: Any = None, written: bool = True) -> Layout:
    """Refuse lists that no kernel may be given; say whether all pairs are flat memory."""
    native = backends.native_predicate()
    if native is not None and (ins is not None or ins_name is None):
        verdict = native(outs, ins, written)
        if verdict != Layout.REFUSED:
            return Layout(verdict)
    layout = arguments.check_lists(outs_name, outs, ins_name, ins, written)
    # Refused by the native predicate and not by this one: views that are interleaved, which only this one looks into.
    return layout if native is None else Layout.STRIDED


def _backend(op: str, tensors: Sequence[Tensor], backend: str | None) -> tuple[ModuleType, torch.device | None]:
    device = tensors[0].device if tensors else None
    return backends.select(backend, device, op), device


def _flat_copy(x: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A copy of ``x`` without gaps, its elements in the memory order of ``like``."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(x.detach())


def _flattened(outs: Sequence[Tensor], ins: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The lists with copies in place of what a kernel cannot take as it is."""
    flat_outs, flat_ins = [], []
    for out, x in zip(outs, ins, strict=True):
        flat = out if is_flat(out) else _flat_copy(out, out.dtype, out)
        flat_outs.append(flat)
        flat_ins.append(x if is_flat_pair(flat, x) else _flat_copy(x, x.dtype, flat))
    return flat_outs, flat_ins


@torch.no_grad()
def _copy_back(outs: Sequence[Tensor], flat_outs: Sequence[Tensor]) -> None:
    for out, flat in zip(outs, flat_outs, strict=True):
        if out is not flat:
            out.copy_(flat)
