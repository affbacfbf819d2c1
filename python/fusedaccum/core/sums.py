"""The sums in the buffers: right whatever other code does to them, divided at a window's end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from ..engine import outside_graphs
from ..scalars import Scalar, div, identity, to_device, to_device_of
from . import grad_views
from .buffers import Block, Buffers, Slot, by_divisor
from .extension import Extensions
from .grad_views import UNTOUCHED
from .norms import SquaredNorms

BUFFER, PLACED = attrgetter("buffer"), attrgetter("placed")


class Sums:
    """The buffers of one optimizer, and what they hold.

    Args:
        buffer_dtype, backend: as :class:`~fusedaccum.AccumulatingOptimizer` has them.
        extensions: of the wrapper.

    Attributes:
        begun: how often :meth:`begin` was called, which tells whether a window is still here.
        changed_by_user: True if other code has written to the window's sums.
        written_over: True if it has written to or replaced them: p.grad may be something else.
        written_by_layers: True if layers add to buffers untold, which looks like other code's work.
        over_owners: sums over the ranks, if each of them steps only a part of the parameters.
        normalized_by: the divisor of normalize_(), until the next backward; None for sums.
        half_divided: True if a call broke off when it had divided some of the sums.
        begun_at_close: what ``begun`` was when the last window closed.
    """

    def __init__(self, buffer_dtype: torch.dtype | None, extensions: Extensions, backend: str):
        self.buffers = Buffers(buffer_dtype, extensions)
        self._extensions = extensions
        self.norms = SquaredNorms(backend)
        self.backend = backend
        self.warned_dropped = False  # of a gradient that was removed inside a window
        # By slot: a tensor that was assigned to p.grad and copied (held weakly), its version then.
        self.copied: dict[Slot, tuple[weakref.ref[Tensor], int]] = {}
        self.begun = 0
        self.changed_by_user = self.written_over = self.written_by_layers = False
        self.over_owners: Callable[[Tensor], Tensor] | None = None
        self.normalized_by: Scalar | None = None
        self.half_divided = False
        self.begun_at_close = -1

    def place(self, slots: Sequence[Slot]) -> None:
        """Give ``slots`` storage, together with all trainable parameters, which share it."""
        if not all(map(PLACED, slots)):
            self.buffers.allocate([slot for slot in self.buffers.slots if slot.param.requires_grad])
            self.buffers.allocate(slots)

    def changed(self, slots: Sequence[Slot] | None) -> None:
        """The sums of ``slots`` (None: not known which) have changed: old readings are void."""
        if self.norms.readings:
            self.norms.invalidate(slots)
        for sums_changed in self._extensions.sums_changed:
            sums_changed(slots)

    def written(self, slots: Sequence[Slot], divisor: Scalar, shown: bool = False) -> None:
        """``slots`` hold sums divided by ``divisor``: show them, if not ``shown`` already."""
        self.changed(slots)
        block: Block | None = None
        for slot in slots:
            if slot.block is not block:
                block = slot.block
                block.written()
        for slot in slots:
            slot.divisor, slot.prepared = divisor, False
            if not (shown or slot.shown is slot.buffer is slot.holder.grad):
                slot.show(slot.buffer)

    def check(self) -> None:
        """Raises RuntimeError if a parameter has changed, or sums are lost or half divided."""
        self.buffers.check_unchanged()
        for check in self._extensions.check_sums:
            check()
        self.check_whole()

    def check_whole(self) -> None:
        if self.half_divided:
            raise RuntimeError(
                "an exception broke off a call that divides the window's sums, so that some are divided and others are "
                "not; call opt.reset(), and repeat the window's micro-batches"
            )

    def check_shown(self, why: str, instead: str) -> None:
        """Raises RuntimeError if ``p.grad`` does not show the sums, or not all of them."""
        for check in self._extensions.check_shown:
            check(why, instead)

    @property
    def half_written(self) -> bool:
        """True if a call that raised has written some of what it should have written."""
        return any(ops.half_added() for ops in self.buffers.ops) or not all(map(UNTOUCHED, self.buffers.blocks))

    # -- what others do to p.grad ------------------------------------------------------------------

    def shows(self, parameter: Parameter) -> bool:
        """True if what is in ``p.grad`` is ours, and not other code's."""
        slot = self.buffers.of[parameter]
        return slot.holder.grad is slot.shown

    @property
    def taken_away(self) -> bool:
        """True if all that had been accumulated has been taken out of every ``p.grad``."""
        shown = [slot for slot in self.buffers.slots if slot.shown is not None]
        return bool(shown) and all(slot.holder.grad is None for slot in shown)

    @property
    def as_shown(self) -> bool:
        """True if no other code has written to, replaced or removed what ``p.grad`` shows."""
        buffers = self.buffers
        return all(map(UNTOUCHED, buffers.blocks)) and all(slot.holder.grad is slot.shown for slot in buffers.slots)

    @property
    def written_by_user(self) -> bool:
        """True if other code has written to or replaced what ``p.grad`` shows.

        As far as that can be told.
        """
        if self.written_by_layers or self.normalized_by is not None:
            return False
        return self.written_over or not all(map(UNTOUCHED, self.buffers.blocks))

    # -- the window's ends -------------------------------------------------------------------------

    @outside_graphs  # which the compiler would look into, in a loop that it compiles
    def begin(self) -> None:
        """Start from nothing: drop the last window; gradients set by hand stay, to be adopted."""
        self.begun += 1
        for overwritten in self._extensions.buffers_overwritten:
            overwritten()
        for slot in self.buffers.slots:
            ours = slot.shown is not None and slot.holder.grad is slot.shown
            if ours or self.half_divided:  # then it may not be known what is shown
                slot.holder.grad = None
            slot.shown, slot.divisor = None, 1.0
        for block in self.buffers.blocks:
            block.written()  # what other code wrote to the previous window is gone with it
        self.changed_by_user = self.written_over = self.half_divided = False
        self.normalized_by = None
        self.changed(None)
        for dropped in self._extensions.sums_dropped:
            dropped()

    def clear(self) -> None:
        """Remove every gradient from ``p.grad``, whoever put it there."""
        for slot in self.buffers.slots:
            slot.holder.grad = slot.shown = None

    def shown_as_is(self) -> None:
        """Take what is in ``p.grad`` for the closed window's, even if a step hook put it there."""
        for slot in self.buffers.slots:
            slot.shown = slot.holder.grad
        for block in self.buffers.blocks:
            block.written()
        self.begun_at_close = self.begun

    def slots_with_grad(self) -> list[Slot]:
        """The slots that have sums, brought up to date. Raises RuntimeError if half divided."""
        self.check_whole()
        for ops in self.buffers.ops:
            ops.finish_adds()
        grad_views.bring_back(self)
        grad_views.adopt_all(self, self.buffers.slots)
        return [slot for slot in self.buffers.slots if slot.shown is not None]

    def saved(self, slot: Slot) -> Tensor:
        """A copy of a sum, as it is to be put back."""
        wide = torch.empty_like(slot.buffer, dtype=torch.float32)
        return wide if self.read([slot], [wide]) else slot.buffer.clone()

    def read(self, slots: Sequence[Slot], outs: Sequence[Tensor]) -> bool:
        """Put sums of slots with the same ops into ``outs`` if buffers alone are rounded ones."""
        if slots[0].rounded:
            slots[0].ops.read_sums(slots, outs, self.backend)
        return slots[0].rounded

    def write(self, slots: Sequence[Slot], sums: Sequence[Tensor]) -> bool:
        """Keep these sums of slots with the same ops if their buffers alone are rounded ones."""
        if slots[0].rounded:
            slots[0].ops.write_sums(slots, sums, self.backend)
        return slots[0].rounded

    def restore(self, slot: Slot, saved: Tensor, divisor: Scalar) -> None:
        """Put a saved sum back."""
        self.place([slot])
        if not self.write([slot], [saved]):
            slot.buffer.copy_(saved)
        self.written([slot], divisor)

    def zero_(self, slots: Sequence[Slot]) -> None:
        """Make the sums of ``slots`` zero."""
        self.place(slots)
        torch._foreach_zero_([slot.buffer for slot in slots])
        self.set_by_others(slots)
        self.written(slots, 1.0)

    def set_by_others(self, slots: Sequence[Slot]) -> None:
        """Others than their ops have written these buffers."""
        for ops in self.buffers.ops:
            ops.written_by_others([slot for slot in slots if slot.ops is ops])

    def sq_norm(self, slots: Sequence[Slot]) -> Tensor:
        """Sum of squares of ``slots``, over their processes; free if the last adds measured it."""
        if not self.buffers.has_parts:
            total = self.norms.total(slots)
            return total if self.over_owners is None else self.over_owners(total)
        # The same groups, in the same order, in all processes.
        groups: dict[Hashable, list[Slot]] = {slot.layout: [] for slot in self.buffers.slots}
        for slot in slots:
            groups[slot.layout].append(slot)
        parts = []
        for key, members in groups.items():
            part = self.norms.total(members)
            if key is not None:
                first = next(slot for slot in self.buffers.slots if slot.layout == key)
                assert first.part is not None
                part = first.part.sum_over_parts(part.to(first.device))
            parts.append(part)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum()

    def divide_(self, slots: Sequence[Slot], divisor: Scalar, coef: Scalar = 1.0) -> None:
        """Make each buffer ``coef * sum / divisor``: one pass, or none if that changes nothing."""
        self.check_whole()
        # For good if this raises: some results may have been written, so it must not be repeated.
        self.half_divided = True
        self._divide_(slots, divisor, coef)
        self.half_divided = False

    def normalize_(self, divisor: Scalar, factor: Scalar) -> None:
        """Make all sums ``factor * sum / divisor``; so is what is put into ``p.grad`` later."""
        self.divide_(self.slots_with_grad(), divisor, factor)
        self.normalized_by = divisor

    def sum_again(self) -> None:
        """A backward follows :meth:`normalize_`: adopt what was put into ``p.grad`` since."""
        grad_views.adopt_all(self, self.buffers.slots)
        self.normalized_by = None

    def _divide_(self, slots: Sequence[Slot], divisor: Scalar, coef: Scalar = 1.0, last: bool = False) -> None:
        for members in by_divisor(slots):
            scale = to_device(_rescaling(members[0], divisor, coef), members[0].device)
            ops = members[0].ops
            for finishing in self._extensions.finishing if last else ():
                finishing(members, scale)
            finished = last and members[0].rounded and ops.finishes(members, scale, self.backend)
            if not finished and (isinstance(scale, Tensor) or scale != 1.0):
                ops.scale_(list(map(BUFFER, members)), scale, backend=self.backend)
            self.written(members, divisor)

    def finish_(self, slots: Sequence[Slot], divisor: Scalar, coef: Scalar) -> None:
        """Make ``p.grad`` ``coef * sum / divisor``, in the dtype of what the inner optimizer steps.

        A dtype narrower than the buffer's goes into the buffer's storage, scaled by that cast.
        """
        same: list[Slot] = []
        cast: dict[Block, list[Slot]] = {}
        for slot in slots:
            dtype = slot.stepped.dtype
            if dtype is not slot.dtype and dtype.itemsize < slot.dtype.itemsize:
                cast.setdefault(slot.block, []).append(slot)
            else:
                same.append(slot)
        self.check_whole()
        self.half_divided = True  # as divide_() has it
        self._divide_(same, divisor, coef, last=True)
        for block, members in cast.items():
            if len({identity(slot.divisor) for slot in members}) > 1:
                self._divide_(members, divisor)
            scale = to_device(_rescaling(members[0], divisor, coef), members[0].device)
            block.cast_in_place_(members[0].stepped.dtype, scale, members, self.backend)
            self.written(members, divisor, shown=True)
            # The others' memory, too, has been written.
            for slot in self.buffers.slots if self.written_by_layers else ():
                slot.prepared = slot.prepared and slot.block is not block
        self.half_divided = False


def _rescaling(slot: Slot, divisor: Scalar, coef: Scalar) -> Scalar:
    """What makes the buffer of ``slot`` hold ``coef * sum / divisor``."""
    return div(to_device_of(coef, slot.divisor) * slot.divisor, divisor)
