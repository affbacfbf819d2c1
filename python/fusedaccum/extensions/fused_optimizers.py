"""Fused optimizers divide gradients, and skip a step, in their own pass over them, so that no pass of ours is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks

from ..core.buffers import Slot
from ..core.extension import Extension, InnerScaling
from ..inner import is_patched
from ..scalars import Scalar, div, identity, to_device_of

if TYPE_CHECKING:
    from ..core.apply import Conclusion

# PyTorch's attribute of optimizers whose step() divides by their grad_scale.
SAYS_SO = "_step_supports_amp_scaling"


class FusedOptimizers(Extension):
    """Leaves it to such an inner optimizer to divide and clip, and to skip what is not to be applied."""

    def inner_scales(self, end: Conclusion) -> InnerScaling | None:
        inner: Any = self.inner
        if not (scales_gradients(inner) and _alike(end.slots)):
            return None
        applied: bool | Tensor = True
        if isinstance(end.skip, Tensor) and all(inner.state.get(slot.param) for slot in end.slots):
            # Where each rank steps a part of the parameters, what is skipped depends on all of them.
            applied = ~end.skip if self.accumulation.sums.over_owners is None else True
        return InnerScaling(applied, self._scaled(end, isinstance(applied, Tensor)))

    @contextmanager
    def _scaled(self, end: Conclusion, decides: bool) -> Iterator[None]:
        """A block in which the optimizer divides by ``grad_scale``, and, where it decides, heeds ``found_inf``."""
        inner: Any = self.inner
        device, divisor = end.slots[0].stepped.device, end.slots[0].divisor
        try:
            inner.grad_scale = _fp32_on(div(end.divisor, to_device_of(end.coef, divisor) * divisor), device)
            inner.found_inf = _fp32_on(end.skip, device) if decides else None
            yield
        finally:
            for name in ("grad_scale", "found_inf"):
                vars(inner).pop(name, None)


def scales_gradients(inner: Optimizer) -> bool:
    """True if a fused inner optimizer scales gradients itself, and no step pre-hook, or step() around PyTorch's, sees them first."""
    kind = type(inner)
    # Its own attribute: an optimizer that shows another one's would not hand grad_scale on to that.
    return (
        vars(inner).get(SAYS_SO, getattr(kind, SAYS_SO, False))
        and all(group.get("fused") for group in inner.param_groups)
        and (str(kind.step.__module__).startswith("torch.optim.") or SAYS_SO in vars(kind))
        and not is_patched(inner)
        and not (inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
    )


def _alike(slots: list[Slot]) -> bool:
    """True if one ``grad_scale``, a number in FP32, does for these gradients."""
    return (
        len({(identity(slot.divisor), slot.stepped.device) for slot in slots}) == 1
        and all(slot.dtype == slot.stepped.dtype and slot.device == slot.stepped.device for slot in slots)
        and all(slot.dtype.itemsize <= 4 for slot in slots)  # grad_scale is FP32: too coarse for FP64
        and not any(slot.part is not None for slot in slots)  # grad_scale is no such tensor
    )


def _fp32_on(value: Scalar, device: torch.device) -> Tensor:
    """``value`` as a fused optimizer takes it; a number is filled in by a kernel, without waiting for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=torch.float32, device=device)
