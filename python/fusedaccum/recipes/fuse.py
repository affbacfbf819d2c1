"""Layers whose backward adds the weight's gradient into its buffer, without a tensor for it.

``fuse_linear``: the GEMM that computes a ``Linear``'s weight gradient writes
``buffer + scale * gradient``.

``fuse_embedding``: an ``Embedding`` adds the rows of its tokens, not of the whole vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from ..core.parameters import accumulation_of
from ..engine import outside_graphs
from ..extensions.fused_layers import Write, add_by

Model = TypeVar("Model", bound=nn.Module)


def fuse_linear(model: Model) -> Model:
    """Let each ``nn.Linear`` add its weight's gradient directly into the buffer; returns ``model``.

    ``buffer = buffer + scale * (grad_output.T @ input)`` in one GEMM, if torch has one that reads
    the layer's dtype and writes the buffer's: FP32 and FP64 everywhere, bf16 and fp16 into FP32
    buffers on GPUs. The sum is rounded once, whereas an unfused layer rounds the gradient first:
    results differ by that rounding. Biases are not fused.

    The layer falls back to the unfused path, with the same meaning, wherever a gradient must be
    seen whole: for weights that no wrapper accumulates, under ``nonfinite="skip_micro_batch"``, in
    16-bit buffers, with micro-batch weights that are tensors on a GPU, under autocast,
    ``torch.compile`` and ``torch.func``, for ``create_graph=True`` and ``torch.autograd.grad``, for
    layers whose weight has hooks, and for nested and sparse inputs.

    In place: modules keep their names, parameters, state dicts and forward results, bit for bit.
    Call it before or after wrapping the optimizer. :func:`unfuse` undoes it; do so before
    ``torch.jit`` or ``torch.fx`` traces the model. Subclasses of ``nn.Linear`` are left alone.
    Allocates nothing. Raises TypeError if ``model`` is not a module.
    """
    return _swap(model, {nn.Linear: Linear})


def fuse_embedding(model: Model) -> Model:
    """Let each ``nn.Embedding`` add its tokens' rows directly into the buffer; returns ``model``.

    ``buffer[token] += scale * grad_output``, token by token: memory and time grow with the tokens
    of the micro-batch, not with the vocabulary, except that the buffer is zeroed once per window.
    The rows are added one after the other in the buffer's dtype, whereas an unfused layer adds
    equal tokens in the gradient's dtype first: results differ by that rounding. Deterministic.

    Falls back and raises as :func:`fuse_linear` does; also falls back with ``sparse``, ``max_norm``
    or ``scale_grad_by_freq``.
    """
    return _swap(model, {nn.Embedding: Embedding})


def unfuse(model: Model) -> Model:
    """Undo :func:`fuse_linear` and :func:`fuse_embedding`; returns ``model``.

    Raises TypeError if it is not a module.
    """
    return _swap(model, {Linear: nn.Linear, Embedding: nn.Embedding})


def _swap(model: Model, classes: dict[type[nn.Module], type[nn.Module]]) -> Model:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
    return model


class Linear(nn.Linear):
    """``nn.Linear``, fused."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self._parameters.get("weight")  # else it is parametrized, and computed whenever it is read
        if weight is not None and _may_fuse(weight, input):
            return _Linear.apply(input, weight, self.bias)
        return super().forward(input)


class Embedding(nn.Embedding):
    """``nn.Embedding``, fused."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self._parameters.get("weight")
        if not has_unfused_option(self) and weight is not None and _may_fuse(weight, input):
            return _Embedding.apply(input, weight, self.padding_idx)
        return super().forward(input)


def has_unfused_option(table: nn.Embedding) -> bool:
    """True if the embedding has an option that its fused backward does not implement."""
    return table.sparse or table.scale_grad_by_freq or table.max_norm is not None


def _may_fuse(weight: Tensor, input: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # first, because a compiler must not look at the rest
        and weight.requires_grad
        and torch.is_grad_enabled()
        and accumulation_of(weight) is not None
        and input.layout is torch.strided
        and not input.is_nested
        and not torch.is_autocast_enabled(weight.device.type)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)  # with zeros instead of None, an optimizer would decay the weight
        # As in nn.Linear, a weight that backward does not read may change before it. A saved tensor
        # may come back as another one (checkpointing), but the buffer's key is the parameter.
        ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)
        ctx.weight = weight
        output = functional.linear(input, weight, bias)
        # A view made in this function could not be written in place (ReLU(inplace=True)).
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return None, None, None
        input, weight = ctx.saved_tensors
        flat, flat_input = (x.reshape(x.shape[:-1].numel(), x.shape[-1]) for x in (grad_output, input))

        def write(buffer: Tensor, scale: float, overwrite: bool) -> None:
            add_product(buffer, flat.t(), flat_input, scale, 0.0 if overwrite else 1.0)

        for_input = flat.mm(weight).view(input.shape) if ctx.needs_input_grad[0] else None
        for_weight = None if _added(ctx.weight, flat.dtype, write, has_product) else flat.t().mm(flat_input)
        for_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return for_input, for_weight, for_bias


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return functional.embedding(input, weight, padding_idx)

    @staticmethod
    @outside_graphs
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return None, None, None
        (tokens,) = ctx.saved_tensors

        def write(buffer: Tensor, scale: float, overwrite: bool) -> None:
            if overwrite:
                buffer.zero_()
            flat = tokens.reshape(-1)
            rows = grad_output.reshape(flat.numel(), grad_output.shape[-1]).to(buffer.dtype) * scale
            if ctx.padding_idx is not None:
                rows = rows.masked_fill((flat == ctx.padding_idx).unsqueeze(1), 0.0)
            if buffer.is_cuda:  # here index_add_ is not deterministic; this is, because it sorts
                buffer.index_put_((flat,), rows, accumulate=True)
            else:
                buffer.index_add_(0, flat, rows)

        if _added(ctx.weight, grad_output.dtype, write, lambda *_: True):
            return None, None, None
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx
        size = ctx.weight.shape[0]
        return None, torch.ops.aten.embedding_dense_backward(grad_output, tokens, size, padding, False), None


def _added(
    weight: Parameter, dtype: torch.dtype, write: Write, can: Callable[[torch.dtype, torch.dtype, str], bool]
) -> bool:
    """Let ``write`` add a gradient of this dtype to the weight's buffer; False if autograd must."""
    accumulation = accumulation_of(weight)
    missed = weight._backward_hooks or weight._post_accumulate_grad_hooks  # they would miss the gradient
    if torch.is_grad_enabled() or not weight.requires_grad or missed or accumulation is None or dtype != weight.dtype:
        return False
    return add_by(accumulation, write, weight, lambda buffer_dtype: can(dtype, buffer_dtype, weight.device.type))


def add_product(buffer: Tensor, a: Tensor, b: Tensor, scale: float, keep: float) -> None:
    """``buffer = keep * buffer + scale * (a @ b)``, read in the dtype of ``a`` and ``b``.

    With ``keep`` 0, what the buffer holds does not count.
    """
    mixed = {} if buffer.dtype == a.dtype else {"out_dtype": buffer.dtype}
    torch.addmm(buffer, a, b, beta=keep, alpha=scale, out=buffer, **mixed)


@functools.cache
def has_product(dtype: torch.dtype, buffer_dtype: torch.dtype, device: str) -> bool:
    """True if :func:`add_product` can read and write these dtypes here. Tried once per process."""
    try:
        a = torch.ones(16, 16, dtype=dtype, device=device)
        add_product(torch.ones(16, 16, dtype=buffer_dtype, device=device), a, a, 1.0, 1.0)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True
