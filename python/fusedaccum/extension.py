"""How a feature takes part in a wrapper's windows without the core's knowing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from .buffers.buffers import Slot
    from .distributed.group import Group
    from .gathering.accumulation import Accumulation
    from .scalars import Scalar
    from .window.settings import Settings
    from .window.window import MicroBatch

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
        """Become a part of a wrapper, before it has any parameters, or any that it is for."""
        # A proxy, because the accumulation holds its extensions: dropping the wrapper must free the model at once.
        self.accumulation, self.inner = weakref.proxy(accumulation), inner

    # -- events ------------------------------------------------------------------------------------------------

    def block_begins(self, thread: int) -> None:
        """A block of backward passes that are one micro-batch, which is open, begins in this thread."""

    def block_ends(self) -> None:
        """The block is over, or was not begun, because an exception came before."""

    def pass_begins(self, thread: int | None) -> None:
        """A backward pass of the open micro-batch, called by this thread (None: not known), brings its first gradient. May refuse it."""

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

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        """The wrapper has other parameters than before. Those of ``new`` have no hook yet; some may have no buffer."""

    def buffers_released(self) -> None:
        """What the buffers hold is needed no more: the window was applied and reported, or dropped."""

    # -- what it may refuse ------------------------------------------------------------------------------------

    def check_call(self) -> None:
        """Raises RuntimeError if the wrapper is not to be called."""

    def check_parameter(self, name: str, parameter: Parameter, settings: Settings, left: bool) -> None:
        """Raises ValueError for a parameter that these settings rule out. ``left``: it is taken over from another wrapper."""

    def check_shared(self) -> None:
        """Raises ValueError if ranks cannot share windows of these parameters."""

    def check_weight(self, weight: Scalar) -> None:
        """Raises ValueError for a weight that the micro-batch cannot have."""

    def weighed_elsewhere(self, thread: int | None) -> MicroBatch | None:
        """Another wrapper's micro-batch, if its weight was given to the loss whose backward ``thread`` has called."""
        return None

    # -- gradients on their way --------------------------------------------------------------------------------

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        """True if the slot's gradient is in its buffer, so that ``grad``, which autograd brings, is none. It may be used by other code.

        Asked about a gradient that other code holds, too, about None, and about all of a slot with ``main_grad_enabled``.
        """
        return False

    def select(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> tuple[Sequence[Slot], Sequence[Tensor]]:
        """Those of the gradients of ``slots`` that are to be added."""
        return slots, grads

    def adding(self, slots: Sequence[Slot]) -> None:
        """Gradients are about to be added to the buffers of ``slots``."""

    def added(self, slots: Sequence[Slot]) -> None:
        """Gradients of ``slots`` were added, in one call."""

    def unfinished(self) -> str | None:
        """If a pass that was broken off has left what no hook has told of: why the next one, if that has begun, is refused."""
        return None

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
        self.all: tuple[Extension, ...] = ()
        self._wrapper: tuple[weakref.ref[Accumulation], Optimizer] | None = None
        self.add(extensions)

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        """Make all of them a part of this wrapper, also those that are added later."""
        self._wrapper = weakref.ref(accumulation), inner
        for extension in self.all:
            extension.attach(accumulation, inner)

    def add(self, extensions: Iterable[Extension]) -> None:
        """Have these, too, which are called after the others."""
        new = tuple(extensions)
        self.all += new
        if self._wrapper is not None:
            accumulation, inner = self._wrapper[0](), self._wrapper[1]
            assert accumulation is not None  # it holds this
            for extension in new:
                extension.attach(accumulation, inner)
        self.saved = {e.key: e for e in self.all if e.key is not None}
        self.block_begins = self._listening("block_begins")
        self.block_ends = self._listening("block_ends")
        self.pass_begins = self._listening("pass_begins")
        self.weighed_elsewhere = self._listening("weighed_elsewhere")
        self.micro_batch_counted = self._listening("micro_batch_counted")
        self.micro_batch_dropped = self._listening("micro_batch_dropped")
        self.window_dropped = self._listening("window_dropped")
        self.window_closed = self._listening("window_closed")
        self.parameters_moved = self._listening("parameters_moved")
        self.parameters_changed = self._listening("parameters_changed")
        self.buffers_released = self._listening("buffers_released")
        self.check_call = self._listening("check_call")
        self.check_parameter = self._listening("check_parameter")
        self.check_shared = self._listening("check_shared")
        self.check_weight = self._listening("check_weight")
        self.added_already = self._listening("added_already")
        self.select = self._listening("select")
        self.adding = self._listening("adding")
        self.added = self._listening("added")
        self.unfinished = self._listening("unfinished")

    def _listening(self, event: str) -> tuple[Callable[..., Any], ...]:
        return tuple(getattr(e, event) for e in self.all if getattr(type(e), event) is not getattr(Extension, event))

    def of(self, kind: type[Kind]) -> Kind:
        """The one of this kind."""
        return next(e for e in self.all if isinstance(e, kind))

    def ensure(self, kind: type[Kind]) -> Kind:
        """The one of this kind, which is added if there is none."""
        if not any(isinstance(e, kind) for e in self.all):
            self.add([kind()])
        return self.of(kind)

    def reduce(self) -> dict[tuple[int, str], float]:
        """The numbers of all of them, by whose they are and by name."""
        return {(i, name): number for i, e in enumerate(self.all) for name, number in e.reduce().items()}

    def reduced(self, totals: dict[tuple[int, str], float], group: Group) -> None:
        """Hand each of them its numbers of all ranks."""
        for i, e in enumerate(self.all):
            e.reduced({name: total for (of, name), total in totals.items() if of == i}, group)

    def snapshot(self) -> dict[Extension, Any]:
        return {e: e.snapshot() for e in self.all}

    def roll_back(self, snapshot: dict[Extension, Any]) -> None:
        for e, kept in snapshot.items():
            e.roll_back(kept)
