"""Accelerate's loop with a wrapped optimizer, beside its own big batch.

Run it: `python examples/accelerate_loop.py`.
"""

from __future__ import annotations

import fusedaccum as fa
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 8, generator=generator)
    return TensorDataset(x, x @ torch.randn(8, 3, generator=generator))


def train(micro_batch: int, accum_steps: int, wrap: bool) -> list[float]:
    """The mean loss of every step's batch."""
    AcceleratorState._reset_state(reset_partial_state=True)  # a script with one Accelerator does not need these
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accum_steps)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if wrap:
        # Accelerate divides the loss, and calls step() once per window only: there it ends.
        optimizer = fa.AccumulatingOptimizer(optimizer, reduction="none")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = DataLoader(samples(), batch_size=micro_batch)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses, window = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            window.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append(sum(window) / len(window))
                window = []
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def main() -> tuple[list[float], list[float]]:
    losses, big = train(2, 4, wrap=True), train(8, 1, wrap=False)
    print("step   4 micro-batches of 2   one batch of 8")
    for step, (ours, theirs) in enumerate(zip(losses, big, strict=True), 1):
        print(f"{step:4d} {ours:22.6f} {theirs:16.6f}")
    return losses, big


if __name__ == "__main__":
    main()
