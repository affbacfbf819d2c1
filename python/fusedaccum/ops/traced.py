"""The ops as a trace holds them: ``torch.ops.fusedaccum``.

torch.compile, torch.export and dispatch modes know how to record these. The schemas say what is
written, so that a compiler keeps the order of writes and reads. On real tensors, PyTorch runs such
an op by :mod:`fusedaccum.ops.eager`; on those of a trace, it checks everything that can be checked
without memory. An overload, ``.low``, is for calls with low parts, so that recorded calls without
them stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel, register_fake

from ..scalars import Scalar, widest
from . import arguments, backends, eager
from .arguments import Stats, StochasticRounding

_WRAP = 1 << 64
# The compiler of older versions counts a tensor's offset within its storage twice
# (https://github.com/pytorch/pytorch/issues/175325).
_OFFSETS_GO_WRONG = torch.__version__ < "2.13"  # a TorchVersion, which compares numbers
_LIBRARY = Library("fusedaccum", "DEF")  # kept, because its ops are unregistered when it is deleted


# -- what the public functions call instead of running an op ---------------------------------------
#
# It puts their arguments into the form of a schema.


def accumulate_(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    scale: Scalar,
    overwrite: bool,
    decay: Scalar,
    rounding: StochasticRounding | None,
    low: Sequence[Tensor] | None,
    stats: Stats | None,
    backend: str | None,
) -> None:
    _check_tensors("buffers", buffers)
    _check_tensors("grads", grads)
    _check_low({"buffers": buffers, "grads": grads}, low, "buffers")
    seed, counters = None, []
    if rounding is not None:
        arguments.check_rounding(rounding, len(buffers), low)
        seed, counters = _signed(rounding.seed), [_signed(counter) for counter in rounding.counters]
    factors = _recorded("scale", scale, buffers), _recorded("decay", decay, buffers)
    _call("accumulate_", low, buffers, grads, *factors, overwrite, seed, counters, _parts(stats, buffers), backend)


def scale_(
    tensors: Sequence[Tensor], scale: Scalar, low: Sequence[Tensor] | None, stats: Stats | None, backend: str | None
) -> None:
    _check_tensors("tensors", tensors)
    _check_low({"tensors": tensors}, low, "tensors")
    _call("scale_", low, tensors, _recorded("scale", scale, tensors), _parts(stats, tensors), backend)


def cast_(
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    scale: Scalar,
    low: Sequence[Tensor] | None,
    stats: Stats | None,
    backend: str | None,
) -> None:
    _check_tensors("outs", outs)
    _check_tensors("ins", ins)
    _check_low({"outs": outs, "ins": ins}, low, "ins")
    _call("cast_", low, outs, ins, _recorded("scale", scale, outs), _parts(stats, outs), backend)


def stats(tensors: Sequence[Tensor], low: Sequence[Tensor] | None, backend: str | None) -> Stats:
    _check_tensors("tensors", tensors)
    _check_low({"tensors": tensors}, low, "tensors")
    return Stats(*_call("stats", low, tensors, backend))


def _call(op: str, low: Sequence[Tensor] | None, *others: Any) -> Any:
    overloads = getattr(torch.ops.fusedaccum, op)
    return overloads.default(*others) if low is None else overloads.low(*others, low)


def _check_tensors(name: str, tensors: Any) -> None:
    arguments.check_is_list(name, tensors)
    for k, x in enumerate(tensors):
        arguments.check_is_tensor(f"{name}[{k}]", x)


def _check_low(lists: dict[str, Any], low: Any, of: str) -> None:
    if low is not None:
        arguments.check_low(lists, low, of)


def _device(tensors: Sequence[Tensor]) -> torch.device | None:
    return tensors[0].device if tensors else None


def _recorded(name: str, value: Scalar, tensors: Sequence[Tensor]) -> Tensor:
    """A factor as a tensor.

    A number multiplies a tensor of 1, which a compiler records for any number; with other ways to
    make a tensor of it, it recompiles for every value. The result is on the tensors' device,
    because CUDA graphs take nothing from the CPU.
    """
    if isinstance(value, Tensor):
        return value
    device = _device(tensors)
    dtype = torch.float64 if device is None else widest(device)
    return torch.ones((), dtype=dtype, device=device) * arguments.check_number(name, value)


def _parts(stats: Stats | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """``stats`` as the schemas have it: a list of its two tensors, or of none.

    Modes that look at what is written (PyTorch's own allow_mutation_on_saved_tensors) expect a
    tensor or a list there, and no None.
    """
    if stats is None:
        return []
    arguments.check_stats(stats, _device(tensors))
    return [stats.sq_norm, stats.nonfinite]


def _signed(number: int) -> int:
    """An unsigned number of 64 bits as a schema's int, which is signed."""
    return number - _WRAP if number >= _WRAP // 2 else number


# -- on real tensors, and on those of a trace ------------------------------------------------------


def _define(op: str, signature: str, low: str, run: Callable[..., Any], trace: Callable[..., Any]) -> None:
    """Both overloads: with a last argument for the low parts, and without."""
    taken, _, returned = signature.partition(" -> ")
    for name, arguments_of in ((op, taken), (f"{op}.low", f"{taken}, {low}")):
        # The order of elements in memory decides which random number each gets, and in what order
        # squares are added.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        _LIBRARY.define(f"{name}({arguments_of}) -> {returned}", tags=tags)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, fallthrough_kernel, "Autograd")  # gradients are not tracked
        register_fake(f"fusedaccum::{name}", trace, lib=_LIBRARY)


def _check_traced(
    op: str,
    backend: str | None,
    factors: dict[str, Tensor],
    lists: dict[str, list[Tensor]],
    low: list[Tensor] | None,
    of: str,
) -> None:
    written = op != "stats"
    arguments.check_lists(lists, written, in_memory=False, low=low, of=of)
    outs_name, outs = next(iter(lists.items()))
    if written and _OFFSETS_GO_WRONG and torch._guards.TracingContext.try_get() is not None:  # torch.compile is at work
        _refuse_offsets(outs_name, outs)
    device = _device(outs)
    backends.select(backend, device, op)
    for name, value in factors.items():
        arguments.check_scalar_tensor(name, value, device)


def _refuse_offsets(name: str, tensors: Sequence[Tensor]) -> None:
    for k, x in enumerate(tensors):
        if x.storage_offset() != 0:
            raise RuntimeError(
                f"{name}[{k}] is a view that begins inside its storage, and torch {torch.__version__} compiles writes "
                "to such a view incorrectly; use torch 2.13 or newer, or keep this call out of the compiled function"
            )


def _joined(stats: list[Tensor]) -> Stats | None:
    return Stats(*stats) if stats else None


def _run_accumulate_(
    buffers: list[Tensor],
    grads: list[Tensor],
    scale: Tensor,
    decay: Tensor,
    overwrite: bool,
    seed: int | None,
    counters: list[int],
    stats: list[Tensor],
    backend: str | None,
    low: list[Tensor] | None = None,
) -> None:
    rounding = None if seed is None else StochasticRounding(seed % _WRAP, [counter % _WRAP for counter in counters])
    eager.accumulate_(buffers, grads, scale, overwrite, decay, rounding, low, _joined(stats), backend)


def _trace_accumulate_(
    buffers: list[Tensor],
    grads: list[Tensor],
    scale: Tensor,
    decay: Tensor,
    overwrite: bool,
    seed: int | None,
    counters: list[int],
    stats: list[Tensor],
    backend: str | None,
    low: list[Tensor] | None = None,
) -> None:
    factors = {"scale": scale, "decay": decay}
    _check_traced("accumulate_", backend, factors, {"buffers": buffers, "grads": grads}, low, "buffers")


_define(
    "accumulate_",
    "Tensor(a!)[] buffers, Tensor[] grads, Tensor scale, Tensor decay, bool overwrite, SymInt? seed, SymInt[] "
    "counters, Tensor(b!)[] stats, str? backend -> ()",
    "Tensor(c!)[] low",
    _run_accumulate_,
    _trace_accumulate_,
)


def _run_scale_(
    tensors: list[Tensor],
    scale: Tensor,
    stats: list[Tensor],
    backend: str | None,
    low: list[Tensor] | None = None,
) -> None:
    eager.scale_(tensors, scale, low, _joined(stats), backend)


def _trace_scale_(
    tensors: list[Tensor],
    scale: Tensor,
    stats: list[Tensor],
    backend: str | None,
    low: list[Tensor] | None = None,
) -> None:
    _check_traced("scale_", backend, {"scale": scale}, {"tensors": tensors}, low, "tensors")


_define(
    "scale_",
    "Tensor(a!)[] tensors, Tensor scale, Tensor(b!)[] stats, str? backend -> ()",
    "Tensor(c!)[] low",
    _run_scale_,
    _trace_scale_,
)


def _run_cast_(
    outs: list[Tensor],
    ins: list[Tensor],
    scale: Tensor,
    stats: list[Tensor],
    backend: str | None,
    low: list[Tensor] | None = None,
) -> None:
    eager.cast_(outs, ins, scale, low, _joined(stats), backend)


def _trace_cast_(
    outs: list[Tensor],
    ins: list[Tensor],
    scale: Tensor,
    stats: list[Tensor],
    backend: str | None,
    low: list[Tensor] | None = None,
) -> None:
    _check_traced("cast_", backend, {"scale": scale}, {"outs": outs, "ins": ins}, low, "ins")


_define(
    "cast_",
    "Tensor(a!)[] outs, Tensor[] ins, Tensor scale, Tensor(b!)[] stats, str? backend -> ()",
    "Tensor[] low",
    _run_cast_,
    _trace_cast_,
)


def _run_stats(tensors: list[Tensor], backend: str | None, low: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    found = eager.stats(tensors, low, backend)
    return found.sq_norm, found.nonfinite


def _trace_stats(tensors: list[Tensor], backend: str | None, low: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    _check_traced("stats", backend, {}, {"tensors": tensors}, low, "tensors")
    into = Stats.empty(_device(tensors) or "cpu")
    return into.sq_norm, into.nonfinite


_define("stats", "Tensor[] tensors, str? backend -> (Tensor, Tensor)", "Tensor[] low", _run_stats, _trace_stats)
