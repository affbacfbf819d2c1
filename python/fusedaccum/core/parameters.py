"""Whose gradients a wrapper accumulates: parameters are hooked, and belong to one wrapper at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from ..engine import recording
from .buffers import Slot

if TYPE_CHECKING:
    from .accumulation import Accumulation

_ACCUMULATION_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to an Accumulation


def accumulation_of(parameter: Tensor) -> Accumulation | None:
    """The one that accumulates this parameter's gradients, if any."""
    accumulation = _ACCUMULATION_OF.get(parameter)
    return None if accumulation is None else accumulation()


def add(accumulation: Accumulation, parameters: Iterable[tuple[str, Parameter]]) -> None:
    """Accumulate the gradients of these parameters, too, from now on. Raises as extensions do."""
    buffers = accumulation.sums.buffers
    before = list(buffers.slots)
    slots = buffers.add(parameters)
    try:
        for come in accumulation.extensions.parameters_come:
            come(slots, False)
    except Exception:
        buffers.replace(before)
        raise
    hook(accumulation, slots)


def hook(accumulation: Accumulation, new: Sequence[Slot]) -> None:
    """Take the gradients of these slots from now on; all that there are have been added to the buffers, or removed."""
    _tell_changed(accumulation, new)
    with recording():
        for slot in new:
            accumulation.collector.hook(slot)
            _ACCUMULATION_OF[slot.param] = accumulation.reference
    accumulation.collector.size_buckets(accumulation.sums.buffers.slots, shared=not accumulation.ranks.alone)
    for added in accumulation.extensions.parameters_added:
        added(new)


def unhook(accumulation: Accumulation, slots: Iterable[Slot]) -> None:
    """Leave the gradients of these slots alone from now on."""
    for slot in slots:
        accumulation.collector.unhook(slot)
        del _ACCUMULATION_OF[slot.param]


def let_go(accumulation: Accumulation) -> None:
    """Have no parameters any more; the open window is dropped. Comes after ``end_open_pass()``."""
    accumulation.collector.drop()
    accumulation.ledger.drop_window()
    accumulation.sums.begin()  # the gradient that a closed window has left in p.grad is gone
    unhook(accumulation, accumulation.sums.buffers.slots)
    accumulation.sums.buffers.replace([])
    _tell_changed(accumulation, [])
    accumulation.sums.buffers.free()


def _tell_changed(accumulation: Accumulation, new: Sequence[Slot]) -> None:
    for changed in accumulation.extensions.parameters_changed:
        changed(new)
