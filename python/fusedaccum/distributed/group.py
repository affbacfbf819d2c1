"""A process group: numbers added up over its ranks, and errors that say what they mean here."""

from __future__ import annotations

import datetime
import hashlib
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.buffers import Slot
from ..core.extension import RaisedByAllError
from ..core.ledger import Ledger
from ..scalars import Scalar

# By the caller's group. PyTorch keeps groups alive until they are destroyed, and nobody should
# after that: their threads end with them, and one that still runs when Python ends may abort the
# process (gloo's, which needs Python to free the tensors of its last collective).
_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Own]] = weakref.WeakKeyDictionary()
_made = 0  # groups, in all
_STRANDED: list[Group] = []  # kept alive, so that their groups are never reused


@dataclass
class Own:
    """A group that we have made, of the same ranks as a caller's."""

    group: weakref.ref[dist.ProcessGroup]
    user: weakref.ref[Group]


def own_group(theirs: dist.ProcessGroup, device: torch.device, user: Group) -> dist.ProcessGroup:
    """A group of the same ranks for one wrapper alone.

    Collectives of other wrappers or of the caller may come in between on some rank. The group of a
    wrapper that is gone on all ranks is reused; they agree on which.

    Raises ValueError if it cannot reach ``device``.
    """
    try:
        timeout = theirs._get_backend(device).options._timeout
    except RuntimeError as error:
        raise ValueError(
            f"process_group has no backend for the {device}, where the buffers are: {error}; make it with one, as in "
            "init_process_group('cpu:gloo,cuda:nccl')"
        ) from error
    global _made
    known = _OWN.setdefault(theirs, [])
    free = {i for i, own in enumerate(known) if own.user() is None and own.group() is not None}
    told: list = [None] * dist.get_world_size(theirs)
    dist.all_gather_object(told, (free, _made), group=theirs)
    common = set.intersection(*(free for free, _ in told))
    if common:
        own = known[min(common)]
        own.user, group = weakref.ref(user), own.group()
        assert group is not None
        return group
    most = max(made for _, made in told)
    group = new_group(dist.get_process_group_ranks(theirs), timeout, most)
    _made = most + 1
    known.append(Own(weakref.ref(group), weakref.ref(user)))
    return group


def new_group(ranks: list[int], timeout: datetime.timedelta, number: int) -> dist.ProcessGroup:
    """A group of these ranks, which call this together; others need not.

    ``number``: the most that any of them has made before.

    PyTorch would name it by a count of groups, or by how many this process is in. These differ
    between ranks if one is in groups that another is not in, and then the ranks of the next group
    never meet. So it gets a name that the ranks agree on, and the count stays.
    """
    name = "fusedaccum_" + hashlib.sha1(f"{number} {ranks}".encode(), usedforsecurity=False).hexdigest()
    c10d: Any = dist.distributed_c10d
    theirs = getattr(c10d, "_process_group_name", None)
    try:
        if theirs is not None:
            # Another thread may make a group meanwhile.
            c10d._process_group_name = lambda of, *how, **more: (
                name if sorted(of) == sorted(ranks) else theirs(of, *how, **more)
            )
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    finally:
        if theirs is not None:
            c10d._process_group_name = theirs
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return group


