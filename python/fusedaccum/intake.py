"""How fresh gradients get from autograd into the buffers: hooks, buckets, and where a backward pass begins and ends.

A pre-hook on a parameter's AccumulateGrad node is handed the fresh gradient. Returning ``(None,)`` makes autograd leave
``p.grad`` alone, so the gradient is only queued; a full bucket, and what is left at the end of the pass, goes to the
owner in one call and is freed. (The node and the callback are the ones FSDP uses.)

Everything the owner needs comes through :class:`Owner`, the seam where an intake in C++ takes this one's place.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward, get_gradient_edge

from .buffers import Slot
from .streams import Streams

BUCKET_BYTES = 32 << 20  # fresh gradients held at once; a larger single gradient is a bucket of its own

Arrival = tuple[Slot, Tensor]


class Owner(Protocol):
    """What the intake tells the wrapper. Called from whichever thread autograd runs hooks in, one at a time."""

    def pass_begins(self) -> None:
        """An outermost backward pass brings its first gradient. May raise, which refuses the pass."""

    def add(self, arrivals: Sequence[Arrival]) -> None:
        """Add these gradients to the buffers; no slot occurs twice."""

    def pass_ends(self) -> None:
        """The outermost pass is over and its gradients have been handed over (or are held)."""

    def pass_failed(self) -> None:
        """A pass broke off, and what it had queued is dropped; part of it may have been added before that."""


class Intake:
    """The hooks on a set of slots, and the queue between them and an :class:`Owner`.

    Args:
        owner: told of gradients and passes; held weakly, so that dropping the wrapper unhooks the parameters.
        hold: keep a pass's gradients until :meth:`release`, instead of handing them over bucket by bucket.
    """

    def __init__(self, owner: Owner, hold: bool):
        _fresh_holders()  # measured now, because it takes a backward of its own
        self._owner = weakref.ref(owner)
        self._hold = hold
        self._lock = threading.RLock()  # hooks of several devices run in several threads
        self._queue: list[Arrival] = []
        self._bytes = 0
        self._tasks: set[int] = set()  # graph tasks (outermost and re-entrant passes) that have begun and not ended
        self._root: weakref.ref | None = None  # of the open outermost pass: the tensor backward() was called on
        self._streams = Streams()

    def hook(self, slot: Slot) -> None:
        """Take this parameter's gradients from now on."""
        p = slot.param
        frozen = not p.requires_grad
        node = get_gradient_edge(p.requires_grad_(True)).node  # a frozen one may be thawed later
        p.requires_grad_(not frozen)
        intake, place = weakref.ref(self), weakref.ref(slot)  # the node holds the hook, and the slot the node

        def arrived(grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
            alive, slot = intake(), place()
            if alive is None or slot is None or grads[0] is None:
                return None
            alive._arrived(slot, grads)
            return (None,)

        # The node is kept alive by us: autograd itself holds it only as long as some graph does.
        slot.node = node
        node.register_prehook(arrived)
        if slot.dtype != slot.param.dtype:
            slot.param.grad_dtype = None  # lets p.grad be of the buffer's dtype

    def _owner_now(self) -> Owner:
        owner = self._owner()
        assert owner is not None  # it owns us
        return owner

    def _arrived(self, slot: Slot, grads: tuple[Tensor | None, ...]) -> None:
        with self._lock:
            refuse_unfit(slot, grads[0])
            ours = exclusive(grads)  # before we hold it ourselves
            grad: Any = grads[0]
            task = torch._C._current_graph_task_id()
            if task not in self._tasks:
                self._enter(task)
            # What somebody else holds too, he may overwrite before the bucket is full (a static buffer): it cannot wait.
            self._queue.append((slot, grad.clone() if self._hold and not ours else grad))
            self._streams.arrived(grad)
            self._bytes += grad.nbytes
            if not self._hold and (self._bytes >= BUCKET_BYTES or not ours):
                self.release()

    def _enter(self, task: int) -> None:
        """The first gradient of a graph task, which is a pass of its own or a re-entrant part of one."""
        root, nested = outermost_backward()
        if self._root is not None and (self._root() is not root or (self._tasks and not nested)):
            if self._tasks and self._root() is not root and any(known is self._root() for known in roots_under_way()):
                raise RuntimeError(
                    "two backward passes run at once, in two threads; the gradients of one optimizer's parameters can be "
                    "gathered from one pass at a time: take turns, with a lock around backward()"
                )
            self.settle()
        if self._root is None:
            self._owner_now().pass_begins()
            self._root = weakref.ref(root)
        self._tasks.add(task)
        intake = weakref.ref(self)

        def task_ended() -> None:
            alive = intake()
            if alive is not None:
                alive._leave(task)

        torch.autograd.Variable._execution_engine.queue_callback(task_ended)

    def _leave(self, task: int) -> None:
        with self._lock:
            if task not in self._tasks:
                return
            if not self._hold:
                self.release()
            self._tasks.discard(task)
            if not outermost_backward()[1]:
                self._end_pass()

    def _end_pass(self) -> None:
        self._root = None
        self._owner_now().pass_ends()

    def settle(self) -> None:
        """End the pass that is still open, if any: nobody is inside backward now.

        One is left open when every parameter sits in a re-entrant checkpoint (the outermost pass then brings no gradient of its
        own and nothing tells its end), and when an exception broke it off.
        """
        with self._lock:
            if self._root is None:
                return
            if not self._tasks:
                self._end_pass()
                return
            self._root = None
            self._tasks.clear()
            self.drop()
            self._owner_now().pass_failed()

    def release(self) -> None:
        """Hand over what is queued, in calls in which no slot occurs twice."""
        with self._lock:
            queue = self.drop()
            self._streams.join([grad for _, grad in queue])
            while queue:
                now: dict[Slot, Tensor] = {}
                later: list[Arrival] = []
                for slot, grad in queue:
                    if slot in now:
                        later.append((slot, grad))
                    else:
                        now[slot] = grad
                self._owner_now().add(list(now.items()))
                queue = later

    def drop(self) -> list[Arrival]:
        """Empty the queue and return what was in it."""
        queue, self._queue, self._bytes = self._queue, [], 0
        return queue

    @property
    def held(self) -> list[Arrival]:
        """What is queued."""
        return list(self._queue)


def refuse_unfit(slot: Slot, grad: Any) -> None:
    """Raises RuntimeError for a gradient that cannot be gathered, before it is queued."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backward(create_graph=True) reached parameter {slot.name}: a gradient that is itself part of a graph cannot be "
            "accumulated into a buffer. Take it with torch.autograd.grad(loss, params, create_graph=True), build the second "
            "loss from it and call backward() on that"
        )
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"parameter {slot.name} got a {grad.layout} gradient, which has no place in a dense buffer; "
            "make the layer with sparse=False"
        )
    if not grad.is_floating_point():
        raise RuntimeError(
            f"parameter {slot.name} got a {grad.dtype} gradient; only real floating-point gradients can be gathered "
            "(store a complex parameter as two real ones, torch.view_as_real)"
        )
    if grad.shape != slot.made_for[2]:
        slot.check_unchanged()
        raise RuntimeError(
            f"parameter {slot.name} of shape {tuple(slot.made_for[2])} got a gradient of shape {tuple(grad.shape)}"
        )


def exclusive(grads: tuple[Tensor | None, ...]) -> bool:
    """Is a hook's fresh gradient held by autograd alone, so that nobody can write to it while it is queued?"""
    counts, fresh = _holders(grads), _fresh_holders()[_is_view(grads)]
    return counts == fresh or all(count <= most for count, most in zip(counts, fresh, strict=True))


def _is_view(grads: tuple[Tensor | None, ...]) -> bool:
    return grads[0] is not None and grads[0]._is_view()


def _holders(grads: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """How many hold a gradient, as Python object and as tensor; the same of the tensor that it is a view of; and their storage."""
    grad: Any = grads[0]
    counts = (sys.getrefcount(grad), grad._use_count(), torch._C._storage_Use_Count(grad.untyped_storage()._cdata))
    base = grad._base
    return counts if base is None else (*counts, sys.getrefcount(base), base._use_count())


@functools.cache
def _fresh_holders() -> dict[bool, tuple[int, ...]]:
    """The counts of gradients that nobody else holds, views and not, as this version of PyTorch and Python makes them."""
    found: dict[bool, tuple[int, ...]] = {}
    with torch.inference_mode(False), torch.enable_grad():
        weight, scale = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        nodes = [get_gradient_edge(leaf).node for leaf in (weight, scale)]
        for node in nodes:
            node.register_prehook(lambda grads: found.update({_is_view(grads): _holders(grads)}))
        (torch.nn.functional.linear(torch.ones(2, 2), weight).square() * scale).sum().backward(inputs=[weight, scale])
    return found


def outermost_backward() -> tuple[object, bool]:
    """Root tensor of the outermost backward pass under way, and whether the one running here is nested in another.

    Autograd gives no name to the pass around a re-entrant one (activation checkpointing with ``use_reentrant=True``), so
    this reads it off the Python stack: every pass is a call of ``_engine_run_backward``. For parameters on a GPU the hooks
    run in a thread of the engine's, whose stack begins inside the engine; there the outermost call is on another thread's.
    """
    frames, begins_inside = _backward_frames(sys._getframe())
    nested = len(frames) > 1 or (begins_inside and bool(frames))
    if begins_inside or not frames:
        here = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            others, inside = _backward_frames(frame) if thread != here else ([], False)
            if others and not inside:
                frames = others
                break
    if not frames:  # called from C++
        return _NO_ROOT, nested
    root = frames[-1].f_locals["t_outputs"][0]
    return root if isinstance(root, Tensor) else _NO_ROOT, nested


def roots_under_way() -> list[object]:
    """What backward() has been called on, in all threads, and has not returned from."""
    stacks = [_backward_frames(frame)[0] for frame in sys._current_frames().values()]
    return [frames[-1].f_locals["t_outputs"][0] for frames in stacks if frames]


def _backward_frames(frame: FrameType | None) -> tuple[list[FrameType], bool]:
    """A stack's backward calls, innermost first, and whether the last lies within a node that the engine runs."""
    found: list[FrameType] = []
    inside = False
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            found.append(frame)
            inside = False
        elif frame.f_code is BackwardCFunction.apply.__code__:
            inside = True
        frame = frame.f_back
    return found, inside


class _NoRoot:
    """Stands for a root that cannot be seen."""


_NO_ROOT = _NoRoot()
