"""The demo's two models, small enough for two cores.

Neither has BatchNorm, which sees a micro-batch and not the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DigitsCNN(nn.Sequential):
    """A convolutional network for 8 x 8 images of digits, with GroupNorm."""

    def __init__(self, width: int = 32):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in FP32, it and its gradients rounded to ``x``'s dtype, as bf16 hardware does.

    On a CPU without bf16 instructions, bf16 matrix products are many times slower than FP32's.
    """
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class Linear(nn.Linear):
    """``nn.Linear`` with the ``linear`` above."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class SmallGPT(nn.Module):
    """A GPT-2-like decoder over bytes; ``forward`` returns the logits of every next byte."""

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4, context: int = 64):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return linear(self.norm(hidden), self.tokens.weight)  # the embedding is the output head too


class Block(nn.Module):
    """Causal attention and a four times wider layer, each after a norm, each added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))
