"""A model on two devices, whose losses may be on either: numbers of both meet in one window."""

import math
import threading

import fusedaccum as fa
import pytest
import torch
from fusedaccum.core.backward import BackwardPasses
from sizes import limits
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def places(device):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    return [torch.device(device.type, index) for index in (0, 1)]


def parameters(places):
    return [nn.Parameter(torch.ones(3, device=place)) for place in places]


def test_micro_batches_may_reach_one_device_each(places):
    params = parameters(places)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), 2, nonfinite="skip_window")
    for p, factor in zip(params, (1.0, math.nan)):
        (p * factor).sum().backward()
        opt.step()
    assert int(opt.last_window.nonfinite) == 1 and not opt.updated


@pytest.mark.parametrize("bad", [0, 1])
def test_every_device_of_a_micro_batch_is_looked_at(places, bad):
    params = parameters(places)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), 2, nonfinite="skip_window")
    for factors in ([1.0] * len(params), [float("inf") if k % 2 == bad else 1.0 for k in range(len(params))]):
        sum((p * factor).sum().cpu() for p, factor in zip(params, factors, strict=True)).backward()
        opt.step()
    assert int(opt.last_window.nonfinite) == 1 and not opt.updated


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_window", "skip_micro_batch"])
@pytest.mark.parametrize("max_grad_norm", [None, 2.0])
@pytest.mark.parametrize("of_loss", [0, 1])
def test_grad_scaler(places, nonfinite, max_grad_norm, of_loss):
    ends = []
    for where in (["cpu", "cpu"], places):
        params = parameters(where)
        opt = fa.AccumulatingOptimizer(
            torch.optim.SGD(params, lr=0.25), 2, nonfinite=nonfinite, max_grad_norm=max_grad_norm
        )
        scaler = torch.amp.GradScaler(torch.device(where[0]).type, init_scale=8.0)
        said = []
        for factor in (1.0, 3.0, 1.0, math.inf, 1.0, 3.0):
            opt.backward(scaler.scale(sum((p * factor).sum().to(where[of_loss]) for p in params)))
            scaler.step(opt)
            scaler.update()
            said.append((opt.updated, opt.last_window and opt.last_window.as_dict()))
        ends.append((repr(said), scaler.get_scale(), [p.tolist() for p in params]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "settings", [{}, {"accum_steps": 2}, {"accum_steps": 2, "nonfinite": "skip_micro_batch"}], ids=str
)
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # before PyTorch 2.13
@pytest.mark.parametrize("intake", ["native", "python"])
def test_a_reentrant_checkpoint_may_cross_devices(places, settings, intake, monkeypatch):
    """Its pass ends in the thread of another device than the one that called it."""
    monkeypatch.setenv("FUSEDACCUM_INTAKE", intake)
    ends = []
    for where in (["cpu", "cpu"], places):
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        for number, layer in enumerate(layers):
            layer.load_state_dict({"weight": torch.eye(3) * (number + 1) / 3, "bias": torch.ones(3)})
            layer.to(where[number // 2])
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1), **settings)
        for x in (1.0, 2.0):
            h = torch.full((2, 3), x, requires_grad=True, device=where[0])
            for layer in layers:
                h = checkpoint(
                    lambda h, layer=layer: torch.tanh(layer(h.to(layer.weight.device))),
                    h,
                    use_reentrant=True,
                    preserve_rng_state=False,
                )
            h.sum().backward()
            if settings or x == 2.0:
                opt.step()
        assert opt.last_window.micro_batches == opt.last_window.weight == 2
        ends.append([p.cpu() for p in layers.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Broken(torch.autograd.Function):
    """Breaks off a backward pass, once the event that it is given is set."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert ctx.event.wait(10)
        raise ValueError("broken off")


@pytest.mark.parametrize("intake", ["native", "python"])
def test_a_late_gradient_of_a_broken_pass_does_not_join_the_next(device, intake, monkeypatch):
    """The engine tells of an exception while the thread of another device is still at work."""
    monkeypatch.setenv("FUSEDACCUM_INTAKE", intake)
    there, here, first = nn.Parameter(torch.zeros(3, device=device)), *(nn.Parameter(torch.zeros(3)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([there, here, first], lr=1.0))
    arrives, goes_on = threading.Event(), threading.Event()

    def slow(grad):
        if not arrives.is_set():
            arrives.set()
            assert goes_on.wait(10)

    there.register_hook(slow)
    with pytest.raises(ValueError, match="broken off"):
        (Broken.apply(here * 1.0, arrives).sum() + (first * 1.0).sum() + (there * 100).sum().cpu()).backward()
    opt.reset()
    x = torch.zeros(1, requires_grad=True) * 1.0
    x.register_hook(lambda grad: goes_on.set())
    ((there * 1).sum().cpu() + x.sum() + (here * 1.0).sum()).backward()  # from right to left
    opt.step()
    assert (there.tolist(), here.tolist(), first.tolist()) == ([-1.0] * 3, [-1.0] * 3, [0.0] * 3)


def test_losses_of_one_micro_batch_may_be_on_one_device_each(places):
    params = parameters(places)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.5), 2)
    scaler = torch.amp.GradScaler(places[0].type, init_scale=8.0)
    for _ in range(4):
        for p in params:
            opt.backward(scaler.scale(p.sum()))
        scaler.step(opt)
        scaler.update()
    assert float(opt.last_window.loss) == 3.0


def test_a_weight_on_the_cpu_weighs_a_loss_on_the_device(device):
    p = nn.Parameter(torch.ones(3, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.0), 3)
    for factor, weight in ((1.0, 1), (math.nan, 0), (5.0, 3)):
        opt.backward((p * factor).sum(), weight=torch.tensor(weight))
        opt.step()
    assert float(opt.last_window.loss) == (1 * 3 + 3 * 15) / 4


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": math.inf}], ids=["plain", "norm"])
def test_weights_may_be_on_one_device_each(places, settings):
    params = parameters(places)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), window_weight=6, **settings)
    for factor, weight, place in ((1.0, 2.0, places[0]), (4.0, 3.0, places[1]), (2.0, 1, "cpu")):
        opt.backward(sum((p * factor).sum().to(place) for p in params), weight=torch.tensor(weight, device=place))
        opt.step()
    assert float(opt.last_window.weight) == 6.0
    assert float(opt.last_window.loss) == pytest.approx((2 * 6 + 3 * 24 + 1 * 12) / 6)
    for p in params:
        assert p.tolist() == pytest.approx([1 - (2 * 1 + 3 * 4 + 1 * 2) / 6] * 3)


def test_weights_of_means_in_16_bits_may_be_on_one_device_each(places):
    params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=place)) for place in places]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), 2, buffer_dtype=None, max_grad_norm=math.inf)
    opt.backward(sum(p.sum().to("cpu") for p in params), weight=torch.tensor(1.0, device=places[0]))
    opt.step()
    opt.backward((params[0] * 4).sum(), weight=torch.tensor(3.0, device=places[1]))
    opt.step()
    assert params[0].tolist() == [1 - (1 * 1 + 3 * 4) / 4] * 3
    assert (
        params[1].tolist() == [1 - 1 / 4] * 3
    )  # its mean is still the first micro-batch's, over the weight on the other device


def test_progress_leaves_out_a_weight_that_it_would_have_to_wait_for(device):
    p = nn.Parameter(torch.ones(3, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), window_weight=6)
    opt.backward(p.sum(), weight=torch.tensor(2.0, device=device))
    opt.step()
    assert opt.progress == {"window": 0, "micro_batch": 1}


def test_fp64_sums_are_divided_by_a_loss_scale_in_fp64(device):
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    for weight in (1.0, 2.0):
        opt.backward(scaler.scale(p.sum()), weight=weight)
        scaler.step(opt)
        scaler.update()
    assert abs(p.item() + 1) < 1e-15


@pytest.mark.parametrize("full", ["cpu", "device"])
def test_a_bucket_is_full_when_the_device_of_what_arrives_says_so(device, monkeypatch, full):
    most = {"cpu": 1 << 20, device.type: 1 << 20, torch.device("cpu" if full == "cpu" else device).type: 1}
    calls = []
    add = BackwardPasses.add
    monkeypatch.setattr(
        BackwardPasses, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    params = parameters(["cpu"] * 3 + [device] * 3)
    with limits(bucket=lambda where: most[where.type]):
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.5), 2)
    for some in (params[:3], params[3:]):
        opt.backward(sum(p.square().sum() for p in some))
        opt.step()
    assert calls == ([1, 1, 1, 3] if full == "cpu" else [3, 1, 1, 1])


@limits(bucket=1 << 40, SENT=100)  # as on a large GPU
def test_a_bucket_is_a_sixteenth_of_the_gradients_on_its_own_device(device, monkeypatch):
    calls = []
    add = BackwardPasses.add
    monkeypatch.setattr(
        BackwardPasses, "add", lambda self, slots, grads: calls.append(len(slots)) or add(self, slots, grads)
    )
    here = [nn.Parameter(torch.ones(16, 16)) for _ in range(40)]
    there = [nn.Parameter(torch.ones(size, device=device)) for size in [8] * 30 + [24] * 30]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([*here, *there[:32]], lr=0.5), 2)
    sum(p.square().sum() for p in there[30:32]).backward()  # 96 bytes each
    opt.step()
    assert calls == [2]  # a sixteenth of 1,152 bytes is less than the least
    opt.add_param_group({"params": there[32:]})
    calls.clear()
    sum(p.square().sum() for p in there[:30]).backward()  # 32 bytes each: eight have more than a sixteenth of 3,840
    opt.step()
    assert calls == [8, 8, 8, 6]
