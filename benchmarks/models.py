"""Transformers to measure with, in sizes that people train: GPT-2's blocks, and Llama's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import environment


@dataclass(frozen=True)
class Size:
    """A language model's size, and whose blocks it has.

    ``gated``: Llama's blocks (RMSNorm, SwiGLU, no biases, an untied head); else GPT-2's (LayerNorm,
    GELU, a tied head).
    """

    vocabulary: int
    width: int
    heads: int
    inner: int
    blocks: int
    gated: bool = False


SIZES = {
    "gpt2-124m": Size(50257, 768, 12, 3072, 12),
    "llama-1b": Size(32000, 2048, 32, 5632, 20, gated=True),
}


class Block(nn.Module):
    """Attention and a wider layer, each after a norm, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        norm, bias = (nn.RMSNorm, False) if size.gated else (nn.LayerNorm, True)
        self.heads = size.heads
        self.norm1, self.norm2 = norm(size.width), norm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=bias)
        self.out = nn.Linear(size.width, size.width, bias=bias)
        self.up, self.down = nn.Linear(size.width, size.inner, bias=bias), nn.Linear(size.inner, size.width, bias=bias)
        self.gate = nn.Linear(size.width, size.inner, bias=False) if size.gated else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        inner = nn.functional.gelu(self.up(y)) if self.gate is None else nn.functional.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class LanguageModel(nn.Module):
    """Embedding, blocks, head (no positions); returns the loss of predicting each next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.blocks)))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if not size.gated:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def language_model(size: Size) -> LanguageModel:
    """A model in bf16, on the measured device, with ordinary weights."""
    torch.manual_seed(0)
    return LanguageModel(size).to(environment.device, torch.bfloat16)
