"""The demo's two tasks, and the same two made tiny for the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import data
from .models import DigitsCNN, SmallGPT
from .ways import Task


def digits(tiny: bool = False) -> Task:
    """A CNN in FP32.

    1,437 images make 5 windows of 8 x 32 and one of 157: four micro-batches, and a fifth of 29.
    """
    images, labels = data.digits()
    kept = 300 if tiny else 1437
    return Task(
        title="CNN in FP32, handwritten digits",
        make_model=lambda: DigitsCNN(8 if tiny else 32),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        loss=lambda model, x, y: F.cross_entropy(model(x), y),
        data=(images[:kept], labels[:kept]),
        micro_batch=8 if tiny else 32,
        accum_steps=8,
        epochs=1 if tiny else 8,
        dtype=torch.float32,
    )


def gpt(tiny: bool = False) -> Task:
    """A small GPT in bf16 with FP32 master weights, so that the ways differ only in the gradient.

    1,000 sequences make 7 windows of 64 x 2 and one of 52 x 2.

    SGD with momentum, because its update is linear in the gradient: the drift is then the
    gradients' error, summed. (Adam's first steps are as large as the learning rate even where a
    gradient is nothing but rounding, and would hide that error.)
    """
    context, width, layers = (16, 32, 1) if tiny else (64, 128, 2)
    sequences = 160 if tiny else 1000
    return Task(
        title="GPT in bf16, Python sources",
        make_model=lambda: SmallGPT(width, layers, 4, context).to(torch.bfloat16),
        make_optimizer=lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9),
        loss=_next_byte,
        data=data.text(sequences, context),
        micro_batch=1 if tiny else 2,
        accum_steps=64,
        epochs=1 if tiny else 2,
        dtype=torch.bfloat16,
    )


def _next_byte(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    # The loss itself is in FP32, as usual: it is a mean of thousands of numbers.
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
