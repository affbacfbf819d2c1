"""``fa.cached_backward`` gives the big batch's gradient for losses that are no sum over samples.

It leaves nothing behind.
"""

import copy

import fusedaccum as fa
import pytest
import torch
from contrastive import CASES, SAMPLES, WAYS, Clip, SupCon, Tower, assert_close, both, clip, gradients, modules
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

BATCH_NORM = pytest.mark.filterwarnings("ignore:cached_backward splits the batch")  # which is told, once

SIZES = [1, 4, 13, 50]  # dividing the batch or not, all of it, and more


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", CASES)
def test_gradients_and_loss_are_those_of_the_big_batch(make, size, dtype):
    case, theirs, loss = both(make, dtype)
    returned = fa.cached_backward(*case, micro_batch_size=size)
    assert_close(gradients(modules(case)), theirs, TOLERANCES[dtype])
    assert torch.allclose(returned, loss, rtol=TOLERANCES[dtype]) and not returned.requires_grad


def test_accumulating_such_a_loss_is_not_the_big_batch():
    """Otherwise the tests above would prove nothing."""
    case, theirs, _ = both(clip)
    loss_fn, (a, b), (x, y) = case
    for i in range(0, 12, 4):
        (loss_fn(a(x[i : i + 4]), b(y[i : i + 4])) / 3).backward()
    with pytest.raises(AssertionError):
        assert_close(gradients(modules(case)), theirs, 0.1)


# -- random numbers --------------------------------------------------------------------------------


def test_dropout_of_the_second_pass_is_that_of_the_first():
    """The oracle is one graph of the same micro-batches, with encoders run from the same seed."""
    a, b, loss_fn = Tower(5, dropout=0.5).double(), Tower(7, dropout=0.3).double(), Clip().double()
    x, y = torch.randn(SAMPLES, 5).double(), torch.randn(SAMPLES, 7).double()
    literal = copy.deepcopy(nn.ModuleList([a, b, loss_fn]))

    def drawing(a, b):
        return loss_fn(a, b) + torch.rand(())  # the loss draws too

    torch.manual_seed(3)
    fa.cached_backward(drawing, [a, b], [x, y], micro_batch_size=4)
    after = torch.rand(5)

    torch.manual_seed(3)
    embeddings = [torch.cat([net(part) for part in batch.split(4)]) for net, batch in zip(literal, (x, y))]
    (literal[2](*embeddings) + torch.rand(())).backward()
    assert_close(gradients(nn.ModuleList([a, b, loss_fn])), gradients(literal), 1e-10)
    assert torch.equal(after, torch.rand(5)), "the generator is not where one pass would have left it"


def test_the_generator_stands_where_one_pass_leaves_it_also_after_an_exception():
    tower, passes = Tower(5, dropout=0.5), []

    def encode(x):
        passes.append(len(x))
        if len(passes) == 6:  # in the second pass
            raise KeyError("broken")
        return tower(x)

    torch.manual_seed(3)
    with pytest.raises(KeyError):
        fa.cached_backward(SupCon(), encode, torch.randn(SAMPLES, 5), micro_batch_size=4)
    after = torch.rand(3)
    torch.manual_seed(3)
    for part in torch.randn(SAMPLES, 5).split(4):
        tower(part)
    assert torch.equal(after, torch.rand(3))


# -- what moves in a forward -----------------------------------------------------------------------


