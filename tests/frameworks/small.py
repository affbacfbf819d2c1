"""What all frameworks' tests share: optimizers, tolerances, and a model with a known gradient."""

import fusedaccum as fa
import torch
from torch import nn

# For parameters, relative to the largest element of a tensor. In FP64 and FP32 sums differ by the
# order of their terms; in bf16 every step rounds every parameter by up to half of 2^-8, and a run
# here has at most six steps.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 6 * 2**-9}
IDS = ["fp64", "fp32", "bf16"]
CLIP = 0.05  # every window's norm is larger


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def wrapped(parameters):
    """As in docs/frameworks, where frameworks divide the loss by the number of micro-batches."""
    return fa.AccumulatingOptimizer(adamw(parameters), reduction="none")


def unequal(parameters):
    """For unequal micro-batches: tests undo the framework's division, and weights divide."""
    return fa.AccumulatingOptimizer(adamw(parameters))


class Weight(nn.Module):
    """One bf16 weight whose gradient is the mean of its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, x):
        return (self.weight * x).mean()


# Two micro-batches, which the framework halves to 256 and 1. In bf16, 256 + 1 is 256.
GRADIENTS = torch.tensor([512.0, 2.0], dtype=torch.bfloat16)
SUM = 257.0
