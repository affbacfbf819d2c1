"""Parameters that are shards (DTensors): of FSDP2's fully_shard (:mod:`fusedaccum.ranks.fsdp2`), or of tensor parallelism.

What is gathered is the local shard. ``p.grad`` shows it as the DTensor that it is part of. FSDP2 adds to a ``p.grad`` that is there
by itself, in place and without a weight; so it finds none: during backward ``p.grad`` is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from .buffers import Slot

if dist.is_available():
    from torch.distributed.tensor import DTensor, Replicate


def is_shard(tensor: Tensor) -> bool:
    """Is it a DTensor?"""
    return dist.is_available() and isinstance(tensor, DTensor)


def fsdp1(name: str) -> str:
    """What is wrong with this parameter, where :func:`is_flattened`, and what to do."""
    return (
        f"parameter {name} is in a FullyShardedDataParallel module (FSDP1), whose gradients never pass where they could be weighed and "
        "added; use FSDP2, torch.distributed.fsdp.fully_shard(model)"
    )


def is_flattened(tensor: Tensor) -> bool:
    """Has FSDP1 made it a part of a flat parameter, or is it one? (Its mark.)"""
    return getattr(tensor, "_fsdp_flattened", False)


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here: a DTensor's shard."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(grad: Tensor, parameter: Tensor) -> Tensor:
    """A gradient's part that belongs to the parameter's shard here; adds it up over the ranks where they hold parts of the sum."""
    if not is_shard(grad):
        return grad
    if grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return grad.to_local()  # type: ignore[attr-defined]


def added_up(grad: Tensor) -> Tensor:
    """A gradient's part that is here; of parts of a sum, the sum over the ranks."""
    if not is_shard(grad):
        return grad
    placements = [Replicate() if p.is_partial() else p for p in grad.placements]  # type: ignore[attr-defined]
    return grad.redistribute(placements=placements).to_local()  # type: ignore[attr-defined]


def whole(local: Tensor, parameter: Any) -> Tensor:
    """The DTensor, laid out as ``parameter``, that ``local`` is the part of here; shares its memory."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class ShardHolder:
    """``p.grad`` of a shard: its local part, for whoever gathers it, and the whole DTensor for everybody else."""

    def __init__(self, parameter: Parameter):
        self._parameter = parameter
        self._local: Tensor | None = None
        self.whole: Tensor | None = None
        self._hidden = False

    @property
    def grad(self) -> Tensor | None:
        now = self._parameter.grad
        if now is self.whole or self._hidden:
            return self._local
        return None if now is None else local_gradient(now, self._parameter)

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        self._local = local
        self.whole = None if local is None else whole(local, self._parameter)
        if not self._hidden:
            self._parameter.grad = self.whole

    def hide(self) -> None:
        if self._parameter.grad is self.whole:
            self._parameter.grad, self._hidden = None, True

    def unhide(self) -> None:
        if self._hidden:
            self._parameter.grad, self._hidden = self.whole, False

    def take(self) -> Tensor | None:
        """What FSDP2 has put into ``p.grad``, its local part; None if that is ours."""
        now = self._parameter.grad
        if now is None or now is self.whole:
            return None
        self._parameter.grad = None if self._hidden else self.whole
        return local_gradient(now, self._parameter)


def sum_over_shards(value: Tensor, slot: Slot) -> Tensor:
    """``value`` of the local shards, added up over the ranks that hold others; those that hold the same ones are not counted twice."""
    mesh, placements = slot.param.device_mesh, slot.param.placements  # type: ignore[attr-defined]
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            dist.all_reduce(value, group=mesh.get_group(dimension))
    return value


def sum_over_meshes(number: int, slots: Iterable[Slot], ranks: int) -> int:
    """``number``, added up over all ranks that hold parts of these; waits for them.

    Not where they are no more than the ``ranks`` that have done so.
    """
    meshes = {slot.param.device_mesh: None for slot in slots if slot.sharded}  # type: ignore[attr-defined]
    for mesh in meshes:
        if mesh.size() > ranks:
            total = torch.tensor(number, device=mesh.device_type)
            for dimension in range(mesh.ndim):
                dist.all_reduce(total, group=mesh.get_group(dimension))
            number = int(total)
    return number


def least_over_meshes(number: int, slots: Iterable[Slot]) -> int:
    """The smallest of such numbers on the ranks that hold parts of these; waits for them."""
    for mesh in {slot.param.device_mesh: None for slot in slots if slot.sharded}:  # type: ignore[attr-defined]
        least = torch.tensor(number, device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(dimension))
        number = int(least)
    return number


def alike(slot: Slot) -> tuple | None:
    """A key under which the shards meet whose norms can be added up together."""
    return (slot.param.device_mesh, slot.param.placements) if slot.sharded else None  # type: ignore[attr-defined]
