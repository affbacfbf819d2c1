"""A wrapper's state for ``torch.distributed.checkpoint``, for any number of ranks to read.

All ranks write it: tensors under names that say what they belong to, ``state.<parameter>.<name>``,
``masters.<parameter>`` and, for an open window, ``sums.<parameter>.<rank>``, and one header with
the plain values of all ranks. A shard is part of one tensor that all ranks write. Sums that ranks
hold separately stay separate: so no sum is sent for a checkpoint, the same number of ranks
continues bit for bit, and with another number each rank adds up its share.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core import checkpoint
from ..core.buffers import Slot
from ..core.config import Settings
from ..core.window import Window
from ..older_checkpoints import OLDER, as_now
from ..parts import local_of
from . import resharding
from .shards import is_shard, whole

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

    from ..core.optimizer import AccumulatingOptimizer

HEADER = "fusedaccum"
# What checkpoint.save() returns beside a rank's own plain values and the extensions' tensors.
ELSEWHERE = {"buffers", "shapes", "format"}


class DistributedState:
    """A wrapper's state as a value in the dict of ``dcp.save`` and ``dcp.load``.

    The value holds everything: inner optimizer, open window, master weights.
    ``dcp.save({"opt": DistributedState(opt)}, checkpoint_id=path)``, then
    ``dcp.load({"opt": DistributedState(opt, path)}, checkpoint_id=path)``. Parameters are
    identified by position in ``param_groups``.

    An open window keeps its total over the ranks. When N ranks saved and M load, rank r takes the
    sums and weights of ranks r, r + M, … of those that saved, and counts
    ``(all micro-batches so far) // M``. With N = M everything continues bit-identically.

    Args:
        optimizer: the wrapper.
        load_from: the checkpoint to load, a folder or a ``StorageReader``; None to save.
        key: the value's key in the dict, if the checkpoint holds several wrappers.

    ``state_dict()`` and ``load_state_dict()`` are for ``torch.distributed.checkpoint`` to call, on
    all ranks together. Saving exchanges the plain values, changes nothing, and takes memory for a
    copy of the open window's sums; loading takes memory for what is read.

    Raises:
        TypeError: ``optimizer`` is no wrapper.
        RuntimeError: saved between ``backward()`` and ``step()``, or after ``normalize_()``; loaded
            without ``load_from``.
        ValueError: saved while the ranks are at different places in the window, or with state of
            the optimizer that is in parts but no DTensor of the parameter's shape; loaded from
            another model's checkpoint, or one with an open window that this wrapper cannot
            continue. Nothing has been read into the model or the wrapper then.
    """

    def __init__(
        self,
        optimizer: AccumulatingOptimizer,
        load_from: str | os.PathLike | StorageReader | None = None,
        *,
        key: str | None = None,
    ):
        if not isinstance(getattr(optimizer, "settings", None), Settings):
            raise TypeError(
                f"optimizer must be an AccumulatingOptimizer, got a {type(optimizer).__name__}; wrap it, or save it "
                "with torch.distributed.checkpoint.state_dict"
            )
        if optimizer.settings.shard:
            raise ValueError(
                "DistributedState does not take an optimizer with shard=True, whose state is spread over the ranks; "
                "save every rank's opt.state_dict() with torch.save, or use FSDP2"
            )
        self._opt, self._load_from, self._key = optimizer, load_from, key

    def state_dict(self) -> dict[str, Any]:
        """What to save; with ``load_from``, tensors to be filled from there."""
        return _saved(self._opt) if self._load_from is None else self._to_fill(self._load_from)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what was read into :meth:`state_dict`'s tensors."""
        if self._load_from is None:
            raise RuntimeError(
                "DistributedState(opt) only saves; to load, name the checkpoint, because what it holds depends on "
                "whether a window was open: dcp.load({'opt': fusedaccum.DistributedState(opt, path)}, "
                "checkpoint_id=path)"
            )
        opt, header = self._opt, _header(state_dict[HEADER])
        own, state = resharding.own(opt, header), header["state"]
        rows: dict[int, dict[int, Tensor]] = {}
        for name, value in state_dict.items():
            kind, _, rest = name.partition(".")
            index, _, rest = rest.partition(".")
            if kind == "state":
                state[int(index)][rest] = value
            elif kind == "sums":
                rows.setdefault(int(index), {})[int(rest)] = local_of(value)
            elif kind != HEADER:
                own[kind][int(index)] = value
        own["buffers"] = {index: resharding.added_up(opt, index, of, header["ranks"]) for index, of in rows.items()}
        opt.load_state_dict({"state": state, "param_groups": header["param_groups"], checkpoint.KEY: own})

    def _to_fill(self, source: str | os.PathLike | StorageReader) -> dict[str, Any]:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(source) if isinstance(source, str | os.PathLike) else source
        metadata = reader.read_metadata()
        prefix = self._prefix(metadata)
        placed: dict[str, Any] = {prefix + HEADER: _Unread()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that it reads in a single process, which is intended
            load(placed, storage_reader=reader, no_dist=True)
        header = _header(placed[prefix + HEADER])
        self._check(resharding.own(self._opt, header), header["ranks"])
        of_state = _slots_of_state(self._opt, header["param_groups"])
        result: dict[str, Any] = {HEADER: _Unread()}
        tensors = [key for key, e in self._opt._accumulation.extensions.saved.items() if e.by_parameter]
        for name, stored in metadata.state_dict_metadata.items():
            kind, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and kind in ("state", "sums", *tensors):
                index, _, rest = rest.partition(".")
                slot = of_state[int(index)] if kind == "state" else self._opt._sums.buffers.slots[int(index)]
                if kind == "sums" and not (
                    slot.part is not None or resharding.falls_to(self._opt._accumulation.ranks, int(rest))
                ):
                    continue
                result[name.removeprefix(prefix)] = _room(slot, stored)
        return result

    def _prefix(self, metadata: Metadata) -> str:
        """The prefix of our names in the checkpoint."""
        found = [
            name.removesuffix(HEADER) for name in metadata.state_dict_metadata if f".{name}".endswith("." + HEADER)
        ]
        keys = [prefix.removesuffix(".") for prefix in found]
        if self._key is not None and self._key not in keys:
            raise ValueError(
                f"key={self._key!r} is not a DistributedState in the checkpoint {self._load_from!r}, which has {keys}"
            )
        if self._key is None and len(keys) != 1:
            fix = "choose one: key=..." if keys else "save one with dcp.save({'opt': fusedaccum.DistributedState(opt)})"
            raise ValueError(f"the checkpoint {self._load_from!r} holds {len(keys)} DistributedStates {keys}; {fix}")
        return found[0 if self._key is None else keys.index(self._key)]

    def _check(self, own: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Raises as checkpoint.check() does, on all ranks alike, whatever share each one gets."""
        held = [rank["window"] for rank in ranks if rank["window"] is not None]
        full = next((window for window in held if window["micro_batches"]), None)
        checkpoint.check(self._opt, {**own, "window": full})


class _Unread(str):
    """Stands for the header until it is read.

    Cannot be saved, so that nobody saves tensors still to be filled as a checkpoint.
    """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("DistributedState(opt, load_from) is for dcp.load; save DistributedState(opt)")


# -- saving ----------------------------------------------------------------------------------------


def _saved(opt: AccumulatingOptimizer) -> dict[str, Any]:
    """The tensors that this rank has or has a part of, and the header."""
    state = opt.state_dict()
    own = state[checkpoint.KEY]
    by_parameter = [key for key, e in opt._accumulation.extensions.saved.items() if e.by_parameter]
    mine = {k: v for k, v in own.items() if k not in {*ELSEWHERE, *by_parameter}}
    slots, of_state = opt._sums.buffers.slots, _slots_of_state(opt, state["param_groups"])
    mine["divisors"] = {index: saved["divisor"] for index, saved in own["buffers"].items()}
    mine["shards"] = [slot.index for slot in slots if slot.part is not None]
    mine["narrow"] = [slot.index for slot in slots if slot.half_precision]
    mine["apart"] = [
        f"{name!r} of parameter {of_state[index].name}"
        for index, entry in state["state"].items()
        for name, value in entry.items()
        if _apart(of_state[index].param, value)
    ]
    ranks = [_unpacked(one) for one in opt._accumulation.ranks.all_gather(_packed(mine))]
    number = opt._accumulation.ranks.rank
    _check_together(opt, ranks)
    tensors, plain = dict[str, Tensor](), dict[Any, Any]()
    for index, entry in state["state"].items():
        plain[index] = {k: None if isinstance(v, Tensor) else v for k, v in entry.items()}  # tensors keep their places
        for name, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"state.{index}.{name}"] = value
    tensors |= {f"{key}.{index}": tensor for key in by_parameter for index, tensor in own[key].items()}
    for index, saved in own["buffers"].items():
        # 16-bit buffers hold means, and each rank has its own divisor. As sums in FP32 they make
        # one tensor, and round to the same bits.
        value = saved["sum"].float() * float(saved["divisor"]) if slots[index].half_precision else saved["sum"]
        tensors[f"sums.{index}.{number if slots[index].part is None else 0}"] = value
    header = {
        "format": own["format"],
        "shapes": own["shapes"],
        "state": plain,
        "param_groups": state["param_groups"],
        "ranks": ranks,
    }
    return {HEADER: _packed(header), **tensors}


def _slots_of_state(opt: AccumulatingOptimizer, saved: list[dict[str, Any]]) -> dict[int, Slot]:
    """The slot of each index in the inner optimizer's state dict; ``saved``: its ``param_groups``.

    It counts a parameter that a group lists twice, which has one slot, twice. Raises ValueError if
    the groups are not those of ``opt``.
    """
    here, there = ([len(group["params"]) for group in groups] for groups in (opt.param_groups, saved))
    if here != there:
        raise ValueError(
            f"the checkpoint's param_groups have {there} parameters, and the optimizer's have {here}; build it with "
            "the same groups"
        )
    buffers = opt._sums.buffers
    pairs = zip(saved, opt.param_groups, strict=True)
    return {i: buffers.of[p] for old, new in pairs for i, p in zip(old["params"], new["params"], strict=True)}


def _apart(param: Tensor, value: Any) -> bool:
    """True if a parameter's state is in parts, as far as shapes show, but no DTensor like it."""
    if not is_shard(param) or (is_shard(value) and value.shape == param.shape):
        return False
    here = local_of(param).shape
    return any(is_shard(x) or (isinstance(x, Tensor) and x.shape == here != param.shape) for x in tree_leaves(value))


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    # DCP reads it with weights_only=False itself, and param_groups may hold anything.
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


def _header(packed: bytes) -> dict[str, Any]:
    """The header, in today's format."""
    header = _unpacked(packed)
    ranks = [as_now(rank, header["format"]) for rank in header["ranks"]]
    return {**header, "ranks": ranks, "format": checkpoint.FORMAT if header["format"] in OLDER else header["format"]}


def _check_together(opt: AccumulatingOptimizer, ranks: list[dict[str, Any]]) -> None:
    """Raises, on all ranks, if what they hold is not one window."""
    if any(rank["micro_batch"] is not None for rank in ranks):
        raise RuntimeError("saved between backward() and step(), inside a micro-batch; call opt.step() first")
    apart = [state for rank in ranks for state in rank["apart"]]
    if apart:
        raise ValueError(
            f"the optimizer keeps its state {apart[0]} in parts, but not as a DTensor of the parameter's shape, so it "
            "cannot be resharded; use torch.save, one file per rank"
        )
    windows = [None if rank["window"] is None else Window(**rank["window"]) for rank in ranks]
    held = [window for window in windows if window is not None]
    if any(window.length is not None for window in held):
        steps = [0 if window is None else window.steps(len(ranks)) for window in windows]
        if len(set(steps)) > 1:
            raise ValueError(
                f"the ranks have accumulated {steps} micro-batches in the open window; save on all ranks after the "
                "same micro-batch"
            )
    for key, extension in opt._accumulation.extensions.saved.items():
        if not extension.by_parameter:  # whose entries are not here
            extension.check_together([rank[key] for rank in ranks if rank["window"] is not None])


# -- loading ---------------------------------------------------------------------------------------


def _room(slot: Slot, stored: Any) -> Any:
    """Memory for a stored tensor of this parameter, laid out as the parameter is here."""
    like, dtype = local_of(slot.param.detach()), stored.properties.dtype
    if slot.part is not None and stored.size == slot.param.shape:
        return whole(torch.empty_like(like, dtype=dtype), slot.param)
    if stored.size == like.shape:  # fused optimizers go by the strides, too
        return torch.empty_like(like, dtype=dtype, device="cpu")
    return torch.empty(stored.size, dtype=dtype)


# -- PyTorch's own functions -----------------------------------------------------------------------


def refuse_torchs_functions(call: str) -> None:
    """Raises RuntimeError within get_optimizer_state_dict() and similar functions.

    They would step the wrapper and lose the window.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(
                f"torch.distributed.checkpoint.state_dict called {call} of an AccumulatingOptimizer: its functions "
                "step an optimizer to create its state, and know nothing about windows and master weights; use "
                "get_model_state_dict(model) for the model, and fusedaccum.DistributedState(opt) for the optimizer"
            )
        frame = frame.f_back  # type: ignore[assignment]
