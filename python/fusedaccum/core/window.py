"""When windows close, and what is counted for the open micro-batch and window.

Numbers and 0-d tensors only. Weights that are tensors stay on their device, so nothing here waits
for one, except where a sum of tensor weights closes the window (that sum has to be read).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from ..scalars import Scalar, add, checked_count, checked_weight

if TYPE_CHECKING:
    from ..last_window import LastWindow
    from .buffers import Slot


def checked_steps(steps: Any, name: str = "accum_steps") -> int:
    """``accum_steps`` as an int; raises as :func:`checked_count`."""
    return checked_count(
        steps,
        name,
        "; it is the number of micro-batches in a window (desired // tolerable divides without leaving int), "
        "and flush() applies what is left over at the end",
    )


@runtime_checkable
class AdaptiveSteps(Protocol):
    """An ``accum_steps`` callable that adapts to the windows that have closed."""

    def __call__(self, index: int) -> int: ...

    def window_closed(self, window: LastWindow, ranks: int) -> None:
        """Called with every window that has closed, and the number of ranks that shared it."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for checkpoints."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Schedule:
    """When a window closes: after ``accum_steps``, at a sum of weights, or when the caller says."""

    accum_steps: int | Callable[[int], int] | None = None
    window_weight: float | None = None

    @classmethod
    def checked(cls, accum_steps: Any, window_weight: Any) -> Schedule:
        """Build from the arguments; raises as :func:`checked_steps` and :func:`checked_weight`."""
        if accum_steps is not None and window_weight is not None:
            raise ValueError(
                f"accum_steps={accum_steps!r} and window_weight={window_weight!r} both say when a window closes; give "
                "one of them"
            )
        if accum_steps is not None and not callable(accum_steps):
            accum_steps = checked_steps(accum_steps)
        if window_weight is not None:
            window_weight = float(checked_weight(window_weight, "window_weight"))
            if window_weight == 0:
                raise ValueError("window_weight must be greater than 0, got 0.0")
        return cls(accum_steps, window_weight)

    @functools.cached_property  # a check against a protocol takes 20 µs
    def adaptive(self) -> AdaptiveSteps | None:
        return self.accum_steps if isinstance(self.accum_steps, AdaptiveSteps) else None

    @functools.cached_property
    def caller_owned(self) -> bool:
        """True if every ``step()`` closes the window."""
        return self.accum_steps is None and self.window_weight is None

    def length(self, index: int) -> int | None:
        """Micro-batches in window ``index``, or None if something else closes it."""
        if callable(self.accum_steps):
            return checked_steps(self.accum_steps(index), f"accum_steps({index})")
        return self.accum_steps

    def resumed(self, state: dict[str, Any] | None) -> Schedule:
        """A schedule that goes on as this one will when an adaptive one's ``state`` is loaded."""
        if self.adaptive is None or state is None:
            return self
        steps = copy.copy(self.adaptive)
        steps.load_state_dict(state)
        return replace(self, accum_steps=steps)

    def complete(self, length: int | None, micro_batches: int, weight: Scalar) -> bool:
        """True if a window of these contents is full. Reads a tensor weight that decides."""
        if length is not None:
            return micro_batches >= length
        # Ten weights of 0.1 add up to a little less than 1.
        return self.window_weight is None or bool(weight >= self.window_weight * (1 - 1e-12))

    def may_complete(self, length: int | None, micro_batches: int, weight: Scalar) -> bool:
        """As :meth:`complete`, but says True rather than wait for a device."""
        if self.window_weight is not None and isinstance(weight, Tensor):
            return True
        return self.complete(length, micro_batches, weight)


class MicroBatchState(Enum):
    """How far the open micro-batch has come.

    OPEN -> ADDED or REJECTED, where an extension judges it whole; OPEN <-> IDLE. ``step()`` counts
    it, in whichever of them it is.
    """

    OPEN = auto()  # backward passes add to it
    IDLE = auto()  # its block was left without a backward (by ``continue``): counts for nothing, unless step() follows
    ADDED = auto()  # its gradients were held, judged and added: no more may follow
    REJECTED = auto()  # its gradients were held, judged and dropped: it is counted as one that is left out


class WindowState(IntEnum):
    """How far a complete window has come. (One that is not is a :class:`Window`.)

    If something raises on the way, nothing is rolled back: the next ``step()`` or ``flush()`` goes
    on from there, with the gradient that ``p.grad`` is by then.
    """

    CLOSED = auto()  # it is known what it comes to; the next gradient begins another
    STEPPED = auto()  # the inner optimizer has stepped with it, or it is skipped
    BROADCAST = auto()  # the other ranks have what this one has stepped; what is left is to report it


