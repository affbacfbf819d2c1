"""FP32 master weights: the inner optimizer steps these, and the model gets them rounded.

16-bit parameters have masters. With buffers in CPU memory so do all parameters that are elsewhere,
and the optimizer's state and step are on the CPU.

Outside code (schedulers, checkpoints, logging) finds the model's own parameters in ``param_groups``
and as keys of ``state``; masters take their places only while the inner optimizer is at work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import ops
from ..core.buffers import Slot
from ..core.extension import Extension, StandIns
from ..engine import runs, without_grad
from ..inner import inside, states_of, with_those_inside
from ..parts import local_of
from .master_state import MasterState

if TYPE_CHECKING:
    from ..core.accumulation import Accumulation
    from ..core.config import Settings


class Given(NamedTuple):
    """A gradient that a master was given: ``p.grad`` itself or a copy. With versions."""

    grad: Tensor | None = None
    version: int = 0
    masters: Tensor | None = None
    masters_version: int = 0

    @classmethod
    def now(cls, grad: Tensor | None, masters: Tensor | None) -> Given:
        return cls(grad, 0 if grad is None else grad._version, masters, 0 if masters is None else masters._version)

    def is_of(self, grad: Tensor | None) -> bool:
        """True if this ``p.grad`` is what the master was given, and has not been written to."""
        return grad is self.grad and (grad is None or grad is self.masters or grad._version == self.version)

    def is_left(self, masters: Tensor | None) -> bool:
        """True if this gradient of the master is the given one, and ``p.grad`` is as it is."""
        return masters is self.masters and (
            masters is None or masters is self.grad or masters._version == self.masters_version
        )


class MasterWeights(StandIns, Extension):
    """A copy, in FP32 or wider, of every parameter of an optimizer that needs one."""

    key = "masters"
    by_parameter = True

    def __init__(self) -> None:
        self.of: dict[Parameter, Parameter] = {}
        self._model: dict[Parameter, Parameter] = {}
        self._seen: dict[Parameter, tuple[int, int] | None] = {}  # version and address, as of the last write-back
        self._apart: set[Parameter] = set()  # those that this rank has stepped alone, and not compared since
        self._behind: set[Parameter] = set()  # those to which a write-back was begun, and perhaps broken off
        # While the inner optimizer is at work: gradients, and the masters' ones made from them.
        self._gradients: dict[Slot, Given] = {}
        # The call in which the inner optimizer is at work, and what has to be done at its end.
        self._works: tuple[FrameType, Callable[[], None]] | None = None

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        super().attach(accumulation, inner)
        self._state = MasterState(inner, self.of)

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        argument = cls._argument(settings)
        if settings.buffer_dtype not in (torch.float32, torch.float64) and not cls._takes(settings):
            raise ValueError(
                f"{argument} steps FP32 parameters and needs FP32 gradients, but buffer_dtype is "
                f"{settings.buffer_dtype}; use buffer_dtype=torch.float32"
            )
        ours = {id(group["params"]) for group in inner.param_groups}
        for name, other in inside(inner):
            if any(id(group["params"]) not in ours for group in other.param_groups):
                raise ValueError(
                    f"{argument} does not work with {type(inner).__name__}, which steps through another optimizer "
                    f"(.{name}) whose own lists would still hold the model's parameters; wrap a plain optimizer "
                    "(instead of ZeroRedundancyOptimizer, pass shard=True)"
                )
        group = next((group for group in inner.param_groups if group.get("capturable")), None)
        where = settings.buffer_device or settings.optimizer_device
        if where is not None and group is not None and any(p.device != where for p in group["params"]):
            raise ValueError(
                f"capturable=True is for optimizers that step on a GPU, but with {argument} this one steps on the CPU; "
                "build it without capturable"
            )

    @classmethod
    def _argument(cls, settings: Settings) -> str:
        """What has asked for these masters."""
        away = "" if settings.buffer_device is None else "buffer_device='cpu' and "
        return f"{away}master_weights={settings.master_weights!r}"

    @classmethod
    def _takes(cls, settings: Settings) -> bool:
        """True if masters take gradients from 16-bit buffers, because these hold wider sums."""
        return False

    # -- parameters --------------------------------------------------------------------------------

    def parameters_added(self, slots: Sequence[Slot]) -> None:
        """Make masters of parameters that need one and have none."""
        fresh = []
        for slot in self.accumulation.ranks.owned(self.accumulation.sums.buffers.slots):
            p = slot.param
            if p not in self.of and self._needs_master(slot):
                master = Parameter(self._copy(slot), requires_grad=p.requires_grad)
                if type(p) in (Parameter, Tensor):  # subclasses keep data of their own there
                    master.__dict__ = p.__dict__  # attributes that optimizers read (p.lr_mul), whenever they are set
                self.of[p], self._model[master], self._seen[p] = master, p, fingerprint(p)
                slot.stepped = master
                fresh.append(p)
        self._state.masters_made(fresh)

    def _needs_master(self, slot: Slot) -> bool:
        return slot.param.dtype.itemsize < 4 or slot.private

    def _copy(self, slot: Slot) -> Tensor:
        """What the inner optimizer steps in place of the slot's parameter."""
        p = slot.param
        return p.detach().to(slot.device, torch.promote_types(p.dtype, torch.float32))

    def parameters_moved(self, places: dict[int, int]) -> None:
        for p in self.of.keys() - self.accumulation.sums.buffers.of.keys():
            del self._model[self.of.pop(p)], self._seen[p]
            self._state.forget(p)
            self._behind.discard(p)
            self._apart.discard(p)

    def newly_wrapped(self) -> None:
        self._state.take(self.of)

    # -- while the inner optimizer is at work ------------------------------------------------------

    def stands_in(self) -> bool:
        return bool(self.of)

    @contextmanager
    def stepping(self, slots: Sequence[Slot], call: FrameType) -> Iterator[None]:
        """In the block, the inner optimizer's groups and state hold the masters.

        The masters of ``slots`` have their gradients.
        """
        self.recover()
        if self._works or not self.of:  # a step hook may call the wrapper
            yield
            return
        slots = [slot for slot in slots if slot.param in self.of]
        for optimizer in with_those_inside(self.inner):
            # Else bitsandbytes' first step calls it: it looks up by id(), and would meet masters.
            if hasattr(optimizer, "check_overrides"):
                optimizer.check_overrides()
        self._state.fit()
        self._works = call, functools.partial(self._leave, slots)
        try:
            _exchange(self.inner, self.of)
            self._take_gradients(slots)
            yield
            self._leave(slots)
        except BaseException:
            self._leave(slots)  # once more, if Ctrl-C came meanwhile
            raise

    def _leave(self, slots: Sequence[Slot]) -> None:
        _exchange(self.inner, self._model)  # first, because it must not be lost to an interrupt
        self._works = None
        self._gradients.clear()
        for slot in slots:
            slot.stepped.grad = None
        self._state.note_meant(self.of)

    def recover(self) -> None:
        """Put the model's parameters back, if a call that took their places ended without that."""
        if self._works is not None and not runs(self._works[0]):
            self._works[1]()

    def _take_gradients(self, slots: Iterable[Slot]) -> None:
        """Give the masters of ``slots`` their gradients, unless they were given these before."""
        for slot in slots:
            grad, master = slot.stepped_grad, slot.stepped
            if master is not slot.param and not self._gradients.get(slot, NOTHING).is_of(grad):
                master.grad = None if grad is None else self._in_the_form_of(master, grad, slot)
                self._gradients[slot] = Given.now(grad, master.grad)

    def _in_the_form_of(self, master: Tensor, grad: Tensor, slot: Slot) -> Tensor:
        """The gradient as the master takes it: PyTorch's fused optimizers need the same strides."""
        if slot.rounded and grad is slot.shown and slot.untouched:
            wide = self._room_for_gradient(master, slot)
            self.accumulation.sums.read([slot], [wide])
            return wide
        if local_of(grad).stride() == local_of(master).stride():
            return grad.to(master.device, master.dtype)
        return torch.empty_like(master, requires_grad=False).copy_(grad)

    def _room_for_gradient(self, master: Tensor, slot: Slot) -> Tensor:
        return torch.empty_like(master, requires_grad=False)

    def _return_gradients(self, slots: Iterable[Slot]) -> None:
        """What the inner optimizer did to a master's gradient, do to ``p.grad``."""
        for slot in slots:
            left = slot.stepped.grad
            if slot.stepped is not slot.param and not self._gradients.get(slot, NOTHING).is_left(left):
                holder = slot.holder if slot.private else slot.param
                slot.assign(holder, None if left is None else left.to(slot.device, slot.dtype))

    @contextmanager
    def calling(self, slots: Sequence[Slot], call: FrameType) -> Iterator[None]:
        self.others_may_have_written(())
        before = {p: fingerprint(master) for p, master in self.of.items()}
        try:
            with self.stepping(slots, call):
                yield
                self._return_gradients(slots)
        finally:  # what a method that raises has done stays, as in plain PyTorch
            self._write_back(self.of, before)

    # -- the model ---------------------------------------------------------------------------------

    def others_may_have_written(self, slots: Sequence[Slot]) -> None:
        self._follow(self.of)
        self._take_gradients(slots)

    @without_grad
    def _follow(self, parameters: Iterable[Parameter]) -> None:
        """Take over what other code has written into these parameters since :meth:`_write_back`.

        Loaded weights, say. The parameters' versions and memory tell, so writes into ``p.data`` go
        unnoticed. Where a parameter still equals its rounded master, the master keeps its FP32
        bits: so a model's and an optimizer's checkpoint can be loaded in either order.
        """
        if self._behind:  # a part of what they hold is older than their masters
            self._write_back(list(self._behind))
        for p in parameters:
            master = self.of[p]
            master.requires_grad = p.requires_grad  # it may have been frozen or unfrozen since
            written = fingerprint(p) != self._seen[p]
            if written or p in self._apart:
                theirs = p.to(master.device)
                same = master.to(p.dtype) == theirs
                if p in self._apart:  # an average of the ranks is taken as it is, everywhere
                    same = same.all() & (not written)
                master.copy_(torch.where(same, master, theirs.to(master.dtype)))
                self._seen[p] = fingerprint(p)
                self._apart.discard(p)

    def window_closed(self) -> None:
        if self.accumulation.ranks.go_apart:  # their loop averages the parameters, most often through p.data
            self._apart.update(self.of)

    def stepped(self, slots: Sequence[Slot]) -> None:
        self._write_back(slot.param for slot in slots)

    @without_grad
    def _write_back(self, stepped: Iterable[Parameter], before: Mapping[Parameter, Any] | None = None) -> None:
        """Round the masters of these parameters into the model: one call per device.

        A parameter whose master looks as it did ``before`` is written through ``.data``, which
        keeps its version: the master was written through ``.data`` too, if at all. So a method that
        only reads may be called between a forward and its backward.
        """
        sums = self.accumulation.sums
        by_device: dict[tuple[torch.device, torch.device], list[Parameter]] = {}
        for p in stepped:
            if p in self.of:
                by_device.setdefault((p.device, sums.buffers.of[p].made_for.device), []).append(p)
        for (now, then), parameters in by_device.items():
            masters = [local_of(self.of[p].detach()) for p in parameters]
            outs = [local_of(p.detach()) for p in parameters]
            unchanged = [before is not None and before[p] == fingerprint(self.of[p]) for p in parameters]
            outs = [out.data if same else out for out, same in zip(outs, unchanged, strict=True)]
            self._behind.update(parameters)
            if now == then:
                self._cast(sums.buffers.of[parameters[0]], outs, masters)
            else:  # the model was moved, and the wrapper is yet to be built again
                ops.cast_(outs, [master.to(now) for master in masters], backend=sums.backend)
            for p in parameters:
                self._seen[p] = fingerprint(p)
            self._behind.difference_update(parameters)

    def _cast(self, slot: Slot, outs: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Cast masters to parameters that are where the slot's is."""
        slot.ops.cast_(outs, masters, backend=self.accumulation.sums.backend)

    # -- checkpoints -------------------------------------------------------------------------------

    @without_grad
    def save(self) -> dict[int, Tensor]:
        self._state.fit()  # what a copy finds in the optimizer's state is taken to be meant
        slots = self.accumulation.sums.buffers.slots
        return {slot.index: self._value(slot.param) for slot in slots if slot.param in self.of}

    def _value(self, p: Parameter) -> Tensor:
        return self.of[p].detach()

    def load(self, saved: dict[int, Tensor]) -> None:
        for index, master in saved.items():
            p = self.accumulation.sums.buffers.slots[index].param
            if p in self.of:
                self.of[p].copy_(master)
                self._seen[p] = None  # the model may hold others: _follow() compares
                self._apart.discard(p)


NOTHING = Given()


def fingerprint(p: Tensor) -> tuple[int, int]:
    """What changes when a parameter is written to, or gets other memory (vector_to_parameters)."""
    return p._version, p.data_ptr()


def _exchange(inner: Optimizer, table: Mapping[Any, Any]) -> None:
    for group in inner.param_groups:
        group["params"][:] = [table.get(p, p) for p in group["params"]]
    for state in states_of(inner):
        exchanged = {table.get(key, key): value for key, value in state.items()}
        try:
            state.clear()
        finally:  # also if Ctrl-C comes right behind
            state.update(exchanged)
