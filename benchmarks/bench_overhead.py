"""What does the wrapper cost the host?

Microseconds per parameter and micro-batch, with tensors too small to matter. The backward pass only
copies given gradients (gradients.py), so that only autograd's engine and the accumulation run. A
"tensor" is 16 elements of bf16; the sums are FP32, except PyTorch's own, which stay in bf16. One
contestant is the backward pass alone, which returns its gradients instead of accumulating them.
Where the adds are left out, the cost of hooks and queue alone remains. Where no compiler was, hooks
and checks are in Python, and the adds PyTorch's (on a GPU, Triton's). Both go below the public API.
"""

from __future__ import annotations

import itertools
import os
import pkgutil
from collections.abc import Callable, Iterator
from unittest import mock

import fusedaccum as fa
import torch
from fusedaccum.ops import memory
from torch import Tensor

from . import environment, peers
from .gradients import Hold, loss_with, main_grad_hook
from .harness import (
    BARE,
    HOOKS_ALONE,
    OURS,
    PYTHON_HOOKS,
    PYTHON_HOOKS_ALONE,
    WITHOUT_EXTENSIONS,
    Contestant,
    Options,
    Row,
    Sink,
    filled,
    race,
    rows_of,
)

NAME = "overhead"
COUNTS = (1, 10, 100, 1000)
CALL_COUNTS = (314, 2000)  # tensors in ResNet-101 and in the set of small matrices, for which the host time has a limit
SHAPE = (16,)
WINDOW = 8


def run(options: Options) -> list[Row]:
    """Race wrappers and functional calls over several numbers of parameters; returns the rows."""
    levels = {"micro-batch": _micro_batches, "call": _calls}
    todo = [(count, level) for count in COUNTS for level in levels] + [(count, "call") for count in CALL_COUNTS]
    todo.sort(key=lambda case: case[0])
    with Sink(NAME, options, len(todo)) as sink:
        for count, level in todo:
            sink.case(f"{level} {count} tensors")
            contestants = levels[level](count, options.backend)
            timings = race(contestants, 5 * options.rounds)
            case: Row = {"level": level, "tensors": count, "elements": count * SHAPE[0]}
            rows = rows_of(case, contestants, timings, count * SHAPE[0] * 10)
            for row in rows:
                row["us_per_tensor"] = 1e3 * row["median_ms"] / count
            sink.add(rows)
    return sink.rows


def _gradients(count: int) -> list[Tensor]:
    return filled(count * [SHAPE], torch.bfloat16, seed=1)


def _parameters(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p) for p in filled(count * [SHAPE], torch.bfloat16)]


def _closes() -> Iterator[bool]:
    """For every micro-batch, whether it closes its window."""
    return itertools.cycle([False] * (WINDOW - 1) + [True])


def _micro_batches(count: int, backend: str) -> list[Contestant]:
    """A micro-batch in a window: backward, ``step()``, ``zero_grad()``; the last of 8 closes it."""
    return [
        Contestant(OURS, _wrapped(count, backend, "auto"), kind="ours"),
        Contestant(PYTHON_HOOKS, _wrapped(count, backend, "python"), kind="variant"),
        Contestant(HOOKS_ALONE, _hooks_alone(_wrapped(count, backend, "auto")), kind="variant"),
        Contestant(PYTHON_HOOKS_ALONE, _hooks_alone(_wrapped(count, backend, "python")), kind="variant"),
        Contestant(WITHOUT_EXTENSIONS, _without_extensions(_wrapped(count, _portable(), "python")), kind="variant"),
        Contestant(BARE, _bare(count), kind="variant"),
        Contestant("PyTorch's own p.grad, bf16", _plain(count)),
        Contestant("a hook per parameter, FP32 main_grad", _main_grad(count)),
    ]


def _wrapped(count: int, backend: str, hooks: str) -> Callable[[int], object]:
    params, grads = _parameters(count), _gradients(count)
    with mock.patch.dict(os.environ, FUSEDACCUM_INTAKE=hooks):
        opt = fa.AccumulatingOptimizer(Hold(params), accum_steps=WINDOW, backend=backend)

    def micro_batch(_: int) -> None:
        loss_with(grads, params).backward()
        opt.step()
        opt.zero_grad()

    return micro_batch


def _portable() -> str:
    """The backend that needs no compiler."""
    return "triton" if environment.device.type == "cuda" else "reference"


def _without_extensions(run: Callable[[int], object]) -> Callable[[int], object]:
    """The same, with lists of tensors checked in Python, as after an install without a compiler."""
    return _with_nothing_for(memory, "native_lists", run)


def _hooks_alone(micro_batch: Callable[[int], object]) -> Callable[[int], object]:
    """The same, but dropping what arrives instead of adding it: a thing no user could do."""
    return _with_nothing_for(pkgutil.resolve_name("fusedaccum.core.backward:BackwardPasses"), "add", micro_batch)


def _with_nothing_for(owner: object, name: str, run: Callable[[int], object]) -> Callable[[int], object]:
    """The same with this function doing nothing. (mock.patch's 20 microseconds would be timed.)"""

    def run_without(i: int) -> None:
        before = getattr(owner, name)
        setattr(owner, name, lambda *_: None)
        try:
            run(i)
        finally:
            setattr(owner, name, before)

    return run_without


def _bare(count: int) -> Callable[[int], object]:
    params, grads = _parameters(count), _gradients(count)
    return lambda _: torch.autograd.grad(loss_with(grads, params), params)


def _plain(count: int) -> Callable[[int], object]:
    params, grads = _parameters(count), _gradients(count)
    opt = Hold(params)
    closes = _closes()

    def micro_batch(_: int) -> None:
        loss_with(grads, params).backward()
        if next(closes):
            opt.step()
            opt.zero_grad()

    return micro_batch


def _main_grad(count: int) -> Callable[[int], object]:
    """As in Megatron-LM and others: ``main_grad.add_(p.grad)`` and ``p.grad = None`` in a hook."""
    params, grads = _parameters(count), _gradients(count)
    main_grads = filled(count * [SHAPE], torch.float32)
    opt = Hold(params)
    closes = _closes()

    for p, main_grad in zip(params, main_grads):
        p.register_post_accumulate_grad_hook(main_grad_hook(main_grad))

    def micro_batch(_: int) -> None:
        loss_with(grads, params).backward()
        if next(closes):
            opt.step()
            torch._foreach_zero_(main_grads)

    return micro_batch


def _calls(count: int, backend: str) -> list[Contestant]:
    """One functional call on lists of tensors."""
    buffers, grads = filled(count * [SHAPE], torch.float32), _gradients(count)
    return [
        Contestant(OURS, lambda _: fa.ops.accumulate_(buffers, grads, 0.125, backend=backend), kind="ours"),
        Contestant(
            WITHOUT_EXTENSIONS,
            _without_extensions(lambda _: fa.ops.accumulate_(buffers, grads, 0.125, backend=_portable())),
            kind="variant",
        ),
        Contestant("add_ per tensor", lambda _: peers.add_each(buffers, grads, 0.125)),
        Contestant("torch._foreach_add_", lambda _: peers.add_foreach(buffers, grads, 0.125)),
        Contestant("cast then add", lambda _: peers.cast_then_add(buffers, grads, 0.125)),
    ]
