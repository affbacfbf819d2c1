"""Batch statistics of a window: what BatchNorm layers saw, pooled, and moved into buffers once.

A layer's *call* is its k-th forward within a micro-batch, or within a part of one. The k-th calls
in all micro-batches are one population, as the k-th call of the big batch would see it. Nothing
here waits for the device, except over ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.buffers import Buffers
from ..core.extension import Extension
from ..engine import without_grad
from ..modules import modules_alive, name_of
from ..scalars import widened, widest
from ..warn import warn
from .moments import Total, merge, summed

if TYPE_CHECKING:
    from ..core.apply import Conclusion
    from ..core.window import MicroBatch
    from ..distributed.group import Group

Key = tuple[int, int]  # the slot by which a layer follows its wrapper, and its number among the model's modules


class Layer(Protocol):
    """A BatchNorm layer that leaves its running statistics to its wrapper."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor
    momentum: float | None

    def follows(self) -> tuple[BatchNormStats, Key] | None:
        """The statistics that the layer takes part in now, and its key there."""


LAYERS: weakref.WeakSet[Any] = weakref.WeakSet()  # every Layer that is alive
TOLD: weakref.WeakSet[Any] = weakref.WeakSet()  # layers of which a warning has told that they do not split


@dataclass
class Call:
    """One forward.

    Attributes:
        k: its number within its part of the micro-batch.
        n: values per channel on this rank.
        moments: mean and unbiased variance [2, C], taken over ``ranks`` ranks.
    """

    k: int
    n: int
    moments: Tensor
    ranks: int


