"""Flat, aligned storage of the buffers, one per device and dtype; ``p.grad`` is a view of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import ops
from ..ops.memory import is_dense, traits, views_like
from ..parts import local_of
from ..scalars import Scalar, identity
from .extension import Extensions
from .grad_views import GradView, Part

ALIGNMENT = 64  # elements: a cache line or more in every dtype, also after cast_in_place_() has halved their size
PARAMS = itemgetter("params")
NARROW_HEAD = 1 << 16  # elements that cast_in_place_() moves through a temporary before it can work in place


def padded(elements: int) -> int:
    """How many elements a buffer of this size takes, with the gap after it."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def buffer_dtype(parameter: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The buffer's dtype: as ``asked``, but never narrower than a gradient of the ``parameter``."""
    return parameter if asked is None else torch.promote_types(parameter, asked)


def gradient_dtype(p: Tensor) -> torch.dtype:
    """The dtype that gradients of ``p`` fit into; with ``p.grad_dtype`` None some may be wider."""
    return p.dtype if p.grad_dtype is None else torch.promote_types(p.dtype, p.grad_dtype)


class Form(NamedTuple):
    """What a parameter must keep while its gradients accumulate."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size

    @classmethod
    def of(cls, p: Parameter) -> Form:
        return cls(p.dtype, p.device, p.shape)


class BufferOps:
    """The ops of buffers that hold sums otherwise than :mod:`fusedaccum.ops` has them.

    An extension that has such buffers is this, too, and gives itself to slots (`Slot.ops`) before
    they have any. It also has the ops that the core calls: ``accumulate_``, ``scale_``, ``stats``,
    and the ``cast_`` from there to the parameters. All slots of a call have the same. If these are
    `Slot.rounded`, it has also what the three methods below say, which are not called else.
    """

    def finishes(self, slots: Sequence[Slot], scale: Scalar, backend: str) -> bool:
        """True if this has made ``p.grad`` of the slots the window's gradient, ``scale`` times
        their sums; else the core scales these.
        """
        return False

    def read_sums(self, slots: Sequence[Slot], outs: Sequence[Tensor], backend: str) -> None:
        """Put the sums into ``outs``, which are FP32."""

    def write_sums(self, slots: Sequence[Slot], sums: Sequence[Tensor], backend: str) -> None:
        """Keep these sums, which are FP32."""

    def written_by_others(self, slots: Sequence[Slot]) -> None:
        """Others than these ops have written the buffers: all that they hold is in them."""

    def finish_adds(self) -> None:
        """Return when the buffers hold all that was added. Raises RuntimeError if they will not."""

    def half_added(self) -> bool:
        """True if an add that raised may have written some, where no tensor's version tells."""
        return False


