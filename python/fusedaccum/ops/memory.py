"""What a tensor's memory is like: whether it exists, is one stretch, is shared with others.

``csrc/predicate.h`` has the same in C++.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from operator import attrgetter
from types import ModuleType

import torch
from torch import Tensor

from .. import native

# Types of devices where data_ptr() counts from the address of an object that stands for the
# storage, not from that of its memory.
WITHOUT_ADDRESSES = ("mps",)


@functools.cache
def native_lists() -> ModuleType | None:
    """What looks at lists of tensors in C++, if it was built.

    It reads no tensor's memory, so it serves every device.
    """
    return importlib.import_module("fusedaccum._cpu") if native.why_missing("_cpu") is None else None


def is_plain(x: Tensor) -> bool:
    """True if the tensor has memory that a kernel can read, and no Python object acts for it."""
    dispatch = type(x).__torch_dispatch__
    return dispatch is Tensor.__torch_dispatch__ and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def missing_storage(x: Tensor) -> bool:
    if x.numel() == 0 or x._is_zerotensor():
        return False
    return x.untyped_storage().nbytes() < (x.storage_offset() + span(x)) * x.element_size()


def address(x: Tensor) -> int:
    """Where a tensor's memory begins, in bytes; stretches overlap only if they share memory."""
    if x.device.type in WITHOUT_ADDRESSES:
        offset = int(x.storage_offset()) * x.element_size()
        return (x.data_ptr() - offset << 64) + offset
    return x.data_ptr()


def traits(tensors: Sequence[Tensor]) -> object:
    """Where each tensor's memory begins, its size and its dtype, as one value to compare later."""
    compiled = native_lists()
    if compiled is not None:
        return compiled.traits(tensors)
    return tuple(list(map(of, tensors)) for of in (Tensor.data_ptr, Tensor.numel, attrgetter("dtype")))


def views_like(base: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parts of the storage of ``base``, laid out like these tensors, whose dtype may be another."""
    compiled = native_lists()
    if compiled is not None:
        return compiled.views_like(base, tensors)
    return [base.as_strided(x.shape, x.stride(), x.storage_offset()) for x in tensors]


def increment_version(tensors: Sequence[Tensor]) -> None:
    """Tell autograd of writes that it does not see. (Inference tensors have no version.)"""
    compiled = native_lists()
    if compiled is not None:
        compiled.increment_version(tensors)
    else:
        torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def span(x: Tensor) -> int:
    """Elements from the first to just after the last in memory; 0 for an empty tensor."""
    if x.is_contiguous():
        return x.numel()
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def overlaps_itself(x: Tensor) -> bool:
    """True if two elements may share memory.

    Exact for every layout that views and permutations make; else it errs towards True.
    """
    if x.numel() < 2 or x.is_contiguous():
        return False
    reach = 0  # of the faster dimensions
    for stride, n in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1):
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def is_dense(x: Tensor) -> bool:
    """True if the elements fill one stretch of memory, in some order of the dimensions."""
    return x.is_contiguous() or (span(x) == x.numel() and not overlaps_itself(x))


def is_flat(x: Tensor) -> bool:
    """True if a kernel can read it as one stretch: dense, not lazily negated, no zero tensor."""
    return not (x.is_neg() or x._is_zerotensor()) and is_dense(x)


def is_flat_pair(out: Tensor, x: Tensor) -> bool:
    """True if both are flat, with their elements in the same order."""
    if not (is_flat(out) and is_flat(x)):
        return False
    if out.numel() < 2 or (out.is_contiguous() and x.is_contiguous()):
        return True
    return all(n == 1 or a == b for n, a, b in zip(out.shape, out.stride(), x.stride(), strict=True))


def share_memory(a: Tensor, b: Tensor) -> bool:
    """True if tensors whose memory overlaps share an element. Interleaved views share none."""
    if is_flat(a) and is_flat(b):
        return True
    first = min(address(a), address(b))
    unit = math.gcd(a.element_size(), b.element_size(), address(a) - first, address(b) - first)  # bytes
    end = max(address(x) - first + span(x) * x.element_size() for x in (a, b))
    touched = torch.zeros(end // unit, dtype=torch.bool, device="cpu")

    def elements(x: Tensor) -> Tensor:
        units = x.element_size() // unit
        return touched.as_strided(
            (*x.shape, units), (*(s * units for s in x.stride()), 1), (address(x) - first) // unit
        )

    elements(a).fill_(True)
    return bool(elements(b).any())
