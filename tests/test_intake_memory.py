"""Buckets of gradients that wait to be added: how large they get, how long gradients are held, and whose memory they are."""

import gc
import weakref
from types import SimpleNamespace

import fusedaccum as fa
import fusedaccum.intake.intake
import pytest
import torch
from fusedaccum.gathering.gathering import Gathering
from fusedaccum.intake.arrivals import _fresh_holders
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import assert_same_parameters, data, mean_loss, model, parts, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")


@pytest.mark.parametrize(
    ("device", "memory", "bucket"),
    [("cpu", None, 8 << 20), ("cuda:1", 4 << 30, 32 << 20), ("cuda:1", 80 << 30, 320 << 20), ("mps", None, 32 << 20)],
)
def test_a_bucket_is_a_small_part_of_a_gpus_memory(device, memory, bucket, monkeypatch):
    device = torch.device(device)
    memories = {device: SimpleNamespace(total_memory=memory)} if memory else {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", memories.__getitem__)
    assert fusedaccum.intake.intake.bucket_bytes(device) == bucket


@pytest.mark.parametrize("bucket", [1, 200, 1 << 30])
def test_bucket_size_does_not_change_a_bit(bucket, monkeypatch):
    monkeypatch.setattr("fusedaccum.intake.intake.bucket_bytes", lambda _: bucket)
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


@pytest.mark.parametrize(("width", "bucket"), [(128, 100_000), (1024, None)])
def test_fresh_gradients_are_freed_as_soon_as_added(width, bucket, monkeypatch):
    """During backward, no more fresh gradients are alive than one bucket, here of two, and the gradient being computed."""
    if bucket:
        monkeypatch.setattr("fusedaccum.intake.intake.bucket_bytes", lambda _: bucket)
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(20)])
    opt = wrapped(net, 2)
    alive, most = [], 0

    def watch(grad):
        nonlocal most
        alive.append(weakref.ref(grad.untyped_storage()))
        most = max(most, sum(ref() is not None for ref in alive))

    for p in net.parameters():
        p.register_hook(watch)
    net(torch.randn(4, width)).sum().backward()
    assert len(alive) == 20
    assert most <= 3
    opt.step()


def test_p_grad_never_aliases_a_gradient_that_somebody_else_keeps():
    """We read a static gradient buffer (a CUDA graph's, say) and never make it p.grad, so nothing is added twice."""
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


def test_hooks_do_not_keep_model_or_wrapper_alive():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    watch = [weakref.ref(opt), weakref.ref(net[0].weight), weakref.ref(opt._gathering._intake)]
    del opt, net
    gc.collect()
    assert [ref() for ref in watch] == [None] * 3


class Scratch(torch.autograd.Function):
    """Multiplies, and writes its weight's gradient into the same buffer every time."""

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
    [
        lambda buffer: buffer,
        torch.Tensor.detach,
        lambda buffer: buffer[:],
        lambda buffer: buffer.detach()[:],
        lambda buffer: torch.from_numpy(buffer.numpy()),
    ],
    ids=["itself", "alias", "view", "view of an alias", "NumPy's"],
)
def test_static_gradient_overwritten_within_the_same_backward(hand_over, policy, monkeypatch):
    """A gradient that other code holds too is not queued: it might be overwritten before the bucket is full."""
    monkeypatch.setattr(Scratch, "hand_over", staticmethod(hand_over))
    a, b = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.full((3,), 3.0))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), 1, nonfinite=policy)
    x = torch.full((3,), 5.0, requires_grad=True)
    Scratch.apply(Scratch.apply(x, a), b).sum().backward()
    opt.step()
    assert a.grad.tolist() == [15.0] * 3 and b.grad.tolist() == [10.0] * 3


@pytest.mark.parametrize("module", [nn.Linear(8, 8), nn.Conv2d(2, 3, 3), nn.LayerNorm(8), nn.Embedding(8, 8)], ids=str)
def test_ordinary_gradients_are_ours_alone(module, monkeypatch):
    """So they can be queued, and one call adds those of all parameters of a module."""
    calls = []
    add = Gathering.add
    monkeypatch.setattr(
        Gathering, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    module = twin(module)
    opt = wrapped(module, 1, make=lambda ps: torch.optim.SGD(ps, lr=0.0))
    x = torch.randint(0, 8, (2, 8)) if isinstance(module, nn.Embedding) else torch.randn(2, 2, 8, 8)
    module(x).square().sum().backward()
    assert calls == [len(list(module.parameters()))]
    opt.step()


def test_who_holds_a_fresh_gradient_is_found_out_with_a_real_one():
    """Fake tensors are held more often: a gradient that other code holds too would then count as ours."""
    with FakeTensorMode(), torch.device("meta"):
        found = _fresh_holders.__wrapped__()
    assert found == _fresh_holders()


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
    monkeypatch.setattr("fusedaccum.intake.intake.bucket_bytes", lambda _: 3 * 4 * 64)
    calls = []
    add = Gathering.add
    monkeypatch.setattr(
        Gathering, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])
    opt = wrapped(net, 2)
    for _ in range(2):
        net(torch.randn(2, 8)).sum().backward()
        opt.step()
    assert calls == [3, 3, 3, 1] * 2


class Fresh(torch.autograd.Function):
    """Multiplies; its backward, in Python, returns a gradient that nobody else holds, or one that it keeps."""

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
    add = Gathering.add
    monkeypatch.setattr(
        Gathering, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    a, b = nn.Parameter(torch.full((3,), 2.0)), nn.Parameter(torch.full((3,), 3.0))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), 1)
    Fresh.apply(Fresh.apply(torch.full((3,), 5.0, requires_grad=True), a), b).sum().backward()
    assert calls == ([1, 1] if kept else [2])
    opt.step()
    assert a.grad.tolist() == [15.0] * 3 and b.grad.tolist() == [10.0] * 3


def test_frozen_parameters_have_no_buffers():
    frozen, p = nn.Parameter(torch.randn(1000), requires_grad=False), nn.Parameter(torch.randn(3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([frozen, p], lr=1.0), 2)
    (frozen.sum() * p.sum()).backward()
    opt.step()
    assert p.grad.untyped_storage().nbytes() < frozen.nbytes
