"""The ranks that share a wrapper's windows: of the process group given, or of its modules."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..autograd.streams import keep
from ..core.buffers import Slot
from ..core.config import one_of
from ..core.extension import Extension
from ..core.parameters import accumulation_of
from ..engine import outside_graphs, recording
from .ddp import Replicas, replicas_of
from .fsdp2 import FullySharded
from .fsdp2_passes import FSDP2Passes
from .ranks import Ranks, modules_of
from .shards import ShardHolder, fsdp1, is_flattened, is_shard

if TYPE_CHECKING:
    from ..core.config import Settings

COMM_DTYPES = (None, torch.float32, torch.bfloat16)
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
}


class DataParallel(Extension):
    """Has :class:`Ranks` share windows with other ranks, if any; notices modules that are late."""

    def __init__(self) -> None:
        self._looked = False  # for ranks that share the windows, with the first parameters
        self._checked = False  # True if all parameters of DistributedDataParallel modules are known to be a wrapper's

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        _check_group(settings.process_group)
        one_of("comm_dtype", settings.comm_dtype, COMM_DTYPES)
        one_of("shard", settings.shard, (True, False))
        if settings.shard and (how := _shares_out(inner)):
            raise ValueError(
                f"shard=True has each rank step a part of the parameters, but so has {type(inner).__name__} ({how}), "
                "and what falls to one rank here and to another there would be stepped by none; leave shard out, or "
                "wrap a plain optimizer: shard=True keeps its state in parts, too"
            )

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        if is_flattened(parameter):
            raise ValueError(fsdp1(name))

    def check_changed(self, slot: Slot) -> None:
        if is_flattened(slot.param):
            raise RuntimeError(fsdp1(slot.name))

    def slot_made(self, slot: Slot) -> None:
        if is_shard(slot.param):
            slot.part = slot.holder = ShardHolder(slot.param)

    def parameters_come(self, slots: Sequence[Slot], all_of_them: bool) -> None:
        """Raises ValueError if the first slots were this rank's alone, and ranks share these.

        Also as Ranks does.
        """
        if not self._looked:
            self._share()
            self._looked = True
        elif self.accumulation.ranks.alone:
            _check_unshared(slots)

    def parameters_added(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.part is not None:
                self._hook(slot)

    def _hook(self, slot: Slot) -> None:
        p, frozen = slot.param, not slot.param.requires_grad
        with recording():
            try:
                p.requires_grad_(True)  # a frozen one may be thawed later
                p.register_post_accumulate_grad_hook(_taker(weakref.ref(self), weakref.ref(slot)))
            finally:
                p.requires_grad_(not frozen)

    def _share(self) -> None:
        """Share the windows with the ranks of the process group, or else with those of the modules.

        These are the DistributedDataParallel or FSDP2 modules, if there are any.
        """
        accumulation, settings = self.accumulation, self.accumulation.settings
        replicas, fully_sharded = modules_of(accumulation.sums.buffers.slots)
        group = settings.process_group or replicas.group or fully_sharded.group
        if group is not None:
            accumulation.ranks = ranks = Ranks(group, replicas, fully_sharded, accumulation)
            accumulation.extensions.add([FSDP2Passes(), ranks])
            accumulation.ledger.ranks, accumulation.ledger.over_ranks = ranks.size, ranks.group.weight
            if settings.shard:
                accumulation.extensions.add([Owned()])
                accumulation.sums.over_owners = ranks.group.sum
        else:
            for name, value in (("comm_dtype", settings.comm_dtype), ("shard", settings.shard or None)):
                if value is not None:
                    raise ValueError(
                        f"{name}={value} is for windows that ranks share, but there is no process_group; leave it out"
                    )

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        self._checked = False

    def pass_comes(self) -> None:
        if not self._checked:
            self._checked = True
            accumulation = self.accumulation
            self._replicas.check_all_wrapped(accumulation.sums.buffers.of, lambda p: accumulation_of(p) is not None)

    def outdated(self) -> bool:
        return self._replicas.outdated(self.accumulation.sums.buffers.of)

    def window_settings(self) -> dict[str, Any]:
        return {"shard": self.accumulation.settings.shard}

    def check_settings(self, saved: dict[str, Any]) -> None:
        if saved["shard"] and saved["rank"] != self.accumulation.ranks.name:
            raise ValueError(
                f"the checkpoint was saved with shard=True and holds what rank {saved['rank']} steps, which this rank "
                "is not; load on every rank what it saved itself, with the same number of ranks"
            )

    @property
    def _replicas(self) -> Replicas:
        ranks = self.accumulation.ranks
        return ranks.replicas if isinstance(ranks, Ranks) else Replicas([])


class Owned(Extension):
    """With ``shard``, what a rank saves is what it steps: a checkpoint tells which parameters."""

    key = "owned"

    def _indices(self) -> list[int]:
        slots = self.accumulation.sums.buffers.slots
        return [slot.index for slot in self.accumulation.ranks.owned(slots)]

    def save(self) -> dict[str, Any]:
        return {"rank": self.accumulation.ranks.name, "indices": self._indices()}

    def load(self, saved: dict[str, Any]) -> None:
        """Nothing to do: they are the same."""

    def check(self, saved: dict[str, Any]) -> None:
        if saved["rank"] == self.accumulation.ranks.name and saved["indices"] != self._indices():
            raise ValueError(
                f"the checkpoint was saved with shard=True where rank {saved['rank']} stepped the parameters "
                f"{saved['indices']}, and here it steps {self._indices()}: those that are added after wrapping are "
                "shared out by themselves; wrap, and add groups, as the run did that saved it"
            )


def _taker(extension: weakref.ref[DataParallel], place: weakref.ref[Slot]) -> Callable[[Tensor], None]:
    """The hook that FSDP2 calls once a shard's gradient, added over the ranks, is in ``p.grad``."""

    @outside_graphs
    def take(_: Tensor) -> None:
        alive, slot = extension(), place()
        if alive is not None and slot is not None and isinstance(slot.holder, ShardHolder):
            grad = slot.holder.take()
            if grad is not None:
                keep(grad)
                alive.accumulation.collector.put(slot, grad)
            elif slot.placed and not slot.block.untouched_by_user:
                raise RuntimeError(
                    f"FSDP2 has added a gradient to {slot.name}.grad by itself, outside of its post_backward(), before "
                    "which p.grad is hidden from it; call opt.reset(), and report this with your version of PyTorch"
                )

    return take


