"""How fresh gradients reach the buffers: where a pass begins and ends, and when a bucket is added.

Hooks queue the gradients (:mod:`fusedaccum.autograd.grad_queue`, or the same in C++). A full
bucket, and what is left at the end of the pass, goes to the owner in one call, or several if a
parameter is in it more than once, and is freed. (The engine's callback tells the end, as for FSDP.)

What the engine calls is kept out of graphs: in a compiled loop the compiler traces whatever Python
runs within ``backward()``.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .. import limits, native
from ..engine import outside_graphs, when_backward_ends
from ..parts import local_of
from . import grad_queue
from .passes import broke_off, outermost_backward, returned, running_backward, under_way
from .streams import StreamOrder, join

if TYPE_CHECKING:
    from ..core.buffers import Slot


class Owner(Protocol):
    """What the collector calls (BackwardPasses), from any thread that runs hooks, one at a time."""

    def pass_begins(self, thread: int | None) -> None:
        """An outermost pass, called by ``thread``, brings its first gradient.

        May raise, which refuses the pass.
        """

    def part_begins(self) -> None:
        """So does a re-entrant part of it, such as a checkpoint's."""

    def add(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> None:
        """Add these gradients to the buffers of these slots, of which none occurs twice."""

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        """As :class:`~fusedaccum.autograd.grad_queue.Listener` has it."""

    def pass_ends(self) -> None:
        """The outermost pass is over and its gradients have been handed over (or are held)."""

    def pass_failed(self) -> None:
        """A pass broke off, and what it queued is dropped. A part may have been added before."""


def queue_class() -> Any:
    """:class:`fusedaccum.autograd.grad_queue.GradQueue`, in C++ where that was built."""
    return grad_queue.GradQueue if native.why_no_hooks() else importlib.import_module("fusedaccum._intake").GradQueue


@dataclass
class OpenPass:
    """An outermost pass that has begun."""

    call: FrameType | None  # None if it cannot be seen


class GradCollector:
    """The passes over a set of slots, between their queue and an :class:`Owner`.

    The queue is a :class:`~fusedaccum.autograd.grad_queue.GradQueue`.

    Args:
        owner: gets gradients and passes; held weakly, so that dropping the wrapper unhooks all.
        hold: keep a pass's gradients until :meth:`release`, and hand over no buckets before.
    """

    def __init__(self, owner: Owner, hold: bool):
        self._owner = weakref.ref(owner)
        self._hold = hold
        self._lock = threading.RLock()  # hooks of several devices run in several threads
        self._order = StreamOrder()
        self._queue = queue_class()(weakref.ref(self), hold)
        self._tasks: set[int] = set()  # graph tasks (outermost and re-entrant passes) that have begun and not ended
        # The newest task dropped when a pass broke off. (The engine numbers them as they begin.)
        self._last_broken = -1
        self._pass: OpenPass | None = None  # the outermost pass that has begun, and not ended

    def hook(self, slot: Slot) -> None:
        """Take this parameter's gradients from now on."""
        p = slot.param
        frozen = not p.requires_grad
        try:
            p.requires_grad_(True)  # a frozen one may be thawed later
            # The node is kept alive by us: autograd itself holds it only as long as some graph
            # does. (get_gradient_edge() refuses a shard of no elements.)
            slot.node = grad_queue.nodes_of([p])[0]
            self._queue.hook(slot)
        finally:
            p.requires_grad_(not frozen)
        if slot.dtype != p.dtype or p.grad_dtype != p.dtype:  # which the caller may have set
            slot.free_grad_dtype()

    def size_buckets(self, slots: Iterable[Slot], shared: bool) -> None:
        """Size buckets for the gradients of these slots, which are all.

        ``shared``: True if their sums go on to other ranks.
        """
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in slots:
            by_device.setdefault(slot.made_for.device, []).append(slot)
        for device, members in by_device.items():
            sizes = [local_of(slot.param).nbytes for slot in members if slot.param.requires_grad]
            self._queue.fill_at(device, limits.full_at(device, sizes, shared or members[0].private))

    def unhook(self, slot: Slot) -> None:
        """Leave this parameter's gradients alone from now on."""
        self._queue.unhook(slot)
        slot.holder = slot.param
        slot.give_back_grad_dtype()

    @property
    def unhooked(self) -> list[Slot]:
        """Slots whose gradients would go past us, because PyTorch has dropped their hooks."""
        return self._queue.unhooked()

    def check_hooked(self) -> None:
        """Raises RuntimeError if gradients may have gone past us."""
        unhooked = self._queue.unhooked()
        if unhooked:
            raise RuntimeError(
                f"parameter {unhooked[0].name} was converted to another dtype or device and back, or given or rid of a "
                "parametrization, and PyTorch dropped its gradient hooks on the way; after that, before the next "
                "backward, call opt.load_state_dict(opt.state_dict())"
            )

    def _owner_now(self) -> Owner:
        owner = self._owner()
        assert owner is not None  # it owns us
        return owner

    def accumulates(self, slot: Slot) -> bool:
        """True if the running pass has a gradient for ``p.grad``, not for torch.autograd.grad."""
        frame = running_backward()
        asked = frame is not None and frame.f_locals["kwargs"].get("accumulate_grad", False)
        return bool(asked and torch._C._will_engine_execute_node(slot.node))

    def begin_pass(self) -> None:
        """Begin a pass for the backward running here, even if it has brought no gradient yet."""
        frame = running_backward()
        if frame is None:
            return
        wanted = frame.f_locals["args"][3]  # inputs=, which torch.autograd.grad always passes
        if not wanted:
            self.enter(torch._C._current_graph_task_id())

    @contextmanager
    def within_pass(self, device: torch.device) -> Iterator[None]:
        """A block for code that adds a gradient on ``device`` without the hooks.

        Begins the pass if need be, and keeps other threads out.
        """
        with self._lock:
            self.enter(torch._C._current_graph_task_id())
            self._order.acquire([device])
            yield

    def put(self, slot: Slot, grad: Tensor) -> None:
        """Queue a gradient that came through no hook, and that nothing else will write to."""
        self._queue.put(slot, grad)

    # -- what the hooks call (their Listener) ------------------------------------------------------

    def refuse_unfit(self, slot: Slot, grad: Any) -> None:
        """Raises RuntimeError for a gradient that cannot be accumulated, before it is queued."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward(create_graph=True) reached parameter {slot.name}: a gradient that is itself part of a graph "
                "cannot be accumulated into a buffer. Take it with torch.autograd.grad(loss, params, "
                "create_graph=True), build the second loss from it and call backward() on that"
            )
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {slot.name} got a {grad.layout} gradient, which has no place in a dense buffer; "
                "make the layer with sparse=False"
            )
        if grad.shape != slot.made_for.shape:
            slot.check_unchanged()
            raise RuntimeError(
                f"parameter {slot.name} of shape {tuple(slot.made_for.shape)} got a gradient of shape "
                f"{tuple(grad.shape)}"
            )
        slot.check_width(grad)

    @outside_graphs
    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        with self._lock:
            return self._owner_now().added_already(slot, grad)

    @outside_graphs
    def enter(self, task: int) -> None:
        """The first gradient of a graph task, which is a pass or a re-entrant part of one."""
        with self._lock:
            if task in self._tasks:
                return
            if -1 < task <= self._last_broken:
                raise RuntimeError(
                    "a gradient of a backward pass that an exception has broken off came when that pass had been "
                    "dropped"
                )
            call, thread, nested = outermost_backward()
            if self._pass is not None and (
                self._pass.call is not call or (call is None and self._tasks and not nested)
            ):
                if under_way(self._pass.call):
                    raise RuntimeError(
                        "two backward passes run at once, in two threads, but the gradients of one optimizer's "
                        "parameters can be accumulated from only one pass at a time; put a lock around backward()"
                    )
                self.end_open_pass()
            if self._pass is None:
                self._owner_now().pass_begins(thread)
                self._pass = OpenPass(call)
            if nested:
                self._owner_now().part_begins()
            self._tasks.add(task)
            self._queue.expect(task)
            end = functools.partial(_task_ended, weakref.ref(self), task)
            weakref.finalize(end, _task_gone, weakref.ref(self), task).atexit = False
            # Queued by a callback, it comes after those that are queued during the pass: in one of
            # them FSDP2 reduces what is left.
            when_backward_ends(functools.partial(when_backward_ends, end))

    @outside_graphs
    def release(self) -> None:
        """Hand over what is queued, in calls in which no slot occurs twice."""
        with self._lock:
            batches, streams = self._queue.take()
            if streams:
                self._order.acquire({torch.device("cuda", index) for _, index, _ in streams})
                join(streams, [grad for _, grads in batches for grad in grads])
            for slots, grads in batches:
                self._owner_now().add(slots, grads)

    # -- the end of a pass -------------------------------------------------------------------------

    def _leave(self, task: int) -> None:
        with self._lock:
            if task not in self._tasks:
                return
            if not self._hold:
                self.release()
            self._forget(task)
            if not outermost_backward().nested:
                self._end_pass()

    def _forget(self, task: int) -> None:
        self._tasks.discard(task)
        self._queue.forget(task)

    def _end_pass(self) -> None:
        self._pass = None
        self._order.release()
        try:
            self._owner_now().pass_ends()
        except BaseException:
            self.drop()
            self._owner_now().pass_failed()
            raise

    def end_returned_pass(self) -> None:
        """:meth:`end_open_pass`, if its backward has returned. One under way is left alone."""
        if self._pass is not None and returned(self._pass.call):
            self.end_open_pass()

    def end_open_pass(self) -> None:
        """End the pass that is still open, if any: its backward should be over.

        One is left open when every parameter is in a re-entrant checkpoint (the outermost pass then
        brings no gradient and nothing signals its end), and when an exception broke it off.
        """
        with self._lock:
            if self._pass is None:
                return
            if under_way(self._pass.call):
                raise RuntimeError(
                    "the wrapper was called while a backward pass of its parameters runs in another thread; wait until "
                    "that has returned"
                )
            if not self._tasks and not broke_off(self._pass.call):
                self._end_pass()
                return
            untold = returned(self._pass.call)
            self._last_broken = max(self._tasks, default=self._last_broken)
            self._pass = None
            for task in list(self._tasks):
                self._forget(task)
            # Not release(): this may be a node of the next pass, whose adds come after this.
            self._order.acquire()
            self.drop()
            self._owner_now().pass_failed()
            if untold:
                raise RuntimeError(
                    "backward() returned, but autograd never signalled its end, so its gradients were dropped: "
                    "compiled autograd does that; switch it off (torch._dynamo.config.compiled_autograd = False); "
                    "torch.compile itself may stay"
                )

    def drop(self) -> list[grad_queue.Batch]:
        """Empty the queue and return what was in it."""
        return self._queue.take()[0]

    @property
    def held(self) -> list[Tensor]:
        """The gradients in the queue."""
        return self._queue.held()


def _task_gone(collector: weakref.ref[GradCollector], task: int) -> None:
    """The engine releases a graph task. If that has not ended, it broke off: drop its call.

    The call's frame holds those of its callers. (Compiled autograd releases tasks that it goes on
    with; end_open_pass() finds out.)
    """
    alive = collector()
    compiled = getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False)
    if alive is not None and alive._pass is not None and task in alive._tasks and not compiled:
        alive._pass.call = None


@outside_graphs
def _task_ended(collector: weakref.ref[GradCollector], task: int) -> None:
    alive = collector()
    if alive is not None:
        alive._leave(task)
