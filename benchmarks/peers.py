"""Plain PyTorch's ways to do the same, written as well as is possible without a custom kernel.

A way is a function ``(buffers, grads, scale)``. In 16-bit buffers no two of them give the same bits
(some round twice); all of them are what people use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import environment

Way = Callable[[Sequence[Tensor], Sequence[Tensor], float], object]
COMPILED_TENSORS_AT_MOST = 400


def add_each(buffers: Sequence[Tensor], grads: Sequence[Tensor], scale: float) -> None:
    """One ``add_`` per tensor, as in Megatron-LM's and DeepSpeed's hooks; it converts within."""
    for buffer, grad in zip(buffers, grads):
        buffer.add_(grad, alpha=scale)


def add_foreach(buffers: Sequence[Tensor], grads: Sequence[Tensor], scale: float) -> None:
    """One ``_foreach_add_`` for the list."""
    torch._foreach_add_(buffers, grads, alpha=scale)


def cast_then_add(buffers: Sequence[Tensor], grads: Sequence[Tensor], scale: float) -> None:
    """Convert a gradient, then add it, tensor by tensor: a small copy is still in the cache."""
    for buffer, grad in zip(buffers, grads):
        buffer.add_(grad.to(buffer.dtype), alpha=scale)


def copy_each(buffers: Sequence[Tensor], grads: Sequence[Tensor], scale: float) -> None:
    """One ``copy_`` per tensor, a ``_foreach_mul_`` for a scale: the plain way to overwrite."""
    for buffer, grad in zip(buffers, grads):
        buffer.copy_(grad)
    if scale != 1:
        torch._foreach_mul_(buffers, scale)


def copy_foreach(buffers: Sequence[Tensor], grads: Sequence[Tensor], scale: float) -> None:
    """One ``_foreach_copy_`` for the list, and a ``_foreach_mul_`` where there is a scale."""
    torch._foreach_copy_(buffers, grads)
    if scale != 1:
        torch._foreach_mul_(buffers, scale)


@functools.lru_cache(maxsize=1)
def why_no_compile() -> str:
    """Empty when ``torch.compile`` works here, else the reason why it does not."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8, device=environment.device))
    except Exception as error:  # whatever stops it, the reason is what the row must say
        return f"torch.compile does not work here: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    finally:
        torch._dynamo.reset()
    return ""


def why_not_compile(tensors: int, wanted: bool) -> str:
    """Empty if compiling a list of this many tensors is feasible, else the reason, for the row."""
    if not wanted:
        return "torch.compile was left out on the command line"
    if tensors > COMPILED_TENSORS_AT_MOST:
        return f"{tensors} tensors: the graph takes many minutes to compile"
    return why_no_compile()


def compiled_adds() -> Way:
    """``torch.compile`` of the whole list: one graph, one generated kernel per tensor."""
    torch._dynamo.reset()
    return torch.compile(add_each, fullgraph=True, dynamic=False)


def norm_and_finite(buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The list's norm by ``_foreach_norm``, as in PyTorch's clipping, and whether it is finite."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(buffers)))
    return norm, torch.isfinite(norm)
