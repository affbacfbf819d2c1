"""The simple gradient noise scale: how large a batch still pays off, from norms that the adds have measured anyway.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training" (2018), arXiv:1812.06162, section 2.2
and appendix A.1: ``tr(Sigma) / |G|^2``, with G the true gradient and Sigma the covariance of one sample's. Two sums of gradients, of
a small batch and of a large one, give both, because a sum over samples of weight w has ``E|S|^2 = w^2 |G|^2 + w tr(Sigma)``. The small
one is a window when it holds its first micro-batch, the large one is the whole window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..buffers.sums import Sums
from ..scalars import Scalar, as_tensor, to_device, widened
from .ledger import Ledger
from .window import MicroBatch, Window


@dataclass(frozen=True)
class Measured:
    """A sum of weighted gradients: ``E[sq_norm] = square |G|^2 + weight tr(Sigma)``. Or several sums, with each attribute added up.

    Attributes:
        sq_norm: squared norm of the sum. weight: of what it holds. square: the weight's square.
    """

    sq_norm: Scalar
    weight: Scalar
    square: Scalar


def measure_small(window: Window, micro: MicroBatch, sums: Sums) -> None:
    """Note the norm of the one micro-batch in the window, as its adds have taken it: this rank's, because no sums have been sent yet.

    With FSDP2's shards, one micro-batch of each rank, whose squares are summed over the ranks that hold parts: these call it together.
    """
    unit, slots = 1.0 if window.unit is None else window.unit, sums.slots_with_grad()
    sq_norm = sums.sq_norm(slots) if sums.buffers.has_dtensors else sums.norms.total(slots)
    window.small_sq_norm = sq_norm / to_device(unit, sq_norm.device) ** 2
    if micro.weight is not None:
        window.weigh_small(micro.weight)


def measured(window: Window, norm: Tensor | None, ledger: Ledger) -> tuple[Measured, Measured] | None:
    """A window as it was with one micro-batch, and as it is now, with a gradient of this norm; None if either is not known."""
    small = window.small
    if window.overflowed or norm is None or small is None:
        return None
    if window.micro_batches <= (ledger.ranks if ledger.mixes_ranks else 1):
        return None
    # What the gradient is divided by: under "none" it is a mean over the ranks.
    sums = norm * (float(ledger.ranks) if ledger.reduction == "none" else to_device(window.weight, norm.device))
    return Measured(*small), Measured(sums**2, window.weight, window.weight**2)


class NoiseScale:
    """``|G|^2`` and ``tr(Sigma)``, each averaged over windows: their ratio is biased, and noisier than either.

    Args:
        decay: of the exponential averages, per window.

    Attributes:
        averages: both, as one float64 tensor, always the same one on a device, so that each replay of a CUDA graph continues from the one
            before; None before the first window. (They begin at zero, which cancels in their ratio.)
    """

    def __init__(self, decay: float):
        self.decay = decay
        self.averages: Tensor | None = None

    def load(self, averages: Tensor | None) -> None:
        """Continue from a checkpoint's averages."""
        if self.averages is None or averages is None:
            self.averages = None if averages is None else averages.clone()
        else:
            self.averages.copy_(averages)

    def update(self, small: Measured, large: Measured) -> None:
        """Take in a window, without waiting. One of a single micro-batch, or with a value that is not finite, changes nothing."""
        # a = s |G|^2 + w tr(Sigma) of the small batch and b = t |G|^2 + v tr(Sigma) of the large one, solved for both unknowns.
        b = as_tensor(large.sq_norm)
        a, w, s, v, t = (
            to_device(x, b.device) for x in (small.sq_norm, small.weight, small.square, large.weight, large.square)
        )
        apart = w * t - v * s  # the determinant: zero if both sums hold the same, and then nothing finite is found
        found = widened(torch.stack([b * w - a * v, a * t - b * s])) / apart
        if self.averages is None:
            self.averages = torch.zeros_like(found)
        self.averages = as_tensor(to_device(self.averages, b.device))
        after = self.decay * self.averages + (1 - self.decay) * found
        self.averages.copy_(torch.where(torch.isfinite(found).all(), after, self.averages))

    @property
    def value(self) -> Tensor | None:
        """The noise scale in units of the weights: infinite while no gradient is seen through the noise, NaN while nothing is known."""
        if self.averages is None:
            return None
        sq_gradient, trace = self.averages.clamp(min=0)
        return trace / sq_gradient
