"""How gradients arrive: kinds of graphs, memory, threads; tests/test_intake_broken.py has what goes wrong."""

import gc
import threading
import weakref

import fusedaccum as fa
import fusedaccum.intake.intake
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, big_batch_step, data, grads, mean_loss, model, parts, sgd, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")


class Checkpointed(nn.Module):
    """Every parameter, or all but the last layer's, inside activation checkpoints."""

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


@pytest.mark.parametrize("bucket", [1, 200, 1 << 30])
def test_bucket_size_does_not_change_a_bit(bucket, monkeypatch):
    monkeypatch.setattr("fusedaccum.intake.intake.BUCKET_BYTES", bucket)
    x, y = data(dtype=torch.float32)
    net, ref = model(torch.float32), model(torch.float32)
    opt = wrapped(net, 3, max_grad_norm=0.05)
    for batch in parts(x, y, (8, 8, 8)):
        mean_loss(net, *batch).backward()
        opt.step()
    monkeypatch.undo()
    opt2 = wrapped(ref, 3, max_grad_norm=0.05)
    for batch in parts(x, y, (8, 8, 8)):
        mean_loss(ref, *batch).backward()
        opt2.step()
    torch.testing.assert_close(opt.last_window.grad_norm, opt2.last_window.grad_norm, rtol=1e-12, atol=0)
    assert_same_parameters(net, ref, 1e-7)  # the clip coefficient's norm may be summed in another order


def test_fresh_gradients_are_freed_as_soon_as_added(monkeypatch):
    """While backward runs, no more fresh gradients live than a bucket and the one being made."""
    monkeypatch.setattr("fusedaccum.intake.intake.BUCKET_BYTES", 100_000)
    net = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(20)])  # 64 KiB a gradient
    opt = wrapped(net, 2)
    alive, most = [], 0

    def watch(grad):
        nonlocal most
        alive.append(weakref.ref(grad.untyped_storage()))
        most = max(most, sum(ref() is not None for ref in alive))

    for p in net.parameters():
        p.register_hook(watch)
    net(torch.randn(4, 128)).sum().backward()
    assert len(alive) == 20
    assert most <= 3
    opt.step()


def test_p_grad_never_aliases_a_gradient_that_somebody_else_keeps():
    """A static gradient buffer (a CUDA graph's, say) is read, never stolen: nothing is doubled."""
    p = nn.Parameter(torch.zeros(5))
    static = torch.ones(5)

    class Static(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.sum()

        @staticmethod
        def backward(ctx, g):
            return static

    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3)
    for _ in range(3):
        Static.apply(p).backward()
        opt.step()
        assert static.tolist() == [1.0] * 5
    assert p.tolist() == [-1.0] * 5


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


def test_post_accumulate_grad_hooks_find_the_running_sum():
    """As in plain PyTorch: they log p.grad, or clip it."""
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


def test_data_parallel_replicas_in_threads():
    """Backward called from several threads, one after the other."""
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


def test_hooks_do_not_keep_model_or_wrapper_alive():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    watch = [weakref.ref(opt), weakref.ref(net[0].weight), weakref.ref(opt._gathering._intake)]
    del opt, net
    gc.collect()
    assert [ref() for ref in watch] == [None] * 3


def test_model_in_torch_compile_graph_of_autograd_functions():
    """A module whose backward is one compiled function hands over all its gradients together."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    compiled = torch.compile(net, backend="aot_eager")
    for xs, ys in parts(x, y, (12, 12)):
        nn.functional.mse_loss(compiled(xs), ys).backward()
        opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


class Scratch(torch.autograd.Function):
    """Multiplies, and writes its weight's gradient into one and the same buffer every time."""

    buffer = torch.empty(3)
    hand_over = staticmethod(lambda buffer: buffer)

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        torch.mul(g, x, out=Scratch.buffer)
        return g * w, Scratch.hand_over(Scratch.buffer)


@pytest.mark.parametrize("policy", ["propagate", "skip_micro_batch"])
@pytest.mark.parametrize(
    "hand_over",
    [lambda buffer: buffer, torch.Tensor.detach, lambda buffer: buffer[:], lambda buffer: buffer.detach()[:]],
    ids=["itself", "alias", "view", "view of an alias"],
)
def test_static_gradient_overwritten_within_the_same_backward(hand_over, policy, monkeypatch):
    """What somebody else holds too is not queued: it may be overwritten before the bucket is full."""
    monkeypatch.setattr(Scratch, "hand_over", staticmethod(hand_over))
    a, b = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.full((3,), 3.0))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), 1, nonfinite=policy)
    x = torch.full((3,), 5.0, requires_grad=True)
    Scratch.apply(Scratch.apply(x, a), b).sum().backward()
    opt.step()
    assert a.grad.tolist() == [15.0] * 3 and b.grad.tolist() == [10.0] * 3