class Group:
    """The ranks that share windows.

    Attributes:
        size, rank: how many there are, and which one this is.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, ledger: Ledger):
        self.size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self._own = weakref.ref(own_group(process_group, device, self))
        self._device = device  # of numbers that travel
        self._ledger = ledger
        self._out_of_step = False  # True if this rank has left out collectives that others wait for

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group for what these windows send. Raises RuntimeError once it has been destroyed."""
        group = self._own()
        if group is None:
            raise RuntimeError(
                "the ranks' windows need a process group, but torch.distributed.destroy_process_group() has been "
                "called; call it at the very end, after opt.flush()"
            )
        return group

    def global_rank(self, rank: int) -> int:
        """The rank as torch.distributed's source and destination arguments take it."""
        return dist.get_global_rank(self.process_group, rank)

    def total(self, mine: list[float]) -> list[float]:
        """Sums over the ranks of a list of numbers; waits for the device."""
        return self.sum(torch.tensor(mine, dtype=torch.float64)).tolist()

    def weight(self, mine: Scalar, flushes: bool = False) -> float:
        """A weight's sum over the ranks, infinite if one ``flushes``. Waits for the device."""
        total, flushing = self.total([float(mine), float(flushes)])
        return math.inf if flushing else total

    def least(self, mine: float) -> float:
        """The smallest of the ranks' numbers; waits for the device."""
        return float(self._reduced(torch.tensor(mine, dtype=torch.float64), dist.ReduceOp.MIN))

    def sum(self, mine: Tensor) -> Tensor:
        """The sum over the ranks of a small tensor."""
        return self._reduced(mine, dist.ReduceOp.SUM)

    def all_gather(self, mine: Any) -> list[Any]:
        """Every rank's plain values; waits for the device."""
        theirs: list[Any] = [None] * self.size
        with self.talking() as group:
            dist.all_gather_object(theirs, mine, group=group)
        return theirs

    def _reduced(self, mine: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        total = mine.to(self._device, copy=True)
        with self.talking() as group:
            dist.all_reduce(total, operation, group=group)
        return total

    @contextmanager
    def talking(self) -> Iterator[dist.ProcessGroup]:
        """The group, for collectives in the block, whose errors will say what they mean here."""
        group = self.process_group
        if self._out_of_step:
            raise RuntimeError(
                "this rank broke off while the window's sums were on their way, and has been out of step with the "
                "others since; end all processes and start again from a checkpoint"
            )
        try:
            yield group
        except RuntimeError as error:
            self.out_of_step()
            raise RuntimeError(
                f"rank {self.rank} could not reach the others at the end of window {self._ledger.index}: one of them "
                "has probably raised or died, or closes fewer windows than this one (every rank must call step() or "
                f"flush() as often as windows close on the others). The window is dropped. PyTorch says: {error}"
            ) from error

    def out_of_step(self) -> None:
        """This rank leaves out collectives that others may be waiting for."""
        self._out_of_step = True
        _STRANDED.append(self)

    # -- the ranks are alike -----------------------------------------------------------------------

    def compare_shapes(self, slots: Sequence[Slot]) -> None:
        """Raises ValueError if ranks differ in shape, dtype, ``requires_grad`` or memory format."""
        mine = [
            (slot.name, tuple(slot.param.shape), str(slot.param.dtype), slot.param.requires_grad, strides(slot))
            for slot in slots
        ]
        for rank, other in enumerate(self.all_gather(mine)):
            differing = [(a, b) for a, b in zip(mine, other, strict=False) if a[1:] != b[1:]]
            if differing or len(mine) != len(other):
                a, b = differing[0] if differing else (f"{len(mine)} parameters", f"{len(other)}")
                raise ValueError(
                    f"process_group's ranks must have the same parameters in the same order, but rank {self.rank} has "
                    f"{a} where rank {rank} has {b}; build the same model, in the same memory format, and the same "
                    "param_groups on all ranks"
                )

    def compare_values(self, slots: Sequence[Slot]) -> None:
        """Raises RaisedByAllError if ranks' parameters differ in bits, as far as sums tell."""
        if not slots:
            return
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [slot.param.detach().view(bits[slot.param.itemsize]).sum(dtype=torch.int64) for slot in slots]
        mine = torch.stack([x.to(self._device) for x in sums])
        first = mine.clone()
        with self.talking() as group:
            dist.broadcast(first, self.global_rank(0), group=group)
        (differing,) = (mine != first).nonzero(as_tuple=True)
        if self.total([len(differing)])[0]:
            where = f", on this rank first in {slots[int(differing[0])].name}" if len(differing) else ""
            raise RaisedByAllError(
                f"the ranks' parameters hold different values{where}, and equal steps would keep them different; "
                "before the first window, give all ranks the first one's: `for p in model.parameters(): "
                "torch.distributed.broadcast(p.data, 0)` (DistributedDataParallel does that), or load the same "
                "checkpoint"
            )


def strides(slot: Slot) -> tuple[int, ...]:
    """The strides of a buffer, whose memory travels as it is; empty for a shard, whose does not."""
    if slot.part is not None:
        return ()
    return tuple(stride for stride, size in zip(slot.strides, slot.param.shape, strict=True) if size != 1)
