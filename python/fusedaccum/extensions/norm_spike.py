"""``skip_norm=``: a window whose gradient has a norm above a limit is not applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.config import check_norm
from ..core.extension import Extension
from ..scalars import copied, to_device, widened
from ..times_mean import TimesMean

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..core.accumulation import Accumulation
    from ..core.apply import Conclusion
    from ..core.config import Settings


class NormSpike(Extension):
    """Compares each window's norm with a number, or a multiple of the running mean before it.

    Decides on the device. A norm above the limit enters the mean as the limit: one spike hardly
    moves it, and norms that stay higher are let through after some windows. One of 0, from which no
    multiple would rise, does not enter it.
    """

    key = "norm_spike"
    wants_norm = True

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        if not isinstance(settings.skip_norm, TimesMean):
            hint = "None applies every window, fusedaccum.TimesMean(3.0) follows their norms"
            check_norm("skip_norm", settings.skip_norm, hint)

    def __init__(self) -> None:
        # Sum of the decayed norms, sum of their weights, and how many there were, as one tensor,
        # always the same one on a device, so that each replay of a CUDA graph continues from it.
        self._seen: Tensor | None = None
        self._seen_then: Tensor | None = None  # the same, once the window that is closing is over

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        super().attach(accumulation, inner)
        limit = accumulation.settings.skip_norm
        self._mean = limit if isinstance(limit, TimesMean) else None
        self._limit = math.inf if limit is None or isinstance(limit, TimesMean) else float(limit)

    def needs_all_ranks(self) -> str | None:
        """Ranks that saw other windows have other means, and decide differently."""
        return None if self._mean is None else f"skip_norm={self._mean}"

    def normed(self, end: Conclusion, sq_norm: Tensor) -> None:
        assert end.norm is not None
        norm = widened(end.norm)
        limit = torch.full_like(norm, self._limit)
        finite = torch.isfinite(norm)
        if self._mean is not None:
            seen = self._seen_by(norm)
            total, weight, count = seen
            limit = torch.where(count >= self._mean.after, self._mean.factor * total / weight, limit)
            decay = self._mean.decay
            kept = torch.stack([total * decay, weight * decay, count])
            new = torch.stack(
                [torch.minimum(norm, limit) * (1 - decay), torch.full_like(norm, 1 - decay), torch.ones_like(norm)]
            )
            counts = finite & (norm > 0) & (not end.weightless)
            self._seen_then = torch.where(counts, kept + new, seen)
            end.report["norm_limit"] = limit
        end.skip = ~(finite & (norm <= limit)) | to_device(end.skip, norm.device)

    def _seen_by(self, norm: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros(3, dtype=norm.dtype, device=norm.device)
        elif self._seen.device != norm.device:  # a checkpoint's, perhaps
            self._seen = self._seen.to(norm.device, norm.dtype)
        return self._seen

    def window_reported(self, end: Conclusion) -> None:
        if self._seen is not None and self._seen_then is not None:
            self._seen.copy_(self._seen_then)

    def started_anew(self) -> None:
        self._seen = self._seen_then = None

    def save(self) -> dict[str, Any]:
        return {"seen": copied(self._seen)}

    def load(self, saved: dict[str, Any]) -> None:
        self._seen_then = None
        if self._seen is None or saved["seen"] is None:
            self._seen = copied(saved["seen"])
        else:
            self._seen.copy_(saved["seen"])

    def join(self, parts: Sequence[dict[str, Any]], mine: Sequence[int], ranks: int) -> dict[str, Any]:
        return parts[0]  # the same on all ranks
