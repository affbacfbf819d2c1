"""PyTorch's autograd engine and compiler, as far as several rooms need what they have only under private names."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Decorates what must not be traced: within torch.compile it is a graph break, as are the methods of torch.optim that carry the same
# decorator. (torch.compiler.disable does so too, but loads the compiler when this package is imported.)
from torch._compile import _disable_dynamo as outside_graphs

# A context in which tensors are real again, whatever mode the caller is in (FakeTensorMode).
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

__all__ = ["outside_graphs", "outside_modes", "when_backward_ends", "within_backward"]


def within_backward() -> bool:
    """Is the caller run by a backward pass, as a hook or a node's backward is?"""
    return torch._C._current_graph_task_id() != -1


@outside_graphs
def when_backward_ends(call: Callable[[], None]) -> None:
    """Have the engine call this at the end of the backward pass that runs the caller; of a re-entrant one, if it is that."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
