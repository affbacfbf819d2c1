"""What ``torch.amp.GradScaler`` tells an optimizer, and what the window has to know of it.

A gradient that comes from ``scaler.scale(loss)`` carries the loss scale of its micro-batch, and the scale may change after
every ``scaler.update()``. The scaler gives an optimizer its scale only inside ``scaler.step()``, after backward: too late
for the add. But it computes ``scale * getattr(optimizer, "grad_scale", 1)``, so an object found there is handed the scaler's own
scale tensor, which ``update()`` changes in place: from then on the scale in force can be read before every add, on the device.
"""

from __future__ import annotations

from torch import Tensor


class LossScale:
    """The loss scale in force, as far as a scaler has shown it.

    Attributes:
        live: the scaler's own scale tensor, or None before its first ``step()``.
        through_scaler: is the ``step()`` being run called by a scaler?
        unscaled: has the user called ``scaler.unscale_(optimizer)`` before it?
    """

    def __init__(self) -> None:
        self.live: Tensor | None = None
        self.forget_step()

    def forget_step(self) -> None:
        self.through_scaler = self.unscaled = False

    def __rmul__(self, scale: Tensor) -> Tensor:
        """``scale * optimizer.grad_scale``, as GradScaler.step() computes it: keeps hold of the tensor, changes nothing."""
        self.live = scale
        return scale

    def told(self, grad_scale: object) -> None:
        """``optimizer.grad_scale = ...`` by GradScaler.step(): our own object back when the gradients are unscaled already."""
        self.through_scaler = True
        self.unscaled = grad_scale is self or grad_scale is None
