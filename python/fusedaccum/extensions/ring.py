"""A ring of pinned memory between a device and the CPU: tensors of any size go in pieces."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import limits, ops
from ..ops.memory import is_dense

STAGES = 3  # one that fills, one on its way, one that is being added
LINE = 64  # bytes: everything in a stage starts at a cache line
HEAD = 2 * LINE  # a stage begins with the scale and the decay, in a line each


class Stage:
    """One piece of the ring: pinned memory."""

    def __init__(self, device: torch.device):
        self.here = torch.empty(limits.STAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.busy: Future | torch.Event | None = None  # what still uses it
        self._device = device

    @functools.cached_property
    def there(self) -> Tensor:
        """As much on the device, for what is packed there."""
        return torch.empty(limits.STAGE, dtype=torch.uint8, device=self._device)

    def wait(self) -> None:
        """Wait until nothing uses it."""
        if isinstance(self.busy, Future):
            self.busy.result()
        elif self.busy is not None:
            self.busy.synchronize()
        self.busy = None


def view(memory: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements from byte ``begin`` on."""
    return memory[begin : begin + count * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Cut:
    """Elements [begin, end) of one of a list's tensors, in memory order, and their place.

    ``place``: where in a stage they begin, in bytes.
    """

    tensor: int
    begin: int
    end: int
    place: int
    dtype: torch.dtype

    def of(self, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """These elements of a list of dense tensors."""
        tensor = tensors[self.tensor]
        return tensor.as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)

    def within(self, memory: Tensor) -> Tensor:
        """Their place in a stage's memory."""
        return view(memory, self.place, self.end - self.begin, self.dtype)


def loads(tensors: Sequence[Tensor]) -> Iterator[tuple[list[Cut], int]]:
    """Cut tensors, in order, into lists that fit a stage. Yields each, and the bytes it fills."""
    load: list[Cut] = []
    used = HEAD
    for number, tensor in enumerate(tensors):
        most = (limits.STAGE - HEAD) // tensor.itemsize
        for begin in range(0, tensor.numel(), most):
            end = min(begin + most, tensor.numel())
            needed = -(-(end - begin) * tensor.itemsize // LINE) * LINE
            if used + needed > limits.STAGE:
                yield load, used
                load, used = [], HEAD
            load.append(Cut(number, begin, end, used, tensor.dtype))
            used += needed
    if load:
        yield load, used


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the strides of the dense ``like``: itself, if it has them."""
    if (tensor.stride() == like.stride() or tensor.numel() < 2) and not tensor._is_zerotensor():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def recorded(device: torch.device) -> torch.Event:
    """An event on the current stream; where PyTorch can, a wait for it keeps no processor busy."""
    if device.type == "cuda":
        blocking = torch.cuda.Event(blocking=True)
        blocking.record(torch.cuda.current_stream(device))  # older versions take no torch.Stream
        return blocking
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def free_stage(ring: list[Stage]) -> Stage:
    """The stage that was used longest ago, once nothing uses it any more."""
    ring[0].wait()
    ring.append(ring.pop(0))
    return ring[-1]


class Rings(dict[torch.device, list[Stage]]):
    """A ring for each device, made when it is first needed."""

    def __missing__(self, device: torch.device) -> list[Stage]:
        self[device] = [Stage(device) for _ in range(STAGES)]
        return self[device]


def send(ring: list[Stage], outs: Sequence[Tensor], ins: Sequence[Tensor], backend: str) -> None:
    """:func:`ops.cast_` of ``ins`` in CPU memory to ``outs`` on the ring's device.

    ``ins`` may be overwritten when it returns; the outputs are ready for the current stream, which
    it does not wait for.
    """
    dense = [out if is_dense(out) else torch.empty_like(out) for out in outs]
    ins = [laid_out(x, out) for x, out in zip(ins, dense, strict=True)]
    for load, _ in loads(dense):
        stage = free_stage(ring)
        staged = [cut.within(stage.here) for cut in load]
        ops.cast_(staged, [cut.of(ins) for cut in load], backend=backend)
        for cut, arriving in zip(load, staged, strict=True):
            cut.of(dense).copy_(arriving, non_blocking=True)
        stage.busy = recorded(dense[0].device)
    for out, filled in zip(outs, dense, strict=True):
        if out is not filled:
            out.copy_(filled)
