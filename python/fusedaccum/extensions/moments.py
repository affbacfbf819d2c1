"""Populations as count, mean and squares about it, merged without cancellation, also over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..distributed.group import Group


@dataclass
class Total:
    """One population.

    Attributes:
        n: values per channel.
        moments: the channels' means and sums of squares about these, [2, C] in FP64.
    """

    n: float
    moments: Tensor


def merge(totals: Sequence[Total], parts: Sequence[Total]) -> None:
    """Add each part to its total (Chan, Golub and LeVeque 1979). No total may occur twice.

    Takes about seven kernels for all of them.
    """
    means, squares = [total.moments[0] for total in totals], [total.moments[1] for total in totals]
    deltas = torch._foreach_sub([part.moments[0] for part in parts], means)
    shares = [part.n / max(total.n + part.n, 1) for total, part in zip(totals, parts, strict=True)]
    torch._foreach_add_(squares, [part.moments[1] for part in parts])
    torch._foreach_addcmul_(
        squares, deltas, deltas, [total.n * share for total, share in zip(totals, shares, strict=True)]
    )
    torch._foreach_mul_(deltas, shares)
    torch._foreach_add_(means, deltas)
    for total, part in zip(totals, parts, strict=True):
        total.n += part.n


def summed(mine: Sequence[Total], group: Group) -> list[Total]:
    """Each total merged with the other ranks': means, then squares. Three small collectives."""
    if not mine:
        return []
    channels = [total.moments.shape[1] for total in mine]
    sums = group.sum(together([total.moments[0] * total.n for total in mine])).split(channels)
    counts = group.total([total.n for total in mine])
    means = [mean / n for mean, n in zip(sums, counts, strict=True)]
    squares = [
        t.moments[1] + t.n * (t.moments[0] - mean.to(t.moments.device)) ** 2
        for t, mean in zip(mine, means, strict=True)
    ]
    both = zip(means, group.sum(together(squares)).split(channels), strict=True)
    return [Total(n, torch.stack(moments)) for n, moments in zip(counts, both, strict=True)]


def together(parts: list[Tensor]) -> Tensor:
    """One tensor to send, on the first one's device."""
    return torch.cat([part.to(parts[0].device) for part in parts])
