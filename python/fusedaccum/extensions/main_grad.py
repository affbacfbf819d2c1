"""Layers that add gradients to a buffer themselves: Megatron-LM's and TransformerEngine's protocol.

The owner of the buffers marks a parameter with ``grad_added_to_main_grad = False`` and lends it a
buffer, ``main_grad``. In backward the layer adds the weight's gradient there, sets the mark, and
gives autograd a meaningless gradient; with ``zero_out_wgrad`` it gives zeros, to which autograd may
have added a gradient from elsewhere (a tied embedding).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core import adding
from ..core.buffers import Slot, buffer_dtype, gradient_dtype
from ..core.extension import Extension
from ..inner import asked_dtype
from ..scalars import Scalar

if TYPE_CHECKING:
    from ..core.config import Settings


def is_enabled(parameter: Tensor) -> bool:
    """True if the parameter takes part in the protocol."""
    return hasattr(parameter, "grad_added_to_main_grad")


def any_enabled(settings: Settings, inner: Optimizer) -> bool:
    """True if one of the optimizer's parameters takes part."""
    return any(is_enabled(p) for group in inner.param_groups for p in group["params"])


class MainGrads(Extension):
    """Lends layers their buffers, zeroed before each window, and counts what they have added.

    Attributes:
        slots: of the parameters that take part.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        weakref.finalize(self, _withdraw, self.slots).atexit = False

    # -- parameters --------------------------------------------------------------------------------

    def check_parameter(self, name: str, parameter: Tensor, left: bool) -> None:
        if not is_enabled(parameter):
            return
        settings = self.accumulation.settings
        how = (
            f"parameter {name} has the attribute grad_added_to_main_grad, so its layer adds gradients to a buffer "
            "itself"
        )
        if settings.nonfinite in ("skip_micro_batch", "raise"):
            raise ValueError(
                f"{how}, but nonfinite={settings.nonfinite!r} must see them first; use 'skip_window', or delete the "
                "attribute and switch off the layer's gradient accumulation fusion"
            )
        asked = asked_dtype(self.inner, parameter, settings.buffer_dtype)
        if buffer_dtype(gradient_dtype(parameter), asked).itemsize < 4:
            raise ValueError(
                f"{how}, but cannot keep the running mean that 16-bit buffers hold; use buffer_dtype=torch.float32"
            )
        if settings.buffer_device is not None and parameter.device != settings.buffer_device:
            raise ValueError(
                f"{how}, but with buffer_device='cpu' the buffers are out of its reach; leave buffer_device out, or "
                "delete the attribute and switch off the layer's gradient accumulation fusion"
            )
        if getattr(parameter, "main_grad", None) is not None and not left:
            raise ValueError(
                f"{how}, but it already has a main_grad from elsewhere (Megatron-LM's DistributedDataParallel?); leave "
                "that out"
            )

    def check_shared(self) -> None:
        if self.accumulation.ledger.schedule.caller_owned:
            for slot in self.accumulation.sums.buffers.slots:
                if is_enabled(slot.param):
                    raise ValueError(
                        f"the layer of parameter {slot.name} adds to main_grad itself, and with caller-owned windows "
                        "nothing says when that has to be added up over the ranks; pass accum_steps, or switch off the "
                        "layer's gradient accumulation fusion"
                    )

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        slots = self.accumulation.sums.buffers.slots
        for slot in new:
            slot.intercepted = is_enabled(slot.param)
        _withdraw(set(self.slots).difference(slots))
        self.slots[:] = [slot for slot in slots if slot.intercepted]
        self.accumulation.sums.written_by_layers = bool(self.slots)
        self._lend([slot for slot in self.slots if not slot.placed])

    def buffers_released(self) -> None:
        self._lend(self.slots)

    def _lend(self, slots: Sequence[Slot]) -> None:
        """Give layers the buffers of ``slots`` for the next window, filled with zeros."""
        sums = self.accumulation.sums
        sums.buffers.allocate(slots)  # apart from others, whose p.grad is still shown when these are zeroed
        stale = [slot for slot in slots if not slot.prepared or was_added(slot.param)]
        if stale:
            for overwritten in self.accumulation.extensions.buffers_overwritten:
                overwritten()
            torch._foreach_zero_([slot.buffer for slot in stale])
            sums.written(stale, 1.0)
        for slot in slots:
            slot.show(None)
            slot.prepared = True
            slot.param.main_grad = slot.buffer  # type: ignore[attr-defined]
            slot.param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    # -- gradients ---------------------------------------------------------------------------------

    def check_weight(self, weight: Scalar) -> None:
        if self.slots and self.accumulation.ledger.reduction == "mean" and (isinstance(weight, Tensor) or weight != 1):
            raise ValueError(
                f"weight is {weight} and reduction='mean', but the layer of parameter {self.slots[0].name} adds its "
                "gradients to main_grad as they are; make the loss a sum over the micro-batch's items and use "
                "reduction='sum'"
            )

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        if grad is None or not slot.intercepted or not was_added(slot.param):
            return False
        with self.accumulation.collector.within_pass(slot.param.device):
            if not was_added(slot.param):  # to begin the pass has dropped a window, and zeroed this
                return False
            self._count(slot)
        return not _clear_added(slot.param)

    def adding(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.intercepted and was_added(slot.param):
                self._count(slot)

    def unfinished(self) -> str | None:
        if not any(was_added(slot.param) for slot in self.slots):
            return None
        return (
            "the previous backward pass was broken off, and what layers have added to main_grad in this one cannot be "
            "told apart from what they added then; both were dropped, and this pass is refused: call opt.reset() after "
            "an exception, then go on"
        )

    def _count(self, slot: Slot) -> None:
        """Count what a slot's layer added, times 1. Waits if a loss scale is on the device."""
        check_added(slot, float(adding.contribution(self.accumulation, 1.0)))
        adding.count_added(self.accumulation, slot, announced=False)


