"""The shape sets: parameters of real models, in the order ``model.parameters()`` gives them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeSet:
    """A list of tensor shapes; ``note`` says what was left out."""

    shapes: tuple[Shape, ...]
    note: str = ""

    @property
    def elements(self) -> int:
        return sum(math.prod(s) for s in self.shapes)

    def shrunk(self, factor: int) -> ShapeSet:
        """As many tensors with the first dimension divided, for a quick check of the harness."""
        shapes = tuple((max(1, s[0] // factor), *s[1:]) for s in self.shapes)
        return ShapeSet(shapes, f"first dimensions divided by {factor}")


def resnet101() -> ShapeSet:
    """ResNet-101 for ImageNet, with BatchNorm weights and biases: 44.5 million elements."""

    def convolution(out: int, into: int, kernel: int) -> list[Shape]:
        return [(out, into, kernel, kernel), (out,), (out,)]  # with the BatchNorm that follows it

    shapes = convolution(64, 3, 7)
    into = 64
    for blocks, width in ((3, 64), (4, 128), (23, 256), (3, 512)):
        for block in range(blocks):
            shapes += convolution(width, into, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:
                shapes += convolution(4 * width, into, 1)
            into = 4 * width
    shapes += [(1000, 2048), (1000,)]
    return ShapeSet(tuple(shapes))


def gpt2() -> ShapeSet:
    """GPT-2 124M with its token embedding tied to the output head; 124.4 million elements."""
    width = 768
    norm: list[Shape] = [(width,), (width,)]
    block = [*norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return ShapeSet(tuple([(50257, width), (1024, width)] + 12 * block + norm))


def llama3(layers: int = 2) -> ShapeSet:
    """Decoder layers of Llama-3-8B; 218 million elements each."""
    width, key_value, hidden = 4096, 1024, 14336
    layer: list[Shape] = [(width, width), (key_value, width), (key_value, width), (width, width)]
    layer += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return ShapeSet(tuple(layers * layer), f"{layers} of its 32 layers, without embedding and head")


def small() -> ShapeSet:
    """2,000 matrices of 64 x 64, where the cost of each call shows."""
    return ShapeSet(2000 * ((64, 64),))


SETS: dict[str, Callable[[], ShapeSet]] = {
    "gpt2-124m": gpt2,
    "resnet-101": resnet101,
    "llama3-8b": llama3,
    "2000x64x64": small,
}
