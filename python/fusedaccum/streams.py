"""Gradients that are queued on one CUDA stream and added on another: whoever adds waits for them, and their memory for him."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Streams:
    """The streams that queued gradients came on. The engine runs a hook on its node's stream, and the end of a pass on its caller's."""

    def __init__(self) -> None:
        self._of: dict[torch.device, set[torch.cuda.Stream]] = {}

    def arrived(self, grad: Tensor) -> None:
        """``grad`` is ready on the current stream of its device."""
        if grad.is_cuda:
            self._of.setdefault(grad.device, set()).add(torch.cuda.current_stream(grad.device))

    def join(self, grads: Iterable[Tensor]) -> None:
        """From here on the current streams may read all that have arrived, of which ``grads`` are to be read now."""
        arrived, self._of = self._of, {}
        for device, streams in arrived.items():
            here = torch.cuda.current_stream(device)
            others = streams - {here}
            for other in others:
                here.wait_stream(other)
            for grad in grads if others else ():
                if grad.device == device:
                    grad.record_stream(here)  # the allocator gives it away again only after that stream
