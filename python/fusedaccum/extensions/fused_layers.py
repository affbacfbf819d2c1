"""Layers whose backward writes the weight's gradient into its buffer at once, scaled as the window needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

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
    if not fits(slot.dtype) or not accumulation.takes_directly(slot):
        return False
    with accumulation.within_pass(parameter.device):
        scale = accumulation.accumulator.contribution(ledger.micro.factor_left())
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            return False
        scale = float(scale)
        if scale == 0:
            return False
        accumulation.prepare(slot)
        try:
            write(slot.buffer, scale, slot.shown is None)
            accumulation.count_added(slot)
        except BaseException:  # Ctrl-C comes when the product has been written
            ledger.micro.adds += accumulation.sums.half_written
            raise
        accumulation.tell_arrived([slot])
    return True
