"""How a feature takes part in a wrapper's windows without the core's knowing it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .buffers.buffers import Slot
    from .closing.closing import Closing
    from .distributed.group import Group
    from .gathering.accumulation import Accumulation
    from .scalars import Scalar
    from .window.settings import Settings

Kind = TypeVar("Kind", bound="Extension")


class Extension:
    """One feature of one wrapper. The core calls these methods; a feature overrides those that it needs. features.py has their order.

    Attributes:
        key: of the feature's entry in a checkpoint; None for one that has nothing to continue from.
        by_parameter: True if that entry is tensors by the index of their parameter's slot, which ranks save as parts of one tensor.
        accumulation: the wrapper's, of which this is a part. inner: the optimizer that is wrapped.
    """

    key: str | None = None
    by_parameter = False
    accumulation: Accumulation
    inner: Optimizer

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        """Raises TypeError or ValueError for settings or an optimizer with which the feature does not work."""

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        """Become a part of a wrapper, before it has any parameters."""
        # A proxy, because the accumulation holds its extensions: dropping the wrapper must free the model at once.
        self.accumulation, self.inner = weakref.proxy(accumulation), inner

    # -- events ------------------------------------------------------------------------------------------------

    def micro_batch_counted(self) -> None:
        """The micro-batch is over, and part of the open window."""

    def micro_batch_dropped(self) -> None:
        """What has happened since the last micro-batch was counted belongs to none."""

    def window_dropped(self) -> None:
        """The micro-batches that the open window has counted no longer count."""

    def window_closed(self) -> None:
        """The open window is complete. With several ranks, all are notified at the same place between their collectives."""

    def newly_wrapped(self) -> None:
        """The inner optimizer, and the state that it has, come from outside; the wrapper is no copy of another."""

    def parameters_added(self, slots: Sequence[Slot]) -> None:
        """The windows take these slots, too, from now on, with the ranks that share them."""

    def parameters_moved(self, places: dict[int, int]) -> None:
        """Parameters have new places in the optimizer, by their old ones; those that are not in ``places`` are gone."""

    # -- the inner optimizer's work ----------------------------------------------------------------------------

    def stands_in(self) -> bool:
        """True if the inner optimizer steps other tensors than the model's parameters: some :attr:`Slot.stepped`."""
        return False

    def stepping(self, slots: Sequence[Slot], call: FrameType) -> AbstractContextManager[None]:
        """In the block, which is in ``call``, the inner optimizer is at work, and steps ``slots`` if it steps."""
        return nullcontext()

    def calling(self, slots: Sequence[Slot], call: FrameType) -> AbstractContextManager[None]:
        """In the block, which is in ``call``, another method of the inner optimizer runs; ``slots`` are all that there are."""
        return nullcontext()

    def recover(self) -> None:
        """``param_groups`` are read: end a block of :meth:`stepping` whose call has ended without it (by Ctrl-C)."""

    def run_step(self, closing: Closing, closure: Callable[[], Any] | None, weight: Scalar | None) -> Any:
        """Do what ``step()`` is for, in place of the core, and return what the closure has returned."""

    def flush_begins(self) -> None:
        """``flush()`` was called. May raise, if it cannot apply the open window."""

    def others_may_have_written(self, slots: Sequence[Slot]) -> None:
        """Other code may have written to the model; and replaced gradients of ``slots``, with which the inner optimizer is at work."""

    def stepped(self, slots: Sequence[Slot]) -> None:
        """The inner optimizer has stepped these. May come again, if an exception has broken off what follows a step."""

    # -- micro-batches that can only be dropped together -------------------------------------------------------

    def snapshot(self) -> Any:
        """A copy of what it keeps of the micro-batches that the open window has counted."""

    def roll_back(self, snapshot: Any) -> None:
        """Those that the window has counted since ``snapshot`` was taken no longer count."""

    # -- ranks that share windows ------------------------------------------------------------------------------

    def reduce(self) -> dict[str, float]:
        """Numbers of this rank's window, by names that are the same on all ranks: they are added up at the window's end."""
        return {}

    def reduced(self, totals: dict[str, float], group: Group) -> None:
        """The numbers of all ranks, added up. What they show to be needed may be added up here, on all ranks."""

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save(self) -> Any:
        """Copies of what it needs to continue, as tensors and plain values."""

    def check(self, saved: Any) -> None:
        """Raises ValueError if :meth:`load` could not continue with this."""

    def load(self, saved: Any) -> None:
        """Continue from what :meth:`save` has returned."""

    def join(self, parts: Sequence[Any]) -> Any:
        """What several ranks have saved between two micro-batches, as one rank would have saved it."""


