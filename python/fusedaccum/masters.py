"""FP32 master weights for 16-bit parameters: the inner optimizer steps these, and the model gets them rounded.

Everybody outside (schedulers, checkpoints, logging) finds the model's own parameters in ``param_groups`` and as the keys of
``state``; the masters stand in their places only while the inner optimizer is at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from . import ops
from .buffers import Slot


class MasterWeights:
    """A FP32 copy of every 16-bit parameter of an optimizer."""

    def __init__(self) -> None:
        self.of: dict[Parameter, Parameter] = {}
        self._model: dict[Parameter, Parameter] = {}
        self._version: dict[Parameter, int] = {}

    def add(self, parameters: Iterable[Parameter]) -> None:
        """Make masters of those that are 16 bits wide."""
        for p in parameters:
            if p.dtype.itemsize < 4:
                master = Parameter(p.detach().float(), requires_grad=p.requires_grad)
                self.of[p], self._model[master], self._version[p] = master, p, p._version

    @contextmanager
    def at_work(self, inner: Optimizer, slots: Iterable[Slot] = ()) -> Iterator[None]:
        """Within, the inner optimizer's groups and state hold the masters, and those of ``slots`` their gradients."""
        lent = [(self.of[slot.param], slot.param.grad) for slot in slots if slot.param in self.of]
        _exchange(inner, self.of)
        for master, grad in lent:
            master.grad = grad
        try:
            yield
        finally:
            for master, _ in lent:
                master.grad = None
            _exchange(inner, self._model)

    @torch.no_grad()
    def follow_model(self) -> None:
        """Take over what others wrote into the model since the last :meth:`write_back` (loaded weights, say).

        Told by the parameters' versions, so writes through ``p.data`` go unseen. Where the parameter still is its master,
        rounded, the master keeps its FP32 bits: so the order in which a model's and
        an optimizer's checkpoint are loaded does not matter.
        """
        for p, master in self.of.items():
            if p._version != self._version[p]:
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))
                self._version[p] = p._version

    @torch.no_grad()
    def write_back(self, stepped: Iterable[Parameter], backend: str) -> None:
        """Round the masters of these parameters into the model: one call a device."""
        by_device: dict[torch.device, list[Parameter]] = {}
        for p in stepped:
            if p in self.of:
                by_device.setdefault(p.device, []).append(p)
        for parameters in by_device.values():
            masters = [self.of[p].detach() for p in parameters]
            ops.cast_([p.detach() for p in parameters], masters, backend=backend)
            for p in parameters:
                self._version[p] = p._version

    def load(self, masters: dict[Parameter, Tensor]) -> None:
        """Copy saved masters in."""
        with torch.no_grad():
            for p, saved in masters.items():
                self.of[p].copy_(saved)
                self._version[p] = -1  # the model may hold others: follow_model() compares


def _exchange(inner: Optimizer, table: Mapping[Any, Any]) -> None:
    for group in inner.param_groups:
        group["params"][:] = [table.get(p, p) for p in group["params"]]
    entries = list(inner.state.items())
    inner.state.clear()
    for key, value in entries:
        inner.state[table.get(key, key)] = value
