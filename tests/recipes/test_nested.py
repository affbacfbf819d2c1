"""Batches in containers are cut into micro-batches, keeping their types and all that is not cut."""

import collections
import collections.abc
import functools
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from fusedaccum.recipes.nested import batch_size, cut, leaves, mapped

Pair = collections.namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "all"
    made: torch.Tensor = field(init=False, default=torch.tensor(1.0))


@dataclass
class Counted:
    labels: torch.Tensor

    @functools.cached_property
    def tokens(self):
        return int((self.labels != -100).sum())


class Attributes(dict):
    """A common recipe: items are attributes too, because ``__dict__`` is the dict itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Shown(dict):
    """Items become attributes too, once, when it is made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__.update(self)
        self.name = "shown"


class Dotted(dict):
    """A common recipe; it has every attribute one asks for, which is None if it is no item."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class Own(collections.abc.MutableMapping):
    """A typical mapping class; copy.copy() of it shares the dict inside."""

    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


X = torch.randn(7, 3)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        [X, X[:, 0]],
        (X, {"a": X, "b": [X, X]}),
        Pair(X, X[:, :1]),
        Frozen(X),
        collections.OrderedDict(x=X),
        collections.defaultdict(list, x=X),
        collections.UserDict(x=X),
        Own({"x": X}),
        Attributes(x=X),
        Dotted(x=X),
        types.MappingProxyType({"x": X}),
        {"x": X, "scale": 2.0, "t": torch.tensor(3.0), "none": None, "name": "abcdefg"},
        {"x": X, "texts": list("abcdefg"), "pairs": [(1, 2)] * 7},
        {"x": X, "array": np.arange(14).reshape(7, 2)},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_cut_keeps_the_structure_and_every_sample_once(batch):
    assert batch_size(batch) == 7
    parts = [cut(batch, start, stop) for start, stop in ((0, 3), (3, 6), (6, 7))]
    assert all(type(part) is type(batch) for part in parts)
    assert [batch_size(part) for part in parts] == [3, 3, 1]
    whole = dict(leaves(batch))
    for path, leaf in leaves(parts[1]):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            assert torch.equal(leaf, whole[path][3:6])
            assert leaf.data_ptr() == whole[path][3:6].data_ptr()  # a view
        elif isinstance(leaf, np.ndarray):
            assert (leaf == whole[path][3:6]).all()
    if isinstance(batch, dict) and "texts" in batch:
        assert parts[1]["texts"] == list("def") and len(parts[2]["pairs"]) == 1
    if isinstance(batch, dict) and "scale" in batch:
        assert {k: v for k, v in parts[2].items() if k != "x"} == {k: v for k, v in batch.items() if k != "x"}
    if isinstance(batch, collections.defaultdict):
        assert parts[0].default_factory is list
    assert torch.equal(torch.cat([next(leaf for _, leaf in leaves(p)) for p in parts]), X)


def test_items_that_are_attributes_too_are_cut_as_both():
    batch = Attributes(x=X)
    part = cut(batch, 0, 3)
    assert part.x is part["x"] and torch.equal(part.x, X[:3])
    part.y = 1
    assert part["y"] == 1 and batch.x is X and list(batch) == ["x"]


def test_items_that_were_made_attributes_are_cut_as_both():
    batch = Shown(x=X, name="item")
    part = cut(batch, 0, 3)
    assert part.x is part["x"] and torch.equal(part.x, X[:3])
    assert (part.name, part["name"]) == ("shown", "item") and batch.x is X


def test_a_part_computes_its_cached_properties_itself():
    batch = Counted(torch.tensor([1, -100, 1, 1, -100]))
    assert batch.tokens == 3  # now cached
    parts = [cut(batch, 0, 2), cut(batch, 2, 5)]
    assert [part.tokens for part in parts] == [1, 2] and batch.tokens == 3
    assert mapped(lambda leaf: leaf * 0, parts[1]).tokens == 3


def test_mapped_leaves_the_tree_alone():
    tree = {"a": [X, 2], "b": Frozen(X)}
    doubled = mapped(lambda leaf: leaf * 2, tree)
    assert torch.equal(doubled["a"][0], 2 * X) and doubled["a"][1] == 4 and doubled["b"].name == "allall"
    assert tree["a"][0] is X and tree["b"].x is X


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": X, "mask": torch.ones(3, 3)}, r"batch\['x'\] holds 7 samples and batch\['mask'\] holds 3"),
        ([Frozen(X), torch.ones(2)], r"batch\[0\].x holds 7 samples and batch\[1\] holds 2"),
        ({"text": "abc"}, "a dict, holds no tensors"),
        (torch.tensor(1.0), "a Tensor, holds no tensors"),
        (torch.ones(0, 3), "holds no samples"),
    ],
)
def test_what_is_no_batch_is_refused_by_name(batch, says):
    with pytest.raises(ValueError, match=says):
        batch_size(batch)


def test_lists_that_are_as_long_as_the_batch_by_chance():
    batch = {"both": [X[:2], X[2:4]], "names": Pair("a", "b"), "more": ["c", "d", "e"], "x": X[:2]}
    part = cut(batch, 1, 2)
    assert torch.equal(part["both"][0], X[1:2]) and torch.equal(part["both"][1], X[3:4])
    assert part["names"] == ("a", "b") and type(part["names"]) is Pair and part["more"] == ["c", "d", "e"]


def test_what_a_mapping_has_besides_its_items_stays():
    class Encoding(collections.UserDict):
        """As those of tokenizers."""

        def __init__(self, items, kind):
            super().__init__(items)
            self.kind = kind

    batch = Encoding({"x": X}, "fast")
    part = cut(batch, 0, 3)
    assert part.kind == "fast" and torch.equal(part["x"], X[:3]) and batch["x"] is X
