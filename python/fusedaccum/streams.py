"""Gradients that are queued on one CUDA stream and added on another: whoever adds waits for them, and their memory for him."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

StreamName = tuple[int, int, int]  # a CUDA stream's stream_id, device_index and device_type


def join(arrived: Iterable[StreamName], grads: Sequence[Tensor]) -> None:
    """From here on the current streams may read what is ready on those that have ``arrived``; ``grads`` are to be read now.

    The engine runs a hook on its node's stream, and the end of a pass on its caller's.
    """
    for stream_id, device_index, device_type in arrived:
        stream = torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        here = torch.cuda.current_stream(stream.device)
        if stream == here:
            continue
        here.wait_stream(stream)
        for grad in grads:
            if grad.device == stream.device:
                grad.record_stream(here)  # the allocator gives it away again only after that stream


def capturing(device: torch.device) -> bool:
    """Is what is launched on ``device`` now recorded in a CUDA graph, instead of run?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
