"""Micro-batches from their first gradient to their place in the window: opened, added or rejected, counted."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from .accumulator import Accumulator, Write
from .attempts import Attempt
from .batch_statistics import Statistics
from .buffers import Slot
from .group import RaisedByAllError
from .intake import Intake
from .ledger import Ledger
from .ranks import Ranks
from .rejected import Rejected
from .replicas import Replicas, replicas_of
from .settings import Settings, check_alone, check_shared, check_weight_of_lent
from .shards import FullySharded, local_of
from .window import MicroBatch, Scalar, Window, on

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
        self.statistics = Statistics(self.sums.buffers)  # of BatchNorm layers that are pooled
        self.ledger.tell(self.statistics)
        self.inside = False  # within micro_batch()
        self._counts_left: list[Tensor] = []  # of what is not finite, in attempts at the open window that broke off
        self._adds_before = 0  # of the open micro-batch, when the pass (or the group of them) under way began
        self._settings = settings
        self._intake = Intake(self, hold=settings.drops_micro_batches)
        self._rejected = Rejected()
        self.ranks: Ranks | None = None  # with whom windows are shared
        self._replicas = Replicas([])  # the DistributedDataParallel modules
        self._begun = False  # has there been a backward?
        self._fully_sharded = FullySharded([])  # the FSDP2 modules

    def share(self, group: dist.ProcessGroup | None, comm_dtype: torch.dtype | None, shard: bool) -> None:
        """Gather windows together with the ranks of ``group``; None for that of the DistributedDataParallel or FSDP2 modules, if any."""
        self._find_modules()
        group = group or self._replicas.group or self._fully_sharded.group
        if group is None:
            check_alone(comm_dtype, shard)
            return
        self._check_shared(shard)
        self.ranks = Ranks(group, comm_dtype, self.sums, self.ledger, self._settings.backend, shard)
        self.ledger.ranks, self.ledger.over_ranks = self.ranks.group.size, self.ranks.group.weight
        self._average_shards()
        if shard:
            self.sums.owned_apart, self.sums.over_owners = True, self.ranks.group.sum

    def _find_modules(self) -> None:
        slots = self.sums.buffers.slots
        self._replicas = Replicas(replicas_of([slot.param for slot in slots]))
        self._fully_sharded = FullySharded(slots)
        self._fully_sharded.before_backward(self.hide_shards)

    def _check_shared(self, shard: bool) -> None:
        slots = self.sums.buffers.slots
        parts = [slot.name for slot in slots if slot.sharded and slot not in self._fully_sharded.slots]
        check_shared(self._settings, shard, self.sums.sharded, [slot.name for slot in self.sums.lent], parts)

    def _average_shards(self) -> None:
        """Of gradients that come normalised the mean over the ranks is taken, and FSDP2's are not added up here."""
        if self.ranks is not None and self._settings.reduction == "none":
            for slot in self._fully_sharded.slots:
                slot.factor /= self.ranks.group.size

    def take(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        """Gather the gradients of these parameters from now on."""
        slots = self.sums.take(parameters)
        if self.ranks is not None:
            try:
                self._find_modules()
                self._check_shared(self.ranks.shard)
                self.ranks.take(slots)
            except Exception:
                self.sums.leave(slots)
                raise
            self._average_shards()
        self._begun = False
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
        seen_whole = self._settings.drops_micro_batches or slot.narrow or slot.offloaded or slot.sharded
        if seen_whole or self._attempted or not self._intake.accumulates(slot):
            return False
        with self._intake.within_pass():
            if self.ranks is not None:
                self.ranks.segments.before_add([slot])
            added = self.sums.add_by(write, slot, self.ledger.window, self.ledger.micro, self._measures())
            if self.ranks is not None and added:
                self.ranks.segments.added([slot])
            return added

    def settle(self) -> None:
        """Every public call begins here: a pass that seems open still is over, or was broken off; ``p.grad`` is ours again."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the wrapper was called from inside a backward pass (by a hook?); call it when backward has returned"
            )
        self._intake.settle()
        self.sums.unhide()
        if self.sums.added_unseen:
            self._break_off("was broken off by an exception (or its gradients were taken by torch.autograd.grad)")
        self._rejected.withdraw()

    # -- a micro-batch -----------------------------------------------------------------------------------------

    def hide_shards(self) -> None:
        """FSDP2 begins a backward, which shall find no ``p.grad``. Raises RuntimeError for one that lacks the micro-batch's weight."""
        if self.weighs_loss and self.ledger.has_micro and self.ledger.micro.in_loss and not self.inside:
            raise RuntimeError(
                "this micro-batch has a weight, which FSDP2 needs in the loss of all its backward passes; use opt.backward(loss) for each"
            )
        self.sums.hide()

    @property
    def weighs_loss(self) -> bool:
        """Must a weight be in the loss, because FSDP2 adds up the ranks' gradients before they get here?"""
        return bool(self._fully_sharded.slots) and self._settings.reduction == "mean"

    @property
    def tells_passes_apart(self) -> bool:
        """Would several backward passes, as things are, be more than one micro-batch, or be refused?"""
        return not self.inside and (self._settings.schedule.caller_owned or self._settings.drops_micro_batches)

    def open(self, weight: Scalar | None, last: bool = False) -> None:
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
        ledger.micro.last = ledger.micro.last or last

    @contextmanager
    def grouped(self, weight: Scalar | None, last: bool, in_loss: bool) -> Iterator[None]:
        """All passes within are one micro-batch; an exception drops it. ``in_loss``: their losses are multiplied by the weight."""
        self.open(weight, last)
        self.ledger.micro.in_loss = self.ledger.micro.in_loss or in_loss
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

    @contextmanager
    def attempted(self, weight: Scalar, attempt: Attempt) -> Iterator[None]:
        """As :meth:`grouped`, of one forward and backward that come again, in parts, where an exception breaks them off.

        Nothing of it counts then, but for what ``attempt`` tells. Sums go to other ranks only after the window's last pass.
        """
        self.open(weight)
        micro = self.ledger.micro
        micro.attempt, before = attempt, self.ledger.window.micro_batches
        micro.counts, self._counts_left = self._counts_left, []
        try:
            with self.grouped(None, False, False):
                yield
        except BaseException:
            self._intake.drop()
            counted = self.ledger.window.micro_batches > before
            attempt.lost = (
                counted
                or micro.judged
                or attempt.mixed
                or self._intake.nested
                or self.sums.half_written
                or bool(self.sums.lent)
            )
            self._counts_left = micro.counts
            if self.ledger.has_micro:
                self.ledger.drop_micro_batch()
            raise

    def unsynced(self) -> AbstractContextManager[None]:
        """Within are forward and backward of a micro-batch that is not the window's last."""
        return self._replicas.unsynced()

    @property
    def _attempted(self) -> bool:
        return self.ledger.has_micro and self.ledger.micro.attempt is not None

    def end_micro_batch(self, weight: Scalar | None) -> None:
        """What ``step()`` and ``flush()`` do before they look whether the window is complete: count, or refuse."""
        ledger, caller_owned = self.ledger, self._settings.schedule.caller_owned
        if self._agreed:
            return  # normalize_() has been here before
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
        self._counts_left = []
        if self.ranks is not None:
            self.ranks.forget()

    def reset(self) -> None:
        """Drop what the open window has gathered, and what was put into ``p.grad`` meanwhile."""
        self._rejected.withdraw()
        self._rejected = Rejected()
        if self.ledger.is_open:
            self.sums.clear()
        self.ledger.drop_window()
        self.sums.begin()
        self.sums.lend(self.sums.lent)
        self._fully_sharded.drop()
        if self.ranks is not None:
            self.ranks.forget()

    # -- what the ranks share ----------------------------------------------------------------------------------

    def owned(self, parameters: list[Parameter]) -> list[Parameter]:
        """Those of them that this rank steps."""
        return parameters if self.ranks is None else self.ranks.owned(parameters)

    def forget_others(self, state: dict[Tensor, Any]) -> None:
        """Drop what an optimizer's ``state`` holds of parameters that other ranks step."""
        if self.ranks is not None and self.ranks.shard:
            known = [p for p in state if isinstance(p, Parameter)]
            for p in set(known).difference(self.ranks.owned(known)):
                del state[p]

    def hand_out(self, applied: bool | Tensor) -> None:
        """Give all ranks the parameters that one of them has stepped."""
        if applied is not False and self.ranks is not None:
            self.ranks.segments.hand_out(self.ranks.gathered)

    def anything(self, slots: list[Slot]) -> bool:
        """Does the window that has closed hold a gradient, here or on another rank?"""
        return bool(slots) or (self.ranks is not None and bool(self.ranks.gathered))

    @property
    def _agreed(self) -> bool:
        """Is the open window that of all ranks already?"""
        return self.ranks is not None and self.ledger.has_window and self.ranks.agreed

    def complete(self) -> bool:
        """Does the window end here?"""
        return self._agreed or self.ledger.complete()

    def anything_to_flush(self) -> bool:
        """Has the open window gathered anything, on this rank or another?"""
        if self.ranks is None:
            return self.ledger.is_open
        if not self.ledger.has_window:
            self.begin_window()
        if self._settings.schedule.window_weight is not None:
            with self._or_dropped():
                self.ranks.group.weight(self.ledger.window.weight, flushes=True)
        self.agree(False)
        if self.ledger.window.empty:
            self.ledger.drop_window()
        return self.ledger.has_window

    def agree(self, overflow: bool | Tensor) -> bool | Tensor:
        """Before a window is concluded: make it that of all ranks. Returns whether a GradScaler has found an overflow on any."""
        if self.ranks is None:
            return overflow
        window = self.ledger.window
        if not self._agreed:
            self.check_reduced("the window ends")
            with self._or_dropped():
                self.ranks.agree(window.micro_batches, window.weight, overflow, self.statistics.any_counted)
                if self.ranks.pools:
                    self.statistics.add_up(self.ranks.group)
            self._replicas.window_ended()
        return self.ranks.overflow or overflow

    def check_reduced(self, what: str) -> None:
        """Raises RuntimeError where FSDP2 keeps gradients that it has not added up over the ranks yet."""
        if self._fully_sharded.held_back():
            raise RuntimeError(
                f"{what}, and FSDP2 still holds gradients of it that it was told not to reduce; call "
                "model.set_requires_gradient_sync(True) before the last backward (also before one that flush() or state_dict() follows)"
            )

    @contextmanager
    def _or_dropped(self) -> Iterator[None]:
        """What the ranks have half done is no window any more. A rank that breaks it off by itself (no memory, Ctrl-C) is out of step."""
        try:
            yield
        except BaseException as error:
            if self.ranks is not None and not isinstance(error, RaisedByAllError):
                self.ranks.group.out_of_step()
            self.reset()
            raise

    # -- what the intake tells (its Owner) ---------------------------------------------------------------------

    def pass_begins(self) -> None:
        if not self._begun:
            self._begun = True
            self._check_replicas()
        if self._agreed:
            raise RuntimeError(
                "opt.normalize_() has added this window's sums over the ranks, and no gradient can join it after that; call opt.step() "
                "before the next backward"
            )
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
        micro = self.ledger.micro
        micro.passes += 1
        if micro.attempt is not None and micro.attempt.forward:
            micro.attempt.mixed = True
        if self.ranks is not None and self._is_last():
            self.ranks.segments.last_pass_begins()

    def has_new_replicas(self) -> bool:
        """Have DistributedDataParallel modules been made of the parameters since :meth:`share`?"""
        return bool(replicas_of([slot.param for slot in self.sums.buffers.slots], besides=self._replicas.modules))

    def _check_replicas(self) -> None:
        """Raises RuntimeError for a DistributedDataParallel module made after the wrapper: it would replace the sums in ``p.grad``."""
        if self.has_new_replicas():
            raise RuntimeError(
                "the model was wrapped in DistributedDataParallel after its optimizer was wrapped, and DDP would add up the ranks' "
                "gradients a second time; make the DistributedDataParallel module first, then AccumulatingOptimizer"
            )
        trained = [named for module in self._replicas.modules for named in module.module.named_parameters()]
        left_out = [name for name, p in trained if p.requires_grad and self.of(p) is None]
        if left_out:
            raise RuntimeError(
                f"parameter {left_out[0]} of the DistributedDataParallel module belongs to no AccumulatingOptimizer ({len(left_out)} such "
                "in all), and its gradient would differ between ranks, for DDP is kept quiet; wrap its optimizer too, or freeze it"
            )

    def _is_last(self) -> bool:
        """Does the window end with this pass? Under DistributedDataParallel, no_sync() says when it does not."""
        if self._attempted:
            return False
        if self._settings.schedule.caller_owned and self._replicas.modules:
            return self._replicas.synced
        return self.ledger.is_last() and self.ledger.micro.adds == 0

    @torch.no_grad()
    def add(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        if self.ledger.micro.attempt is not None:
            slots, grads = self.ledger.micro.attempt.wanted(slots, grads)
            if not slots:
                return
        if self.ranks is not None:
            self.ranks.segments.before_add(slots)
        self.sums.add(slots, grads, self.ledger.window, self.ledger.micro, self._measures())
        if self.ranks is not None:
            self.ranks.segments.added(slots)

    @torch.no_grad()
    def added(self, slot: Slot) -> None:
        self.sums.added(slot, self.ledger.window, self.ledger.micro, self._measures())

    def _measures(self) -> bool:
        """Shall adds take norms and look for what is not finite? (Norms of all ranks' sums are taken when these have come.)"""
        takes_norm = self._settings.wants_norm and self.ranks is None
        return (
            self._settings.nonfinite == "skip_window"
            or (takes_norm and self.ledger.may_be_last())
            or (self._settings.noise_scale is not None and self.ledger.window.empty)
        )

    def pass_ends(self) -> None:
        if self.inside or not self.ledger.has_micro:
            return
        self.sums.unhide()
        bad = self._judge() if self._settings.drops_micro_batches else None
        if self.ranks is not None and self.ranks.segments.in_last_pass:
            with self._or_dropped():
                self.ranks.segments.send_rest()
            finish = functools.partial(self._sums_arrive, self.ranks, bad)
            if torch._C._current_graph_task_id() == -1:
                finish()
            else:
                # Other wrappers' passes end with the same backward, on some ranks before this one: their sums go before anybody waits.
                torch.autograd.Variable._execution_engine.queue_callback(finish)
        elif bad is not None:
            self._rejected.reject(bad, self.sums.buffers.slots)
        if self._settings.schedule.caller_owned:
            self._commit(None)

    @torch.no_grad()
    def _sums_arrive(self, ranks: Ranks, bad: dict[Slot, Tensor] | None) -> None:
        with self._or_dropped():
            ranks.segments.arrive()
            if self._settings.schedule.caller_owned and self._replicas.modules:
                ranks.show_all()
        if bad is not None:
            self._rejected.reject(bad, self.sums.buffers.slots)

    def _commit(self, weight: Scalar | None) -> None:
        # Under "propagate" nobody asks, unless a GradScaler does, and the thread of offloaded gradients need not be waited for.
        if self._settings.nonfinite != "propagate" or not self.sums.buffers.offloaded:
            self.sums.count(self.ledger.micro)
        window, micro = self.ledger.window, self.ledger.micro
        first, sent = window.empty, self.ranks is not None and self.ranks.segments.in_last_pass
        self.ledger.commit(weight)
        mixed = micro.attempt is not None and micro.attempt.done  # the buffers hold more than this micro-batch
        if self._settings.noise_scale is not None and first and not (micro.bad or sent or mixed):
            self._measure_small(window, micro)

    def _measure_small(self, window: Window, micro: MicroBatch) -> None:
        """The window holds one micro-batch, whose norm its adds have taken; on this rank, for no sums have gone to others yet."""
        unit = 1.0 if window.unit is None else window.unit
        sq_norm = self.sums.norms.total(self.sums.gathered(), self._settings.backend)
        window.small_sq_norm = sq_norm / on(unit, sq_norm.device) ** 2
        if not window.unweighed:
            window.weigh_small(micro.value())

    def record_loss(self, loss: Scalar, scaled: bool = False) -> None:
        """Of the micro-batch that is open, or of the one counted last. ``scaled``: as opt.backward() got it, with a loss scale if any."""
        ledger = self.ledger
        if self.has_rejected and not ledger.has_micro and not ledger.lacks_loss:
            return
        if ledger.has_micro and ledger.micro.loss is not None and scaled is not ledger.micro.loss_by_backward:
            raise RuntimeError(
                "opt.backward() records a micro-batch's loss; leave record_loss() out, or call loss.backward()"
            )
        live = self.sums.loss_scale.live if scaled else None
        ledger.record_loss(loss if live is None else loss / live, raw=scaled and live is None)
        if ledger.has_micro:
            ledger.micro.loss_by_backward = scaled

    def pass_failed(self) -> None:
        if self.ranks is not None:
            self.ranks.broke_off()
        if not self.ledger.has_micro or self._attempted:
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
    def _judge(self) -> dict[Slot, Tensor] | None:
        """Let the held gradients in, or drop the micro-batch and return those that are not finite (waits for the device)."""
        micro, held = self.ledger.micro, self._intake.held
        micro.judged = bool(held)
        found = self.sums.count_nonfinite(held)
        if self.ranks is not None and self.sums.sharded:  # the ranks hold parts of one gradient, and drop it together
            found = int(self.ranks.group.total([found])[0])
        weightless = float(micro.value()) == 0 and not self.sums.sharded
        if not found or weightless:
            self._intake.release()
            return None
        micro.bad = True
        batches = self._intake.drop()
        return {
            slot: grad
            for slots, grads in batches
            for slot, grad in zip(slots, grads, strict=True)
            if not torch.isfinite(local_of(grad)).all()
        }
