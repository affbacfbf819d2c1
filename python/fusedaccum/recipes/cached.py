"""``cached_backward``: losses that are not a sum over samples, of a batch whose graph does not fit.

Two passes over the encoders, micro-batch by micro-batch, and the loss of the whole batch between
them: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021),
https://arxiv.org/abs/2101.06983; its implementation is GradCache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ..core.extension import LossFrom
from ..core.optimizer import AccumulatingOptimizer
from ..core.parameters import accumulation_of
from ..engine import without_grad
from ..scalars import Scalar, checked_count
from .batchnorm import Pooled
from .nested import batch_size, call, cut, leaves, mapped
from .replay import RandomState, unmoved
from .splitting import by_batch, listening, nodes_under, note_functions, note_layers, untold


def cached_backward(
    loss_fn: Callable[..., Tensor],
    encoders: Callable[..., Any] | Sequence[Callable[..., Any]],
    inputs: Any,
    *,
    micro_batch_size: int,
    opt: AccumulatingOptimizer | None = None,
    weight: Scalar | None = None,
) -> Tensor:
    """The backward pass of ``loss_fn(encoder(batch), ...)``, with the graph of one micro-batch.

    With E the embeddings of all samples of the batch,
    ``dL/dp = sum over micro-batches i of dL/dE_i * dE_i/dp``. The first pass computes E without a
    graph. The loss of all of E gives dL/dE. The second pass encodes every micro-batch again, with
    the random numbers that it drew before from PyTorch's default generators, and runs backward from
    its part of dL/dE. That is the gradient of the one big backward, up to the order of its sums, if
    a sample's embedding depends on that sample alone (with batch normalisation it does not).

    Besides the graph of a micro-batch, memory holds E, dL/dE, the graph of the loss (until the
    second pass) and a copy of the modules' buffers (until the loss). Trained encoders run forward
    twice, frozen ones once. Does not itself wait for a device. The two passes are those of
    GradCache: Gao et al., 2021, arXiv:2101.06983, "Scaling Deep Contrastive Learning Batch Size
    under Memory Limited Setup".

    Args:
        loss_fn: the scalar loss of the embeddings of all samples, with one argument per encoder;
            called once. Parameters that it uses (a temperature) get their gradients too. With a
            GradScaler, it returns ``scaler.scale(loss)``.
        encoders: a module or function, or a list of them, in which one may occur twice. A module is
            called with ``**batch`` for a dict, ``*batch`` for a list or tuple, and ``batch``
            otherwise; a function with the micro-batch as it is. It returns a tensor, or tensors
            nested in dicts, lists, tuples or dataclasses, whose first dimension is the sample.
        inputs: the whole batch, nested likewise; for a list of encoders, a list with one batch per
            encoder. Tensors in it that require a gradient get one.
        micro_batch_size: samples that are encoded at once; the last micro-batch may be smaller.
        opt: the wrapper that accumulates the gradients: the call is one micro-batch of it, and its
            loss is recorded. Not needed with a plain optimizer, nor within ``opt.micro_batch()``.
        weight: of that micro-batch, as :meth:`AccumulatingOptimizer.backward` takes it;
            only with ``opt``.

    Returns:
        what ``loss_fn`` returned, detached (with a GradScaler, scaled).

    Raises:
        TypeError, ValueError: an invalid argument, loss or encoder output; nothing has been added.
        RuntimeError: a wrapper would count the passes as several micro-batches, or an encoder
            changes its inputs in place. After any exception ``opt`` is as
            :meth:`AccumulatingOptimizer.micro_batch` says; without it, ``p.grad`` may hold a part.
    """
    size = checked_count(micro_batch_size, "micro_batch_size", "; it is the samples that are encoded at once")
    encodings = _encodings(encoders, inputs, size)
    with _one_micro_batch(opt, weight):
        functions = [encoding.encoder for encoding in encodings] + [loss_fn]
        _check_grouped(p for module in functions if isinstance(module, Module) for p in module.parameters())
        frozen = [module for encoding in encodings if encoding.frozen for module in encoding.modules]
        with unmoved([encoding.encoder for encoding in encodings if not encoding.frozen], but=frozen) as modules:
            embeddings = [encoding.embed() for encoding in encodings]
        note_layers("cached_backward", _by_batch(encodings, modules))
        # What was made of weights without a graph must not be reused where there is one: autocast
        # has kept casts of them (PyTorch issue 112583), and parametrize.cached() parametrized ones.
        torch.clear_autocast_cache()
        parametrize._cache.clear()
        loss = loss_fn(*embeddings)
        _check_loss(loss)
        _backward([(loss, None)])
        for encoding, embedding in zip(encodings, embeddings, strict=True):
            encoding.keep_gradients(embedding)
        del embeddings, embedding
        loss = loss.detach()
        if opt is not None:
            opt._accumulation.record_loss(loss, LossFrom.RECIPE)
        after_loss = RandomState(tensor for encoding in encodings for tensor in encoding.placed)
        try:
            for encoding in encodings:
                encoding.backward(modules)
        finally:
            after_loss.restore()
        _backward([pair for encoding in encodings for pair in encoding.of_inputs()])
    return loss


class _Encoding:
    """One encoder and its batch, in two passes.

    Attributes:
        split: True if its batch makes several micro-batches.
        modules: known to be in the encoder. called: those of them that normalised by a micro-batch.
        frozen: True if it needs no second pass.
        placed: tensors on every device that it is known to use.
    """

    def __init__(self, name: str, encoder: Callable[..., Any], inputs: Any, size: int):
        n = batch_size(inputs)
        self._name, self.encoder = name, encoder
        self._bounds = [(start, min(start + size, n)) for start in range(0, n, size)]
        self.split = n > size
        self._trained_inputs: list[tuple[Tensor, Tensor]] = []
        self._inputs = mapped(self._apart, inputs)
        self.modules = list(encoder.modules()) if isinstance(encoder, Module) else []
        self.called: Collection[Module] = ()
        parameters = list(encoder.parameters()) if isinstance(encoder, Module) else []
        trained = not isinstance(encoder, Module) or any(p.requires_grad for p in parameters)
        self.frozen = not trained and not self._trained_inputs
        self.placed = [*_tensors(inputs), *parameters]
        self._random: list[RandomState] = []  # before each micro-batch
        self._gradients: list[Tensor | None] = []  # of every leaf of the embeddings

    def _apart(self, leaf: Any) -> Any:
        """Detach an input that needs a gradient: only one backward may go through what made it."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        self._trained_inputs.append((leaf, leaf.detach().requires_grad_()))
        return self._trained_inputs[-1][1]

    def embed(self) -> Any:
        """The first pass: the embeddings of all samples, as leaves.

        A frozen encoder makes no graph anyway, and runs as usual.
        """
        versions = self._versions()
        parts = []
        new_part = _parts_of_statistics(self.modules if self.frozen else ())
        encode = self._encode if self.frozen else without_grad(self._encode)
        with listening(untold(self.modules) if self.split else ()) as self.called:
            for start, stop in self._bounds:
                self._random.append(RandomState(self.placed))
                new_part()
                parts.append(encode(start, stop))
                self._check_embedding(parts[-1], stop - start)
        if self._versions() != versions and not self.frozen:
            raise RuntimeError(
                f"{self._name} changes its inputs in place, so the second pass would not see what the first one saw; "
                "make it create new tensors (inplace=False), or change the inputs before the call"
            )
        tensors = iter([torch.cat(same).detach() for same in zip(*map(_tensors, parts), strict=True)])
        embedding = mapped(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, parts[0])
        for tensor in _tensors(embedding):
            tensor.requires_grad_(not self.frozen and (tensor.is_floating_point() or tensor.is_complex()))
        return embedding

    def keep_gradients(self, embedding: Any) -> None:
        """Keep the embeddings' gradients from the loss."""
        self._gradients = [tensor.grad for tensor in _tensors(embedding)]

    def backward(self, modules: Iterable[Module]) -> None:
        """The second pass, through these modules.

        Runs forward even if the loss used no embedding, so that running statistics advance.
        """
        if self.frozen:
            return
        new_part = _parts_of_statistics(modules)
        for (start, stop), random in zip(self._bounds, self._random, strict=True):
            random.restore()
            new_part()
            parametrize._cache.clear()  # the graph of what is in it is gone with the backward before
            outputs = _tensors(self._encode(start, stop))
            sent = [
                (output, gradient[start:stop])
                for output, gradient in zip(outputs, self._gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            del outputs
            if start == 0:
                self._check_graph([output for output, _ in sent], modules)
            _backward(sent)

    def _check_graph(self, outputs: Sequence[Tensor], modules: Iterable[Module]) -> None:
        nodes = list(nodes_under(outputs))
        _check_grouped(node.variable for node in nodes if hasattr(node, "variable"))
        if self.split:
            has_layers = any(isinstance(module, _BatchNorm) for module in self.modules or modules)
            instead = (
                "use a normalisation that sees one sample at a time, and compute in loss_fn what looks at all samples"
            )
            note_functions("cached_backward", nodes, self._bounds[0][1], has_layers, instead)

    def of_inputs(self) -> list[tuple[Tensor, Tensor]]:
        """The inputs that need a gradient, with the gradients that they got."""
        return [(given, leaf.grad) for given, leaf in self._trained_inputs if leaf.grad is not None]

    def _encode(self, start: int, stop: int) -> Any:
        return call(self.encoder, cut(self._inputs, start, stop))

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in _tensors(self._inputs) if not tensor.is_inference()]

    def _check_embedding(self, output: Any, samples: int) -> None:
        for path, leaf in leaves(output, f"{self._name}(...)"):
            if not isinstance(leaf, Tensor) and leaf is not None:
                raise TypeError(
                    f"{path} is a {type(leaf).__name__}, but only tensors can be concatenated over all samples; let "
                    "the encoder return the tensors that the loss uses"
                )
            if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != samples):
                raise ValueError(
                    f"{path} has the shape {tuple(leaf.shape)} for {samples} samples; the first dimension of what an "
                    "encoder returns must be the sample, and anything taken over all samples (a mean, a norm) belongs "
                    "in loss_fn"
                )


