"""What threads do with losses that wrappers accumulate: how many backward passes they call, and which weight these losses were given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..window.ledger import Ledger
from ..window.window import MicroBatch

_WEIGHING: dict[int, Ledger] = {}  # by thread: whose open micro-batch was given the weight of the losses
_PASSES: Counter[int | None] = Counter()  # by thread; None: not known


@contextmanager
def weighing(thread: int, ledger: Ledger) -> Iterator[None]:
    """In the block, the weight of the ledger's open micro-batch is that of the losses whose backward this thread calls."""
    around = _WEIGHING.get(thread)
    _WEIGHING[thread] = ledger
    try:
        yield
    finally:
        if around is None:
            del _WEIGHING[thread]
        else:
            _WEIGHING[thread] = around


def weighed_by_another(thread: int | None, ledger: Ledger) -> MicroBatch | None:
    """Another ledger's micro-batch, if its weight is that of the loss whose backward ``thread`` has called."""
    other = None if thread is None else _WEIGHING.get(thread)
    return None if other is None or other is ledger or not other.has_micro else other.micro


def saw_pass(thread: int | None) -> None:
    """A backward pass that this thread has called is under way, or over, whether or not it reaches any wrapper's parameters."""
    _PASSES[thread] += 1


def passes(thread: int) -> int:
    """How many were seen that this thread has called, or may have."""
    return _PASSES[thread] + _PASSES[None]
