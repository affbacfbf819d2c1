"""Parameters that are shards (DTensors): of FSDP2's fully_shard, which adds up the ranks' gradients itself, or of tensor parallelism.

What is gathered is the local shard. ``p.grad`` shows it as the DTensor that it is part of. FSDP2 adds to a ``p.grad`` that is there
by itself, in place and without a weight; so it finds none: from its forward to the end of the pass ``p.grad`` is hidden.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from .buffers import Slot

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_shard(tensor: Tensor) -> bool:
    """Is it a DTensor?"""
    return dist.is_available() and isinstance(tensor, DTensor)


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


def alike(slot: Slot) -> tuple | None:
    """A key under which the shards meet whose norms can be added up together."""
    return (slot.param.device_mesh, slot.param.placements) if slot.sharded else None  # type: ignore[attr-defined]


class FullySharded:
    """The FSDP2 modules of one wrapper.

    Args:
        slots: all of the wrapper's.
    """

    def __init__(self, slots: Sequence[Slot]):
        self._roots: list[Any] = []
        self.group: dist.ProcessGroup | None = None
        self.slots: list[Slot] = []
        shards = {id(slot.param): slot for slot in slots if slot.sharded}
        if not shards:
            return
        modules = [x for x in gc.get_objects() if issubclass(type(x), FSDPModule)]
        inner = {id(m) for module in modules for m in module.modules() if m is not module}
        for root in (module for module in modules if id(module) not in inner):
            of_root = [shards[id(p)] for p in root.parameters() if id(p) in shards]
            if of_root:
                self._roots.append(root)
                self.slots += of_root
        for group in self._parameter_groups():
            self.group = self.group or _group_of(group.mesh_info.mesh)
            size = math.prod(group.mesh_info.mesh.shape)
            managed = {id(p.sharded_param) for p in group.fsdp_params}
            for slot in self.slots:
                if id(slot.param) in managed:
                    slot.factor = float(group.gradient_divide_factor or size)

    def _parameter_groups(self) -> Iterable[Any]:
        for root in self._roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    state = module._get_fsdp_state()
                    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
                    yield from (group for group in groups if group is not None)

    def check_nothing_held(self) -> None:
        """Raises RuntimeError where FSDP2 keeps gradients to itself, which it has not added up over the ranks yet."""
        for group in self._parameter_groups():
            for p in group.fsdp_params:
                unsharded = getattr(p, "_unsharded_param", None)
                if p.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
                    raise RuntimeError(
                        "state_dict() after a backward under set_requires_gradient_sync(False): FSDP2 holds that micro-batch's gradients "
                        "itself, and they would be lost; save after a backward that synchronises, or at a window's end"
                    )

    def before_forward(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when a forward begins, as long as its owner lives."""
        method = weakref.WeakMethod(call)

        def begins(module: Module, args: Any) -> None:
            alive = method()
            if alive is not None and torch.is_grad_enabled():
                alive()

        for root in self._roots:
            weakref.finalize(self, root.register_forward_pre_hook(begins, prepend=True).remove).atexit = False


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """The ranks of an FSDP2 mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        group = dist.group.WORLD
        assert group is not None
        return group
    raise ValueError(
        f"the model is sharded over a mesh of shape {tuple(mesh.shape)}, which is not all ranks; pass the group of the ranks that see "
        "different micro-batches: process_group=mesh._flatten().get_group()"
    )
