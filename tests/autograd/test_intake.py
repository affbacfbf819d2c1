"""How gradients arrive: kinds of graphs, and hooks.

Buckets are in test_intake_memory.py, failures in test_intake_broken.py.
"""

import threading

import fusedaccum as fa
import fusedaccum.autograd.collector
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, big_batch_step, data, grads, mean_loss, model, parts, sgd, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")


class Checkpointed(nn.Module):
    """A model with every layer, or all but the last one, inside an activation checkpoint."""

    def __init__(self, reentrant, all_inside):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]).double()
        self.reentrant, self.all_inside = reentrant, all_inside

    def forward(self, x):
        x = x.clone().requires_grad_()
        for i, layer in enumerate(self.layers):
            if i < 2 or self.all_inside:
                x = checkpoint(lambda v, f=layer: torch.tanh(f(v)), x, use_reentrant=self.reentrant)
            else:
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
@pytest.mark.parametrize("all_inside", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_activation_checkpointing(reentrant, all_inside, owned):
    net, (x, y) = Checkpointed(reentrant, all_inside), data()
    big = twin(net)
    opt, plain = wrapped(net, None if owned else 3), sgd(big.parameters())
    for _ in range(2):
        for xs, ys in parts(x, y, (8, 8, 8)):
            mean_loss(net, xs, ys).backward()
            if not owned:
                opt.step()
        if owned:
            opt.step()
        assert opt.updated and opt.last_window.micro_batches == 3
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_p_grad_is_complete_when_a_reentrant_backward_returns():
    net, (x, y) = Checkpointed(True, True), data()
    plain = Checkpointed(False, True)
    plain.load_state_dict(net.state_dict())
    expected = torch.autograd.grad(mean_loss(plain, x, y), list(plain.parameters()))
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    for p, g in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    del opt


def test_tied_weights_arrive_once():
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    net = Tied().double()
    big = twin(net)
    tokens = torch.randint(0, 11, (12, 7))
    opt, plain = wrapped(net, 3), sgd(big.parameters())

    def loss(n, t):
        return nn.functional.cross_entropy(n(t).flatten(0, 1), t.flatten())

    for t in tokens.split(4):
        loss(net, t).backward()
        opt.step()
    loss(big, tokens).backward()
    plain.step()
    assert_same_parameters(net, big, 1e-12)


def test_expanded_and_transposed_gradients():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    q = nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t())  # a parameter that is itself transposed
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p, q], lr=1.0), 2)
    for _ in range(2):
        (p.sum() + p.t().matmul(q).sum() + q.sum()).backward()
        opt.step()
    for param in (p, q):
        assert param.grad.stride() == param.stride()
    before_p, before_q = p.detach() + p.grad, q.detach() + q.grad
    torch.testing.assert_close(p.grad, 1 + before_q.sum(1, keepdim=True).expand(4, 6))
    torch.testing.assert_close(q.grad, 1 + before_p.sum(1, keepdim=True).expand(4, 6))


def test_channels_last_parameters_keep_their_layout():
    net = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    opt = wrapped(net, 2)
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    net(x).square().sum().backward()
    assert net.weight.grad.stride() == net.weight.stride()
    expected = torch.autograd.grad(net(x).square().sum(), net.weight)[0]
    torch.testing.assert_close(net.weight.grad, expected)
    opt.step()


def test_frozen_and_thawed_parameters():
    net, (x, y) = model(), data()
    net[0].weight.requires_grad_(False)
    opt = wrapped(net, 1)
    frozen = net[0].weight.clone()
    mean_loss(net, x, y).backward()
    opt.step()
    assert net[0].weight.grad is None and torch.equal(net[0].weight, frozen) and not net[0].weight.requires_grad
    net[0].weight.requires_grad_(True)
    big = twin(net)
    expected = torch.autograd.grad(mean_loss(big, x, y), big[0].weight)[0]
    opt.backward(mean_loss(net, x, y), weight=24)
    opt.step()
    torch.testing.assert_close(net[0].weight.grad, expected)


