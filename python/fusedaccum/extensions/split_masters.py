"""FP32 masters of which the upper half is a bf16 parameter, the lower an int16 tensor beside it.

4 bytes a parameter, and not 6. FP32 tensors are made of the two only while the inner optimizer is
at work, of a part of the parameters at a time, and split again when it has stepped these. Nothing
is lost: what is stepped has the bits that it has with copies. The parameter is the nearest bf16
number, as with copies, but ties go away from zero: only so do 16 more bits make up FP32.

What other code writes to a parameter makes its lower half void. What it writes past the parameter's
version (``p.data``) counts, too, with a lower half that is less than the last bit of bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import ops
from ..core.buffers import ALIGNMENT, Slot, padded
from ..distributed.shards import is_shard
from ..engine import without_grad
from ..inner import is_pytorchs, states_of, steps_each_alone
from ..kept import set_apart
from .master_weights import fingerprint
from .masters_in_parts import MastersInParts

if TYPE_CHECKING:
    from ..core.config import Settings


class SplitMasters(MastersInParts):
    """Masters that have memory of their own only while they are stepped, and are NaN otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._low: dict[Parameter, Tensor] = {}
        # A checkpoint's FP32 weights, on the CPU, until a step shows whether the model has them.
        self._loaded: dict[Parameter, Tensor] = {}
        # Those whose masters have memory now, and the masters' versions when it held (p, low).
        self._joined: dict[Parameter, int] = {}
        self._scratch: dict[torch.device, Tensor] = {}  # that memory
        self._of_a_part: dict[torch.device, int] = {}  # how many elements of it parts need at most
        self._lent: dict[Slot, Tensor] = {}  # memory for gradients, beside that of the joined masters
        self._nan: dict[torch.device, Tensor] = {}  # what the others show

    # -- what it does not work with ----------------------------------------------------------------

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        super().refuses(settings, inner)
        if settings.buffer_device is not None:
            raise ValueError(
                "master_weights='split' keeps one half of the masters in the parameters, where those are, so "
                "buffer_device='cpu' could not step them in CPU memory; use master_weights=True"
            )

    @classmethod
    def _takes(cls, settings: Settings) -> bool:
        return settings.rounding == "compensated"

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"master_weights='split' does not work with parameter {name}, which is torch.float16 and has not the "
                "range of FP32, so it cannot be the upper half of an FP32 number; use bf16 parameters, or "
                "master_weights=True"
            )
        if is_shard(parameter) and parameter.dtype == torch.bfloat16:
            raise ValueError(
                f"master_weights='split' does not work with parameter {name}, which is a DTensor; use "
                "master_weights=True, or, with FSDP2, FP32 parameters and "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            )

    def needs_all_ranks(self) -> str:
        """Ranks that step alone average their parameters later, most often through ``p.data``."""
        return "master_weights='split'"

    # -- parameters --------------------------------------------------------------------------------

    def _copy(self, slot: Slot) -> Tensor:
        self._low[slot.param] = torch.zeros_like(slot.param, dtype=torch.int16)
        return self._placeholder(slot.param)

    def _placeholder(self, p: Parameter) -> Tensor:
        """Looks like the master of ``p``, and takes no memory."""
        if p.device not in self._nan:
            self._nan[p.device] = torch.full((), torch.nan, dtype=torch.float32, device=p.device)
        return self._nan[p.device].expand(p.shape)

    def parameters_moved(self, places: dict[int, int]) -> None:
        super().parameters_moved(places)
        self._scratch.clear()
        self._of_a_part.clear()
        for table in (self._low, self._loaded):
            for p in table.keys() - self.of.keys():
                del table[p]

    # -- while the inner optimizer is at work ------------------------------------------------------

    def _parts(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        # By size: so small ones share parts, and none is left alone between two that fill one each.
        return super()._parts(sorted(slots, key=lambda slot: slot.param.numel()))

    def _parts_come(self, parts: Sequence[Sequence[Slot]]) -> None:
        self._of_a_part = {}
        for part in parts if steps_each_alone(self.inner) else ():
            for device, members in self._with_masters(part).items():
                needed = _elements(members) + _elements(_with_wide_gradients(members))
                self._of_a_part[device] = max(needed, self._of_a_part.get(device, 0))

    @contextmanager
    def calling(self, slots: Sequence[Slot], call: FrameType) -> Iterator[None]:
        self.others_may_have_written(())
        with self.stepping(slots, call), self._at_hand(slots):
            yield
            self._return_gradients(slots)

    def _leave(self, slots: Sequence[Slot]) -> None:
        self._split_all()
        # A part's memory is kept on a CPU, whose system would zero it again for every step.
        for at, room in list(self._scratch.items()):
            if at.type != "cpu" or room.numel() > self._of_a_part.get(at, 0):
                del self._scratch[at]
        super()._leave(slots)

    @contextmanager
    def _at_hand(self, slots: Sequence[Slot]) -> Iterator[None]:
        """In the block, one of :meth:`stepping`, masters of ``slots`` have values and gradients.

        What it makes of them stays; if it raises, :meth:`_leave` sees to that.
        """
        if self._joined:  # a step hook may call the wrapper
            yield
            return
        self._join(slots)
        self._take_gradients(slots)
        yield
        self._split_all()

    def _take_gradients(self, slots: Iterable[Slot]) -> None:
        super()._take_gradients([slot for slot in slots if slot.param in self._joined])

    def _room_for_gradient(self, master: Tensor, slot: Slot) -> Tensor:
        return self._lent[slot] if slot in self._lent else super()._room_for_gradient(master, slot)

    def _with_masters(self, slots: Iterable[Slot]) -> dict[torch.device, list[Slot]]:
        found: dict[torch.device, list[Slot]] = {}
        for slot in slots:
            if slot.stepped is not slot.param:
                found.setdefault(slot.device, []).append(slot)
        return found

    @without_grad
    def _join(self, slots: Sequence[Slot]) -> None:
        self._lent.clear()  # what Ctrl-C may have left
        for device, members in self._with_masters(slots).items():
            given = _with_wide_gradients(members)
            of_masters, needed = _elements(members), _elements([*members, *given])
            room = self._scratch.get(device)
            if room is None or room.numel() < needed:
                most = max(needed, self._of_a_part.get(device, 0))
                room = self._scratch[device] = torch.empty(most, dtype=torch.float32, device=device)
            cut = room.numel() * of_masters // max(needed, 1) // ALIGNMENT * ALIGNMENT
            masters = self._in_the_middle(room[:cut], members)
            self._lent.update(zip(given, self._in_the_middle(room[cut:], given), strict=True))
            self._read(masters, [slot.param for slot in members])
            for slot, master in zip(members, masters, strict=True):
                slot.stepped.data = master
                self._joined[slot.param] = slot.stepped._version

    def _in_the_middle(self, room: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
        """Tensors in the form of the masters, side by side.

        Threads divide a call in the middle of its elements. With all parts centred in the room, a
        thread keeps to one half of it, which its own caches still hold.
        """
        *places, end = itertools.accumulate((padded(slot.param.numel()) for slot in slots), initial=0)
        start = room.storage_offset() + (room.numel() - end) // 2 // ALIGNMENT * ALIGNMENT
        return [
            room.as_strided(slot.param.shape, self._low[slot.param].stride(), start + at)
            for slot, at in zip(slots, places, strict=True)
        ]

    def _split_all(self) -> None:
        """Split the masters that have values, which have none afterwards.

        May be called again, if Ctrl-C has broken it off.
        """
        if not self._joined:
            return
        self._follow(self._joined)
        self._write_back(list(self._joined))
        if not is_pytorchs(self.inner):
            for state in states_of(self.inner):
                set_apart([state.get(self.of[p]) for p in self._joined], self._scratch.values())
                set_apart([x for key, x in state.items() if not isinstance(key, Tensor)], self._scratch.values())
        for p in list(self._joined):
            del self._joined[p]
            master = self.of[p]
            master.data, master.grad = self._placeholder(p), None
        self._gradients.clear()
        self._lent.clear()

    def _read(self, outs: Sequence[Tensor], parameters: Sequence[Parameter]) -> None:
        """Join the halves of these parameters, which are on one device."""
        halves = [p.detach() for p in parameters], [self._low[p] for p in parameters]
        ops.cast_(outs, halves[0], low=halves[1], backend=self.accumulation.sums.backend)

    # -- the model ---------------------------------------------------------------------------------

    @without_grad
    def _follow(self, parameters: Iterable[Parameter]) -> None:
        """Take over what other code has written into these parameters since :meth:`_write_back`.

        A half alone does not tell which elements are as they were. FP32 weights at hand do: those
        that the inner optimizer steps now, and those of a checkpoint. There they stay where the
        model has them, rounded: so a model's and an optimizer's checkpoint load in either order.
        """
        for p in parameters:
            master = self.of[p]
            master.requires_grad = p.requires_grad
            if fingerprint(p) == self._seen[p] and p not in self._loaded:
                continue
            if p in self._joined:
                master.copy_(_where_rounded(master, p))
            elif p in self._loaded:
                self._write([p], [_where_rounded(self._loaded[p].to(p.device), p)], [p.data])
                self._seen[p] = fingerprint(p)  # first: Ctrl-C may come between
                del self._loaded[p]
            else:
                self._low[p].zero_()
            self._seen[p] = fingerprint(p)

    @without_grad
    def _write_back(self, stepped: Iterable[Parameter], before: Mapping[Parameter, Any] | None = None) -> None:
        """Split the masters of these parameters that have values.

        One that has not changed is written as :class:`MasterWeights` does it.
        """
        for parameters in _by_device(p for p in stepped if p in self._joined):
            masters = [self.of[p].detach() for p in parameters]
            same = [self.of[p]._version == self._joined[p] for p in parameters]
            self._write(
                parameters, masters, [p.data if kept else p.detach() for p, kept in zip(parameters, same, strict=True)]
            )
            for p in parameters:
                self._seen[p], self._joined[p] = fingerprint(p), self.of[p]._version

    def _write(self, parameters: Sequence[Parameter], values: Sequence[Tensor], upper: Sequence[Tensor]) -> None:
        low = [self._low[p] for p in parameters]
        ops.accumulate_(upper, values, 1.0, overwrite=True, low=low, backend=self.accumulation.sums.backend)

    # -- checkpoints -------------------------------------------------------------------------------

    def _value(self, p: Parameter) -> Tensor:
        if p in self._joined:
            return self.of[p].detach().clone()
        if p in self._loaded:
            return self._loaded[p].to(p.device)
        if fingerprint(p) != self._seen[p]:
            return p.detach().float()
        value = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
        self._read([value], [p])
        return value

    def load(self, saved: dict[int, Tensor]) -> None:
        for index, master in saved.items():
            p = self.accumulation.sums.buffers.slots[index].param
            if p in self.of:
                self._loaded[p] = master.detach().to("cpu", torch.float32, copy=True)


def _by_device(parameters: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    found: dict[torch.device, list[Parameter]] = {}
    for p in parameters:
        found.setdefault(p.device, []).append(p)
    return found.values()


def _with_wide_gradients(slots: Iterable[Slot]) -> list[Slot]:
    """Those whose gradient is made for the step, because their buffer alone is a rounded sum."""
    return [slot for slot in slots if slot.rounded and slot.stepped_grad is not None]


def _elements(slots: Iterable[Slot]) -> int:
    """How many a tensor for each takes."""
    return sum(padded(slot.param.numel()) for slot in slots)


def _where_rounded(master: Tensor, p: Tensor) -> Tensor:
    """``master`` where that rounds to ``p``, ties to even or away from zero; elsewhere ``p``."""
    away = ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where((master.to(p.dtype) == p) | (away == p), master, p.to(master.dtype))
