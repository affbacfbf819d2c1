"""DistributedDataParallel modules whose gradients the wrapper accumulates.

DDP reduces nothing, as sums are added once per window here. It takes no part in a backward whose
forward ran without synchronisation, so every forward of such a module runs as under its
``no_sync()``. The caller's own use of ``no_sync()`` is noted, and says which backward a
caller-owned window ends with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..engine import outside_graphs, without_grad
from ..modules import modules_alive


def replicas_of(
    parameters: Collection[Tensor], besides: Collection[DistributedDataParallel] = ()
) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules that hold some of ``parameters``, except ``besides``.

    They come in the order of the parameters, which is the same on all ranks.
    """
    if not (parameters and dist.is_available() and dist.is_initialized()):
        return []
    number = {id(p): i for i, p in enumerate(parameters)}

    def held(module: DistributedDataParallel) -> list[int]:
        return [number[id(p)] for p in module.parameters() if id(p) in number]

    found = modules_alive(DistributedDataParallel, lambda module: module not in besides and bool(held(module)))
    return sorted(found, key=held)


class DDPSyncGuard:
    """While it lives, a module's forwards run unsynchronised. It notes what the caller asked for.

    Attributes:
        called: True if the module has been called since, with gradients.
    """

    def __init__(self, module: DistributedDataParallel):
        self._module = weakref.ref(module)
        self._asked = asked = {"synced": bool(module.require_backward_grad_sync), "now": True, "called": False}

        @outside_graphs
        def begin(module: Any, args: Any) -> None:
            if module._join_config.enable:
                raise RuntimeError(
                    "DistributedDataParallel.join() answers reductions of ranks that still have data, but DDP makes "
                    "none here, so it would wait forever; leave it out, and let a rank without data call opt.flush()"
                )
            module.require_forward_param_sync = False  # module buffers follow the windows
            asked["now"] = module.require_backward_grad_sync
            if torch.is_grad_enabled():
                asked["synced"], asked["called"] = asked["now"], True
            module.require_backward_grad_sync = False

        @outside_graphs
        def end(module: Any, args: Any, output: Any) -> None:
            module.require_backward_grad_sync = asked["now"]

        module.require_forward_param_sync = False
        for handle in (module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)):
            weakref.finalize(self, handle.remove).atexit = False
        weakref.finalize(self, setattr, module, "require_forward_param_sync", True).atexit = False

    @property
    def synced(self) -> bool:
        """True if a backward now would be synchronised.

        That is one of a forward outside of no_sync(), and any, once the reducer is prepared for it
        (by Accelerate's ``trigger_sync_in_backward()``), which sets the flag that our forwards
        clear.
        """
        module = self._module()
        return self._asked["synced"] or (module is not None and module.require_forward_param_sync)

    @property
    def called(self) -> bool:
        return self._asked["called"]


# One per module, whichever wrappers accumulate its gradients.
_SYNC_GUARDS: weakref.WeakValueDictionary[int, DDPSyncGuard] = weakref.WeakValueDictionary()


