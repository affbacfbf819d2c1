"""What ``torch.amp.GradScaler`` tells an optimizer, and what the window has to know about it.

A gradient that comes from ``scaler.scale(loss)`` carries the loss scale of its micro-batch, and the scale may change after
every ``scaler.update()``. The scaler gives an optimizer its scale only inside ``scaler.step()``, after backward: too late
for the add. But it computes ``scale * getattr(optimizer, "grad_scale", 1)``, so an object found there gets the scaler's own scale
tensor, which ``update()`` changes in place: from then on the scale in force can be read before every add, on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..extension import ScaleNews
from ..scalars import Scalar, div, to_device_of, widest

if TYPE_CHECKING:
    from ..extension import Extensions
    from .window import Window


class LossScale:
    """The loss scale in force, as far as a scaler has shown it.

    Attributes:
        live: the scaler's own scale tensor; None before its first ``step()``, a copy between a checkpoint and the next plain ``step()``.
        through_scaler: was the ``step()`` that is running called by a scaler?
        unscaled: has the user called ``scaler.unscale_(optimizer)`` before it?
        saw_rejected: did ``unscale_()`` and the scaler's check for overflows see a rejected micro-batch's gradient instead of the sums?
    """

    def __init__(self) -> None:
        self.live: Tensor | None = None
        self._taken_for: Scalar | None = None  # what adds took the scale to be, if another scaler calls this step()
        self.through_scaler = self.unscaled = self.saw_rejected = self._copied = False

    @property
    def _unseen(self) -> bool:
        """Has a checkpoint's scaler ended a micro-batch without showing its current scale?"""
        return self._copied and self.unscaled

    def forget_step(self) -> None:
        if self._unseen:
            self.live = None
        self.through_scaler = self.unscaled = self.saw_rejected = False
        self._taken_for = None

    def __rmul__(self, scale: Tensor) -> Tensor:
        """``scale * optimizer.grad_scale``, as GradScaler.step() computes it: keeps the tensor, changes nothing."""
        if scale is not self.live:
            self._taken_for = self.now()
        self.live, self._copied = scale, False
        return scale

    def load(self, saved: Tensor | None) -> None:
        """Continue with a checkpoint's scale. Its scaler has not been seen yet, so what ``update()`` changes there does not show here."""
        self.live, self._copied = None if saved is None else saved.clone(), True

    def lower(self, least: float) -> None:
        """Set the scaler's scale to ``least``, as other ranks do. (Not a checkpoint's, whose scaler has not been seen yet.)"""
        if self.live is not None and not self._copied:
            self.live.fill_(least)

    def rescale(self, window: Window) -> Scalar:
        """What to multiply the sums of ``window`` by, so that they carry the scale that ``unscale_()`` divides by now."""
        if self.live is None or window.unit is None:
            return 1.0
        factor = self.live / to_device_of(window.unit, self.live)
        window.unit = self.now()
        return factor

    def now(self) -> Scalar | None:
        """A copy of the scale in force, if known: a number if it is on the CPU, else FP64, so that FP64 sums can be divided by it."""
        if self.live is None:
            return None
        if self.live.device.type == "cpu":
            return self.live.item()
        return self.live.detach().to(widest(self.live.device), copy=True)

    def step_without_scaler(self, window: Window | None, extensions: Extensions) -> None:
        """``step()`` was not called by a scaler: the gradients of ``window`` carry no loss scale."""
        if self.live is None:
            return
        if window is not None and not window.empty:
            raise RuntimeError(
                "opt.step() was called in a window that began with scaler.step(opt), or after one, so its micro-batches should carry a "
                "loss scale; step all of them through the scaler, or call opt.reset() first to go on without it"
            )
        self.live = None
        if window is not None:
            window.unit = None
            extensions.tell_scale(ScaleNews.NONE)

    def step_by_scaler(self, window: Window, extensions: Extensions, one_step: bool) -> None:
        """``step()`` was called by a scaler: the scale that the sums and losses of ``window`` carry is known now, or never will be.

        ``one_step``: is this the window's first, so that all of it carries one scale?

        Raises:
            RuntimeError: the window's steps before were not called by a scaler, or by another one, of another scale.
        """
        live = self.now()
        if live is None:  # unscaled before we first saw the scaler
            window.unit, window.unit_lost = 1.0, True
            extensions.tell_scale(ScaleNews.UNKNOWN)
        elif self.unscaled and not self.saw_rejected:
            window.unit = 1.0 if window.unit is None else window.unit / live
        elif window.unit is None:
            if not one_step:
                raise RuntimeError(
                    "scaler.step(opt) was called in a window that began with opt.step(), so its first micro-batches carry no loss scale; "
                    "step all of them through the scaler, or call opt.reset() first"
                )
            window.unit = live
            extensions.tell_scale(ScaleNews.KNOWN, live)
        elif self._taken_for is not None and float(live) != float(self._taken_for):
            if not one_step:
                raise RuntimeError(
                    f"the GradScaler that calls step() has the scale {float(live):g}, but the window began under another one, whose scale "
                    f"is {float(self._taken_for):g}; call opt.reset(), and replace a GradScaler only between windows (a resumed run has to "
                    "load its scaler's state, too)"
                )
            ratio = div(live, self._taken_for)  # by which the sums carry more than the adds assumed
            window.unit = to_device_of(window.unit, ratio) * ratio
            extensions.tell_scale(ScaleNews.ANOTHER)
        window.unit_lost = window.unit_lost or self._unseen

    def scaler_sets(self, grad_scale: object, rejected_shown: bool) -> None:
        """``optimizer.grad_scale = ...``, by GradScaler.step(): our own object, or None, if the gradients are unscaled already."""
        self.through_scaler, self.saw_rejected = True, rejected_shown
        self.unscaled = grad_scale is self or grad_scale is None
