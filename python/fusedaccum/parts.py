"""Tensors of which each process holds a part: told by ``to_local()``, whatever makes them."""

from __future__ import annotations

from torch import Tensor


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of an ordinary one."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
