"""Mistakes that the wrapper can tell from what it is given, each answered with what to write."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .warn import warn

if TYPE_CHECKING:
    from .core.ledger import Ledger
    from .core.window import MicroBatch

P = ParamSpec("P")
R = TypeVar("R")

# -- names of arguments ----------------------------------------------------------------------------

# What other libraries, and training scripts, call an argument.
KNOWN_AS = {
    "accum_steps": (
        "gradient_accumulation_steps gradient_accumulation accumulation_steps accumulate_steps accumulate_grad_batches "
        "accumulate accumulation grad_accumulation_steps grad_accum_steps grad_accum grad_steps accum_iter accum "
        "accumulation_iters iters_to_accumulate cumulative_iters num_micro_batches n_micro_batches micro_batches "
        "num_microbatches update_freq subdivisions every_k_schedule every_k steps n_steps num_steps k"
    ),
    "window_weight": "weight desired_batch batch_size target_batch_size batch_tokens tokens_per_batch "
    "global_batch_size",
    "buffer_dtype": "dtype grad_dtype accum_dtype accumulation_dtype accumulator_dtype grad_accum_dtype acc_dtype",
    "buffer_device": "device offload cpu_offload offload_device",
    "optimizer_device": "offload_optimizer optimizer_offload cpu_adam optimizer_cpu_offload",
    "master_weights": "master_params master fp32_master keep_master_weights master_dtype",
    "max_grad_norm": (
        "max_norm clip_grad_norm clip_grad_norm_ grad_clip grad_clip_norm gradient_clip gradient_clip_val "
        "gradient_clipping grad_norm_clip clip_grad clip_norm clip grad_norm"
    ),
    "nonfinite": "skip_nan skip_nonfinite skip_inf nan_policy should_skip_update_fn",
    "process_group": "group pg dp_group",
    "comm_dtype": "reduce_dtype communication_dtype allreduce_dtype",
    "shard": "sharded zero zero1 zero_stage",
    "optimizer": "opt optim inner inner_opt inner_optimizer base_optimizer",
    "weight": "weights w n num tokens num_tokens n_tokens ntokens samples num_samples count num_items "
    "num_items_in_batch batch_size",
    "last": "is_last last_micro_batch is_boundary sync sync_gradients",
}
OF_THE_INNER = {
    *("params", "lr", "betas", "beta1", "beta2", "momentum", "eps", "weight_decay", "nesterov", "amsgrad", "maximize"),
    *("fused", "foreach", "capturable"),
}


def suggests_arguments(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that is called ``name``, to raise for arguments that it does not have.

    The TypeError names the argument that was meant. The function's signature stays what it is.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = {*inspect.signature(function).parameters} - {"self"}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs and not known.issuperset(kwargs):
                check_arguments(name, kwargs, known)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_arguments(name: str, given: dict[str, Any], known: Iterable[str]) -> None:
    """Raises TypeError for the first given argument of ``name`` that is not known."""
    known = list(known)
    for argument in (argument for argument in given if argument not in known):
        shown = f"{argument}={reprlib.repr(given[argument])}"
        if argument in OF_THE_INNER and "optimizer" in known:
            hint = (
                f"give it to the optimizer that is wrapped: {name}(torch.optim.AdamW(model.parameters(), "
                f"{argument}=...), ...)"
            )
        elif meant := _meant(argument, known):
            hint = f"did you mean {meant}=?"
        else:
            hint = f"its arguments are {', '.join(sorted(known))}"
        raise TypeError(f"{name}() has no argument {shown}; {hint}")


def _meant(argument: str, known: list[str]) -> str | None:
    """The one of the known arguments that somebody who writes ``argument`` probably means."""
    names = {alias: proper for proper in known for alias in (proper, *KNOWN_AS.get(proper, "").split())}
    close = difflib.get_close_matches(argument, names, n=1, cutoff=0.75)
    return names[close[0]] if close else None


# -- what is given in the optimizer's place --------------------------------------------------------


def check_is_optimizer(given: Any) -> None:
    """Raises TypeError, with what to write instead, unless it is a ``torch.optim.Optimizer``."""
    if not isinstance(given, Optimizer):
        kind = type(given)
        what = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        if given is None or isinstance(given, type):
            what = "None" if given is None else f"the class {given.__qualname__}"
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {what}; {_instead_of(given)}")


def _instead_of(given: Any) -> str:
    wrap = "AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), ...)"
    if isinstance(given, type) and issubclass(given, Optimizer):
        return f"build it first: AccumulatingOptimizer({given.__name__}(model.parameters()), ...)"
    if isinstance(given, LRScheduler):
        return (
            "wrap the scheduler's optimizer, and build the scheduler on the wrapper: opt = "
            f"AccumulatingOptimizer(optimizer, ...), then {type(given).__name__}(opt, ...)"
        )
    if isinstance(given, torch.amp.GradScaler):
        return (
            "wrap the optimizer, and give the wrapper to the scaler: opt = AccumulatingOptimizer(optimizer, ...), then "
            "scaler.step(opt)"
        )
    first = next(iter(given), None) if isinstance(given, (list, tuple)) else None
    if isinstance(first, Optimizer):
        return "wrap each of them: [AccumulatingOptimizer(optimizer, ...) for optimizer in optimizers]"
    if hasattr(given, "param_groups") and hasattr(given, "step"):
        name = type(given).__name__
        return (
            "it has an optimizer's attributes and methods, so make it one: "
            f"class Inner({name}, torch.optim.Optimizer): pass"
        )
    if isinstance(given, nn.Module):
        return f"wrap the optimizer of the model: {wrap}"
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        return f"parameters go to the optimizer that is wrapped: {wrap}"
    return f"write {wrap}"


# -- a loss that is divided twice ------------------------------------------------------------------


class DividedTwice:
    """Notices losses that were divided by the number of micro-batches, and warns once.

    The window's mean divides them again. Looks at the first micro-batch of each window, and tells
    when that one turns out to have been one backward (the passes of several, such as adversarial
    steps, may be divided by their own number). A division by a number of items (of a sum) or of
    terms (of a multi-task loss) that happens to equal the number of micro-batches is not meant.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = weakref.proxy(ledger)  # because it holds the extension that holds this
        self._told = False
        self._first: MicroBatch | None = None  # of the window looked at last
        self._index = -1  # of that window
        self._divisors: list[int] = []  # of its loss
        self.closed: int | None = None  # micro-batches of the window that closed last

    def look(self, loss: Tensor) -> None:
        """``opt.backward()`` was given this loss, for the open micro-batch.

        Neither waits for a device nor allocates on one.
        """
        ledger = self._ledger
        count = ledger.window.micro_batches
        if self._told or count > 1:
            return
        if count == 1:
            if self._index == ledger.index:
                self._tell(ledger.window.length)
        elif self._first is ledger.micro:
            self._divisors = []
        else:
            if ledger.schedule.caller_owned and self._index + 1 == ledger.index and self.closed is not None:
                self._tell(self.closed)  # only now it is known how many the window had
            self._first, self._index = ledger.micro, ledger.index
            self._divisors = _divisors(loss, ledger.micro.weight)

    def _tell(self, steps: int | None) -> None:
        if steps in self._divisors:
            self._told = True
            warn(
                f"the losses that opt.backward() was given were divided by {steps}, the number of micro-batches in a "
                "window, and reduction='mean' divides by what the window holds again. Leave that division out, or pass "
                "reduction='none', which takes losses as they are"
            )


