"""The demo's ways to train: only the gradient differs, not the model, data, order or optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import fusedaccum as fa
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.memory import mark, recorded


@dataclass(frozen=True)
class Task:
    """A model with its data and optimizer, and how a big batch is split into micro-batches.

    ``make_model`` is called after seeding and returns a model of ``dtype``; ``loss`` is a mean over
    a (micro-)batch's samples.
    """

    title: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    data: tuple[Tensor, Tensor]
    micro_batch: int
    accum_steps: int
    epochs: int
    dtype: torch.dtype

    @property
    def master_weights(self) -> bool:
        """Whether every way trains with FP32 master weights: for models in less than FP32."""
        return self.dtype.itemsize < 4

    def windows(self, epoch: int) -> Iterator[Tensor]:
        """The epoch's shuffled samples, cut into big batches; the last one holds what is left."""
        order = torch.randperm(len(self.data[0]), generator=torch.Generator().manual_seed(epoch))
        return iter(order.split(self.micro_batch * self.accum_steps))

    @property
    def steps(self) -> int:
        return self.epochs * -(-len(self.data[0]) // (self.micro_batch * self.accum_steps))


@dataclass
class Run:
    """The result of a way: the weights at the start and after every step, losses, and cost.

    The final loss is over all data.
    """

    start: Tensor
    parameters: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    final_loss: float = math.nan
    seconds: float = 0.0
    peak_bytes: int = 0


class PlainMasters:
    """FP32 master weights in plain PyTorch: step FP32 copies, then round them into the model."""

    def __init__(self, model: nn.Module, task: Task):
        self.params = list(model.parameters())
        self.dtype = task.dtype
        self.masters = [p.detach().clone().float() for p in self.params] if task.master_weights else self.params
        self.optimizer = task.make_optimizer(self.masters)

    def step(self) -> None:
        """One optimizer step with the parameters' gradients, which are then dropped."""
        if self.masters is not self.params:
            for master, p in zip(self.masters, self.params):
                master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.params:
            with torch.no_grad():
                for master, p in zip(self.masters, self.params):
                    p.copy_(master.to(self.dtype))


class Way(NamedTuple):
    """A way to train.

    ``begin(task, model)`` returns two functions: step(window) -> mean loss, and one that returns
    the weights as the optimizer has them.
    """

    name: str
    meaning: str
    begin: Callable[[Task, nn.Module], tuple[Callable[[Tensor], float], Callable[[], list[Tensor]]]]


def big_batch(task: Task, model: nn.Module) -> tuple:
    """(a) The batch that micro-batches stand for, in one forward and backward, in FP32 arithmetic.

    A bf16 model's weights are rounded to bf16 as in all other ways; only the arithmetic is in FP32.
    """
    return big_batch_as_is(task, model.float())


def big_batch_as_is(task: Task, model: nn.Module) -> tuple:
    """(e) The big batch in the model's arithmetic: what (a) would be if that could be trusted."""
    plain = PlainMasters(model, task)
    inputs, targets = task.data

    def step(window: Tensor) -> float:
        loss = task.loss(model, inputs[window], targets[window])
        loss.backward()
        plain.step()
        return loss.item()

    return step, lambda: plain.masters


def fused(task: Task, model: nn.Module, **settings: Any) -> tuple:
    """(b) fusedaccum: plain PyTorch's loop, one line more. An epoch's partial window is flushed."""
    inner = task.make_optimizer(list(model.parameters()))
    opt = fa.AccumulatingOptimizer(inner, task.accum_steps, **{"master_weights": task.master_weights, **settings})
    inputs, targets = task.data

    def step(window: Tensor) -> float:
        total = 0.0
        for part in window.split(task.micro_batch):
            loss = task.loss(model, inputs[part], targets[part])
            opt.backward(loss, weight=len(part))
            opt.step()
            opt.zero_grad()
            total += loss.item() * len(part)
        if not opt.updated:
            opt.flush()
        return total / len(window)

    def weights() -> list[Tensor]:
        masters = opt.state_dict()["fusedaccum"].get("masters", {})  # by the parameter's position; none for FP32 models
        return [masters.get(i, p) for i, p in enumerate(model.parameters())]

    return step, weights


def plain_accumulation(task: Task, model: nn.Module, corrected: bool = False) -> tuple:
    """(c) What most loops do: ``(loss / accum_steps).backward()`` into parameters' own ``.grad``.

    ``corrected`` multiplies a loss by its share of the window's samples, as careful loops do.
    """
    plain = PlainMasters(model, task)
    inputs, targets = task.data

    def step(window: Tensor) -> float:
        total = 0.0
        for part in window.split(task.micro_batch):
            loss = task.loss(model, inputs[part], targets[part])
            share = len(part) / len(window) if corrected else 1 / task.accum_steps
            (loss * share).backward()
            total += loss.item() * len(part)
        plain.step()
        return total / len(window)

    return step, lambda: plain.masters


def plain_corrected(task: Task, model: nn.Module) -> tuple:
    """(d) As (c), with every micro-batch weighted by hand as its window needs it."""
    return plain_accumulation(task, model, corrected=True)


WAYS = {
    "a": Way("big batch", "all samples of a step at once, computed in FP32", big_batch),
    "b": Way("fusedaccum", "micro-batches, with fa.AccumulatingOptimizer", fused),
    "c": Way("loss / N", "micro-batches in plain PyTorch; N is their number in a full step", plain_accumulation),
    "d": Way("weighted by hand", "as (c), but each loss times its share of the step's samples", plain_corrected),
    "e": Way("big batch in bf16", "as (a), but computed in bf16, as the micro-batches of the GPT are", big_batch_as_is),
}


def ways_of(task: Task) -> dict[str, Way]:
    """The ways that differ for this task; in FP32, (e) is the same as (a)."""
    return {key: way for key, way in WAYS.items() if key != "e" or task.master_weights}


def train(task: Task, way: Way, label: str) -> Run:
    """Train from the same seed, over the same windows in the same order."""
    torch.manual_seed(0)
    model = task.make_model()
    step, weights = way.begin(task, model)

    def vector() -> Tensor:
        return torch.cat([w.detach().float().flatten() for w in weights()])

    run = Run(start=vector())
    # On a terminal only, and gone at the end.
    with tqdm(total=task.steps, desc=label, unit="step", dynamic_ncols=True, disable=None, leave=False) as bar:
        for epoch in range(task.epochs):
            for window in task.windows(epoch):
                started = time.perf_counter()
                run.losses.append(step(window))
                run.seconds += time.perf_counter() - started
                run.parameters.append(vector())
                bar.update()
            bar.set_postfix_str(f"loss {run.losses[-1]:.4f}")
    with torch.no_grad():
        inputs, targets = task.data
        parts = torch.arange(len(inputs)).split(task.micro_batch * task.accum_steps)
        run.final_loss = sum(task.loss(model, inputs[i], targets[i]).item() * len(i) for i in parts) / len(inputs)
    run.peak_bytes = peak_of(task, way)
    return run


def peak_of(task: Task, way: Way) -> int:
    """PyTorch's peak of bytes in two windows, with parameters and optimizer state, but no data."""
    windows = [next(task.windows(epoch)) for epoch in range(2)]
    with recorded("cpu") as timeline:
        with mark("build"):
            torch.manual_seed(0)
            step, _ = way.begin(task, task.make_model())
        with mark("train"):
            for window in windows:
                step(window)
        del step, _
    return timeline.peak_of("train")
