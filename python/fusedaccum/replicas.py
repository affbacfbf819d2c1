"""DistributedDataParallel modules whose parameters the wrapper gathers: kept quiet, for the ranks' sums are added once a window.

DDP takes no part in a backward whose forward ran without synchronisation, so that every forward of such a module runs as under its
``no_sync()``. What the caller has asked for with that is still his, and tells which backward a caller-owned window ends with.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def replicas_of(parameters: Collection[Tensor]) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules that hold some of ``parameters``.

    Nothing on a parameter tells that such a module has taken it, so in a process that uses torch.distributed all that are alive are
    looked through.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    known = {id(p) for p in parameters}
    modules = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    return [module for module in modules if any(id(p) in known for p in module.parameters())]


class Silence:
    """Runs every forward of a module without synchronisation, and notes what the caller has asked for."""

    def __init__(self, module: DistributedDataParallel):
        self.asked = self.synced = bool(module.require_backward_grad_sync)
        self.handles = [
            module.register_forward_pre_hook(self.begin),
            module.register_forward_hook(self.end, always_call=True),
        ]

    def begin(self, module: Any, args: Any) -> None:
        self.asked = module.require_backward_grad_sync
        if torch.is_grad_enabled():
            self.synced = self.asked
        module.require_backward_grad_sync = False

    def end(self, module: Any, args: Any, output: Any) -> None:
        module.require_backward_grad_sync = self.asked


class Replicas:
    """The modules of one wrapper, silenced while it lives."""

    def __init__(self, modules: list[DistributedDataParallel]):
        self.modules = modules
        self.group: dist.ProcessGroup | None = modules[0].process_group if modules else None
        self._silences = [Silence(module) for module in modules]
        for silence in self._silences:
            for handle in silence.handles:
                weakref.finalize(self, handle.remove).atexit = False

    @property
    def synced(self) -> bool:
        """Would the backward of the last forward have been synchronised?"""
        return any(silence.synced for silence in self._silences)

    def window_ended(self) -> None:
        """The next forward gives all ranks the first one's module buffers (batch statistics), as DDP does after a synchronised backward."""
        for module in self.modules:
            module.require_forward_param_sync = True
