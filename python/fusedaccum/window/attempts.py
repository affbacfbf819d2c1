"""A micro-batch that comes again, in parts, when it breaks off: which parameters have taken its gradient already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..buffers.buffers import Slot


@dataclass
class Attempt:
    """One try. Gradients are added bucket by bucket while backward runs, and an addition in floating point cannot be undone; but a pass
    brings each parameter its whole gradient at once. So one that breaks off leaves parameters that have taken all its samples, and others
    that have taken none: when the samples come again, the first are left out.
    """

    done: frozenset[Slot]  # have taken these samples in tries before
    taken: set[Slot] = field(default_factory=set)  # take them now
    forward: bool = True  # is the loss still being made?
    # Has a backward run meanwhile, of a part of the loss? Then a parameter that took it has not taken all.
    mixed: bool = False
    lost: bool = False  # has it broken off in such a way that nobody can tell who has taken what? Then the window must begin anew

    def wanted(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> tuple[Sequence[Slot], Sequence[Tensor]]:
        """Those that have not taken these samples yet."""
        if not self.done:
            return slots, grads
        left = [i for i, slot in enumerate(slots) if slot not in self.done]
        return [slots[i] for i in left], [grads[i] for i in left]
