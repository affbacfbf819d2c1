"""Micro-batches tried again, in parts, when they break off: which parameters have their gradient.

A recipe that wants this asks for it: ``accumulation.extensions.ensure(Retries)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ..core.buffers import Slot
from ..core.extension import Extension
from ..scalars import Scalar

if TYPE_CHECKING:
    from ..core.window import MicroBatch, Window


@dataclass
class Attempt:
    """One attempt.

    Gradients are added bucket by bucket while backward runs, and a floating-point addition cannot
    be undone; but a pass brings each parameter its whole gradient at once. So a pass that breaks
    off leaves some parameters that have taken all its samples and others that have taken none: when
    the samples come again, the first are left out.
    """

    done: frozenset[Slot]  # slots that took these samples in earlier attempts
    taken: set[Slot] = field(default_factory=set)  # slots that have taken them in this one
    lost: bool = False  # True if it is unknown which slots have taken what: then the window must start again
    # Backward passes of parts of the loss, before it was computed; None: it is not computed yet.
    passes_before: int | None = None
    micro: MicroBatch | None = None  # the one that is attempted


class Retries(Extension):
    """Notes what takes an attempt's gradients, and leaves out what took them in an earlier one."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None  # the latest
        # A window, and counts of what was not finite from attempts at it that broke off.
        self._counts_left: tuple[Window, list[Tensor]] | None = None

    @contextmanager
    def attempted(self, weight: Scalar, attempt: Attempt) -> Iterator[None]:
        """As ``accumulation.passes.grouped(weight)``, for a forward and backward to try again.

        They are tried again if an exception breaks them off. Nothing of them counts then, except
        for what ``attempt`` notes. Sums go to other ranks only after the window's last pass.
        """
        accumulation, ledger = self.accumulation, self.accumulation.ledger
        accumulation.open(weight)
        window, micro = ledger.window, ledger.micro
        counted = window.micro_batches
        micro.repeatable, micro.partial = True, bool(attempt.done)
        if self._counts_left is not None and self._counts_left[0] is window:
            micro.counts = self._counts_left[1]
        self._counts_left, self._attempt, attempt.micro = None, attempt, micro
        try:
            with accumulation.passes.grouped():
                yield
        except BaseException:
            passes = micro.passes if attempt.passes_before is None else attempt.passes_before
            attempt.lost = (
                window.micro_batches > counted
                or micro.judged
                or passes > 0  # a parameter that took the gradient of a part of the loss has not taken all
                or micro.nested
                or bool(micro.in_place)  # their layers would add these samples again
                or accumulation.sums.half_written
                or accumulation.sums.written_by_layers
            )
            self._counts_left = window, micro.counts
            accumulation.passes.drop_micro_batch()
            raise

    def loss_computed(self) -> None:
        """From here on, the attempt's backward passes are of its whole loss."""
        assert self._attempt is not None and self._attempt.micro is not None
        self._attempt.passes_before = self._attempt.micro.passes

    def select(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> tuple[Sequence[Slot], Sequence[Tensor]]:
        attempt = self._under_way
        if attempt is None or not attempt.done:
            return slots, grads
        left = [i for i, slot in enumerate(slots) if slot not in attempt.done]
        return [slots[i] for i in left], [grads[i] for i in left]

    def added(self, slots: Sequence[Slot]) -> None:
        attempt = self._under_way
        if attempt is not None:
            attempt.taken.update(slots)

    @property
    def _under_way(self) -> Attempt | None:
        """The attempt at the open micro-batch, if that is one."""
        attempt = self._attempt
        return attempt if attempt is not None and attempt.micro is self.accumulation.ledger.micro else None
