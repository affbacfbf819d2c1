"""What is reported of a closed window: mostly what features have found, each under its own name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True)
class LastWindow:
    """What is known about the last closed window.

    Reading a tensor's value waits for its device; nothing else here does.

    Attributes:
        micro_batches: how many it holds (a dropped one counts for nothing).
        weight: 0-d tensor, the sum of their weights.
        grad_norm: 0-d tensor, 2-norm of the window's gradient before clipping (not finite if a
            GradScaler found an overflow), or None if nothing asked for it.
        nonfinite: 0-d tensor, micro-batches in which a value was not finite, dropped ones included;
            None if nothing checked.
        applied: 0-d bool tensor, True if the inner optimizer has applied it.
        loss: 0-d float64 tensor, the window's loss, combined from the micro-batches' losses as its
            gradient is from their gradients (``sum(w_i * loss_i) / sum(w_i)`` for
            ``reduction="mean"``), without a loss scale. None unless every micro-batch's loss is
            known: from ``opt.backward(loss)``, a closure, or ``opt.record_loss(loss)``.
        norm_limit: 0-d float64 tensor, what ``skip_norm=TimesMean(...)`` compared the norm with;
            None without it.
        noise_scale: 0-d float64 tensor, the simple gradient noise scale in units of the weights,
            averaged over windows; infinite while the gradient is hidden in the noise; None unless
            ``noise_scale=`` asked for it and a window has been long enough to measure it.
    """

    micro_batches: int
    weight: Tensor
    grad_norm: Tensor | None
    nonfinite: Tensor | None
    applied: Tensor
    loss: Tensor | None
    noise_scale: Tensor | None
    norm_limit: Tensor | None = None

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """Everything known about the window as numbers, for a log.

        ``writer.add_scalar(*item, step)`` for each, ``wandb.log(...)``. Waits for the device, once
        for each value that is on it. ``prefix`` is put before every name.
        """
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return {prefix + name: float(value) for name, value in known.items() if value is not None}
