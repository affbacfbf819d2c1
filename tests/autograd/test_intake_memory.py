"""Buckets of gradients: how large they get, how long gradients are held, whose memory they are."""

import gc
import weakref
from types import SimpleNamespace

import fusedaccum as fa
import fusedaccum.limits
import pytest
import torch
from fusedaccum.autograd.grad_queue import _fresh_holders
from fusedaccum.core.backward import BackwardPasses
from sizes import limits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import assert_same_parameters, data, mean_loss, model, parts, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")


MIB = 1 << 20


@pytest.mark.parametrize(
    ("device", "memory", "bucket"),
    [("cpu", None, 8 << 20), ("cuda:1", 4 << 30, 32 << 20), ("cuda:1", 80 << 30, 320 << 20), ("mps", None, 32 << 20)],
)
def test_a_bucket_is_a_small_part_of_a_gpus_memory(device, memory, bucket, monkeypatch):
    device = torch.device(device)
    memories = {device: SimpleNamespace(total_memory=memory)} if memory else {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", memories.__getitem__)
    assert fusedaccum.limits.bucket(device) == bucket


@pytest.mark.parametrize(
    ("device", "sizes", "bucket"),
    [
        ("cpu", [], MIB),
        ("cpu", [4 * 50_000], MIB),  # one tensor, of which nothing is held back
        ("cpu", [4096] * 2000, MIB),
        ("cpu", [MIB // 2] * 40 + [5 * MIB], 5 * MIB),
        ("cpu", [MIB] * 40 + [100 * MIB], 8 * MIB),
        ("cuda:0", [], 32 * MIB),
        ("cuda:0", [100 * MIB], 32 * MIB),
        ("cuda:0", [MIB] * 324, 32 * MIB),  # GPT-2's blocks in FP32
        ("cuda:0", [MIB] * 2000, 125 * MIB),
        ("cuda:0", [MIB] * 1000 + [600 * MIB], 100 * MIB),  # the largest gradient fills it alone
        ("cuda:0", [MIB] * 100_000, 320 * MIB),
        ("mps", [MIB] * 2000, 32 * MIB),
    ],
)
@pytest.mark.parametrize("sent", [False, True])
def test_a_bucket_is_a_small_part_of_the_models_gradients_on_a_gpu_and_their_largest_on_a_cpu(
    device, sizes, bucket, sent, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    found = fusedaccum.limits.full_at(torch.device(device), sizes, sent)
    assert found == (min(bucket, 32 * MIB) if sent else bucket)


@pytest.fixture
def added(monkeypatch):
    """The bytes of the gradients of every call that adds some: what was held until then."""
    calls = []
    add = BackwardPasses.add

    def noted(self, slots, grads):
        calls.append([grad.nbytes for grad in grads])
        add(self, slots, grads)

    monkeypatch.setattr(BackwardPasses, "add", noted)
    return calls


@pytest.mark.parametrize(
    ("shapes", "bucket", "calls"),
    [
        ([(1024, 3072)], 0, 1),  # one tensor
        ([(32, 32)] * 2000, MIB, 8),
        ([(512, 512)] * 8 + [(1024, 1280)] + [(512, 512)] * 8, 5 * MIB, 4),
        ([(512, 512)] * 20 + [(1024, 4096)], 8 * MIB, 4),  # one gradient larger than any bucket
    ],
    ids=["one", "two thousand", "a large one", "one larger than a bucket"],
)
def test_on_a_cpu_no_more_is_held_than_a_bucket_and_the_gradient_that_fills_it(shapes, bucket, calls, added):
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1), 2)
    sum(p.square().sum() for p in params).backward()
    opt.step()
    assert sum(map(len, added)) == len(params) and len(added) == calls
    assert all(sum(sizes[:-1]) <= bucket for sizes in added)


@pytest.mark.parametrize("way", ["together", "large added later", "small added later", "replaced"])
def test_buckets_fit_all_parameters_that_there_are(way, added):
    """On a CPU the largest gradient decides a bucket's size: whenever it came, until it is gone."""
    small = [nn.Parameter(torch.randn(256, 512, dtype=torch.bfloat16)) for _ in range(8)]  # a quarter of a MiB
    large = nn.Parameter(torch.randn(1024, 512))  # FP32, 2 MiB
    first = {"large added later": small, "small added later": [large]}.get(way, [*small, large])
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(first, lr=0.1), 2)
    if way.endswith("later"):
        opt.add_param_group({"params": [large] if first is small else small})
    if way == "replaced":
        opt.param_groups[0]["params"] = small
        opt.param_groups = opt.param_groups
    sum(p.float().square().sum() for p in small).backward()
    opt.step()
    assert [len(sizes) for sizes in added] == ([4, 4] if way == "replaced" else [8])


def test_frozen_parameters_do_not_count_for_a_bucket(added):
    """Most of a model that is fine-tuned through adapters brings no gradient."""
    frozen = nn.Parameter(torch.randn(1024, 2048), requires_grad=False)
    params = [nn.Parameter(torch.randn(256, 256)) for _ in range(32)]  # of a quarter of a MiB
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([frozen, *params], lr=0.1), 2)
    sum(p.square().sum() for p in params).backward()
    opt.step()
    assert [sum(sizes) for sizes in added] == [MIB] * 8


