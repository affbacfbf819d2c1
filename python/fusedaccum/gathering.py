"""Micro-batches from their first gradient to their place in the window: opened, added or rejected, counted."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from .accumulator import Accumulator, Write
from .buffers import Slot
from .intake import Intake
from .ledger import Ledger
from .settings import Settings, check_not_replicated, check_weight_of_lent
from .window import Scalar

_GATHERING_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to a Gathering


class Gathering:
    """Joins intake (where gradients come from), ledger (what they count for) and sums (where they go). The intake's Owner.

    Args:
        settings: as the wrapper was asked to work.
        seed: of stochastic rounding, None for rounding to nearest.
    """

    def __init__(self, settings: Settings, seed: int | None):
        self.ledger = Ledger(settings.schedule, settings.reduction)
        self.sums = Accumulator(
            settings.buffer_dtype, settings.buffer_device, settings.reduction, settings.backend, seed
        )
        self.inside = False  # within micro_batch()
        self._adds_before = 0  # of the open micro-batch, when the pass (or the group of them) under way began
        self._settings = settings
        self._intake = Intake(self, hold=settings.drops_micro_batches)
        self._rejected = Rejected()
        self._checked = False  # has check_not_replicated() been passed, at the first backward?

    def take(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Gather the gradients of these parameters from now on."""
        slots = self.sums.take(parameters)
        for slot in slots:
            self._intake.hook(slot)
            _GATHERING_OF[slot.param] = weakref.ref(self)
        self.sums.lend([slot for slot in slots if slot.lent])

    @staticmethod
    def of(parameter: Tensor) -> Gathering | None:
        """Who gathers this parameter's gradients, if anybody does."""
        gathering = _GATHERING_OF.get(parameter)
        return None if gathering is None else gathering()

    @torch.no_grad()
    def add_by(self, write: Write, parameter: Parameter) -> bool:
        """Within a backward pass: let ``write`` add the gradient it makes itself, once, to the parameter's buffer.

        False, and nothing done, where the gradient must come the ordinary way: the pass hands it to somebody else, or it must be seen
        whole before it is added. Raises as a hook would.
        """
        slot = self.sums.buffers.of[parameter]
        seen_whole = self._settings.drops_micro_batches or slot.narrow or slot.offloaded
        if seen_whole or not self._intake.accumulates(slot):
            return False
        with self._intake.within_pass():
            return self.sums.add_by(write, slot, self.ledger.window, self.ledger.micro, self._measures())

    def settle(self) -> None:
        """Every public call begins here: a pass that seems open still is over, or was broken off; ``p.grad`` is ours again."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the wrapper was called from inside a backward pass (by a hook?); call it when backward has returned"
            )
        self._intake.settle()
        if self.sums.added_unseen:
            self._break_off("was broken off by an exception (or its gradients were taken by torch.autograd.grad)")
        self._rejected.withdraw()

    # -- a micro-batch -----------------------------------------------------------------------------------------

    def open(self, weight: Scalar | None) -> None:
        """The micro-batch that gathers from now on; joins the one that is open already. Raises as Ledger.weigh does."""
        ledger = self.ledger
        if weight is not None and self.sums.lent and self._settings.reduction == "mean":
            check_weight_of_lent(weight, self.sums.lent[0].name)
        if not ledger.has_window:
            self.begin_window()
        if not ledger.has_micro:
            self._rejected.withdraw()
            ledger.begin_micro_batch(weight)
        elif weight is not None:
            ledger.weigh(weight)

    @contextmanager
    def grouped(self, weight: Scalar | None) -> Iterator[None]:
        """All passes within are one micro-batch; an exception drops it."""
        self.open(weight)
        self.inside = True
        self._adds_before = self.ledger.micro.adds
        try:
            yield
            self._intake.settle()
        except BaseException:
            self._intake.settle()
            self._intake.drop()
            self.pass_failed()
            raise
        finally:
            self.inside = False
        self.pass_ends()

    def end_micro_batch(self, weight: Scalar | None) -> None:
        """What ``step()`` and ``flush()`` do before they look whether the window is complete: count, or refuse."""
        ledger, caller_owned = self.ledger, self._settings.schedule.caller_owned
        if not ledger.has_window:
            self.begin_window()
        if not ledger.has_micro and (not caller_owned or (ledger.window.empty and self.sums.gathered())):
            # One without gradients; or, where passes are counted, with gradients that somebody put into p.grad by hand.
            ledger.begin_micro_batch()
        if ledger.has_micro:
            self._commit(None if caller_owned else weight)
        rejected, self._rejected = self._rejected, Rejected()
        if rejected.names and self._settings.nonfinite == "raise":
            raise FloatingPointError(
                f"the gradient of {rejected} holds NaN or infinity; the micro-batch was dropped, and training can go on"
            )
        if caller_owned:
            ledger.weigh_the_rest(weight)

    @property
    def has_rejected(self) -> bool:
        """Was a micro-batch rejected since the last ``step()``?"""
        return bool(self._rejected.names)

    # -- the window's ends -------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        live = self.sums.loss_scale.live
        self.ledger.begin_window(unit=None if live is None else live.detach().clone())
        self.sums.begin()

    def reset(self) -> None:
        """Drop what the open window has gathered, and what was put into ``p.grad`` meanwhile."""
        self._rejected.withdraw()
        self._rejected = Rejected()
        if self.ledger.is_open:
            self.sums.clear()
        self.ledger.drop_window()
        self.sums.begin()
        self.sums.lend(self.sums.lent)

    # -- what the intake tells (its Owner) ---------------------------------------------------------------------

    def pass_begins(self) -> None:
        if not self._checked:
            check_not_replicated([slot.param for slot in self.sums.buffers.slots])
            self._checked = True
        if not self.inside:
            self.open(None)
            self._adds_before = self.ledger.micro.adds
        if self.ledger.micro.judged:
            raise RuntimeError(
                f"nonfinite={self._settings.nonfinite!r} must see a micro-batch whole before it adds any of it, and this backward "
                "continues one that is added already; group its backward passes: `with opt.micro_batch(): ...`"
            )
        if self.ledger.window.unit_lost:
            raise RuntimeError(
                "scaler.unscale_(opt) inside a window, before the first plain scaler.step(opt), hid the loss scale from the "
                "wrapper; unscale only complete windows, or clip with max_grad_norm="
            )

    @torch.no_grad()
    def add(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        self.sums.add(slots, grads, self.ledger.window, self.ledger.micro, self._measures())

    @torch.no_grad()
    def added(self, slot: Slot) -> None:
        self.sums.added(slot, self.ledger.window, self.ledger.micro, self._measures())

    def _measures(self) -> bool:
        """Shall adds take norms and look for what is not finite?"""
        return self._settings.nonfinite == "skip_window" or (self._settings.wants_norm and self.ledger.may_be_last())

    def pass_ends(self) -> None:
        if self.inside or not self.ledger.has_micro:
            return
        if self._settings.drops_micro_batches:
            self._judge()
        if self._settings.schedule.caller_owned:
            self._commit(None)

    def _commit(self, weight: Scalar | None) -> None:
        # Under "propagate" nobody asks, unless a GradScaler does, and the thread of offloaded gradients need not be waited for.
        if self._settings.nonfinite != "propagate" or not self.sums.buffers.offloaded:
            self.sums.count(self.ledger.micro)
        self.ledger.commit(weight)

    def pass_failed(self) -> None:
        if not self.ledger.has_micro:
            return
        if self.ledger.micro.adds > self._adds_before or self.sums.added_unseen:
            self._break_off("was broken off by an exception")
        elif self.ledger.micro.adds == 0:
            self.ledger.drop_micro_batch()

    def _break_off(self, how: str) -> None:
        mixed = self.sums.added_unseen and torch._C._current_graph_task_id() != -1
        self.reset()
        instead = "; nonfinite='skip_micro_batch' adds a micro-batch only when it is complete, and loses nothing"
        warnings.warn(
            f"backward {how} after part of its gradients had been added, so the open window was dropped"
            + ("" if self.sums.lent else instead),  # which refuses what is lent
            RuntimeWarning,
            stacklevel=3,
        )
        if mixed:
            raise RuntimeError(
                "the backward pass before was broken off, and what layers have added to main_grad in this one could not be told from "
                "what they had added then; both were dropped, and this pass is refused: call opt.reset() after an exception, then go on"
            )

    @torch.no_grad()
    def _judge(self) -> None:
        """Let the held gradients in, or reject the micro-batch (waits for the device)."""
        micro, held = self.ledger.micro, self._intake.held
        micro.judged = bool(held)
        if not self.sums.count_nonfinite(held) or float(micro.value()) == 0:
            self._intake.release()
            return
        micro.bad = True
        batches = self._intake.drop()
        bad = {
            slot: grad
            for slots, grads in batches
            for slot, grad in zip(slots, grads, strict=True)
            if not torch.isfinite(grad).all()
        }
        self._rejected.reject(bad, self.sums.buffers.slots)


@dataclass
class Rejected:
    """Micro-batches that ``nonfinite`` has rejected since the last ``step()``.

    Until then one gradient that is not finite is all that ``p.grad`` shows, of all parameters: so a GradScaler, which looks
    there, learns of the overflow, and nothing that it or anybody else does to it reaches a buffer.
    """

    names: list[str] = field(default_factory=list)
    _hidden: list[tuple[Slot, Tensor | None]] = field(default_factory=list)

    def reject(self, bad: dict[Slot, Tensor], slots: Sequence[Slot]) -> None:
        """These gradients are not finite; ``slots`` are hidden behind the first of them."""
        self.names += [slot.name for slot in bad]
        self._hidden = [(slot, slot.param.grad) for slot in slots]
        for slot in slots:
            slot.param.grad = None
        slot, grad = next(iter(bad.items()))
        slot.param.grad = grad

    def withdraw(self) -> None:
        """Put back what ``p.grad`` was."""
        for slot, grad in self._hidden:
            slot.param.grad = grad
        self._hidden = []

    def __str__(self) -> str:
        more = len(self.names) - 5
        return ", ".join(self.names[:5]) + (f" and {more} more parameters" if more > 0 else "")
