"""What several folders need of PyTorch's autograd engine and compiler, by private names there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

# Decorates what must not be traced: within torch.compile it is a graph break, as are the methods of
# torch.optim that carry the same decorator. (torch.compiler.disable does so too, but loads the
# compiler when this package is imported.)
from torch._compile import _disable_dynamo as outside_graphs

# A context in which tensors are real again, whatever mode the caller is in (FakeTensorMode).
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

__all__ = [
    "outside_graphs",
    "outside_modes",
    "runs",
    "when_backward_ends",
    "within_backward",
    "without_grad",
]

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(call: Callable[P, R]) -> Callable[P, R]:
    """As torch.no_grad() decorates, but Ctrl-C cannot leave gradients off.

    PyTorch's sets and resets the mode in methods written in Python, and a KeyboardInterrupt may
    come in place of the first line of one, or before its last: Python looks for signals where a
    function of its own begins, and where a call has returned. Here none of these lies between
    setting the mode and the block that resets it.
    """

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return call(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return called


def recording() -> Any:
    """A context in which autograd records, whatever mode the caller is in.

    Not torch.inference_mode(False), for the same reason.
    """
    return torch._C._InferenceMode(False)


def runs(frame: FrameType | None) -> bool:
    """True if this call still runs, in any thread. (Ctrl-C may have skipped its clean-up.)"""
    stacks = [] if frame is None else list(sys._current_frames().values())
    try:
        for caller in stacks:
            while caller is not None:
                if caller is frame:
                    return True
                caller = caller.f_back  # type: ignore[assignment]
        return False
    finally:
        stacks.clear()  # what holds its own frame holds all that its callers have
        caller = None  # type: ignore[assignment]


def within_backward() -> bool:
    """True if the caller is run by a backward pass, as a hook or a node's backward is."""
    return torch._C._current_graph_task_id() != -1


@outside_graphs
def when_backward_ends(call: Callable[[], None]) -> None:
    """Have the engine call this when the backward around the caller ends, even a re-entrant one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