_TERMS = {
    "AddBackward0",
    "SubBackward0",
    "NegBackward0",
    "MulBackward0",
    "ViewBackward0",
    "SqueezeBackward0",
    "ToCopyBackward0",
}


def _divisors(loss: Tensor, weight: float | Tensor | None) -> list[int]:
    """The whole numbers above 1 by which the loss was divided last.

    There may be several, also before a GradScaler's factor. Not those by which it had been
    multiplied (to undo a framework's division), or which make a mean.
    """
    found: list[int] = []
    factors: list[float] = []
    node = getattr(loss, "grad_fn", None)
    for _ in range(4):
        if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
            break
        number, divides = _python_number(node), node.name() == "DivBackward0"
        node = node.next_functions[0][0]
        if not number:
            continue
        quotient = number if divides else 1 / number
        by = round(quotient) if 2 <= quotient < 2**53 else 0  # not for NaN
        exact = by and number == (by if divides else 1 / by)
        counts_items = isinstance(weight, Tensor) or weight == by
        if exact and not counts_items and not _is_mean_of(node, by):
            found.append(by)
        else:
            factors.append(1 / number if divides else number)
    return [by for by in found if by not in factors]


def _python_number(node: Any) -> float | None:
    """The Python number that a division or product saved; None for a tensor. Does not wait."""
    saved = getattr(node, "_raw_saved_other", None)
    # Hooks on what is saved would be called (by checkpointing, to compute it again); they are not,
    # for a Python number.
    if saved is None or getattr(saved, "unpack_hook", saved) is not None:
        return None
    other = saved.data
    if type(other) is not Tensor or other.dim() or other.device.type != "cpu":
        return None
    return other.item() if other.dtype in (torch.int64, torch.float64) else None


