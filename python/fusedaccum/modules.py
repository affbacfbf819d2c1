"""Modules that are alive. Nothing on a parameter tells which hold it, so all of them are looked through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

M = TypeVar("M")

_FROZEN_BEFORE = gc.get_freeze_count()  # some versions of Python do it to some objects of their own


def modules_alive(kind: type[M], wanted: Callable[[M], bool] = lambda module: True) -> list[M]:
    """Those of this class, or of one that derives from it, that are ``wanted`` and that somebody still holds, in any order.

    Ranks share windows by what is found, and must find the same. A module that was dropped may be part of a cycle, as FSDP2's are, and
    stays until the garbage collector comes by, at another time on every rank. So where anything is found, the collector comes by now.
    """
    with _thawed():
        # Objects refer to their classes: to be told which do is several times faster than to look at the class of each there is.
        found = [weakref.ref(x) for x in gc.get_referrers(*_classes(kind)) if issubclass(type(x), kind) and wanted(x)]
        if found:
            gc.collect()
    return [module for ref in found if (module := ref()) is not None]


def _classes(kind: type) -> set[type]:
    return {kind}.union(*map(_classes, kind.__subclasses__()))


@contextmanager
def _thawed() -> Iterator[None]:
    """Also with what the caller has put out of the collector's sight, and ours, with ``gc.freeze()``; all is, after this."""
    frozen = gc.get_freeze_count() > _FROZEN_BEFORE
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
