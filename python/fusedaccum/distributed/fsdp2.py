"""FSDP2 modules whose gradients the wrapper accumulates: FSDP2 adds up the ranks' gradients itself.

No public API says which ranks these are, what FSDP2 divides by and what it holds back: whatever is
read from its records is read here, and in :mod:`fusedaccum.distributed.fsdp2_reductions`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from ..core.buffers import Slot
from ..engine import outside_graphs
from ..modules import modules_alive
from .fsdp2_reductions import Reductions, partly_reduced, unreduced

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule


class FullySharded:
    """The FSDP2 modules of one wrapper.

    Args:
        slots: all of the wrapper's.

    Attributes:
        slots: those whose gradients FSDP2 adds up over the ranks.
    """

    def __init__(self, slots: Sequence[Slot]):
        shards = {id(slot.param) for slot in slots if slot.part is not None}
        modules: list[Any] = modules_alive(FSDPModule) if shards else []
        ours: set[int] = set()  # modules that hold some of the slots' parameters
        found: dict[int, tuple[Any, Any]] = {}  # FSDP2's records of a parameter, and of those that are sent with it
        plain = {id(slot.param): slot.name for slot in slots if slot.part is None}
        for module in modules:
            for group in _parameter_groups(module):
                _check_ungathered(group, plain)
                # Not module.parameters(): between forward and backward these may be unsharded ones.
                params = [p for p in group.fsdp_params if id(p.sharded_param) in shards]
                if params:
                    ours.add(id(module))
                found.update((id(p.sharded_param), (p, group)) for p in params)
        self.slots = [slot for slot in slots if id(slot.param) in found]
        records = [found[id(slot.param)] for slot in self.slots]
        self._params = [param for param, _ in records]
        self._groups: dict[Any, list[Slot]] = {}
        self._meshes = [group.mesh_info.mesh for _, group in records]  # over which a slot's gradients are added up
        for slot, (_, group) in zip(self.slots, records, strict=True):
            self._groups.setdefault(group, []).append(slot)
        inner = {id(m) for module in modules for m in module.modules() if m is not module}
        self._roots = [m for m in modules if id(m) not in inner and any(id(x) in ours for x in m.modules())]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks over which FSDP2 adds up gradients; None without slots.

        The largest group, if experts have ranks of their own.
        """
        return _group_of(max(self._meshes, key=lambda mesh: mesh.size())) if self._meshes else None

    def check_shared_by(self, group: dist.ProcessGroup, found: bool) -> None:
        """Raises ValueError unless windows are shared by the ranks whose gradients are added up.

        Args:
            found: True if ``group`` was found here, and not passed by the caller.
        """
        ours = set(dist.get_process_group_ranks(group))
        seen = {}  # one slot per pair of meshes: its gradient is added up over one, and it is sharded over the other
        for slot, mesh in zip(self.slots, self._meshes, strict=True):
            parts = slot.param.device_mesh  # type: ignore[attr-defined]
            seen[id(mesh), id(parts)] = slot, mesh, parts
        for slot, *meshes in seen.values():
            added, held = (set(mesh.mesh.flatten().tolist()) for mesh in meshes)
            if found and not added <= ours:
                raise ValueError(
                    f"FSDP2 adds up the gradients of parameter {slot.name} over ranks {sorted(added)}, but windows "
                    f"would be shared by ranks {sorted(ours)}; pass as process_group the group of all ranks that see "
                    "different micro-batches"
                )
            if not ours <= held:
                raise ValueError(
                    f"parameter {slot.name} is a DTensor of ranks {sorted(held)}, but windows would be shared by ranks "
                    f"{sorted(ours)}: its gradient would not be added up over the others. Shard replicas over a mesh "
                    "of two dimensions; if experts are spread over ranks, make them DTensors of these before "
                    "fully_shard: distribute_tensor(weight, mesh['experts'], [Shard(0)])"
                )

    def check_reduced(self, what: str) -> None:
        """Raises RuntimeError if FSDP2 holds gradients that it has not yet added over the ranks."""
        if self.holds_back:
            raise RuntimeError(
                f"{what}: FSDP2 still holds gradients that it was told not to reduce; call "
                "model.set_requires_gradient_sync(True), or set_requires_all_reduce(True), before the last backward "
                "(also before one that is followed by flush() or state_dict()). If it was not told so, the last "
                "backward reached no input or output of an FSDP2 module (that of a loss which a layer has set aside): "
                "run it before another, or add its loss to another's"
            )

    def check_droppable(self, slots: Sequence[Slot]) -> None:
        """Raises RuntimeError if only a part of a micro-batch could be dropped.

        FSDP2 still holds its gradients back then, to be judged with those of later ones, but
        parameters that are not FSDP2's get theirs added at once.
        """
        if not self.holds_back:
            return
        theirs = set(self.slots)
        beside = [slot for slot in slots if slot.param.requires_grad and slot not in theirs]
        if beside:
            raise RuntimeError(
                f"FSDP2 holds gradients back, but those of parameter {beside[0].name}, which is not FSDP2's, are added "
                "at once: nonfinite='skip_micro_batch' could then drop only FSDP2's part of a micro-batch; reduce "
                "every micro-batch (model.set_requires_gradient_sync(True), set_requires_all_reduce(True)), shard all "
                "parameters, or use 'skip_window'"
            )

    @property
    def holds_back(self) -> bool:
        """True if FSDP2 holds gradients that it has not added up over the ranks yet."""
        return any(map(unreduced, self._params)) or any(map(partly_reduced, self._groups))

    def wait(self) -> None:
        """Wait for the gradients that FSDP2 has handed over.

        With ``CPUOffloadPolicy``, PyTorch 2.11 (not 2.13) is still copying them.
        """
        for param in self._params:
            event = getattr(param, "grad_offload_event", None)
            if event is not None:
                event.synchronize()

    def reshard(self) -> None:
        """Free parameters that a forward without a backward (an evaluation) has left gathered.

        FSDP2 leaves the root's so. The next forward would use them, and they do not know of a step.
        """
        for group in self._groups:
            group.reshard()

    def drop(self) -> None:
        """Drop gradients that FSDP2 has not reduced."""
        for param in filter(unreduced, self._params):
            if getattr(param, "_unsharded_param", None) is not None:
                param._unsharded_param.grad = None
            if param.unsharded_accumulated_grad is not None:  # since PyTorch 2.15 that is another name of the one above
                param.unsharded_accumulated_grad = None
        for group in filter(partly_reduced, self._groups):
            group._partial_reduce_output = None

    def follow(self, begin: Callable[[], None], as_given: bool, fresh: Collection[Slot]) -> None:
        """Call ``begin`` before FSDP2 takes a backward's gradients, as long as its owner lives.

        If the backward begins at a root's output, it is called then, so that an error comes before
        FSDP2 has done anything; otherwise when FSDP2 comes to the first gradients.

        ``as_given`` is as :class:`Reductions` has it. ``fresh``: slots that may be warned about.
        """
        self._reductions = Reductions(self._groups, begin, as_given)
        self._reductions.warn_of_narrow_sums(fresh)
        method = weakref.WeakMethod(begin)

        @outside_graphs
        def begins(grad: Tensor) -> None:
            alive = method()
            if alive is not None:
                alive()

        @outside_graphs
        def watch(module: Module, args: Any, output: Any) -> None:
            for x in _tensors(output):
                if x.requires_grad:
                    x.register_hook(begins)

        for root in self._roots:
            weakref.finalize(self, root.register_forward_hook(watch).remove).atexit = False


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a module's output, also in dataclasses: FSDP2 looks there, pytrees do not."""
    for x in tree_leaves(output):
        if isinstance(x, Tensor):
            yield x
        elif dataclasses.is_dataclass(x):
            yield from _tensors([getattr(x, field.name) for field in dataclasses.fields(x)])


def _parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _check_ungathered(group: Any, plain: dict[int, str]) -> None:
    """Raises ValueError if FSDP2 has made a parameter of ``plain`` (names by ids) from shards."""
    for p in group.fsdp_params:
        name = plain.get(id(getattr(p, "_unsharded_param", None)))
        if name is not None:
            raise ValueError(
                f"parameter {name} is one that FSDP2 has gathered for a forward and will free again; build the "
                "optimizer before the first forward, or after model.reshard()"
            )


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """The ranks of an FSDP2 mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        group = dist.group.WORLD
        assert group is not None
        return group
    raise ValueError(
        f"the model is sharded over a mesh of shape {tuple(mesh.shape)}, which is not all ranks; pass the group of the "
        "ranks that see different micro-batches: process_group=mesh._flatten().get_group()"
    )
