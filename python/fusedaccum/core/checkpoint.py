"""The wrapper's part of a checkpoint: the open window, and an entry for each extension."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..engine import without_grad
from ..older_checkpoints import as_now
from ..parts import local_of
from ..scalars import copied
from ..warn import warn
from . import adding
from .buffers import Slot
from .window import MicroBatch, MicroBatchState, Window

if TYPE_CHECKING:
    from .proxy import Wrapper

KEY = "fusedaccum"
FORMAT = 6
UNSAVED = {"counts", "in_place", "nested", "repeatable", "partial"}  # what lasts no longer than a pass


def save(opt: Wrapper) -> dict[str, Any]:
    """All it takes to continue bit-identically: tensors, plain values; parameters by position."""
    sums, ledger, accumulation = opt._sums, opt._ledger, opt._accumulation
    ranks, adaptive = accumulation.ranks, opt.settings.schedule.adaptive
    if opt._closing.broke_off:
        warn(
            "the last step() was broken off by an exception after it had closed its window, which no checkpoint or "
            "copy holds; call step() again first, which applies it, or opt.reset() to drop it"
        )
    accumulation.drop_taken_away()
    ranks.undo_reduce()
    if ledger.micro is not None:
        adding.count_nonfinite(accumulation)
    gathered = sums.slots_with_grad() if ledger.window is not None else []
    window = plain(ledger.window) if ledger.window is not None else None
    micro = plain(ledger.micro) if ledger.micro is not None and not accumulation.idle_is_open else None
    return {
        "format": FORMAT,
        "shapes": [tuple(slot.param.shape) for slot in sums.buffers.slots],
        "settings": window_settings(opt),
        "index": ledger.index,
        "window": window,
        "micro_batch": micro,
        "rejected": list(accumulation.rejected),
        "norms": [] if window is None else sums.norms.save(),
        "buffers": {slot.index: _saved(slot, sums.saved(slot)) for slot in gathered},
        "changed_by_user": sums.changed_by_user,
        "unseen": sorted(slot.index for slot in ranks.shown_for_others),
        **{key: e.save() for key, e in accumulation.extensions.saved.items()},
        "schedule": None if adaptive is None else adaptive.state_dict(),
    }


def window_settings(opt: Wrapper) -> dict[str, Any]:
    """The settings that must be the same for an open window to continue, as plain values."""
    settings = opt.settings
    steps = settings.schedule.accum_steps
    return {
        "reduction": settings.reduction,
        "accum_steps": "callable" if callable(steps) else steps,
        "window_weight": settings.schedule.window_weight,
        "buffer_dtype": str(settings.buffer_dtype),
        "rank": opt._accumulation.ranks.name,
        **{name: value for more in opt._accumulation.extensions.window_settings for name, value in more().items()},
    }


def plain(record: Window | MicroBatch) -> dict[str, Any]:
    """Copies of what a record holds, as tensors and plain values."""
    return {k: v.name if isinstance(v, Enum) else copied(v) for k, v in vars(record).items() if k not in UNSAVED}


def _saved(slot: Slot, kept: Tensor) -> dict[str, Any]:
    return {"sum": kept if slot.part is None else slot.part.wrap(kept), "divisor": slot.divisor}


def check(opt: Wrapper, own: dict[str, Any]) -> None:
    """Raises ValueError if ``own`` was saved by a wrapper whose window this one cannot continue."""
    own = as_now(own, own.get("format"))
    if own.get("format") != FORMAT:
        raise ValueError(
            f"the checkpoint's {KEY!r} part has format {own.get('format')!r}, and this version of fusedaccum reads "
            f"{FORMAT}; use the version that wrote it"
        )
    slots = opt._sums.buffers.slots
    if len(own["shapes"]) != len(slots):
        raise ValueError(
            f"the checkpoint has {len(own['shapes'])} parameters and the optimizer has {len(slots)}; is it another "
            "model's?"
        )
    for slot, shape in zip(slots, own["shapes"], strict=True):
        if tuple(shape) != tuple(slot.param.shape):
            raise ValueError(
                f"the checkpoint has shape {tuple(shape)} for parameter {slot.name}, which is "
                f"{tuple(slot.param.shape)}; is it another model's?"
            )
    for key, extension in opt._accumulation.extensions.saved.items():
        if key in own:
            extension.check(own[key])
    mine = window_settings(opt)
    for check_settings in opt._accumulation.extensions.check_settings:
        check_settings(own["settings"])
    if own["micro_batch"] is None and (own["window"] is None or Window(**own["window"]).empty):
        return
    for name in {**mine, **own["settings"]}:
        theirs, here = own["settings"].get(name, "not set"), mine.get(name, "not set")
        if name == "rank" and theirs != here:
            raise ValueError(
                f"the checkpoint holds what rank {theirs} has accumulated in an open window, and this is rank "
                f"{here} (None: without process_group); load on every rank what it saved itself, or save at a "
                "window's end"
            )
        if theirs != here:
            fix = f"build it with {name}={theirs}" if name in own["settings"] else f"leave {name} out"
            raise ValueError(
                f"the checkpoint was taken inside a window with {name}={theirs}, and this wrapper has "
                f"{name}={here}; {fix}, or save at a window's end (flush() first)"
            )


@without_grad
def load(opt: Wrapper, own: dict[str, Any]) -> None:
    """Load a checked checkpoint; the window must be empty."""
    own = as_now(own, own.get("format"))
    sums, slots = opt._sums, opt._sums.buffers.slots
    window, micro, adaptive = own["window"], own["micro_batch"], opt.settings.schedule.adaptive
    if adaptive is not None and own["schedule"] is not None:
        adaptive.load_state_dict(own["schedule"])
    opt._ledger.restore(
        own["index"],
        None if window is None else Window(**window),
        None if micro is None else MicroBatch(**{**micro, "state": MicroBatchState[micro["state"]]}),
    )
    if opt._ledger.window is not None and not opt._ledger.is_open:
        # It holds nothing (all were dropped), so check() has let another accum_steps pass.
        opt._ledger.window.length = opt.settings.schedule.length(own["index"])
    opt._accumulation.rejected = list(own["rejected"])
    try:
        for index, saved in own["buffers"].items():
            sums.restore(slots[index], local_of(saved["sum"]), saved["divisor"])
        sums.changed_by_user = own["changed_by_user"]
        sums.norms.load(own["norms"], slots)
        opt._accumulation.ranks.shown_for_others.update(slots[index] for index in own["unseen"])
        for key, extension in opt._accumulation.extensions.saved.items():
            if key in own:
                extension.load(own[key])
            else:
                extension.started_anew()
    except BaseException:  # for lack of memory, say: a part of a window must not be stepped
        opt.reset()
        raise
