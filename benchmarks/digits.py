"""Training that the questions share: the demo's small CNN on handwritten digits.

The optimizer is SGD, so that a gradient's error is the update's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo import data
from demo.models import DigitsCNN


def model() -> nn.Module:
    """The CNN, with the same weights every time."""
    torch.manual_seed(0)
    return DigitsCNN(8)


def samples(count: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` images, and their labels."""
    images, labels = data.digits()
    return images[:count], labels[:count]


def batches(count: int, epoch: int, size: int) -> Sequence[Tensor]:
    """Indices of an epoch's big batches, shuffled; the last one holds what is left."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).split(size)


def loss(net: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of the logits."""
    return F.cross_entropy(net(x), y, reduction=reduction)


def sgd(net: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    """The optimizer that all ways use."""
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def flat(net: nn.Module) -> Tensor:
    """All parameters in one vector, FP64."""
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


def gradient(net: nn.Module) -> Tensor:
    """All gradients in one vector, FP64."""
    return torch.cat([p.grad.double().flatten() for p in net.parameters()])


def drift(net: nn.Module, big: nn.Module) -> float:
    """The parameters' distance from the big batch's, as a share of how far those have moved."""
    start = flat(model())
    return ((flat(net) - flat(big)).norm() / (flat(big) - start).norm()).item()


def error(found: Tensor, exact: Tensor) -> float:
    """The distance of a gradient from the exact one, as a share of that one's norm."""
    return ((found - exact).norm() / exact.norm()).item()


def unequal(batch: Tensor, parts: int, seed: int) -> Sequence[Tensor]:
    """A batch cut at random places into micro-batches of at least one sample."""
    cuts = torch.randperm(len(batch) - 1, generator=torch.Generator().manual_seed(seed))[: parts - 1] + 1
    return batch.tensor_split(cuts.sort().values)
