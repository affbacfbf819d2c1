"""Passes in which FSDP2 takes part: it would add to ``p.grad``, which is hidden until they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..autograd.passes import outermost_backward, saw_pass
from ..core import grad_views
from ..core.buffers import Slot
from ..core.extension import Extension
from .fsdp2 import FullySharded
from .shards import hide, unhide

if TYPE_CHECKING:
    from .ranks import Ranks


class FSDP2Passes(Extension):
    """Hides ``p.grad`` from FSDP2, and handles what that holds back.

    Held by a wrapper whose windows ranks share, with :class:`Ranks`.
    """

    def __init__(self) -> None:
        self._hidden_in = -1  # the graph task that p.grad was last hidden for

    @property
    def _fully_sharded(self) -> FullySharded:
        ranks: Ranks = self.accumulation.ranks  # type: ignore[assignment]
        return ranks.fully_sharded

    def parameters_added(self, slots: Sequence[Slot]) -> None:
        self._fully_sharded.follow(self._takes, self.accumulation.settings.reduction == "none", slots)

    def _takes(self) -> None:
        """FSDP2 takes part in a backward: hide ``p.grad`` from it.

        Raises RuntimeError if its loss lacks the micro-batch's weight.
        """
        task = torch._C._current_graph_task_id()
        accumulation, slots = self.accumulation, self.accumulation.sums.buffers.slots
        micro, theirs = accumulation.ledger.micro, self._fully_sharded.slots
        if task == self._hidden_in or all(slot.holder is slot.param for slot in theirs):
            return  # done already; or all of them are another wrapper's now
        thread = outermost_backward().thread
        other = next((m for of in accumulation.extensions.weighed_elsewhere if (m := of(thread)) is not None), None)
        if accumulation.weighs_loss and other is not None and not other.in_loss:
            raise RuntimeError(
                f"the loss of this backward has weight={float(other.value()):g}, which was given to another wrapper, "
                "but FSDP2 needs it in the loss; call backward() of the wrapper that has FSDP2's parameters"
            )
        saw_pass(thread)  # of which no hook may tell
        in_loss = accumulation.weighs_loss and micro is not None and micro.in_loss
        if in_loss and not accumulation.passes.inside and other is None:
            raise RuntimeError(
                "this micro-batch has a weight, which FSDP2 needs in the loss of all its backward passes; use "
                "opt.backward(loss) for each. For a pass that begins at gradients of losses that had it (a loss in "
                "chunks): `with opt.micro_batch(): h.backward(h_grad)`"
            )
        if accumulation.ledger.window is not None:
            grad_views.adopt_all(accumulation.sums, slots)  # FSDP2 would add to what is not hidden
        hide(slots)
        if any(slot.param.requires_grad for slot in theirs):
            accumulation.collector.begin_pass()  # of this micro-batch, even if FSDP2 holds back its gradients
        self._hidden_in = task

    def adding(self, slots: Sequence[Slot]) -> None:
        self._fully_sharded.wait()

    def passes_over(self) -> None:
        buffers = self.accumulation.sums.buffers
        unhide(buffers.slots if buffers.has_parts else ())

    def window_dropped(self) -> None:
        self._fully_sharded.drop()
