"""nanoGPT's loop as it is, with one line added, and with its windows left to the wrapper.

Run it: `python examples/nanogpt_loop.py`.
"""

from __future__ import annotations

from pathlib import Path

import fusedaccum as fa
import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, BLOCK, GRADIENT_ACCUMULATION_STEPS, ITERATIONS = 4, 32, 8, 12


class GPT(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.blocks(self.tokens(x) + self.places.weight, mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batches() -> tuple[GPT, list[tuple[Tensor, Tensor]]]:
    """A model, and micro-batches of this file's text, the same every time."""
    torch.manual_seed(1337)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - BLOCK - 1, (ITERATIONS * GRADIENT_ACCUMULATION_STEPS, BATCH))
    pick = [torch.stack([text[i : i + BLOCK + 1] for i in of_batch]) for of_batch in starts.tolist()]
    return GPT(), [(xy[:, :-1], xy[:, 1:]) for xy in pick]


def as_it_is(one_line_added: bool) -> list[float]:
    model, data = batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if one_line_added:
        optimizer = fa.AccumulatingOptimizer(optimizer, reduction="none")
    losses = []
    for step in range(ITERATIONS):
        lossf = 0.0
        for x, y in data[step * GRADIENT_ACCUMULATION_STEPS :][:GRADIENT_ACCUMULATION_STEPS]:
            _, loss = model(x, y)
            loss = loss / GRADIENT_ACCUMULATION_STEPS
            loss.backward()
            lossf += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(lossf)
    return losses


def with_windows() -> list[float]:
    model, data = batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = fa.AccumulatingOptimizer(optimizer, accum_steps=GRADIENT_ACCUMULATION_STEPS, max_grad_norm=1.0)
    losses = []
    for x, y in data:
        _, loss = model(x, y)
        optimizer.backward(loss)
        optimizer.step()
        if optimizer.updated:
            losses.append(optimizer.last_window.loss.item())
        optimizer.zero_grad(set_to_none=True)
    return losses


def main() -> tuple[list[float], list[float], list[float]]:
    plain, added, windows = as_it_is(False), as_it_is(True), with_windows()
    print("step      as it is   one line added   accum_steps=8")
    for step, losses in enumerate(zip(plain, added, windows, strict=True), 1):
        print("{:4d} {:13.6f} {:16.6f} {:15.6f}".format(step, *losses))
    return plain, added, windows


if __name__ == "__main__":
    main()
