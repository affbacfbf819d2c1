"""One loss of several wrappers: the weight that one of them was given for it is that of all."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..core.extension import Extension

if TYPE_CHECKING:
    from ..core.ledger import Ledger
    from ..core.window import MicroBatch

# By thread: whose open micro-batch was given the weight of the losses. Ctrl-C may leave one here,
# whose wrapper is dropped then.
_WEIGHING: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()


class SharedBackward(Extension):
    """Gives the open micro-batch the weight that another wrapper was given for the same loss.

    The other one has reduction="mean".
    """

    def __init__(self) -> None:
        # Of a block with a weight: its thread, and who weighed around it.
        self._around: tuple[int, Ledger | None] | None = None

    def block_begins(self, thread: int) -> None:
        ledger = self.accumulation.ledger
        if ledger.micro.weight is not None and ledger.reduction == "mean":
            around = _WEIGHING.get(thread)
            self._around = thread, None if around is ledger else around  # its own: of a block that Ctrl-C has ended
            _WEIGHING[thread] = ledger

    def block_ends(self) -> None:
        if self._around is not None:
            thread, around = self._around
            self._around = None
            if around is None:
                _WEIGHING.pop(thread, None)
            else:
                _WEIGHING[thread] = around

    def weighed_elsewhere(self, thread: int | None) -> MicroBatch | None:
        other = None if thread is None else _WEIGHING.get(thread)
        return None if other is None or other is self.accumulation.ledger else other.micro

    def pass_begins(self, thread: int | None) -> None:
        if _WEIGHING:
            other, micro = self.weighed_elsewhere(thread), self.accumulation.ledger.micro
            if other is not None and not micro.in_loss:
                self._weigh_as(other, micro)

    def _weigh_as(self, other: MicroBatch, micro: MicroBatch) -> None:
        """The pass's loss has a weight in another wrapper: it is the micro-batch's here, too."""
        ledger, weight = self.accumulation.ledger, other.value()
        if other.in_loss and ledger.reduction == "none":
            raise RuntimeError(
                f"the loss of this backward was multiplied by weight={float(weight):g} for another wrapper, which has "
                "FSDP2's parameters, but this one has reduction='none' and takes gradients as they are; give both the "
                "same reduction"
            )
        if other.in_loss:
            ledger.weigh(weight)
            micro.in_loss = True
            return
        if ledger.reduction == "mean" and micro.weight is None and micro.passes == 0:
            self.accumulation.open(weight)
            micro.assumed = True
            return
        # A block's own weight is that of all losses in it.
        ours = micro.assumed or (
            ledger.reduction == "mean" and micro.weight is not None and not self.accumulation.passes.inside
        )
        if ours and micro.weight is not weight and float(micro.value()) != float(weight):
            raise ValueError(
                f"the losses of this micro-batch have weights {float(micro.value()):g} and {float(weight):g}, not both "
                "given to this wrapper; if one is of another model (GAN, actor and critic), keep it out of these "
                "parameters: requires_grad_(False) for its forward, or backward(inputs=...); if not, call this "
                "wrapper's step() after each backward, or give it a weight of its own: `with "
                "opt.micro_batch(weight=...): ...` around them"
            )
