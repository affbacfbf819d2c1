"""Lightning's Trainer with a wrapped optimizer, beside its own big batch.

Run it: `python examples/lightning_trainer.py`.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import fusedaccum as fa
import lightning as L
import torch
from fusedaccum.integrations.lightning import ResumeInsideWindow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 8, generator=generator)
    return TensorDataset(x, x @ torch.randn(8, 3, generator=generator))


class Regression(L.LightningModule):
    def __init__(self, wrap: bool):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
        self.wrap = wrap
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.wrap:
            # Lightning divides the loss, and calls step() once per window only: there it ends.
            optimizer = fa.AccumulatingOptimizer(optimizer, reduction="none")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(micro_batch: int, accum_steps: int, wrap: bool) -> list[float]:
    """The mean loss of every step's batch."""
    module = Regression(wrap)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accum_steps,
        gradient_clip_val=1.0,
        callbacks=[ResumeInsideWindow()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples(), batch_size=micro_batch))
    return torch.tensor(module.losses).view(-1, accum_steps).mean(1).tolist()


def main() -> tuple[list[float], list[float]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning):  # on the number of workers, and of PyTorch
            warnings.simplefilter("ignore", category)
        losses, big = train(2, 4, wrap=True), train(8, 1, wrap=False)
    print("step   4 micro-batches of 2   one batch of 8")
    for step, (ours, theirs) in enumerate(zip(losses, big, strict=True), 1):
        print(f"{step:4d} {ours:22.6f} {theirs:16.6f}")
    return losses, big


if __name__ == "__main__":
    main()
