"""Losses of the open micro-batch, or of the one counted last, recorded for ``last_window.loss``."""

from __future__ import annotations

from ..scalars import Scalar, mul, to_device_of
from .amp import LossScale
from .ledger import Ledger
from .window import Loss

LOST = -1  # for Window.losses, which then stays below the micro-batches: the window's loss is unknown for good


class Losses:
    """Records losses in a ledger's windows, weighted as their gradients are, and takes off a GradScaler's factor.

    Args:
        loss_scale: that factor, once a scaler has shown it.
    """

    def __init__(self, ledger: Ledger, loss_scale: LossScale):
        self._ledger, self._scale = ledger, loss_scale

    @property
    def lacking(self) -> bool:
        """Is the loss of the micro-batch that is open, or was counted last, still missing?"""
        ledger = self._ledger
        if ledger.has_micro:
            return ledger.micro.loss is None
        return ledger.has_window and ledger.window.unrecorded is not None

    def record(self, loss: Scalar, by_backward: bool) -> None:
        """Record a loss. ``by_backward``: it is what opt.backward() got, with a loss scale if there is one.

        Raises RuntimeError if no micro-batch is missing its loss, or if only a part of it comes from opt.backward().
        """
        ledger, live = self._ledger, self._scale.live if by_backward else None
        raw = by_backward and live is None
        if live is not None:
            loss = loss / to_device_of(live, loss)
        if ledger.has_micro:
            micro = ledger.micro
            if micro.loss is not None and by_backward is not micro.loss_by_backward:
                raise RuntimeError(
                    "opt.backward() records a micro-batch's loss; leave record_loss() out, or call loss.backward()"
                )
            part = _of(mul(micro.factor, loss), raw)
            micro.loss = part if micro.loss is None else micro.loss + part
            micro.loss_by_backward = by_backward
        elif ledger.has_window and ledger.window.unrecorded is not None:
            ledger.window.record(_of(mul(ledger.window.unrecorded, loss), raw))
            ledger.window.unrecorded = None
        else:
            raise RuntimeError(
                "record_loss() found no micro-batch that lacks its loss; call it once per micro-batch, after its backward and before "
                "step() (opt.backward(loss) needs no such call)"
            )

    def scale_is(self, loss_scale: Scalar) -> None:
        """The loss scale of losses that carried an unknown one is this."""
        window = self._ledger.window
        window.loss = window.loss.unscaled(loss_scale)
        micro = self._ledger.micro if self._ledger.has_micro else None
        if micro is not None and micro.loss is not None:
            micro.loss = micro.loss.unscaled(loss_scale)

    def scale_stays_unknown(self) -> None:
        """The loss scale that losses may carry will not become known."""
        window = self._ledger.window
        if window.loss.may_carry_scale:
            window.losses = LOST
        micro = self._ledger.micro if self._ledger.has_micro else None
        if micro is not None and micro.loss is not None and micro.loss.may_carry_scale:
            micro.loss = None

    def scale_was_another(self) -> None:
        """What has been recorded since the last step() may have been divided by a loss scale that it did not carry."""
        if self._ledger.window.losses:
            self._ledger.window.losses = LOST
        self.there_is_no_scale()

    def there_is_no_scale(self) -> None:
        """The open micro-batch's loss, if opt.backward() got it, was divided by a loss scale that it did not carry."""
        if self._ledger.has_micro and self._ledger.micro.loss_by_backward:
            self._ledger.micro.loss = None


def _of(weighed: Scalar, raw: bool) -> Loss:
    return Loss(raw=weighed) if raw else Loss(weighed)
