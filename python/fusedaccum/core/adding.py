"""Adding: each bucket of gradients that arrives is scaled and added to its buffers.

What layers have written into a buffer themselves is counted here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..engine import without_grad
from ..scalars import Scalar, div, identity, to_device, widest
from ..scalars import add as add_scalars
from . import grad_views
from .buffers import Slot

if TYPE_CHECKING:
    from .accumulation import Accumulation


def add(accumulation: Accumulation, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
    """``buffer += c * g`` for a bucket, as the open micro-batch is weighted: one call per device
    and kind of add; the first touch of a parameter overwrites.
    """
    sums, micro, extensions = accumulation.sums, accumulation.ledger.micro, accumulation.extensions
    for select in extensions.select:
        slots, grads = select(slots, grads)
    if not slots:
        return
    micro.arrived += len(slots)
    for adding in extensions.adding:
        adding(slots)
    measure = measures(accumulation)
    sums.place(slots)
    grad_views.adopt_all(sums, slots)
    if sums.buffers.has_parts:
        grads = [
            grad if slot.part is None else slot.part.local_gradient(grad)
            for slot, grad in zip(slots, grads, strict=True)
        ]
    scale = contribution(accumulation, micro.factor_left())
    for (device, first, *_), members, theirs in one_call_each(slots, grads, measure):
        here, divisor = scale * members[0].averaged_by, 1.0
        for as_mean in extensions.as_mean:
            here, divisor = as_mean(members, here)
        stats = _room_for_stats(members[0]) if measure else None
        try:
            members[0].ops.accumulate_(
                [slot.buffer for slot in members],
                theirs,
                to_device(here, device),
                overwrite=first,
                decay=1.0 if first else to_device(div(members[0].divisor, divisor), device),
                rounding=next((rounding(members) for rounding in extensions.rounding), None),
                stats=stats,
                backend=sums.backend,
            )
            micro.adds += 1
        except BaseException:
            micro.adds += sums.half_written  # one that raises for lack of memory, say, has mostly added nothing
            raise
        for added in extensions.added:
            added(members)
        sums.written(members, divisor, shown=not first)
        if stats is not None:
            _measured(accumulation, stats, members, divisor)
    tell_arrived(accumulation, slots)


def tell_arrived(accumulation: Accumulation, slots: Sequence[Slot]) -> None:
    for arrived in accumulation.extensions.arrived:
        arrived(slots)


def measures(accumulation: Accumulation) -> bool:
    """True if adds take norms and count what is not finite.

    Norms of sums that go to other ranks are taken when those have arrived.
    """
    ledger = accumulation.ledger
    takes_norm = accumulation.wants_norm and (accumulation.ranks.alone or ledger.mixes_ranks)
    if takes_norm and ledger.may_be_last():
        return True
    return bool(accumulation.extensions.measures) and any(asks() for asks in accumulation.extensions.measures)


def contribution(accumulation: Accumulation, scale: Scalar) -> Scalar:
    """``scale``, as extensions will have it; 0 if nothing more is to be added."""
    if accumulation.ledger.window.void:
        return 0.0
    for change in accumulation.extensions.scale:
        scale = change(scale)
    return scale


@without_grad
def count_added(accumulation: Accumulation, slot: Slot, announced: bool = True) -> None:
    """Within a pass: a layer has added a gradient to the slot's buffer, scaled as the open window
    needs it. ``announced``: True if an extension has made the buffer ready for that.
    """
    sums = accumulation.sums
    if not announced:
        sums.changed(None)  # the block's version does not tell which
        sums.set_by_others([slot])
        if accumulation.ledger.window.void:  # it will not be applied: nothing more is added
            slot.buffer.zero_()
    accumulation.ledger.micro.adds += 1
    sums.written([slot], 1.0)
    if measures(accumulation):
        _measured(accumulation, slot.ops.stats([slot.buffer], backend=sums.backend), [slot], 1.0)


def _measured(accumulation: Accumulation, stats: ops.Stats, slots: Sequence[Slot], divisor: Scalar) -> None:
    """Keep ``stats`` of the buffers of ``slots``, which the micro-batch was the last to write."""
    accumulation.sums.norms.record(stats, slots, divisor)
    accumulation.ledger.micro.counts.append(stats.nonfinite)


def count_nonfinite(accumulation: Accumulation) -> None:
    """Add up what the adds have counted as not finite. Waits for adds that end late."""
    for late in accumulation.sums.buffers.ops:
        late.finish_adds()
    micro = accumulation.ledger.micro
    by_device: dict[torch.device, list[Tensor]] = {}
    for count in micro.counts:
        by_device.setdefault(count.device, []).append(count)
    for counts in by_device.values():
        found = counts[0] if len(counts) == 1 else torch.stack(counts).sum()
        micro.nonfinite = add_scalars(micro.nonfinite, found)
    micro.counts = []


def _room_for_stats(slot: Slot) -> ops.Stats:
    new = functools.partial(torch.empty, (), device=slot.device)  # no kernels that fill with zeros what is overwritten
    return ops.Stats(new(dtype=widest(slot.device)), new(dtype=torch.int64))


def one_call_each(
    slots: Sequence[Slot], grads: Sequence[Tensor], measure: bool
) -> Iterator[tuple[tuple, Sequence[Slot], Sequence[Tensor]]]:
    """Each call that an add takes: ``(device, first touch, ...)``, its slots and gradients.

    ``measure``: norms are taken, which ranks add up only for parts that are laid out alike.
    """
    calls: dict[tuple, list[int]] = {}
    for i in range(1 if _agree(slots) else len(slots)):  # where they agree, the first stands for all
        slot, first = slots[i], slots[i].shown is None
        # After normalize_(), parameters that no pass has reached since still hold a mean.
        divisor, layout = None if first else identity(slot.divisor), slot.layout if measure else None
        kind = (slot.half_precision, slot.ops, slot.averaged_by, slot.part is None)
        key = (slot.made_for.device, first, kind, divisor, layout)
        calls.setdefault(key, []).append(i)
    if len(calls) == 1:  # as nearly always
        yield next(iter(calls)), slots, grads
        return
    for key, members in calls.items():
        yield key, [slots[i] for i in members], [grads[i] for i in members]


def _agree(slots: Sequence[Slot]) -> bool:
    """True if they agree in all that the calls differ in, as nearly always."""
    one, first = slots[0], slots[0].shown is None
    for slot in slots:
        if slot.block is not one.block or slot.divisor is not one.divisor or (slot.shown is None) is not first:
            return False
    return one.part is None
