"""A window's sums on their way between ranks, in buckets from the last parameter to the first.

In the window's last backward pass a bucket is sent as soon as its last gradient is in, while the
pass still computes. Buckets are sent in the same order on all ranks, in whatever order their
gradients arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor

from .. import limits, ops
from ..core.buffers import Block, Slot
from ..core.ledger import Ledger
from ..core.sums import Sums
from ..engine import without_grad
from ..scalars import Scalar, or_one
from .comm_dtype import Narrowed, put_in_place
from .group import Group

UNDER_WAY = 2  # at most so many collectives at once through memory of their own


class Phase(Enum):
    """What the buffers hold of the open window."""

    APART = auto()  # what this rank has accumulated
    REDUCING = auto()  # the last pass runs: buckets sent hold (or will hold) all ranks' sums, the others this rank's
    SENT = auto()  # what all ranks have accumulated, except what has come since (ReduceBucket.stale)
    AGREED = auto()  # what all ranks have accumulated (or this one, if it keeps that), and nothing can join it any more


@dataclass(eq=False)
class ReduceBucket:
    """Neighbours in a block, whose sums are sent together."""

    block: Block
    owner: int | None  # the rank that steps these parameters; None: all do
    slots: list[Slot] = field(default_factory=list)  # from the last to the first
    stale: bool = False  # True if a gradient has come after its sums were sent

    @property
    def memory(self) -> Tensor:
        first, last = self.slots[-1], self.slots[0]
        return self.block.flat[first.offset : last.offset + last.buffer.numel()]

    @property
    def half_precision(self) -> bool:
        return self.slots[0].half_precision

    def within(self, memory: Tensor) -> list[Tensor]:
        """The slots' parts of such a stretch of memory."""
        first = self.slots[-1].offset
        return [memory.as_strided(slot.buffer.shape, slot.buffer.stride(), slot.offset - first) for slot in self.slots]


@dataclass
class InFlight:
    """A bucket on its way, in memory of its own if it travels in another dtype."""

    bucket: ReduceBucket
    work: dist.Work | None
    sum: Tensor | None  # where it arrives, if not where it belongs; has elements to spare
    wide: Tensor | None  # its sums in FP32, if they travel in place of what its buffers hold

    def arrive(self, group: Group, sums: Sums) -> None:
        """Wait for it (on a GPU: let the current stream wait), and put it where it belongs."""
        if self.work is not None:
            with group.talking():
                self.work.wait()
            if self.sum is not None:
                put_in_place(self.sum, self.bucket.memory if self.wide is None else self.wide, sums.backend)
            if self.wide is not None:
                sums.write(self.bucket.slots, self.bucket.within(self.wide))
            self.bucket.block.written()
        self.work = self.sum = self.wide = None


