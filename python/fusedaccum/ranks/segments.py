"""A window's sums on their way between ranks: in segments, from the last parameter to the first, as gradients arrive.

In the window's last backward pass a segment is sent as soon as its last gradient is in, while the pass still computes. Segments are sent
in the same order on all ranks, whatever order their gradients arrive in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..buffers.buffers import Block, Slot
from ..buffers.sums import Sums
from ..engine import without_grad
from ..scalars import Scalar, or_one
from ..window.ledger import Ledger
from .group import Group
from .narrowed import Narrowed, put_in_place

SEGMENT_BYTES = 32 << 20  # of buffers that go in one collective
UNDER_WAY = 2  # at most so many collectives at once through memory of their own


class Phase(Enum):
    """What the buffers hold of the open window."""

    APART = auto()  # what this rank has accumulated
    GOING = auto()  # the last pass runs: segments sent hold (or will hold) all ranks' sums, the others this rank's
    SENT = auto()  # what all ranks have accumulated, except what has come since (Segment.again)
    AGREED = auto()  # what all ranks have accumulated (or this one, if it keeps that), and nothing can join it any more


@dataclass(eq=False)
class Segment:
    """Neighbours in a block, whose sums are sent together."""

    block: Block
    owner: int | None  # the rank that steps these parameters; None: all do
    slots: list[Slot] = field(default_factory=list)  # from the last to the first
    again: bool = False  # has a gradient come after its sums were sent?

    @property
    def memory(self) -> Tensor:
        first, last = self.slots[-1], self.slots[0]
        return self.block.flat[first.offset : last.offset + last.buffer.numel()]

    @property
    def narrow(self) -> bool:
        return self.slots[0].narrow


@dataclass
class Going:
    """A segment on its way, in memory of its own if it travels in another dtype."""

    segment: Segment
    work: dist.Work | None
    sum: Tensor | None  # where it arrives, if not where it belongs; has elements to spare

    def arrive(self, group: Group, backend: str) -> None:
        """Wait for it (on a GPU: let the current stream wait), and put it where it belongs."""
        if self.work is not None:
            with group.talking():
                self.work.wait()
            if self.sum is not None:
                put_in_place(self.sum, self.segment.memory, backend)
            self.segment.block.written()
        self.work = self.sum = None


class Segments:
    """The segments of one rank's sums.

    Args:
        comm_dtype: they travel in this dtype; None for the buffers' own.
        owners: which rank steps which parameter; empty where all ranks step all.

    Attributes:
        phase: how far the open window has come.
        unseen: slots that show a sum only because some other rank may have a gradient.
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
        self._segments: list[Segment] = []
        self._segment_of: dict[Slot, Segment] = {}
        self._blocks = 0  # that the segments were made of
        self.unseen: set[Slot] = set()
        self.forget()

    def forget(self) -> None:
        """A window begins, of which nothing has been sent yet."""
        self.phase = Phase.APART
        self.unseen.clear()
        self._gone: list[Going] = []
        self._missing: dict[Segment, set[Slot]] = {}  # what the segments still wait for in the last pass
        self._sent: set[Segment] = set()  # were sent in this window, once or more
        for segment in self._segments:
            segment.again = False

    def forget_slots(self) -> None:
        """Slots have got other places, and no storage yet."""
        self._segments, self._segment_of, self._blocks = [], {}, 0
        self.forget()

    @property
    def again(self) -> list[bool]:
        """For each segment: have gradients come after its sums were sent?"""
        return [segment.again for segment in self._segments]

    # -- during backward ---------------------------------------------------------------------------------------

    def last_pass_begins(self) -> None:
        """From here on segments are sent as soon as all their gradients are in; those sent before must be sent once more."""
        if self._sums.buffers.lent or self._sums.buffers.offloaded:
            return  # what their layers, or a thread, add to a buffer is not reported one by one
        self._divide_up()
        self.take_back_all()
        self._gone = []
        for segment in self._segments:
            segment.again = False
        self._missing = {
            segment: {slot for slot in segment.slots if slot.param.requires_grad}
            for segment in self._segments
            if not segment.narrow
        }
        self.phase = Phase.GOING

    def before_add(self, slots: Sequence[Slot]) -> None:
        """Gradients are about to be added to these slots: those of their segments that were sent already must be sent once more."""
        if self._gone:
            late = set(slots)
            for going in self._gone:
                if not late.isdisjoint(going.segment.slots):
                    self._take_back(going)

    def added(self, slots: Sequence[Slot]) -> None:
        """Gradients were added to these slots."""
        self.unseen.difference_update(slots)
        if not self._missing:
            return
        for segment in {self._segment_of[slot] for slot in slots if slot in self._segment_of} & self._missing.keys():
            self._missing[segment].difference_update(slots)
        while self._missing and not next(iter(self._missing.values())):
            self._send(next(iter(self._missing)))

    # -- at the end --------------------------------------------------------------------------------------------

    def send_rest(self) -> None:
        """Send the wide segments that are not on their way yet."""
        self._sums.gathered()  # takes over what was put into p.grad by hand
        self._divide_up()
        self._missing, self.phase = {}, Phase.SENT
        gone = {going.segment for going in self._gone}
        for segment in self._segments:
            if not segment.narrow and segment not in gone:
                self._send(segment)

    def send_again(self, again: Sequence[float]) -> None:
        """Send what must be sent once more on any rank."""
        gone = {going.segment: going for going in self._gone}
        for segment, ranks in zip(self._segments, again, strict=True):
            if ranks:
                self._take_back(gone[segment])
                self._gone.remove(gone[segment])
                segment.again = False
                self._send(segment)
        self.arrive()

    def finish(self, gathered: set[Slot], again: Sequence[float]) -> None:
        """Send what must be sent once more on any rank, and what needed the window's weight; show what is ``gathered``."""
        self.send_again(again)
        for segment in self._segments:
            if segment.narrow:
                self._send(segment)
        self.arrive()
        for segment in self._segments:
            ours = segment.owner in (None, self._group.rank)
            shown = [slot for slot in segment.slots if slot in gathered and ours]
            self._sums.written(shown, self._divisor(segment))
            for slot in segment.slots:
                if not ours or slot in self.unseen - gathered:
                    slot.show(None)
        self.phase = Phase.AGREED

    def keep(self) -> None:
        """The window ends, and its sums, none of which has been sent, stay this rank's own."""
        self.phase = Phase.AGREED

    def take_back_all(self) -> None:
        """Make the buffers hold this rank's part of the sums again."""
        self.phase = Phase.APART
        for going in self._gone:
            self._take_back(going)

    @without_grad
    def hand_out(self, stepped: set[Slot]) -> None:
        """Give all ranks the parameters that their owners have stepped, by one broadcast per segment."""
        for segment in self._segments:
            params = [slot.param.detach() for slot in segment.slots if slot in stepped]
            if segment.owner is None or not params:
                continue
            flat = torch.empty(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
            parts = [
                part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in params]), params, strict=True)
            ]
            if segment.owner == self._group.rank:
                ops.cast_(parts, params, backend=self._sums.backend)
            with self._group.talking() as group:
                dist.broadcast(flat, self._group.global_rank(segment.owner), group=group)
            if segment.owner != self._group.rank:
                ops.cast_(params, parts, backend=self._sums.backend)

    # -- one segment -------------------------------------------------------------------------------------------

    def _divide_up(self) -> None:
        """Make segments of all slots that may hold a gradient on any rank."""
        sums = self._sums
        sums.place([slot for slot in sums.buffers.slots if slot.param.requires_grad and not slot.sharded])
        if self._blocks == len(sums.buffers.blocks):
            return
        self._blocks = len(sums.buffers.blocks)
        filling: dict[Block, Segment] = {}
        for slot in reversed(sums.buffers.slots):
            if not slot.placed or slot.sharded or slot in self._segment_of:
                continue
            segment, owner = filling.get(slot.block), self._owners.get(slot)
            if segment is None or segment.memory.nbytes >= SEGMENT_BYTES or segment.owner != owner:
                segment = filling[slot.block] = Segment(slot.block, owner)
                self._segments.append(segment)
            segment.slots.append(slot)
            self._segment_of[slot] = segment

    def _send(self, segment: Segment) -> None:
        self._missing.pop(segment, None)
        shown = [slot for slot in segment.slots if slot.shown is not None]
        self._sums.divide_(shown, self._divisor(segment), self._mean)
        without = [slot.buffer for slot in segment.slots if slot.shown is None]
        if without:
            torch._foreach_zero_(without)
        # What is sent again holds a sum that was rounded before: rounded once more each time, it would lose small gradients.
        first = segment not in self._sent
        self._sent.add(segment)
        if self._narrowed is not None and first and segment.memory.dtype != self._comm_dtype:
            for going in [going for going in self._gone if going.work is not None][: 1 - UNDER_WAY]:
                going.arrive(self._group, self._sums.backend)
            self._gone.append(Going(segment, *self._narrowed.send(segment.memory, segment.owner)))
        else:
            with self._group.talking() as group:
                self._gone.append(Going(segment, self._reduce(segment.memory, segment.owner, group), None))
        segment.block.written()
        self._sums.norms.forget(segment.slots)
        for slot in segment.slots:
            slot.clean = False  # it gets what others have accumulated, or anything if another rank gets the sum

    def _reduce(self, sent: Tensor, owner: int | None, group: dist.ProcessGroup) -> dist.Work | None:
        if owner is None:
            return dist.all_reduce(sent, group=group, async_op=True)
        return dist.reduce(sent, self._group.global_rank(owner), group=group, async_op=True)

    def arrive(self) -> None:
        """Wait for what is on its way."""
        for going in self._gone:
            going.arrive(self._group, self._sums.backend)

    def _divisor(self, segment: Segment) -> Scalar:
        """What narrow buffers are divided by when sent: the sum of all ranks might overflow where the window's gradient fits."""
        return or_one(self._ledger.divisor(self._ledger.window.weight)) if segment.narrow else 1.0

    def _take_back(self, going: Going) -> None:
        """One rank keeps what all have accumulated, the others start again with zeros: the sum over the ranks stays what it is.

        Does nothing where that has been done. The segment must be sent once more.
        """
        segment = going.segment
        if segment.again:
            return
        going.arrive(self._group, self._sums.backend)
        if self._group.rank != (segment.owner or 0):
            segment.memory.zero_()
            segment.block.written()
        elif self._mean != 1.0:
            segment.memory.mul_(self._group.size)
            segment.block.written()
        self.show(segment.slots)
        segment.again = True

    def was_sent(self, slot: Slot) -> bool:
        """Has its sum gone to other ranks in this window?"""
        return self._segment_of.get(slot) in self._sent

    def has(self, slot: Slot) -> bool:
        """Does this rank have a gradient for it?"""
        return slot.shown is not None and slot not in self.unseen

    def show(self, slots: Sequence[Slot]) -> None:
        """Show sums that hold what other ranks have accumulated, or may have."""
        unseen = [slot for slot in slots if slot.shown is None]
        self._sums.written(unseen, 1.0)
        self.unseen.update(unseen)

    @property
    def any_gone(self) -> bool:
        return bool(self._gone)
