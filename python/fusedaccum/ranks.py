"""Windows over the ranks of a process group: their sums are added once a window, and they agree on what it holds.

What a window weighs, and which parameters have a gradient on any rank, is one small all-reduce at its end, after that of the sums. Every
rank so calls the same collectives in the same order, however many micro-batches it has gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from .accumulator import Accumulator
from .buffers import Slot
from .group import Group, RaisedByAllError
from .ledger import Ledger
from .segments import Segments
from .window import Scalar, Window


class Ranks:
    """One rank's side of the windows that a process group shares.

    Args:
        comm_dtype: sums travel in this dtype; None for the buffers' own.
        sums, ledger: of this rank. backend: of casts on the way.
        shard: each parameter is stepped by one rank, its owner.

    Attributes:
        agreed: are the open window's numbers and sums those of all ranks?
        overflow: has a GradScaler found one on any rank?
        gathered: the slots that hold a gradient on any rank, once agreed.
        pools: has any rank batch statistics of the window, once agreed?
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        comm_dtype: torch.dtype | None,
        sums: Accumulator,
        ledger: Ledger,
        backend: str,
        shard: bool,
    ):
        slots = sums.buffers.slots
        self.group = Group(process_group, slots[0].device if slots else torch.device("cpu"), ledger)
        self.shard = shard
        self.owners: dict[Slot, int] = {}  # empty unless ``shard``
        self.segments = Segments(self.group, comm_dtype, sums, ledger, backend, self.owners)
        self._sums, self._ledger = sums, ledger
        self._compared = False  # are the parameters known to be equal on all ranks?
        self.take(slots)
        self.forget()

    def take(self, slots: Sequence[Slot]) -> None:
        """Share these, too. Raises ValueError unless all ranks have the like."""
        self.group.compare_shapes(slots)
        self._compared = False
        if self.shard:
            self.owners.update(owners(slots, self.group.size))

    def owned(self, parameters: Collection[Parameter]) -> list[Parameter]:
        """Those that this rank steps."""
        slots = [self._sums.buffers.of[p] for p in parameters]
        return [slot.param for slot in slots if self.owners.get(slot, self.group.rank) == self.group.rank]

    def forget(self) -> None:
        """A window begins."""
        self.agreed = self.overflow = self.pools = False
        self.gathered: set[Slot] = set()
        self.segments.forget()

    def agree(self, micro_batches: int, weight: Scalar, overflow: bool | Tensor, pools: bool) -> None:
        """Make the open window's numbers, and the buffers, those of all ranks. Waits for the device.

        Args:
            micro_batches, weight: of this rank. overflow: did a GradScaler find one here? pools: are there batch statistics here?

        Raises:
            RuntimeError: the other ranks cannot be reached, or are not alike.
        """
        self.segments.send_rest()  # first, as on ranks whose last backward has done so
        self.segments.arrive()
        slots, window = self._sums.buffers.slots, self._ledger.window
        if not self._compared:
            self.group.compare_values([slot for slot in slots if not slot.sharded])
            self._compared = True
        unit = 0.0 if window.unit is None else float(window.unit)
        counts = micro_batches, window.dropped, float(window.nonfinite)
        mine = [float(weight), *counts, bool(overflow), window.overflowed, unit, unit**2]
        mine += [float(window.loss), window.losses, *small_sums(window), pools]
        mine += [self.segments.has(slot) for slot in slots]
        totals = self.group.total([*mine, *self.segments.again])
        first, end = NUMBERS, NUMBERS + len(slots)
        numbers, has, again = totals[:first], totals[first:end], totals[end:]
        if numbers[6] ** 2 != self.group.size * numbers[7]:  # equal scales, and no others, have this mean square
            raise RaisedByAllError(
                f"the loss scale is {unit:g} on this rank and another on others: every rank's GradScaler has looked at its own gradients "
                "only; use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=...). The window is dropped"
            )
        window.weight, window.micro_batches, window.dropped = numbers[0], int(numbers[1]), int(numbers[2])
        window.nonfinite, self.overflow, window.overflowed = int(numbers[3]), bool(numbers[4]), bool(numbers[5])
        # Of losses that come normalised the mean over the ranks is taken, as of their gradients.
        window.loss = numbers[8] / (self.group.size if self._ledger.reduction == "none" else 1)
        window.losses = int(numbers[9])
        window.small_sq_norm, window.small_weight, window.small_square = (
            numbers[10:13] if numbers[13] == self.group.size else (None, None, None)
        )
        self.pools = bool(numbers[14])
        self.gathered = {slot for slot, ranks in zip(slots, has, strict=True) if ranks}
        self.segments.finish(self.gathered, again)
        self.agreed = True

    def show_all(self) -> None:
        """Show the sums of what other ranks have a gradient of, too: somebody is going to look at ``p.grad`` before the window ends."""
        slots = self._sums.buffers.slots
        has = self.group.total([self.segments.has(slot) for slot in slots])
        self.segments.show([slot for slot, ranks in zip(slots, has, strict=True) if ranks])

    def take_back(self) -> None:
        """Make the buffers this rank's part of the sums again, as a checkpoint inside a window holds them."""
        if self.agreed:
            raise RuntimeError(
                "opt.normalize_() has added this window's sums over the ranks, and none of them holds its part any more; call opt.step() "
                "before state_dict()"
            )
        self.segments.take_back_all()

    def broke_off(self) -> None:
        """A backward pass of this rank has failed; others may be waiting for segments that did not go."""
        if self.segments.any_gone:
            self.group.out_of_step()


NUMBERS = 15  # of a window, that its ranks add up


def small_sums(window: Window) -> list[float]:
    """Of the one micro-batch that was measured by itself: squared norm, weight and its square; and whether there was one."""
    if window.small_sq_norm is None or window.small_weight is None or window.small_square is None:
        return [0.0, 0.0, 0.0, 0.0]
    return [float(window.small_sq_norm), float(window.small_weight), float(window.small_square), 1.0]


def owners(slots: Sequence[Slot], ranks: int) -> dict[Slot, int]:
    """Which rank steps which parameter: neighbours together, and each about as many elements."""
    total = sum(slot.param.numel() for slot in slots)
    found, before = {}, 0
    for slot in reversed(slots):
        middle = before + slot.param.numel() / 2
        found[slot] = min(int(middle * ranks / max(total, 1)), ranks - 1)
        before += slot.param.numel()
    return found