@dataclass(eq=False)
class Slot:
    """One parameter's place: its buffer, and what the window has done to it so far."""

    param: Parameter
    name: str
    dtype: torch.dtype  # of the buffer
    device: torch.device  # of the buffer
    index: int = field(init=False)  # position among the optimizer's parameters, each counted once
    block: Block = field(init=False)
    buffer: Tensor = field(init=False)
    offset: int = field(init=False)  # of the buffer in its block, in elements
    address: int = field(init=False)  # of its memory there
    placed: bool = False  # True if it has a block and a buffer
    relaid: bool = False  # True if the parameter now has other strides than the buffer
    shown: Tensor | None = None  # what we last put into holder.grad; anything else there is the user's
    divisor: Scalar = 1.0  # the buffer holds the sum divided by this
    prepared: bool = False  # True if an extension has filled the buffer, and nothing has written to it since
    intercepted: bool = False  # True if extensions see its gradients before they are queued (C++ reads it)
    # True if p.grad does not show the buffer, so that no other code reaches it. Adds may end late.
    private: bool = False
    ops: Any = ops  # the module, or a BufferOps
    rounded: bool = False  # True if the buffer alone, which p.grad shows, is a rounded sum: its ops have the rest
    their_grad_dtype: torch.dtype | None = None  # what the parameter's grad_dtype was before it became ours
    frees_grad: bool = False  # True if it was made None, which allows any

    def __post_init__(self) -> None:
        # The parameter as it was when wrapped, for check_unchanged() to compare with.
        self.made_for = Form.of(self.param)
        self.set_dtype(self.dtype)
        self.holder: GradView = self.param  # the object whose .grad shows the buffer
        self.part: Part | None = None  # if this process holds a part of the parameter: what stands for that part
        self.averaged_by = 1.0  # by which gradients were divided that are sums over processes
        # What the inner optimizer steps: the parameter, or what an extension has put in its place.
        self.stepped: Tensor = self.param
        self.node: Any = None  # its AccumulateGrad node, when that is hooked

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the buffer, which has not been allocated yet."""
        self.dtype, self.half_precision = dtype, dtype.itemsize < 4

    def show(self, grad: Tensor | None) -> None:
        """Make ``p.grad`` this tensor of ours."""
        try:
            self.holder.grad = grad
        except RuntimeError:
            self.assign(self.holder, grad)
        self.shown = grad

    def assign(self, holder: Any, grad: Tensor | None) -> None:
        """Make ``holder.grad`` this tensor, of whatever dtype."""
        try:
            holder.grad = grad
        except RuntimeError:
            if self.param.grad_dtype is None:
                raise
            self.free_grad_dtype()  # other code has set it meanwhile
            holder.grad = grad

    def free_grad_dtype(self) -> None:
        """Allow ``p.grad`` to be of any dtype: the buffer's, and that of what is stepped."""
        self.their_grad_dtype, self.frees_grad = self.param.grad_dtype, True
        self.param.grad_dtype = None

    def give_back_grad_dtype(self) -> None:
        """Restore the parameter's grad_dtype, and cast its gradient, unless it was set since."""
        p, theirs = self.param, self.their_grad_dtype
        if self.frees_grad and p.grad_dtype is None and theirs is not None:
            theirs = p.dtype if theirs == self.made_for.dtype else theirs  # its own, also of one that was cast since
            grad, p.grad = p.grad, None
            p.grad_dtype = theirs
            p.grad = None if grad is None else grad.to(theirs)
        self.frees_grad = False

    def check_width(self, grad: Tensor) -> None:
        """Raises RuntimeError for a gradient that the buffer would round."""
        needed = torch.promote_types(grad.dtype, self.dtype)
        if needed != self.dtype:
            self.check_unchanged()
            raise RuntimeError(
                f"parameter {self.name} got a {grad.dtype} gradient (its grad_dtype is {self.param.grad_dtype}), but "
                f"its buffer is {self.dtype}, and a buffer is never narrower than the gradient; pass "
                f"buffer_dtype={needed}, or set parameter.grad_dtype = {needed} before the optimizer is wrapped"
            )

    @property
    def strides(self) -> tuple[int, ...]:
        """The buffer's strides: the parameter's, if that is dense."""
        p = local_of(self.param)
        return p.stride() if is_dense(p) else torch.empty(p.shape, device="meta").stride()

    @property
    def untouched(self) -> bool:
        """True if there is a buffer, and no other code has written to it since we did."""
        return self.placed and self.block.untouched_by_user

    @property
    def stepped_grad(self) -> Tensor | None:
        """``p.grad`` as the inner optimizer sees it: whole, also if this process holds a part."""
        return self.part.whole if self.part is not None and self.holder is self.part else self.holder.grad

    @property
    def layout(self) -> Hashable:
        """A key of the slots whose norms can be added up together; None for whole parameters."""
        return None if self.part is None else self.part.layout

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the parameter's dtype, device or shape is not what was wrapped.

        Other strides are no error: they are noted in :attr:`relaid`.
        """
        p = self.param
        if Form.of(p) != self.made_for:
            was, now = (f"{form.dtype} {tuple(form.shape)} on {form.device}" for form in (self.made_for, Form.of(p)))
            raise RuntimeError(
                f"parameter {self.name} was {was} when it was wrapped and is {now} now; after a move or a cast, call "
                "opt.load_state_dict(opt.state_dict()); after a change of shape, build the optimizer and its wrapper "
                "anew"
            )
        self.relaid = self.placed and self.buffer.stride() != self.strides


@dataclass(eq=False)
class Block:
    """Flat storage of slots that agree in device and dtype of parameter and buffer.

    All of them are parts, or none.
    """

    flat: Tensor
    private: bool  # as its slots are
    version: int = 0  # flat._version when we last wrote: another value means that the user has written since

    def written(self) -> None:
        self.version = self.flat._version

    @property
    def untouched_by_user(self) -> bool:
        return self.private or self.flat._version == self.version

    def view(self, slot: Slot, offset: int) -> Tensor:
        """The slot's part of the storage, in its parameter's shape (and format, if dense)."""
        return self.flat.as_strided(local_of(slot.param).shape, slot.strides, offset)

    def cast_in_place_(self, dtype: torch.dtype, scale: Scalar, shown: Sequence[Slot], backend: str) -> None:
        """Cast ``flat * scale`` to a narrower dtype, in place, and show the result in ``shown``.

        The first elements go through a small temporary. From there on, each wave casts elements a
        to 2a. They need at most half their space now, which lies within what the previous wave has
        already moved. So a wave's reads and writes never overlap, and each wave is one ordinary,
        parallel call.
        """
        narrow = self.flat.view(dtype)
        total = self.flat.numel()
        done = min(NARROW_HEAD, total)
        head = torch.empty(done, dtype=dtype, device=self.flat.device)
        ops.cast_([head], [self.flat[:done]], scale, backend=backend)
        narrow[:done].copy_(head)
        while done < total:
            end = min(2 * done, total)
            ops.cast_([narrow[done:end]], [self.flat[done:end]], scale, backend=backend)
            done = end
        for slot, view in zip(shown, views_like(narrow, [slot.buffer for slot in shown]), strict=True):
            slot.show(view)


def _let_go(slots: list[Slot]) -> None:
    """The wrapper is gone: restore its parameters, where nobody has written to them since."""
    for slot in slots:
        if slot.param.grad is None:  # one that is still shown stays as it is
            slot.give_back_grad_dtype()


class Buffers:
    """The slots of an optimizer's parameters, which get storage when gradients come."""

    def __init__(self, asked: torch.dtype | None, extensions: Extensions):
        self._asked, self._extensions = asked, extensions
        self.slots: list[Slot] = []
        self.of: dict[Parameter, Slot] = {}
        self.blocks: list[Block] = []
        weakref.finalize(self, _let_go, self.slots).atexit = False
        self.has_parts = False  # True if any slots are parts of parameters
        self.private = False  # True if any buffers are out of other code's reach
        self.ops: list[BufferOps] = []  # those that extensions have brought for these buffers
        self._checked: object = None  # the parameters' traits at the last check
        self._in_groups: list[Parameter] = []  # what was in the optimizer's groups then

    def add(self, parameters: Iterable[tuple[str, Parameter]]) -> list[Slot]:
        """Make slots for parameters that have none yet."""
        fresh = [self.made(name, p) for name, p in parameters]
        self.replace([*self.slots, *fresh])
        return fresh

    def replace(self, slots: Sequence[Slot]) -> None:
        """Have these slots, in this order. Storage of others remains until :meth:`free`."""
        self.slots[:] = slots
        self.of.clear()
        for index, slot in enumerate(slots):
            slot.index = index
            self.of[slot.param] = slot
        self._in_groups = []
        self.has_parts = any(slot.part is not None for slot in slots)
        self.private = any(slot.private for slot in slots)

    def free(self) -> None:
        """Have no storage, until gradients come."""
        for slot in self.slots:
            if slot.placed:
                del slot.block, slot.buffer
                slot.placed = slot.prepared = False
        self.blocks.clear()

    def made(self, name: str, p: Parameter) -> Slot:
        """A new slot, which is not here before :meth:`replace`."""
        slot = Slot(p, name, buffer_dtype(gradient_dtype(p), self._asked), p.device)
        for made in self._extensions.slot_made:
            made(slot)
        return slot

    def allocate(self, slots: Sequence[Slot]) -> None:
        """Allocate storage for those of ``slots`` that have none."""
        groups: dict[tuple, list[Slot]] = {}
        for slot in slots:
            if not slot.placed:
                kind = (slot.param.device, slot.device, slot.dtype, slot.param.dtype, slot.part is None)
                groups.setdefault(kind, []).append(slot)
        for (home, device, dtype, _, _), members in groups.items():
            if home.type == "meta":
                raise RuntimeError(
                    f"parameter {members[0].name} is on the meta device, where it has no memory; give the model memory "
                    "first (model.to_empty(device=...), then its weights), make the optimizer from its parameters "
                    "then, and wrap that. To run a loop on shapes alone, use torch's FakeTensorMode"
                )
            sizes = [local_of(slot.param).numel() for slot in members]
            *offsets, end = itertools.accumulate(map(padded, sizes), initial=0)
            block = Block(torch.empty(end, dtype=dtype, device=device), members[0].private)
            places = list(zip(members, sizes, offsets, strict=True))
            # Zero the gap after each, which also travels from rank to rank.
            torch._foreach_zero_([block.flat[offset + size : offset + padded(size)] for _, size, offset in places])
            block.written()
            self.blocks.append(block)
            if members[0].ops not in (ops, *self.ops):
                self.ops.append(members[0].ops)
            for slot, _, offset in places:
                slot.block, slot.buffer = block, block.view(slot, offset)
                slot.offset, slot.address, slot.relaid = offset, slot.buffer.data_ptr(), False
            for made in self._extensions.block_made:
                made(block, members)
            for slot in members:
                slot.placed = True  # last: Ctrl-C may come before

    def check_unchanged(self) -> None:
        """Raises as :meth:`Slot.check_unchanged` and extensions do."""
        # Every step() calls this, so it compares what is cheap and nearly always shows a change.
        # The rest shows when a gradient arrives.
        if traits([*self.of]) != self._checked:
            for slot in self.slots:
                for check in self._extensions.check_changed:
                    check(slot)
                slot.check_unchanged()
            self._checked = traits([*self.of])

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises RuntimeError if the groups do not hold the slots' parameters, in their order.

        Nothing would divide the gradients of those that have none; norms would include others that
        nothing steps; and checkpoints know parameters by their places.
        """
        found = list(itertools.chain.from_iterable(map(PARAMS, groups)))
        if len(found) == len(self._in_groups) and all(map(is_, found, self._in_groups)):
            return  # nearly always, and in half the time of what is below
        for g, group in enumerate(groups):
            for i, p in enumerate(group["params"]):
                if p not in self.of:
                    raise RuntimeError(
                        f"parameter param_groups[{g}]['params'][{i}], of shape {tuple(p.shape)}, was put there after "
                        "the optimizer was wrapped, so its gradients are not accumulated; add it with the wrapper's "
                        "add_param_group() instead, or, where it replaces another, set its .grad to None and say "
                        "`opt.param_groups = opt.param_groups`"
                    )
        once = list(dict.fromkeys(found))
        for slot, p in zip(self.slots, [*once, *[None] * len(self.slots)], strict=False):
            if slot.param is not p:
                raise RuntimeError(
                    f"parameter {slot.name}, of shape {tuple(slot.made_for.shape)}, is not in its place in "
                    "opt.param_groups any more; after a change of these, say `opt.param_groups = opt.param_groups`"
                )
        self._in_groups = found

    def slots_with_grad(self) -> list[Slot]:
        """Slots whose parameter holds a gradient now."""
        return [slot for slot in self.slots if slot.holder.grad is not None]


def by_divisor(slots: Iterable[Slot]) -> Iterable[list[Slot]]:
    """The slots in groups that share a device, ops, and a divisor of what their buffers hold."""
    groups: dict[tuple, list[Slot]] = {}
    one: Slot | None = None
    for slot in slots:
        if one is None or slot.block is not one.block or slot.divisor is not one.divisor:
            one, group = slot, groups.setdefault((slot.device, slot.ops, identity(slot.divisor)), [])
        group.append(slot)
    return groups.values()
