"""Hooks that take fresh gradients from autograd, and their queue: the definition, in Python.

A pre-hook on a parameter's AccumulateGrad node is handed the fresh gradient. Returning ``(None,)``
makes autograd leave ``p.grad`` alone, so the gradient is only queued. (The node is the one that
FSDP hooks, too.)

``fusedaccum._intake`` has the class in C++, which needs neither Python nor its lock per parameter.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from ..engine import outside_graphs, outside_modes, recording
from .streams import StreamName, current_name

if TYPE_CHECKING:
    from ..core.buffers import Slot

Batch = tuple[list["Slot"], list[Tensor]]  # slots, none of them twice, and their gradients


class Listener(Protocol):
    """What a hook calls (GradCollector), in whichever thread autograd runs it."""

    def enter(self, task: int) -> None:
        """The first gradient of a graph task has arrived. May raise, which refuses it."""

    def refuse_unfit(self, slot: Slot, grad: Tensor) -> None:
        """Raises for a gradient that cannot be accumulated, before it is queued."""

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        """True if the slot's gradient is in its buffer, so that what has arrived must not be added.

        ``grad``: what has arrived; None if nothing has. Asked if extensions must see the slot's
        gradients (``intercepted``), if other code holds what has arrived, or if nothing has. May
        begin a pass, as :meth:`enter` does.
        """

    def release(self) -> None:
        """The queue should be taken now: it is full, or holds what cannot wait."""


class GradQueue:
    """Hooks on parameters, and the queue of their gradients.

    Args:
        listener: weak reference to a :class:`Listener`; if dead, gradients go their ordinary way.
        hold: keep a pass's gradients until taken; else the listener is told when a bucket is full.
    """

    def __init__(self, listener: weakref.ref[Listener], hold: bool):
        _fresh_holders()  # measured now, because it takes a backward of its own
        self._listener = listener
        self._hold = hold
        self._hooked: dict[Slot, None] = {}
        self._full_at: dict[torch.device, int] = {}  # bytes in the queue
        self._tasks: set[int] = set()  # graph tasks that need no announcement
        self._lock = threading.Lock()  # of what is below; never held while the listener is called
        self._queue: list[tuple[Slot, Tensor]] = []
        self._bytes = 0
        self._streams: set[StreamName] = set()

    def hook(self, slot: Slot) -> None:
        """Queue the gradients of this slot's parameter from now on."""
        # Weak references, because the node holds the hook, and the slot holds the node.
        arrived = functools.partial(_arrived, weakref.ref(self), weakref.ref(slot))
        slot.node.register_prehook(arrived)
        self._hooked[slot] = None

    def unhook(self, slot: Slot) -> None:
        """From now on the gradients of this slot's parameter go their ordinary way."""
        del self._hooked[slot]

    def fill_at(self, device: torch.device, bytes: int) -> None:
        """A gradient on this device that brings the queue to so many bytes fills the bucket."""
        self._full_at[device] = bytes

    def unhooked(self) -> list[Slot]:
        """Slots of trainable parameters that have new nodes, as for another dtype or device."""
        nodes = nodes_of([slot.param for slot in self._hooked])
        return [slot for slot, node in zip(self._hooked, nodes, strict=False) if node not in (None, slot.node)]

    def _arrived(self, listener: Listener, slot: Slot, grads: tuple[Tensor | None, ...]) -> None:
        listener.refuse_unfit(slot, grads[0])  # type: ignore[arg-type]
        ours = exclusive(grads)  # before we hold it ourselves
        # Hooks that run next look for the accumulated gradient in p.grad.
        awaited = slot.holder is slot.param and bool(slot.param._post_accumulate_grad_hooks)
        self._queue_up(listener, slot, grads[0], ours, awaited)

    def put(self, slot: Slot, grad: Tensor) -> None:
        """Queue a gradient that came through no hook, and that nothing else will write to."""
        listener = self._listener()
        if listener is not None:
            self._queue_up(listener, slot, grad, True, False)

    def _queue_up(self, listener: Listener, slot: Slot, grad: Any, ours: bool, awaited: bool) -> None:
        if (slot.intercepted or not ours) and listener.added_already(slot, grad):
            return
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            listener.enter(task)
        # What other code holds too (a static buffer) may be overwritten meanwhile: it cannot wait.
        kept = copied(grad) if self._hold and not ours else grad
        with self._lock:
            if task not in self._tasks:
                return  # another thread has found it broken off since, and dropped what it had queued
            self._queue.append((slot, kept))
            self._bytes += grad.nbytes
            if grad.is_cuda:
                self._streams.add(current_name(grad.device))
            full = not self._hold and (self._bytes >= self._full_at[grad.device] or awaited or not ours)
        if full:
            listener.release()

    def expect(self, task: int) -> None:
        """Gradients of this graph task need not be announced."""
        self._tasks.add(task)

    def forget(self, task: int) -> None:
        """This graph task is over."""
        self._tasks.discard(task)

    def held(self) -> list[Tensor]:
        """The gradients in the queue."""
        return [grad for _, grad in self._queue]

    def take(self) -> tuple[list[Batch], Sequence[StreamName]]:
        """Empty the queue: its batches, and the CUDA streams that they came on."""
        with self._lock:
            queue, streams = self._queue, list(self._streams)
            self._queue, self._bytes, self._streams = [], 0, set()
        batches: list[Batch] = []
        taken: dict[Slot, int] = {}
        for slot, grad in queue:
            if slot not in self._hooked:
                continue  # unhooked since: nobody steps it
            number = taken[slot] = taken.get(slot, -1) + 1
            if number == len(batches):
                batches.append(([], []))
            batches[number][0].append(slot)
            batches[number][1].append(grad)
        return batches, streams


