"""BatchNorm layers whose running statistics are pooled over a window, and updated once for it."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Collection
from enum import Enum, auto
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from ..core.accumulation import Accumulation
from ..core.parameters import accumulation_of
from ..engine import outside_graphs, within_backward
from ..extensions.batch_norm import LAYERS, BatchNormStats, Key
from ..modules import collect_garbage

Model = TypeVar("Model", bound=nn.Module)
Place = tuple[int, tuple[Parameter, ...]]  # number among the model's modules; the parameters around it, nearest first


def accumulate_batchnorm(model: Model) -> Model:
    """Give BatchNorm layers the running statistics that the big batch leaves; returns ``model``.

    If micro-batch i has n_i values per channel, with mean m_i and unbiased variance v_i, and N =
    sum(n_i), then when a window closes::

        mean = sum(n_i * m_i) / N
        var  = (sum((n_i - 1) * v_i) + sum(n_i * (m_i - mean)**2)) / (N - 1)
        running = (1 - momentum) * running + momentum * pooled
                  (momentum None: 1 / num_batches_tracked)

    in FP64, in place, and ``num_batches_tracked`` counts one. Normalisation itself still sees one
    micro-batch at a time: a layer's output and its gradients stay those of the micro-batch. Exact
    for a layer whose inputs are those of the big batch (the first one); a later layer gets the
    pooled statistics of its own inputs.

    Pools ``BatchNorm1d``, ``2d``, ``3d``, ``SyncBatchNorm`` and subclasses, which must pass
    ``running_mean``, ``running_var`` and ``momentum`` on as they are. Layers in ``eval()`` or
    without running statistics, and training forwards under ``no_grad()``, work as before. Forwards
    that activation checkpointing recomputes count once. A layer that is called several times in a
    micro-batch updates as often, its k-th calls pooled with each other. Dropped micro-batches count
    for nothing. Statistics that are not finite are not written. With a process group the population
    is that of all ranks.

    In place: modules keep their names, parameters, buffers, state dicts and forward results, bit
    for bit. Call it before or after wrapping the optimizer, but after ``convert_sync_batchnorm``
    and ``fully_shard``. A layer follows the wrapper that accumulates its weight or bias, or else
    that of the first accumulated parameter of the nearest module around it.
    :func:`restore_batchnorm` undoes it. Under ``torch.compile`` each layer is a graph break. The
    statistics are a by-product of the forward: no pass over the input is added, nothing waits for
    the device (over ranks: four small collectives per window), and an open window keeps 16 bytes
    per channel and call.

    Raises:
        TypeError: ``model`` is not a module. ValueError: a lazy layer that does not know its
            channels yet.
        RuntimeError: at a training forward, no ``AccumulatingOptimizer`` accumulates a parameter of
            the model.
    """
    _check(model)
    modules = dict(model.named_modules())
    found = [(number, name) for number, (name, m) in enumerate(modules.items()) if isinstance(m, _BatchNorm)]
    for _, name in found:
        if isinstance(modules[name], LazyModuleMixin):
            raise ValueError(
                f"{name or 'model'} is a {type(modules[name]).__name__} that has seen no input yet; run one forward of "
                "the model, then call accumulate_batchnorm(model)"
            )
    places = {}
    for number, name in found:
        if not isinstance(modules[name], Pooled):
            parents = [modules[name[:end]] for end, letter in enumerate(name) if letter == "."][::-1]
            # Its own come first: FSDP2 takes them out of the layer for the length of a forward.
            near = {id(p): p for module in (modules[name], *parents, model) for p in module.parameters()}
            places[name] = number, tuple(near.values())
    first = _first_free(places.values(), len(modules))
    for name, (number, around) in places.items():
        layer = modules[name]
        layer.__class__ = _pooled(type(layer))  # type: ignore[arg-type]
        assert isinstance(layer, Pooled)
        layer._place = first + number, around
        LAYERS.add(layer)
    return model


def _first_free(places: Collection[Place], step: int) -> int:
    """The first number to give these layers, so that none has the same key as another layer.

    Layers of another model may follow the same parameter, as in a shared trunk.
    """

    def taken() -> set[tuple[int, int]]:
        return {
            (id(p), layer._place[0]) for layer in list(LAYERS) for p in (*layer._parameters.values(), *layer._place[1])
        }

    def free(first: int, others: set[tuple[int, int]]) -> bool:
        return not any((id(p), first + number) in others for number, around in places for p in around)

    if free(0, taken()):
        return 0
    collect_garbage()  # layers dropped in a reference cycle may still be alive on one rank and gone on another
    others = taken()
    return next(first for first in itertools.count(0, step) if free(first, others))


def restore_batchnorm(model: Model) -> Model:
    """Undo :func:`accumulate_batchnorm`; returns ``model``.

    Buffers stay as they are; what an open window has pooled is left out.

    Raises TypeError if ``model`` is not a module.
    """
    _check(model)
    for layer in model.modules():
        if isinstance(layer, Pooled):
            LAYERS.discard(layer)
            del layer._place
            layer.__class__ = layer._plain  # type: ignore[assignment]
    return model


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


class Pooled(_BatchNorm):
    """How a pooled layer differs from its original class, which is next in the resolution order."""

    _plain: type[_BatchNorm]
    _place: Place

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.track_running_stats and self.running_mean is not None:
            return self._observed(input)
        return super().forward(input)

    @outside_graphs
    def _observed(self, input: Tensor) -> Tensor:
        """The forward, writing its statistics into temporary buffers instead of the layer's."""
        run = _run()
        if run is _Run.PLAIN:
            return super().forward(input)
        followed = self._followed()
        if followed is None:
            raise RuntimeError(
                f"accumulate_batchnorm: no AccumulatingOptimizer accumulates a parameter of this {type(self).__name__} "
                "or of the modules around it, so nothing tells when its window ends; wrap the model's optimizer, or "
                "call fa.restore_batchnorm(model)"
            )
        kept, momentum = self._buffers.copy(), self.momentum
        assert self.running_mean is not None
        # With these zeros and a momentum of 1, the forward writes (1 - 1) * 0 + 1 * statistic.
        moments = self.running_mean.new_zeros(2, len(self.running_mean))
        tracked = torch.zeros((), dtype=torch.long, device="cpu")
        try:
            self._buffers.update(running_mean=moments[0], running_var=moments[1], num_batches_tracked=tracked)
            self.momentum = 1.0
            output = super().forward(input)
        finally:
            if "momentum" in self.__dict__:  # else a subclass computes it
                self.__dict__["momentum"] = momentum  # no call, in place of which Ctrl-C could come
            else:
                self.momentum = momentum
            self._buffers.update(kept)
        if run is _Run.COUNTED:
            accumulation, key = followed
            accumulation.collector.end_returned_pass()  # or this forward would be taken to belong to its micro-batch
            accumulation.extensions.of(BatchNormStats).record(
                key, input.numel() // input.shape[1], moments, _ranks_of(self)
            )
        return output

    def follows(self) -> tuple[BatchNormStats, Key] | None:
        """The statistics that the layer takes part in now, and its key there."""
        followed = self._followed()
        return None if followed is None else (followed[0].extensions.of(BatchNormStats), followed[1])

    def _followed(self) -> tuple[Accumulation, Key] | None:
        number, near = self._place
        for p in (*self._parameters.values(), *near):
            accumulation = None if p is None else accumulation_of(p)
            if p is not None and accumulation is not None:
                return accumulation, (accumulation.sums.buffers.of[p].index, number)
        return None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        LAYERS.add(self)  # self is a copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new, (self._plain,), self.__dict__


