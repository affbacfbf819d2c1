"""The inner optimizer's state of parameters in whose place it steps masters: it must fit these.

State may come from before the wrapper, from a checkpoint, or from ``torch.zeros_like(p.data)``, and
is like the model's parameter then: too narrow, or on another device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..inner import states_of, with_those_inside


class MasterState:
    """Keeps the state of an optimizer fit for masters, but for what the optimizer means otherwise.

    Args:
        inner: the optimizer. of: the masters of its parameters, as they come and go.
    """

    def __init__(self, inner: Optimizer, of: Mapping[Parameter, Parameter]):
        self._inner, self._of = inner, of
        self._meant: dict[Parameter, set[Any]] = {}  # keys of state that the optimizer itself keeps unlike the master
        self._watches = False  # True if the optimizer's load_state_dict() is followed

    def masters_made(self, parameters: Iterable[Parameter]) -> None:
        """These parameters have masters from now on."""
        if self._watches:
            self.take(parameters)
        else:
            self._watch()

    def forget(self, p: Parameter) -> None:
        """The parameter has no master any more."""
        self._meant.pop(p, None)

    def take(self, parameters: Iterable[Parameter]) -> None:
        """Make the state that the inner optimizer has of these parameters fit their masters.

        Done as its load_state_dict would, which ends with ``__setstate__``, where optimizers that
        keep some state in 16 bits cast it back. (Adagrad's constructor makes a state.)
        """
        entries = [(p, state[p]) for state in states_of(self._inner) for p in parameters if state.get(p)]
        for p, entry in entries:
            _fit(entry, p, self._of[p])
        for optimizer in with_those_inside(self._inner) if entries else ():
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        self.note_meant(parameters)

    def fit(self) -> None:
        """Make state that other code has made like the model's parameter fit the master.

        Such state comes from ``torch.zeros_like(p.data)``. What is unlike the master, and was so
        when the optimizer was last at work, is the optimizer's own choice: it stays.
        """
        for entry, p, key in list(self._unlike(self._of)):
            if key not in self._meant.get(p, ()):
                entry[key] = _fit(entry[key], p, self._of[p], key)

    def note_meant(self, parameters: Iterable[Parameter]) -> None:
        """All that the state of these parameters holds now is meant to be as it is."""
        for p in parameters if self._meant else ():
            self._meant.pop(p, None)
        for _, p, key in self._unlike(parameters):
            self._meant.setdefault(p, set()).add(key)

    def _unlike(self, parameters: Iterable[Parameter]) -> Iterator[tuple[dict, Parameter, Any]]:
        """Where the state of these parameters holds what :func:`_fit` would change.

        Yields the state's entry, the parameter, and the key in the entry.
        """
        apart = any(p.device != master.device for p, master in self._of.items())
        for state in states_of(self._inner):
            if not apart and not _holds_narrow(state):
                continue
            for p in parameters:
                entry, master = state.get(p), self._of[p]
                if isinstance(entry, dict):
                    device = None if p.device == master.device else master.device
                    for key, value in entry.items():
                        if not _fits(value, master.dtype, device, key):
                            yield entry, p, key

    def _watch(self) -> None:
        """Call :meth:`take` whenever a state is loaded into the inner optimizer itself.

        PyTorch casts that to the model's dtypes. What the optimizer's state holds now is meant to
        be as it is (the wrapper may be a copy).
        """
        self._watches = True
        self.note_meant(self._of)
        alive = weakref.ref(self)

        def loaded(_: Optimizer) -> None:
            state = alive()
            if state is not None:
                state.take(state._of)

        for optimizer in with_those_inside(self._inner):
            # Optimizers that delegate everything to another one may lack PyTorch's hooks.
            if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
                weakref.finalize(self, optimizer.register_load_state_dict_post_hook(loaded).remove).atexit = False


def _fit(value: Any, p: Parameter, master: Parameter, key: Any = None) -> Any:
    """``value``, or what it holds (dict, list, tuple), in the master's dtype and on its device."""
    if isinstance(value, Tensor):
        if key != "step":
            return value.to(master.device, master.dtype if value.is_floating_point() else value.dtype)
        # Else it stays on the CPU, where reading it costs no wait.
        return value.to(master.device) if p.device != master.device else value
    if isinstance(value, dict):
        value.update({name: _fit(inner, p, master, name) for name, inner in value.items()})
    elif isinstance(value, list):
        value[:] = [_fit(inner, p, master) for inner in value]
    elif type(value) is tuple:
        return tuple(_fit(inner, p, master) for inner in value)
    return value


def _fits(value: Any, dtype: torch.dtype, device: torch.device | None, key: Any) -> bool:
    """True if ``value``, of the state of a master of this dtype, can stay. Wider tensors can, too.

    Args:
        device: of the master; None if that is the parameter's: then state may be elsewhere.
    """
    if isinstance(value, Tensor):
        if value.dtype != dtype and key != "step" and value.is_floating_point() and value.itemsize < dtype.itemsize:
            return False
        return device is None or value.device == device
    if isinstance(value, dict):
        return all(_fits(inner, dtype, device, name) for name, inner in value.items())
    return not isinstance(value, (list, tuple)) or all(_fits(inner, dtype, device, None) for inner in value)


def _holds_narrow(state: Mapping[Any, Any]) -> bool:
    """True if it may hold a tensor of fewer than 32 bits.

    Nearly always not, which is seen here in a tenth of the time.
    """
    entries = (entry for entry in state.values() if isinstance(entry, dict))
    kinds = {getattr(value, "dtype", type(value)) for entry in entries for value in entry.values()}
    return any(
        kind.is_floating_point and kind.itemsize < 4
        if isinstance(kind, torch.dtype)
        else issubclass(kind, (dict, list, tuple))
        for kind in kinds
    )
