"""Whether an op can work on its arguments; if not, an error names argument, value and fix.

``csrc/predicate.h`` has the same test in C++, which runs where the native module is built and
checks thousands of tensors in microseconds. These functions run where it is missing, and whenever
it says no, to say why.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..scalars import widest
from .memory import address, is_flat_pair, is_plain, missing_storage, overlaps_itself, share_memory, span

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOW_DTYPES = (torch.int8, torch.int16)
BESIDE_LOW = (torch.bfloat16, torch.float32)  # of the other list


@dataclass(frozen=True)
class Stats:
    """What an op measured: device tensors, so that reading them is the only wait.

    Attributes:
        sq_norm: sum of squares of all elements of the output list, a 0-d float64 tensor (float32 on
            Apple's GPUs).
        nonfinite: number of elements that are NaN or infinite, in the output list or, for
            ``accumulate_``, in ``grad * scale``; a 0-d int64 tensor.
    """

    sq_norm: Tensor
    nonfinite: Tensor

    @staticmethod
    def empty(device: torch.device | str | None = None) -> Stats:
        """New ones for ``stats=``, both zero."""
        nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        return Stats(torch.zeros((), dtype=widest(nonfinite.device), device=nonfinite.device), nonfinite)


@dataclass(frozen=True)
class StochasticRounding:
    """Round 16-bit outputs up or down at random, with the probabilities that make the mean right.

    Element e (in memory order) of tensor k uses the 16-bit number ``counters[k] + e`` of
    Philox4x32-10 under ``seed``: calls that share neither seed nor stretches of counters
    are independent.

    Attributes:
        seed: 64-bit key.
        counters: for every tensor of the call, the index of its first random number, modulo 2**64.
    """

    seed: int
    counters: Sequence[int]


class Layout(IntEnum):
    """What the predicate says about two lists."""

    FLAT = 0  # both tensors of every pair fill one stretch of memory, in the same order: a kernel can run
    STRIDED = 1  # fine, once the other tensors have been copied into that form
    REFUSED = 2  # not acceptable


def check_lists(
    lists: Mapping[str, Any], written: bool = True, in_memory: bool = True, low: Any = None, of: str = ""
) -> Layout:
    """Raise for lists that no kernel can take; else say whether all pairs are flat.

    Args:
        lists: the op's one or two lists by name; ``written`` says whether the first is its output.
        in_memory: False for tensors of a trace, which have no memory: then it is not checked, and
            no pair counts as flat.
        low: the low parts of the list ``of``, or None. They are written if that list is.
    """
    for name, tensors in lists.items():
        check_is_list(name, tensors)
    (outs_name, outs), (ins_name, ins) = (*lists.items(), ("", None))[:2]
    if ins is not None and len(outs) != len(ins):
        raise ValueError(
            f"{outs_name} and {ins_name} must have the same length, but have {len(outs)} and {len(ins)} tensors; "
            f"give every tensor of {outs_name} its partner in {ins_name}"
        )
    if low is not None:
        check_low(lists, low, of)
    elif in_memory and _are_ordinary(outs, ins, written):
        return Layout.FLAT
    parts = {} if low is None else {"low": low}
    everything = [(name, k, x) for name, tensors in {**lists, **parts}.items() for k, x in enumerate(tensors)]
    for name, k, x in everything:
        _check_tensor(f"{name}[{k}]", x, in_memory, LOW_DTYPES if name == "low" else DTYPES)
    for name, k, x in everything:
        if x.device != outs[0].device:
            raise ValueError(
                f"{name}[{k}] is on {x.device} but {outs_name}[0] is on {outs[0].device}; "
                "all tensors of a call must be on one device: move them, or make one call per device"
            )
    for name, k, x in everything:
        if x.shape != outs[k].shape:
            raise ValueError(
                f"{name}[{k}] has shape {tuple(x.shape)} but {outs_name}[{k}] has {tuple(outs[k].shape)}; "
                "shapes must be equal (no broadcasting)"
            )
    writes = (outs_name, "low") if of == outs_name else (outs_name,)
    in_place = low is not None and of == ins_name
    if written:
        for name, k, x in everything:
            if name in writes:
                _check_written(f"{name}[{k}]", x)
    if not in_memory:
        return Layout.STRIDED
    if written:
        _check_overlaps([(address(x), name in writes, name, k, x) for name, k, x in everything if x.numel()], in_place)
    return Layout.FLAT if all(is_flat_pair(outs[k], x) for _, k, x in everything) else Layout.STRIDED


def _are_ordinary(outs: Sequence[Any], ins: Sequence[Any] | None, written: bool) -> bool:
    """True if the lists are as they nearly always are, and FLAT.

    All tensors are asked one question, then all the next, which takes less than half the time of
    all that :func:`check_lists` asks each of them. Where it is False, they may still be fine:
    inputs that share memory, for example.
    """
    tensors = [*outs, *(ins or ())]
    pairs = list(zip(outs, outs if ins is None else ins, strict=True))
    return (
        all(issubclass(kind, Tensor) for kind in {type(x) for x in tensors})
        and all(map(is_plain, tensors))
        and {x.layout for x in tensors} == {torch.strided}
        and {x.dtype for x in tensors} <= {*DTYPES}
        and {x.device for x in tensors} == {outs[0].device}
        and not outs[0].is_meta
        and not any(map(Tensor._is_zerotensor, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and all(out.shape == x.shape for out, x in pairs)
        and all((out.is_contiguous() and x.is_contiguous()) or is_flat_pair(out, x) for out, x in pairs)
        and all(x.storage_offset() * x.itemsize + x.nbytes <= x.untyped_storage().nbytes() for x in tensors)
        and not (written and (any(map(Tensor.is_inference, outs)) or _meet(tensors)))
    )


def _meet(tensors: Sequence[Tensor]) -> bool:
    """True if one's stretch of memory begins before another's, or an equal one's, has ended."""
    stretches = sorted((address(x), x.nbytes) for x in tensors)
    return any(begin + size > following for (begin, size), (following, _) in itertools.pairwise(stretches))


def check_is_list(name: str, value: Any) -> None:
    """Raises TypeError for anything but a list or tuple."""
    if not isinstance(value, (list, tuple)):
        fix = f"; write [{name}]" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be a list or tuple of tensors, not {type(value).__name__}{fix}")


def check_is_tensor(where: str, x: Any) -> None:
    """Raises TypeError for anything else."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{where} must be a tensor, not {type(x).__name__} ({x!r}); leave out what has no gradient")


def device_of(name: str, tensors: Any) -> torch.device | None:
    """The device of a list's first tensor; None for an empty list.

    Raises if it has none; :func:`check_lists` checks the rest.
    """
    check_is_list(name, tensors)
    if not tensors:
        return None
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta:
        _check_tensor(f"{name}[0]", first, in_memory=True)
    return first.device


def check_low(lists: Mapping[str, Any], low: Any, of: str) -> None:
    """Raises TypeError or ValueError unless these can be low parts of ``of``, in any memory."""
    check_is_list("low", low)
    if len(low) != len(lists[of]):
        raise ValueError(
            f"{of} and low must have the same length, but have {len(lists[of])} and {len(low)} tensors; "
            f"give every tensor of {of} its low part"
        )
    for k, x in enumerate(low):
        check_is_tensor(f"low[{k}]", x)
        if x.dtype not in LOW_DTYPES:
            raise TypeError(
                f"low[{k}] has dtype {x.dtype}; low parts are torch.int8 (for numbers of 24 bits) or torch.int16 (for "
                "FP32 numbers): make them with torch.zeros_like(x, dtype=torch.int8)"
            )
        if x.dtype != low[0].dtype:
            raise TypeError(f"low[{k}] has dtype {x.dtype} but low[0] has {low[0].dtype}; make one call for each dtype")
    for name, tensors in lists.items():
        for k, x in enumerate(tensors):
            check_is_tensor(f"{name}[{k}]", x)
            if name == of and x.dtype != torch.bfloat16:
                why = ", because FP16 has not FP32's range" if x.dtype == torch.float16 else ""
                raise TypeError(
                    f"{name}[{k}] has dtype {x.dtype}; with low= it must be torch.bfloat16{why}: convert it, or pass "
                    "low=None"
                )
            if name != of and x.dtype not in BESIDE_LOW:
                raise TypeError(
                    f"{name}[{k}] has dtype {x.dtype}; with low= it must be {' or '.join(map(str, BESIDE_LOW))}: "
                    "convert it first"
                )


def _check_tensor(where: str, x: Any, in_memory: bool, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    check_is_tensor(where, x)
    if in_memory and not is_plain(x):
        raise TypeError(
            f"{where} is a {type(x).__name__}, which has no memory of its own; pass the plain tensors inside it (such "
            "as x.to_local())"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{where} has layout {x.layout}; only dense tensors can be used: call .to_dense() on it")
    if x.dtype not in dtypes:
        raise TypeError(f"{where} has dtype {x.dtype}; supported are {', '.join(map(str, dtypes))}: convert it first")
    if in_memory and (x.device.type == "meta" or missing_storage(x)):
        raise ValueError(f"{where} has no memory behind it (meta tensor, or storage freed); materialize it first")


def _check_written(where: str, x: Tensor) -> None:
    if x._is_zerotensor():
        raise ValueError(f"{where} has no memory behind it (it is autograd's zero tensor); pass a clone() of it")
    if overlaps_itself(x):
        raise ValueError(
            f"{where} overlaps itself (shape {tuple(x.shape)}, strides {x.stride()}), as an expanded tensor does; pass "
            "x.contiguous()"
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{where} is an inference tensor, which must not be written outside of torch.inference_mode(); pass a "
            "clone() of it"
        )


# Where a tensor begins, whether it is written, its list and place there.
_Place = tuple[int, bool, str, int, Tensor]


def _check_overlaps(places: list[_Place], in_place: bool) -> None:
    """Raises ValueError if a tensor that is written shares memory with any other argument.

    With ``in_place``, an output may be the very memory of its own input: both are BF16.
    """
    reaching: list[_Place] = []  # those that begin before a place and end within or after it
    for place in sorted(places, key=lambda place: place[0]):
        begin, written, _, _, x = place
        reaching = [other for other in reaching if begin < other[0] + span(other[4]) * other[4].element_size()]
        for other in reaching:
            if (written or other[1]) and share_memory(x, other[4]) and not (in_place and _is_one(place, other)):
                (_, _, first, i, _), (_, both, name, j, _) = sorted(
                    (place, other), key=lambda p: (not p[1], p[3], p[2] == "low")
                )
                where = f"{name}[{j}]"
                fix = "list every tensor once, with memory of its own" if both else f"pass a clone() as {where}"
                raise ValueError(f"{first}[{i}] and {where} share memory, and {first}[{i}] is written; {fix}")
        reaching.append(place)


def _is_one(a: _Place, b: _Place) -> bool:
    (at, _, _, i, x), (there, _, _, j, y) = a, b
    return at == there and i == j and x.dtype == y.dtype and x.stride() == y.stride()


# -- the other arguments ---------------------------------------------------------------------------


def check_scalar(name: str, value: Any, device: torch.device | None) -> float | Tensor:
    """A Python (or numpy) number as a float, or a 0-d tensor as it is."""
    if type(value) is float:  # nearly always; the rest costs half a microsecond
        return value
    if not isinstance(value, Tensor):
        return check_number(name, value)
    check_scalar_tensor(name, value, device)
    value = value.detach().reshape(()).resolve_neg()
    return value.item() if value.device.type == "cpu" else value


def check_scalar_tensor(name: str, value: Tensor, device: torch.device | None) -> None:
    """Raises TypeError or ValueError for a tensor that is not one real number, or out of reach."""
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a tensor of one element, but has shape {tuple(value.shape)}; a call has one "
            f"{name}"
        )
    if value.is_complex():
        raise TypeError(f"{name} must be real, but is a {value.dtype} tensor; pass its real part")
    if device is not None and value.device.type != "cpu" and value.device != device:
        raise ValueError(
            f"{name} is on {value.device} but the tensors are on {device}; move it there, or pass a number"
        )


def check_number(name: str, value: Any) -> float:
    """A Python (or numpy) number as a float."""
    if not isinstance(value, Real):  # numpy's scalars are registered as such
        raise TypeError(f"{name} must be a real number or a 0-d tensor, not {type(value).__name__} ({value!r})")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is out of range for a float; pass a number that a float can hold") from None


def check_stats(stats: Any, device: torch.device | None) -> None:
    if stats is None:
        return
    for name in ("sq_norm", "nonfinite"):
        x = getattr(stats, name, None)
        if not isinstance(x, Tensor):
            raise TypeError(
                f"stats must be a fusedaccum.ops.Stats, not {type(stats).__name__} ({stats!r}); make one with "
                "Stats.empty(device)"
            )
        dtype = widest(x.device) if name == "sq_norm" else torch.int64
        if x.dtype != dtype or x.dim() != 0:
            raise TypeError(
                f"stats.{name} must be a 0-d {dtype} tensor, not {x.dim()}-d {x.dtype}; make one with "
                "Stats.empty(device)"
            )
        if device is not None and x.device != device:
            raise ValueError(
                f"stats.{name} is on {x.device} but the tensors are on {device}; make it with "
                f"Stats.empty({str(device)!r})"
            )


def check_rounding(rounding: Any, count: int, low: Any = None) -> None:
    if low is not None:
        raise ValueError(
            f"rounding is {rounding!r}, but numbers with low parts are rounded to nearest even; pass rounding=None, or "
            "low=None"
        )
    seed, counters = getattr(rounding, "seed", None), getattr(rounding, "counters", None)
    if seed is None or counters is None:
        raise TypeError(
            f"rounding must be None (nearest) or a fusedaccum.ops.StochasticRounding(seed, counters), not {rounding!r}"
        )
    if len(counters) != count:
        raise ValueError(f"rounding.counters has {len(counters)} entries for {count} buffers; give one per buffer")
    for name, value in (("seed", seed), *((f"counters[{k}]", c) for k, c in enumerate(counters))):
        if not isinstance(value, int):
            raise TypeError(f"rounding.{name} must be an int, not {type(value).__name__} ({value!r})")
        if not 0 <= value < 1 << 64:
            raise ValueError(f"rounding.{name} is {value}, which does not fit into 64 bits; take it modulo 2**64")