class Counting(nn.Module):
    """Replaces one buffer and writes to another, which its output depends on (spectral_norm)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        self.calls = self.calls + 1
        self.seen.mul_(1.5)
        return x @ self.weight * self.seen.clone()


def test_buffers_move_once_and_the_second_pass_sees_what_the_first_saw():
    net = Counting()
    literal, x = copy.deepcopy(net), torch.randn(8, 5)
    fa.cached_backward(lambda a, b: (a.T @ b).square().sum(), [net, net], [x, x + 1], micro_batch_size=4)
    a, b = (torch.cat([literal(part) for part in batch.split(4)]) for batch in (x, x + 1))
    (a.T @ b).square().sum().backward()
    assert net.calls == 4 and torch.equal(net.seen, literal.seen)
    assert_close(gradients(net), gradients(literal), 1e-6)


@BATCH_NORM
def test_running_statistics_move_once():
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    literal, x = copy.deepcopy(net), torch.randn(12, 5)
    fa.cached_backward(lambda z: (z.T @ z).std(), net, x, micro_batch_size=4)
    torch.cat([literal(part) for part in x.split(4)])
    for ours, theirs in zip(net.buffers(), literal.buffers()):
        assert torch.equal(ours, theirs)


@BATCH_NORM
def test_a_buffer_may_be_none():
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False))
    literal, x = copy.deepcopy(net), torch.randn(12, 5)
    fa.cached_backward(lambda z: (z.T @ z).std(), net, x, micro_batch_size=4)
    z = torch.cat([literal(part) for part in x.split(4)])
    (z.T @ z).std().backward()
    assert net[1].running_mean is None
    assert_close(gradients(net), gradients(literal), 1e-5)


@BATCH_NORM
@pytest.mark.parametrize("place", ["first pass", "loss"])
def test_buffers_are_as_before_when_the_first_pass_or_the_loss_fails(place):
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    before, calls = copy.deepcopy(net.state_dict()), []

    def fails(*_):
        calls.append(1)
        if place == "loss" or len(calls) == 2:
            raise KeyError("broken")

    if place == "first pass":
        net.register_forward_hook(fails)
    with pytest.raises(KeyError):
        fa.cached_backward(fails, net, torch.randn(12, 5), micro_batch_size=4)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


# -- what needs a gradient -------------------------------------------------------------------------


class Calls(Tower):
    def __init__(self, features):
        super().__init__(features)
        self.modes = []

    def forward(self, x):
        self.modes.append(torch.is_grad_enabled())
        return super().forward(x)


def test_a_frozen_encoder_runs_once_and_the_other_is_right():
    case, _, _ = both(clip)
    loss_fn, (a, b), (x, y) = case
    frozen = Calls(5).double().requires_grad_(False)
    frozen.load_state_dict(a.state_dict())
    literal = copy.deepcopy((loss_fn, b))
    fa.cached_backward(loss_fn, [frozen, b], [x, y], micro_batch_size=4)
    literal[0](a(x), literal[1](y)).backward()
    assert_close(gradients(nn.ModuleList([loss_fn, b])), gradients(nn.ModuleList(literal)), 1e-10)
    assert frozen.modes == [True] * 4 and all(p.grad is None for p in frozen.parameters())


def test_a_frozen_encoder_may_change_its_inputs():
    """It runs once."""
    case, _, _ = both(clip)
    loss_fn, (a, b), (x, y) = case
    frozen = nn.Sequential(nn.ReLU(inplace=True), a).requires_grad_(False)
    literal = copy.deepcopy((loss_fn, b))
    literal[0](a(x.relu()), literal[1](y)).backward()
    fa.cached_backward(loss_fn, [frozen, b], [x, y], micro_batch_size=4)
    assert_close(gradients(nn.ModuleList([loss_fn, b])), gradients(nn.ModuleList(literal)), 1e-10)


def test_no_pass_but_the_second_makes_a_graph():
    tower = Calls(5)
    fa.cached_backward(SupCon(), tower, torch.randn(SAMPLES, 5), micro_batch_size=4)
    assert tower.modes == [False] * 4 + [True] * 4


def test_inputs_get_their_gradients_also_through_what_made_them():
    """Of a leaf, a frozen encoder's input, and a trunk's output that both encoders share.

    One backward goes through that output.
    """
    case, _, _ = both(clip)
    loss_fn, (a, _), (x, _) = case
    b, trunk, leaf = Tower(5).double().requires_grad_(False), nn.Linear(5, 5).double(), x.clone().requires_grad_()
    literal_trunk, literal_leaf, literal_loss, literal_a = copy.deepcopy((trunk, leaf, loss_fn, a))
    hidden = trunk(leaf)
    fa.cached_backward(loss_fn, [a, b], [hidden, hidden + leaf], micro_batch_size=4)
    hidden = literal_trunk(literal_leaf)
    literal_loss(literal_a(hidden), b(hidden + literal_leaf)).backward()
    assert_close(
        {"leaf": leaf.grad, **gradients(trunk)}, {"leaf": literal_leaf.grad, **gradients(literal_trunk)}, 1e-10
    )
    assert_close(gradients(a), gradients(literal_a), 1e-10)


@BATCH_NORM
def test_embeddings_that_the_loss_does_not_use():
    a, b, x = Tower(5), nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), torch.randn(SAMPLES, 5)
    literal = copy.deepcopy(a)
    fa.cached_backward(lambda z, _: SupCon()(z), [a, b], [x, x], micro_batch_size=7)
    SupCon()(literal(x)).backward()
    assert_close(gradients(a), gradients(literal), 1e-6)
    assert all(p.grad is None for p in b.parameters()) and b[1].num_batches_tracked == 2


# -- autocast --------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """One product under autocast, and one outside it."""

    def __init__(self):
        super().__init__()
        self.cast, self.exact = nn.Linear(5, 32), nn.Parameter(torch.randn(32, 6))

    def forward(self, x):
        hidden = self.cast(x)
        with torch.autocast("cpu", enabled=False):
            return F.normalize(hidden.float() @ self.exact, dim=-1)


def test_the_callers_autocast_holds_in_both_passes_and_not_in_the_backward():
    net, x = Mixed(), torch.randn(SAMPLES, 5)
    literal = copy.deepcopy(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fa.cached_backward(SupCon(), net, x, micro_batch_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = [literal(part) for part in x.split(4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = SupCon()(torch.cat(parts))
    loss.backward()
    assert_close({"exact": net.exact.grad}, {"exact": literal.exact.grad}, 1e-6)
    # We sum a bf16 weight's gradients in FP32 over micro-batches; the oracle in bf16 at most.
    assert_close(gradients(net.cast), gradients(literal.cast), 2**-8)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_changes_its_buffers_in_a_forward_finds_them_as_they_were(way):
    torch.manual_seed(0)
    encoder, x = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)).double(), torch.randn(8, 5).double()
    twin = copy.deepcopy(encoder)
    # The oracle: all parts in one graph, each of which advances the power iteration.
    embeddings = torch.cat([twin(part) for part in x.split(4)])
    embeddings.square().mean().backward()
    fa.cached_backward(lambda e: e.square().mean(), WAYS[way](encoder), x, micro_batch_size=4)
    for p, q in zip(encoder.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)
    for p, q in zip(encoder.buffers(), twin.buffers()):
        torch.testing.assert_close(p, q)


def test_complex_embeddings_have_gradients():
    net, x = nn.Linear(5, 4), torch.randn(SAMPLES, 5)
    literal = copy.deepcopy(net)

    def loss_of(z):
        return (z @ z.mH).abs().logsumexp(0).sum()

    fa.cached_backward(loss_of, lambda part: torch.view_as_complex(net(part).reshape(-1, 2, 2)), x, micro_batch_size=4)
    loss_of(torch.view_as_complex(literal(x).reshape(-1, 2, 2))).backward()
    assert_close(gradients(net), gradients(literal), 1e-5)


def test_an_input_that_the_encoder_does_not_use():
    tower, x, unused = Tower(5), torch.randn(SAMPLES, 5), torch.randn(SAMPLES, 5, requires_grad=True)
    literal = copy.deepcopy(tower)
    fa.cached_backward(SupCon(), lambda pair: tower(pair[0]), (x, unused * 2), micro_batch_size=4)
    SupCon()(literal(x)).backward()
    assert_close(gradients(tower), gradients(literal), 1e-6)
    assert unused.grad is None


@BATCH_NORM
def test_running_statistics_of_a_frozen_encoder_move_also_beside_a_function():
    """The first pass leaves no trace in a function's modules. A frozen encoder has no other."""
    frozen = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    tower, x = Tower(5, embedding=4), torch.randn(12, 5)
    literal = copy.deepcopy(frozen)
    fa.cached_backward(lambda a, b: (a.T @ b).square().sum(), [frozen, lambda x: tower(x)], [x, x], micro_batch_size=4)
    for part in x.split(4):
        literal(part)
    for ours, theirs in zip(frozen.buffers(), literal.buffers()):
        assert torch.equal(ours, theirs)


