"""Parameters that are shards (DTensors): of FSDP2's fully_shard, which adds up the ranks' gradients itself, or of tensor parallelism.

What is gathered is the local shard. ``p.grad`` shows it as the DTensor that it is part of. FSDP2 adds to a ``p.grad`` that is there
by itself, in place and without a weight; so it finds none: during backward ``p.grad`` is hidden.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from .modules import modules_alive

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

    Attributes:
        slots: those whose gradients FSDP2 adds up over the ranks.
        group: of the ranks that it adds the first one's up over, None where there is no such slot.
    """

    def __init__(self, slots: Sequence[Slot]):
        shards = {id(slot.param) for slot in slots if slot.sharded}
        modules: list[Any] = modules_alive(FSDPModule) if shards else []
        ours = []
        found: dict[
            int, tuple[Any, Any]
        ] = {}  # of a parameter: FSDP2's records of it, and of those that are sent with it
        for module in modules:
            for group in _parameter_groups(module):
                # Not module.parameters(): between forward and backward these may be the unsharded ones.
                params = [p for p in group.fsdp_params if id(p.sharded_param) in shards]
                if params:
                    ours.append(module)
                found.update((id(p.sharded_param), (p, group)) for p in params)
        self.slots = [slot for slot in slots if id(slot.param) in found]
        records = [found[id(slot.param)] for slot in self.slots]
        self._params = [param for param, _ in records]
        self.group: dist.ProcessGroup | None = _group_of(records[0][1].mesh_info.mesh) if records else None
        for slot, (_, group) in zip(self.slots, records, strict=True):
            slot.factor = float(group.gradient_divide_factor or math.prod(group.mesh_info.mesh.shape))
        inner = {id(m) for module in modules for m in module.modules() if m is not module}
        self._roots = [m for m in modules if id(m) not in inner and any(x is y for x in m.modules() for y in ours)]

    def held_back(self) -> list[Any]:
        """FSDP2's records of parameters whose gradients it has not reduced yet (``set_requires_gradient_sync(False)``)."""
        return [p for p in self._params if _unreduced(p)]

    def drop(self) -> None:
        """Forget such gradients."""
        for param in self.held_back():
            param.unsharded_accumulated_grad = None
            if getattr(param, "_unsharded_param", None) is not None:
                param._unsharded_param.grad = None

    def before_backward(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when a backward through a root begins, as long as its owner lives."""
        method = weakref.WeakMethod(call)

        def begins(grad: Tensor) -> None:
            alive = method()
            if alive is not None:
                alive()

        def watch(module: Module, args: Any, output: Any) -> None:
            for x in tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(begins)

        for root in self._roots:
            weakref.finalize(self, root.register_forward_hook(watch).remove).atexit = False


def _parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _unreduced(param: Any) -> bool:
    unsharded = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


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
