"""Buffers in CPU memory give the same numbers as on the device, bit for bit."""

import copy
import itertools

import fusedaccum as fa
import fusedaccum.extensions.cpu_offload
import pytest
import torch
from offloading import CountsSteps, Net, adamw, assert_same, contents, made, micro_batches, moved, sgd, train
from torch import nn
from torch.utils._pytree import tree_map_only

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
        torch.manual_seed(5)  # seeds stochastic rounding
        model, opt = made(device, make, **settings, **where)
        said.append(train(model, opt, device, **loop))
        ends.append(contents(model, opt))
    assert_same(*ends)
    assert said[0] == said[1]
    assert any(entry and entry[2] for entry in said[0]) == ("bad" in loop)


@pytest.mark.parametrize("kind", ["none", "tensor"])
@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.1}, {"max_grad_norm": 0.1, "nonfinite": "skip_window"}])
def test_clipping_and_the_norm(device, monkeypatch, settings, kind):
    """The same, up to the order of added squares, with no pass over the buffers (ops.stats)."""
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
    """The oracle is wholly on the CPU, whose bits late_device.cpp computes, or on the GPU."""

    def make(params):
        return torch.optim.AdamW(params, lr=0.01, fused=fused, foreach=False)

    model, opt = made(device, make, accum_steps=3, master_weights=True, buffer_device="cpu")
    train(model, opt, device)
    place = device if device.type == "cuda" else torch.device("cpu")
    torch.manual_seed(1)
    plain = Net().to(place)
    plain.gappy = nn.Parameter(
        plain.gappy.detach().contiguous()
    )  # PyTorch's fused step on the CPU takes no account of gaps
    other = fa.AccumulatingOptimizer(make(plain.parameters()), accum_steps=3, master_weights=True)
    train(plain, other, place)
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


# -- what p.grad is --------------------------------------------------------------------------------


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
    assert seen == [trained]  # the hook sees all gradients at once
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


def test_a_weight_told_to_one_wrapper_reaches_the_other_in_the_engines_thread(device):
    """Hooks of parameters on a device run in that thread."""
    model = moved(nn.Linear(3, 2, bias=True), device)
    model.weight.data.zero_(), model.bias.data.zero_()
    first, second = (fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2) for p in (model.weight, model.bias))
    for size in (1, 3):
        x = torch.full((size, 3), float(size), device=device)
        first.backward(model(x).mul(size).sum() / size, weight=size)
        first.step(), second.step()
    assert float(second.last_window.weight) == 4
    assert model.bias.tolist() == [-2.5, -2.5]  # (1 * 1 + 3 * 3) / 4


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


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("make", [sgd, adamw, CountsSteps])
def test_a_drop_in_steps_again_on_the_same_gradient(device, make, masters):
    ends = []
    for where in ({}, {"buffer_device": "cpu"}):
        model, opt = made(device, make, reduction="none", master_weights=masters, **where)
        for x, y in micro_batches(device, 2):
            (model(x) - y).square().mean().backward()
            for _ in range(3):
                opt.step()
                assert opt.updated
            opt.zero_grad()
        ends.append(contents(model, opt))
    assert_same(*ends)


@pytest.mark.parametrize("zeroes", ["opt", "model"])
def test_a_drop_in_says_nothing_of_gradients_that_p_grad_does_not_show(device, zeroes):
    model, opt = made(device, reduction="none", buffer_device="cpu")
    for x, y in micro_batches(device, 3):
        (model(x) - y).square().mean().backward()
        opt.step()
        (model if zeroes == "model" else opt).zero_grad()


def test_masters_reach_a_parameter_that_was_laid_out_anew(device):
    start, x = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    p = nn.Parameter(start.to(device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, buffer_device="cpu", master_weights=True)
    p.data = p.data.contiguous(memory_format=torch.channels_last)  # as module.to(memory_format=...) does
    opt.backward((p * x.to(device)).sum())
    opt.step()
    torch.testing.assert_close(p.cpu(), start - x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [adamw, lambda ps: torch.optim.SGD(ps, lr=2**-4, momentum=0.5)])
def test_state_that_is_made_anew_like_the_parameter_is_the_masters_in_cpu_memory(device, make, dtype):
    """Beside an FP32 model on the CPU whose parameters are the masters."""
    values = [torch.randn(5, 3).to(dtype) for _ in range(3)]
    masters = [nn.Parameter(value.float()) for value in values]
    model = [nn.Parameter(value.to(device)) for value in values]
    opt = fa.AccumulatingOptimizer(make(model), 1, master_weights=True, buffer_device="cpu")
    pairs = [(model, opt), (masters, make(masters))]
    for window in range(4):
        grads = [torch.randn(5, 3).to(dtype) for _ in values]
        for parameters, optimizer in pairs:
            if window == 2:
                for name, value in optimizer.state[parameters[1]].items():
                    if value.dim():
                        optimizer.state[parameters[1]][name] = torch.zeros_like(parameters[1].data)
            torch.autograd.backward(parameters, [grad.to(p.device, p.dtype) for p, grad in zip(parameters, grads)])
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(model, masters):
            assert torch.equal(p.detach().cpu(), q.detach().to(dtype))
            for name, theirs in pairs[1][1].state[q].items():
                assert opt.state[p][name].device == theirs.device and torch.equal(opt.state[p][name], theirs)


@pytest.mark.parametrize("shapes", [[(3, 2), (0,), (), (0, 3), (600,)], [(0,), (3, 0)], [()]], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"buffer_dtype": torch.bfloat16, "rounding": "stochastic"},
        {"max_grad_norm": 0.5},
        {"nonfinite": "skip_micro_batch"},
        {"reduction": "sum"},
    ],
    ids=str,
)
def test_offloaded_parameters_of_no_elements_and_single_numbers(device, settings, shapes):
    ends = []
    for where in (device, torch.device("cpu")):
        parameters = [nn.Parameter(torch.full(shape, 0.5, device=where)) for shape in shapes]
        elsewhere = {"buffer_device": "cpu"} if where == device else {}
        opt = fa.AccumulatingOptimizer(sgd(parameters), 2, **settings, **elsewhere)
        for number in range(6):
            opt.backward(sum((p * (number + i)).sum() for i, p in enumerate(parameters)), weight=2)
            opt.step()
            if number == 2:
                state = opt.state_dict()
                opt.reset()
                opt.load_state_dict(state)
            opt.zero_grad()
        ends.append([p.detach().cpu() for p in parameters])
    assert_same(*ends, tolerance=1e-6 if "max_grad_norm" in settings else 0.0)
