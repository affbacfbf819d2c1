"""``nonfinite=``: windows, or single micro-batches, that hold a NaN or an infinity are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from ..core.buffers import Slot
from ..core.extension import Extension, Instead, Judge
from ..distributed.shards import local_gradient, over_meshes, summed_gradient
from ..engine import without_grad
from ..parts import local_of
from ..scalars import as_tensor, to_device

if TYPE_CHECKING:
    from ..core.apply import Conclusion
    from ..core.sums import Sums


def _report(end: Conclusion) -> None:
    end.report["nonfinite"] = as_tensor(end.window.nonfinite + end.window.dropped)


class SkipWindow(Extension):
    """``"skip_window"``: adds count what is not finite, and the window's norm shows the rest.

    Nothing waits before the window's end.
    """

    wants_norm = True
    counts = True

    def measures(self) -> bool:
        return True

    def closing(self, end: Conclusion) -> None:
        _report(end)

    def normed(self, end: Conclusion, sq_norm: Tensor) -> None:
        bad = to_device(end.window.nonfinite, sq_norm.device) > 0
        end.skip = ~torch.isfinite(sq_norm) | bad | to_device(end.skip, sq_norm.device)

    def may_apply(self, cast: list[Slot]) -> bool:
        """False if a finite FP32 gradient has become infinite in FP16. Waits for the device.

        bf16 has FP32's range, so that nothing becomes infinite in it.
        """
        sums = self.accumulation.sums
        found = count(sums, [grad for slot in cast if (grad := slot.holder.grad) is not None])
        if sums.over_owners is not None:
            found = int(sums.over_owners(torch.tensor(found)))
        return found == 0


class SkipMicroBatch(Judge, Extension):
    """``"skip_micro_batch"``: gradients are held until backward is over, then all added, or none.

    Until the next call, ``p.grad`` of one parameter then shows a gradient that is not finite, and
    that of all others is None: so a GradScaler, which looks there, learns of the overflow, and
    nothing that it or other code does to ``p.grad`` reaches a buffer.
    """

    counts = True

    def __init__(self) -> None:
        # Gradients for which the open micro-batch is rejected, until p.grad shows one of them.
        self._bad: dict[Slot, Tensor] | None = None
        self._hidden: list[tuple[Slot, Tensor | None]] = []  # what p.grad was
        self._instead = Instead.NOTHING

    def pass_begins(self, thread: int | None) -> None:
        accumulation = self.accumulation
        if accumulation.ledger.micro.judged:
            raise RuntimeError(
                f"nonfinite={accumulation.settings.nonfinite!r} must see a whole micro-batch before any of it is "
                "added, but this backward continues one that was added already; group its backward passes: `with "
                "opt.micro_batch(): ...`"
            )

    @without_grad
    def accepts(self, held: list[Tensor], added: list[Slot]) -> bool:
        """Waits for the device."""
        accumulation = self.accumulation
        ranks, slots, micro = accumulation.ranks, accumulation.sums.buffers.slots, accumulation.ledger.micro
        ranks.check_droppable(slots)
        looked_at = [*map(summed_gradient, held), *(slot.buffer for slot in added)]
        found = ranks.of_all_parts(count(accumulation.sums, looked_at))
        found = over_meshes("SUM", found, slots, ranks.size)
        if not found or (float(micro.factor) == 0 and not accumulation.weighs_loss):
            return True
        if added:
            raise RuntimeError(
                f"nonfinite={accumulation.settings.nonfinite!r} met NaN or infinity in a micro-batch that it cannot "
                f"leave out, because the layer of parameter {added[0].name} has added its gradient to "
                f"{added[0].name}.grad itself; use 'skip_window', or have the layer return its gradient"
            )
        return False

    def rejected(self, batches: Sequence[tuple[list[Slot], list[Tensor]]]) -> None:
        pairs = ((slot, local_gradient(grad, slot.param)) for of in batches for slot, grad in zip(*of, strict=True))
        self._bad = {slot: part for slot, part in pairs if not torch.isfinite(part).all()}

    def sums_shown(self) -> None:
        """Hide the sums behind a rejected gradient.

        If it is a shard, it is that of the same parameter on all ranks, whichever rank has the bad
        part, because PyTorch unscales a DTensor by a collective.
        """
        bad, self._bad = self._bad, None
        if bad is None:
            return
        self.accumulation.rejected += [slot.name for slot in bad] or ["a shard on another rank"]
        slots = self.accumulation.sums.buffers.slots
        self._hidden, self._instead = [(slot, slot.param.grad) for slot in slots], Instead.REJECTED
        for slot in slots:
            slot.param.grad = None
        spread = next((slot for slot in slots if slot.part is not None and slot.param.requires_grad), None)
        if spread is not None and spread.part is not None:
            spread.param.grad = spread.part.wrap(torch.full_like(local_of(spread.param.detach()), torch.nan))
        elif bad:
            slot, grad = next(iter(bad.items()))
            slot.param.grad = grad.clone()  # which can be written in place, as p.grad can: not one number, expanded

    def shown_instead(self) -> Instead:
        return self._instead

    def unhide(self) -> None:
        if self._hidden:
            self._instead = Instead.WAS_REJECTED
        for slot, grad in self._hidden:
            slot.param.grad = grad
        self._hidden = []

    def micro_batch_opened(self) -> None:
        self._instead, self._bad = Instead.NOTHING, None  # Ctrl-C may have left the second

    def ended(self, rejected: list[str]) -> None:
        self._instead = Instead.NOTHING

    def buffers_released(self) -> None:
        self._instead = Instead.NOTHING  # a checkpoint may come next

    def closing(self, end: Conclusion) -> None:
        _report(end)


class Raise(SkipMicroBatch):
    """``"raise"``: as ``"skip_micro_batch"``, and ``step()`` raises."""

    def check_shared(self) -> None:
        raise ValueError(
            "nonfinite='raise' would raise on one rank while the others wait for it; use 'skip_micro_batch' or "
            "'skip_window', and look at last_window.nonfinite"
        )

    def ended(self, rejected: list[str]) -> None:
        super().ended(rejected)
        if rejected:
            more = len(rejected) - 5
            names = ", ".join(rejected[:5]) + (f" and {more} more parameters" if more > 0 else "")
            raise FloatingPointError(
                f"the gradient of {names} holds NaN or infinity; the micro-batch was dropped, and training can go on"
            )


def count(sums: Sums, tensors: Sequence[Tensor]) -> int:
    """How many elements are NaN or infinite; waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return sum(int(ops.stats(batch, backend=sums.backend).nonfinite) for batch in by_device.values())