def _parts_of_statistics(modules: Iterable[Module]) -> Callable[[], None]:
    """Tell pooled statistics that samples come in parts; returns what to call before each part."""
    found = [layer.follows() for layer in modules if isinstance(layer, Pooled)]
    begin = [statistics.in_parts() for statistics in {place[0] for place in found if place is not None}]

    def new_part() -> None:
        for part_begins in begin:
            part_begins()

    return new_part


def _by_batch(encodings: Sequence[_Encoding], modules: Iterable[Module]) -> list[Module]:
    """The layers that have normalised by a micro-batch.

    ``modules``: all that have run in functions, and those of other encoders.
    """
    found = {module: None for encoding in encodings for module in encoding.called}
    if any(encoding.split and not encoding.modules for encoding in encodings):
        others = {module for encoding in encodings for module in encoding.modules}
        found |= {module: None for module in modules if module not in others and by_batch(module)}
    return list(found)


def _encodings(encoders: Any, inputs: Any, size: int) -> list[_Encoding]:
    if not isinstance(encoders, (list, tuple, ModuleList)):
        return _encodings([encoders], [inputs], size)
    if not isinstance(inputs, (list, tuple)) or len(inputs) != len(encoders) or not inputs:
        got = len(inputs) if isinstance(inputs, (list, tuple)) else f"one {type(inputs).__name__}"
        raise ValueError(
            f"encoders holds {len(encoders)} and inputs holds {got}; give a list with one batch per encoder, or one "
            "encoder and its batch, not in lists"
        )
    for i, encoder in enumerate(encoders):
        if not callable(encoder):
            raise TypeError(f"encoders[{i}] must be a module or a function, got {encoder!r}")
    encodings = [
        _Encoding(f"encoders[{i}]", encoder, batch, size)
        for i, (encoder, batch) in enumerate(zip(encoders, inputs, strict=True))
    ]
    _run_twice_with_others(encodings)
    return encodings


