"""``last_window.loss``: micro-batches' losses, weighted, summed and divided as gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.extension import Extension, LossFrom, ScaleNews
from ..scalars import Scalar, add, as_tensor, copied, mul, to_device_of, widened

if TYPE_CHECKING:
    from ..core.apply import Conclusion
    from ..core.window import MicroBatch
    from ..distributed.group import Group

LOST = -1  # for the count of losses, which then stays below the micro-batches: the window's loss is unknown for good


@dataclass(frozen=True)
class Loss:
    """A sum of weighted losses, ``c_i * loss_i``."""

    known: Scalar = 0.0
    raw: Scalar = 0.0  # those that carry a loss scale, if there is one, not seen yet

    def __add__(self, other: Loss) -> Loss:
        return Loss(add(self.known, other.known), add(self.raw, other.raw))

    def times(self, factor: float) -> Loss:
        return Loss(self.known * factor, self.raw * factor)

    @property
    def total(self) -> Scalar:
        return add(self.known, self.raw)

    @property
    def may_carry_scale(self) -> bool:
        """True if a part may carry an unknown loss scale, or if in doubt. Waits for no device."""
        return isinstance(self.raw, Tensor)  # opt.backward() takes no other losses

    def unscaled(self, loss_scale: Scalar) -> Loss:
        """The same, now that the loss scale is known."""
        return Loss(add(self.known, self.raw / to_device_of(loss_scale, self.raw)))

    def save(self) -> dict[str, Scalar]:
        return {"known": copied(self.known), "raw": copied(self.raw)}


class Losses(Extension):
    """Records losses of the open micro-batch, or the last, without a GradScaler's factor."""

    key = "losses"

    def __init__(self) -> None:
        self._forget_window()
        self._micro: Loss | None = None  # of the open micro-batch
        self._by_caller = False  # and whether the caller has recorded it
        self._passes = 0  # and of how many of its passes opt.backward() has

    def _forget_window(self) -> None:
        self._sum, self._count = Loss(), 0  # of the micro-batches that the open window has counted
        self._unrecorded: Scalar | None = None  # c_i of the one counted last, if its loss may still be recorded

    # -- losses come -------------------------------------------------------------------------------

    def loss_given(self, loss: Scalar, source: LossFrom) -> None:
        accumulation, ledger = self.accumulation, self.accumulation.ledger
        scale = accumulation.extensions.losses_carry() if source is not LossFrom.CALLER else None
        raw = source is not LossFrom.CALLER and scale is None
        if scale is not None:
            loss = loss / to_device_of(scale, loss)
        if ledger.micro is not None:
            if self._micro is not None and self._by_caller is not (source is LossFrom.CALLER):
                raise RuntimeError(
                    "opt.backward() records a micro-batch's loss; leave record_loss() out, or call loss.backward()"
                )
            part = _of(mul(ledger.micro.factor, loss), raw)
            self._micro = part if self._micro is None else self._micro + part
            self._by_caller = source is LossFrom.CALLER
            self._passes += source is LossFrom.PASS
        elif self.lacks_loss():
            assert self._unrecorded is not None
            self._sum, self._count = self._sum + _of(mul(self._unrecorded, loss), raw), self._count + 1
            self._unrecorded = None
        elif not accumulation.rejected:  # else it is of a rejected one
            raise RuntimeError(
                "record_loss() found no micro-batch that lacks its loss; call it once per micro-batch, after its "
                "backward and before step() (opt.backward(loss) needs no such call)"
            )

    def lacks_loss(self) -> bool:
        ledger = self.accumulation.ledger
        return (
            self._micro is None
            if ledger.micro is not None
            else ledger.window is not None and self._unrecorded is not None
        )

    def scale_news(self, news: ScaleNews, scale: Scalar | None) -> None:
        micro = self._micro if self.accumulation.ledger.micro is not None else None
        if news is ScaleNews.KNOWN:
            assert scale is not None
            self._sum = self._sum.unscaled(scale)
            self._micro = None if micro is None else micro.unscaled(scale)
        elif news is ScaleNews.UNKNOWN:
            self._count = LOST if self._sum.may_carry_scale else self._count
            self._micro = None if micro is None or micro.may_carry_scale else micro
        else:
            # What was recorded may have been divided by a scale that it did not carry. So may that
            # of the open micro-batch, if opt.backward() got it.
            if news is ScaleNews.ANOTHER and self._count:
                self._count = LOST
            self._micro = micro if self._by_caller else None

    # -- micro-batches and windows -----------------------------------------------------------------

    window_opened = window_dropped = window_closed = _forget_window

    def micro_batch_opened(self) -> None:
        self._micro, self._by_caller, self._passes = None, False, 0

    def micro_batch_ends(self, micro: MicroBatch) -> None:
        if 0 < self._passes < micro.passes:  # other code has run some of its passes
            self._micro = None
        self._sum_then = self._sum if self._micro is None else self._sum + self._micro

    def micro_batch_counted(self, micro: MicroBatch) -> None:
        self._sum, self._count = self._sum_then, self._count + (self._micro is not None)
        owned = self.accumulation.ledger.schedule.caller_owned
        self._unrecorded = micro.factor if owned and self._micro is None else None

    def micro_batch_rejected(self) -> None:
        self._unrecorded = None

    def closing(self, end: Conclusion) -> None:
        if 0 < self._count == end.window.micro_batches and not end.weightless:
            total = to_device_of(self._sum.total, end.divisor)
            end.report["loss"] = widened(as_tensor(total / end.divisor))

    def snapshot(self) -> tuple[Loss, int]:
        return self._sum, self._count

    def roll_back(self, snapshot: tuple[Loss, int]) -> None:
        self._sum, self._count = snapshot

    # -- ranks and checkpoints ---------------------------------------------------------------------

    def reduce(self) -> dict[str, float]:
        return {"sum": float(self._sum.total), "count": self._count}

    def reduced(self, totals: dict[str, float], group: Group) -> None:
        # Losses that come normalised are averaged over the ranks, as their gradients are.
        normalised = self.accumulation.ledger.reduction == "none"
        self._sum, self._count = Loss(totals["sum"] / (group.size if normalised else 1)), int(totals["count"])

    def save(self) -> dict[str, Any]:
        micro = self._micro if self.accumulation.ledger.micro is not None else None
        return {
            "sum": self._sum.save(),
            "count": self._count,
            "unrecorded": copied(self._unrecorded),
            "micro_batch": None if micro is None else micro.save(),
            "by_caller": self._by_caller,
            "passes": self._passes,
        }

    def load(self, saved: dict[str, Any]) -> None:
        micro = saved["micro_batch"]
        self._sum, self._count, self._unrecorded = Loss(**saved["sum"]), saved["count"], saved["unrecorded"]
        self._micro = None if micro is None else Loss(**micro)
        self._by_caller, self._passes = saved["by_caller"], saved["passes"]

    def join(self, parts: Sequence[dict[str, Any]], mine: Sequence[int], ranks: int) -> dict[str, Any]:
        # Of losses normalised by the caller, the mean over the ranks is taken, as of the sums.
        scale = ranks / len(parts) if self.accumulation.ledger.reduction == "none" else 1.0
        total = sum((Loss(**parts[i]["sum"]) for i in mine), Loss()).times(scale)
        joined = {"sum": total.save(), "count": sum(parts[i]["count"] for i in mine)}
        return {**joined, "unrecorded": None, "micro_batch": None, "by_caller": False, "passes": 0}


def _of(weighed: Scalar, raw: bool) -> Loss:
    return Loss(raw=weighed) if raw else Loss(weighed)
