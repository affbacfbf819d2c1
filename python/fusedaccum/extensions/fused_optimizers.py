"""Fused optimizers divide gradients, and skip steps, in their own pass, so that we need none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.buffers import Slot
from ..core.extension import Extension, InnerScaling
from ..inner import SAYS_SO, scales_gradients
from ..scalars import Scalar, div, identity, to_device_of

if TYPE_CHECKING:
    from ..core.apply import Conclusion


class FusedOptimizers(Extension):
    """Leaves it to such an inner optimizer to divide, clip, and skip what is not to be applied."""

    def inner_scales(self, end: Conclusion) -> InnerScaling | None:
        inner: Any = self.inner
        # Where it does not say so, as nearly always, this takes no call.
        if not (hasattr(inner, SAYS_SO) and scales_gradients(inner) and _alike(end.slots)):
            return None
        applied: bool | Tensor = True
        if isinstance(end.skip, Tensor) and all(inner.state.get(slot.param) for slot in end.slots):
            # Where each rank steps a part of the parameters, a skip depends on all of them.
            applied = ~end.skip if self.accumulation.sums.over_owners is None else True
        decides = isinstance(applied, Tensor)
        divides = not any(slot.rounded for slot in end.slots)
        return InnerScaling(applied, self._scaled(end, decides, divides), divides)

    @contextmanager
    def _scaled(self, end: Conclusion, decides: bool, divides: bool) -> Iterator[None]:
        """In the block, the optimizer uses ``grad_scale`` if it ``divides``, ``found_inf`` if it
        ``decides``.
        """
        inner: Any = self.inner
        device, divisor = end.slots[0].stepped.device, end.slots[0].divisor
        try:
            scale = div(end.divisor, to_device_of(end.coef, divisor) * divisor) if divides else None
            inner.grad_scale = None if scale is None else _fp32_on(scale, device)
            inner.found_inf = _fp32_on(end.skip, device) if decides else None
            yield
        finally:
            for name in ("grad_scale", "found_inf"):
                vars(inner).pop(name, None)


def _alike(slots: list[Slot]) -> bool:
    """True if one ``grad_scale``, a number in FP32, does for these gradients."""
    return (
        len({(identity(slot.divisor), slot.stepped.device) for slot in slots}) == 1
        and all(slot.dtype == slot.stepped.dtype and slot.device == slot.stepped.device for slot in slots)
        and all(slot.dtype.itemsize <= 4 for slot in slots)  # grad_scale is FP32: too coarse for FP64
        and not any(slot.part is not None for slot in slots)  # grad_scale is no such tensor
    )


def _fp32_on(value: Scalar, device: torch.device) -> Tensor:
    """``value`` as a fused optimizer takes it. A number is filled in without waiting for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=torch.float32, device=device)
