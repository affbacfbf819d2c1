"""What the tests of every framework share: optimizers, tolerances, and a model whose gradient is known."""

import fusedaccum as fa
import torch
from torch import nn

# Of parameters, relative to the largest of a tensor. In FP64 and FP32 sums differ by the order of their terms; in bf16 every step rounds
# every parameter, which is half of 2^-8 each time, and a run here has six steps or fewer.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 6 * 2**-9}
IDS = ["fp64", "fp32", "bf16"]
CLIP = 0.05  # every window's norm is larger


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def wrapped(parameters):
    """As the pages in docs/frameworks have it, for frameworks that divide the loss by the number of micro-batches."""
    return fa.AccumulatingOptimizer(adamw(parameters), reduction="none")


def unequal(parameters):
    """For micro-batches that differ in size: what the framework divided by is multiplied again, and the weights divide."""
    return fa.AccumulatingOptimizer(adamw(parameters))


class Weight(nn.Module):
    """One bf16 weight whose gradient is the mean of its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, x):
        return (self.weight * x).mean()


# Two micro-batches: halved by the framework, 256 and then 1. In bf16, 256 + 1 is 256.
GRADIENTS = torch.tensor([512.0, 2.0], dtype=torch.bfloat16)
SUM = 257.0
