"""The simple gradient noise scale: how large a batch still pays off, from norms that adds measure.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training"
(2018), arXiv:1812.06162, section 2.2 and appendix A.1: ``tr(Sigma) / |G|^2``, with G the true
gradient and Sigma the covariance of one sample's. Two sums of gradients, of a small batch and of a
large one, give both, because a sum over samples of weight w has
``E|S|^2 = w^2 |G|^2 + w tr(Sigma)``. The small one is a window when it holds its first micro-batch,
the large one is the whole window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.extension import Extension, ScaleNews
from ..scalars import Scalar, as_tensor, copied, is_number, to_device, widened

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..core.accumulation import Accumulation
    from ..core.apply import Conclusion
    from ..core.config import Settings
    from ..core.window import MicroBatch
    from ..distributed.group import Group


@dataclass(frozen=True)
class Measured:
    """A sum of weighted gradients: ``E[sq_norm] = square |G|^2 + weight tr(Sigma)``.

    Or several sums, with each attribute added up.

    Attributes:
        sq_norm: squared norm of the sum. weight: of what it holds. square: the weight's square.
    """

    sq_norm: Scalar
    weight: Scalar
    square: Scalar


class NoiseScale(Extension):
    """``|G|^2`` and ``tr(Sigma)``, each averaged over windows: the ratio is biased and noisier.

    Attributes:
        averages: both, as one float64 tensor, always the same one on a device, so that each replay
            of a CUDA graph continues from the one before; None before the first window. (They begin
            at zero, which cancels in their ratio.)
    """

    key = "noise_scale"
    wants_norm = True
    wants_first_alone = True

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        decay: Any = settings.noise_scale
        if not is_number(decay):
            raise TypeError(
                f"noise_scale must be a number or None, got {decay!r}; it is the decay of its averages per window: 0.95"
            )
        if not 0 <= decay < 1:
            raise ValueError(
                f"noise_scale must be at least 0 and less than 1, got {decay}; it is the decay of its averages per "
                "window: 0.95 averages over about the last 20 windows"
            )

    def __init__(self) -> None:
        self.averages: Tensor | None = None
        # The open window, when it held one micro-batch per rank; None: not measured.
        self._small: Measured | None = None
        self._assumed = False  # True if that was given no weight, and counts as 1
        self._small_of_closed: Measured | None = None  # the same of the window that is being applied

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        super().attach(accumulation, inner)
        self._decay = accumulation.settings.noise_scale or 0.0  # of the averages, per window

    def needs_all_ranks(self) -> str:
        return f"noise_scale={self._decay}"

    # -- the small batch ---------------------------------------------------------------------------

    def measures(self) -> bool:
        return self.accumulation.ledger.window.empty

    def window_opened(self) -> None:
        self._small = None

    def check_shared(self) -> None:
        buffers = self.accumulation.sums.buffers
        beside = [slot.name for slot in buffers.slots if slot.part is None]
        if buffers.has_parts and beside:
            raise ValueError(
                f"noise_scale={self.accumulation.settings.noise_scale}: FSDP2 shards other parameters but not "
                f"{beside[0]}. After a first micro-batch its gradient is this rank's own, while theirs is summed over "
                "all ranks already, so there is no one norm to measure. Shard it too (fully_shard on the module that "
                "holds it), or leave noise_scale out"
            )

    def counted_alone(self, micro: MicroBatch) -> None:
        """Note the norm of the one micro-batch in the window, as its adds have taken it.

        It is this rank's, because no sums have been sent yet. With FSDP2's shards it is of one
        micro-batch of each rank, and squares are summed over the ranks that hold parts: these call
        it together.
        """
        sums = self.accumulation.sums
        unit, slots = self.accumulation.extensions.sums_carry(), sums.slots_with_grad()
        sq_norm = sums.sq_norm(slots) if sums.buffers.has_parts else sums.norms.total(slots)
        self._assumed = micro.weight is None
        weight = 1.0 if micro.weight is None else micro.weight
        self._small = Measured(sq_norm / to_device(unit, sq_norm.device) ** 2, weight, weight**2)

    def window_dropped(self) -> None:
        self._small = None

    def weighed_late(self) -> None:
        if self._assumed:
            self._small = None

    def scale_news(self, news: ScaleNews, scale: Scalar | None) -> None:
        if news is not ScaleNews.NONE:  # it was measured under another scale
            self._small = None

    # -- the whole window --------------------------------------------------------------------------

    def closing(self, end: Conclusion) -> None:
        # Apart, because the inner optimizer may run a backward, which opens the next window. None
        # if other code has changed the sums (clipped them): then the norms are of different things.
        self._small_of_closed = None if self.accumulation.sums.changed_by_user else self._small

    def window_reported(self, end: Conclusion) -> None:
        small, ledger, window = self._small_of_closed, self.accumulation.ledger, end.window
        several = window.micro_batches > (ledger.ranks if ledger.mixes_ranks else 1)
        if small is not None and end.norm is not None and several and not window.void:
            # What the gradient is divided by: under "none" it is a mean over the ranks.
            by = float(ledger.ranks) if ledger.reduction == "none" else to_device(window.weight, end.norm.device)
            self._update(small, Measured((end.norm * by) ** 2, window.weight, window.weight**2))
        self._small_of_closed = None
        end.report["noise_scale"] = self.value

    def _update(self, small: Measured, large: Measured) -> None:
        """Take in a window, without waiting.

        One of a single micro-batch, or with a value that is not finite, changes nothing.
        """
        # Of the small batch a = s |G|^2 + w tr(Sigma), of the large one b = t |G|^2 + v tr(Sigma):
        # solved for both unknowns.
        b = as_tensor(large.sq_norm)
        a, w, s, v, t = (
            to_device(x, b.device) for x in (small.sq_norm, small.weight, small.square, large.weight, large.square)
        )
        apart = w * t - v * s  # the determinant: zero if both sums hold the same, and then nothing finite is found
        found = widened(torch.stack([b * w - a * v, a * t - b * s])) / apart
        if self.averages is None:
            self.averages = torch.zeros_like(found)
        self.averages = as_tensor(to_device(self.averages, b.device))
        after = self._decay * self.averages + (1 - self._decay) * found
        self.averages.copy_(torch.where(torch.isfinite(found).all(), after, self.averages))

    @property
    def value(self) -> Tensor | None:
        """The noise scale in units of the weights.

        It is infinite while no gradient is seen through the noise, NaN while nothing is known.
        """
        if self.averages is None:
            return None
        sq_gradient, trace = self.averages.clamp(min=0)
        return trace / sq_gradient

    # -- ranks and checkpoints ---------------------------------------------------------------------

    def reduce(self) -> dict[str, float]:
        small = self._small or Measured(0.0, 0.0, 0.0)
        counts = self._small is not None and not self.accumulation.sums.changed_by_user
        return {name: float(value) for name, value in vars(small).items()} | {"ranks": counts}

    def reduced(self, totals: dict[str, float], group: Group) -> None:
        measured_by, ledger = totals.pop("ranks"), self.accumulation.ledger
        self._small = Measured(**totals) if measured_by == group.size else None
        if self._small is not None and ledger.mixes_ranks:
            # All ranks have measured the same sum, or mean, of their micro-batches.
            sq_norm = totals["sq_norm"] * (group.size if ledger.reduction == "none" else 1 / group.size)
            self._small = Measured(sq_norm, totals["weight"], totals["weight"] ** 2)

    def started_anew(self) -> None:
        self.averages = self._small = None

    def save(self) -> dict[str, Any]:
        small = None if self._small is None else {name: copied(value) for name, value in vars(self._small).items()}
        return {"averages": copied(self.averages), "small": small, "assumed": self._assumed}

    def load(self, saved: dict[str, Any]) -> None:
        averages, small = saved["averages"], saved["small"]
        if self.averages is None or averages is None:
            self.averages = None if averages is None else averages.clone()
        else:
            self.averages.copy_(averages)
        self._small, self._assumed = None if small is None else Measured(**small), saved["assumed"]

    def join(self, parts: Sequence[dict[str, Any]], mine: Sequence[int], ranks: int) -> dict[str, Any]:
        return {"averages": parts[0]["averages"], "small": None, "assumed": False}