@pytest.mark.parametrize("bucket", [1, 200, 1 << 30])
def test_bucket_size_does_not_change_a_bit(bucket):
    x, y = data(dtype=torch.float32)
    net, ref = model(torch.float32), model(torch.float32)
    with limits(bucket=bucket):
        opt = wrapped(net, 3, max_grad_norm=0.05)
    for batch in parts(x, y, (8, 8, 8)):
        mean_loss(net, *batch).backward()
        opt.step()
    opt2 = wrapped(ref, 3, max_grad_norm=0.05)
    for batch in parts(x, y, (8, 8, 8)):
        mean_loss(ref, *batch).backward()
        opt2.step()
    torch.testing.assert_close(opt.last_window.grad_norm, opt2.last_window.grad_norm, rtol=1e-12, atol=0)
    assert_same_parameters(net, ref, 1e-7)  # the clip coefficient's norm may be summed in another order


@pytest.mark.parametrize(("width", "bucket"), [(128, 100_000), (1024, fusedaccum.limits.bucket)])
def test_fresh_gradients_are_freed_as_soon_as_added(width, bucket):
    """No more fresh gradients are alive than a bucket, here of two, and the one being computed."""
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(20)])
    with limits(bucket=bucket):
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
    """A static gradient buffer (a CUDA graph's, say) is never p.grad, so nothing is added twice."""
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
    watch = [weakref.ref(opt), weakref.ref(net[0].weight), weakref.ref(opt._accumulation.collector)]
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
    """A gradient that other code holds is not queued: it might be overwritten in the meantime."""
    monkeypatch.setattr(Scratch, "hand_over", staticmethod(hand_over))
    monkeypatch.setattr(Scratch, "buffer", torch.empty(3))  # of which the tests before hold nothing
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
    add = BackwardPasses.add
    monkeypatch.setattr(
        BackwardPasses, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    module = twin(module)
    opt = wrapped(module, 1, make=lambda ps: torch.optim.SGD(ps, lr=0.0))
    x = torch.randint(0, 8, (2, 8)) if isinstance(module, nn.Embedding) else torch.randn(2, 2, 8, 8)
    module(x).square().sum().backward()
    assert calls == [len(list(module.parameters()))]
    opt.step()


def test_who_holds_a_fresh_gradient_is_found_out_with_a_real_one():
    """Fake tensors are held more often: gradients that other code holds would count as ours."""
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


@limits(bucket=3 * 4 * 64)
def test_every_full_bucket_is_one_call(monkeypatch):
    calls = []
    add = BackwardPasses.add
    monkeypatch.setattr(
        BackwardPasses, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])
    opt = wrapped(net, 2)
    for _ in range(2):
        net(torch.randn(2, 8)).sum().backward()
        opt.step()
    assert calls == [3, 3, 3, 1] * 2


class Fresh(torch.autograd.Function):
    """Multiplies; backward, in Python, returns a gradient held by nobody else, or one it keeps."""

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
    add = BackwardPasses.add
    monkeypatch.setattr(
        BackwardPasses, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
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
