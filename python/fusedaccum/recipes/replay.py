"""What a forward that runs twice must find the same both times: random numbers and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from ..engine import without_grad


class RandomState:
    """State of the default generators of CPU, current device and ``tensors``. Does not wait."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._cpu = torch.get_rng_state()
        self._devices: list[tuple[ModuleType, int, Tensor]] = []
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return
        own = torch.get_device_module(device)
        if not hasattr(own, "get_rng_state") or not getattr(own, "is_initialized", lambda: True)():
            return  # nothing has been drawn there yet, and a GPU that is not in use should not be initialised
        used = {tensor.device.index for tensor in tensors if tensor.device.type == device.type}
        for index in sorted(used | {torch.accelerator.current_device_index()}):
            with torch.accelerator.device_index(index):
                self._devices.append((own, index, own.get_rng_state()))

    def restore(self) -> None:
        """Make the generators draw the same numbers again."""
        torch.set_rng_state(self._cpu)
        for own, index, state in self._devices:
            with torch.accelerator.device_index(index):
                own.set_rng_state(state)


@contextmanager
def unmoved(functions: Sequence[Any], but: Iterable[Module] = ()) -> Iterator[Collection[Module]]:
    """Undo what the block does to the buffers of modules that ``functions`` are, or call.

    Holds a copy of the buffers (running statistics) meanwhile. ``but``: leave these alone. Yields
    the modules, all of which are known at the block's end.
    """
    modules, left = dict[Module, None](), set(but)  # the first in the order in which they are met
    saved: list[tuple[dict[str, Tensor | None], str, Tensor | None, Tensor | None]] = []

    def keep(module: Module, args: Any = None) -> None:
        if module not in modules and module not in left:
            modules[module] = None
            for name, buffer in module._buffers.items():
                saved.append((module._buffers, name, buffer, None if buffer is None else buffer.detach().clone()))

    for function in functions:
        for module in function.modules() if isinstance(function, Module) else ():
            keep(module)

    @without_grad
    def restore() -> None:
        for buffers, name, buffer, before in saved:
            buffers[name] = buffer
            if buffer is not None and before is not None:
                buffer.copy_(before)  # always: native batch normalisation writes without bumping the version

    calls_others = not all(isinstance(function, Module) for function in functions)
    hook = register_module_forward_pre_hook(keep) if calls_others else None
    try:
        yield modules
    finally:
        if hook is not None:
            hook.remove()
        restore()
