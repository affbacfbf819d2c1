"""What does not split over micro-batches, because a sample's result depends on other samples.

Recipes look for it, and say so once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from ..extensions.batch_norm import LAYERS, TOLD
from ..modules import name_of
from ..warn import warn

BATCH_NORM = "F.batch_norm(training=True)"
SPREAD = "a variance or standard deviation over the samples"
PAIRS = "a product of all samples with each other"
_told: set[str] = set()  # of these three


@contextmanager
def listening(modules: Iterable[Module]) -> Iterator[Collection[Module]]:
    """Yields those of ``modules`` that run in the block and normalise by their input's statistics.

    They appear as they run. Compiled code calls no hooks, so of a compiled model all such count.
    """
    modules = list(modules)
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
    called = dict.fromkeys(filter(by_batch, modules) if compiled else ())

    def calls(layer: Module, args: Any) -> None:
        if by_batch(layer):
            called[layer] = None

    layers = [module for module in modules if isinstance(module, _BatchNorm) and not compiled]
    handles = [layer.register_forward_pre_hook(calls) for layer in layers]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def by_batch(layer: Module) -> bool:
    """True if the layer normalises by the statistics of what it is given."""
    return isinstance(layer, _BatchNorm) and (
        layer.training or (layer.running_mean is None and layer.running_var is None)
    )


def untold(modules: Iterable[Module]) -> list[Module]:
    """The modules that nobody has been told of. (Where statistics are pooled, it is meant.)"""
    return [module for module in modules if module not in LAYERS and module not in TOLD]


def note_layers(recipe: str, layers: Iterable[Module]) -> None:
    """Warn of layers that normalised by a micro-batch's statistics, if nobody has been told."""
    layers = untold(layers)
    if not layers:
        return
    TOLD.update(layers)
    first = layers[0]
    warn(
        f"{recipe} splits the batch, and {len(layers)} BatchNorm layer(s), the first being "
        f"{name_of(first) or 'the model'} ({type(first).__name__}), normalise every micro-batch by its own "
        "statistics, so the gradient is not that of the whole batch; use GroupNorm or LayerNorm instead, freeze them "
        "with eval(), or, if this is intended, call fa.accumulate_batchnorm(model), which makes at least the running "
        "statistics those of the whole batch. See docs/batch-norm.md",
        UserWarning,
    )


def note_functions(recipe: str, nodes: Iterable[Any], samples: int, explained: bool, instead: str) -> None:
    """Warn of what looks at several of a micro-batch's ``samples``; of each kind once per process.

    ``explained``: True if batch normalisation in it is that of layers.
    """
    found = {BATCH_NORM} if explained else set()
    if samples < 2 or len(_told | found) == 3:
        return
    kinds = Counter(
        kind for node in nodes if (kind := _KINDS.get(type(node).__name__)) and _looks_at[kind](node, samples)
    )
    if kinds[PAIRS] >= samples:  # each is of one sample's own parts
        del kinds[PAIRS]
    for kind in kinds.keys() - found - _told:
        _told.add(kind)
        warn(
            f"{recipe} splits the batch, and {kind} depends on which samples share a micro-batch, so the gradient is "
            f"not that of the whole batch; {instead}. If this is intended: warnings.filterwarnings('ignore', "
            "'.*splits the batch')",
            UserWarning,
        )


def nodes_under(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """All nodes of the graph of these tensors."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        fresh = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= fresh
        nodes += fresh


def _shape(node: Any, output: int = 0) -> tuple[int, ...]:
    """The shape of the node's output in forward; empty for a parameter, and where it is unknown."""
    known = () if hasattr(node, "variable") else getattr(node, "_input_metadata", ())
    return tuple(known[output].shape) if output < len(known) else ()


def _normalises(node: Any, samples: int) -> bool:
    """Instance normalisation is a batch normalisation of a batch of one, too."""
    return bool(node._saved_training) and _shape(node)[:1] != (1,)


def _spreads(node: Any, samples: int) -> bool:
    shape = _shape(*node.next_functions[0])
    if len(shape) < 2 or shape[0] != samples:
        return False
    # A negative dimension shows as that of an unsigned number.
    return node._saved_dim is None or any(dim in (0, 2**64 - len(shape)) for dim in node._saved_dim)


def _pairs(node: Any, samples: int) -> bool:
    """``z @ z.T`` of the samples, or of two views of each."""
    sides = [_untransposed(edge) for edge in node.next_functions[:2]]
    shape = _shape(node)
    return (
        sides[0] == sides[1]
        and len(_shape(*sides[0])) == 2
        and shape[0] == shape[1]
        and shape[0] in (samples, 2 * samples)
    )


def _untransposed(edge: tuple[Any, int]) -> tuple[Any, int]:
    turns = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
    return edge[0].next_functions[0] if type(edge[0]).__name__ in turns else edge


_looks_at: dict[str, Callable[[Any, int], bool]] = {BATCH_NORM: _normalises, SPREAD: _spreads, PAIRS: _pairs}
_KINDS = {
    **dict.fromkeys(("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0"), BATCH_NORM),
    **dict.fromkeys(("VarBackward0", "StdBackward0", "VarMeanBackward0", "StdMeanBackward0"), SPREAD),
    **dict.fromkeys(("MmBackward0", "CdistBackward0"), PAIRS),
}
