"""Windows that ranks share: their sums are added once per window, and they agree on what it holds.

What a window weighs, and which parameters have a gradient on any rank, takes one small all-reduce
at its end, after that of the sums. So every rank calls the same collectives in the same order,
however many micro-batches it has accumulated.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..core.buffers import Slot
from ..core.extension import Extension, RaisedByAllError
from ..core.ranks import Alone
from ..core.window import REDUCED, MicroBatch
from ..engine import outside_graphs, when_backward_ends, within_backward, without_grad
from .ddp import Replicas
from .fsdp2 import FullySharded
from .group import Group
from .own_windows import OwnWindows
from .reduce_buckets import Phase, ReduceBuckets

if TYPE_CHECKING:
    from ..core.accumulation import Accumulation
    from ..core.config import Settings
    from ..core.extension import Extensions


class Ranks(Alone, Extension):
    """One rank's side of the windows that a process group shares.

    See :class:`Alone` for what each call is for.

    Args:
        replicas, fully_sharded: the modules, as :func:`modules_of` finds them.
        accumulation: of this rank. Its ``reset()`` drops a window that a collective which broke off
            halfway has left incomplete.
    """

    alone = False

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        replicas: Replicas,
        fully_sharded: FullySharded,
        accumulation: Accumulation,
    ):
        super().__init__()
        self.replicas, self.fully_sharded = replicas, fully_sharded
        # Proxies, because the accumulation's parts hold the extensions, of which this is one.
        self._sums, self._ledger = sums, ledger = weakref.proxy(accumulation.sums), weakref.proxy(accumulation.ledger)
        self._extensions = extensions = weakref.proxy(accumulation.extensions)
        self._settings = settings = accumulation.settings
        self._drop = weakref.WeakMethod(accumulation.reset)
        slots = sums.buffers.slots
        check_shared(process_group, slots, fully_sharded, settings, extensions)
        ledger.mixes_ranks = bool(fully_sharded.slots)
        self.group = Group(process_group, slots[0].device if slots else torch.device("cpu"), ledger)
        self.size, self.rank = self.group.size, self.group.rank
        self.name = f"{self.rank} of {self.size}"
        features = [e.key for e in extensions.all if e.key is not None]
        for theirs in self.group.all_gather(features):
            if theirs != features:
                raise ValueError(
                    f"the ranks' wrappers have different features, {features} here and {theirs} on another rank, whose "
                    "numbers could not be added up; build all of them with the same arguments"
                )
        self.owners: dict[Slot, int] = {}  # empty unless ``shard``
        self.reduce_buckets = ReduceBuckets(self.group, settings.comm_dtype, sums, ledger, self.owners)
        self._own = OwnWindows(settings, ledger, sums, extensions)
        self._wants_first_alone = any(e.wants_first_alone for e in extensions.all)
        self._share(slots)
        self.reset()

    def parameters_come(self, slots: Sequence[Slot], all_of_them: bool) -> None:
        replicas, fully_sharded = modules_of(self._sums.buffers.slots)
        check_shared(
            self.group.process_group, self._sums.buffers.slots, fully_sharded, self._settings, self._extensions
        )
        self._share(slots)
        self.replicas, self.fully_sharded = replicas, fully_sharded
        self._ledger.mixes_ranks = bool(fully_sharded.slots)
        if all_of_them:
            for slot in self.owners.keys() - set(slots):
                del self.owners[slot]
            self.reset()
            self.reduce_buckets.forget_slots()

    def _share(self, slots: Sequence[Slot]) -> None:
        self.group.compare_shapes(slots)
        self._compared = False  # True if the parameters are known to be equal on all ranks
        if self._settings.shard:
            # Those that have one keep it: the optimizer's state is there.
            self.owners.update(owners([slot for slot in slots if slot not in self.owners], self.size))

    def owned(self, slots: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in slots if self.owners.get(slot, self.rank) == self.rank]

    def least(self, mine: float) -> float:
        return self.group.least(mine)

    def all_gather(self, mine: Any) -> list[Any]:
        return self.group.all_gather(mine)

    def reset(self) -> None:
        """A window begins, or is dropped."""
        self.slots_with_grad = set()
        self._shown = False  # True if all ranks have told each other, after a backward, which gradients they have
        self._reducing: MicroBatch | None = None  # whose backward has sent sums, for DistributedDataParallel's sake
        self._own.reset()
        self.reduce_buckets.reset()

    sums_dropped = reset

    @property
    def shown_for_others(self) -> set[Slot]:
        return self.reduce_buckets.shown_for_others

    def check_shown(self, why: str, instead: str) -> None:
        if self._settings.shard:
            raise RuntimeError(f"{why}, of which each rank has a part with shard=True; {instead}, or leave shard out")

    def forget_others(self, state: dict[Tensor, Any]) -> None:
        if self._settings.shard:
            owned = {slot.param for slot in self.owned(self._sums.buffers.slots)}
            for p in {p for p in state if isinstance(p, Parameter)} - owned:
                del state[p]

    @contextmanager
    def _or_dropped(self) -> Iterator[None]:
        """An exception drops the window, which is only half done then.

        A rank that breaks off alone (no memory, Ctrl-C) is out of step.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RaisedByAllError):
                self.group.out_of_step()
            drop = self._drop()
            if drop is not None:
                drop()
            raise

    # -- a pass ------------------------------------------------------------------------------------

    def pass_comes(self) -> None:
        self.replicas.silence_pass()

    def pass_begins(self, thread: int | None) -> None:
        self._own.pass_begins(self.replicas)
        if self._is_last():
            self._reducing = self._ledger.micro
            self.reduce_buckets.last_pass_begins()

    def _is_last(self) -> bool:
        """True if the window ends with this pass. Under DDP, no_sync() says when it does not."""
        if self._ledger.micro.repeatable:
            return False
        if self._shows_to_replicas:
            # Once per micro-batch: only this rank knows how many passes that takes.
            return self.replicas.synced and self._ledger.micro is not self._reducing
        # A first micro-batch that is looked at by itself is sent after that.
        taken_apart = self._wants_first_alone and self._ledger.window.empty
        # Without a synchronised backward, step() may yet come within no_sync().
        return self._ledger.is_last() and self._own.synced and self._ledger.micro.adds == 0 and not taken_apart

    @property
    def _shows_to_replicas(self) -> bool:
        """True if other code will look at ``p.grad`` before the window ends, as under DDP."""
        return self._settings.schedule.caller_owned and bool(self.replicas.modules)

    def unsynced(self) -> AbstractContextManager[None]:
        return self.replicas.unsynced()

    def adding(self, slots: Sequence[Slot]) -> None:
        self.reduce_buckets.before_add(slots)

    def arrived(self, slots: Sequence[Slot]) -> None:
        self.reduce_buckets.added(slots)

    def check_unsent(self, slot: Slot) -> None:
        if self.reduce_buckets.was_sent(slot):
            raise RuntimeError(
                f"the layer of parameter {slot.name} has added its gradient to {slot.name}.grad itself, which held the "
                "sum of all ranks; run the window's other backward passes inside no_sync(), or have the layer return "
                "its gradient"
            )

    def check_reduced(self, what: str) -> None:
        self.fully_sharded.check_reduced(what)

    def check_droppable(self, slots: Sequence[Slot]) -> None:
        self.fully_sharded.check_droppable(slots)
        self.fully_sharded.wait()

    @property
    def holds_back(self) -> bool:  # type: ignore[override]
        return self.fully_sharded.holds_back

    @property
    def sent(self) -> bool:  # type: ignore[override]
        return self.reduce_buckets.phase is not Phase.APART

    def pass_ends(self, then: Callable[[], None]) -> None:
        if self.reduce_buckets.phase is not Phase.REDUCING:
            return then()
        with self._or_dropped():
            self.reduce_buckets.send_rest()
        finish = functools.partial(self._sums_arrive, then)
        if not within_backward():
            finish()
        else:
            # Other wrappers' passes end with the same backward, on some ranks before this one:
            # their sums are sent before any rank waits.
            when_backward_ends(finish)

    @outside_graphs
    @without_grad
    def _sums_arrive(self, then: Callable[[], None]) -> None:
        with self._or_dropped():
            self.reduce_buckets.arrive()
            if self._shows_to_replicas:
                self._show()
        then()

    def _show(self) -> None:
        """Show the sums of all gradients that any rank has."""
        _, with_grad, stale = self._totals()
        self.reduce_buckets.send_stale(stale)
        # Narrow buffers have not been sent: what one without a gradient here holds is meaningless.
        self.reduce_buckets.show([slot for slot in with_grad if not slot.half_precision])
        self._shown = True

    def _totals(self, *mine: float) -> tuple[list[float], list[Slot], list[float]]:
        """Totals over all ranks, in one collective.

        The sums of ``mine``, the slots that any rank has a gradient for, and how many ranks must
        send each bucket again.
        """
        slots = self._sums.buffers.slots
        totals = self.group.total(
            [*mine, *(self.reduce_buckets.has(slot) for slot in slots), *self.reduce_buckets.stale]
        )
        first, end = len(mine), len(mine) + len(slots)
        has = zip(slots, totals[first:end], strict=True)
        return totals[:first], [slot for slot, ranks in has if ranks], totals[end:]

    def pass_failed(self) -> None:
        if self.reduce_buckets.phase is Phase.REDUCING and self.reduce_buckets.any_in_flight:
            self.group.out_of_step()

    def of_all_parts(self, found: int) -> int:
        return int(self.group.total([found])[0]) if self._sums.buffers.has_parts else found

    # -- a window's end ----------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:  # type: ignore[override]
        return self._ledger.window is not None and self.reduce_buckets.phase is Phase.AGREED

    def before_weighing(self) -> None:
        if self._settings.schedule.window_weight is not None and not self.agreed:
            self._own.ends(self.replicas)  # raises if it does: the weights of all ranks decide

    def flushes(self) -> None:
        self.before_weighing()
        if self._settings.schedule.window_weight is not None:
            with self._or_dropped():
                self.group.weight(self._ledger.window.weight, flushes=True)

    def agree(self) -> None:
        if not self.agreed and self._own.ends(self.replicas):
            self._own.ended()
            self.go_apart = self._compared = True  # there is nothing left to compare
            self.reduce_buckets.keep()
        if not self.agreed:
            self.fully_sharded.check_reduced("the window ends")
            self.fully_sharded.reshard()
            with self._or_dropped():
                self._agree()
            self.replicas.window_ended()

    def _agree(self) -> None:
        """Make the window's numbers and the buffers those of all ranks. Waits for the device."""
        self.reduce_buckets.send_rest()  # first, as on ranks whose last backward has done so
        self.reduce_buckets.arrive()
        if self._shows_to_replicas and not self._shown:
            self._show()  # as at the end of the others' last backward
        window = self._ledger.window
        compare = functools.partial(
            self.group.compare_values, [slot for slot in self._sums.buffers.slots if slot.part is None]
        )
        if not self._compared:
            compare()
            self._compared = True
        self._own.shared(compare)
        mine, of_extensions = [float(getattr(window, name)) for name in REDUCED], self._extensions.reduce()
        totals, with_grad, stale = self._totals(*mine, *of_extensions.values())
        window.weight, window.micro_batches, window.dropped = totals[0], int(totals[1]), int(totals[2])
        window.nonfinite, window.void = int(totals[3]), bool(totals[4])
        self.slots_with_grad = set(with_grad)
        self._extensions.reduced(dict(zip(of_extensions, totals[len(mine) :], strict=True)), self.group)
        self.reduce_buckets.finish(self.slots_with_grad, stale)

    def anything(self, slots: Collection[Slot]) -> bool:
        return bool(slots or self.slots_with_grad)

    def broadcast_params(self, applied: bool | Tensor) -> None:
        if applied is not False:
            self.reduce_buckets.broadcast_params(self.slots_with_grad)

    # -- checkpoints -------------------------------------------------------------------------------

    def undo_reduce(self) -> None:
        if self.agreed:
            raise RuntimeError(
                "opt.normalize_() has added up this window's sums over the ranks, so no rank holds its own part any "
                "more; call opt.step() before state_dict()"
            )
        if self._ledger.window is not None:
            self.reduce_buckets.undo_all()