class Replicas:
    """The modules that hold some of a wrapper's ``parameters``.

    Raises ValueError for what they were asked to do and cannot do here.
    """

    def __init__(self, parameters: Collection[Tensor]):
        self.modules = modules = replicas_of(parameters)
        for module in modules:
            check(module, parameters)
        self.group: dist.ProcessGroup | None = modules[0].process_group if modules else None
        if any(module.process_group is not self.group for module in modules):
            raise ValueError(
                "the optimizer's parameters are in DistributedDataParallel modules of different process groups; wrap "
                "one optimizer for each"
            )
        self._sync_guards = [_SYNC_GUARDS.get(id(module)) or DDPSyncGuard(module) for module in modules]
        for module, guard in zip(modules, self._sync_guards, strict=True):
            _SYNC_GUARDS[id(module)] = guard

    def outdated(self, parameters: Collection[Tensor]) -> bool:
        """True if DistributedDataParallel modules have been made with ``parameters`` since."""
        return bool(replicas_of(parameters, besides=self.modules))

    def check_all_wrapped(self, parameters: Collection[Tensor], wrapped: Callable[[Tensor], bool]) -> None:
        """Raises RuntimeError if modules have trained parameters that no wrapper accumulates.

        Also if a module would replace the sums in ``p.grad``, and as :func:`check_ignored`.

        Args:
            parameters: of the wrapper.
            wrapped: tells whether some wrapper accumulates this one's gradients.
        """
        if self.outdated(parameters):
            raise RuntimeError(
                "the model was wrapped in DistributedDataParallel after its optimizer was wrapped, and DDP would add "
                "up the ranks' gradients a second time; make the DistributedDataParallel module first, then "
                "AccumulatingOptimizer"
            )
        for module in self.modules:
            check_ignored(module, parameters)  # again: it may have been frozen
        left_out = [
            name
            for module in self.modules
            for name, p in module.module.named_parameters()
            if p.requires_grad and not wrapped(p) and name not in module.parameters_to_ignore
        ]
        if left_out:
            raise RuntimeError(
                f"parameter {left_out[0]} of the DistributedDataParallel module belongs to no AccumulatingOptimizer "
                f"({len(left_out)} such in all), and DDP reduces nothing here, so its gradient would differ between "
                "ranks; wrap its optimizer too, or freeze it"
            )

    def silence_pass(self) -> None:
        """A backward pass begins: keep the modules from reducing in it, whatever told them to.

        That may be a forward before our hooks were there, a pipeline's schedule, or Accelerate.
        Raises RuntimeError if all forwards have bypassed the hooks.
        """
        for module, guard in zip(self.modules, self._sync_guards, strict=True):
            reducer = getattr(module, "reducer", None)
            if reducer is not None:  # which some of DDP's options do without
                reducer._reset_state()
            if module.require_forward_param_sync and not guard.called:  # such a forward has set it
                module.require_forward_param_sync = False
                raise RuntimeError(
                    "a forward of the DistributedDataParallel module ran without a call of the module "
                    "(module.forward(x), or torch.distributed._composable.replicate), so DDP would add up the ranks' "
                    "gradients a second time; make it with DistributedDataParallel(model), and call module(x)"
                )

    @property
    def synced(self) -> bool:
        """True if a backward now would be synchronised under plain DDP."""
        return any(guard.synced for guard in self._sync_guards)

    @property
    def off(self) -> bool:
        """True if there is such a module, and all of them are within ``no_sync()`` now."""
        return bool(self.modules) and not any(module.require_backward_grad_sync for module in self.modules)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """``no_sync()`` of all modules."""
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(module.no_sync())
            yield

    @without_grad
    def window_ended(self) -> None:
        """Give all ranks the first one's module buffers, as DDP does after it has synchronised."""
        for module in self.modules:
            if module.broadcast_buffers and module.modules_buffers:
                module._sync_buffers()


def check(module: DistributedDataParallel, parameters: Collection[Tensor]) -> None:
    """Raises ValueError for options of DDP's unused reduction; and as :func:`check_ignored`."""
    check_ignored(module, parameters)
    if module.static_graph:
        raise ValueError(
            "the DistributedDataParallel module has static_graph=True, which needs a reduction in the first backward, "
            "but here sums are reduced once per window; leave it out"
        )
    if getattr(module, "_comm_hooks", None):
        raise ValueError(
            "the DistributedDataParallel module has a communication hook, which would not be called; leave it out. "
            "comm_dtype=torch.bfloat16 sends half. And ranks that step within no_sync() do so alone, to average "
            "their parameters themselves (post-local SGD)"
        )


def check_ignored(module: DistributedDataParallel, parameters: Collection[Tensor]) -> None:
    """Raises ValueError if one of ``parameters`` is trained, and the module ignores it."""
    here = {id(p) for p in parameters}
    for name, p in module.module.named_parameters():
        if p.requires_grad and name in module.parameters_to_ignore and id(p) in here:
            raise ValueError(
                f"the DistributedDataParallel module was told to ignore parameter {name}, or to delay its reduction, "
                "but here the gradients of all the optimizer's parameters are added up over the ranks; leave it out of "
                "the optimizer that is wrapped"
            )
