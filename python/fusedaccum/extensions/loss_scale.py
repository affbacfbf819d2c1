"""``torch.amp.GradScaler``, whose loss scale may change inside a window.

A gradient that comes from ``scaler.scale(loss)`` carries the loss scale of its micro-batch, and the
scale may change after every ``scaler.update()``. The scaler gives an optimizer its scale only
inside ``scaler.step()``, after backward: too late for the add. But it computes
``scale * getattr(optimizer, "grad_scale", 1)``, so an object found there gets the scaler's own
scale tensor, which ``update()`` changes in place: from then on the scale in force can be read
before every add, on the device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.extension import Extension, Instead, RaisedByAllError, ScaleNews
from ..scalars import Scalar, as_tensor, copied, div, to_device_of, widest
from ..warn import warn

if TYPE_CHECKING:
    from ..core.apply import Conclusion
    from ..core.window import Window
    from ..distributed.group import Group


class Step(Enum):
    """Who has called the ``step()`` that is running."""

    PLAIN = auto()  # the training loop
    SCALED = auto()  # a scaler
    UNSCALED = auto()  # a scaler, after scaler.unscale_(optimizer)


class LossScale(Extension):
    """The loss scale in force, as far as known, and that of the open window's sums: its unit.

    It is what the scaler finds as the wrapper's ``grad_scale``. Sleeps until a scaler comes.

    Attributes:
        live: the scaler's own scale tensor; None before its first ``step()``, a copy between a
            checkpoint and the next plain ``step()``.
        found_inf: what the scaler says about overflows, during its ``step()``.
    """

    key = "loss_scale"
    asleep = True
    attributes = ("grad_scale", "found_inf")
    found_inf: Tensor | None = None

    def __init__(self) -> None:
        self.live: Tensor | None = None
        self._tracker: Tensor | None = None
        self._copied = False
        self._unit: Scalar | None = None  # None: as far as we know the sums carry none
        # True if a scaler that we have not seen unscaled them, so that later scales are unknown.
        self._unit_lost = False
        # True if a scaler has found one on any rank, in the window that the ranks have agreed on.
        self._overflow_of_ranks = False
        self._mine: dict[str, float] = {}  # what this rank has reported of that
        # Of the step() that is running:
        self._step = Step.PLAIN
        self._overflow: bool | Tensor = False  # True if the scaler has found one that no policy has dealt with yet
        self._saw_rejected = False  # True if it looked at a rejected micro-batch's gradient instead of the sums
        self._taken_for: Scalar | None = None  # what adds took the scale to be, if another scaler calls it

    # -- what GradScaler.step() does ---------------------------------------------------------------

    @property
    def grad_scale(self) -> LossScale:
        return self

    @grad_scale.setter
    def grad_scale(self, value: object) -> None:
        """Our own object, or None, if the gradients are unscaled already."""
        self.accumulation.extensions.wake(self)
        self._step = Step.UNSCALED if value is self or value is None else Step.SCALED
        self._saw_rejected = self._gradient_was(Instead.REJECTED)

    @grad_scale.deleter
    def grad_scale(self) -> None:
        pass

    def _gradient_was(self, kind: Instead) -> bool:
        """True if the gradient that a scaler found in ``p.grad`` was this, not the window's."""
        return self.accumulation.judge is not None and self.accumulation.judge.shown_instead() is kind

    def __rmul__(self, scale: Tensor) -> Tensor:
        """``scale * optimizer.grad_scale``: keeps the tensor, changes nothing."""
        if scale is not self.live:
            self._taken_for = self.now()
        self.live, self._copied = scale, False
        # The scaler's count of steps since an overflow, which it tells nobody.
        self._tracker = getattr(sys._getframe(1).f_locals.get("self"), "_growth_tracker", None)
        return scale

    def now(self) -> Scalar | None:
        """A copy of the scale in force; None if it is not known.

        It is a number for a scale on the CPU, else FP64, so that FP64 sums can be divided by it.
        """
        if self.live is None:
            return None
        if self.live.device.type == "cpu":
            return self.live.item()
        return self.live.detach().to(widest(self.live.device), copy=True)

    # -- what adds and losses are multiplied by ----------------------------------------------------

    def window_opened(self) -> None:
        self._unit, self._unit_lost, self._overflow_of_ranks = self.now(), False, False

    def pass_begins(self, thread: int | None) -> None:
        if self._unit_lost:
            raise RuntimeError(
                "scaler.unscale_(opt) inside a window hid the loss scale, which the wrapper has not seen in a plain "
                "scaler.step(opt) yet; to clip, pass max_grad_norm= and leave out unscale_(), or unscale only complete "
                "windows"
            )

    def scale(self, scale: Scalar) -> Scalar:
        if self._unit is None:
            return scale
        assert self.live is not None  # a window that has lost it refuses further passes
        scale = scale * to_device_of(self._unit, scale)
        return scale / to_device_of(self.live, scale)

    def carries(self) -> Scalar:
        return 1.0 if self._unit is None else self._unit

    def loss_scale(self) -> Tensor | None:
        return self.live

    def normalizing(self) -> Scalar:
        """Make sums carry the scale in force, by which ``unscale_()`` divides, or has divided."""
        if self.live is None or self._unit is None:
            return 1.0
        factor = self.live / to_device_of(self._unit, self.live)
        self._unit = self.now()
        return factor

    # -- a step ------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Bring the unit up to date, and note an overflow that no policy has dealt with yet."""
        accumulation, ledger = self.accumulation, self.accumulation.ledger
        window: Window | None = ledger.window
        if self._step is Step.PLAIN:
            self._meet_none(window)
            return
        accumulation.sums.check_shown("GradScaler looks for overflows in p.grad", "use bf16, which needs no loss scale")
        found_inf: Any = self.found_inf
        if window is None:  # one opens if gradients were put into p.grad by hand
            self._overflow = as_tensor(found_inf) != 0
            return
        if window.void:
            return
        if self._step is Step.UNSCALED and self._gradient_was(Instead.WAS_REJECTED) and as_tensor(found_inf) != 0:
            self._saw_rejected = True  # unscale_() came before the call (normalize_(), say) that put the sums back
        if self._saw_rejected and self.live is None:
            # If the window ends here, it is unknown what its other micro-batches carry.
            window.void = ledger.schedule.caller_owned
            return
        if self._step is Step.UNSCALED:
            accumulation.sums.changed(None)  # GradScaler writes without raising the tensors' versions
        # normalize_() may have counted the micro-batch already.
        self._meet_scaler(window.empty or window.length == 1 or ledger.schedule.caller_owned)
        self._overflow = not self._saw_rejected and as_tensor(found_inf) != 0

    def _meet_none(self, window: Window | None) -> None:
        """``step()`` was called by no scaler: the gradients of ``window`` carry no loss scale."""
        if self.live is None:
            return
        if window is not None and not window.empty:
            raise RuntimeError(
                "opt.step() was called in a window that began with scaler.step(opt), or after one, so its "
                "micro-batches should carry a loss scale; step all of them through the scaler, or call opt.reset() "
                "first to go on without it"
            )
        self.live = None
        if window is not None:
            self._unit = None
            self.accumulation.extensions.tell_scale(ScaleNews.NONE)

    def _meet_scaler(self, one_step: bool) -> None:
        """A scaler called ``step()``: the scale that sums and losses carry is known now, or never.

        ``one_step``: True if this is the window's first, so that all of it carries one scale.

        Raises:
            RuntimeError: the window's steps before had no scaler, or one of another scale.
        """
        live, tell = self.now(), self.accumulation.extensions.tell_scale
        if live is None:  # unscaled before we first saw the scaler
            self._unit, self._unit_lost = 1.0, True
            tell(ScaleNews.UNKNOWN)
        elif self._step is Step.UNSCALED and not self._saw_rejected:
            self._unit = 1.0 if self._unit is None else self._unit / live
        elif self._unit is None:
            if not one_step:
                raise RuntimeError(
                    "scaler.step(opt) was called in a window that began with opt.step(), so its first micro-batches "
                    "carry no loss scale; step all of them through the scaler, or call opt.reset() first"
                )
            self._unit = live
            tell(ScaleNews.KNOWN, live)
        elif self._taken_for is not None and float(live) != float(self._taken_for):
            if not one_step:
                raise RuntimeError(
                    f"the GradScaler that calls step() has the scale {float(live):g}, but the window began under "
                    f"another one, whose scale is {float(self._taken_for):g}; call opt.reset(), and replace a "
                    "GradScaler only between windows (a resumed run has to load its scaler's state, too)"
                )
            ratio = div(live, self._taken_for)  # by which the sums carry more than the adds assumed
            self._unit = to_device_of(self._unit, ratio) * ratio
            tell(ScaleNews.ANOTHER)
        self._unit_lost = self._unit_lost or self._unseen

    @property
    def _unseen(self) -> bool:
        """True if a checkpoint's scaler ended a micro-batch without showing its current scale."""
        return self._copied and self._step is Step.UNSCALED

    def window_goes_on(self) -> None:
        if bool(self._overflow):
            accumulation, window = self.accumulation, self.accumulation.ledger.window
            window.void = True
            if accumulation.settings.nonfinite != "skip_window":
                window.nonfinite = window.nonfinite + (window.nonfinite == 0)  # else a norm has met it
            accumulation.sums.zero_(accumulation.sums.slots_with_grad())

    def closing(self, end: Conclusion) -> None:
        window, overflow = end.window, self._overflow_of_ranks or self._overflow
        if self._unit is not None:
            end.divisor = end.divisor * to_device_of(self._unit, end.divisor)
        if overflow is not False:
            end.skip = overflow
        if overflow is not False or window.void:
            nonfinite = as_tensor(window.nonfinite + window.dropped)
            # One more bad micro-batch, unless adds have counted it, as under "skip_window".
            if self.accumulation.settings.nonfinite != "skip_window":
                nonfinite = nonfinite + to_device_of(overflow, nonfinite) * (window.nonfinite == 0)
            end.report["nonfinite"] = nonfinite

    def step_ended(self) -> None:
        """Forget what is known of the ``step()`` that was running."""
        if self._unseen:
            self.live = None
        self._step = Step.PLAIN
        self._overflow = self._saw_rejected = False
        self._taken_for = None

    def forgotten(self) -> None:
        self.live = None

    # -- ranks and checkpoints ---------------------------------------------------------------------

    def reduce(self) -> dict[str, float]:
        # A rank that has only dropped micro-batches takes part, too: its scaler.unscale_() has
        # divided the rejected gradient, while on other ranks it has divided the sums, so that what
        # these carry may differ.
        part = self.accumulation.ledger.window.has_any
        unit = float(self._unit) if part and self._unit is not None else 0.0
        scale = 0.0 if self.live is None or (self._copied and not part) else float(self.live)  # a copy may be old
        self._mine = {
            "overflow": bool(self._overflow),
            "parts": part,
            "unit": unit,
            "unit_square": unit**2,
            "scales": scale > 0,
            "scale": scale,
            "scale_square": scale**2,
        }
        return self._mine

    def reduced(self, totals: dict[str, float], group: Group) -> None:
        """All ranks go on with the smallest of their scales, which may have come to differ.

        Each rank's scaler has looked at its own gradients only. Sums that carry different scales
        cannot be added up: then the window is not applied. Raises RaisedByAllError if a scale is
        not known, and so cannot be changed.
        """
        window, mine = self.accumulation.ledger.window, self._mine
        if not all_equal(totals["scale"], totals["scale_square"], totals["scales"]):
            seen = self.live is not None and not self._copied
            level(group, mine["scale"], *((self.live, self._tracker) if seen else (None, None)))
        if not mine["parts"]:
            self._unit = totals["unit"] / totals["parts"] if totals["unit"] else None
        if totals["overflow"] or totals["unit"] or window.void:
            self.accumulation.extensions.wake(self)  # for closing(), even if this rank has seen no scaler
        self._overflow_of_ranks = bool(totals["overflow"])
        if self._overflow_of_ranks or window.void or all_equal(totals["unit"], totals["unit_square"], totals["parts"]):
            return
        how = f"the loss scale of window {window.index} is {mine['unit']:g} on this rank and another on others"
        if totals["scales"] < totals["parts"]:
            raise RaisedByAllError(
                f"{how}: every rank's GradScaler has looked at its own gradients only; use "
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=...). The window is dropped"
            )
        warn(
            f"{how}, because gradients overflowed on some ranks only, or scales grew at different times: the window is "
            "not applied, and all ranks go on with the smallest scale"
        )
        window.void = True

    def save(self) -> dict[str, Any]:
        here = self.accumulation.ledger.window is not None
        unit, lost = (self._unit, self._unit_lost) if here else (None, False)
        return {"scale": copied(self.live), "unit": copied(unit), "unit_lost": lost}

    def load(self, saved: dict[str, Any]) -> None:
        # The checkpoint's scaler was not seen yet, so what update() changes is not in the copy.
        self.live, self._copied = copied(saved["scale"]), True
        self._unit, self._unit_lost = saved["unit"], saved["unit_lost"]
        if self.live is not None or self._unit is not None:
            self.accumulation.extensions.wake(self)

    def check_together(self, parts: Sequence[dict[str, Any]]) -> None:
        units = {None if part["unit"] is None else float(part["unit"]) for part in parts}
        if len(units) > 1:
            raise ValueError(
                f"the ranks' windows carry different loss scales {units}; use ShardedGradScaler, or save at a window's "
                "end"
            )

    def join(self, parts: Sequence[dict[str, Any]], mine: Sequence[int], ranks: int) -> dict[str, Any]:
        unit = next((part["unit"] for part in parts if part["unit"] is not None), None)
        return {"scale": parts[0]["scale"], "unit": unit, "unit_lost": any(parts[i]["unit_lost"] for i in mine)}


def level(group: Group, scale: float, live: Tensor | None, tracker: Tensor | None) -> None:
    """Make the ranks' scales, and their counts of steps since an overflow, the smallest of all.

    Counts that differ would let the scale grow on one rank at a time. ``live`` and ``tracker`` are
    None for a checkpoint's scaler that has not been seen yet, which is left alone.
    """
    for tensor, mine in ((live, scale or math.inf), (tracker, math.inf if tracker is None else float(tracker))):
        least = group.least(mine)
        if tensor is not None:
            tensor.fill_(least)


def all_equal(total: float, total_of_squares: float, count: float) -> bool:
    """True if ``count`` numbers with this total are all the same.

    Exactly then do their squares add up to this, but for rounding.
    """
    return math.isclose(total**2, count * total_of_squares, rel_tol=1e-12)
