"""Buffers in CPU memory: the same numbers as on the device, bit by bit, at a bounded cost in the device's memory."""

import copy
import gc
import itertools
import threading
import warnings

import fusedaccum as fa
import fusedaccum.closing
import fusedaccum.intake
import fusedaccum.offload
import pytest
import torch
from fusedaccum.offload import Offload, loads
from torch import nn
from torch.utils._pytree import tree_map_only


@pytest.fixture(autouse=True)
def small_stages(monkeypatch):
    """So small that a gradient takes several, and several gradients take one."""
    monkeypatch.setattr(fusedaccum.offload, "STAGE_BYTES", 1024)
    monkeypatch.setattr(fusedaccum.closing, "STAGE_BYTES", 1024)
    monkeypatch.setattr(fusedaccum.intake, "BUCKET_BYTES", 3000)


class Net(nn.Module):
    """Parameters of two dtypes, strides that are not the usual ones, one that is frozen and one that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(128, 48).t() / 7)
        self.layers = nn.Sequential(nn.Linear(128, 37), nn.Tanh(), nn.Linear(37, 19, bias=False), nn.Tanh())
        self.to(torch.bfloat16)
        self.head = nn.Linear(19, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.gappy = nn.Parameter(torch.ones(5, 4)[:, ::2])
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        x = self.layers(torch.relu(x @ self.turned)).float()
        return self.head(x) * self.scale + self.frozen + self.gappy.sum(1)

    def last(self):
        """The element whose gradient is the last to be added."""
        return self.turned[-1, -1].float()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


class CountsSteps(torch.optim.SGD):
    """Somebody's optimizer that keeps a count of its own a group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def micro_batches(device, count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(4, 48, generator=generator)
        yield x.bfloat16().to(device), torch.randn(4, 5, generator=generator).to(device)


