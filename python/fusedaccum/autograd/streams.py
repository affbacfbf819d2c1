"""Gradients queued on one CUDA stream and added on another: adds wait, and memory is kept for them.

A pass may add on several streams: each add waits for the one before, its caller for the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..parts import local_of

StreamName = tuple[int, int, int]  # a CUDA stream's stream_id, device_index and device_type


def current_name(device: torch.device) -> StreamName:
    """The current stream of a CUDA device.

    (``torch.cuda.current_stream()`` makes an object of it, which takes as long as a launch.)
    """
    return torch._C._cuda_getCurrentStream(device.index)


def _named(name: StreamName) -> torch.cuda.Stream:
    stream_id, device_index, device_type = name
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def join(arrived: Iterable[StreamName], grads: Sequence[Tensor]) -> None:
    """Make the current streams wait for those that have ``arrived``, before they read ``grads``.

    The engine runs a hook on its node's stream, and the end of a pass on its caller's.
    """
    for name in arrived:
        if name == current_name(torch.device("cuda", name[1])):
            continue
        stream = _named(name)
        here = torch.cuda.current_stream(stream.device)
        here.wait_stream(stream)
        for grad in grads:
            if grad.device == stream.device:
                local_of(grad).record_stream(here)  # the allocator reuses its memory only after that stream


def keep(grad: Tensor) -> None:
    """Keep a gradient's memory until the current stream is done with it.

    Its own stream may be another, on which nobody waits for us. FSDP2 allocates gradients on its
    stream for reduce-scatters. After an all-reduce (over replicas, or a hook of the user's) they
    arrive on another one. That it holds them until the end of backward, through ``p.grad``, is what
    it relies on, and we take them out of there.
    """
    if grad.device.type == "cuda":
        grad.record_stream(torch.cuda.current_stream(grad.device))  # costs nothing if it is the same


class StreamOrder:
    """Adds on a device take turns, on whichever streams they run. Without CUDA it costs nothing.

    The engine runs a node on the stream of its forward. A layer that adds its gradient itself does
    so there, and a bucket is added where its last gradient arrived; the engine makes the pass's
    caller wait for neither.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, StreamName] = {}  # where the last add was launched

    def acquire(self, devices: Iterable[torch.device] | None = None) -> None:
        """Order what current streams of ``devices`` get from here on after the last add there.

        It then counts as the last. ``devices``: None for all that had an add.
        """
        for device in list(self._last) if devices is None else devices:
            if device.type == "cuda":
                here = current_name(device)
                last = self._last.get(device, here)
                if last != here:
                    stream = _named(last)
                    if not _left_behind(stream, device):
                        torch.cuda.current_stream(device).wait_stream(stream)
                self._last[device] = here

    def release(self) -> None:
        """The pass is over: the current streams, which are its caller's, wait for the last adds."""
        self.acquire()
        self._last.clear()


def _left_behind(stream: torch.cuda.Stream, device: torch.device) -> bool:
    """True if a graph capture has begun since, of which ``stream`` is not part.

    To wait for it is then forbidden, and needless: a capture begins by waiting for the device.
    """
    with torch.cuda.device(device):
        if not capturing(device):
            return False
    with torch.cuda.stream(stream):
        return not capturing(device)


def capturing(device: torch.device) -> bool:
    """True if what is launched on ``device`` now is recorded in a CUDA graph, instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
