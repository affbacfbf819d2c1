"""Modules that are alive. Nothing on a parameter tells which hold it, so all of them are looked through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TypeVar

M = TypeVar("M")


def modules_alive(kind: type[M], wanted: Callable[[M], bool] = lambda module: True) -> list[M]:
    """Those of this class, or of one that derives from it, that are ``wanted`` and that somebody still holds, in any order.

    Ranks share windows by what is found, and must find the same. A module that was dropped may be part of a cycle, as FSDP2's are, and
    stays until the garbage collector comes by, at another time on every rank. So where anything is found, the collector comes by now.
    """
    found = [weakref.ref(x) for x in gc.get_objects() if issubclass(type(x), kind) and wanted(x)]
    if found:
        gc.collect()
    return [module for ref in found if (module := ref()) is not None]
