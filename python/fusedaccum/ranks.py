"""Windows over the ranks of a process group: their sums are added once a window, and they agree on what it holds.

Buffers are added up in segments, from the last parameter to the first, as gradients come: in the window's last backward pass a segment
goes as soon as its last gradient is in, while the pass still computes. What a window weighs, and which parameters have a gradient on
any rank, is one more, small all-reduce at the window's end. Every rank so calls the same collectives in the same order, however many
micro-batches it has gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .accumulator import Accumulator
from .buffers import Block, Slot
from .ledger import Ledger
from .window import Scalar

SEGMENT_BYTES = 32 << 20  # of buffers that go in one all-reduce
UNDER_WAY = 2  # all-reduces through memory of their own, at once


@dataclass(eq=False)
class Segment:
    """Neighbours in a block, whose sums go together."""

    block: Block
    slots: list[Slot] = field(default_factory=list)  # from the last to the first
    again: bool = False  # has a gradient come after its sums had gone?

    @property
    def memory(self) -> Tensor:
        first, last = self.slots[-1].buffer, self.slots[0].buffer
        begin = int(first.storage_offset())
        return self.block.flat[begin : int(last.storage_offset()) + self.slots[0].buffer.numel()]

    @property
    def narrow(self) -> bool:
        return self.slots[0].narrow


@dataclass
class Going:
    """A segment on its way, in memory of its own where it goes in another dtype."""

    segment: Segment
    sent: Tensor
    work: dist.Work | None

    def arrive(self, backend: str) -> None:
        """Wait for it (on a GPU: let the current stream wait), and put it where it belongs."""
        if self.work is not None:
            self.work.wait()
            memory = self.segment.memory
            if self.sent.dtype != memory.dtype:
                ops.cast_([memory], [self.sent], backend=backend)
            self.segment.block.written()
        self.work, self.sent = None, torch.empty(0)


class Ranks:
    """One rank's side of the windows that a process group shares.

    Args:
        sums, ledger: of this rank. backend: of the casts.
        comm_dtype: sums travel in this dtype; None for the buffers' own.
    """

    def __init__(
        self, group: dist.ProcessGroup, comm_dtype: torch.dtype | None, sums: Accumulator, ledger: Ledger, backend: str
    ):
        self.group = group
        self.size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.name = f"{self._rank} of {self.size}"
        self._comm_dtype, self._sums, self._ledger, self._backend = comm_dtype, sums, ledger, backend
        self._segments: list[Segment] = []
        self._segment_of: dict[Slot, Segment] = {}
        self._blocks = 0  # that the segments were made of
        self._compared = False  # are the parameters known to be equal on all ranks?
        self._out_of_step = False  # has this rank left out collectives that others wait for?
        self.forget()

    def forget(self) -> None:
        """Nothing has gone yet of the window that begins."""
        self.agreed = False  # is the window of all ranks known?
        self.in_last_pass = False
        self.overflow = False  # has a GradScaler found one on any rank?
        self._gone: list[Going] = []
        self._missing: dict[Segment, set[Slot]] = {}  # what the segments still wait for in the last pass
        self.unseen: set[Slot] = set()  # that show a sum only because some other rank may have a gradient
        for segment in self._segments:
            segment.again = False

    # -- the sums ----------------------------------------------------------------------------------------------

    def last_pass_begins(self) -> None:
        """From here on segments go as soon as all their gradients are in; those that have gone before must go once more."""
        if self._sums.lent or self._sums.buffers.offloaded:
            return  # what their layers, or a thread, add to a buffer is not told one by one
        self._divide_up()
        self.take_back_all()
        self._gone = []
        for segment in self._segments:
            segment.again = False
        self._missing = {segment: set(segment.slots) for segment in self._segments if not segment.narrow}
        self.in_last_pass = True

    def before_add(self, slots: Sequence[Slot]) -> None:
        """Gradients are about to be added to these slots: what has gone of them already has to go once more."""
        if self._gone:
            late = set(slots)
            for going in self._gone:
                if not going.segment.again and not late.isdisjoint(going.segment.slots):
                    self._take_back(going)
                    going.segment.again = True

    def added(self, slots: Sequence[Slot]) -> None:
        """Gradients were added to these slots."""
        self.unseen.difference_update(slots)
        if not self._missing:
            return
        for missing in {self._segment_of[slot] for slot in slots if slot in self._segment_of} & self._missing.keys():
            self._missing[missing].difference_update(slots)
        while self._missing and not next(iter(self._missing.values())):
            self._send(next(iter(self._missing)))

    def send_rest(self) -> None:
        """All wide segments have gone and come back after this."""
        self._sums.gathered()  # takes over what was put into p.grad by hand
        self._divide_up()
        self._missing, self.in_last_pass = {}, False
        gone = {going.segment for going in self._gone}
        for segment in self._segments:
            if not segment.narrow and segment not in gone:
                self._send(segment)
        with self._talking():
            for going in self._gone:
                going.arrive(self._backend)

    def _divide_up(self) -> None:
        """Segments of all slots that may hold a gradient on any rank."""
        sums = self._sums
        sums.place([slot for slot in sums.buffers.slots if slot.param.requires_grad and not slot.sharded])
        if self._blocks == len(sums.buffers.blocks):
            return
        self._blocks = len(sums.buffers.blocks)
        filling: dict[Block, Segment] = {}
        for slot in reversed(sums.buffers.slots):
            if not slot.placed or slot.sharded or slot in self._segment_of:
                continue
            segment = filling.get(slot.block)
            if segment is None or segment.memory.nbytes >= SEGMENT_BYTES:
                segment = filling[slot.block] = Segment(slot.block)
                self._segments.append(segment)
            segment.slots.append(slot)
            self._segment_of[slot] = segment

    def _send(self, segment: Segment) -> None:
        self._missing.pop(segment, None)
        shown = [slot for slot in segment.slots if slot.shown is not None]
        self._sums.divide_(shown, self._divisor(segment))
        without = [slot.buffer for slot in segment.slots if slot.shown is None]
        if without:
            torch._foreach_zero_(without)
        memory = segment.memory
        if self._comm_dtype in (None, memory.dtype):
            sent = memory
        else:
            waiting = [going for going in self._gone if going.work is not None]
            for going in waiting[: 1 - UNDER_WAY]:
                with self._talking():
                    going.arrive(self._backend)
            sent = torch.empty_like(memory, dtype=self._comm_dtype)
            ops.cast_([sent], [memory], backend=self._backend)
        with self._talking():
            self._gone.append(Going(segment, sent, dist.all_reduce(sent, group=self.group, async_op=True)))
        segment.block.written()
        self._sums.norms.forget(segment.slots)

    def _divisor(self, segment: Segment) -> Scalar:
        """What narrow buffers are divided by when they go: the sum of all ranks might overflow where the window's gradient fits."""
        if not segment.narrow:
            return 1.0
        return self._ledger.divisor(self._ledger.window.weight) or 1.0

    def _take_back(self, going: Going) -> None:
        """The first rank keeps what all have gathered, the others begin again with zeros: the sum over the ranks stays what it is."""
        with self._talking():
            going.arrive(self._backend)
        if self._rank != 0:
            going.segment.memory.zero_()
            going.segment.block.written()
        unseen = [slot for slot in going.segment.slots if slot.shown is None]
        self._sums.written(unseen, 1.0)
        self.unseen.update(unseen)

    def take_back_all(self) -> None:
        """Make the buffers this rank's part of the sums again, as a checkpoint holds them."""
        if self.agreed:
            raise RuntimeError(
                "opt.normalize_() has added this window's sums over the ranks, and none of them holds its part any more; call opt.step() "
                "before state_dict()"
            )
        for going in self._gone:
            if not going.segment.again:
                self._take_back(going)
                going.segment.again = True

    # -- the window --------------------------------------------------------------------------------------------

    def agree(self, micro_batches: int, weight: Scalar, overflow: bool | Tensor) -> None:
        """Make the window's numbers, and the buffers, those of all ranks. Waits for the device.

        Args:
            micro_batches, weight: of this rank. overflow: did a GradScaler find one here?

        Raises:
            RuntimeError: the other ranks cannot be reached, or are not alike.
        """
        self.send_rest()  # first, as on ranks whose last backward has done so
        self._compare_parameters()
        window = self._ledger.window
        unit = 0.0 if window.unit is None else float(window.unit)
        mine = [
            float(weight),
            micro_batches,
            window.dropped,
            float(window.nonfinite),
            bool(overflow),
            window.overflowed,
            unit,
        ]
        slots = self._sums.buffers.slots
        mine += [slot.shown is not None and slot not in self.unseen for slot in slots]
        mine += [segment.again for segment in self._segments]
        theirs = self.total(mine)
        totals, theirs = theirs[:7], theirs[7:]
        if totals[6] != self.size * unit:
            raise RuntimeError(
                f"the loss scale is {unit:g} on this rank and another on others: every rank's GradScaler has looked at its own gradients "
                "only; use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=...). The window is dropped"
            )
        window.weight, window.micro_batches, window.dropped = totals[0], int(totals[1]), int(totals[2])
        window.nonfinite, window.overflowed = int(totals[3]), bool(totals[5])
        self.overflow = bool(totals[4])
        self.agreed = True
        self._finish([slot for slot, ranks in zip(slots, theirs, strict=False) if ranks], theirs[len(slots) :])

    def _finish(self, gathered: list[Slot], again: list[float]) -> None:
        """Send what has to go once more, and what needed the window's weight; show ``gathered``."""
        held = set(gathered)
        gone = {going.segment: going for going in self._gone}
        for segment, ranks in zip(self._segments, again, strict=True):
            if segment.narrow:
                self._send(segment)
            elif ranks:
                if not segment.again:
                    self._take_back(gone[segment])
                self._send(segment)
        with self._talking():
            for going in self._gone:
                going.arrive(self._backend)
        for segment in self._segments:
            self._sums.written([slot for slot in segment.slots if slot in held], self._divisor(segment))
        for slot in self.unseen - held:
            slot.show(None)

    def total(self, mine: list[float]) -> list[float]:
        """Sums over the ranks of a list of numbers; waits for the device."""
        device = self._sums.buffers.slots[0].device if self._sums.buffers.slots else torch.device("cpu")
        numbers = torch.tensor(mine, dtype=torch.float64, device=device)
        with self._talking():
            dist.all_reduce(numbers, group=self.group)
            return numbers.tolist()

    def weight(self, mine: Scalar) -> float:
        """The sum over the ranks of a weight; waits for the device."""
        return self.total([float(mine)])[0]

    # -- are the ranks alike? ----------------------------------------------------------------------------------

    def compare_shapes(self, slots: Sequence[Slot]) -> None:
        """Raises ValueError unless all ranks gather parameters of the same shapes and dtypes."""
        mine = [(slot.name, tuple(slot.param.shape), str(slot.param.dtype), slot.param.requires_grad) for slot in slots]
        theirs: list = [None] * self.size
        with self._talking():
            dist.all_gather_object(theirs, mine, group=self.group)
        for rank, other in enumerate(theirs):
            differing = [(a, b) for a, b in zip(mine, other, strict=False) if a[1:] != b[1:]]
            if differing or len(mine) != len(other):
                a, b = differing[0] if differing else (f"{len(mine)} parameters", f"{len(other)}")
                raise ValueError(
                    f"process_group's ranks must have the same parameters in the same order, but rank {self._rank} has {a} where rank "
                    f"{rank} has {b}; build the same model and the same param_groups on all ranks"
                )

    def _compare_parameters(self) -> None:
        """Raises RuntimeError unless all ranks started from the same values; looks once, before the first window is applied."""
        if self._compared:
            return
        self._compared = True
        slots = [slot for slot in self._sums.buffers.slots if not slot.sharded]
        if not slots:
            return
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        mine = torch.stack(
            [slot.param.detach().view(bits[slot.param.itemsize]).sum(dtype=torch.int64) for slot in slots]
        )
        first = mine.clone()
        with self._talking():
            dist.broadcast(first, dist.get_global_rank(self.group, 0), group=self.group)
        (differing,) = (mine != first).nonzero(as_tuple=True)
        if self.total([len(differing)])[0]:
            where = f", on this rank in {slots[int(differing[0])].name} first" if len(differing) else ""
            raise RuntimeError(
                f"the ranks' parameters hold different values{where}, and the same steps would leave them so; before the first window, "
                "give all ranks the first one's: `for p in model.parameters(): torch.distributed.broadcast(p.data, 0)` "
                "(DistributedDataParallel does that), or load the same checkpoint"
            )

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Errors of the process group say what they mean here."""
        if self._out_of_step:
            raise RuntimeError(
                "this rank broke off while the window's sums were on their way, and is out of step with the others since; end all "
                "processes and start again from a checkpoint"
            )
        try:
            yield
        except RuntimeError as error:
            self._out_of_step = True
            raise RuntimeError(
                f"rank {self._rank} could not reach the others at the end of window {self._ledger.index}: one of them has probably "
                "raised or died, or closes fewer windows than this one (every rank must call step() or flush() as often as windows "
                f"close on the others). The window is dropped. PyTorch says: {error}"
            ) from error

    def broke_off(self) -> None:
        """A backward pass of this rank has failed; others may be waiting for the segments that did not go."""
        self._out_of_step = self._out_of_step or bool(self._gone)
