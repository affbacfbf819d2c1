"""Finds the ranks that share a wrapper's windows: those of the process group that it was given, or of its modules."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.buffers import Slot
from ..core.extension import Extension
from .ddp import Replicas, replicas_of
from .fsdp2 import FullySharded
from .ranks import Ranks, modules_of
from .shards import over_meshes


class DataParallel(Extension):
    """Has :class:`Ranks` share the windows if there are others to share them with, and notices modules that come too late."""

    def __init__(self) -> None:
        self._looked = False  # for ranks that share the windows, with the first parameters
        self._checked = False  # are all parameters of DistributedDataParallel modules known to be a wrapper's?

    def parameters_come(self, slots: Sequence[Slot], all_of_them: bool) -> None:
        """Raises ValueError if the first parameters were this rank's alone, and some of these several ranks share; or as Ranks does."""
        if not self._looked:
            self._share()
            self._looked = True
        elif self.accumulation.ranks.alone:
            _check_unshared(slots)

    def _share(self) -> None:
        """Share the windows with the ranks of the process group; if none was given, with those of the DistributedDataParallel or FSDP2
        modules, if any.
        """
        accumulation, settings = self.accumulation, self.accumulation.settings
        replicas, fully_sharded = modules_of(accumulation.sums.buffers.slots)
        group = settings.process_group or replicas.group or fully_sharded.group
        if group is not None:
            accumulation.ranks = ranks = Ranks(group, replicas, fully_sharded, accumulation)
            accumulation.extensions.add([ranks])
            accumulation.ledger.ranks, accumulation.ledger.over_ranks = ranks.size, ranks.group.weight
            if settings.shard:
                accumulation.sums.over_owners = ranks.group.sum
        else:
            for name, value in (("comm_dtype", settings.comm_dtype), ("shard", settings.shard or None)):
                if value is not None:
                    raise ValueError(
                        f"{name}={value} is for windows that ranks share, but there is no process_group; leave it out"
                    )
        accumulator = accumulation.accumulator
        if accumulator.seed is not None:
            seed = int(accumulation.ranks.least(accumulator.seed))  # replicas of a shard round alike
            accumulator.seed = over_meshes("MIN", seed, accumulation.sums.buffers.slots)
            accumulator.rank = accumulation.ranks.rank

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        self._checked = False

    def pass_comes(self) -> None:
        if not self._checked:
            self._checked = True
            accumulation = self.accumulation
            self._replicas.check_all_wrapped(
                accumulation.sums.buffers.of, lambda p: accumulation.of_parameter(p) is not None
            )

    def outdated(self) -> bool:
        return self._replicas.outdated(self.accumulation.sums.buffers.of)

    @property
    def _replicas(self) -> Replicas:
        ranks = self.accumulation.ranks
        return ranks.replicas if isinstance(ranks, Ranks) else Replicas([])


def _check_unshared(slots: Sequence[Slot]) -> None:
    replicas, sharded = replicas_of([slot.param for slot in slots]), FullySharded(slots).slots
    if replicas or sharded:
        held = {id(p) for module in replicas for p in module.parameters()}
        slot = next(slot for slot in slots if slot in sharded or id(slot.param) in held)
        kind = "a DistributedDataParallel" if replicas else "an FSDP2"
        raise ValueError(
            f"parameter {slot.name} is in {kind} module, but the optimizer was wrapped without any, so its windows are this rank's "
            "alone; wrap the optimizer when it already has these parameters, or wrap it with process_group="
        )
