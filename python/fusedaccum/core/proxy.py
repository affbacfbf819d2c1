"""A wrapper stands for its inner optimizer: it has its attributes and parameters, and can be copied as one."""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields
from typing import Any

from torch.compiler import is_dynamo_compiling as is_compiling
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from ..features import extend, extensions_for
from . import checkpoint, parameters
from .accumulation import Accumulation
from .apply import Closing
from .config import Settings, check_parameter
from .extension import Extension
from .window import Schedule

# The wrapper's own attributes, beside those whose names begin with an underscore.
OURS = {"optimizer", "settings"}
# Its arguments, which are fixed once it is made.
ARGUMENTS = {field.name for of in (Settings, Schedule) for field in fields(of)} - {"schedule"}


def _of_inner(name: str) -> Any:
    """An attribute of the inner optimizer, looked up on each access. It is on the class, where Python 3.12 and later look when
    ``isinstance`` asks whether there is one (as in Lightning).
    """
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class Wrapper(Optimizer):
    """An optimizer that stands for another one, ``.optimizer``, whose parameters' gradients it accumulates."""

    # torch.amp then calls our step() after an overflow too, so that the window keeps its boundary.
    _step_supports_amp_scaling = True

    def _build(self, optimizer: Optimizer, settings: Settings, anew: bool = False) -> None:
        # Optimizer.__init__ is not run: groups, state, defaults and hooks are the inner optimizer's (see __getattr__).
        self.optimizer = optimizer
        self.settings = settings
        self._accumulation = Accumulation(settings, extensions_for(settings, optimizer))
        self._accumulation.extensions.attach(self._accumulation, optimizer)
        self._ledger, self._sums = self._accumulation.ledger, self._accumulation.sums
        self._closing = Closing(optimizer, self._accumulation, settings)
        parameters.add(self._accumulation, self._new(anew))

    def _named(self) -> dict[Parameter, str]:
        """The parameters in the groups, each once: a tied one may be in its group twice."""
        named: dict[Parameter, str] = {}
        model = {slot.stepped: slot.param for slot in self._sums.buffers.slots}  # the inner optimizer may be at work
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names", [])
            if len(names) != len(group["params"]):  # other code has changed only one of the two
                names = [f"param_groups[{g}]['params'][{i}]" for i in range(len(group["params"]))]
            for name, p in zip(names, group["params"], strict=True):
                named.setdefault(model.get(p, p), name)
        return named

    def _new(self, anew: bool = False) -> list[tuple[str, Parameter]]:
        """The parameters in the groups that are not known yet, with names. Raises ValueError for one whose gradients cannot be taken.

        ``anew``: they may have been a wrapper's, or are copies of such.
        """
        new = [(name, p) for p, name in self._named().items() if p not in self._sums.buffers.of]
        for name, p in new:
            other = parameters.accumulation_of(p)
            for check in self._accumulation.extensions.check_parameter:
                check(name, p, self.settings, anew or other is not None)
            check_parameter(name, p, self.settings, other is not None and other.sums.shows(p))
        return new

    def _follow_groups(self) -> None:
        """The groups have changed."""
        for check in self._accumulation.extensions.check_call:
            check()
        extend(self._accumulation.extensions, self.settings, self.optimizer)
        named, slots = self._named(), self._sums.buffers.slots
        if len(named) >= len(slots) and all(slot.param is p for slot, p in zip(slots, named, strict=False)):
            parameters.add(self._accumulation, self._new())
            return
        if self._closing.broke_off or self._accumulation.at_work:
            raise RuntimeError(
                "within a step(), or after one that an exception broke off, an assignment to opt.param_groups can only add parameters "
                "after the others; this one removes, replaces or reorders some: assign when step() has returned"
            )
        self._accumulation.passes.end_open_pass()
        self._new()  # raises before anything has changed
        for rearrange in self._accumulation.extensions.rearrange:
            rearrange([(name, p) for p, name in named.items()])

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
        if self._accumulation.extensions.stand_in and inspect.ismethod(value) and not name.startswith("_"):
            # It expects what the optimizer steps.
            return functools.wraps(value)(functools.partial(self._closing.call, value))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARGUMENTS:
            raise AttributeError(
                f"{name} was fixed when the optimizer was wrapped, and setting it would change nothing; build a new wrapper and carry the "
                "state over with load_state_dict(state_dict()). For windows of changing length, pass a callable accum_steps"
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
        """True if it is an attribute of the wrapper, before which the inner optimizer's is not looked up."""
        return name in OURS or name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)

    state, defaults = _of_inner("state"), _of_inner("defaults")

    @property
    def param_groups(self) -> Any:
        """The inner optimizer's own. torch.amp reads them just before it looks for overflows in ``p.grad``: so must what a backward has
        left to do, if nothing has signalled its end.
        """
        accumulation = self.__dict__.get("_accumulation")  # None: not built yet
        if accumulation is not None and not is_compiling():
            accumulation.collector.end_returned_pass()
            for recover in accumulation.extensions.recover:
                recover()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        before, self.optimizer.param_groups = self.optimizer.param_groups, value
        try:
            self._follow_groups()
        except Exception:
            self.optimizer.param_groups = before
            raise

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

    # Code that is given the wrapper and finds a scheduler of the inner optimizer, or looks through ``.optimizer``, asks whether the two
    # are one: Lightning, before it accepts the scheduler, and before its LearningRateMonitor shows the rate.
    def __eq__(self, other: object) -> bool:
        return True if other is self or other is self.optimizer else NotImplemented

    def __hash__(self) -> int:
        return hash(self.optimizer)

    def __copy__(self) -> Wrapper:
        raise TypeError(
            "copy.copy() of an AccumulatingOptimizer would be a second wrapper of the same parameters; use copy.deepcopy((model, opt))"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._not_inside("a copy")
        if not self._accumulation.ranks.alone:
            raise RuntimeError(
                "a wrapper with a process group cannot be copied or pickled, because the group belongs to this process; build one in each "
                "process, and carry the state over with load_state_dict(state_dict())"
            )
        self._accumulation.passes.end_open_pass()
        self._check_groups()
        return {
            "optimizer": self.optimizer,
            # Of a fused optimizer, which PyTorch's copies lose: they would leave the scaling to a pass of ours, and round otherwise.
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
        """Build the wrapper again, for parameters that were replaced, or have changed, since the optimizer was wrapped."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None  # a plain tensor's copy has a copy of the gradient; ours is in the window
        self._build(self.optimizer, self.settings, anew=True)

    def _check_groups(self) -> None:
        if not self._accumulation.at_work:  # when they may hold what it steps in place of parameters
            for recover in self._accumulation.extensions.recover:
                recover()
            self._sums.buffers.check_gathers(self.optimizer.param_groups)

    def _not_inside(self, call: str) -> None:
        for check in self._accumulation.extensions.check_call:
            check()
        if self._accumulation.passes.inside:
            raise RuntimeError(
                f"{call} was called inside micro_batch(), which holds one whole micro-batch; call it after the block"
            )

    # -- a learning-rate scheduler notes here that step() was called, and asks when it steps for the first time ----

    @property
    def _opt_called(self) -> Any:
        return self.optimizer._opt_called  # type: ignore[attr-defined]

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        pass  # the ledger knows
