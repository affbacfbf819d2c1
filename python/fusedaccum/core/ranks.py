"""One process with windows of its own, for which nothing is needed that ranks do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .buffers import Slot


class Alone:
    """No other ranks to agree with, and none to wait for. What shares windows answers in its place.

    Attributes:
        alone: True if there is no process group. (One may hold a single rank.)
        size, rank, name: how many ranks there are, which one this is, and its name in checkpoints.
        slots_with_grad: slots that hold a gradient on any rank, once ranks have agreed; else empty.
        go_apart: True if ranks have kept windows to themselves: parameters differ until averaged.
        sent: True if sums of the open window have gone to other ranks.
        holds_back: True if gradients of counted micro-batches have not come here yet.
        agreed: True if the open window is that of all ranks already.
    """

    alone = True
    size: int = 1
    rank: int = 0
    name: str | None = None
    go_apart = False
    sent = holds_back = agreed = False

    def __init__(self) -> None:
        self.slots_with_grad: set[Slot] = set()

    @property
    def shown_for_others(self) -> set[Slot]:
        """Slots that show a sum only because some other rank may have a gradient."""
        return set()

    def owned(self, slots: Sequence[Slot]) -> list[Slot]:
        """Those of ``slots`` that this rank steps."""
        return list(slots)

    def least(self, mine: float) -> float:
        """The smallest of the ranks' numbers; waits for the device."""
        return mine

    def all_gather(self, mine: Any) -> list[Any]:
        """Every rank's plain values; waits for the device."""
        return [mine]

    def forget_others(self, state: dict[Tensor, Any]) -> None:
        """Drop what an optimizer's ``state`` holds for parameters that other ranks step."""

    # -- a pass ------------------------------------------------------------------------------------

    def unsynced(self) -> AbstractContextManager[None]:
        """A block whose backward passes do not end a window."""
        return nullcontext()

    def check_unsent(self, slot: Slot) -> None:
        """Raises RuntimeError if a layer's own add came after the sum had gone to other ranks."""

    def check_reduced(self, what: str) -> None:
        """Raises RuntimeError if gradients are held back."""

    def check_droppable(self, slots: Sequence[Slot]) -> None:
        """Before the open micro-batch's gradients are looked at: raises RuntimeError if only a part
        of it could be dropped. Returns when they can be read.
        """

    def pass_ends(self, then: Callable[[], None]) -> None:
        """The pass is over: call ``then`` once sums that ranks share have arrived."""
        then()

    def of_all_parts(self, found: int) -> int:
        """``found``; if the ranks hold parts of gradients, its sum over them."""
        return found

    # -- a window's end ----------------------------------------------------------------------------

    def before_weighing(self) -> None:
        """``step()`` asks if the window is complete. Raises RuntimeError if ranks cannot agree."""

    def flushes(self) -> None:
        """This rank ends the open window, whatever it weighs."""

    def agree(self) -> None:
        """Before a window is concluded: make it that of all ranks.

        Raises:
            RuntimeError: the other ranks cannot be reached, or differ; gradients are held back.
        """

    def anything(self, slots: Collection[Slot]) -> bool:
        """True if the closed window, with gradients of ``slots``, holds any on any rank."""
        return bool(slots)

    def broadcast_params(self, applied: bool | Tensor) -> None:
        """Give all ranks the parameters that one of them has stepped."""

    # -- checkpoints -------------------------------------------------------------------------------

    def undo_reduce(self) -> None:
        """Make the buffers hold this rank's sums again, for a checkpoint inside a window."""
