"""Applying a window's gradient: finish it in ``p.grad``, or leave scaling to a fused optimizer, and step with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..scalars import Scalar, div, identity, to_device_of
from .accumulation import Accumulation
from .buffers import Slot
from .closures import Evaluated
from .conclusion import Conclusion
from .extension import Extensions
from .guard import is_patched


def fp32_on(value: Scalar, device: torch.device) -> Tensor:
    """``value`` as a fused optimizer takes it; a number is filled in by a kernel, without waiting for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=torch.float32, device=device)


def apply(end: Conclusion, inner: Any, accumulation: Accumulation) -> bool | Tensor:
    """Step the inner optimizer with the window's gradient, unless that is to be skipped. Returns whether it was applied.

    May be called again when the inner optimizer, or an extension after it, has raised.
    """
    if end.applied is False:
        end.applied = step_all(end, inner, accumulation)
    if end.applied is not False:
        tell_stepped(end, accumulation.extensions)
    return end.applied


def tell_stepped(end: Conclusion, extensions: Extensions) -> None:
    for stepped in extensions.stepped:
        stepped(end.slots)


def step_all(end: Conclusion, inner: Any, accumulation: Accumulation) -> bool | Tensor:
    """All of :func:`apply`, except telling the extensions that it has stepped."""
    sums, extensions = accumulation.sums, accumulation.extensions

    def others_may_have_written(slots: Sequence[Slot]) -> None:
        for may_have_written in extensions.others_may_have_written:
            may_have_written(slots)

    fused = not end.finished and inner_scales(inner, end.slots)
    decided_there = fused and isinstance(end.skip, Tensor) and all(inner.state.get(slot.param) for slot in end.slots)
    decided_there = decided_there and sums.over_owners is None  # else it depends on what each rank steps
    if not decided_there and bool(end.skip):
        return False
    others_may_have_written(())
    if not fused and not end.finished:
        sums.finish_(end.slots, end.divisor, end.coef)
        end.finished = True
    # If each rank steps a part, all must ask, even those that cast nothing.
    cast = [] if fused else [slot for slot in end.slots if slot.stepped.dtype == torch.float16]
    if not all(finished(cast) for finished in extensions.finished):
        return False
    applied = ~end.skip if decided_there and isinstance(end.skip, Tensor) else True

    def pre_hooks_have_run() -> None:
        others_may_have_written(end.slots)
        if end.closure is not None:
            end.closure.begin(inner)

    def post_hooks_follow() -> None:  # which look at the model, and may raise
        end.applied = applied
        tell_stepped(end, extensions)

    try:
        if fused:
            # It divides by grad_scale, and heeds found_inf, in its own pass over the gradients.
            device = end.slots[0].stepped.device
            divisor = end.slots[0].divisor
            grad_scale = div(end.divisor, to_device_of(end.coef, divisor) * divisor)
            inner.grad_scale = fp32_on(grad_scale, device)
            inner.found_inf = fp32_on(end.skip, device) if decided_there else None
        with extensions.inner_steps(end.slots):
            with among_hooks(inner, pre_hooks_have_run, post_hooks_follow):
                step(inner, end, extensions)
                end.applied = applied
            others_may_have_written(())
    finally:
        for name in ("grad_scale", "found_inf") if fused else ():
            vars(inner).pop(name, None)
    return applied


@contextmanager
def among_hooks(
    inner: Optimizer, pre_hooks_have_run: Callable[[], None], post_hooks_follow: Callable[[], None]
) -> Iterator[None]:
    """In the block, ``inner.step()`` calls the first after its step pre-hooks and the second before its post-hooks, if it has any."""
    handles = []
    calls_hooks = hasattr(inner, "_optimizer_step_post_hooks")  # one that hands all to another optimizer need not
    if calls_hooks and (inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks):
        handles.append(inner.register_step_pre_hook(lambda *_: pre_hooks_have_run()))
    if calls_hooks and (inner._optimizer_step_post_hooks or _global_optimizer_post_hooks):
        handles.append(inner.register_step_post_hook(lambda *_: post_hooks_follow()))
        inner._optimizer_step_post_hooks.move_to_end(handles[-1].id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def step(inner: Optimizer, end: Conclusion, extensions: Extensions) -> None:
    """One step of the inner optimizer, in one call if no extension needs several."""
    for step_inner in extensions.step_inner:
        if step_inner(end, functools.partial(step_once, inner, end.closure)):
            return
    step_once(inner, end.closure)


def step_once(inner: Optimizer, closure: Evaluated | None) -> None:
    if closure is None:
        inner.step()
    else:
        closure.begin(inner)
        inner.step(closure)


def inner_scales(inner: Optimizer, slots: list[Slot]) -> bool:
    """Can the inner optimizer scale the gradients itself? Not if a step pre-hook, or a step() around PyTorch's, sees them first."""
    return (
        # Its own attribute: an optimizer that shows another one's would not hand grad_scale on to that.
        vars(inner).get("_step_supports_amp_scaling", getattr(type(inner), "_step_supports_amp_scaling", False))
        and all(group.get("fused") for group in inner.param_groups)
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
