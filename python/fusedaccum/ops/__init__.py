"""The functional layer: the same four ops on every backend.

Any of FP64, FP32, BF16 and FP16 goes into any of them, also mixed within one call. Arithmetic is
FP64 if either side of a pair is, else FP32: multiply, then add, each rounded (no FMA), then one
rounding to the output's dtype. So all backends give the same bits. Every op writes its first list
in place and bumps the tensors' autograd versions; gradients are not tracked through it.

A number may be kept in two tensors: a BF16 one and its *low parts*, ``low=``, a tensor of integers
in the same shape. ``torch.int8`` makes numbers of 24 bits, with FP32's range and 16 significant
bits; ``torch.int16`` makes FP32 numbers, bit for bit. The BF16 tensor by itself is the number to
nearest (ties away from zero), so other code may read it as it is. Code that writes it must set its
low parts to 0.

A call runs immediately, bypassing PyTorch's dispatcher (:mod:`fusedaccum.ops.eager`). A call that
``torch.compile`` traces, or that a dispatch mode should see (``make_fx``, ``torch.export``,
``FakeTensorMode``), goes through the dispatcher, as ``torch.ops.fusedaccum``
(:mod:`fusedaccum.ops.traced`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._C import _len_torch_dispatch_stack as modes
from torch.compiler import is_dynamo_compiling as is_compiling

from ..scalars import Scalar
from . import eager, traced
from .arguments import Stats, StochasticRounding

__all__ = ["Scalar", "Stats", "StochasticRounding", "accumulate_", "cast_", "scale_", "stats"]


def accumulate_(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: Scalar,
    *,
    overwrite: bool = False,
    decay: Scalar = 1.0,
    rounding: StochasticRounding | None = None,
    low: Sequence[Tensor] | None = None,
    stats: Stats | None = None,
    backend: str | None = None,
) -> None:
    """``buffer = buffer * decay + grad * scale`` for every pair.

    With ``overwrite``, ``buffer = grad * scale``.

    Args:
        buffers: written in place; any strides, no shared memory.
        grads: added, of the buffers' shapes and device; any strides.
        scale: a number or 0-d tensor. 0 adds nothing, whatever the gradients hold (NaN too).
        overwrite: do not read the buffers, so the first touch needs no zeroing.
        decay: a number or 0-d tensor; for buffers that hold a running mean.
        rounding: for 16-bit buffers; None for nearest-even.
        low: low parts of the buffers, written too. The buffers are BF16 then, the gradients BF16 or
            FP32, and ``rounding`` is None.
        stats: overwritten with the squared norm of the buffers (with their low parts) after the
            call and the number of elements of ``grad * scale`` that are not finite.
        backend: a name, or None for the environment variable FUSEDACCUM_BACKEND, else ``"auto"``.

    Raises:
        TypeError, ValueError: lists that do not match, an unsupported dtype or layout, memory
            shared between buffers or with a gradient; a scale that is not one number. RuntimeError:
            a missing backend. Nothing is written then.

    Never waits for the device. The kernels allocate no tensor-sized memory, except to copy tensors
    that are not dense (views with gaps); ``"reference"`` makes temporaries throughout.
    """
    if is_compiling() or modes():
        return traced.accumulate_(buffers, grads, scale, overwrite, decay, rounding, low, stats, backend)
    return eager.accumulate_(buffers, grads, scale, overwrite, decay, rounding, low, stats, backend)


def scale_(
    tensors: Sequence[Tensor],
    scale: Scalar,
    *,
    low: Sequence[Tensor] | None = None,
    stats: Stats | None = None,
    backend: str | None = None,
) -> None:
    """``x = x * scale`` for every tensor, literally: infinity times 0 is NaN.

    Args:
        tensors: written in place; any strides, no shared memory.
        scale: a number or 0-d tensor.
        low: low parts of the tensors, which are BF16 then; read and written.
        stats: overwritten with the squared norm and the non-finite count of the result.
        backend, and Raises: as :func:`accumulate_`.
    """
    if is_compiling() or modes():
        return traced.scale_(tensors, scale, low, stats, backend)
    return eager.scale_(tensors, scale, low, stats, backend)


def cast_(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    scale: Scalar = 1.0,
    *,
    low: Sequence[Tensor] | None = None,
    stats: Stats | None = None,
    backend: str | None = None,
) -> None:
    """``out = cast(in * scale)`` for every pair, rounded to nearest even.

    The product is taken literally: infinity times 0 is NaN.

    Args:
        outs: written in place; any strides, no shared memory.
        ins: read, of the outputs' shapes and device; any strides.
        scale: a number or 0-d tensor.
        low: low parts of ``ins``, read. The inputs are BF16 then, the outputs BF16 or FP32; a BF16
            output may be its own input.
        stats: overwritten with the squared norm and the non-finite count of ``outs``.
        backend, and Raises: as :func:`accumulate_`.
    """
    if is_compiling() or modes():
        return traced.cast_(outs, ins, scale, low, stats, backend)
    return eager.cast_(outs, ins, scale, low, stats, backend)


def stats(tensors: Sequence[Tensor], *, low: Sequence[Tensor] | None = None, backend: str | None = None) -> Stats:
    """Squared norm and non-finite count of a list of tensors, read once; nothing is written.

    Args:
        tensors: any strides; may share memory.
        low: low parts of the tensors, which are BF16 then.
        backend, and Raises: as :func:`accumulate_`.

    Returns new :class:`Stats` on the tensors' device (the CPU for an empty list); does not wait.
    """
    if is_compiling() or modes():
        return traced.stats(tensors, low, backend)
    return eager.stats(tensors, low, backend)
