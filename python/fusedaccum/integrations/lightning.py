"""Lightning: checkpoints taken inside a window."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from .. import AccumulatingOptimizer

WINDOW = "fusedaccum"  # the key that the wrapper's state_dict() adds to PyTorch's


class ResumeInsideWindow(Callback):
    """Makes ``fit(ckpt_path=...)`` resume inside the window that the checkpoint was taken in.

    Use it as ``Trainer(callbacks=[ResumeInsideWindow()])``. Lightning restores the optimizers and
    then sets all gradients of the model to None, which drops the open window. So this callback
    keeps the states of wrapped optimizers, and loads their windows again before the first batch.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._states = []  # of a validate(), or of a fit() that has not reached its first batch

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._states = checkpoint.get("optimizer_states", [])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states, self._states = self._states, []
        for optimizer, state in zip(trainer.optimizers, states, strict=False):  # nothing was loaded: no states
            if isinstance(optimizer, AccumulatingOptimizer) and WINDOW in state:
                optimizer.reset()  # else it would warn about the gradients that Lightning has dropped
                # All else is as restored, or as another callback has set it since.
                optimizer.load_state_dict({**optimizer.state_dict(), WINDOW: state[WINDOW]})
