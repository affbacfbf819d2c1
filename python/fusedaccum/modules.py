"""Modules that are alive. All are searched, as a parameter does not say which modules hold it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

M = TypeVar("M")

_FROZEN_BEFORE = gc.get_freeze_count()  # some versions of Python freeze some objects of their own


def modules_alive(kind: type[M], wanted: Callable[[M], bool] = lambda module: True) -> list[M]:
    """Modules of this class or a subclass that are ``wanted`` and still referenced, in any order.

    Ranks share windows by what is found, and must find the same. A module that was dropped may be
    part of a reference cycle, as FSDP2's are, and then stays until the garbage collector runs, at a
    different time on every rank. So if anything is found, it runs now.
    """
    with _thawed():
        # Objects refer to their classes: asking which objects do is several times faster than
        # checking the class of every object.
        found = [weakref.ref(x) for x in gc.get_referrers(*_classes(kind)) if issubclass(type(x), kind) and wanted(x)]
        if found:
            gc.collect()
    return [module for ref in found if (module := ref()) is not None]


WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # as what wrappers hold a module


def name_of(held: Module | Tensor) -> str:
    """The name of a module or parameter in the outermost module alive that holds it.

    For example "encoder.layer1.0.bn1". Empty if none holds it. Searches all modules that are alive:
    for messages only.
    """
    above: dict[int, list[tuple[Module, str]]] = {}
    for module in modules_alive(Module):
        for name, below in (*module._modules.items(), *module._parameters.items()):
            wraps = name in WRAPPED or isinstance(module, (DataParallel, DistributedDataParallel))
            above.setdefault(id(below), []).append((module, "" if wraps else name))

    def path(of: object, seen: frozenset[int]) -> list[str]:
        paths = [[*path(m, seen | {id(m)}), name] for m, name in above.get(id(of), ()) if id(m) not in seen]
        return max(([name for name in names if name] for names in paths), key=len, default=[])

    return ".".join(path(held, frozenset((id(held),))))


def collect_garbage() -> None:
    """``gc.collect()``, also of what the caller has frozen."""
    with _thawed():
        gc.collect()


def _classes(kind: type) -> set[type]:
    return {kind}.union(*map(_classes, kind.__subclasses__()))


@contextmanager
def _thawed() -> Iterator[None]:
    """In the block, the collector sees what ``gc.freeze()`` hid; all is frozen after that."""
    frozen = gc.get_freeze_count() > _FROZEN_BEFORE
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
