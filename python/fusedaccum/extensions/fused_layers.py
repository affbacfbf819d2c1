"""Layers whose backward writes the weight's gradient into its buffer, scaled for the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import ops
from ..core import adding, grad_views
from ..engine import without_grad
from ..scalars import identity

if TYPE_CHECKING:
    from ..core.accumulation import Accumulation
    from ..core.buffers import Slot

# Called with (buffer, scale, overwrite): buffer = (overwrite ? 0 : buffer) + scale * gradient.
Write = Callable[[Tensor, float, bool], None]


@without_grad
def add_by(accumulation: Accumulation, write: Write, parameter: Parameter, fits: Callable[[torch.dtype], bool]) -> bool:
    """Within a pass: let ``write`` add the gradient that it makes, once, to the parameter's buffer.

    ``fits``: tells whether ``write`` can write a buffer of this dtype. Returns False, and does
    nothing, if it cannot, if the gradient must come the ordinary way, or if its factor is 0 or not
    known to the host. Raises as a hook would.
    """
    slot, ledger = accumulation.sums.buffers.of[parameter], accumulation.ledger
    if not fits(slot.dtype) or not _takes_directly(accumulation, slot):
        return False
    with accumulation.collector.within_pass(parameter.device):
        scale = adding.contribution(accumulation, ledger.micro.factor_left())
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            return False
        scale = float(scale)
        if scale == 0:
            return False
        _prepare(accumulation, slot)
        try:
            write(slot.buffer, scale, slot.shown is None)
            adding.count_added(accumulation, slot)
        except BaseException:  # Ctrl-C comes when the product has been written
            ledger.micro.adds += accumulation.sums.half_written
            raise
        adding.tell_arrived(accumulation, [slot])
    return True


def _takes_directly(accumulation: Accumulation, slot: Slot) -> bool:
    """True if the running pass has a gradient for ``p.grad`` that may be added unseen, for good."""
    seen_whole = accumulation.judge is not None or slot.half_precision or slot.ops is not ops or slot.part is not None
    micro = accumulation.ledger.micro
    again = micro is not None and micro.repeatable
    return not (seen_whole or again) and accumulation.collector.accumulates(slot)


def _prepare(accumulation: Accumulation, slot: Slot) -> None:
    """A layer is about to write the slot's buffer.

    If ``slot.shown`` is not None, it then holds the window's plain sum.
    """
    sums = accumulation.sums
    for about_to_add in accumulation.extensions.adding:
        about_to_add([slot])
    sums.place([slot])
    grad_views.adopt(sums, slot)
    sums.check_whole()
    if slot.shown is not None and identity(slot.divisor) != 1.0:
        sums.divide_([slot], 1.0)  # normalize_() has made it a mean
