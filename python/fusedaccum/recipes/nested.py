"""Batches of tensors in dicts, lists, tuples and dataclasses, cut along the first dimension."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with every leaf replaced by ``function(leaf)``; containers are copied.

    Containers are mappings, lists and tuples (named ones too) and instances of dataclasses.
    Anything else is a leaf.
    """
    parts = _parts(tree)
    if parts is None:
        return function(tree)
    return _with(tree, {key: mapped(function, value) for key, value in parts.items()})


def leaves(tree: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Every leaf, with the expression that leads to it: ``batch['image']``, ``batch[0].mask``."""
    parts = _parts(tree)
    if parts is None:
        yield path, tree
        return
    fields = dataclasses.is_dataclass(tree) and not isinstance(tree, Mapping)
    for key, value in parts.items():
        yield from leaves(value, f"{path}.{key}" if fields else f"{path}[{key!r}]")


def batch_size(batch: Any) -> int:
    """The first dimension, which all arrays in ``batch`` share.

    Leaves without one (numbers, strings, 0-d tensors) belong to all samples.

    Raises:
        ValueError: the arrays' first dimensions differ, or there are no arrays, or no samples.
    """
    sizes = {path: leaf.shape[0] for path, leaf in leaves(batch) if is_array(leaf)}
    if not sizes:
        raise ValueError(
            f"the batch, a {type(batch).__name__}, holds no tensors to cut into micro-batches; give it tensors whose "
            "first dimension is the sample, nested in dicts, lists, tuples or dataclasses as you like"
        )
    (first, n), *others = sizes.items()
    for path, size in others:
        if size != n:
            raise ValueError(
                f"{first} holds {n} samples and {path} holds {size}; the first dimension of every tensor in a batch is "
                "the sample. Put what all samples share into the function instead (a closure), and pad samples of "
                "differing sizes"
            )
    if n == 0:
        raise ValueError(f"{first} holds no samples: its first dimension is 0; leave empty batches out")
    return n


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a batch: views of its arrays, and the rest as it is.

    Lists without arrays that have one item per sample (texts, names) are cut too.
    """
    return _cut(batch, start, stop, batch_size(batch))


def call(function: Callable[..., Any], micro_batch: Any) -> Any:
    """Call a module with ``**`` for a mapping, ``*`` for a list or tuple, else as a function.

    A function is called with the micro-batch as it is.
    """
    if isinstance(function, Module) and isinstance(micro_batch, Mapping):
        return function(**micro_batch)
    if isinstance(function, Module) and isinstance(micro_batch, (list, tuple)):
        return function(*micro_batch)
    return function(micro_batch)


def _cut(tree: Any, start: int, stop: int, n: int) -> Any:
    parts = _parts(tree)
    if parts is None:  # checked first, as in leaves(): a dict may claim to have any attribute, an array's too
        return tree[start:stop] if is_array(tree) else tree
    plain = isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields")
    if plain and len(tree) == n and not any(is_array(leaf) for _, leaf in leaves(tree)):
        return tree[start:stop]
    return _with(tree, {key: _cut(value, start, stop, n) for key, value in parts.items()})


def is_array(leaf: Any) -> bool:
    """True for a tensor with dimensions, or something that is cut like one (a NumPy array)."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0
    return hasattr(leaf, "__array__") and len(getattr(leaf, "shape", ())) > 0


def _parts(tree: Any) -> Mapping[Any, Any] | None:
    """A container's parts by their keys; None for a leaf."""
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def _with(tree: Any, parts: dict[Any, Any]) -> Any:
    """A container like ``tree``, with these parts."""
    if isinstance(tree, (dict, UserDict)):  # a copy of any other mapping may share its items with the original
        new = _copied(tree)  # keeps what a subclass has beside its items, such as defaultdict's factory
        if getattr(tree, "__dict__", None) is tree:  # else its attributes would be the items of the whole
            new.__dict__ = new
        own = getattr(new, "__dict__", {})
        for key, value in parts.items():
            if key in own and own[key] is tree[key]:
                own[key] = value  # the class keeps its items as attributes too, which setting an item need not update
            new[key] = value
        return new
    if isinstance(tree, Mapping):
        return type(tree)(parts)  # type: ignore[call-arg]
    if isinstance(tree, (list, tuple)):
        return type(tree)(*parts.values()) if hasattr(tree, "_fields") else type(tree)(parts.values())
    new = _copied(tree)
    for name, value in parts.items():
        object.__setattr__(new, name, value)  # frozen ones too
    return new


def _copied(tree: Any) -> Any:
    """A copy without the values of cached properties, which were computed from the whole."""
    new = copy.copy(tree)
    for kind in type(new).__mro__:
        for name, attribute in vars(kind).items():
            if isinstance(attribute, functools.cached_property):
                getattr(new, "__dict__", {}).pop(name, None)
    return new
