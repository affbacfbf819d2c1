"""Training without a model, to time what lies between backward and the optimizer.

The backward pass costs next to nothing but gives every parameter a fresh gradient, and the
optimizer does nothing.

Gradients have to be fresh: one that something else still holds must be copied or added immediately,
and autograd itself copies it into ``p.grad`` where it would have moved a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple:
        return (None, *(grad.clone() for grad in ctx.grads))


def loss_with(grads: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """A scalar whose ``backward()`` gives the parameters copies of ``grads``."""
    return _Source.apply(grads, *params)


def main_grad_hook(total: Tensor) -> Callable[[Tensor], None]:
    """The hook of Megatron-LM and others after backward: add ``p.grad`` to ``total``, drop it."""

    def hook(p: Tensor) -> None:
        total.add_(p.grad)
        p.grad = None

    return hook


class Hold(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    steps_each_alone = True  # as PyTorch's do

    def __init__(self, params: Sequence[Tensor]):
        super().__init__(params, {})

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Leave the parameters as they are."""
