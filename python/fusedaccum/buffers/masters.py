"""FP32 master weights: the inner optimizer steps these, and the model gets them rounded.

16-bit parameters have masters. With buffers in CPU memory so do all parameters that are elsewhere, and the optimizer's state and step
are on the CPU.

Outside code (schedulers, checkpoints, logging) finds the model's own parameters in ``param_groups`` and as the keys of
``state``; the masters take their places only while the inner optimizer is at work.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import ops
from ..engine import runs, without_grad
from .buffers import Slot
from .shards import local_of

if TYPE_CHECKING:
    from .sums import Sums


class MasterWeights:
    """A copy, in FP32 or wider, of every parameter of an optimizer that needs one.

    Args:
        device: where the gradients are; None for the parameters' own.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.of: dict[Parameter, Parameter] = {}
        self._model: dict[Parameter, Parameter] = {}
        self._seen: dict[Parameter, tuple[int, int] | None] = {}  # version and address, as of the last write_back()
        self._meant: dict[Parameter, set[Any]] = {}  # keys of state that the optimizer itself keeps unlike the master
        # While the inner optimizer is at work: the gradients, and the masters' gradients made from them.
        self._lent: dict[Slot, tuple[Tensor | None, Tensor | None]] = {}
        # The call in which the inner optimizer is at work, and what has to be done at its end.
        self._works: tuple[FrameType, Callable[[], None]] | None = None

    def add(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Make masters of parameters that are 16 bits wide, or on another device than their gradients. Returns those that had none."""
        fresh = []
        for p in parameters:
            device = self._device or p.device
            if p not in self.of and (p.dtype.itemsize < 4 or p.device != device):
                copy = p.detach().to(device, torch.promote_types(p.dtype, torch.float32))
                master = Parameter(copy, requires_grad=p.requires_grad)
                if type(p) in (Parameter, Tensor):  # subclasses keep data of their own there
                    master.__dict__ = p.__dict__  # attributes that optimizers read (p.lr_mul), whenever they are set
                self.of[p], self._model[master], self._seen[p] = master, p, _fingerprint(p)
                fresh.append(p)
        return fresh

    def model_of(self, p: Parameter) -> Parameter:
        """The model's parameter, if ``p`` is a master."""
        return self._model.get(p, p)

    def drop(self, parameters: Iterable[Parameter]) -> None:
        """Forget the masters of these parameters, if they have any."""
        for p in self.of.keys() & set(parameters):
            del self._model[self.of.pop(p)], self._seen[p]
            self._meant.pop(p, None)

    def take_state(self, inner: Optimizer, parameters: Iterable[Parameter]) -> None:
        """Make the state that ``inner`` already has of these parameters fit their masters, as its load_state_dict would.

        (Adagrad's constructor makes one.) That ends with ``__setstate__``, where optimizers that keep some state in 16 bits cast it back.
        """
        entries = [(p, state[p]) for state in states_of(inner) for p in parameters if state.get(p)]
        for p, entry in entries:
            _fit(entry, p, self.of[p])
        for optimizer in _all(inner) if entries else ():
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        self._note_meant(inner, parameters)

    def fit_state(self, inner: Optimizer) -> None:
        """Make state that other code has made like the model's parameter (``torch.zeros_like(p.data)``) fit the master.

        What is unlike the master, and was so when the optimizer was last at work, is the optimizer's own choice: it stays.
        """
        for entry, p, key in list(self._unlike(inner, self.of)):
            if key not in self._meant.get(p, ()):
                entry[key] = _fit(entry[key], p, self.of[p], key)

    def _note_meant(self, inner: Optimizer, parameters: Iterable[Parameter]) -> None:
        """All that the state of these parameters holds now is meant to be as it is."""
        for p in parameters if self._meant else ():
            self._meant.pop(p, None)
        for _, p, key in self._unlike(inner, parameters):
            self._meant.setdefault(p, set()).add(key)

    def _unlike(self, inner: Optimizer, parameters: Iterable[Parameter]) -> Iterator[tuple[dict, Parameter, Any]]:
        """Where the state of these parameters holds what :func:`_fit` would change: its entry, the parameter, the entry's key."""
        for state in states_of(inner):
            if self._device is None and not _holds_narrow(state):
                continue
            for p in parameters:
                entry, master = state.get(p), self.of[p]
                if isinstance(entry, dict):
                    device = None if self._device is None or p.device == master.device else master.device
                    for key, value in entry.items():
                        if not _fits(value, master.dtype, device, key):
                            yield entry, p, key

    def watch(self, inner: Optimizer) -> None:
        """Call :meth:`take_state` whenever a state is loaded into ``inner`` itself: PyTorch casts that to the model's dtypes.

        What its state holds now is meant to be as it is (the wrapper may be a copy).
        """
        self._note_meant(inner, self.of)
        alive = weakref.ref(self)

        def loaded(optimizer: Optimizer) -> None:
            masters = alive()
            if masters is not None:
                masters.take_state(optimizer, masters.of)

        for optimizer in _all(inner):
            # Optimizers that delegate everything to another one may lack PyTorch's hooks.
            if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
                weakref.finalize(self, optimizer.register_load_state_dict_post_hook(loaded).remove).atexit = False

    @contextmanager
    def at_work(self, inner: Optimizer, slots: Iterable[Slot] = ()) -> Iterator[None]:
        """Within the block, the inner optimizer's groups and state hold the masters, and the masters of ``slots`` their gradients."""
        self.come_back()
        if self._works or not self.of:  # a step hook may call the wrapper
            yield
            return
        slots = [slot for slot in slots if slot.param in self.of]
        for optimizer in _all(inner):
            # bitsandbytes' first step calls it: it looks for parameters by id(), and would meet the masters.
            if hasattr(optimizer, "check_overrides"):
                optimizer.check_overrides()
        self.fit_state(inner)
        self._works = sys._getframe(2), functools.partial(self._leave, inner, slots)
        try:
            _exchange(inner, self.of)
            self.take_gradients(slots)
            yield
            self._leave(inner, slots)
        except BaseException:
            self._leave(inner, slots)  # once more, if Ctrl-C came meanwhile
            raise

    def _leave(self, inner: Optimizer, slots: Iterable[Slot]) -> None:
        _exchange(inner, self._model)  # first, because it must not be lost to an interrupt
        self._works = None
        self._lent.clear()
        for slot in slots:
            self.of[slot.param].grad = None
        self._note_meant(inner, self.of)

    def come_back(self) -> None:
        """Give the model's parameters their places in the inner optimizer, if a call that has taken them was ended without that."""
        if self._works is not None and not runs(self._works[0]):
            self._works[1]()

    def take_gradients(self, slots: Iterable[Slot]) -> None:
        """Give the masters of ``slots`` their gradients, unless they were given the same ones before."""
        for slot in slots:
            grad = slot.stepped_grad
            if slot.param in self.of and grad is not self._lent.get(slot, (None, None))[0]:
                master = self.of[slot.param]
                master.grad = None if grad is None else _in_the_form_of(master, grad)
                self._lent[slot] = grad, master.grad

    def return_gradients(self, slots: Iterable[Slot]) -> None:
        """If the inner optimizer has replaced or removed a master's gradient, do the same to ``p.grad``."""
        for slot in slots:
            left = self.of[slot.param].grad if slot.param in self.of else None
            if left is not self._lent.get(slot, (None, None))[1]:
                holder = slot.holder if slot.offloaded else slot.param
                slot.assign(holder, left)

    @without_grad
    def follow_model(self) -> None:
        """Take over what other code has written into the model since the last :meth:`write_back` (such as loaded weights).

        The parameters' versions and memory tell, so writes into ``p.data`` go unnoticed. Where a parameter still equals its rounded
        master, the master keeps its FP32 bits: so a model's and an optimizer's checkpoint can be loaded in either order.
        """
        for p, master in self.of.items():
            master.requires_grad = p.requires_grad  # it may have been frozen or unfrozen since
            if _fingerprint(p) != self._seen[p]:
                theirs = p.to(master.device)
                master.copy_(torch.where(master.to(p.dtype) == theirs, master, theirs.to(master.dtype)))
                self._seen[p] = _fingerprint(p)

    @without_grad
    def write_back(
        self, stepped: Iterable[Parameter], sums: Sums, before: Mapping[Parameter, Any] | None = None
    ) -> None:
        """Round the masters of these parameters into the model: one call per device.

        A parameter whose master looks as it did ``before`` is written through ``.data``, which keeps its version: the master was written
        through ``.data`` too, if at all. So a method that only reads may be called between a forward and its backward.
        """
        by_device: dict[tuple[torch.device, bool], list[Parameter]] = {}
        for p in stepped:
            if p in self.of:
                by_device.setdefault((p.device, p.device != self.of[p].device), []).append(p)
        for (_, elsewhere), parameters in by_device.items():
            masters = [local_of(self.of[p].detach()) for p in parameters]
            cast_ = sums.offload.cast_ if elsewhere else ops.cast_
            outs = [local_of(p.detach()) for p in parameters]
            unchanged = [before is not None and before[p] == _fingerprint(self.of[p]) for p in parameters]
            outs = [out.data if same else out for out, same in zip(outs, unchanged, strict=True)]
            cast_(outs, masters, backend=sums.backend)
            for p in parameters:
                self._seen[p] = _fingerprint(p)

    def compare_model(self) -> None:
        """Have :meth:`follow_model` compare all values, once: the model may have been written to through ``p.data``."""
        self._seen.update(dict.fromkeys(self._seen))

    def fingerprints(self) -> dict[Parameter, tuple[int, int]]:
        """By parameter: the version and address of its master, which tell whether it has been written to."""
        return {p: _fingerprint(master) for p, master in self.of.items()}

    def load(self, masters: dict[Parameter, Tensor]) -> None:
        """Load saved masters."""
        with torch.no_grad():
            for p, saved in masters.items():
                self.of[p].copy_(saved)
                self._seen[p] = None  # the model may hold others: follow_model() compares


def _in_the_form_of(master: Parameter, grad: Tensor) -> Tensor:
    """A gradient as its master takes it: PyTorch's fused optimizers need one of the same strides."""
    if local_of(grad).stride() == local_of(master).stride():
        return grad.to(master.device, master.dtype)
    return torch.empty_like(master, requires_grad=False).copy_(grad)


def _fingerprint(p: Parameter) -> tuple[int, int]:
    """What changes when a parameter is written to, or gets other memory (as from vector_to_parameters)."""
    return p._version, p.data_ptr()


def _fit(value: Any, p: Parameter, master: Parameter, key: Any = None) -> Any:
    """``value`` of the state of ``p``, in the master's dtype and on its device; so is all that a dict, list or tuple holds."""
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
    """Would :func:`_fit` leave ``value``, of the state of a master of this dtype, as it is? Wider tensors fit, too.

    Args:
        device: of the master; None if that is the parameter's own, where state is free to be elsewhere.
    """
    if isinstance(value, Tensor):
        if value.dtype != dtype and key != "step" and value.is_floating_point() and value.itemsize < dtype.itemsize:
            return False
        return device is None or value.device == device
    if isinstance(value, dict):
        return all(_fits(inner, dtype, device, name) for name, inner in value.items())
    return not isinstance(value, (list, tuple)) or all(_fits(inner, dtype, device, None) for inner in value)


def _holds_narrow(state: Mapping[Any, Any]) -> bool:
    """May it hold a tensor of fewer than 32 bits? Nearly always not, which is seen here in a tenth of the time."""
    entries = (entry for entry in state.values() if isinstance(entry, dict))
    kinds = {getattr(value, "dtype", type(value)) for entry in entries for value in entry.values()}
    return any(
        kind.is_floating_point and kind.itemsize < 4
        if isinstance(kind, torch.dtype)
        else issubclass(kind, (dict, list, tuple))
        for kind in kinds
    )


def _exchange(inner: Optimizer, table: Mapping[Any, Any]) -> None:
    for group in inner.param_groups:
        group["params"][:] = [table.get(p, p) for p in group["params"]]
    for state in states_of(inner):
        exchanged = {table.get(key, key): value for key, value in state.items()}
        state.clear()
        state.update(exchanged)  # at once, so that Ctrl-C loses nothing


def _all(inner: Optimizer) -> list[Optimizer]:
    """The optimizer and those inside it (Lookahead's): they share its groups (see check_optimizer), but may keep a state of their own."""
    found = [inner]
    for optimizer in found:
        found += [other for _, other in inside(optimizer) if other not in found]
    return found


def inside(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers that this one has as attributes, or in a list, tuple or dict that is one; with the attribute's name."""
    for name, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for other in several:
            if isinstance(other, Optimizer):
                yield name, other


def states_of(inner: Optimizer) -> list[dict]:
    """The optimizer's state, and those of the optimizers inside it."""
    return list({id(optimizer.state): optimizer.state for optimizer in _all(inner)}.values())
