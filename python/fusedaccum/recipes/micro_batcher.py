"""``MicroBatcher``: windows of the desired batch, whatever fits into memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from ..core.buffers import Slot
from ..core.extension import LossFrom
from ..core.optimizer import AccumulatingOptimizer
from ..core.parameters import accumulation_of
from ..extensions.retries import Attempt, Retries
from ..modules import modules_alive, name_of
from ..scalars import Scalar, checked_weight
from . import nested
from .cached import parameters_under
from .memory_errors import is_out_of_memory, make_room
from .replay import RandomState
from .sizes import Sizes, checked_size
from .splitting import listening, nodes_under, note_functions, note_layers


class MicroBatcher:
    """Runs each desired batch as one window, in micro-batches that fit into memory, and steps.

    The window's gradient is that of the desired batch, ``sum(w_i * g_i) / sum(w_i)`` under
    ``reduction="mean"``, however it is split, even if the micro-batch size does not divide it, and
    even if memory runs out midway. After an out-of-memory error the micro-batch is freed and
    halved, and the same window continues. Gradients already added stay, and are left out when their
    samples are run again.

    Args:
        model_or_fn: computes a micro-batch's loss: a function of it; or a module, called with
            ``**`` for a mapping, ``*`` for a list or tuple, else with the micro-batch itself. The
            loss is what it returns, or its ``.loss`` or ``["loss"]``: one number, a mean over the
            micro-batch's items under ``opt``'s ``reduction="mean"``, a sum under ``"sum"``, and
            under ``"none"`` such that the losses of micro-batches add up to the window's.
        opt: an :class:`AccumulatingOptimizer` whose windows the caller owns (neither
            ``accum_steps`` nor ``window_weight``).
        micro_batch_size: samples at most, in parts as equal as possible; or ``"auto"``, which
            begins with the whole batch, halves on an error, remembers for each shape what fitted,
            and tries twice that after 16 windows without an error (after 32, 64, ... if it does not
            fit again). Each rank finds its own size. With a number, an out-of-memory error is
            raised; layers of ``fuse_linear`` then stay fused, and sums travel to other ranks during
            the last backward, as in a hand-written loop.
        weight: function that returns a micro-batch's number of items (or a 0-d tensor), called
            before it is moved; a batch's weight must be the sum of its parts'. None counts samples.
        device: micro-batches move there one by one, so the desired batch may stay in CPU memory.
        scaler: scales the losses, steps ``opt`` and is updated once per window. ``model_or_fn``
            must not scale them too.

    Attributes:
        micro_batch_size: the latest window's limit of samples per micro-batch; None before the
            first window of ``"auto"``.

    Raises:
        TypeError, ValueError: an argument is invalid, alone or with the others; the message names
            it and the fix.
    """

    def __init__(
        self,
        model_or_fn: Callable[..., Any],
        opt: AccumulatingOptimizer,
        micro_batch_size: int | str = "auto",
        weight: Callable[[Any], Scalar] | None = None,
        device: str | torch.device | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ):
        if not callable(model_or_fn):
            raise TypeError(
                f"model_or_fn must be a module or a function of a micro-batch, got a {type(model_or_fn).__name__}"
            )
        if weight is not None and not callable(weight):
            raise TypeError(f"weight must be a function of a micro-batch, or None to count samples, got {weight!r}")
        _check_optimizer(opt)
        self._fixed = checked_size(micro_batch_size)
        if self._fixed is None:
            _check_repeatable(opt)
        self._model, self._opt = model_or_fn, opt
        self._weight = weight or nested.batch_size
        self._device = None if device is None else torch.device(device)
        self._scaler = torch.amp.GradScaler(enabled=False) if scaler is None else scaler
        self._checked = False  # True if no other wrapper accumulates gradients of these losses
        self._looked = False  # for what does not split, in a batch that was split
        self._sizes = Sizes()
        self.micro_batch_size = self._fixed

    def step(self, batch: Any) -> Tensor:
        """One window: forward and backward of every sample of ``batch``, and the optimizer's step.

        Args:
            batch: tensors (or NumPy arrays) whose first dimension is the sample, nested in dicts,
                lists, tuples and dataclasses.

        Returns:
            ``opt.last_window.loss``, a 0-d float64 tensor: the desired batch's loss. NaN for a
            window without weight.

        Raises:
            ValueError: ``batch`` cannot be cut. RuntimeError: ``opt`` holds an open window.
            torch.OutOfMemoryError: one sample, or ``micro_batch_size`` samples, do not fit.
            Whatever the model or ``opt.step()`` raise. The window is dropped then, and you can pass
            the batch again.

        Waits for the device only where ``opt.step()`` does, and with FSDP2, whose ranks agree on a
        number of micro-batches.
        """
        if isinstance(batch, DataLoader):
            raise TypeError(
                "step() takes one desired batch, got a DataLoader; use `for loss in batcher.epoch(loader): ...`"
            )
        samples = nested.batch_size(batch)
        if self._opt._accumulation.ledger.is_open:
            raise RuntimeError(
                "opt holds an open window, and MicroBatcher.step() runs a whole one; end it first with opt.step(), or "
                "drop it with opt.reset()"
            )
        try:
            if self._fixed is None:
                self._window(batch, samples)
            else:
                self._window_of(self._fixed, batch, samples)
            self._scaler.step(self._opt)
            self._scaler.update()
        except BaseException:
            self._opt.reset()
            raise
        last = self._opt.last_window
        return torch.tensor(math.nan, dtype=torch.float64) if last is None or last.loss is None else last.loss

    def epoch(self, batches: Iterable[Any]) -> Iterator[Tensor]:
        """:meth:`step` for each of ``batches``, such as a DataLoader's; yields their losses.

        It runs only while you iterate over it. A DataLoader's last batch may be small, and is a
        window like the others: ``drop_last=True`` leaves it out.
        """
        for batch in batches:
            yield self.step(batch)

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were found, by shape, in plain values."""
        return {"sizes": self._sizes.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the sizes of :meth:`state_dict`."""
        self._sizes.load(state_dict["sizes"])

    # -- windows -----------------------------------------------------------------------------------

    def _window_of(self, size: int, batch: Any, samples: int) -> None:
        """Run all micro-batches, of at most ``size`` samples each."""
        cuts = self._cuts(size, samples)
        parts = len(cuts) - 1
        for start, stop in itertools.pairwise(cuts):
            micro_batch = nested.cut(batch, start, stop)
            weight, last = checked_weight(self._weight(micro_batch)), stop == samples
            try:
                with contextlib.nullcontext() if last else self._opt._accumulation.ranks.unsynced():
                    loss = self._loss(micro_batch, None if parts == 1 else stop - start)
                    self._opt.backward(self._scaler.scale(loss), weight=weight, last=last)
            except Exception as error:
                _raise_if_out_of_memory(error, f"micro_batch_size={size} does not fit; give a smaller one, or 'auto'")
                raise
        ledger = self._opt._accumulation.ledger
        if ledger.window is None or ledger.window.micro_batches + ledger.window.dropped != parts:
            raise RuntimeError(
                "model_or_fn has ended the window or dropped a part of it; it must only compute a loss, and leave "
                "opt.step(), opt.zero_grad() and opt.reset() to MicroBatcher"
            )

    def _cuts(self, size: int, samples: int) -> list[int]:
        """Where micro-batches of at most ``size`` samples begin and end.

        With FSDP2, whose ranks run forwards together, every rank gets the same number of them.
        """
        parts, accumulation = ceil_div(samples, size), self._opt._accumulation
        if accumulation.ledger.mixes_ranks:
            parts, least = int(-accumulation.ranks.least(-parts)), int(accumulation.ranks.least(samples))
            if parts > least:
                raise ValueError(
                    f"micro_batch_size={size} cuts a rank's batch into {parts} micro-batches, and FSDP2 needs as many "
                    f"on every rank, but one has a batch of {least}; pass batches that differ less (drop_last=True), "
                    "or a larger micro_batch_size"
                )
        return [ceil_div(samples * i, parts) for i in range(parts + 1)]

    def _window(self, batch: Any, samples: int) -> None:
        """Run all micro-batches, of as many samples as fit."""
        known = self._sizes.of(batch)
        size = self.micro_batch_size = samples if known.limit is None else min(samples, known.limit)
        whole = Part(0, samples, frozenset())
        fitted = True
        rest = [whole]  # the next one to run is at the end
        while rest:
            part = rest.pop()
            if part.samples > size:
                rest += part.split(size)
                continue
            attempt = Attempt(part.done)
            if self._fits(batch, part, attempt, samples):
                continue
            make_room()
            fitted = False
            size = self.micro_batch_size = known.failed(part.samples)
            if attempt.lost:
                self._opt.reset()
                rest = [whole]
            else:
                rest.append(Part(part.start, part.stop, part.done | attempt.taken))
        if fitted:
            known.fitted(samples)

    def _fits(self, batch: Any, part: Part, attempt: Attempt, whole: int) -> bool:
        """Forward and backward of a part of ``whole`` samples; False if memory ran out.

        In that case ``attempt`` is its only trace. Returns rather than raises, because an
        exception keeps the tensors of all frames that it has passed.
        """
        random = RandomState(p for group in self._opt.param_groups for p in group["params"])
        retries = self._opt._accumulation.extensions.ensure(Retries)
        try:
            micro_batch = nested.cut(batch, part.start, part.stop)
            weight = checked_weight(self._weight(micro_batch))
            with retries.attempted(weight, attempt):
                loss = self._loss(micro_batch, None if part.samples == whole else part.samples)
                retries.loss_computed()
                loss = self._scaler.scale(loss)
                loss.backward()
                self._opt._accumulation.record_loss(loss, LossFrom.RECIPE)
            return True
        except Exception as error:
            if part.samples == 1:
                _raise_if_out_of_memory(
                    error,
                    "one sample does not fit into memory; activation checkpointing, buffer_device='cpu', a smaller "
                    "model or shorter samples need less",
                )
            if not is_out_of_memory(error):
                raise
        random.restore()  # the next try draws the same numbers, wherever this one broke off
        return False

    def _loss(self, micro_batch: Any, samples: int | None) -> Tensor:
        """``samples``: how many there are in the micro-batch; None if it is the whole batch."""
        if self._device is not None:
            micro_batch = nested.mapped(self._moved, micro_batch)
        with listening(self._layers() if samples is not None and not self._looked else ()) as called:
            output = nested.call(self._model, micro_batch)
        if isinstance(output, Mapping):
            loss = output.get("loss")
        else:
            loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(output).__name__}"
            raise TypeError(
                "model_or_fn must return the micro-batch's loss, one number, or something with .loss or ['loss']; got "
                f"{got}. Give a function that does: fa.MicroBatcher(lambda batch: criterion(model(batch['x']), "
                "batch['y']), opt)"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss that model_or_fn returned has no graph; do not detach it or compute it under "
                "torch.no_grad(), and leave backward() to MicroBatcher"
            )
        if not self._checked:
            _check_alone(self._opt, loss)
            self._checked = True
        if samples is not None and not self._looked:
            self._looked = True
            note_layers("MicroBatcher", called)
            instead = "use fa.cached_backward, whose loss_fn sees all samples"
            note_functions("MicroBatcher", nodes_under([loss]), samples, bool(called), instead)
        return loss

    def _layers(self) -> Iterable[Module]:
        """Modules among which to look for layers that do not split."""
        return self._model.modules() if isinstance(self._model, Module) else modules_alive(_BatchNorm)

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


@dataclasses.dataclass(frozen=True)
class Part:
    """Samples ``start`` to ``stop`` of the desired batch; slots in ``done`` have taken them."""

    start: int
    stop: int
    done: frozenset[Slot]

    @property
    def samples(self) -> int:
        return self.stop - self.start

    def split(self, most: int) -> list[Part]:
        """Cut off the first of as few and equal parts of at most ``most`` samples as possible.

        Returns the rest, then that part.
        """
        middle = self.start + ceil_div(self.samples, ceil_div(self.samples, most))
        return [Part(middle, self.stop, self.done), Part(self.start, middle, self.done)]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _raise_if_out_of_memory(error: Exception, advice: str) -> None:
    if is_out_of_memory(error):
        raise torch.OutOfMemoryError(f"{advice}. The window was dropped. PyTorch says: {error}") from error


def _check_optimizer(opt: Any) -> None:
    """Raises TypeError or ValueError for an optimizer whose windows cannot be run here."""
    if not isinstance(opt, AccumulatingOptimizer):
        raise TypeError(
            f"opt must be an AccumulatingOptimizer, got a {type(opt).__name__}; wrap it: fa.AccumulatingOptimizer(opt)"
        )
    if not opt.settings.schedule.caller_owned:
        raise ValueError(
            "opt closes windows itself, and here each batch is a window, in as many micro-batches as it takes; leave "
            "accum_steps and window_weight out of fa.AccumulatingOptimizer(...)"
        )
    if opt._accumulation.extensions.run_step:
        raise ValueError(
            f"opt is {type(opt.optimizer).__name__}, which evaluates a window as often as it likes; run its "
            "micro-batches in a closure: opt.step(closure)"
        )


def _check_alone(opt: AccumulatingOptimizer, loss: Tensor) -> None:
    """Raises ValueError if another wrapper takes some of the loss's gradients.

    It would not know the micro-batches' weights.
    """
    for parameter in parameters_under([loss]):
        if accumulation_of(parameter) not in (None, opt._accumulation):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)}, {name_of(parameter) or 'which no module holds'}, that "
                "the loss depends on belongs to another AccumulatingOptimizer, whose windows MicroBatcher does not "
                "run; give all parameters to one optimizer, or freeze those of the other"
            )


def _check_repeatable(opt: AccumulatingOptimizer) -> None:
    """Raises ValueError for an optimizer whose micro-batches cannot be repeated in parts."""
    buffers = opt._accumulation.sums.buffers
    if buffers.has_parts:
        raise ValueError(
            "micro_batch_size='auto' repeats what did not fit, but one rank alone cannot repeat a forward that gathers "
            "shards (FSDP2, DTensor); give a number"
        )
    for slot in (slot for slot in buffers.slots if slot.intercepted):
        raise ValueError(
            "micro_batch_size='auto' must leave out gradients that were added before an error, but the layer of "
            f"parameter {name_of(slot.param) or slot.name} adds to main_grad by itself; give a number, or switch off "
            "the layer's gradient accumulation fusion"
        )