def was_added(parameter: Tensor) -> bool:
    """True if the layer has added a gradient that was not counted yet."""
    return bool(parameter.grad_added_to_main_grad)  # type: ignore[attr-defined]


def _clear_added(parameter: Tensor) -> bool:
    """Remove the mark; returns whether what autograd brings is a gradient nevertheless."""
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return bool(getattr(parameter, "zero_out_wgrad", False))


def _is_lent(slot: Slot) -> bool:
    """True if the slot's buffer, not one of another wrapper, is what its layer adds into."""
    return slot.placed and getattr(slot.param, "main_grad", None) is slot.buffer


def _withdraw(slots: Iterable[Slot]) -> None:
    """Stop lending: the layers then fail, instead of adding to a buffer that nothing reads."""
    for slot in slots:
        if _is_lent(slot):
            del slot.param.main_grad  # type: ignore[attr-defined]


def check_added(slot: Slot, scale: float) -> None:
    """Raises RuntimeError unless the window's sum includes ``scale`` times what a layer added."""
    how = f"the layer of parameter {slot.name} has added its gradient to main_grad"
    if scale not in (0.0, 1.0):  # 0: the window will not be applied
        raise RuntimeError(
            f"{how} unscaled, but the window needs {scale} times it: the micro-batch has a weight, or a GradScaler has "
            "changed its scale within the window; use weight 1 and one scale per window, or switch off the layer's "
            "gradient accumulation fusion"
        )
    if not _is_lent(slot):
        raise RuntimeError(
            f"{how}, which other code has replaced (Megatron-LM's DistributedDataParallel?); leave main_grad to the "
            "wrapper"
        )
    if slot.param.grad is not slot.shown or (slot.shown is None and not slot.prepared):
        raise RuntimeError(
            f"{how}, which {slot.name}.grad does not show: it was set by hand, or the previous window could not be "
            "applied; call opt.reset() before backward"
        )
    if slot.shown is not None and (isinstance(slot.divisor, Tensor) or slot.divisor != 1.0):
        raise RuntimeError(
            f"{how} after opt.normalize_(), when main_grad holds a mean; normalise a window after its last backward"
        )
