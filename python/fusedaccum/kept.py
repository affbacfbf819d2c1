"""What an optimizer keeps in its state of memory that was lent to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .ops.memory import address
from .parts import local_of


def set_apart(states: Iterable[Any], lent: Iterable[Tensor]) -> None:
    """Copy what these states hold, where it lies in the memory of ``lent``."""
    memory = [(address(x), address(x) + x.nbytes) for x in lent]
    seen: set[int] = set()
    for state in states:
        _set_apart(state, memory, seen)


def _set_apart(kept: Any, memory: Sequence[tuple[int, int]], seen: set[int]) -> Any:
    """``kept``, in which tensors in these stretches of memory have been given memory of their own.

    That is what plain PyTorch has after ``zero_grad()``. ``seen``: containers that have been gone
    through, by their ids; they may be shared by many parameters, or contain themselves.
    """
    if isinstance(kept, Tensor):
        local = kept if type(kept) is Tensor else local_of(kept)
        if type(local) is Tensor and local.layout is torch.strided:
            at = address(local)
            if any(begin <= at < end for begin, end in memory):
                return kept.clone()
    elif isinstance(kept, (dict, list, deque)):
        if id(kept) not in seen:
            seen.add(id(kept))
            for key, value in list(kept.items() if isinstance(kept, dict) else enumerate(kept)):
                apart = _set_apart(value, memory, seen)
                if apart is not value:
                    kept[key] = apart
    elif type(kept) is tuple:
        values = tuple(_set_apart(value, memory, seen) for value in kept)
        return values if any(a is not b for a, b in zip(values, kept, strict=True)) else kept
    return kept