def copied(grad: Tensor) -> Tensor:
    """A copy. PyTorch 2.13's ``clone()`` of a DTensor adds up the ranks' parts, in its dtype."""
    return grad * 1 if hasattr(grad, "to_local") else grad.clone()


@outside_graphs
def _arrived(
    queue: weakref.ref[GradQueue], place: weakref.ref[Slot], grads: tuple[Tensor | None, ...]
) -> tuple[None] | None:
    """The hook: a node calls it with its gradient."""
    alive, slot = queue(), place()
    listener = None if alive is None else alive._listener()
    if alive is None or listener is None or slot not in alive._hooked or not slot.param.requires_grad:
        return None  # to autograd, which drops the gradient of what was frozen since its forward
    if grads[0] is None:
        if slot.holder.grad is not None:
            listener.added_already(slot, None)
        return None
    alive._arrived(listener, slot, grads)
    return (None,)


class _Joined(torch.autograd.Function):
    """A node that comes before those of all its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")


def nodes_of(parameters: Sequence[Parameter]) -> list[Any]:
    """The AccumulateGrad node of each parameter, None for frozen ones; empty if all are.

    To ask for each takes several times as long.
    """
    with recording():
        output = _Joined.apply(*parameters)  # before PyTorch 2.13, grad_fn itself did not keep its node alive
        joined = output.grad_fn
        return [] if joined is None else [node for node, _ in joined.next_functions]


def exclusive(grads: tuple[Tensor | None, ...]) -> bool:
    """True if only autograd holds a hook's gradient: nothing else can write to it in the queue."""
    if _is_foreign(grads):
        return False
    counts, fresh = _holders(grads), _fresh_holders()[_is_view(grads)]
    return counts == fresh or all(count <= most for count, most in zip(counts, fresh, strict=True))


def _is_foreign(grads: tuple[Tensor | None, ...]) -> bool:
    """True if its memory is not PyTorch's own (NumPy's).

    A CUDA graph's, on a GPU, is not written again before backward is over.
    """
    grad = grads[0]
    return grad is not None and grad.device.type == "cpu" and not grad.untyped_storage().resizable()


def _is_view(grads: tuple[Tensor | None, ...]) -> bool:
    return grads[0] is not None and grads[0]._is_view()


def _holders(grads: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Reference counts: of a gradient's Python object, tensor and storage, and of a view's base."""
    grad: Any = grads[0]
    counts = (sys.getrefcount(grad), grad._use_count(), torch._C._storage_Use_Count(grad.untyped_storage()._cdata))
    base = grad._base
    return counts if base is None else (*counts, sys.getrefcount(base), base._use_count())


@functools.cache
def _fresh_holders() -> dict[bool, tuple[int, ...]]:
    """Counts of gradients that nothing else holds, views and others, in this PyTorch and Python."""
    found: dict[bool, tuple[int, ...]] = {}
    with outside_modes(), recording():
        x, weight, scale = (torch.ones(2, 2, device="cpu", requires_grad=True) for _ in range(3))
        nodes = [get_gradient_edge(leaf).node for leaf in (weight, scale)]
        for node in nodes:
            node.register_prehook(lambda grads: found.update({_is_view(grads): _holders(grads)}))
        (torch.nn.functional.linear(x, weight).square() * scale).sum().backward(inputs=[weight, scale])
    return found
