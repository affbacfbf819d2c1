"""FSDP2 with backward passes that do not begin at the root's output.

They begin at a loss in chunks, or at a loss that a layer has set aside.
"""

from contextlib import nullcontext
from functools import partial

import fusedaccum as fa
import pytest
import torch
from fusedaccum.core.parameters import let_go
from parts import assert_close, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CHUNKS, COUNT, WINDOWS, RANKS = 3, 2, 2, 2


class Layer(nn.Module):
    """Sets a loss of its router aside, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.router, self.up = nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        self.aside = gates.mean(0).square().sum()
        return x + torch.tanh(self.up(x)) * gates.amax(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Linear(5, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x, whole=True):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x) if whole else x

    @property
    def aside(self):
        return sum(layer.aside for layer in self.layers)


def micro_batches(window, rank, unequal):
    generator = torch.Generator().manual_seed(10 * window + rank)
    for number in range(COUNT):
        rows = CHUNKS * (1 + number + 2 * rank if unequal else 2)
        yield torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


class Passes:
    """How a loop runs its backwards; parameters stay gathered until the last one of a forward."""

    def __init__(self, model, backward, grouped):
        self.model, self.backward, self.grouped = model, backward, grouped

    def one(self, loss, last):
        self.model.set_reshard_after_backward(last)
        self.backward(loss, retain_graph=not last)

    def rest(self, h, grad):
        """The pass from the gradient of what the losses were taken of."""
        with self.grouped():
            h.backward(grad)


def mean_square(model, x, y):
    return (model(x) - y).square().mean()


def detached(model, x, y, passes):
    """The head's passes end at its input, and the rest begins there."""
    h = model(x, whole=False)
    cut = h.detach().requires_grad_()
    for part, target in zip(cut.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        passes.one(mean_square(model.head, part, target) / CHUNKS, True)
    passes.rest(h, cut.grad)


def attached(model, x, y, passes):
    """Each chunk's pass goes through the whole model."""
    h = model(x, whole=False)
    for number, (part, target) in enumerate(zip(h.chunk(CHUNKS), y.chunk(CHUNKS), strict=True)):
        passes.one(mean_square(model.head, part, target) / CHUNKS, number == CHUNKS - 1)


def aside_first(model, x, y, passes):
    loss = mean_square(model, x, y)
    passes.one(model.aside, False)
    passes.one(loss, True)


def aside_last(model, x, y, passes):
    loss = mean_square(model, x, y)
    passes.one(loss, False)
    passes.one(model.aside, True)


def layer_by_layer(model, x, y, passes):
    loss = mean_square(model, x, y)
    for layer in model.layers:
        passes.one(layer.aside, False)
    passes.one(loss, True)


FORMS = {form.__name__: form for form in (detached, attached, aside_first, aside_last, layer_by_layer)}
SETTINGS = {
    "drop-in": {"reduction": "none"},
    "counted": {"accum_steps": COUNT},
    "weighted": {"accum_steps": COUNT, "max_grad_norm": 0.3},
    "held": {"accum_steps": COUNT, "nonfinite": "skip_micro_batch"},
}


APART = {"head": ["head"], "norm and head": ["norm", "head"], "nothing": []}


def sharded(mesh, apart):
    model = Model()
    together = [getattr(model, name) for name in APART[apart]]
    for modules in [*model.layers, *([together] if together else []), model]:
        fully_shard(modules, mesh=mesh, reshard_after_forward=False)
    return model


def train(rank, form, how, reduced, apart):
    replicas = reduced == "replicas last"
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards")) if replicas else None
    model = sharded(mesh, apart)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), **SETTINGS[how])
    for window in range(WINDOWS):
        for number, (x, y) in enumerate(micro_batches(window, rank, how == "weighted")):
            if reduced != "each time":
                reduces = model.set_requires_all_reduce if replicas else model.set_requires_gradient_sync
                reduces(number == COUNT - 1)
            passes = Passes(model, torch.Tensor.backward, nullcontext)
            if how == "drop-in":
                passes.backward = lambda loss, **keep: (loss / COUNT).backward(**keep)
            elif how == "weighted":
                passes.backward = partial(opt.backward, weight=len(x))
                passes.grouped = opt.micro_batch
            with opt.micro_batch() if how == "held" else nullcontext():
                FORMS[form](model, x, y, passes)
            if how != "drop-in" or number == COUNT - 1:
                opt.step()
                opt.zero_grad()
    return [full(p) for p in model.parameters()]


def big_batch(form, how):
    model = Model().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for window in range(WINDOWS):
        parts = [part for rank in range(RANKS) for part in micro_batches(window, rank, how == "weighted")]
        for x, y in parts:
            loss = mean_square(model, x.double(), y.double())
            loss = loss if form in ("detached", "attached") else loss + model.aside
            (loss * len(x) / sum(len(x) for x, _ in parts)).backward()
        if how == "weighted":
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


CASES = [
    ("drop-in", "each time", "nothing"),
    ("drop-in", "last", "head"),
    ("counted", "each time", "norm and head"),
    ("counted", "replicas last", "head"),
    ("weighted", "each time", "head"),
    ("weighted", "last", "nothing"),
    ("held", "each time", "head"),
]


