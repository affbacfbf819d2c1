"""Adding: every gradient that arrives is scaled and added to its parameter's buffer, bucket by bucket."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import ops
from ..autograd.streams import capturing
from ..scalars import Scalar, add, div, identity, to_device, widest
from .buffers import Slot
from .extension import Extensions
from .ledger import Ledger
from .sums import Sums

DRAWS_APART = 1 << 44  # random numbers set aside for one add of all parameters, when rounding stochastically


class Accumulator:
    """Adds arriving gradients to the sums, weighted as the ledger's open micro-batch says.

    Args:
        extensions: which may change what gradients are multiplied by, or add late.
        seed: of the stochastic rounding of 16-bit buffers, below 2**53, and the same on all ranks; None rounds to nearest.

    Attributes:
        rank: added to the seed, so that ranks draw different numbers: with equal ones, rounding errors would add up, not average out.
    """

    def __init__(self, sums: Sums, ledger: Ledger, extensions: Extensions, seed: int | None):
        self._sums, self._ledger, self._extensions = sums, ledger, extensions
        self.seed, self.rank = seed, 0

    def add(self, slots: Sequence[Slot], grads: Sequence[Tensor], measure: bool) -> None:
        """``buffer += c * g`` for a bucket: one call per device and kind of add; the first touch of a parameter overwrites.

        ``measure``: also take the buffers' squared norm, and count what is not finite.
        """
        sums, micro = self._sums, self._ledger.micro
        sums.place(slots)
        sums.adopt_all(slots)
        if sums.buffers.has_parts:
            grads = [
                grad if slot.part is None else slot.part.local_gradient(grad)
                for slot, grad in zip(slots, grads, strict=True)
            ]
        scale = self.contribution(micro.factor_left())
        for (device, first, narrow, *_), members, theirs in one_call_each(slots, grads, measure):
            divisor = self._running_divisor() if narrow else 1.0
            here = scale * members[0].averaged_by
            stats = _room_for_stats(members[0]) if measure else None
            try:
                members[0].ops.accumulate_(
                    [slot.buffer for slot in members],
                    theirs,
                    to_device(div(here, divisor) if narrow else here, device),
                    overwrite=first,
                    decay=1.0 if first else to_device(div(members[0].divisor, divisor), device),
                    rounding=self._rounding(members) if narrow else None,
                    stats=stats,
                    backend=sums.backend,
                )
                micro.adds += 1
            except BaseException:
                micro.adds += sums.half_written  # one that raises for lack of memory, say, has mostly added nothing
                raise
            for added in self._extensions.added:
                added(members)
            sums.written(members, divisor, shown=not first)
            if stats is not None:
                self._measured(stats, members, divisor)

    def prepare(self, slot: Slot) -> None:
        """Make the slot's buffer hold the window's plain sum, or anything if ``slot.shown`` is None: other code is about to add to it."""
        sums = self._sums
        sums.place([slot])
        sums.adopt(slot)
        sums.check_whole()
        if slot.shown is not None and identity(slot.divisor) != 1.0:
            sums.divide_([slot], 1.0)  # normalize_() has made it a mean

    def count_added(self, slot: Slot, measure: bool) -> None:
        """Other code has added a gradient to the slot's buffer."""
        self._ledger.micro.adds += 1
        self._sums.written([slot], 1.0)
        if measure:
            self._measured(ops.stats([slot.buffer], backend=self._sums.backend), [slot], 1.0)

    def _measured(self, stats: ops.Stats, slots: Sequence[Slot], divisor: Scalar) -> None:
        """Keep ``stats`` of the buffers of ``slots``, which the micro-batch was the last to write."""
        self._sums.norms.record(stats, slots, divisor)
        self._ledger.micro.counts.append(stats.nonfinite)

    def count(self) -> None:
        """Add up what the micro-batch's adds have counted as not finite. Waits for adds that end late."""
        for finish in self._extensions.finish_adds:
            finish()
        micro = self._ledger.micro
        by_device: dict[torch.device, list[Tensor]] = {}
        for count in micro.counts:
            by_device.setdefault(count.device, []).append(count)
        for counts in by_device.values():
            found = counts[0] if len(counts) == 1 else torch.stack(counts).sum()
            micro.nonfinite = add(micro.nonfinite, found)
        micro.counts = []

    def contribution(self, scale: Scalar) -> Scalar:
        """``scale``, as extensions will have it; 0 if nothing more is to be added."""
        if self._ledger.window.void:
            return 0.0
        for change in self._extensions.scale:
            scale = change(scale)
        return scale

    def _running_divisor(self) -> Scalar:
        """The divisor of the open micro-batch, fixed when its first gradients were added."""
        micro = self._ledger.micro
        if micro.divisor is None:
            micro.divisor = self._ledger.running_divisor()
        return micro.divisor

    def _rounding(self, slots: Sequence[Slot]) -> ops.StochasticRounding | None:
        if self.seed is None:
            return None
        if capturing(slots[0].device):
            raise RuntimeError(
                "rounding='stochastic' cannot be captured in a CUDA graph: every replay would draw the same numbers; "
                "use rounding='nearest', or FP32 buffers (buffer_dtype=torch.float32)"
            )
        counters = [(slot.draws * DRAWS_APART + slot.before) % (1 << 64) for slot in slots]
        for slot in slots:
            slot.draws += 1
        return ops.StochasticRounding(self.seed + (self.rank if slots[0].part is None else 0), counters)


def _room_for_stats(slot: Slot) -> ops.Stats:
    new = functools.partial(torch.empty, (), device=slot.device)  # no kernels that fill with zeros what is overwritten
    return ops.Stats(new(dtype=widest(slot.device)), new(dtype=torch.int64))


def one_call_each(
    slots: Sequence[Slot], grads: Sequence[Tensor], measure: bool
) -> Iterator[tuple[tuple, Sequence[Slot], Sequence[Tensor]]]:
    """Each call that an add takes: ``(gradients' device, first touch, narrow, divisor, averaged by, ...)``, its slots and its gradients.

    ``measure``: are norms taken? They can be added up over the ranks only for parts that are laid out alike.
    """
    calls: dict[tuple, list[int]] = {}
    for i in range(1 if _agree(slots) else len(slots)):  # where they agree, the first stands for all
        slot, first = slots[i], slots[i].shown is None
        # After normalize_(), parameters that no pass has reached since still hold a mean.
        divisor, layout = None if first else identity(slot.divisor), slot.layout if measure else None
        key = (slot.made_for.device, first, slot.low_precision, divisor, slot.averaged_by, layout, slot.part is None)
        calls.setdefault(key, []).append(i)
    if len(calls) == 1:  # as nearly always
        yield next(iter(calls)), slots, grads
        return
    for key, members in calls.items():
        yield key, [slots[i] for i in members], [grads[i] for i in members]


def _agree(slots: Sequence[Slot]) -> bool:
    """Do they agree in all that the calls differ in, as nearly always?"""
    one, first = slots[0], slots[0].shown is None
    for slot in slots:
        if slot.block is not one.block or slot.divisor is not one.divisor or (slot.shown is None) is not first:
            return False
    return one.part is None