class BatchNormStats(Extension):
    """Keeps calls until their micro-batch is counted, and totals until their window closes."""

    key = "batch_statistics"
    asleep = True  # until a layer brings statistics

    def __init__(self) -> None:
        self._pending: dict[Key, list[Call]] = {}
        self._in_part: Counter[Key] = Counter()  # calls in the part of a micro-batch that is under way
        self._counted: dict[Key, list[Total]] = {}
        # ``_counted`` with the open micro-batch, and the layers' buffers after the window. They are
        # computed before the events that make them count, so that Ctrl-C meanwhile changes nothing.
        self._counted_then: dict[Key, list[Total]] = {}
        self._moved: dict[Tensor, Tensor] = {}

    def record(self, key: Key, n: int, moments: Tensor, ranks: int) -> None:
        """A forward, as :class:`Call` has it."""
        self.accumulation.extensions.wake(self)
        self._pending.setdefault(key, []).append(Call(self._in_part[key], n, moments, ranks))
        self._in_part[key] += 1

    def parameters_moved(self, places: dict[int, int]) -> None:
        self._pending = {(places[i], number): of for (i, number), of in self._pending.items() if i in places}
        self._in_part = Counter({(places[i], number): k for (i, number), k in self._in_part.items() if i in places})
        self._counted = {(places[i], number): of for (i, number), of in self._counted.items() if i in places}

    def in_parts(self) -> Callable[[], None]:
        """A micro-batch comes in parts from here on. Returns a function to call before each."""
        before = self._in_part.copy()

        def part_begins() -> None:
            self._in_part = before.copy()

        return part_begins

    # -- as an Extension ---------------------------------------------------------------------------

    @without_grad
    def micro_batch_ends(self, micro: MicroBatch) -> None:
        self._counted_then = copied(self._counted) if self._pending else self._counted
        rounds: list[tuple[list[Total], list[Call]]] = []  # no total occurs twice in one
        for key, pending in self._pending.items():
            counted, times = self._counted_then.setdefault(key, []), Counter[int]()
            for call in pending:
                if call.k == len(counted):
                    counted.append(Total(0.0, torch.zeros_like(call.moments, dtype=widest(call.moments.device))))
                if times[call.k] == len(rounds):
                    rounds.append(([], []))
                totals, calls = rounds[times[call.k]]
                totals.append(counted[call.k])
                calls.append(call)
                times[call.k] += 1
        for totals, calls in rounds:
            merge(totals, parts_of(calls, totals))

    def micro_batch_counted(self, micro: MicroBatch) -> None:
        self._counted, self._pending, self._in_part = self._counted_then, {}, Counter()

    def micro_batch_dropped(self) -> None:
        self._pending.clear()
        self._in_part.clear()

    def snapshot(self) -> dict[Key, list[Total]]:
        return copied(self._counted)

    def roll_back(self, snapshot: dict[Key, list[Total]]) -> None:
        self._counted = snapshot

    def window_dropped(self) -> None:
        self._counted.clear()

    @without_grad
    def closing(self, end: Conclusion) -> None:
        self._moved = {}
        for key, layer in sorted(self._layers(), key=lambda found: found[0]):  # in which order they share buffers
            if layer.running_mean is not None and key in self._counted:  # else they have been taken away since
                move(layer, self._counted[key], self._moved)

    def window_closed(self) -> None:
        self._move()

    def window_reported(self, end: Conclusion) -> None:
        if self._moved:  # Ctrl-C came in the place of the above
            self._move()

    @without_grad
    def _move(self) -> None:
        if self._moved:
            torch._foreach_copy_([*self._moved], [*self._moved.values()])  # one call, which Ctrl-C cannot break off
        self._moved, self._counted = {}, {}

    def reduce(self) -> dict[str, float]:
        return {"pools": bool(self._counted)}

    @without_grad
    def reduced(self, totals: dict[str, float], group: Group) -> None:
        if totals["pools"]:
            self.accumulation.extensions.wake(self)
            self._counted = over_ranks(group, self._counted)

    def _layers(self) -> list[tuple[Key, Layer]]:
        """The layers here, and some that were dropped but not collected yet.

        So nothing that ranks do together may depend on them.
        """
        return [(place[1], layer) for layer in list(LAYERS) if (place := layer.follows()) and place[0] is self]

    def save(self) -> dict[str, Any]:
        """Of the layers that are here: what others have left, such as restored ones, is void."""
        here = {key for key, _ in self._layers()}
        pending = [(key, of) for key, of in self._pending.items() if key in here]
        counted = [(key, of) for key, of in self._counted.items() if key in here]
        return {
            "pending": [[*key, [[c.k, c.n, c.moments.clone(), c.ranks] for c in of]] for key, of in pending],
            "counted": [[*key, [[t.n, t.moments.clone()] for t in of]] for key, of in counted],
        }

    def check(self, saved: dict[str, Any]) -> None:
        here = {key for key, _ in self._layers()}
        missing = [key for *key, _ in saved["pending"] + saved["counted"] if tuple(key) not in here]
        if missing:
            raise ValueError(
                f"the checkpoint was taken inside a window and holds batch statistics of {len(missing)} BatchNorm "
                "layers that do not accumulate theirs here; call fa.accumulate_batchnorm(model) before "
                "load_state_dict(), or save at a window's end"
            )

    def load(self, saved: dict[str, Any]) -> None:
        def here(moments: Tensor, slot: int) -> Tensor:
            device = self.accumulation.sums.buffers.slots[slot].param.device
            return moments.to(device, widest(device), copy=True)

        if saved["pending"] or saved["counted"]:
            self.accumulation.extensions.wake(self)
        self._pending = {
            (slot, number): [Call(k, n, here(moments, slot), ranks) for k, n, moments, ranks in of]
            for slot, number, of in saved["pending"]
        }
        self._in_part = Counter({key: 1 + max(call.k for call in of) for key, of in self._pending.items()})
        self._counted = {
            (slot, number): [Total(n, here(moments, slot)) for n, moments in of]
            for slot, number, of in saved["counted"]
        }

    def join(self, parts: Sequence[dict[str, Any]], mine: Sequence[int], ranks: int) -> dict[str, Any]:
        counted: dict[Key, list[Total]] = {}
        here = [parts[i] for i in mine]
        for part in here:
            for slot, number, of in part["counted"]:
                totals = counted.setdefault((slot, number), [])
                for k, (n, moments) in enumerate(of):
                    if k == len(totals):
                        totals.append(Total(0.0, torch.zeros_like(moments)))
                    merge([totals[k]], [Total(n, moments)])
        saved = [[*key, [[t.n, t.moments] for t in of]] for key, of in counted.items()]
        return {"pending": [], "counted": saved}


def parts_of(calls: list[Call], totals: list[Total]) -> list[Total]:
    """What each call adds to its total, in three kernels for all of them.

    The unbiased variance is ``squares / (n - 1)`` with the n of all ranks that it was taken over,
    which one rank does not know: a rank's share of the squares is
    ``variance * (its n - 1 / ranks)``, and the shares add up.
    """
    parts = [torch.empty_like(total.moments) for total in totals]
    torch._foreach_copy_(parts, [call.moments for call in calls])
    torch._foreach_mul_([moments[1] for moments in parts], [call.n - 1 / call.ranks for call in calls])
    return [Total(call.n, moments) for call, moments in zip(calls, parts, strict=True)]


