"""What a forward that is run twice must find as it was the first time: random numbers and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


class RandomState:
    """Where PyTorch's default generators stand: those of the CPU, the devices of ``tensors``, and the current device. Waits for nothing."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._cpu = torch.get_rng_state()
        self._devices: list[tuple[ModuleType, int, Tensor]] = []
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return
        own = torch.get_device_module(device)
        if not hasattr(own, "get_rng_state") or not getattr(own, "is_initialized", lambda: True)():
            return  # nothing has been drawn there yet, and nobody shall wake a GPU that he does not use
        used = {tensor.device.index for tensor in tensors if tensor.device.type == device.type}
        for index in sorted(used | {torch.accelerator.current_device_index()}):
            with torch.accelerator.device_index(index):
                self._devices.append((own, index, own.get_rng_state()))

    def restore(self) -> None:
        """Draw the same numbers once more."""
        torch.set_rng_state(self._cpu)
        for own, index, state in self._devices:
            with torch.accelerator.device_index(index):
                own.set_rng_state(state)


@contextmanager
def unmoved(functions: Iterable[Any]) -> Iterator[None]:
    """Whatever happens within to the buffers of those that are modules (running statistics) is undone. Holds a copy of them meanwhile."""
    modules = {module for function in functions if isinstance(function, Module) for module in function.modules()}
    saved = [
        (module._buffers, name, buffer, buffer.detach().clone() if buffer is not None else None)
        for module in modules
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, before in saved:
                buffers[name] = buffer
                if buffer is not None and before is not None:
                    buffer.copy_(before)  # always: native batch normalisation writes without raising the version