def test_a_parameter_frozen_between_forward_and_backward_gets_no_gradient():
    net, (x, y) = model(), data()
    opt = wrapped(net, 1)
    before = net[0].weight.clone()
    loss = mean_loss(net, x, y)
    net[0].weight.requires_grad_(False)
    loss.backward()
    opt.step()
    assert net[0].weight.grad is None and torch.equal(net[0].weight, before)
    assert net[0].bias.grad is not None


def test_autograd_grad_does_not_accumulate():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    torch.autograd.grad(mean_loss(net, x, y), list(net.parameters()))
    assert grads(net) == [None] * 6
    penalty = sum(
        g.square().sum() for g in torch.autograd.grad(mean_loss(net, x, y), list(net.parameters()), create_graph=True)
    )
    penalty.backward()
    assert net[0].weight.grad is not None
    opt.step()


@pytest.mark.filterwarnings("ignore:p.grad was written to")
def test_post_accumulate_grad_hooks_find_the_running_sum():
    """As in plain PyTorch, where such hooks log p.grad or clip it."""
    net, (x, y) = model(), data()
    big, seen = twin(net), []

    def log_and_clip(p):
        seen.append(p.grad.clone())
        p.grad.clamp_(-0.01, 0.01)

    for p in (*net.parameters(), *big.parameters()):
        p.register_post_accumulate_grad_hook(log_and_clip)
    opt = wrapped(net, 2)
    for batch in parts(x, y, (12, 12)):
        mean_loss(net, *batch).backward()
        ours = seen.copy()
        seen.clear()
        mean_loss(big, *batch).backward()
        for a, b in zip(ours, seen, strict=True):
            torch.testing.assert_close(a, b)
        seen.clear()
        opt.step()


def test_backward_on_some_inputs():
    net, (x, y) = model(), data()
    opt = wrapped(net, 1)
    mean_loss(net, x, y).backward(inputs=[net[0].weight])
    assert net[0].weight.grad is not None and net[2].weight.grad is None
    opt.step()


def test_backward_called_from_other_threads():
    """Each backward is called from a thread of its own, one after the other."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    for batch in parts(x, y, (8, 8, 8)):
        loss = mean_loss(net, *batch)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_a_compiled_model():
    """A compiled backward is one function, which returns all gradients of its module together."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    compiled = torch.compile(net, backend="aot_eager")
    for xs, ys in parts(x, y, (12, 12)):
        nn.functional.mse_loss(compiled(xs), ys).backward()
        opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # inside the outer forward none does
@pytest.mark.parametrize("settings", [{"accum_steps": 2}, {}, {"nonfinite": "skip_micro_batch"}], ids=str)
def test_reentrant_passes_deeper_than_a_thread_of_the_engines(settings):
    """From level 60 on, PyTorch nests passes in threads of a pool, which start without Python."""
    weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(70)])

    def deep(x, depth):
        x = x * weights[depth]
        return checkpoint(deep, x, depth + 1, use_reentrant=True) if depth + 1 < len(weights) else x

    opt = fa.AccumulatingOptimizer(torch.optim.SGD(weights.parameters(), lr=1.0), **settings)
    for number in range(2):
        deep(torch.full((1,), 3.0, requires_grad=True), 0).sum().backward()
        if settings.get("accum_steps") or number:
            opt.step()
    assert opt.updated and opt.last_window.micro_batches == 2
    assert [p.grad.item() for p in weights.parameters()] == [3.0] * 70


def test_the_environment_chooses_the_hooks(each_intake):
    p = nn.Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
    made_by = type(opt._accumulation.collector._queue).__module__
    assert made_by == ("fusedaccum._intake" if each_intake == "native" else "fusedaccum.autograd.grad_queue")


def test_hooks_that_are_not_there_are_refused(monkeypatch):
    p = nn.Parameter(torch.zeros(1))
    monkeypatch.setenv("FUSEDACCUM_INTAKE", "c++")
    with pytest.raises(ValueError, match="FUSEDACCUM_INTAKE is 'c\\+\\+'; it must be auto, native or python"):
        fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
    monkeypatch.setenv("FUSEDACCUM_INTAKE", "native")
    monkeypatch.setattr(fusedaccum.autograd.collector.native, "why_missing", lambda name: "it was not built here")
    with pytest.raises(
        RuntimeError, match="FUSEDACCUM_INTAKE=native is not available: it was not built here; or use auto"
    ):
        fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
