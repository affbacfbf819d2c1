"""Micro-batches that were left out because a gradient was not finite, and what ``p.grad`` shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..parts import local_of
from .buffers import Slot


@dataclass
class Rejected:
    """Micro-batches that ``nonfinite`` has rejected since the last ``step()``.

    Until the next one, ``p.grad`` of one parameter shows a gradient that is not finite, and that of all others is None: so a GradScaler,
    which looks there, learns of the overflow, and nothing that it or other code does to ``p.grad`` reaches a buffer. If processes hold
    parts of parameters, it is the same one in all, whichever has the bad part: PyTorch unscales such a tensor by a collective.
    """

    names: list[str] = field(default_factory=list)  # of the parameters; none as long as nothing was rejected
    put_away: bool = False  # has a call put the sums back since the last backward? Other code may have met the rejected gradient before
    _hidden: list[tuple[Slot, Tensor | None]] = field(default_factory=list)

    def reject(self, bad: dict[Slot, Tensor], slots: Sequence[Slot]) -> None:
        """The gradients in ``bad`` are not finite; hide ``slots`` behind the first of them."""
        self.names += [slot.name for slot in bad] or ["a shard on another rank"]
        self._hidden = [(slot, slot.param.grad) for slot in slots]
        for slot in slots:
            slot.param.grad = None
        spread = next((slot for slot in slots if slot.part is not None and slot.param.requires_grad), None)
        if spread is not None and spread.part is not None:
            spread.param.grad = spread.part.wrap(torch.full_like(local_of(spread.param.detach()), torch.nan))
        elif bad:
            slot, grad = next(iter(bad.items()))
            slot.param.grad = grad.clone()  # which can be written in place, as p.grad can: not one number, expanded

    @property
    def shown(self) -> bool:
        """Does ``p.grad`` show a rejected gradient, and not the sums?"""
        return bool(self._hidden)

    def withdraw(self) -> None:
        """Put back what ``p.grad`` was."""
        if self._hidden:
            self.put_away = True
        for slot, grad in self._hidden:
            slot.param.grad = grad
        self._hidden = []

    def __str__(self) -> str:
        more = len(self.names) - 5
        return ", ".join(self.names[:5]) + (f" and {more} more parameters" if more > 0 else "")