def _run_twice_with_others(encodings: Sequence[_Encoding]) -> None:
    """Let frozen encoders run twice if they share buffers with one that does.

    Otherwise the two passes of that one would find different buffers.
    """
    twice = [encoding for encoding in encodings if not encoding.frozen]
    while twice:
        moved = {module for encoding in twice for module in encoding.modules if module._buffers}
        twice = [encoding for encoding in encodings if encoding.frozen and moved.intersection(encoding.modules)]
        for encoding in twice:
            encoding.frozen = False


def _one_micro_batch(opt: Any, weight: Scalar | None) -> AbstractContextManager[None]:
    if isinstance(opt, AccumulatingOptimizer):
        return opt.micro_batch(weight=weight)
    if opt is not None:
        raise TypeError(
            f"opt must be an AccumulatingOptimizer, got a {type(opt).__name__}; with a plain optimizer, leave it out"
        )
    if weight is not None:
        raise ValueError(f"weight={weight!r} is for a wrapper's micro-batch; give opt= too, or leave weight out")
    return nullcontext()


def _check_grouped(parameters: Iterable[Tensor]) -> None:
    """Raises RuntimeError if these parameters' wrapper counts each pass as a micro-batch."""
    for parameter in parameters:
        accumulation = accumulation_of(parameter) if parameter.requires_grad else None
        if accumulation is not None and accumulation.passes.tells_passes_apart:
            raise RuntimeError(
                "an AccumulatingOptimizer accumulates these parameters' gradients and would count every backward pass "
                "of cached_backward as a micro-batch of its own; give opt=, or call it within `with "
                "opt.micro_batch():` (of every such wrapper)"
            )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_fn must return one number as a tensor, got {got}; take its mean() or sum()")
    if not loss.requires_grad:
        raise ValueError(
            "the loss that loss_fn returned depends on nothing that requires a gradient: all encoders are frozen, "
            "loss_fn detaches the embeddings, or the call is within torch.no_grad()"
        )
    _check_grouped(parameters_under([loss]))


def parameters_under(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves of the graph of these tensors: the only way to find a function's parameters."""
    return (node.variable for node in nodes_under(outputs) if hasattr(node, "variable"))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def _backward(sent: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Backward from these tensors, each with its gradient.

    Runs outside of the caller's autocast, which would also cast what a forward has kept out of it.
    """
    if not sent:
        return
    with ExitStack() as stack:
        for device in {tensor.device.type for tensor, _ in sent}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        torch.autograd.backward([tensor for tensor, _ in sent], [gradient for _, gradient in sent])