@dataclass
class MicroBatch:
    """The open micro-batch: everything between two commits."""

    state: MicroBatchState = MicroBatchState.OPEN

    weight: Scalar | None = None  # None: not given
    assumed: bool = False  # True if it is the weight that another wrapper was given for the same loss
    factor: Scalar = 1.0  # c_i, which multiplies its loss, and its gradients
    in_loss: bool = False  # True if the loss was multiplied by the weight, so that the gradient comes with it
    last: bool = False  # True if the caller has said that the window ends with it
    adds: int = 0  # calls that have added part of it; after one, a weight comes too late
    nonfinite: Scalar = 0  # elements that were not finite, as far as they were counted
    counts: list[Tensor] = field(default_factory=list)  # counts that are not part of ``nonfinite`` yet
    passes: int = 0  # outermost backward passes
    parts: int = 0  # blocks of passes, and passes outside of any
    arrived: int = 0  # gradients that have been added
    arrived_first: int = 0  # those of the first part
    in_place: list[Slot] = field(default_factory=list)  # to whose sums their layers have added by themselves
    nested: bool = False  # True if a pass had re-entrant parts, each of which brings a parameter a gradient of its own
    # True if it may be run again. Then no layer adds by itself, and no sum is sent to other ranks.
    repeatable: bool = False
    # True if an earlier attempt has added its gradient for some parameters already, so that the
    # buffers hold more than the micro-batches that were counted.
    partial: bool = False

    @property
    def judged(self) -> bool:
        """True if it was judged whole, so that no more may follow."""
        return self.state in (MicroBatchState.ADDED, MicroBatchState.REJECTED)

    @property
    def rejected(self) -> bool:
        return self.state is MicroBatchState.REJECTED

    def value(self) -> Scalar:
        """The weight; 1 if none was given."""
        return 1.0 if self.weight is None else self.weight

    def begin_part(self) -> None:
        """A block of passes begins, or a pass outside of any."""
        if self.parts == 1:
            self.arrived_first = self.arrived
        self.parts += 1

    @property
    def parts_alike(self) -> bool:
        """True if each part brought as many gradients as the first. (Chunks of a loss do not.)"""
        return self.arrived == self.parts * self.arrived_first

    def factor_left(self) -> Scalar:
        """The factor by which its gradients still have to be multiplied."""
        return 1.0 if self.in_loss else self.factor


# What is added up over the ranks that share a window; and what commit() changes in one.
REDUCED = ("weight", "micro_batches", "dropped", "nonfinite", "void")
COUNTED = ("micro_batches", "weight", "unweighed", "nonfinite")


@dataclass
class Window:
    """The open window. Its buffers hold ``sum(c_i * g_i)``, times what extensions have them carry.

    c_i = w_i for "mean", else 1 (0 if w_i is 0).
    """

    index: int
    length: int | None
    micro_batches: int = 0
    weight: Scalar = 0.0
    unweighed: int = 0  # micro-batches whose weight is still to come (caller-owned windows of "sum" and "none")
    dropped: int = 0  # micro-batches that were left out because a value was not finite
    nonfinite: Scalar = 0  # micro-batches that were added with such a value
    void: bool = False  # True if it is known that it will not be applied, so that the rest of it adds nothing
    # Micro-batches to count beyond those held here, in a window that another number of ranks began.
    carried: int | None = None

    @property
    def empty(self) -> bool:
        return self.micro_batches == 0 and self.carried is None

    @property
    def has_any(self) -> bool:
        """True if it has accumulated, or dropped, anything."""
        return not self.empty or self.dropped > 0

    def steps(self, ranks: int) -> int:
        """Micro-batches as ``accum_steps`` counts them: among several ranks, also dropped ones, or
        a rank would keep the others waiting.
        """
        return self.micro_batches + (self.dropped if ranks > 1 else 0) + (self.carried or 0)

    @property
    def counted(self) -> dict[str, Any]:
        """What :meth:`commit` changes."""
        return {name: getattr(self, name) for name in COUNTED}

    def drop(self, before: dict[str, Any] | None) -> None:
        """Leave out a micro-batch, and others counted since :attr:`counted` was ``before``."""
        self.dropped += 1
        if before is not None:
            self.dropped += self.micro_batches - before["micro_batches"]
            vars(self).update(before)

    def commit(self, micro: MicroBatch, weight: Scalar | None) -> None:
        """Count a micro-batch of this weight (None: it comes later); nothing, if adding raises."""
        nonfinite = add(self.nonfinite, micro.nonfinite > 0)
        weights = self.weight if weight is None else add(self.weight, weight)
        # No call lies between here and its end: errors and Ctrl-C leave no part of the counts.
        self.nonfinite, self.weight = nonfinite, weights
        self.micro_batches += 1
        self.unweighed += weight is None
