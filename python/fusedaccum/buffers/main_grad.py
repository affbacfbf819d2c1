"""Layers that add their weights' gradients into a buffer themselves: the protocol of Megatron-LM's and TransformerEngine's.

The owner of the buffers marks a parameter with ``grad_added_to_main_grad = False`` and lends it a buffer, ``main_grad``. In backward the
layer adds the weight's gradient there, sets the mark, and gives autograd a meaningless gradient; with ``zero_out_wgrad`` it gives
zeros, to which autograd may have added a gradient from elsewhere (a tied embedding).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def is_enabled(parameter: Tensor) -> bool:
    """Does the parameter take part in the protocol?"""
    return hasattr(parameter, "grad_added_to_main_grad")


def provide(parameter: Tensor, buffer: Tensor) -> None:
    """Let the parameter's layer add into ``buffer``."""
    parameter.main_grad = buffer  # type: ignore[attr-defined]
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def is_provided(parameter: Tensor, buffer: Tensor) -> bool:
    """Is ``buffer`` still what the layer adds into?"""
    return getattr(parameter, "main_grad", None) is buffer


def withdraw(parameters: Iterable[Tensor]) -> None:
    """Stop lending: the layers then fail, instead of adding to a buffer that nothing reads."""
    for parameter in parameters:
        if hasattr(parameter, "main_grad"):
            del parameter.main_grad


def was_added(parameter: Tensor) -> bool:
    """Has the layer added a gradient since :func:`clear_added`?"""
    return bool(parameter.grad_added_to_main_grad)  # type: ignore[attr-defined]


def clear_added(parameter: Tensor) -> bool:
    """Remove the mark; returns whether what autograd brings is a gradient nevertheless."""
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return bool(getattr(parameter, "zero_out_wgrad", False))
