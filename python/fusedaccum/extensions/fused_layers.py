"""Layers whose backward writes the weight's gradient into its buffer at once, scaled as the window needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from ..core import adding
from ..engine import without_grad

if TYPE_CHECKING:
    from ..core.accumulation import Accumulation

# Called with (buffer, scale, overwrite): buffer = (overwrite ? 0 : buffer) + scale * gradient.
Write = Callable[[Tensor, float, bool], None]


@without_grad
def add_by(accumulation: Accumulation, write: Write, parameter: Parameter, fits: Callable[[torch.dtype], bool]) -> bool:
    """Within a backward pass: let ``write`` add the gradient that it makes itself, once, to the parameter's buffer.

    ``fits``: tells whether ``write`` can write a buffer of this dtype. Returns False, and does nothing, if it cannot, if the gradient must
    come the ordinary way, or if its factor is 0 or not known to the host. Raises as a hook would.
    """
    slot, ledger = accumulation.sums.buffers.of[parameter], accumulation.ledger
    if not fits(slot.dtype) or not adding.takes_directly(accumulation, slot):
        return False
    with accumulation.collector.within_pass(parameter.device):
        scale = adding.contribution(accumulation, ledger.micro.factor_left())
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            return False
        scale = float(scale)
        if scale == 0:
            return False
        adding.prepare(accumulation, slot)
        try:
            write(slot.buffer, scale, slot.shown is None)
            adding.count_added(accumulation, slot)
        except BaseException:  # Ctrl-C comes when the product has been written
            ledger.micro.adds += accumulation.sums.half_written
            raise
        adding.tell_arrived(accumulation, [slot])
    return True
