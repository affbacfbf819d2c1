"""``optimizer_device="cpu"``: the optimizer's weights, state and step are in CPU memory.

Parameters and buffers are on another device. Over the link go, once a window, the sums to the CPU
and the parameters back. The sums leave during the backward that is known to be the window's last,
as they are; what they are multiplied by is known when the window closes, and follows. Then they are
stepped a part after another, and each part's parameters are on their way while the next is stepped.
Sums that have changed since they left, or belong to a window whose end was not known, leave when it
closes, all at once, and are stepped in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from .. import limits, ops
from ..core.buffers import Block, Slot, padded
from ..distributed.shards import is_shard
from ..engine import without_grad
from ..scalars import Scalar, identity, to_device
from .masters_in_parts import MastersInParts
from .ring import Rings, recorded, send

if TYPE_CHECKING:
    from ..core.config import Settings

CPU = torch.device("cpu")


class Arrival(NamedTuple):
    """When a slot's sum is in CPU memory, and what makes it the window's gradient."""

    event: torch.Event
    scale: Scalar


class CpuOptimizer(MastersInParts):
    """Masters in CPU memory of all parameters elsewhere, and pinned memory for their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: dict[Tensor, Tensor] = {}  # by buffers: where what they show arrives
        self._streams: dict[torch.device, torch.Stream] = {}  # on which gradients leave
        self._rings = Rings()  # through which parameters come back
        self._left: dict[Slot, torch.Event] = {}  # sums that have left, and have not changed since
        self._coming: dict[Slot, Arrival] = {}  # of the window that is being applied
        self._near: Sequence[Slot] = ()  # those whose masters have their gradients
        self._unsent: list[Slot] = []  # those whose masters may have been stepped, and that the model has not got
        self._sent: set[Parameter] = set()  # those that have got what this step has made of their masters

    # -- what it does not work with ----------------------------------------------------------------

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        if settings.buffer_device is not None:
            raise ValueError(
                "optimizer_device='cpu' has the buffers where the parameters are, but buffer_device is 'cpu'; leave "
                "one out, and with buffer_device='cpu' use master_weights=True to have the optimizer in CPU memory, too"
            )
        if settings.master_weights == "split":
            raise ValueError(
                "optimizer_device='cpu' keeps whole FP32 weights in CPU memory, so master_weights='split' has nothing "
                "to split; leave master_weights out"
            )
        if isinstance(inner, LBFGS):
            raise ValueError(
                "optimizer_device='cpu' does not work with LBFGS, which keeps its own list of parameters; leave it out"
            )
        super().refuses(settings, inner)

    @classmethod
    def _argument(cls, settings: Settings) -> str:
        return "optimizer_device='cpu'"

    @classmethod
    def _takes(cls, settings: Settings) -> bool:
        return settings.rounding == "compensated"

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        if is_shard(parameter):
            raise ValueError(
                f"optimizer_device='cpu' does not work with parameter {name}, which is a DTensor; leave it out, or use "
                "FSDP2's CPUOffloadPolicy"
            )

    # -- parameters --------------------------------------------------------------------------------

    def _needs_master(self, slot: Slot) -> bool:
        return slot.param.dtype.itemsize < 4 or slot.device != CPU

    def _copy(self, slot: Slot) -> Tensor:
        return slot.param.detach().to(CPU, torch.promote_types(slot.param.dtype, torch.float32))

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        here = {slot.buffer for slot in self.accumulation.sums.buffers.slots if slot.placed}
        for gone in self._pinned.keys() - here:
            del self._pinned[gone]

    def parameters_moved(self, places: dict[int, int]) -> None:
        super().parameters_moved(places)
        self._sent.clear()

    def block_made(self, block: Block, slots: Sequence[Slot]) -> None:
        if slots[0].device != CPU:
            self._pin(block, [slot for slot in slots if slot.param in self.of])

    def _pin(self, block: Block, slots: Sequence[Slot]) -> None:
        """Pin memory for the gradients of these, whose buffers are in ``block``."""
        stream = self._streams.setdefault(block.flat.device, torch.Stream(block.flat.device))
        block.flat.record_stream(stream)
        for part in limits.in_parts(slots, _bytes_pinned, limits.PINNED):
            room, at = torch.empty(sum(map(_bytes_pinned, part)), dtype=torch.uint8, device=CPU, pin_memory=True), 0
            for slot in part:
                memory = room[at : at + slot.buffer.numel() * slot.stepped.itemsize].view(slot.stepped.dtype)
                self._pinned[slot.buffer] = memory.as_strided(slot.buffer.shape, slot.buffer.stride())
                at += _bytes_pinned(slot)

    # -- sums on their way here --------------------------------------------------------------------

    def arrived(self, slots: Sequence[Slot]) -> None:
        if self.accumulation.ledger.is_last() and self.accumulation.ranks.alone:
            self._left |= self._depart(slot for slot in slots if slot.dtype == slot.stepped.dtype)

    def _depart(self, slots: Iterable[Slot]) -> dict[Slot, torch.Event]:
        """Copy what ``p.grad`` of these shows, after the current stream's work so far.

        Does not wait: returns, for each, the event after which it is here.
        """
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in slots:
            if slot.param in self.of and slot.device != CPU and slot.placed and slot.shown is not None:
                if slot.buffer not in self._pinned:
                    self._pin(slot.block, [slot])  # it got its buffer before its master
                by_device.setdefault(slot.device, []).append(slot)
        here: dict[Slot, torch.Event] = {}
        for device, members in by_device.items():
            stream = self._streams[device]
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for slot in members:
                    self._pinned[slot.buffer].copy_(self._in_full(slot), non_blocking=True)
                here |= dict.fromkeys(members, recorded(device))
        return here

    def _in_full(self, slot: Slot) -> Tensor:
        """What the slot's ``p.grad`` shows; sums kept in another form, in the stepped dtype."""
        assert slot.shown is not None
        if slot.dtype.itemsize < 4 and slot.untouched:
            wide = torch.empty_like(slot.shown, dtype=slot.stepped.dtype)
            if self.accumulation.sums.read([slot], [wide]):
                return wide
        return slot.shown

    def sums_changed(self, slots: Sequence[Slot] | None) -> None:
        for slot in list(self._left) if slots is None else slots if self._left else ():
            self._left.pop(slot, None)

    def finishing(self, slots: Sequence[Slot], scale: Scalar) -> None:
        """Those that have left will be scaled here, too; on their device not before they have."""
        left = [slot for slot in slots if slot in self._left]
        self._coming |= {slot: Arrival(self._left[slot], scale) for slot in left}
        for device in {slot.device for slot in left}:
            torch.accelerator.current_stream(device).wait_stream(self._streams[device])

    def sums_dropped(self) -> None:
        super().sums_dropped()
        self._coming.clear()

    # -- while the inner optimizer is at work ------------------------------------------------------

    def _parts_come(self, parts: Sequence[Sequence[Slot]]) -> None:
        self._sent.clear()
        for part in parts:
            self._send_late(part)

    def _send_late(self, slots: Sequence[Slot]) -> None:
        """Let those of these sums leave that have not."""
        late = self._depart(slot for slot in slots if slot not in self._coming)
        self._coming |= {slot: Arrival(event, 1.0) for slot, event in late.items()}

    @contextmanager
    def _at_hand(self, slots: Sequence[Slot]) -> Iterator[None]:
        self._take_near(slots)
        self._unsent = [slot for slot in slots if slot.stepped.grad is not None]
        yield
        self._send_unsent()
        self._near = ()

    @contextmanager
    def calling(self, slots: Sequence[Slot], call: FrameType) -> Iterator[None]:
        with super().calling(slots, call):
            self._take_near(slots)
            yield

    def _leave(self, slots: Sequence[Slot]) -> None:
        super()._leave(slots)
        self._near = ()
        self._send_unsent()

    def _take_near(self, slots: Sequence[Slot]) -> None:
        self._near = slots
        self._take_gradients(slots)

    def _take_gradients(self, slots: Iterable[Slot]) -> None:
        wanted = set(slots)
        near = [slot for slot in self._near if slot in wanted]
        for slot in near:
            if not slot.untouched:  # what was copied is not what p.grad is now
                self._gradients.pop(slot, None)
                self._coming.pop(slot, None)
        self._bring([slot for slot in near if slot not in self._gradients])
        super()._take_gradients(near)

    @without_grad
    def _bring(self, slots: Sequence[Slot]) -> None:
        """Have their ``p.grad`` in pinned memory, as the gradient of the window being applied."""
        self._send_late(slots)
        scales: dict[Hashable, Scalar] = {}
        members: dict[Hashable, list[Tensor]] = {}
        for slot in slots:
            if slot in self._coming:
                event, scale = self._coming.pop(slot)  # for good: it must not be scaled twice
                event.synchronize()
                scales[identity(scale)] = scale
                members.setdefault(identity(scale), []).append(self._pinned[slot.buffer])
        for key, scale in scales.items():
            if isinstance(scale, Tensor) or scale != 1.0:
                ops.scale_(members[key], to_device(scale, CPU), backend=self.accumulation.sums.backend)

    def _in_the_form_of(self, master: Tensor, grad: Tensor, slot: Slot) -> Tensor:
        copied = grad is slot.shown and slot.placed and slot.device != CPU
        return super()._in_the_form_of(master, self._pinned[slot.buffer] if copied else grad, slot)

    # -- parameters on their way back --------------------------------------------------------------

    def _send_unsent(self) -> None:
        parameters = [slot.param for slot in self._unsent if slot.param in self.of]
        self._follow(parameters)  # a step hook may have written to them
        self._send(parameters)
        self._unsent = []

    def stepped(self, slots: Sequence[Slot]) -> None:
        self._send([slot.param for slot in slots if slot.param in self.of and slot.param not in self._sent])

    def _send(self, parameters: Sequence[Parameter]) -> None:
        self._write_back(parameters)
        self._sent.update(parameters)

    def _cast(self, slot: Slot, outs: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        if slot.device == CPU:
            ops.cast_(outs, masters, backend=self.accumulation.sums.backend)
        else:
            send(self._rings[slot.device], outs, masters, self.accumulation.sums.backend)


def _bytes_pinned(slot: Slot) -> int:
    return padded(slot.buffer.numel()) * slot.stepped.dtype.itemsize