def test_parametrized_weights_that_are_cached_get_their_gradients():
    """Those that the first pass made have no graph, which the loss may need.

    Those of a micro-batch have one, which is gone after its backward.
    """
    net, x = nn.Sequential(nn.Linear(5, 4), parametrizations.weight_norm(nn.Linear(4, 3))), torch.randn(12, 5)
    literal = copy.deepcopy(net)

    def loss(z, layer):
        return (z @ z.T).square().mean() + layer.weight.square().sum()

    with parametrize.cached():
        fa.cached_backward(lambda z: loss(z, net[1]), net, x, micro_batch_size=5)
    loss(literal(x), literal[1]).backward()
    assert_close(gradients(net), gradients(literal), 1e-6)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_frozen_encoder_that_is_a_part_of_a_trained_one(frozen_first):
    """Both passes find the shared buffers as the big batch does, and move them as often."""
    net, x, y = nn.Sequential(Counting().requires_grad_(False), nn.Linear(3, 3)), torch.randn(12, 5), torch.randn(12, 5)
    literal = copy.deepcopy(net)
    order = slice(None, None, -1 if frozen_first else 1)
    fa.cached_backward(
        lambda a, b: (a.sum(1) * b.sum(1)).square().mean(), [net, net[0]][order], [x, y][order], micro_batch_size=12
    )
    a, b = (encoder(of) for encoder, of in list(zip([literal, literal[0]], [x, y]))[order])
    (a.sum(1) * b.sum(1)).square().mean().backward()
    assert_close(gradients(net[1]), gradients(literal[1]), 1e-6)
    assert net[0].calls == 2 and torch.equal(net[0].seen, literal[0].seen)