def moved(model, device):
    """``model.to(device)`` that keeps strides, also such as leave gaps."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            there = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device)
            setattr(module, name, nn.Parameter(there.copy_(p.detach()), requires_grad=p.requires_grad))
    return model


def made(device, make=sgd, **settings):
    torch.manual_seed(1)
    model = moved(Net(), device)
    return model, fa.AccumulatingOptimizer(make(model.parameters()), **settings)


def weight_of(kind, number, device):
    weight = [3.0, 1.0, 2.5][number % 3]
    return {"none": None, "number": weight}.get(kind, torch.tensor(weight, device=device))


def train(model, opt, device, count=8, kind="none", bad=(), start=0):
    """Through ``count`` micro-batches, in the ``bad`` ones of which a gradient is not finite; returns what was said of the windows."""
    said = []
    for number, (x, y) in enumerate(micro_batches(device, count)):
        if number < start:
            continue
        loss = (model(x) - y).square().mean()
        if number in bad:
            loss = loss + model.last() * float("nan")
        opt.backward(loss, weight=weight_of(kind, number, device))
        opt.step()
        said.append(report(opt))
        opt.zero_grad()
    opt.flush()
    return [*said, report(opt)]


def report(opt):
    last = opt.last_window
    return last and (last.micro_batches, float(last.weight), last.nonfinite and int(last.nonfinite), bool(last.applied))


def contents(model, opt):
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [x.detach().cpu() for x in [*model.parameters(), *state]]


def assert_same(ours, theirs, tolerance=0.0):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and not a.isnan().any()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


CASES = {
    "counted": ({"accum_steps": 3}, {}),
    "caller-owned": ({}, {}),
    "weighed": ({"window_weight": 5}, {"kind": "number"}),
    "tensor weights": ({"accum_steps": 3}, {"kind": "tensor"}),
    "sum": ({"accum_steps": 3, "reduction": "sum"}, {"kind": "tensor"}),
    "bf16 buffers": ({"accum_steps": 3, "buffer_dtype": torch.bfloat16}, {"kind": "tensor"}),
    "the parameters' dtypes": ({"accum_steps": 3, "buffer_dtype": None}, {}),
    "fp64 buffers": ({"accum_steps": 3, "buffer_dtype": torch.float64}, {}),
    "stochastic": ({"accum_steps": 3, "buffer_dtype": torch.bfloat16, "rounding": "stochastic"}, {}),
    "norm of running means": (
        {"accum_steps": 3, "buffer_dtype": torch.bfloat16, "max_grad_norm": 1e9},
        {"kind": "tensor"},
    ),
    "counted, not applied": ({"accum_steps": 3, "nonfinite": "skip_micro_batch", "max_grad_norm": 1e9}, {"bad": (1,)}),
    "skip_window": ({"accum_steps": 3, "nonfinite": "skip_window"}, {"bad": (1,)}),
    "skip_micro_batch": ({"accum_steps": 3, "nonfinite": "skip_micro_batch"}, {"bad": (1,)}),
    "reference": ({"accum_steps": 3, "backend": "reference"}, {}),
}


@pytest.mark.parametrize("make", [sgd, adamw, CountsSteps])
@pytest.mark.parametrize("case", CASES)
def test_offloaded_training_is_the_same_bit_by_bit(device, case, make):
    settings, loop = CASES[case]
    ends, said = [], []
    for where in ({}, {"buffer_device": "cpu"}):
        torch.manual_seed(5)  # of stochastic rounding
        model, opt = made(device, make, **settings, **where)
        said.append(train(model, opt, device, **loop))
        ends.append(contents(model, opt))
    assert_same(*ends)
    assert said[0] == said[1]
    assert any(entry and entry[2] for entry in said[0]) == ("bad" in loop)


@pytest.mark.parametrize("kind", ["none", "tensor"])
@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.1}, {"max_grad_norm": 0.1, "nonfinite": "skip_window"}])
def test_clipping_and_the_norm(device, monkeypatch, settings, kind):
    """Up to the order in which squares are added; without a pass for it."""
    ends, norms = [], []
    for where in ({}, {"buffer_device": "cpu"}):
        model, opt = made(device, accum_steps=4, **settings, **where)
        if where:
            monkeypatch.delattr(fa.ops, "stats")
        train(model, opt, device, bad=(1,) if "nonfinite" in settings else (), kind=kind)
        ends.append(contents(model, opt))
        norms.append(float(opt.last_window.grad_norm))
    assert_same(*ends, tolerance=1e-6)
    assert norms[0] > 0.1 and norms[1] == pytest.approx(norms[0], rel=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_master_weights_are_stepped_on_the_cpu(device, fused):
    """As those of a model that is there altogether: the device of late_device.cpp computes with the CPU's bits, a GPU not."""

    def make(params):
        return torch.optim.AdamW(params, lr=0.01, fused=fused, foreach=False)

    model, opt = made(device, make, accum_steps=3, master_weights=True, buffer_device="cpu")
    train(model, opt, device)
    torch.manual_seed(1)
    plain = Net()
    plain.gappy = nn.Parameter(
        plain.gappy.detach().contiguous()
    )  # PyTorch's fused step on the CPU takes no account of gaps
    other = fa.AccumulatingOptimizer(make(plain.parameters()), accum_steps=3, master_weights=True)
    train(plain, other, torch.device("cpu"))
    assert_same(
        *([p.detach().cpu() for p in net.parameters()] for net in (model, plain)),
        1e-2 if device.type == "cuda" else 0.0,
    )
    moments = [x for entry in opt.state.values() for x in entry.values()]
    assert moments and all(x.device.type == "cpu" for x in moments)
    assert all(p.grad is None and p.device == device for p in model.parameters())


def test_checkpoints_inside_a_window_go_on_bit_by_bit(device, tmp_path):
    straight, opt = made(device, accum_steps=3)
    train(straight, opt, device)
    for first, then in itertools.product([None, "cpu"], repeat=2):
        model, opt = made(device, accum_steps=3, buffer_device=first)
        for x, y in itertools.islice(micro_batches(device, 8), 4):
            (model(x) - y).square().mean().backward()
            opt.step()
        on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, (model.state_dict(), opt.state_dict()))
        torch.save(on_cpu, tmp_path / "saved.pt")
        weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
        resumed, again = made(device, accum_steps=3, buffer_device=then)
        with torch.no_grad():
            for name, p in resumed.named_parameters():
                p.copy_(weights[name])
        again.load_state_dict(state)
        train(resumed, again, device, start=4)
        assert_same([p.detach().cpu() for p in resumed.parameters()], [p.detach().cpu() for p in straight.parameters()])


