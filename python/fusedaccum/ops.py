"""The functional layer: the same four ops on every backend. This module checks the arguments and picks the backend.

Any of FP64, FP32, BF16 and FP16 goes into any of them, also mixed within one call. Arithmetic is FP64 if either side of a pair is, else
FP32: multiply, then add, each rounded (no FMA), then one rounding to the output's dtype. So all backends give the same bits.
Every op writes its first list in place and bumps the tensors' autograd versions; gradients are not tracked through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import arguments, backends
from .arguments import Layout

Scalar = float | Tensor


@dataclass(frozen=True)
class Stats:
    """What an op measured of its output list: device tensors, so that reading them is the only wait.

    Attributes:
        sq_norm: sum of squares of all elements, a 0-d float64 tensor.
        nonfinite: number of elements that are NaN or infinite, a 0-d int64 tensor.
    """

    sq_norm: Tensor
    nonfinite: Tensor

    @staticmethod
    def empty(device: torch.device | str | None = None) -> Stats:
        """Fresh ones for ``stats=``, both zero."""
        return Stats(
            torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.int64, device=device)
        )


@dataclass(frozen=True)
class StochasticRounding:
    """Round 16-bit outputs up or down at random, with the probabilities that make the mean right.

    Element e (in memory order) of tensor k uses the 16-bit number ``counters[k] + e`` of Philox4x32-10 under ``seed``:
    calls that share neither seed nor stretches of counters are independent.

    Attributes:
        seed: 64-bit key.
        counters: for every tensor of the call, the index of its first random number, modulo 2**64.
    """

    seed: int
    counters: Sequence[int]


def accumulate_(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: Scalar,
    *,
    overwrite: bool = False,
    decay: Scalar = 1.0,
    rounding: StochasticRounding | None = None,
    stats: Stats | None = None,
    backend: str | None = None,
) -> None:
    """``buffer = buffer * decay + grad * scale`` for every pair; with ``overwrite``, ``buffer = grad * scale``.

    Args:
        buffers: what is written; any strides, no shared memory.
        grads: what is added, of the buffers' shapes and device; any strides.
        scale: a number or 0-d tensor. 0 adds nothing, whatever the gradients hold (NaN too).
        overwrite: do not read the buffers: the first touch needs no zeroing.
        decay: a number or 0-d tensor; for buffers that hold a running mean.
        rounding: of 16-bit buffers, None for nearest-even.
        stats: overwritten with the squared norm of the buffers after the call and the number of elements of
            ``grad * scale`` that are not finite.
        backend: a name, or None for the environment's FUSEDACCUM_BACKEND, else ``"auto"``.

    Raises:
        TypeError, ValueError: lists that do not match, a dtype or layout that is not supported, memory shared between buffers or
            with a gradient; a scale that is not one number. RuntimeError: a backend that is missing. Nothing is written then.

    Waits for the device only when it has to read a scalar that is there. Allocates only for tensors that are not dense.
    """
    layout = _checked("buffers", buffers, "grads", grads)
    module, device = _backend("accumulate_", buffers, backend)
    scale, decay = (arguments.check_scalar(name, value, device) for name, value in (("scale", scale), ("decay", decay)))
    if rounding is not None:
        arguments.check_rounding(rounding, len(buffers))
    if stats is not None:
        arguments.check_stats(stats, device)
    if layout is Layout.FLAT:
        return module.accumulate_(buffers, grads, scale, overwrite, decay, rounding, stats)
    outs, ins = _flattened(buffers, grads)
    module.accumulate_(outs, ins, scale, overwrite, decay, rounding, stats)
    _copy_back(buffers, outs)


def scale_(tensors: Sequence[Tensor], scale: Scalar, *, stats: Stats | None = None, backend: str | None = None) -> None:
    """``x = x * scale`` for every tensor, literally: infinity times 0 is NaN.

    Args:
        tensors: written in place; any strides, no shared memory.
        scale: a number or 0-d tensor.
        stats: overwritten with the squared norm and the non-finite count of the result.
        backend, and Raises: as :func:`accumulate_`.
    """
    layout = _checked("tensors", tensors)
    module, device = _backend("scale_", tensors, backend)
    scale = arguments.check_scalar("scale", scale, device)
    if stats is not None:
        arguments.check_stats(stats, device)
    if layout is Layout.FLAT:
        return module.scale_(tensors, scale, stats)
    outs = [x if arguments.is_flat(x) else _flat_copy(x, x.dtype, x) for x in tensors]
    module.scale_(outs, scale, stats)
    _copy_back(tensors, outs)


def cast_(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    scale: Scalar = 1.0,
    *,
    stats: Stats | None = None,
    backend: str | None = None,
) -> None:
    """``out = cast(in * scale)`` for every pair, rounded to nearest even, literally: infinity times 0 is NaN.

    Args:
        outs: what is written; any strides, no shared memory.
        ins: what is read, of the outputs' shapes and device; any strides.
        scale: a number or 0-d tensor.
        stats: overwritten with the squared norm and the non-finite count of ``outs``.
        backend, and Raises: as :func:`accumulate_`.
    """
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


def stats(tensors: Sequence[Tensor], *, backend: str | None = None) -> Stats:
    """Squared norm and non-finite count of a list of tensors, read once; nothing is written.

    Args:
        tensors: any strides; may share memory.
        backend, and Raises: as :func:`accumulate_`.

    Returns new :class:`Stats` on the tensors' device (the CPU for an empty list); does not wait for it.
    """
    layout = _checked("tensors", tensors, written=False)
    module, device = _backend("stats", tensors, backend)
    into = Stats.empty(device)
    if layout is not Layout.FLAT:
        tensors = [x if arguments.is_flat(x) else _flat_copy(x, x.dtype, x) for x in tensors]
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
        flat = out if arguments.is_flat(out) else _flat_copy(out, out.dtype, out)
        flat_outs.append(flat)
        flat_ins.append(x if arguments.is_flat_pair(flat, x) else _flat_copy(x, x.dtype, flat))
    return flat_outs, flat_ins


@torch.no_grad()
def _copy_back(outs: Sequence[Tensor], flat_outs: Sequence[Tensor]) -> None:
    for out, flat in zip(outs, flat_outs, strict=True):
        if out is not flat:
            out.copy_(flat)
