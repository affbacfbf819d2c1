"""One process with windows of its own: nothing of what :class:`fusedaccum.distributed.ranks.Ranks` does with others is needed here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from ..core.buffers import Slot
from .ddp import Replicas, replicas_of
from .fsdp2 import FullySharded


class Alone:
    """No other ranks to agree with, and none to wait for.

    Attributes:
        alone: is there no process group? (One may hold a single rank.)
        size, rank, name: how many ranks there are, which one this is, and its name in checkpoints.
        replicas, fully_sharded: the DistributedDataParallel and FSDP2 modules.
        shown_for_others: slots that show a sum only because some other rank may have a gradient.
        slots_with_grad: slots that hold a gradient on any rank, once the ranks have agreed on a window; else empty.
        go_apart: have ranks kept windows to themselves, so that their parameters differ until the caller averages them?
    """

    alone = True
    size: int = 1
    rank: int = 0
    name: str | None = None
    go_apart = False

    def __init__(self) -> None:
        self.replicas, self.fully_sharded = Replicas([]), FullySharded([])
        self.shown_for_others: set[Slot] = set()
        self.slots_with_grad: set[Slot] = set()
        self.looked = False  # have other ranks been looked for, and none found?

    def add_slots(self, slots: Sequence[Slot]) -> None:
        """Share these slots, too. Raises ValueError if ranks differ in them, or if these are the first that several ranks share."""
        replicas = replicas_of([slot.param for slot in slots]) if self.looked else []
        sharded = FullySharded(slots).slots if self.looked else []
        if replicas or sharded:
            held = {id(p) for module in replicas for p in module.parameters()}
            slot = next(slot for slot in slots if slot in sharded or id(slot.param) in held)
            kind = "a DistributedDataParallel" if replicas else "an FSDP2"
            raise ValueError(
                f"parameter {slot.name} is in {kind} module, but the optimizer was wrapped without any, so its windows are this rank's "
                "alone; wrap the optimizer when it already has these parameters, or wrap it with process_group="
            )

    def replace(self, slots: Sequence[Slot]) -> None:
        """Share these slots, and no others. Raises as :meth:`add_slots` does, and then changes nothing."""
        self.add_slots(slots)

    def owned(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of ``slots`` that this rank steps."""
        return list(slots)

    def least(self, mine: float) -> float:
        """The smallest of the ranks' numbers; waits for the device."""
        return mine

    def all_gather(self, mine: Any) -> list[Any]:
        """Every rank's plain values; waits for the device."""
        return [mine]

    def reset(self) -> None:
        """A window begins, or is dropped."""
        self.shown_for_others.clear()

    def forget_others(self, state: dict[Tensor, Any]) -> None:
        """Drop what an optimizer's ``state`` holds for parameters that other ranks step."""

    # -- a pass ------------------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """A backward pass brings its first gradient."""

    def before_add(self, slots: Sequence[Slot]) -> None:
        """Gradients are about to be added to these slots."""

    def added(self, slots: Sequence[Slot]) -> None:
        """Gradients were added to these slots."""

    def check_unsent(self, slot: Slot) -> None:
        """Raises RuntimeError if the sum to which a layer has added its gradient by itself is not this rank's own any more."""

    @property
    def sent(self) -> bool:
        """Have sums of the open window gone to other ranks?"""
        return False

    def pass_ends(self, then: Callable[[], None]) -> None:
        """The pass is over: call ``then`` once the sums that go to other ranks have arrived from all of them."""
        then()

    def broke_off(self) -> None:
        """A backward pass of this rank has failed; others may be waiting for buckets that were not sent."""

    def of_all_parts(self, found: int) -> int:
        """How many elements are not finite on all ranks, if they hold parts of gradients and drop them together; else ``found``."""
        return found

    # -- a window's end ----------------------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Is the open window that of all ranks already?"""
        return False

    def before_weighing(self) -> None:
        """A ``step()`` asks whether the window is complete. Raises RuntimeError if the ranks must add up weights for that, and cannot."""

    def flushes(self) -> None:
        """This rank ends the open window, whatever it weighs."""

    def agree(self) -> None:
        """Before a window is concluded: make it that of all ranks.

        Raises:
            RuntimeError: the other ranks cannot be reached, or differ; FSDP2 holds gradients back.
        """

    def anything(self, slots: Collection[Slot]) -> bool:
        """Does the window that has closed, which holds gradients of ``slots``, hold any, here or on another rank?"""
        return bool(slots)

    def broadcast_params(self, applied: bool | Tensor) -> None:
        """Give all ranks the parameters that one of them has stepped."""

    # -- checkpoints -------------------------------------------------------------------------------------------

    def undo_reduce(self) -> None:
        """Make the buffers hold this rank's part of the sums again, as a checkpoint inside a window does."""