@pytest.mark.parametrize(
    "form, how, reduced, apart",
    [
        (form, *case)
        for form in FORMS
        for case in CASES
        # FSDP2 cannot keep sums from the replicas if passes reach different parameters.
        if form in ("detached", "attached") or case[1] != "replicas last"
    ],
)
def test_a_backward_that_does_not_begin_at_the_roots_output_is_part_of_the_big_batch(worlds, form, how, reduced, apart):
    theirs = big_batch(form, how)
    for ours in worlds(RANKS).run(train, form=form, how=how, reduced=reduced, apart=apart):
        assert_close(ours, theirs, 2e-6)


def without_the_weight(rank, form):
    model = sharded(None, "head")
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), COUNT)
    x, y = next(micro_batches(0, rank, False))
    passes = Passes(model, partial(opt.backward, weight=2 + rank), nullcontext)
    with pytest.raises(RuntimeError, match=r"weight, which FSDP2 needs in the loss.*`with opt\.micro_batch\(\)"):
        if form == "detached":
            detached(model, x, y, passes)
        else:
            passes.one(mean_square(model, x, y), False)
            model.aside.backward()


@pytest.mark.parametrize("form", ["detached", "aside_last"])
def test_a_weight_that_one_of_the_passes_lacks_is_an_error(worlds, form):
    worlds(RANKS).run(without_the_weight, form=form)


def unseen(rank, last):
    """FSDP2 misses a backward of the loss set aside by a layer whose input needs no gradient."""
    torch.manual_seed(2)
    model = nn.Sequential(Layer(), nn.Linear(6, 2))
    fully_shard(model, reshard_after_forward=False)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), reduction="none")
    model.set_reshard_after_backward(False)
    loss = model(torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))).square().mean()
    for part in (loss, model[0].aside) if last else (model[0].aside, loss):
        part.backward(retain_graph=True)
    if last:
        with pytest.raises(RuntimeError, match=r"reached no input or output of an FSDP2 module.*before another"):
            opt.step()
        opt.reset()
    else:
        opt.step()
    model.reshard()
    return [full(p) for p in model.parameters()]


@pytest.mark.parametrize("last", [False, True])
def test_gradients_that_fsdp2_does_not_see_come_with_those_of_the_next_backward_or_are_missed(worlds, last):
    torch.manual_seed(2)
    model = nn.Sequential(Layer(), nn.Linear(6, 2)).double()
    opt = torch.optim.SGD(model.parameters(), lr=0.0 if last else 0.3)
    for rank in range(RANKS):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        ((model(x.double()).square().mean() + model[0].aside) / RANKS).backward()
    opt.step()
    for ours in worlds(RANKS).run(unseen, last=last):
        assert_close(ours, [p.detach() for p in model.parameters()])


def added_to(rank):
    """Stands in for a reduction of FSDP2's that the wrapper was not told of."""
    model = sharded(None, "head")
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), COUNT)
    x, y = next(micro_batches(0, rank, False))
    mean_square(model, x, y).backward()
    opt.step()
    p = model.embedding.weight
    p.grad.to_local().add_(1.0)
    with pytest.raises(RuntimeError, match=r"FSDP2 has added a gradient to .*\.grad by itself.*opt\.reset\(\)"):
        for hook in p._post_accumulate_grad_hooks.values():
            hook(p)


def test_a_gradient_that_fsdp2_adds_unseen_is_an_error(worlds):
    worlds(RANKS).run(added_to)


def taken_over(rank):
    """Another wrapper gets the parameters of one that lives on."""
    model = sharded(None, "head")
    before = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.3), COUNT)
    let_go(before._accumulation)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), COUNT)
    for window in range(WINDOWS):
        for x, y in micro_batches(window, rank, False):
            aside_first(model, x, y, Passes(model, torch.Tensor.backward, nullcontext))
            opt.step()
            opt.zero_grad()
    assert before._accumulation.ledger.window is None
    return [full(p) for p in model.parameters()]


def test_backward_passes_are_those_of_the_wrapper_that_has_the_parameters(worlds):
    theirs = big_batch("aside_first", "counted")
    for ours in worlds(RANKS).run(taken_over):
        assert_close(ours, theirs, 2e-6)


class LooksAgain(torch.optim.SGD):
    """Runs a backward that FSDP2 does not reduce, inside the first step()."""

    model, x = None, None

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        if self.model is not None:
            model, self.model = self.model, None
            model.set_requires_gradient_sync(False)
            with torch.enable_grad():
                model(self.x).sum().backward()
            model.set_requires_gradient_sync(True)


def held_back_by_a_step(rank):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    inner = LooksAgain(model.parameters(), lr=0.1)
    opt = fa.AccumulatingOptimizer(inner, reduction="none")
    inner.model, inner.x = model, torch.ones(2, 3)
    model(inner.x).sum().backward()
    opt.step()
    model(inner.x).sum().backward()
    return full(model.bias.grad)


def test_what_a_backward_inside_step_has_left_unreduced_comes_with_the_next(worlds):
    for bias in worlds(RANKS).run(held_back_by_a_step):
        assert_close(bias, torch.full_like(bias, 4.0))
