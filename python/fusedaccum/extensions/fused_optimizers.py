"""Fused optimizers divide gradients, and skip a step, in their own pass over them, so that no pass of ours is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ..core.buffers import Slot
from ..core.extension import Extension
from ..inner import is_patched
from ..scalars import Scalar, div, identity, to_device_of

if TYPE_CHECKING:
    from ..core.apply import Conclusion
    from ..core.config import Settings


def scales_at_all(settings: Settings, inner: Optimizer) -> bool:
    """True if the optimizer says that it divides by its ``grad_scale``."""
    # Its own attribute: an optimizer that shows another one's would not hand grad_scale on to that.
    return bool(
        vars(inner).get("_step_supports_amp_scaling", getattr(type(inner), "_step_supports_amp_scaling", False))
    )


class FusedOptimizers(Extension):
    """Leaves it to such an inner optimizer to divide and clip, and to skip what is not to be applied."""

    def __init__(self) -> None:
        self._scaled: tuple[Conclusion, bool] | None = (
            None  # what is stepped next, and whether the device decides if it is
        )

    def inner_scales(self, end: Conclusion) -> bool | Tensor | None:
        self._scaled = None
        if not _scales(self.inner, end.slots):
            return None
        decided_there = isinstance(end.skip, Tensor) and all(self.inner.state.get(slot.param) for slot in end.slots)
        # Where each rank steps a part of the parameters, it depends on all of them.
        decided_there = decided_there and self.accumulation.sums.over_owners is None
        self._scaled = end, decided_there
        return ~end.skip if decided_there and isinstance(end.skip, Tensor) else True

    @contextmanager
    def stepping(self, slots: Sequence[Slot], call: FrameType) -> Iterator[None]:
        if self._scaled is None or self._scaled[0].slots is not slots:
            yield
            return
        (end, decided_there), inner = self._scaled, vars(self.inner)
        device, divisor = slots[0].stepped.device, slots[0].divisor
        inner["grad_scale"] = _fp32_on(div(end.divisor, to_device_of(end.coef, divisor) * divisor), device)
        inner["found_inf"] = _fp32_on(end.skip, device) if decided_there else None
        try:
            yield
        finally:
            self._scaled = None
            for name in ("grad_scale", "found_inf"):
                inner.pop(name, None)


def _scales(inner: Any, slots: list[Slot]) -> bool:
    """Can the inner optimizer scale these gradients itself? Not if a step pre-hook, or a step() around PyTorch's, sees them first."""
    return (
        all(group.get("fused") for group in inner.param_groups)
        and (
            type(inner).step.__module__.startswith("torch.optim.") or "_step_supports_amp_scaling" in vars(type(inner))
        )
        and not is_patched(inner)
        and not (inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
        and len({(identity(slot.divisor), slot.stepped.device) for slot in slots}) == 1
        and all(slot.dtype == slot.stepped.dtype for slot in slots)
        and all(slot.dtype.itemsize <= 4 for slot in slots)  # grad_scale is FP32: too coarse for FP64
        and not any(slot.part is not None for slot in slots)  # grad_scale is no such tensor
    )


def _fp32_on(value: Scalar, device: torch.device) -> Tensor:
    """``value`` as a fused optimizer takes it; a number is filled in by a kernel, without waiting for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=torch.float32, device=device)