def modules_of(slots: Sequence[Slot]) -> tuple[Replicas, FullySharded]:
    """The DDP and FSDP2 modules that hold the parameters of all of a wrapper's slots."""
    return Replicas([slot.param for slot in slots]), FullySharded(slots)


def check_shared(
    group: dist.ProcessGroup,
    slots: Sequence[Slot],
    fully_sharded: FullySharded,
    settings: Settings,
    extensions: Extensions,
) -> None:
    """Raises ValueError if ranks cannot share windows of these parameters."""
    parts = [slot.name for slot in slots if slot.part is not None and slot not in fully_sharded.slots]
    if parts:
        raise ValueError(
            f"parameter {parts[0]} is a DTensor that FSDP2 does not add up over the ranks of process_group; call "
            "fully_shard on the model with the mesh of these ranks, or leave process_group out where all ranks see "
            "the same micro-batches (tensor parallelism alone)"
        )
    for check in extensions.check_shared:
        check()
    if settings.shard and any(slot.part is not None for slot in slots):
        raise ValueError(
            "shard=True is for parameters that every rank holds, but these are shards already; leave it out"
        )
    fully_sharded.check_shared_by(group, settings.process_group is None)


def owners(slots: Sequence[Slot], ranks: int) -> dict[Slot, int]:
    """Which rank steps which parameter: neighbours together, and similar numbers of elements."""
    total = sum(slot.param.numel() for slot in slots)
    found, before = {}, 0
    for slot in reversed(slots):
        middle = before + slot.param.numel() / 2
        found[slot] = min(int(middle * ranks / max(total, 1)), ranks - 1)
        before += slot.param.numel()
    return found
