"""Sums that travel between ranks in another dtype (``comm_dtype``), and are added up in FP32.

An all-reduce adds in the dtype that travels. Here every rank gets all ranks' terms of one part of
the elements, adds them in the order of the ranks, and passes the sum on: to all ranks in that dtype
again, which takes a ring all-reduce's bytes and rounds once on each way, or to the one rank that
needs it, as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..core.buffers import padded
from .group import Group

# Its new name, and the one that PyTorch 2.13 and older have.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Narrowed:
    """Sends the sums of one rank."""

    def __init__(self, group: Group, dtype: torch.dtype, backend: str):
        self._group, self._dtype, self._backend = group, dtype, backend
        # On a device, so that it need not wait for the terms before it goes on with backward.
        self._stream: torch.Stream | None = None

    def send(self, mine: Tensor, owner: int | None) -> tuple[dist.Work | None, Tensor | None]:
        """Add up all ranks' ``mine`` on rank ``owner``, or on all (None).

        Returns what to wait for, and where the sum is then, with elements to spare at its end; None
        on a rank that gets none.
        """
        with self._aside(mine.device), self._group.talking() as group:
            ranks, rank = self._group.size, self._group.rank
            part = padded(-(-mine.numel() // ranks))
            sent = torch.empty(ranks * part, dtype=self._dtype, device=mine.device)
            ops.cast_([sent[: mine.numel()]], [mine], backend=self._backend)
            terms = torch.empty_like(sent)
            dist.all_to_all_single(_as_bytes(terms), _as_bytes(sent), group=group)
            total = torch.empty(part, dtype=torch.promote_types(mine.dtype, torch.float32), device=mine.device)
            for number, term in enumerate(terms.view(ranks, part)):
                ops.accumulate_([total], [term], 1.0, overwrite=number == 0, backend=self._backend)
            if owner is None:
                narrow = terms[:part]
                ops.cast_([narrow], [total], backend=self._backend)
                return _all_gather(_as_bytes(sent), _as_bytes(narrow), group=group, async_op=True), sent
            whole = total.new_empty(ranks, part) if rank == owner else None
            to = self._group.global_rank(owner)
            work = dist.gather(total, None if whole is None else list(whole), dst=to, group=group, async_op=True)
            return work, None if whole is None else whole.view(-1)

    def _aside(self, device: torch.device) -> contextlib.AbstractContextManager:
        """On a stream of its own, which waits for what the current one has got so far."""
        if device.type == "cpu":
            return contextlib.nullcontext()
        self._stream = self._stream or torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        return self._stream


def put_in_place(whole: Tensor, memory: Tensor, backend: str) -> None:
    """Write a sum that has arrived, made on another stream, to where it belongs."""
    ops.cast_([memory], [whole[: memory.numel()]], backend=backend)
    if whole.device.type != "cpu":
        whole.record_stream(torch.accelerator.current_stream(whole.device))


def _as_bytes(x: Tensor) -> Tensor:
    """The same memory in a dtype that every backend moves."""
    return x.view(torch.uint8)
