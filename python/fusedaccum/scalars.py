"""Weights, losses, scales and counts: numbers, or 0-d tensors that stay on their device.

So nothing waits for them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Scalar = float | Tensor
WITHOUT_FP64 = ("mps",)  # types of devices


def widest(device: torch.device) -> torch.dtype:
    """The dtype for sums and factors on a device: FP64, or FP32 where there is none."""
    return torch.float32 if device.type in WITHOUT_FP64 else torch.float64


def widened(x: Tensor) -> Tensor:
    """``x`` in the widest dtype of its device."""
    return x.to(widest(x.device))


def is_number(value: Any) -> bool:
    """True for a real number, of Python's or NumPy's, that is no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def identity(scalar: Scalar) -> float | int:
    """A key that is the same for equal numbers, and for the same tensor (value not read)."""
    return id(scalar) if isinstance(scalar, Tensor) else scalar


def as_tensor(value: Scalar) -> Tensor:
    """A number as a CPU tensor, a tensor as it is, whatever the default device and dtype are.

    (torch.as_tensor moves to that device, and waits; FP32 counts tokens to 2**24, bf16 to 256.)
    """
    if isinstance(value, Tensor):
        return value
    dtype = torch.float64 if isinstance(value, float) else torch.bool if isinstance(value, bool) else torch.int64
    return torch.scalar_tensor(value, dtype=dtype, device="cpu")  # in half of torch.tensor()'s time


def to_device(scalar: Scalar, device: torch.device) -> Scalar:
    """``scalar``, moved to ``device`` if it is a tensor elsewhere.

    FP64 becomes FP32 where the device has none. Waits only on the way to the CPU.
    """
    if not isinstance(scalar, Tensor) or scalar.device == device:
        return scalar
    dtype = widest(device) if scalar.dtype == torch.float64 else scalar.dtype
    return scalar.to(device, dtype, non_blocking=device.type != "cpu")


def to_device_of(scalar: Scalar, other: Scalar) -> Scalar:
    """``scalar``, so that it combines with ``other`` without waiting.

    If ``other`` is on a device, a CPU tensor becomes a Python number, and any other tensor moves to
    that device.
    """
    if not (isinstance(scalar, Tensor) and isinstance(other, Tensor)) or other.device.type == "cpu":
        return scalar
    return scalar.item() if scalar.device.type == "cpu" else to_device(scalar, other.device)


def add(a: Scalar, b: Scalar) -> Scalar:
    """The sum, wherever the two are."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return a + b
    a = to_device_of(a, b)
    return a + to_device_of(b, a)


def div(a: Scalar, b: Scalar) -> Scalar:
    """The quotient, wherever the two are."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return a / b
    a = to_device_of(a, b)
    return a / to_device_of(b, a)


def copied(scalar: Scalar | None) -> Any:
    """A tensor's copy, a number or None as it is."""
    return scalar.clone() if isinstance(scalar, Tensor) else scalar


def product(factors: Iterable[Scalar]) -> Scalar:
    """The product: 1 of none, itself of one. (``math.prod`` multiplies by 1, a kernel more.)"""
    found = list(factors)
    return functools.reduce(operator.mul, found) if found else 1.0


def or_one(divisor: Scalar) -> Scalar:
    """``divisor``, or 1 if it is 0: then there is nothing to divide. Does not wait."""
    return torch.where(divisor == 0, 1.0, divisor) if isinstance(divisor, Tensor) else divisor or 1.0


def mul(factor: Scalar, value: Scalar) -> Scalar:
    """The product, widened; 0 if ``factor`` is 0, even if ``value`` is not finite."""
    if isinstance(value, Tensor):
        value = widened(value.detach()).reshape(())
        factor = to_device_of(factor, value)
    if isinstance(factor, Tensor):
        product = factor * value
        return torch.where(factor == 0, torch.zeros_like(product), product)
    return factor * value if factor else 0.0


def checked_weight(weight: Any, name: str = "weight") -> Scalar:
    """A micro-batch's weight: a float, or a 0-d tensor if it is on another device than the CPU.

    The tensor is one of its own, because the caller may overwrite theirs.

    Raises:
        TypeError: not a number or a tensor. ValueError: more than one element, negative, NaN or
            infinite (a tensor's value is looked at only on the CPU, where that costs no
            synchronisation).
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex() or weight.dtype is torch.bool:
            raise ValueError(
                f"{name} must hold one real number, got a {weight.dtype} tensor of shape {tuple(weight.shape)}; "
                "sum it over the micro-batch first"
            )
        if weight.device.type != "cpu":
            return weight.detach().reshape(()).to(widest(weight.device), copy=True)
        weight = weight.item()
    elif not is_number(weight):
        raise TypeError(f"{name} must be a number or a 0-d tensor (samples, tokens), got {weight!r}")
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {number}; it counts samples or tokens")
    return number


def checked_loss(loss: Any) -> Scalar:
    """``loss`` as a float, or the tensor as it is.

    Raises TypeError unless it is one of these, ValueError for several elements.
    """
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"loss must be one number, got a tensor of shape {tuple(loss.shape)}; give what backward() was called "
                "on"
            )
        return loss
    if not is_number(loss):
        raise TypeError(f"loss must be a number or a tensor of one element, got {loss!r}")
    return float(loss)


def checked_count(count: Any, name: str, hint: str = "") -> int:
    """``count`` as an int.

    Raises:
        TypeError: not a number. ValueError: a float (``desired / tolerable`` is one) or a value
            below 1, with the ``hint``.
    """
    if isinstance(count, float):
        write = f"write {int(count)}" if count.is_integer() else "round it to the whole number you mean"
        raise ValueError(f"{name} must be an int, got the float {count!r}; {write}{hint}")
    try:
        number = operator.index(count)
    except TypeError:
        number = None
    if number is None or isinstance(count, bool):
        raise TypeError(f"{name} must be an int, got {count!r}{hint}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}{hint}")
    return number