def _check_unshared(slots: Sequence[Slot]) -> None:
    replicas, sharded = replicas_of([slot.param for slot in slots]), FullySharded(slots).slots
    if replicas or sharded:
        held = {id(p) for module in replicas for p in module.parameters()}
        slot = next(slot for slot in slots if slot in sharded or id(slot.param) in held)
        kind = "a DistributedDataParallel" if replicas else "an FSDP2"
        raise ValueError(
            f"parameter {slot.name} is in {kind} module, but the optimizer was wrapped without any, so its windows are "
            "this rank's alone; wrap the optimizer when it already has these parameters, or wrap it with process_group="
        )


def _check_group(process_group: Any) -> None:
    """Raises TypeError for anything but a process group or None."""
    if process_group is not None and not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup (torch.distributed.group.WORLD) or None, got "
            f"{process_group!r}"
        )


def _shares_out(optimizer: Optimizer) -> str:
    """What shows that an optimizer itself shares out parameters among ranks; empty if nothing."""
    for name, value in vars(optimizer).items():
        if name == "world_size" or (dist.is_available() and isinstance(value, dist.ProcessGroup)):
            return f"it has a .{name}"
    called = sorted(COLLECTIVES & _names(getattr(inspect.unwrap(type(optimizer).step), "__code__", None)))
    return f"its step() calls {called[0]}()" if called else ""


def _names(code: CodeType | None) -> set[str]:
    """What a function calls by name, functions inside it included."""
    if code is None:
        return set()
    return set(code.co_names).union(*(_names(const) for const in code.co_consts if isinstance(const, CodeType)))