class ReduceBuckets:
    """The buckets of one rank's sums.

    Args:
        comm_dtype: they travel in this dtype; None for the buffers' own.
        owners: which rank steps which parameter; empty where all ranks step all.

    Attributes:
        phase: how far the open window has come.
        shown_for_others: slots that show a sum only because some other rank may have a gradient.
    """

    def __init__(
        self,
        group: Group,
        comm_dtype: torch.dtype | None,
        sums: Sums,
        ledger: Ledger,
        owners: dict[Slot, int],
    ):
        self._group, self._comm_dtype = group, comm_dtype
        self._narrowed = None if comm_dtype is None else Narrowed(group, comm_dtype, sums.backend)
        self._sums, self._ledger, self._owners = sums, ledger, owners
        # Gradients that come normalised are averaged over the ranks, as DDP and FSDP do.
        self._mean = 1.0 / group.size if ledger.reduction == "none" else 1.0
        self._buckets: list[ReduceBucket] = []
        self._bucket_of: dict[Slot, ReduceBucket] = {}
        self._blocks = 0  # that the buckets were made of
        self.shown_for_others: set[Slot] = set()
        self.reset()

    def reset(self) -> None:
        """A window begins, of which nothing has been sent yet."""
        self.phase = Phase.APART
        self.shown_for_others.clear()
        self._in_flight: list[InFlight] = []
        self._missing: dict[ReduceBucket, set[Slot]] = {}  # what the buckets still wait for in the last pass
        self._sent: set[ReduceBucket] = set()  # were sent in this window, once or more
        for bucket in self._buckets:
            bucket.stale = False

    def forget_slots(self) -> None:
        """Slots have got other places, and no storage yet."""
        self._buckets, self._bucket_of, self._blocks = [], {}, 0
        self.reset()

    @property
    def stale(self) -> list[bool]:
        """For each bucket, True if gradients have come after its sums were sent."""
        return [bucket.stale for bucket in self._buckets]

    # -- during backward ---------------------------------------------------------------------------

    def last_pass_begins(self) -> None:
        """From here on full buckets are sent immediately; those sent before are sent once more."""
        if self._sums.written_by_layers or self._sums.buffers.private:
            return  # what their layers, or a thread, add to a buffer is not reported one by one
        self._divide_up()
        self.undo_all()
        self._in_flight = []
        for bucket in self._buckets:
            bucket.stale = False
        self._missing = {
            bucket: {slot for slot in bucket.slots if slot.param.requires_grad}
            for bucket in self._buckets
            if not bucket.half_precision
        }
        self.phase = Phase.REDUCING

    def before_add(self, slots: Sequence[Slot]) -> None:
        """Gradients will be added to these slots: those of their buckets already sent are stale."""
        if self._in_flight:
            late = set(slots)
            for flight in self._in_flight:
                if not late.isdisjoint(flight.bucket.slots):
                    self._undo_reduce(flight)

    def added(self, slots: Sequence[Slot]) -> None:
        """Gradients were added to these slots."""
        self.shown_for_others.difference_update(slots)
        if not self._missing:
            return
        for bucket in {self._bucket_of[slot] for slot in slots if slot in self._bucket_of} & self._missing.keys():
            self._missing[bucket].difference_update(slots)
        while self._missing and not next(iter(self._missing.values())):
            self._send(next(iter(self._missing)))

    # -- at the end --------------------------------------------------------------------------------

    def send_rest(self) -> None:
        """Send the wide buckets that are not on their way yet."""
        self._sums.slots_with_grad()  # takes over what was put into p.grad by hand
        self._divide_up()
        self._missing, self.phase = {}, Phase.SENT
        in_flight = {flight.bucket for flight in self._in_flight}
        for bucket in self._buckets:
            if not bucket.half_precision and bucket not in in_flight:
                self._send(bucket)

    def send_stale(self, stale: Sequence[float]) -> None:
        """Send what must be sent once more on any rank."""
        in_flight = {flight.bucket: flight for flight in self._in_flight}
        for bucket, ranks in zip(self._buckets, stale, strict=True):
            if ranks:
                self._undo_reduce(in_flight[bucket])
                self._in_flight.remove(in_flight[bucket])
                bucket.stale = False
                self._send(bucket)
        self.arrive()

    def finish(self, with_grad: set[Slot], stale: Sequence[float]) -> None:
        """Send what any rank must send again and what needed the weight; show ``with_grad``."""
        self.send_stale(stale)
        for bucket in self._buckets:
            if bucket.half_precision:
                self._send(bucket)
        self.arrive()
        for bucket in self._buckets:
            ours = bucket.owner in (None, self._group.rank)
            shown = [slot for slot in bucket.slots if slot in with_grad and ours]
            self._sums.written(shown, self._divisor(bucket))
            for slot in bucket.slots:
                if not ours or slot in self.shown_for_others - with_grad:
                    slot.show(None)
        self.phase = Phase.AGREED

    def keep(self) -> None:
        """The window ends, and its sums, none of which has been sent, stay this rank's own."""
        self.phase = Phase.AGREED

    def undo_all(self) -> None:
        """Make the buffers hold this rank's part of the sums again."""
        self.phase = Phase.APART
        for flight in self._in_flight:
            self._undo_reduce(flight)

    @without_grad
    def broadcast_params(self, stepped: set[Slot]) -> None:
        """Give all ranks the parameters that owners have stepped, by one broadcast per bucket."""
        for bucket in self._buckets:
            params = [slot.param.detach() for slot in bucket.slots if slot in stepped]
            if bucket.owner is None or not params:
                continue
            flat = torch.empty(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
            parts = [
                part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in params]), params, strict=True)
            ]
            if bucket.owner == self._group.rank:
                ops.cast_(parts, params, backend=self._sums.backend)
            with self._group.talking() as group:
                dist.broadcast(flat, self._group.global_rank(bucket.owner), group=group)
            if bucket.owner != self._group.rank:
                ops.cast_(params, parts, backend=self._sums.backend)

    # -- one bucket --------------------------------------------------------------------------------

    def _divide_up(self) -> None:
        """Make buckets of all slots that may hold a gradient on any rank."""
        sums = self._sums
        sums.place([slot for slot in sums.buffers.slots if slot.param.requires_grad and slot.part is None])
        if self._blocks == len(sums.buffers.blocks):
            return
        self._blocks = len(sums.buffers.blocks)
        filling: dict[Block, ReduceBucket] = {}
        for slot in reversed(sums.buffers.slots):
            if not slot.placed or slot.part is not None or slot in self._bucket_of:
                continue
            bucket, owner = filling.get(slot.block), self._owners.get(slot)
            if bucket is None or bucket.memory.nbytes >= limits.REDUCED or bucket.owner != owner:
                bucket = filling[slot.block] = ReduceBucket(slot.block, owner)
                self._buckets.append(bucket)
            bucket.slots.append(slot)
            self._bucket_of[slot] = bucket

    def _send(self, bucket: ReduceBucket) -> None:
        self._missing.pop(bucket, None)
        shown = [slot for slot in bucket.slots if slot.shown is not None]
        self._sums.divide_(shown, self._divisor(bucket), self._mean)
        without = [slot.buffer for slot in bucket.slots if slot.shown is None]
        if without:
            torch._foreach_zero_(without)
        # What is sent again holds a sum that was rounded before: rounded once more each time, it
        # would lose small gradients.
        first = bucket not in self._sent
        self._sent.add(bucket)
        wide = torch.zeros_like(bucket.memory, dtype=torch.float32) if bucket.slots[0].ops is not ops else None
        if wide is not None and not self._sums.read(bucket.slots, bucket.within(wide)):
            wide = None
        sent = bucket.memory if wide is None else wide
        narrowed = self._narrowed if first and sent.dtype != self._comm_dtype else None
        for flight in [flight for flight in self._in_flight if flight.work is not None][: 1 - UNDER_WAY]:
            if narrowed is not None or wide is not None:
                flight.arrive(self._group, self._sums)
        if narrowed is not None:
            work, total = narrowed.send(sent, bucket.owner)
            self._in_flight.append(InFlight(bucket, work, total, wide))
        else:
            with self._group.talking() as group:
                self._in_flight.append(InFlight(bucket, self._reduce(sent, bucket.owner, group), None, wide))
        bucket.block.written()
        self._sums.changed(bucket.slots)
        for slot in bucket.slots:
            slot.prepared = False  # it gets what others have accumulated, or anything if another rank gets the sum

    def _reduce(self, sent: Tensor, owner: int | None, group: dist.ProcessGroup) -> dist.Work | None:
        if owner is None:
            return dist.all_reduce(sent, group=group, async_op=True)
        return dist.reduce(sent, self._group.global_rank(owner), group=group, async_op=True)

    def arrive(self) -> None:
        """Wait for what is on its way."""
        for flight in self._in_flight:
            flight.arrive(self._group, self._sums)

    def _divisor(self, bucket: ReduceBucket) -> Scalar:
        """What divides 16-bit buffers when sent: sums may overflow where the gradient fits."""
        return or_one(self._ledger.divisor(self._ledger.window.weight)) if bucket.half_precision else 1.0

    def _undo_reduce(self, flight: InFlight) -> None:
        """One rank keeps what all have accumulated, the others start again with zeros.

        The sum over the ranks stays what it is. Does nothing where that has been done. The bucket
        must be sent once more.
        """
        bucket = flight.bucket
        if bucket.stale:
            return
        flight.arrive(self._group, self._sums)
        if self._group.rank != (bucket.owner or 0):
            bucket.memory.zero_()
            bucket.block.written()
        elif self._mean != 1.0:
            buffers = [slot.buffer for slot in bucket.slots]
            bucket.slots[0].ops.scale_(buffers, float(self._group.size), backend=self._sums.backend)
            bucket.block.written()
        self.show(bucket.slots)
        bucket.stale = True

    def was_sent(self, slot: Slot) -> bool:
        """True if its sum has gone to other ranks in this window."""
        return self._bucket_of.get(slot) in self._sent

    def has(self, slot: Slot) -> bool:
        """True if this rank has a gradient for it."""
        return slot.shown is not None and slot not in self.shown_for_others

    def show(self, slots: Sequence[Slot]) -> None:
        """Show sums that hold what other ranks have accumulated, or may have."""
        for_others = [slot for slot in slots if slot.shown is None]
        self._sums.written(for_others, 1.0)
        self.shown_for_others.update(for_others)

    @property
    def any_in_flight(self) -> bool:
        return bool(self._in_flight)