class Extensions:
    """A wrapper's extensions, and for every event the methods that some of them override: a feature that is off costs no call.

    Args:
        off: features that the wrapper does not have.
    """

    def __init__(self, extensions: Iterable[Extension], off: Iterable[type[Extension]] = ()):
        self.all = tuple(extensions)
        self.saved = {e.key: e for e in self.all if e.key is not None}
        self._empty: dict[str, Any] = {e.key: {} for e in off if e.by_parameter and e.key is not None}
        self.by_parameter = [*self._empty, *(key for key, e in self.saved.items() if e.by_parameter)]
        self.micro_batch_counted = self._listening("micro_batch_counted")
        self.micro_batch_dropped = self._listening("micro_batch_dropped")
        self.window_dropped = self._listening("window_dropped")
        self.window_closed = self._listening("window_closed")
        self.newly_wrapped = self._listening("newly_wrapped")
        self.parameters_added = self._listening("parameters_added")
        self.parameters_moved = self._listening("parameters_moved")
        self._stands_in = self._listening("stands_in")
        self._stepping = self._listening("stepping")
        self._calling = self._listening("calling")
        self.recover = self._listening("recover")
        self.run_step = next(iter(self._listening("run_step")), None)  # in place of the core's
        self.flush_begins = self._listening("flush_begins")
        self.others_may_have_written = self._listening("others_may_have_written")
        self.stepped = self._listening("stepped")

    def _listening(self, event: str) -> tuple[Callable[..., Any], ...]:
        return tuple(getattr(e, event) for e in self.all if getattr(type(e), event) is not getattr(Extension, event))

    def of(self, kind: type[Kind]) -> Kind:
        """The one of this kind."""
        return next(e for e in self.all if isinstance(e, kind))

    @property
    def stand_in(self) -> bool:
        """True if the inner optimizer steps other tensors than the model's parameters."""
        return any(stands_in() for stands_in in self._stands_in)

    def stepping(self, slots: Sequence[Slot]) -> ExitStack:
        """What all of them want around a block of the caller's in which the inner optimizer is at work."""
        return _entered(self._stepping, slots, sys._getframe(1))

    def calling(self, slots: Sequence[Slot]) -> ExitStack:
        """What all of them want around a block of the caller's in which another method of the inner optimizer runs."""
        return _entered(self._calling, slots, sys._getframe(1))

    def save(self) -> dict[str, Any]:
        """Their entries in a checkpoint, and empty ones where features that are off have tensors."""
        return self._empty | {key: e.save() for key, e in self.saved.items()}

    def reduce(self) -> dict[tuple[int, str], float]:
        """The numbers of all of them, by whose they are and by name."""
        return {(i, name): number for i, e in enumerate(self.all) for name, number in e.reduce().items()}

    def reduced(self, totals: dict[tuple[int, str], float], group: Group) -> None:
        """Hand each of them its numbers of all ranks."""
        for i, e in enumerate(self.all):
            e.reduced({name: total for (of, name), total in totals.items() if of == i}, group)

    def snapshot(self) -> list[Any]:
        return [e.snapshot() for e in self.all]

    def roll_back(self, snapshot: list[Any]) -> None:
        for e, kept in zip(self.all, snapshot, strict=True):
            e.roll_back(kept)


def _entered(wanted: Sequence[Callable[..., Any]], slots: Sequence[Slot], call: FrameType) -> ExitStack:
    with ExitStack() as stack:
        for around in wanted:
            stack.enter_context(around(slots, call))
        return stack.pop_all()
