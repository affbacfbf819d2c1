"""The same window of 8 as in a training loop.

Gradients come out of autograd, and the result is ``p.grad``. Every contestant produces the same
fresh gradients (one copy each, which "backward alone" times), adds them in FP32 weighted by their
tokens, and leaves in ``p.grad``, in the parameter's dtype, the window's mean clipped to a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import fusedaccum as fa
import torch
from torch import Tensor

from . import peers
from .bench_accumulate import DTYPES
from .bench_window import MAX_NORM, MICRO_BATCHES, SET_NAMES, TOKENS, bytes_per_element
from .gradients import Hold, loss_with
from .harness import OURS, Contestant, Options, Row, Sink, filled, race, rows_of

NAME = "training"
NOISE_SCALE = "fusedaccum, noise scale"  # also takes the first add's norm, not only the last one's
PAIRS = (("bf16", "fp32"), ("fp32", "fp32"))


def run(options: Options) -> list[Row]:
    """Race the windows; returns the rows."""
    pairs = PAIRS[:1] if options.quick else PAIRS
    todo = [(s, *pair) for s in options.chosen(SET_NAMES) for pair in pairs]
    with Sink(NAME, options, len(todo)) as sink:
        for name, grads, buffers in todo:
            sink.case(f"{name} {grads}→{buffers}")
            shapes = options.shapes_of(name)
            case: Row = {"set": name, "set_note": shapes.note, "grads": grads, "buffers": buffers}
            case |= {"micro_batches": MICRO_BATCHES, "tensors": len(shapes.shapes), "elements": shapes.elements}
            moved = shapes.elements * bytes_per_element(grads, buffers)
            work = Work.of(shapes.shapes, DTYPES[grads], DTYPES[buffers])
            contestants = _contestants(work, options.backend)
            sink.add(rows_of(case, contestants, race(contestants, options.rounds), moved))
    return sink.rows


@dataclass
class Work:
    """What contestants share: 8 micro-batches' gradients, parameters, and sums of their shapes."""

    micro_batches: list[list[Tensor]]
    params: list[torch.nn.Parameter]
    sums: list[Tensor]

    @staticmethod
    def of(shapes: Sequence[tuple[int, ...]], grads: torch.dtype, buffers: torch.dtype) -> Work:
        """The shared tensors, filled with ordinary numbers."""
        return Work(
            [filled(shapes, grads, seed) for seed in range(MICRO_BATCHES)],
            [torch.nn.Parameter(p) for p in filled(shapes, grads)],
            filled(shapes, buffers),
        )

    def own_params(self) -> list[torch.nn.Parameter]:
        """The same parameters again, for a contestant that hooks them."""
        return [torch.nn.Parameter(p.detach()) for p in self.params]


def _contestants(work: Work, backend: str) -> list[Contestant]:
    return [
        Contestant(OURS, wrapped(work, work.own_params(), backend), kind="ours"),
        Contestant(NOISE_SCALE, wrapped(work, work.own_params(), backend, noise_scale=0.95), kind="variant"),
        Contestant("add after backward", added_after(work)),
        Contestant("a hook per parameter", hooked(work, work.own_params())),
        Contestant("backward alone", lambda _: backward_alone(work), kind="variant"),
    ]


def wrapped(
    work: Work, params: list[torch.nn.Parameter], backend: str | None = None, noise_scale: float | None = None
) -> Callable[[int], object]:
    """A window through the wrapper. Here the next window's ``zero_grad()`` drops ``p.grad``."""
    opt = fa.AccumulatingOptimizer(
        Hold(params),
        accum_steps=MICRO_BATCHES,
        buffer_dtype=work.sums[0].dtype,
        max_grad_norm=MAX_NORM,
        backend=backend,
        noise_scale=noise_scale,
    )

    def window(_: int) -> None:
        for k, grads in enumerate(work.micro_batches):
            opt.zero_grad()
            opt.backward(loss_with(grads, params), weight=TOKENS[k])
            opt.step()

    return window


def added_after(work: Work) -> Callable[[int], object]:
    """A window with one add for the whole list after each micro-batch's backward."""
    params = work.params

    def window(_: int) -> None:
        drop(params)
        torch._foreach_zero_(work.sums)
        for k, grads in enumerate(work.micro_batches):
            loss_with(grads, params).backward()
            peers.add_foreach(work.sums, [p.grad for p in params], TOKENS[k])
            drop(params)
        finish(work.sums, params)

    return window


def hooked(work: Work, params: list[torch.nn.Parameter]) -> Callable[[int], object]:
    """As in Megatron-LM and others: after a parameter's backward, add ``p.grad`` and drop it."""
    tokens = [0.0]  # of the micro-batch under way

    def hook_of(total: Tensor) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            total.add_(p.grad, alpha=tokens[0])
            p.grad = None

        return hook

    for p, total in zip(params, work.sums):
        p.register_post_accumulate_grad_hook(hook_of(total))

    def window(_: int) -> None:
        drop(params)
        torch._foreach_zero_(work.sums)
        for tokens[0], grads in zip(TOKENS, work.micro_batches):
            loss_with(grads, params).backward()
        finish(work.sums, params)

    return window


def finish(sums: list[Tensor], params: list[torch.nn.Parameter]) -> None:
    """The norm, then mean and clipping in one product, and the cast."""
    norm, _ = peers.norm_and_finite(sums)
    tokens = sum(TOKENS)
    torch._foreach_mul_(sums, (MAX_NORM / (norm / tokens + 1e-6)).clamp(max=1.0) / tokens)
    for p, total in zip(params, sums):
        p.grad = total.to(p.dtype)


def backward_alone(work: Work) -> None:
    """The part that all the others have in common."""
    for grads in work.micro_batches:
        drop(work.params)
        loss_with(grads, work.params).backward()


def drop(params: Sequence[torch.nn.Parameter]) -> None:
    """Plain PyTorch's ``zero_grad()``."""
    for p in params:
        p.grad = None
