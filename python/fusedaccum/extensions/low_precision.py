"""16-bit buffers: a running mean, which fits where the gradient fits, perhaps rounded at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ..autograd.streams import capturing
from ..core.buffers import Slot
from ..core.extension import Extension
from ..distributed.shards import over_meshes
from ..inner import asked_dtypes
from ..ops import StochasticRounding
from ..parts import local_of
from ..scalars import Scalar, add, div, or_one

if TYPE_CHECKING:
    from ..core.config import Settings
    from ..core.window import MicroBatch


def may_be_narrow(settings: Settings, inner: Optimizer) -> bool:
    """True if a dtype is asked for with which buffers may have 16 bits."""
    asked = asked_dtypes(inner, settings.buffer_dtype)  # what is no dtype is refused with its parameter
    return any(dtype is None or (isinstance(dtype, torch.dtype) and dtype.itemsize < 4) for dtype in asked)


DRAWS_APART = 1 << 44  # random numbers set aside for one add of all parameters


class RunningMeans(Extension):
    """Divides what 16-bit buffers hold by the weight, or number, of the micro-batches so far."""

    def __init__(self) -> None:
        # A micro-batch and its divisor: computed once, as buffers that share it take one call.
        self._divisor: tuple[MicroBatch, Scalar] | None = None

    def as_mean(self, slots: Sequence[Slot], scale: Scalar) -> tuple[Scalar, Scalar]:
        if not slots[0].half_precision:
            return scale, 1.0
        micro = self.accumulation.ledger.micro
        if self._divisor is None or self._divisor[0] is not micro:
            self._divisor = micro, self._running_divisor()
        return div(scale, self._divisor[1]), self._divisor[1]

    def _running_divisor(self) -> Scalar:
        ledger = self.accumulation.ledger
        if ledger.reduction == "none":
            return 1.0
        if ledger.mixes_ranks:
            # Must be the same on all ranks, as their weights (which are in the gradients) are not:
            # those that hold the same part have to round alike.
            return ledger.ranks * (ledger.steps + 1.0)
        if ledger.reduction == "sum":
            return ledger.window.micro_batches + 1.0
        return or_one(add(ledger.window.weight, ledger.micro.value()))


class RandomRounding(Extension):
    """``rounding="stochastic"``: each add to a parameter's 16-bit buffer draws numbers of its own.

    Attributes:
        seed: below 2**53, and the same on all ranks.
    """

    key = "rounding"

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        if not may_be_narrow(settings, inner):
            raise ValueError(
                f"rounding='stochastic' is for 16-bit buffers, but buffer_dtype is {settings.buffer_dtype}; "
                "use buffer_dtype=torch.bfloat16, or rounding='nearest'"
            )

    def __init__(self) -> None:
        self.seed = 0
        self._draws: dict[Slot, int] = {}  # adds so far
        self._before: dict[Slot, int] = {}  # numbers that an add reserves for the parameters before this one

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        slots, before = self.accumulation.sums.buffers.slots, 0
        self._draws = {slot: self._draws.get(slot, 0) for slot in slots}
        self._before.clear()
        for slot in slots:
            self._before[slot] = before
            before += -(-local_of(slot.param).numel() // 8) * 8  # kernels draw blocks of 8

    def newly_wrapped(self) -> None:
        self._agree(int(torch.randint(2**53, (), device="cpu")))

    def built_again(self, before: Extension) -> None:
        assert isinstance(before, RandomRounding)
        self._agree(before.seed)

    def _agree(self, mine: int) -> None:
        least = int(self.accumulation.ranks.least(mine))  # replicas of a shard round alike
        self.seed = over_meshes("MIN", least, self.accumulation.sums.buffers.slots)

    def rounding(self, slots: Sequence[Slot]) -> StochasticRounding | None:
        if not slots[0].half_precision:
            return None
        if capturing(slots[0].device):
            raise RuntimeError(
                "rounding='stochastic' cannot be captured in a CUDA graph: every replay would draw the same numbers; "
                "use rounding='nearest', or FP32 buffers (buffer_dtype=torch.float32)"
            )
        counters = [(self._draws[slot] * DRAWS_APART + self._before[slot]) % (1 << 64) for slot in slots]
        for slot in slots:
            self._draws[slot] += 1
        # Ranks draw different numbers: with equal ones, rounding errors would not average out.
        rank = self.accumulation.ranks.rank if slots[0].part is None else 0
        return StochasticRounding(self.seed + rank, counters)

    def save(self) -> dict[str, Any]:
        return {"seed": self.seed, "draws": list(self._draws.values())}

    def load(self, saved: dict[str, Any]) -> None:
        self.seed = saved["seed"]
        self._draws = dict(zip(self._draws, saved["draws"], strict=True))

    def started_anew(self) -> None:
        self._draws = dict.fromkeys(self._draws, 0)

    def join(self, parts: Sequence[dict[str, Any]], mine: Sequence[int], ranks: int) -> dict[str, Any]:
        return parts[mine[0] if mine else 0]