def test_a_checkpoint_waits_for_what_is_being_added(device):
    model, opt = made(device, accum_steps=3, nonfinite="skip_window", buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    ((model(x) - y).square().mean() + model.last() * float("nan")).backward()
    saved = opt.state_dict()["fusedaccum"]
    assert saved["micro_batch"]["nonfinite"] == 1
    total = sum(
        entry["sum"].double().square().sum() for k, entry in saved["buffers"].items() if not entry["sum"].isnan().any()
    )
    finite = [r["sq_norm"] for r in saved["norms"] if not r["sq_norm"].isnan()]
    assert finite and 0 < sum(finite) <= total * (1 + 1e-9)


def test_a_copy_goes_on_like_the_original(device):
    model, opt = made(device, accum_steps=3, buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    (model(x) - y).square().mean().backward()
    opt.step()
    twin, its = copy.deepcopy((model, opt))
    for net, optimizer in ((model, opt), (twin, its)):
        (net(x) - y).square().mean().backward()
        optimizer.flush()
    assert_same(contents(twin, its), contents(model, opt))


# -- what p.grad is -------------------------------------------------------------------------------------------------------


def test_p_grad_is_there_for_the_inner_step_only(device):
    seen = []
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    opt.register_step_pre_hook(
        lambda inner, *_: seen.append([p.grad is not None for g in inner.param_groups for p in g["params"]])
    )
    for x, y in micro_batches(device, 2):
        (model(x) - y).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        opt.step()
    trained = [name not in ("unused", "frozen") for name, _ in model.named_parameters()]
    assert seen == [trained]  # all at once, for the hook
    assert all(p.grad is None for p in model.parameters())


def test_pytorchs_own_optimizers_are_stepped_in_parts_and_others_once(device, monkeypatch):
    steps = []
    plain = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: (steps.append(1), plain(self, closure)))
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    train(model, opt, device, count=2)
    assert len(steps) > 3
    model, opt = made(device, CountsSteps, accum_steps=2, buffer_device="cpu")
    train(model, opt, device, count=2)
    assert opt.param_groups[0]["steps"] == 1


def test_a_step_that_somebody_counts_is_one(device):
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    calls, plain = [], opt.optimizer.step
    opt.optimizer.step = lambda: (calls.append(1), plain())
    train(model, opt, device, count=2)
    assert calls == [1]


def test_parameters_of_several_devices(device):
    count = 2 if device.type == "late" else torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two devices")
    other = torch.device(device.type, 1)
    ends = []
    for where in ({}, {"buffer_device": "cpu"}):
        torch.manual_seed(1)
        first, second = moved(nn.Linear(70, 60), device), moved(nn.Linear(60, 50), other)
        settings = {"accum_steps": 2, "max_grad_norm": 1e9} | where
        opt = fa.AccumulatingOptimizer(sgd([*first.parameters(), *second.parameters()]), **settings)
        for number in range(6):
            x = torch.full((2, 70), number / 5 + 0.1, device=device)
            loss = second(torch.tanh(first(x)).to(other)).square().mean()
            opt.backward(loss, weight=torch.tensor(number + 1.0, device=other))
            opt.step()
        ends.append(contents(nn.ModuleList([first, second]), opt))
    assert_same(*ends)


def test_a_step_that_fails_half_way_is_finished_by_the_next(device, monkeypatch):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    calls, plain = itertools.count(), torch.optim.SGD.step

    def fails_once(self, closure=None):
        if next(calls) == 2:
            raise MemoryError("injected")
        return plain(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", fails_once)
    with pytest.raises(MemoryError, match="injected"):
        train(model, opt, device, count=2)
    assert not opt.updated and all(p.grad is None for p in model.parameters())
    opt.step()
    assert opt.updated
    assert_same(contents(model, opt), contents(straight, its))


# -- memory ---------------------------------------------------------------------------------------------------------------


class Made(torch.autograd.Function):
    """Brings the parameter a gradient in memory of its own, and needs no other."""

    @staticmethod
    def forward(ctx, p, x):
        ctx.shape = p.shape
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(ctx.shape, device=grad.device), grad


@pytest.mark.parametrize("sizes", [[24], [24, 24, 24], [1] * 24, [5, 1, 9, 1, 1, 7]])
def test_memory_for_gradients_is_bounded_by_the_ring(late_device, device, monkeypatch, sizes):
    """``sizes`` in stages. Step for step, the sums' return included."""
    if late_device is None:
        pytest.skip("counts what the device of late_device.cpp allocates; benchmarks/bench_memory.py measures a GPU's")
    stage = 1 << 14
    for module, name in (
        (fusedaccum.offload, "STAGE_BYTES"),
        (fusedaccum.closing, "STAGE_BYTES"),
        (fusedaccum.intake, "BUCKET_BYTES"),
    ):
        monkeypatch.setattr(module, name, stage)
    params = [nn.Parameter(torch.zeros(stage // 4 * size, device=device)) for size in sizes]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1, foreach=False), accum_steps=2, buffer_device="cpu")
    for _ in range(2):
        x = torch.ones(1, device=device, requires_grad=True)
        for p in params:
            x = Made.apply(p, x)
        gc.collect()
        before = late_device.allocated()
        late_device.reset_peak()
        x.sum().backward()
        ring = 0 if opt.last_window or len(opt.state) else fusedaccum.offload.STAGES
        during = (late_device.peak() - before) / stage
        assert (
            during < ring + 1 + max(sizes) + 0.2
        )  # the ring where it is not there yet, the bucket, and the gradient that fills it
        late_device.reset_peak()
        opt.step()
        assert (late_device.peak() - before) / stage < fusedaccum.offload.STAGES + 2 * max(
            sizes
        ) + 0.2  # SGD has a temporary
        assert all(p.grad is None for p in params)
    assert opt.updated and all((p.cpu() == -0.1).all() for p in params)


# -- gradients that others hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", ["native", "python"])
def test_a_gradient_that_autograd_goes_on_adding_to(device, monkeypatch, hooks):
    """``h`` and ``p`` get the same gradient, to which that of the other use of ``h`` is then added in place."""
    monkeypatch.setenv("FUSEDACCUM_INTAKE", hooks)
    w, p = (nn.Parameter(torch.randn(shape).to(device)) for shape in ((32, 32), (4, 32)))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([w, p], lr=1.0, foreach=False), accum_steps=1, buffer_device="cpu")
    x, factor, before = torch.randn(4, 32).to(device), torch.randn(4, 32), p.detach().cpu().clone()
    h = x @ w
    side = h * 100.0
    (((h + p) * factor.to(device)).sum() + side.sum()).backward()
    opt.step()
    torch.testing.assert_close(before - p.detach().cpu(), factor, rtol=0.0, atol=1e-5)


class Static(torch.autograd.Function):
    """Gives the same memory as its gradient each time, as graphed callables do."""

    memory: torch.Tensor

    @staticmethod
    def forward(ctx, p, value):
        ctx.value = value
        return p.sum() * 0

    @staticmethod
    def backward(ctx, _):
        return Static.memory.fill_(ctx.value), None


@pytest.mark.parametrize("hooks", ["native", "python"])
def test_gradients_in_static_memory_and_such_that_a_hook_writes_to(device, monkeypatch, hooks):
    monkeypatch.setenv("FUSEDACCUM_INTAKE", hooks)
    p, q = (nn.Parameter(torch.zeros(1000, device=device)) for _ in range(2))
    Static.memory = torch.empty(1000, device=device)
    kept = []
    q.register_hook(kept.append)
    sgd1 = torch.optim.SGD([p, q], lr=1.0, foreach=False)
    opt = fa.AccumulatingOptimizer(sgd1, accum_steps=3, reduction="none", buffer_device="cpu")
    for value in (1.0, 2.0, 4.0):
        (Static.apply(p, value) + (q * 1.0).sum()).backward()
        kept.pop().mul_(50)
        opt.step()
    assert (p.cpu() == -7).all() and (q.cpu() == -3).all()


# -- the two ops ----------------------------------------------------------------------------------------------------------


def late(x, device):
    """A copy on the device that its current stream has not made yet."""
    return x.pin_memory().to(device, non_blocking=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_and_scalars_are_read_when_the_current_stream_has_made_them(device, dtype):
    offload = Offload()
    for _ in range(3):
        shapes = [(3000,), (), (0,), (7, 5), (400,)]
        buffers, grads = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(2))
        scale, decay = torch.rand((), dtype=torch.float64), torch.rand(())
        expected, stats, theirs = [x.clone() for x in buffers], fa.ops.Stats.empty(), fa.ops.Stats.empty()
        fa.ops.accumulate_(expected, grads, scale, decay=decay, stats=theirs)
        there = [late(x, device) for x in grads]
        how = {"overwrite": False, "rounding": None, "stats": stats, "backend": "auto"}
        offload.accumulate_(buffers, there, late(scale, device), decay=late(decay, device), **how)
        del there
        offload.wait()
        assert_same(buffers, expected)
        torch.testing.assert_close(stats.sq_norm, theirs.sq_norm, rtol=1e-12, atol=0.0)
        assert stats.nonfinite == theirs.nonfinite == 0


def test_cast_brings_what_was_there_when_it_was_called(device):
    offload = Offload()
    ins = [torch.randn(3000), torch.randn(8, 5).t(), torch.randn(6), torch.randn(1)]
    expected = [x.bfloat16() for x in ins]
    outs = [
        torch.full_like(x, torch.nan, dtype=torch.bfloat16, device=device) for x in (*ins[:2], torch.ones(12), ins[3])
    ]
    around, outs[2] = outs[2], outs[2][::2]
    offload.cast_(outs, ins, backend="auto")
    for x in ins:
        x.fill_(torch.nan)
    assert_same([x.cpu() for x in outs], expected)
    assert around[1::2].isnan().all()


@pytest.mark.parametrize("sizes", [[0], [1], [5, 0, 7], [255, 256, 257, 1], [3000], [17, 2000, 3, 900, 1]])
def test_loads_hold_every_element_once_and_fit_into_a_stage(sizes):
    tensors = [torch.empty(size, dtype=torch.bfloat16 if k % 2 else torch.float32) for k, size in enumerate(sizes)]
    found = []
    for load, used in loads(tensors):
        ends = fusedaccum.offload.HEAD
        for cut in load:
            nbytes = (cut.end - cut.begin) * tensors[cut.tensor].itemsize
            assert cut.place % 64 == 0 and cut.place >= ends and nbytes > 0
            ends = cut.place + nbytes
            found += [(cut.tensor, element) for element in range(cut.begin, cut.end)]
        assert load and ends <= used <= fusedaccum.offload.STAGE_BYTES
    assert found == [(k, element) for k, size in enumerate(sizes) for element in range(size)]


# -- what goes wrong ------------------------------------------------------------------------------------------------------


def test_a_thread_that_fails_is_told_of_until_reset(device, monkeypatch):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    plain, calls = fa.ops.accumulate_, itertools.count()

    def fails_once(*args, **kwargs):
        if next(calls) == 3:
            raise MemoryError("injected")
        plain(*args, **kwargs)

    monkeypatch.setattr(fa.ops, "accumulate_", fails_once)
    with pytest.raises(RuntimeError, match=r"call opt.reset\(\) to drop it") as told:
        train(model, opt, device, count=2)
    assert isinstance(told.value.__cause__, MemoryError)
    for call in (opt.step, opt.flush, opt.state_dict):
        with pytest.raises(RuntimeError, match=r"opt.reset\(\)"):
            call()
    opt.reset()
    train(model, opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_a_failure_is_told_of_by_the_next_step(device, monkeypatch):
    model, opt = made(device, accum_steps=4, buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    with monkeypatch.context() as broken:
        broken.setattr(fa.ops, "accumulate_", lambda *_, **__: 1 / 0)
        (model(x) - y).square().mean().backward()
        opt._sums.offload._last.result()
    with pytest.raises(RuntimeError, match=r"call opt.reset\(\)"):
        opt.step()


def test_an_interrupt_while_gradients_are_on_their_way(device, monkeypatch):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    plain, calls = fusedaccum.offload._free_stage, itertools.count()

    def interrupted(ring):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return plain(ring)

    monkeypatch.setattr(fusedaccum.offload, "_free_stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, opt, device, count=2)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=r"call opt.reset\(\)"):
        warnings.simplefilter("ignore")  # that the window was dropped, where it was
        train(model, opt, device, count=2)
    opt.reset()
    train(model, opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_writing_masters_back_is_tried_again_without_another_step(device, monkeypatch):
    p = nn.Parameter(torch.ones(100, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.125), 1, master_weights=True, buffer_device="cpu")
    p.sum().backward()
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(Offload, "cast_", lambda *_, **__: 1 / 0)
        opt.step()
    opt.step()
    assert opt.updated and (p.cpu() == 0.875).all()


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW])
def test_masters_take_the_state_that_is_there_when_they_are_made(device, make):
    ends = []
    for where in ({}, {"master_weights": True, "buffer_device": "cpu"}):
        torch.manual_seed(1)
        model = moved(nn.Linear(20, 10), device)
        inner = make(model.parameters(), lr=0.1, foreach=False)
        model(torch.ones(3, 20, device=device)).square().mean().backward()
        inner.step()
        inner.zero_grad()
        opt = fa.AccumulatingOptimizer(inner, accum_steps=1, **where)
        for _ in range(3):
            model(torch.ones(3, 20, device=device)).square().mean().backward()
            opt.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    assert_same(*ends)
    assert all(x.device.type == "cpu" for entry in opt.state.values() for x in entry.values())


def test_capturable_masters_are_refused(device):
    p = nn.Parameter(torch.ones(3, device=device))
    inner = torch.optim.Adam([p])
    inner.param_groups[0]["capturable"] = True
    with pytest.raises(
        ValueError, match=r"capturable=True.*buffer_device='cpu' and master_weights=True.*build it without"
    ):
        fa.AccumulatingOptimizer(inner, master_weights=True, buffer_device="cpu")
    fa.AccumulatingOptimizer(inner, buffer_device="cpu")


def test_a_backward_that_breaks_off_drops_the_window(device):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")

    def fails(_):
        raise ValueError("injected")

    x, y = next(micro_batches(device, 1))
    hidden = torch.relu(x @ model.turned)
    hidden.register_hook(fails)
    out = model.layers(hidden).float()
    with pytest.raises(ValueError, match="injected"):
        ((model.head(out) - y).square().mean()).backward()
    with pytest.warns(RuntimeWarning, match="the open window was dropped"):
        opt.step()
    opt.reset()
    train(model, opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_a_dropped_wrapper_leaves_nothing_behind(device):
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    (model(x) - y).square().mean().backward()  # and the thread is at work still
    del opt
    gc.collect()
    (model(x) - y).square().mean().backward()
    assert model.head.weight.grad is not None
    gc.collect()
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("fusedaccum-offload") and _stays(thread)
    ]


def _stays(thread):
    thread.join(timeout=5)
    return thread.is_alive()


@pytest.mark.parametrize("end", ["step", "flush"])
def test_gradients_by_hand_are_refused_and_nothing_is_lost(device, end):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    for number, (x, y) in enumerate(micro_batches(device, 2)):
        (model(x) - y).square().mean().backward()
        if number == 0:
            model.unused.grad = torch.ones_like(model.unused)
            with pytest.raises(RuntimeError, match=r"\.grad was set by hand.*buffer_device.*set it to None"):
                getattr(opt, end)()
            model.unused.grad = None
        opt.step()
    assert_same(contents(model, opt), contents(straight, its))


def test_what_reads_p_grad_is_refused(device):
    model, opt = made(device, accum_steps=1, buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    (model(x) - y).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"normalize_\(\) makes p.grad.*clip with max_grad_norm="):
        opt.normalize_()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"GradScaler looks for overflows in p.grad.*use bf16"):
        scaler.step(opt)
    opt.step()
    assert opt.updated


def test_layers_that_add_by_themselves_are_refused(device):
    weight = nn.Parameter(torch.ones(3).to(device))
    weight.grad_added_to_main_grad = False
    with pytest.raises(ValueError, match=r"main_grad.*buffer_device='cpu'.*leave buffer_device out"):
        fa.AccumulatingOptimizer(sgd([weight]), buffer_device="cpu")


def test_fused_layers_go_the_plain_way(device):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    train(fa.fuse_linear(model), opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_parameters_on_the_cpu_are_as_without(device):
    """A model half of which is there already."""
    ends = []
    for where in ({}, {"buffer_device": "cpu"}):
        torch.manual_seed(1)
        first, second = nn.Linear(7, 6), moved(nn.Linear(6, 300), device)  # of which each is a part
        opt = fa.AccumulatingOptimizer(sgd([*first.parameters(), *second.parameters()]), accum_steps=2, **where)
        for number in range(6):
            second(torch.tanh(first(torch.full((2, 7), number / 5))).to(device)).square().mean().backward()
            if where and number:
                assert first.weight.grad is not None and second.weight.grad is None
            opt.step()
        ends.append(contents(nn.ModuleList([first, second]), opt))
    assert_same(*ends)


def test_nothing_is_warned_of(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, opt = made(device, accum_steps=2, buffer_device="cpu")
        train(model, opt, device)
