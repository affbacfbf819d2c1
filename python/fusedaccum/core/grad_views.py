"""What ``p.grad`` shows, and what becomes of it when other code writes to it or replaces it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .. import ops
from ..engine import without_grad
from ..parts import local_of
from ..warn import warn

if TYPE_CHECKING:
    from .buffers import Slot
    from .sums import Sums

UNTOUCHED = attrgetter("untouched_by_user")  # faster than a generator, which is resumed for each


class GradView(Protocol):
    """What shows a slot's buffer, in its ``grad``: the parameter, or what stands for it."""

    grad: Tensor | None


class Part(GradView, Protocol):
    """Stands for a parameter of which this process holds a part. An extension makes it; whatever
    has spread the parameter over processes also adds up their gradients.

    Attributes:
        grad: the part of ``p.grad`` that this process holds.
        whole: ``p.grad``, as we have last set it.
        layout: a key of the parameters whose norms can be added up together over processes.
    """

    whole: Tensor | None

    @property
    def layout(self) -> Hashable: ...

    def local_gradient(self, grad: Tensor) -> Tensor:
        """The part of a gradient that belongs to this process's part of the parameter."""

    def wrap(self, local: Tensor) -> Tensor:
        """The tensor laid out as the parameter whose part here is ``local``, in its memory."""

    def sum_over_parts(self, value: Tensor) -> Tensor:
        """``value`` of the part, summed over the processes that hold others."""


def adopt_all(sums: Sums, slots: Sequence[Slot]) -> None:
    """:func:`adopt` every slot; returns at once if no other code was here, as nearly always."""
    touched = not all(map(UNTOUCHED, sums.buffers.blocks))
    for slot in slots:
        if touched or slot.holder.grad is not slot.shown:
            adopt(sums, slot)


def adopt(sums: Sums, slot: Slot) -> None:
    """Take what other code put into ``p.grad`` into the sum; notice what it took away."""
    if slot.placed:
        notice_writes(sums, slot)
    grad, shown = slot.holder.grad, slot.shown
    if grad is shown:
        return
    sums.changed_by_user = True
    if grad is None:
        slot.shown = None
        sums.changed([slot])
        warn_dropped(
            sums,
            f"{slot.name}.grad",
            "what the window had accumulated for such parameters is dropped, although its micro-batches still count. "
            "opt.zero_grad() keeps it; opt.reset() drops the window; a gradient that is not for the window (an "
            "attack's, as in PGD) is taken by torch.autograd.grad(loss, inputs)",
        )
        return
    if grad.layout is not torch.strided:
        raise RuntimeError(f"{slot.name}.grad is {grad.layout}; only dense gradients can be accumulated")
    slot.check_width(grad)
    sums.written_over = sums.written_over or shown is not None
    sums.place([slot])
    if _is_ours(sums, grad):
        # In our own storage: a view of some p.grad, or two that were swapped. First, all such
        # gradients get memory of their own.
        for other in sums.buffers.slots:
            theirs = other.holder.grad
            if theirs is not None and theirs is not other.shown and _is_ours(sums, theirs):
                other.holder.grad = theirs.clone()
        return adopt(sums, slot)
    if slot.param.grad is not None:
        sums.copied[slot] = weakref.ref(slot.param.grad), grad._version
    ops.cast_([slot.buffer], [grad.detach()], backend=sums.backend)
    sums.set_by_others([slot])
    by_hand = 1.0 if sums.normalized_by is None else sums.normalized_by
    sums.written([slot], by_hand if shown is None else slot.divisor)


def follow_copied(sums: Sums) -> None:
    """Make ``p.grad`` what was assigned to it and copied, if that has been written to since: in
    plain PyTorch it still is ``p.grad``. (A3C assigns the gradients of a worker's model once, to a
    model that all workers share.)
    """
    for slot, (source, version) in list(sums.copied.items()):
        grad = source()
        if grad is None or slot.shown is None or slot.holder.grad is not slot.shown:
            del sums.copied[slot]  # p.grad has been replaced or removed since
        elif local_of(grad)._version != version:
            slot.param.grad = grad


def notice_writes(sums: Sums, slot: Slot) -> None:
    if not slot.block.untouched_by_user:
        sums.changed_by_user = sums.written_over = True
        sums.changed(None)
        sums.set_by_others([other for other in sums.buffers.slots if other.placed and other.block is slot.block])
        slot.block.written()


@without_grad
def bring_back(sums: Sums) -> None:
    """Move buffers back into their blocks, if they lie elsewhere or unlike their parameters.

    This happens when ``p.grad.data`` is assigned, as ``model.to(...)`` does, which may also have
    changed the parameter's strides.
    """
    for slot in sums.buffers.slots:
        if slot.placed and (slot.relaid or slot.buffer.data_ptr() != slot.address):
            notice_writes(sums, slot)
            sums.changed([slot])
            sums.changed_by_user = True
            home = slot.block.view(slot, slot.offset)
            home.copy_(slot.buffer.clone())
            slot.buffer.data, slot.relaid = home, False  # still the same object, which p.grad is
            slot.block.written()


def part_with_written(sums: Sums, all_of_them: bool) -> None:
    """Take every ``p.grad`` that other code has written to since its window closed to be a gradient
    set by hand: give it memory of its own, so that ``begin()`` leaves it and :func:`adopt` takes it
    over. ``all_of_them``: and those that it has not written to.
    """
    for slot in sums.buffers.slots:
        grad = slot.holder.grad
        if grad is None or grad is not slot.shown or not slot.placed:
            continue
        if all_of_them or not slot.block.untouched_by_user:
            slot.holder.grad = grad.clone()


def warn_dropped(sums: Sums, which: str, so: str) -> None:
    if not sums.warned_dropped:
        sums.warned_dropped = True
        warn(
            f"{which} was set to None inside an open window (by zero_grad() of the model, or of the inner optimizer?): "
            f"{so}. (Further cases are not reported.)"
        )


def _is_ours(sums: Sums, grad: Tensor) -> bool:
    memory = grad.untyped_storage().data_ptr()  # 0 if there are no elements
    return memory != 0 and any(memory == block.flat.untyped_storage().data_ptr() for block in sums.buffers.blocks)
