"""Whose gradients a wrapper accumulates: parameters are hooked, and have one wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from ..engine import recording
from .buffers import Slot
from .config import check_parameter

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


def named(accumulation: Accumulation, groups: Sequence[dict[str, Any]]) -> dict[Parameter, str]:
    """The parameters in the groups, each once: a tied one may be in its group twice."""
    found: dict[Parameter, str] = {}
    model = {slot.stepped: slot.param for slot in accumulation.sums.buffers.slots}  # the inner optimizer may be at work
    for g, group in enumerate(groups):
        names = group.get("param_names", [])
        if len(names) != len(group["params"]):  # other code has changed only one of the two
            names = [f"param_groups[{g}]['params'][{i}]" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            found.setdefault(model.get(p, p), name)
    return found


def new(
    accumulation: Accumulation, groups: Sequence[dict[str, Any]], anew: bool = False
) -> list[tuple[str, Parameter]]:
    """The parameters in the groups that are not known yet, with names. Raises ValueError for one
    whose gradients cannot be taken.

    ``anew``: they may have been a wrapper's, or are copies of such.
    """
    found = [(name, p) for p, name in named(accumulation, groups).items() if p not in accumulation.sums.buffers.of]
    for name, p in found:
        other = accumulation_of(p)
        check_parameter(name, p, other is not None and other.sums.shows(p))
        for check in accumulation.extensions.check_parameter:
            check(name, p, anew or other is not None)
    return found


def hook(accumulation: Accumulation, new: Sequence[Slot]) -> None:
    """Take the gradients of these slots from now on; earlier ones are in buffers, or gone."""
    for changed in accumulation.extensions.parameters_changed:
        changed(new)
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
    for changed in accumulation.extensions.parameters_changed:
        changed([])
    accumulation.sums.buffers.free()
