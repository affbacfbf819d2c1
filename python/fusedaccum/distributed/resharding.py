"""Each rank's share of a checkpoint that as many ranks have saved, or more, or fewer.

Counts, weights and sums of an open window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.checkpoint import plain, window_settings
from ..core.window import COUNTED, Window

if TYPE_CHECKING:
    from ..core.buffers import Slot
    from ..core.proxy import Wrapper
    from ..core.ranks import Alone


def falls_to(here: Alone, saved_rank: int) -> bool:
    """True if the rank at ``here`` continues with what ``saved_rank`` has saved."""
    return saved_rank % here.size == here.rank


def own(opt: Wrapper, header: dict[str, Any]) -> dict[str, Any]:
    """What this rank would have saved itself, except for the tensors."""
    ranks, here, buffers = header["ranks"], opt._accumulation.ranks, opt._sums.buffers
    same = here.size == len(ranks)
    settings = {**ranks[0]["settings"], "rank": here.name}
    if not same:
        # Another number of ranks may need another accum_steps to close the same windows.
        settings["accum_steps"] = window_settings(opt)["accum_steps"]
    places = [s for s in range(len(ranks)) if falls_to(here, s)]
    mine = [ranks[s] for s in places]
    seen = {index for rank in mine for index in rank["divisors"] if index not in rank["unseen"]}
    saved = opt._accumulation.extensions.saved
    extensions = {
        key: ranks[here.rank][key] if same else e.join([rank[key] for rank in ranks], places, here.size)
        for key, e in saved.items()
        if key in ranks[0]
    }
    extensions |= {key: {} for key, e in saved.items() if e.by_parameter}  # its tensors are on their way
    return {
        "format": header["format"],
        "shapes": header["shapes"],
        "settings": settings,
        "index": ranks[0]["index"],
        "window": ranks[here.rank]["window"] if same else window(opt, ranks),
        "micro_batch": None,
        "rejected": ranks[here.rank]["rejected"] if same else [],
        "changed_by_user": any(rank["changed_by_user"] for rank in mine),
        # A rank's sums of squares are of what it held; shards may be laid out differently now.
        "norms": ranks[here.rank]["norms"] if same and not buffers.has_parts else [],
        "unseen": sorted({index for rank in mine for index in rank["unseen"]} - seen),
        **extensions,
        "schedule": ranks[0]["schedule"],
    }


def window(opt: Wrapper, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """This rank's part of an open window that another number of ranks has saved."""
    held = {s: Window(**rank["window"]) for s, rank in enumerate(ranks) if rank["window"] is not None}
    count = sum(theirs.steps(len(ranks)) for theirs in held.values())
    if count == 0:
        return None
    here = opt._accumulation.ranks
    first = next(iter(held.values()))
    schedule = opt.settings.schedule.resumed(ranks[0]["schedule"])
    mine = Window(first.index, schedule.length(first.index), carried=0)
    for s, theirs in held.items():
        if falls_to(here, s):
            for name in (*COUNTED, "dropped"):
                setattr(mine, name, getattr(mine, name) + getattr(theirs, name))
            mine.void = mine.void or theirs.void
    if mine.length is not None:
        each = count // here.size
        if each >= mine.length:
            raise ValueError(
                f"the checkpoint's open window holds {count} micro-batches, but here it closes after {here.size} x "
                f"{mine.length} (ranks x accum_steps); build the wrapper with accum_steps={each + 1} or more"
            )
        mine.carried = each - mine.steps(here.size)
    return plain(mine)


def rescaled(opt: Wrapper, slot: Slot, ranks: list[dict[str, Any]]) -> float:
    """The factor for what ``ranks`` have summed of a parameter's gradients.

    Under ``"none"`` a window's gradient is the mean over the ranks. Replicas hold terms of that
    mean, now taken over another number of ranks; shards hold the mean already.
    """
    if opt.settings.reduction != "none":
        return 1.0
    return (1 if slot.part is not None else opt._accumulation.ranks.size) / (
        1 if slot.index in ranks[0]["shards"] else len(ranks)
    )


def added_up(opt: Wrapper, index: int, rows: dict[int, Tensor], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of ``rows``, by the rank that saved each, as a buffer holds it.

    Returns ``{"sum": sum / divisor, "divisor": divisor}``.
    """
    slot, here = opt._sums.buffers.slots[index], opt._accumulation.ranks
    divisors = {s: ranks[s]["divisors"][index] for s in rows}
    scale = rescaled(opt, slot, ranks)
    # What 16-bit buffers held is saved as a sum. (Checkpoints that do not say were of buffers as
    # they are here.)
    was_narrow = index in ranks[0].get("narrow", [index] if slot.half_precision else [])
    if here.size == len(ranks) and len(rows) == 1 and scale == 1.0 and not (slot.half_precision or was_narrow):
        ((s, row),) = rows.items()
        return {"sum": row, "divisor": divisors[s]}
    total = torch.zeros_like(next(iter(rows.values())), dtype=torch.promote_types(slot.dtype, torch.float32))
    for s, row in rows.items():
        total += row * (scale if was_narrow else scale * float(divisors[s]))
    if not slot.half_precision:
        return {"sum": total, "divisor": 1.0}
    divisor = ranks[here.rank]["divisors"].get(index) if here.size == len(ranks) else None
    divisor = sum(map(float, divisors.values())) if divisor is None else divisor
    return {"sum": total / float(divisor), "divisor": divisor}
