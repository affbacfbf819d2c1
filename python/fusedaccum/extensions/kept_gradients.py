"""Optimizers that keep ``p.grad`` itself, not a copy: it stays when the buffer is written again."""

from __future__ import annotations

from torch.optim import Optimizer

from ..core.config import Settings
from ..core.extension import Extension
from ..inner import is_pytorchs, states_of
from ..kept import set_apart


def may_keep(settings: Settings, inner: Optimizer) -> bool:
    return not is_pytorchs(inner)


class KeptGradients(Extension):
    """Gives what the optimizer keeps of buffers its own memory, before they are written again."""

    def buffers_overwritten(self) -> None:
        set_apart(states_of(self.inner), [block.flat for block in self.accumulation.sums.buffers.blocks])
