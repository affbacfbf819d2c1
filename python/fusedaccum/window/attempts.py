"""A micro-batch that is tried again, in parts, when it breaks off: which parameters have taken its gradient already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..buffers.buffers import Slot


@dataclass
class Attempt:
    """One attempt. Gradients are added bucket by bucket while backward runs, and a floating-point addition cannot be undone; but a pass
    brings each parameter its whole gradient at once. So a pass that breaks off leaves some parameters that have taken all its samples and
    others that have taken none: when the samples come again, the first are left out.
    """

    done: frozenset[Slot]  # slots that took these samples in earlier attempts
    taken: set[Slot] = field(default_factory=set)  # slots that have taken them in this one
    forward: bool = True  # is the loss still being computed?
    # Has a backward of a part of the loss run meanwhile? Then a parameter that took its gradient has not taken all.
    mixed: bool = False
    lost: bool = False  # is it unknown which slots have taken what? Then the window must start again

    def wanted(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> tuple[Sequence[Slot], Sequence[Tensor]]:
        """The slots that have not taken these samples yet, and their gradients."""
        if not self.done:
            return slots, grads
        left = [i for i, slot in enumerate(slots) if slot not in self.done]
        return [slots[i] for i in left], [grads[i] for i in left]
