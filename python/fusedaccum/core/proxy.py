"""A wrapper stands for its inner optimizer: attributes, parameters, state dicts, copies."""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields
from typing import Any

from torch.compiler import is_dynamo_compiling as is_compiling
from torch.optim.optimizer import Optimizer

from ..distributed.checkpoint import refuse_torchs_functions
from ..engine import outside_graphs
from ..features import extend, extensions_for
from ..last_window import LastWindow
from . import checkpoint, parameters
from .accumulation import Accumulation
from .apply import Closing
from .config import Settings
from .extension import Extension
from .window import Schedule

# The wrapper's own attributes, beside those whose names begin with an underscore.
OURS = {"optimizer", "settings"}
# Its arguments, which are fixed once it is made.
ARGUMENTS = {field.name for of in (Settings, Schedule) for field in fields(of)} - {"schedule"}


def _of_inner(name: str) -> Any:
    """An inner optimizer's attribute, on the class, where isinstance() looks (Python 3.12+)."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class Wrapper(Optimizer):
    """An optimizer that stands for another, ``.optimizer``, and accumulates its gradients."""

    # torch.amp then calls our step() after an overflow too, so that the window keeps its boundary.
    _step_supports_amp_scaling = True

    def _build(self, optimizer: Optimizer, settings: Settings, anew: bool = False) -> None:
        # No Optimizer.__init__: groups, state and hooks are the inner optimizer's (__getattr__).
        self.optimizer, self.settings = optimizer, settings
        self._accumulation = Accumulation(settings, extensions_for(settings, optimizer))
        self._accumulation.extensions.attach(self._accumulation, optimizer)
        self._ledger, self._sums = self._accumulation.ledger, self._accumulation.sums
        self._closing = Closing(optimizer, self._accumulation)
        parameters.add(self._accumulation, parameters.new(self._accumulation, self.param_groups, anew))

    def _begin_step(self) -> None:
        self._accumulation.passes.end_open_pass()
        self._accumulation.check()
        self._check_groups()

    def _not_inside(self, call: str, instead: str = "call it after the block") -> None:
        for check in self._accumulation.extensions.check_call:
            check()
        if self._accumulation.passes.inside:
            raise RuntimeError(
                f"{call} was called inside `with opt.micro_batch()`, which is one micro-batch; {instead}"
            )

    # -- the parameters in its groups --------------------------------------------------------------

    @property
    def param_groups(self) -> Any:
        """The inner optimizer's own; a backward whose end nothing has signalled is ended first.

        torch.amp reads them just before it looks for overflows in ``p.grad``.
        """
        accumulation = self.__dict__.get("_accumulation")  # None: not built yet
        if accumulation is not None and not is_compiling():
            accumulation.collector.end_returned_pass()
            if accumulation.stand_ins is not None:
                accumulation.stand_ins.recover()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        before, self.optimizer.param_groups = self.optimizer.param_groups, value
        try:
            self._follow_groups()
        except Exception:
            self.optimizer.param_groups = before
            raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and accumulate its parameters' gradients; raises as the constructor does.

        Assigning to ``opt.param_groups`` takes in new parameters, and lets go of those gone.
        """
        self.optimizer.add_param_group(param_group)
        try:
            self._follow_groups()
        except Exception:
            self.param_groups.pop()
            raise

    def _follow_groups(self) -> None:
        """The groups have changed."""
        for check in self._accumulation.extensions.check_call:
            check()
        extend(self._accumulation.extensions, self.settings, self.optimizer)
        names, slots = parameters.named(self._accumulation, self.param_groups), self._sums.buffers.slots
        if len(names) >= len(slots) and all(slot.param is p for slot, p in zip(slots, names, strict=False)):
            parameters.add(self._accumulation, parameters.new(self._accumulation, self.param_groups))
            return
        if self._closing.broke_off or self._accumulation.at_work:
            raise RuntimeError(
                "within a step(), or after one that an exception broke off, an assignment to opt.param_groups can only "
                "add parameters after the others; this one removes, replaces or reorders some: assign when step() has "
                "returned"
            )
        self._accumulation.passes.end_open_pass()
        parameters.new(self._accumulation, self.param_groups)  # raises before anything has changed
        for rearrange in self._accumulation.extensions.rearrange:
            rearrange([(name, p) for p, name in names.items()])

    def _check_groups(self) -> None:
        if not self._accumulation.at_work:  # when they may hold what it steps in place of parameters
            if self._accumulation.stand_ins is not None:
                self._accumulation.stand_ins.recover()
            self._sums.buffers.check_groups(self.optimizer.param_groups)

    # -- its state, saved, loaded and copied -------------------------------------------------------

    @outside_graphs
    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict plus ``"fusedaccum"``: open window, master weights.

        Tensors and plain values only (``torch.load(weights_only=True)`` reads it). Buffers are
        copies, for which it allocates; masters and the inner optimizer's state are the live
        tensors, as in PyTorch, and change with the next step. Waits for the device only with
        ``buffer_device``. A plain optimizer can load it too, and ignores the key.

        Raises:
            RuntimeError: within ``micro_batch()`` or a backward; after a process group's
                ``normalize_()``; gradients are held back; groups were changed in place only.
        """
        self._not_inside("state_dict()")
        refuse_torchs_functions("state_dict()")
        self._accumulation.passes.end_open_pass()
        self._check_groups()
        self._accumulation.ranks.check_reduced("state_dict() would lose gradients of the open window")
        with self._accumulation.inner_steps(()):
            inner = self.optimizer.state_dict()
        return {**inner, checkpoint.KEY: checkpoint.save(self)}

    @outside_graphs
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a plain optimizer's state (an empty window).

        If the model has moved to another device or dtype since it was wrapped, or into a
        DistributedDataParallel module, its gradients accumulate there from now on. (Accelerate
        moves a model, and then loads the optimizer's own state.) Between windows, and if no window
        is loaded, ``p.grad`` stays as it is.

        Raises:
            ValueError: saved from other parameters, or with an open window and other window
                settings; nothing is loaded then.
        """
        self._not_inside("load_state_dict()")
        refuse_torchs_functions("load_state_dict()")
        self._accumulation.passes.end_open_pass()
        own = state_dict.get(checkpoint.KEY)
        if own is not None:
            checkpoint.check(self, own)
        if any(outdated() for outdated in self._accumulation.extensions.outdated):
            before = self._accumulation.extensions
            parameters.let_go(self._accumulation)
            self._build_anew()
            self._accumulation.extensions.follow(before)
        with self._accumulation.inner_steps(()):
            self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != checkpoint.KEY})
        self._accumulation.ranks.forget_others(self.state)
        brings_window = own is not None and own["window"] is not None
        if self._ledger.window is not None or self._closing.broke_off or brings_window:
            self.reset()
        else:  # the last window's gradient stays in p.grad
            self._forget_outside()
        if own is not None:
            checkpoint.load(self, own)

    def _forget_outside(self) -> None:
        """Forget forwards without a backward, and what other code has shown (a loss scale)."""
        self._ledger.drop_forwards()  # which zero_grad(), often called between forward and backward, leaves alone
        for forgotten in self._accumulation.extensions.forgotten:
            forgotten()

    def __copy__(self) -> Wrapper:
        raise TypeError(
            "copy.copy() of an AccumulatingOptimizer would be a second wrapper of the same parameters; use "
            "copy.deepcopy((model, opt))"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._not_inside("a copy")
        if not self._accumulation.ranks.alone:
            raise RuntimeError(
                "a wrapper with a process group cannot be copied or pickled, because the group belongs to this "
                "process; build one in each process, and carry the state over with load_state_dict(state_dict())"
            )
        self._accumulation.passes.end_open_pass()
        self._check_groups()
        return {
            "optimizer": self.optimizer,
            # Of a fused optimizer, which PyTorch's copies lose: they would leave the scaling to a
            # pass of ours, and round differently.
            "scales": vars(self.optimizer).get("_step_supports_amp_scaling", False),
            "settings": self.settings,
            "own": checkpoint.save(self),
            "last": (self._closing.last_window, self._accumulation.updated),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer, self.settings = state["optimizer"], state["settings"]
        if state["scales"]:
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        self._build_anew()
        checkpoint.load(self, state["own"])
        self._closing.last_window, self._accumulation.updated = state["last"]

    def _build_anew(self) -> None:
        """Build the wrapper again, for parameters that were replaced, or have changed."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None  # a plain tensor's copy has a copy of the gradient; ours is in the window
        self._build(self.optimizer, self.settings, anew=True)

    # -- what it says of its windows ---------------------------------------------------------------

    @property
    def progress(self) -> dict[str, int | str]:
        """How far the open window is, for ``bar.set_postfix(opt.progress)``. Never waits.

        ``"window"`` is its index; ``"micro_batch"`` how many it holds, as ``"3/8"`` if a count
        closes it; ``"weight"``, as ``"96/4096"``, is there if weights that the host knows close it,
        in one process. Once a window has closed, this describes the next one.
        """
        return self._ledger.progress

    @property
    def last_window(self) -> LastWindow | None:
        """What is known about the last closed window; None before the first."""
        return self._closing.last_window

    @property
    def updated(self) -> bool:
        """True if the last ``step()`` or ``flush()`` changed the parameters, until a backward.

        So code that runs after every micro-batch sees a window once. Waits for the device only if
        the decision was left to a fused optimizer there.
        """
        return bool(self._accumulation.updated)

    def __repr__(self) -> str:
        schedule, at = self.settings.schedule, self._ledger.progress
        settings = {**vars(self.settings), "accum_steps": schedule.accum_steps, "window_weight": schedule.window_weight}
        defaults = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        asked = [
            f"{name}={settings[name]!r}" for name in defaults if name in settings and settings[name] != defaults[name]
        ]
        weight = f", weight {at['weight']}" if "weight" in at else ""
        where = f"window {at['window']}, {at['micro_batch']} micro-batches{weight}"
        return f"{type(self).__name__}({', '.join(asked)}): {where}, for\n{self.optimizer!r}"

    # -- its attributes ----------------------------------------------------------------------------

    state, defaults = _of_inner("state"), _of_inner("defaults")

    def __getattr__(self, name: str) -> Any:
        """Any attribute that is not ours is the inner optimizer's, looked up on each access."""
        if name == "optimizer":  # not built yet
            raise AttributeError(name)
        if name in self._of_extensions:
            return getattr(self._of_extensions[name], name)
        if name in ARGUMENTS:
            schedule = self.settings.schedule
            return getattr(schedule if hasattr(schedule, name) else self.settings, name)
        value = getattr(self.optimizer, name)
        if self._accumulation.stands_in and inspect.ismethod(value) and not name.startswith("_"):
            # It expects what the optimizer steps.
            return functools.wraps(value)(functools.partial(self._closing.call, value))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARGUMENTS:
            raise AttributeError(
                f"{name} was fixed when the optimizer was wrapped, and setting it would change nothing; build a new "
                "wrapper and carry the state over with load_state_dict(state_dict()). For windows of changing length, "
                "pass a callable accum_steps"
            )
        inner = getattr(self, "optimizer", None)  # None: a subclass sets its own before it calls __init__
        if inner is not None and name in self._of_extensions:
            setattr(self._of_extensions[name], name, value)
        elif not self._has(name) and hasattr(inner, name):
            setattr(inner, name, value)  # where it is read: a number that a scheduler moves
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._of_extensions:
            delattr(self._of_extensions[name], name)
        elif not self._has(name) and hasattr(self.optimizer, name):
            delattr(self.optimizer, name)
        else:
            super().__delattr__(name)

    @property
    def _of_extensions(self) -> dict[str, Extension]:
        """The extensions that have attributes of the wrapper, by these."""
        accumulation = self.__dict__.get("_accumulation")  # None: not built yet
        return {} if accumulation is None else accumulation.extensions.attributes

    def _has(self, name: str) -> bool:
        """True for the wrapper's own, which come before the inner optimizer's."""
        return name in OURS or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)

    # Lightning asks whether the two are one, before it accepts a scheduler of the inner optimizer,
    # and before its LearningRateMonitor shows the rate.
    def __eq__(self, other: object) -> bool:
        return True if other is self or other is self.optimizer else NotImplemented

    def __hash__(self) -> int:
        return hash(self.optimizer)

    # A learning-rate scheduler notes here that step() was called, and asks at its first step.
    @property
    def _opt_called(self) -> Any:
        return self.optimizer._opt_called  # type: ignore[attr-defined]

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        pass  # the ledger knows
