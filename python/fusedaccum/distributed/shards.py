"""Parameters that are shards (DTensors), of FSDP2's fully_shard or of tensor parallelism.

For FSDP2's modules see :mod:`fusedaccum.distributed.fsdp2`. What accumulates is the local shard;
``p.grad`` shows it as the DTensor that it is part of. FSDP2 itself adds to an existing ``p.grad``,
in place and without a weight, so ``p.grad`` is hidden from it during backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from ..core.buffers import Slot

if dist.is_available():
    from torch.distributed.tensor import DTensor, Replicate


def is_shard(tensor: Tensor) -> bool:
    """True for a DTensor."""
    return dist.is_available() and isinstance(tensor, DTensor)


def fsdp1(name: str) -> str:
    """The error message for a parameter that :func:`is_flattened`."""
    return (
        f"parameter {name} is in a FullyShardedDataParallel module (FSDP1), whose gradients never pass through a place "
        "where they could be weighted and added; use FSDP2, torch.distributed.fsdp.fully_shard(model)"
    )


def is_flattened(tensor: Tensor) -> bool:
    """True for a part of a flat parameter of FSDP1, or a flat parameter. (FSDP1 marks both.)"""
    return getattr(tensor, "_fsdp_flattened", False)


def local_gradient(grad: Tensor, parameter: Tensor) -> Tensor:
    """The part of a gradient that belongs to this rank's shard of the parameter.

    Summed over the ranks if they hold parts of the sum.
    """
    if not is_shard(grad):
        return grad
    if grad.placements != parameter.placements:  # type: ignore[attr-defined]
        grad = _added_wide(grad).redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return grad.to_local()  # type: ignore[attr-defined]


def summed_gradient(grad: Tensor) -> Tensor:
    """The part of a gradient on this rank; if the ranks hold parts of a sum, their sum."""
    if not is_shard(grad):
        return grad
    placements = [Replicate() if p.is_partial() else p for p in grad.placements]  # type: ignore[attr-defined]
    return _added_wide(grad).redistribute(placements=placements).to_local()


def _added_wide(grad: Any) -> Any:
    """The DTensor; in FP32 if ranks hold parts of a 16-bit sum, so that it is added in FP32."""
    narrow = grad.dtype.itemsize < 4 and any(placement.is_partial() for placement in grad.placements)
    return grad.float() if narrow else grad


def whole(local: Tensor, parameter: Any) -> Tensor:
    """A DTensor laid out as ``parameter``, whose part here is ``local``; shares its memory."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class ShardHolder:
    """``p.grad`` of a shard: the local part for code that accumulates, else the DTensor. A Part."""

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

    @property
    def layout(self) -> tuple[Any, Any]:
        parameter: Any = self._parameter
        return parameter.device_mesh, parameter.placements

    def local_gradient(self, grad: Tensor) -> Tensor:
        return local_gradient(grad, self._parameter)

    def wrap(self, local: Tensor) -> Tensor:
        return whole(local, self._parameter)

    def sum_over_parts(self, value: Tensor) -> Tensor:
        """``value`` of local shards, summed over ranks with others; equal shards count once."""
        mesh, placements = self.layout
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(value, group=mesh.get_group(dimension))
        return value

    def hide(self) -> None:
        if self._parameter.grad is self.whole:
            self._parameter.grad, self._hidden = None, True

    def unhide(self) -> None:
        if self._hidden:
            self._parameter.grad, self._hidden = self.whole, False

    def take(self) -> Tensor | None:
        """The local part of what FSDP2 has put into ``p.grad``; None if that is ours."""
        now = self._parameter.grad
        if now is None or now is self.whole:
            return None
        self._parameter.grad = None if self._hidden else self.whole
        return local_gradient(now, self._parameter)


def unhide(slots: Iterable[Slot]) -> None:
    """Show what is hidden from FSDP2."""
    for slot in slots:
        if isinstance(slot.holder, ShardHolder):
            slot.holder.unhide()


def hide(slots: Iterable[Slot]) -> None:
    """Hide the sums of shards while a pass may bring gradients."""
    for slot in slots:
        if isinstance(slot.holder, ShardHolder):
            slot.holder.hide()


def over_meshes(operation: str, number: int, slots: Iterable[Slot], ranks: int = 0) -> int:
    """``number``, reduced (``"SUM"``, ``"MIN"``) over all ranks that hold parts of ``slots``.

    Waits for them. ``ranks``: over how many it has been reduced already. A mesh of no more ranks
    than that is left out.
    """
    for mesh in {slot.param.device_mesh: None for slot in slots if slot.part is not None}:  # type: ignore[attr-defined]
        if mesh.size() > ranks:
            reduced = torch.tensor(number, device=mesh.device_type)
            for dimension in range(mesh.ndim):
                dist.all_reduce(reduced, getattr(dist.ReduceOp, operation), group=mesh.get_group(dimension))
            number = int(reduced)
    return number
