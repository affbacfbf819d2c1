"""Checkpoints that earlier versions have written, as this one writes them."""

from __future__ import annotations

from typing import Any

OLDER = (3, 4, 5)  # formats
UNIT = {"unit", "unit_lost", "overflowed"}
LOSSES = {"loss", "raw_loss", "known_loss", "losses", "unrecorded", "loss_by_backward", "told"}
SMALL = {"sq_norm": "small_sq_norm", "weight": "small_weight", "square": "small_square"}


def as_now(own: dict[str, Any], written_as: int | None) -> dict[str, Any]:
    """``own``, in today's format. What is of no known format stays as it is, to be refused.

    Format 5 kept what random rounding needs beside the wrapper's own; format 4 the state of the
    micro-batch as two booleans; format 3 also what extensions need among the numbers of the window
    and the micro-batch.
    """
    if written_as not in OLDER:
        return own
    for format, following in ((3, _as_4), (4, _as_5), (5, _as_6)):
        own = following(own) if written_as <= format else own
    return own


def _as_6(own: dict[str, Any]) -> dict[str, Any]:
    micro, rounding = own["micro_batch"], {name: own[name] for name in ("seed", "draws")}
    return {
        **_without(own, {*rounding}),
        "format": 6,
        "micro_batch": micro and _without(micro, {"divisor"}),
        **({} if rounding["seed"] is None else {"rounding": rounding}),
    }


def _as_5(own: dict[str, Any]) -> dict[str, Any]:
    micro = own["micro_batch"]
    return {
        **own,
        "format": 5,
        "micro_batch": micro and {**_without(micro, {"bad", "judged"}), "state": _state(micro)},
    }


def _as_4(own: dict[str, Any]) -> dict[str, Any]:
    window, micro = own["window"], own["micro_batch"]
    total, open_loss = _loss(window), _loss(micro)
    return {
        **{name: value for name, value in own.items() if name != "noise"},
        "format": 4,
        "window": window and {**_without(window, UNIT | LOSSES | set(SMALL.values())), "void": window["overflowed"]},
        "micro_batch": micro and _without(micro, LOSSES | {"attempt"}),
        "losses": {
            "sum": total or {"known": 0.0, "raw": 0.0},
            "count": 0 if window is None else window["losses"],
            "unrecorded": None if window is None else window["unrecorded"],
            "micro_batch": open_loss,
            "by_caller": open_loss is not None and not micro["loss_by_backward"],
            "passes": 0 if micro is None else micro["told"],
        },
        "loss_scale": {
            "scale": own["loss_scale"],
            "unit": None if window is None else window["unit"],
            "unit_lost": window is not None and window["unit_lost"],
        },
        "noise_scale": {"averages": own["noise"], **_small(window)},
    }


def _state(micro: dict[str, Any]) -> str:
    return "REJECTED" if micro["bad"] else "ADDED" if micro["judged"] else "OPEN"


def _loss(record: dict[str, Any] | None) -> dict[str, Any] | None:
    if record is None or record["loss"] is None:
        return None
    total, raw = record["loss"], record["raw_loss"]
    return {"known": record.get("known_loss", total - raw), "raw": raw}  # the first versions kept the total alone


def _small(window: dict[str, Any] | None) -> dict[str, Any]:
    if window is None or window["small_sq_norm"] is None:
        return {"small": None, "assumed": False}
    assumed = window["small_weight"] is None
    small = {name: window[old] for name, old in SMALL.items()}
    return {"small": {**small, "weight": 1.0, "square": 1.0} if assumed else small, "assumed": assumed}


def _without(record: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}