def _is_mean_of(node: Any, by: int) -> bool:
    """True if dividing by ``by`` makes a mean: of a sum over items, or of as many terms."""
    nodes, terms = [node], 0
    for node in nodes:
        if node is None:
            continue
        if node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", None) == 2:
            return True
        if node.name() in _TERMS and len(nodes) < 100:
            nodes += [before for before, _ in node.next_functions]
        else:
            terms += 1
    return terms == by


# -- a learning-rate scheduler that moves too often ------------------------------------------------


def warn_if_never_stepped(ledger: Ledger) -> None:
    """Warn if ``flush()`` ends the first of all micro-batches, if that holds too many passes.

    Too many are more than a window has micro-batches.
    """
    if not (ledger.micro is not None and ledger.window.empty and ledger.index == 0) or ledger.window.length is None:
        return
    micro = ledger.micro
    if micro.parts > max(ledger.window.length, 2) and micro.parts_alike:
        warn(
            f"flush() takes {micro.parts} backward passes for one micro-batch, because no step() has ended any; call "
            "opt.step() after every backward: it counts. Passes that do belong to one micro-batch go into one `with "
            "opt.micro_batch():`"
        )


class StepCalled:
    """Tells a learning-rate scheduler that steps for the first time whether ``step()`` was called.

    It is the optimizer's ``_opt_called``. PyTorch's schedulers ask for its truth once, and warn if
    it is False. It is in the inner optimizer too, for a scheduler that was made of that: inside the
    first window step() was called, although nobody has called the inner optimizer's. Warns if the
    scheduler seems to move with every micro-batch: it asks after the first of several. (One that
    moves with every epoch asks after the epoch's last.)

    Args:
        stepped: True if the inner optimizer was stepped before it was wrapped.
    """

    def __init__(self, ledger: Ledger, stepped: bool):
        self._ledger = weakref.ref(ledger)
        self._stepped = stepped
        self._told = False

    def __bool__(self) -> bool:
        ledger = self._ledger()
        if ledger is None or ledger.index > 0 or ledger.schedule.caller_owned:
            return self._stepped or (ledger is not None and ledger.index > 0)
        inside = ledger.window is not None and ledger.window.has_any
        if inside and ledger.steps <= 1 and not self._told:
            self._told = True
            warn(
                f"a scheduler steps inside window 0, of which {ledger.progress['micro_batch']} micro-batches are in: a "
                "schedule that moves with every micro-batch ends too early; step it once per window: if opt.updated: "
                "scheduler.step()"
            )
        return self._stepped or inside
