"""Weights, losses, scales and counts: a number or a 0-d tensor each, which stays on its device so that nobody waits for it."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Scalar = float | Tensor


def is_number(value: Any) -> bool:
    """Is it a real number of Python's or NumPy's, and no bool?"""
    return isinstance(value, Real) and not isinstance(value, bool)


def identity(scalar: Scalar) -> float | int:
    """A key under which equal numbers, and one and the same tensor, meet (a tensor's value stays unread)."""
    return id(scalar) if isinstance(scalar, Tensor) else scalar


def as_tensor(value: Scalar) -> Tensor:
    """A number as a CPU tensor, and a tensor as it is, whatever the user's default device and dtype are (torch.as_tensor moves there, and
    waits; FP32 would count tokens up to 2**24, bf16 up to 256).
    """
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def on(scalar: Scalar, device: torch.device) -> Scalar:
    """The same number where the tensors of ``device`` can meet it. Waits only on the way to the CPU."""
    if not isinstance(scalar, Tensor) or scalar.device == device:
        return scalar
    return scalar.to(device, non_blocking=device.type != "cpu")


def beside(scalar: Scalar, other: Scalar) -> Scalar:
    """The same number where it can meet ``other``: the CPU's meet those of any device, and two devices' do not meet."""
    if (
        isinstance(scalar, Tensor)
        and isinstance(other, Tensor)
        and "cpu" not in (scalar.device.type, other.device.type)
    ):
        return on(scalar, other.device)
    return scalar


def or_one(divisor: Scalar) -> Scalar:
    """``divisor``, and 1 where it is 0: nothing is there to be divided. Does not wait."""
    return torch.where(divisor == 0, 1.0, divisor) if isinstance(divisor, Tensor) else divisor or 1.0


def times(factor: Scalar, value: Scalar) -> Scalar:
    """Their product in float64, and 0 where ``factor`` is, also of what is not finite."""
    if isinstance(value, Tensor):
        wide = torch.float32 if value.device.type == "mps" else torch.float64  # which has none
        value = value.detach().to(wide).reshape(())
        factor = beside(factor, value)
    if isinstance(factor, Tensor):
        product = factor * value
        return torch.where(factor == 0, torch.zeros_like(product), product)
    return factor * value if factor else 0.0


def checked_weight(weight: Any, name: str = "weight") -> Scalar:
    """A micro-batch's weight as a float or a 0-d float64 tensor of its own (the caller may overwrite theirs).

    Raises:
        TypeError: not a number or a tensor. ValueError: more than one element, negative, NaN or infinite
            (a tensor's value is looked at only on the CPU, where that costs no synchronisation).
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex() or weight.dtype is torch.bool:
            raise ValueError(
                f"{name} must hold one real number, got a {weight.dtype} tensor of shape {tuple(weight.shape)}; "
                "sum it over the micro-batch first"
            )
        number = weight.item() if weight.device.type == "cpu" else 0.0
        result: Scalar = weight.detach().reshape(()).to(torch.float64, copy=True)
    elif not is_number(weight):
        raise TypeError(f"{name} must be a number or a 0-d tensor (samples, tokens), got {weight!r}")
    else:
        result = number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {number}; it counts samples or tokens")
    return result


def checked_loss(loss: Any) -> Scalar:
    """Raises TypeError for what is no number or tensor, ValueError for several elements."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"loss must be one number, got a tensor of shape {tuple(loss.shape)}; give what backward() was called on"
            )
        return loss
    if not is_number(loss):
        raise TypeError(f"loss must be a number or a tensor of one element, got {loss!r}")
    return float(loss)


def checked_count(count: Any, name: str, hint: str = "") -> int:
    """``count`` as an int.

    Raises:
        TypeError: not a number. ValueError: a float (``desired / tolerable`` is one) or a value below 1, with the ``hint``.
    """
    if isinstance(count, float):
        write = f"write {int(count)}" if count.is_integer() else "round it to the whole number you mean"
        raise ValueError(
            f"{name} must be an int, got the float {count!r}; {write} (desired // tolerable divides without leaving int){hint}"
        )
    try:
        number = operator.index(count)
    except TypeError:
        number = None
    if number is None or isinstance(count, bool):
        raise TypeError(f"{name} must be an int, got {count!r}{hint}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}{hint}")
    return number