def over_ranks(group: Group, counted: dict[Key, list[Total]]) -> dict[Key, list[Total]]:
    """The totals of all ranks, also of calls that this one has not made. Four small collectives."""
    here = {(key, k): total for key, of in counted.items() for k, total in enumerate(of)}
    widths = {place: total.moments.shape[1] for place, total in here.items()}
    places = sorted({place: width for theirs in group.all_gather(widths) for place, width in theirs.items()}.items())
    mine = [here.get(place) or Total(0.0, torch.zeros(2, width, dtype=torch.float64)) for place, width in places]
    result: dict[Key, list[Total]] = {}
    for ((key, _), _), total in zip(places, summed(mine, group), strict=True):
        result.setdefault(key, []).append(total)
    return result


def copied(counted: dict[Key, list[Total]]) -> dict[Key, list[Total]]:
    """Totals in memory of their own, by one kernel."""
    result = {key: [Total(t.n, torch.empty_like(t.moments)) for t in of] for key, of in counted.items()}
    if result:
        mine, theirs = ([t.moments for of in totals.values() for t in of] for totals in (result, counted))
        torch._foreach_copy_(mine, theirs)
    return result


def move(layer: Layer, totals: Sequence[Total], moved: dict[Tensor, Tensor]) -> None:
    """Add to ``moved`` what forwards of the whole window would make of the layer's buffers.

    It has that already of those that the layer shares with others. A forward whose batch is not
    all finite changes nothing.
    """
    assert layer.running_mean is not None and layer.running_var is not None
    buffers = [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    values = [moved.get(buffer, buffer) for buffer in buffers]
    for total in totals:
        mean, squares = total.moments.to(values[0].device)
        var = squares / (total.n - 1)
        finite = torch.isfinite(mean).all() & torch.isfinite(var).all()
        values[2] = values[2] + finite
        momentum = 1 / widened(values[2]) if layer.momentum is None else layer.momentum
        for i, pooled in ((0, mean), (1, var)):
            new = widened(values[i]) * (1 - momentum) + pooled * momentum
            values[i] = torch.where(finite, new.to(values[i].dtype), values[i])
    moved.update(zip(buffers, values, strict=True))


class BatchNormsLeftOut(Extension):
    """Looks for layers that should be in :class:`BatchNormStats`.

    Does so once, at the end of the first window of several micro-batches.
    """

    def __init__(self) -> None:
        self._micro_batches = 0  # that this rank has counted in the open window

    def micro_batch_counted(self, micro: MicroBatch) -> None:
        self._micro_batches += 1

    def window_dropped(self) -> None:
        self._micro_batches = 0

    def window_closed(self) -> None:
        several, self._micro_batches = self._micro_batches > 1, 0
        if several:
            self.accumulation.extensions.sleep(self)
            note_unpooled(self.accumulation.sums.buffers)


_noted = False


def note_unpooled(buffers: Buffers) -> None:
    """Warn, once per process, of layers that move running statistics on every micro-batch.

    They are those whose weights are accumulated. A wrapper knows parameters only, so this looks
    through all modules that are alive, unless no two vectors have the same size, as a BatchNorm's
    weight and bias have.
    """
    global _noted
    vectors = Counter(slot.param.numel() for slot in buffers.slots if slot.param.dim() == 1)
    if _noted or not vectors or max(vectors.values()) < 2:
        return
    places = {id(slot.param): slot.index for slot in buffers.slots}

    def unpooled(module: _BatchNorm) -> bool:
        return (
            module not in LAYERS
            and module not in TOLD
            and id(getattr(module, "weight", None)) in places  # one that is being copied has none yet
            and module.training
            and bool(module.track_running_stats)
        )

    found = modules_alive(_BatchNorm, unpooled)
    if found:
        _noted = True
        first = min(found, key=lambda module: places[id(module.weight)])
        warn(
            f"{len(found)} BatchNorm layer(s), the first being {name_of(first) or 'the model'} "
            f"({type(first).__name__}), update their running statistics with every micro-batch, not once per window "
            "with those of the whole window; call fa.accumulate_batchnorm(model), or, if this is intended, "
            "warnings.filterwarnings('ignore', '.*BatchNorm layer'). See docs/batch-norm.md",
            UserWarning,
        )
