"""How many bytes are handled at once.

None of these sizes changes a bit of a gradient; tests make them small, so that small models have
several of everything. (They are read where they are used, as ``limits.STAGE``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

# The most in a bucket of fresh gradients whose sums leave their device, which should begin while
# the pass still computes. As much as LEAST (on a CPU) or SENT (on a GPU) any bucket may hold: a
# smaller one would cost more by its call than by its bytes.
SENT = 32 << 20
LEAST = 1 << 20
SHARE = 16  # buckets that a model's gradients on a GPU make, at least, where they are larger than that
REDUCED = 32 << 20  # of buffers that go in one collective
STAGE = 32 << 20  # of a piece of the ring to CPU memory; a power of two, because PyTorch rounds pinned memory up to one

PINNED = 256 << 20  # of memory that is pinned at once; a power of two, as above

# Of FP32 masters that a part of a step makes (perhaps with as many gradients). On a CPU they should
# stay in its cache, and their memory is kept; on a GPU a call of the optimizer costs time of the
# host. On both a call takes some 0.2 ms by itself.
STEPPED_CPU = 8 << 20
STEPPED = 256 << 20

Item = TypeVar("Item")


def stepped(device: torch.device) -> int:
    """Bytes of FP32 masters made at once on this device, at most, unless a parameter is larger."""
    return STEPPED_CPU if device.type == "cpu" else STEPPED


def in_parts(items: Sequence[Item], nbytes: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """The items, in parts of ``most`` bytes at most, or one item."""
    part: list[Item] = []
    taken = 0
    for item in items:
        needed = nbytes(item)
        if part and taken + needed > most:
            yield part
            part, taken = [], 0
        part.append(item)
        taken += needed
    if part:
        yield part


def bucket(device: torch.device) -> int:
    """Bytes of fresh gradients on this device that make a bucket, at most.

    On a CPU they are read again before they leave its cache. On a GPU every bucket costs time of
    the host, which a backward may wait for, and holds back memory: 0.4% of it.
    """
    if device.type == "cpu":
        return 8 << 20
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(SENT, memory // 256)


def full_at(device: torch.device, sizes: Sequence[int], sent: bool) -> int:
    """Bytes that make a bucket on this device, for a backward with gradients of ``sizes`` bytes.

    ``sent``: True if their sums leave it.

    On a GPU a bucket is a small part of the model's own gradients. On a CPU, memory that is freed
    at once must not be much more than the largest tensor freed before: glibc's malloc gives back to
    the system what is more than twice that, and faults it in again.
    """
    most = min(bucket(device), SENT) if sent else bucket(device)
    if device.type == "cpu":
        return min(most, max([LEAST, *sizes]))
    return min(most, max(SENT, sum(sizes) // SHARE))