@functools.cache
def _pooled(plain: type[_BatchNorm]) -> type[Pooled]:
    """A class of the same name, for code that prints or looks for a layer's class name."""
    return type(plain.__name__, (Pooled, plain), {"_plain": plain, "__module__": plain.__module__})


def _new(plain: type[_BatchNorm]) -> Pooled:
    pooled: type[Pooled] = _pooled(plain)  # type: ignore[arg-type]
    return pooled.__new__(pooled)


def _ranks_of(layer: nn.Module) -> int:
    """How many ranks a forward's statistics cover."""
    if isinstance(layer, nn.SyncBatchNorm) and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(layer.process_group)
    return 1


class _Run(Enum):
    """The role of a forward in training mode."""

    COUNTED = auto()  # the forward of its samples that counts
    AGAIN = auto()  # its samples count in another forward: activation checkpointing runs a forward twice
    PLAIN = auto()  # without gradients: runs as in an unpooled layer


def _run() -> _Run:
    """The role of the current forward.

    A re-entrant checkpoint runs it without gradients and then again, with them, within backward;
    any other checkpoint runs it with gradients both times.
    """
    inside = within_backward()
    if torch.is_grad_enabled() and not inside:
        return _Run.COUNTED
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if inside and code is CheckpointFunction.backward.__code__:
            return _Run.COUNTED
        if inside and code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            return _Run.AGAIN
        if code is CheckpointFunction.forward.__code__:
            again = any(isinstance(x, Tensor) and x.requires_grad for x in frame.f_locals["args"])
            return _Run.AGAIN if again else _Run.PLAIN
        frame = frame.f_back
    return _Run.AGAIN if inside else _Run.PLAIN
