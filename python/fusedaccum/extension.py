"""How a feature takes part in a wrapper's windows without the core's knowing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .distributed.group import Group
    from .gathering.accumulation import Accumulation

Kind = TypeVar("Kind", bound="Extension")


class Extension:
    """One feature of one wrapper. The core calls these methods; a feature overrides those that it needs. features.py has their order.

    Attributes:
        key: of the feature's entry in a checkpoint; None for one that has nothing to continue from.
        accumulation: the wrapper's, of which this is a part. inner: the optimizer that is wrapped.
    """

    key: str | None = None
    accumulation: Accumulation
    inner: Optimizer

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

    def parameters_moved(self, places: dict[int, int]) -> None:
        """Parameters have new places in the optimizer, by their old ones; those that are not in ``places`` are gone."""

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
    """A wrapper's extensions, and for every event the methods that some of them override: a feature that is off costs no call."""

    def __init__(self, extensions: Iterable[Extension]):
        self.all = tuple(extensions)
        self.saved = {e.key: e for e in self.all if e.key is not None}
        self.micro_batch_counted = self._listening("micro_batch_counted")
        self.micro_batch_dropped = self._listening("micro_batch_dropped")
        self.window_dropped = self._listening("window_dropped")
        self.window_closed = self._listening("window_closed")
        self.parameters_moved = self._listening("parameters_moved")

    def _listening(self, event: str) -> tuple[Callable[..., None], ...]:
        return tuple(getattr(e, event) for e in self.all if getattr(type(e), event) is not getattr(Extension, event))

    def of(self, kind: type[Kind]) -> Kind:
        """The one of this kind."""
        return next(e for e in self.all if isinstance(e, kind))

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
