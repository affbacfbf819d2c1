"""Parameters that are removed, replaced, reordered, moved or cast after they were wrapped."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Parameter

from ..core.buffers import Form
from ..core.extension import Extension
from ..core.parameters import hook, unhook


class ChangingParameters(Extension):
    """Follows ``opt.param_groups``; tells if ``load_state_dict()`` must build the wrapper again."""

    def outdated(self) -> bool:
        """True if parameters were moved or cast."""
        slots = self.accumulation.sums.buffers.slots
        moved = any(slot.made_for[:2] != Form.of(slot.param)[:2] for slot in slots)
        return moved or bool(self.accumulation.collector.unhooked)

    def rearrange(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """Follow an assignment of these parameters.

        Raises ValueError if ranks' parameters differ, RuntimeError if ranks share an open window.
        """
        accumulation = self.accumulation
        sums, buffers = accumulation.sums, accumulation.sums.buffers
        if accumulation.ledger.is_open and not accumulation.ranks.alone:
            raise RuntimeError(
                "inside a window that ranks share, an assignment to opt.param_groups can only add parameters after the "
                "others; this one removes, replaces or reorders some: assign when a step(), flush() or reset() has "
                "closed the window on all ranks"
            )
        places = {slot: slot.index for slot in buffers.slots}
        slots = [buffers.of.get(p) or buffers.made(name, p) for name, p in parameters]
        for slot, (name, _) in zip(slots, parameters, strict=True):
            slot.name = name
        buffers.replace(slots)
        try:
            for come in accumulation.extensions.parameters_come:
                come(slots, True)
        except Exception:
            buffers.replace(list(places))
            raise
        for moved in accumulation.extensions.parameters_moved:
            moved({places[slot]: slot.index for slot in slots if slot in places})
        gone = [slot for slot in places if slot.param not in buffers.of]
        for slot in gone:
            sums.changed_by_user = True
            if slot.holder.grad is slot.shown:
                slot.show(None)
        unhook(accumulation, gone)
        if not accumulation.ledger.is_open:
            sums.begin()
            buffers.free()
        hook(accumulation, [slot for slot in slots if slot not in places])