@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.Conv2d(2, 3, 3), nn.LayerNorm(8), nn.Embedding(8, 8)], ids=str)
def test_ordinary_gradients_are_ours_alone(module, monkeypatch):
    """So that they can be queued: one call for all the parameters of a module."""
    calls = []
    add = fa.optimizer.Gathering.add
    monkeypatch.setattr(
        fa.optimizer.Gathering, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    module = twin(module)
    opt = wrapped(module, 1, make=lambda ps: torch.optim.SGD(ps, lr=0.0))
    x = torch.randint(0, 8, (2, 8)) if isinstance(module, nn.Embedding) else torch.randn(2, 2, 8, 8)
    module(x).square().sum().backward()
    assert calls == [len(list(module.parameters()))]
    opt.step()


def test_dropping_model_and_wrapper_frees_the_memory_at_once():
    gc.collect()
    gc.disable()
    try:
        p = nn.Parameter(torch.zeros(10))
        opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
        p.sum().backward()
        opt.step()
        watch = [weakref.ref(p), weakref.ref(opt), weakref.ref(p.grad.untyped_storage())]
        del p, opt
        assert [ref() for ref in watch] == [None] * 3
    finally:
        gc.enable()


def test_every_full_bucket_is_one_call(monkeypatch):
    monkeypatch.setattr("fusedaccum.intake.intake.BUCKET_BYTES", 3 * 4 * 64)
    calls = []
    add = fa.optimizer.Gathering.add
    monkeypatch.setattr(
        fa.optimizer.Gathering, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])
    opt = wrapped(net, 2)
    for _ in range(2):
        net(torch.randn(2, 8)).sum().backward()
        opt.step()
    assert calls == [3, 3, 3, 1] * 2


class Fresh(torch.autograd.Function):
    """Multiplies, with a backward in Python that hands over what nobody else holds, or what somebody does."""

    kept = None

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        grad = g * x
        if Fresh.kept is not None:
            Fresh.kept.append(grad)
        return g * w, grad


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
def test_gradients_made_in_python_wait_for_the_bucket_unless_somebody_holds_them(kept, monkeypatch):
    monkeypatch.setattr(Fresh, "kept", [] if kept else None)
    calls = []
    add = fa.optimizer.Gathering.add
    monkeypatch.setattr(
        fa.optimizer.Gathering, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    a, b = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.full((3,), 3.0))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), 1)
    Fresh.apply(Fresh.apply(torch.full((3,), 5.0, requires_grad=True), a), b).sum().backward()
    assert calls == ([1, 1] if kept else [2])
    opt.step()
    assert a.grad.tolist() == [15.0] * 3 and b.grad.tolist() == [10.0] * 3


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # within the outer forward none has
def test_reentrant_passes_deeper_than_a_thread_of_the_engines():
    """From the 60th on, PyTorch runs nested passes in threads of a pool, which begin without Python."""
    weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(70)])

    def deep(x, depth):
        x = x * weights[depth]
        return checkpoint(deep, x, depth + 1, use_reentrant=True) if depth + 1 < len(weights) else x

    opt = fa.AccumulatingOptimizer(torch.optim.SGD(weights.parameters(), lr=1.0), 2)
    for _ in range(2):
        deep(torch.full((1,), 3.0, requires_grad=True), 0).sum().backward()
        opt.step()
    assert opt.updated and opt.last_window.micro_batches == 2
    assert [p.grad.item() for p in weights.parameters()] == [3.0] * 70


def test_the_environment_chooses_the_hooks(each_intake):
    p = nn.Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
    made_by = type(opt._gathering._intake._arrivals).__module__
    assert made_by == ("fusedaccum._intake" if each_intake == "native" else "fusedaccum.intake.arrivals")


def test_hooks_that_are_not_there_are_refused(monkeypatch):
    p = nn.Parameter(torch.zeros(1))
    monkeypatch.setenv("FUSEDACCUM_INTAKE", "c++")
    with pytest.raises(ValueError, match="FUSEDACCUM_INTAKE is 'c\\+\\+'; it must be auto, native or python"):
        fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
    monkeypatch.setenv("FUSEDACCUM_INTAKE", "native")
    monkeypatch.setattr(fusedaccum.intake.intake.native, "why_missing", lambda name: "it was not built here")
    with pytest.raises(
        RuntimeError, match="FUSEDACCUM_INTAKE=native is not available: it was not built here; or use auto"
    ):
        fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
