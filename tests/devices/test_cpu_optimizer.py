"""``optimizer_device="cpu"``: the bits of FP32 masters that are stepped on a CPU.

The device has parameters and sums only.
"""

import copy
import gc
import itertools
import time

import fusedaccum as fa
import pytest
import torch
from fusedaccum.extensions.cpu_optimizer import CpuOptimizer
from interrupting import interrupted
from offloading import CountsSteps, Net, assert_same, made, micro_batches, moved, train
from sizes import limits
from torch import nn
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

AWAY = {"optimizer_device": "cpu"}
MASTERS = {"master_weights": True}


@pytest.fixture(autouse=True)
def small_parts():
    with limits(stepped=lambda _: 5000, PINNED=1 << 13):
        yield


def fused(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "AdamW fused": fused,
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "not PyTorch's": lambda ps: CountsSteps(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
}
CASES = {
    "counted": ({"accum_steps": 3}, {}),
    "caller-owned": ({}, {}),
    "weighed": ({"window_weight": 5}, {"kind": "number"}),
    "tensor weights": ({"accum_steps": 3}, {"kind": "tensor"}),
    "sum": ({"accum_steps": 3, "reduction": "sum"}, {"kind": "tensor"}),
    "none": ({"accum_steps": 3, "reduction": "none"}, {}),
    "clipped": ({"accum_steps": 3, "max_grad_norm": 0.1}, {"kind": "tensor"}),
    "FP64 buffers": ({"accum_steps": 3, "buffer_dtype": torch.float64}, {}),
    "24 bits": ({"accum_steps": 3, "buffer_dtype": torch.bfloat16, "rounding": "compensated"}, {}),
    "skip_window": ({"accum_steps": 3, "nonfinite": "skip_window", "max_grad_norm": 0.1}, {"bad": (1,)}),
    "skip_micro_batch": ({"accum_steps": 3, "nonfinite": "skip_micro_batch"}, {"bad": (1,)}),
    "skip_norm": ({"accum_steps": 3, "skip_norm": 7.0}, {}),
    "reference": ({"accum_steps": 3, "backend": "reference"}, {}),
}


def both(device, make, settings):
    """``(place, model, wrapper)`` of the optimizer on the CPU, and of the oracle.

    The oracle has FP32 masters beside the model. It is on a CPU, too, whose kernels the device made
    for tests computes with; on a GPU it is there, where the step's kernels differ a little.
    """
    place = torch.device("cpu") if device.type == "late" else device
    torch.manual_seed(1)
    net = moved(Net(), place)
    net.gappy = Parameter(net.gappy.detach().contiguous())  # as masters are
    theirs = MASTERS | settings
    if settings.get("rounding") == "compensated":  # where ties are rounded otherwise; there are none here
        theirs["master_weights"] = "split"
    inner = make(net.parameters())
    inner.register_step_pre_hook(lambda *_: None)  # so that a fused one finds gradients that are divided
    ours = (device, *made(device, make, **settings, **AWAY))
    return ours, (place, net, fa.AccumulatingOptimizer(inner, **theirs))


def weights(opt):
    """What is stepped: masters, and where there are none, parameters."""
    masters = opt.state_dict()["fusedaccum"].get("masters", {})
    params = [p for group in opt.param_groups for p in group["params"]]
    return [masters.get(i, p.detach()).cpu() for i, p in enumerate(params)]


def state(opt):
    params = [p for group in opt.param_groups for p in group["params"]]
    return [value for p in params for value in opt.state[p].values() if isinstance(value, torch.Tensor)]


def check_same(opt, its, device):
    tolerance = 0.0 if device.type == "late" else 1e-2
    assert_same(weights(opt), weights(its), tolerance)
    assert_same([x.cpu() for x in state(opt)], [x.cpu() for x in state(its)], tolerance)


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_training_has_the_bits_of_masters_on_a_cpu(device, case, make):
    settings, loop = CASES[case]
    (_, model, opt), (place, plain, its) = both(device, OPTIMIZERS[make], settings)
    assert train(model, opt, device, **loop) == train(plain, its, place, **loop)
    check_same(opt, its, device)
    assert all(x.device.type == "cpu" for x in state(opt)) and len(state(opt)) > 0
    for p, master in zip(model.parameters(), weights(opt), strict=True):
        assert p.device == device and torch.equal(p.detach().cpu(), master.to(p.dtype))


def test_a_literal_fp32_loop_has_the_same_bits(device):
    model, opt = made(device, fused, accum_steps=2, **AWAY)
    copies = [Parameter(p.detach().cpu().float()) for p in model.parameters()]
    plain = fused(copies)
    for (x, y), first in zip(micro_batches(device, 6), itertools.cycle([True, False])):
        trains = [p for p in model.parameters() if p.requires_grad]
        grads = dict(zip(trains, torch.autograd.grad((model(x) - y).square().mean(), trains, allow_unused=True)))
        for q, p in zip(copies, model.parameters()):
            if (grad := grads.get(p)) is not None:
                q.grad = grad.cpu().float() if first else (q.grad + grad.cpu().float()) / 2
        (model(x) - y).square().mean().backward()
        opt.step()
        if not first:
            plain.step()
        opt.zero_grad()
    assert_same(weights(opt), [q.detach() for q in copies], 1e-6)  # its fused step divides by itself
    assert_same(
        [p.detach().cpu() for p in model.parameters()],
        [m.to(p.dtype) for m, p in zip(weights(opt), model.parameters())],
    )


# -- what changes between the last add and the step ------------------------------------------------


def test_the_sums_of_a_known_last_micro_batch_leave_during_its_backward(device):
    model, opt = made(device, accum_steps=2, **AWAY)
    away, sizes = opt._accumulation.extensions.of(CpuOptimizer), []
    for x, y in micro_batches(device, 4):
        (model(x) - y).square().mean().backward()
        sizes.append(len(away._left))
        opt.step()
        assert not away._left
    assert sizes == [0, len(opt._accumulation.sums.slots_with_grad())] * 2


def replaced(model, opt):
    if opt.progress["micro_batch"] == "2/3":
        model.head.weight.grad = torch.ones_like(model.head.weight)


def written(model, opt):
    if opt.progress["micro_batch"] == "2/3":
        model.head.weight.grad.mul_(3)


def taken(model, opt):
    model.head.weight.grad = None


def clipped(model, opt):
    if opt.progress["micro_batch"] == "2/3":
        opt.normalize_()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.05, foreach=False)


def looked_at(model, opt):
    assert opt.state_dict()["fusedaccum"]["masters"]


@pytest.mark.filterwarnings("ignore:.*was set to None inside an open window")
@pytest.mark.filterwarnings("ignore:p.grad was written to")
@pytest.mark.parametrize("between", [replaced, written, taken, clipped, looked_at])
def test_what_p_grad_is_when_the_window_closes_is_stepped(device, between):
    ends = []
    for where, model, opt in both(device, OPTIMIZERS["SGD"], {"accum_steps": 3}):
        train(model, opt, where, count=6, before_step=between)
        ends.append(opt)
    check_same(*ends, device)


def test_a_micro_batch_of_several_passes(device):
    ends = []
    for where, model, opt in both(device, OPTIMIZERS["SGD"], {"accum_steps": 2}):
        for x, y in micro_batches(where, 4):
            loss = (model(x) - y).square().mean()
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            opt.step()
            opt.zero_grad()
        ends.append(opt)
    check_same(*ends, device)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler(device, unscales):
    """Which writes to the sums past their version, when they have left."""
    ends = []
    for where in (device, torch.device("cpu")):
        p = Parameter(torch.ones(2000, device=where, dtype=torch.float16))
        opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.25), 2, **(AWAY if where == device else MASTERS))
        scaler = torch.amp.GradScaler(where.type, init_scale=8.0)
        for number, factor in enumerate((1.0, 3.0, 1.0, 1e6, 1.0, 2.0)):
            opt.backward(scaler.scale((p * factor).sum()))
            if unscales and number % 2:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        ends.append((p.tolist(), weights(opt)[0].tolist(), scaler.get_scale(), repr(opt.last_window.as_dict())))
    assert ends[0] == ends[1] and ends[0][0][0] < 1


def test_p_grad_is_the_windows_gradient_after_the_step(device):
    pair = both(device, fused, {"accum_steps": 2})
    for where, net, wrapped in pair:
        for x, y in micro_batches(where, 2):
            (net(x) - y).square().mean().backward()
            wrapped.step()
    (_, model, _), (_, plain, _) = pair
    for p, q in zip(model.parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert p.grad.device == device
            torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), rtol=0 if device.type == "late" else 1e-3, atol=1e-6)


# -- hooks, and the inner optimizer's other methods ------------------------------------------------


@pytest.mark.parametrize("how", ["replace", "write", "of the masters"])
def test_a_step_pre_hook_may_change_gradients(device, how):
    p = Parameter(torch.ones(2000, device=device, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.25), 1, **AWAY)

    def hook(inner, *_):
        if how == "replace":
            p.grad = torch.full_like(p.grad, 2.0)
        elif how == "write":
            p.grad.fill_(2.0)
        else:
            (master,) = inner.param_groups[0]["params"]
            assert master.device.type == "cpu" and (master.grad == 1).all()
            master.grad.fill_(2.0)

    opt.register_step_pre_hook(hook)
    p.sum().backward()
    opt.step()
    assert (p.cpu() == 0.5).all()


def test_a_step_post_hook_sees_the_model_and_may_write_to_it(device):
    p, seen = Parameter(torch.ones(2000, device=device)), []
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.25), 1, **AWAY)

    def hook(inner, *_):
        (master,) = inner.param_groups[0]["params"]
        seen.extend([p.detach().cpu()[0].item(), master[0].item(), master.grad[0].item()])
        p.detach().fill_(3.0)

    opt.register_step_post_hook(hook)
    for _ in range(2):
        p.sum().backward()
        opt.step()
        opt.zero_grad()
    assert seen == [0.75, 0.75, 1.0, 2.75, 2.75, 1.0] and (p.cpu() == 3).all()
    assert (weights(opt)[0] == 3).all()


class WritesThroughData(torch.optim.SGD):
    """Another project's optimizer: no version tells that it has stepped."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])

    def learning_rate(self):
        return self.param_groups[0]["lr"]

    def halve(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)

    @torch.no_grad()
    def drop_gradients(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * 2


def test_an_optimizer_that_writes_through_data(device):
    p, seen = Parameter(torch.ones(2000, device=device)), []
    opt = fa.AccumulatingOptimizer(WritesThroughData([p], lr=0.25), 1, **AWAY)
    opt.register_step_post_hook(lambda *_: seen.append(p.detach().cpu()[0].item()))
    for _ in range(2):
        loss = p.sum()
        assert opt.learning_rate() == 0.25
        loss.backward()  # nothing has been written to the model since the forward
        opt.step()
        opt.zero_grad()
    assert seen == [0.75, 0.5]
    opt.halve()
    assert (p.cpu() == 0.25).all()
    p.sum().backward()
    opt.drop_gradients()
    assert p.grad.device == device and (p.grad.cpu() == 2).all()
    opt.step()
    assert (p.cpu() == -0.25).all()


def test_a_step_hook_may_call_the_wrapper(device):
    p, seen = Parameter(torch.ones(2000, device=device)), []
    opt = fa.AccumulatingOptimizer(WritesThroughData([p], lr=0.25), 1, **AWAY)
    opt.register_step_pre_hook(
        lambda *_: seen.append((opt.learning_rate(), opt.state_dict()["fusedaccum"]["masters"][0][0]))
    )
    for _ in range(2):
        p.sum().backward()
        opt.step()
        opt.zero_grad()
    assert [lr for lr, _ in seen] == [0.25, 0.25] and (p.cpu() == 0.5).all()


@pytest.mark.parametrize("make", ["SGD", "AdamW fused", "not PyTorch's"])
def test_a_drop_in_steps_again_on_the_same_gradient(device, make):
    ends = []
    for where, model, opt in both(device, OPTIMIZERS[make], {"reduction": "none"}):
        for x, y in micro_batches(where, 2):
            (model(x) - y).square().mean().backward()
            for _ in range(3):
                opt.step()
            opt.zero_grad()
        ends.append(opt)
    check_same(*ends, device)


# -- parameters and checkpoints --------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, 4])  # between two windows, and inside one
@pytest.mark.parametrize(("of", "to"), [(AWAY, AWAY), (AWAY, MASTERS), (MASTERS, AWAY)], ids=str)
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_checkpoints_load_into_either_kind_in_either_order(device, tmp_path, of, to, cut, first):
    straight, its = made(device, accum_steps=3, **AWAY)
    train(straight, its, device)
    model, opt = made(device, accum_steps=3, **of)
    for x, y in itertools.islice(micro_batches(device, 8), cut):
        (model(x) - y).square().mean().backward()
        opt.step()
        opt.zero_grad()
    on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, (model.state_dict(), opt.state_dict()))
    torch.save(on_cpu, tmp_path / "saved.pt")
    saved, of_optimizer = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed, again = made(device, accum_steps=3, **to)

    def load_model():
        with torch.no_grad():
            for name, p in resumed.named_parameters():
                p.copy_(saved[name])

    loads = [load_model, lambda: again.load_state_dict(of_optimizer)]
    for load in loads if first == "model" else reversed(loads):
        load()
    train(resumed, again, device, start=cut)
    tolerance = 0.0 if device.type == "late" else 1e-3
    assert_same(
        [p.detach().cpu() for p in resumed.parameters()], [p.detach().cpu() for p in straight.parameters()], tolerance
    )


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_a_copy_goes_on_like_the_original(device, place):
    if place == "cpu":
        device = torch.device("cpu")
    elif device.type == "late":
        pytest.skip("PyTorch cannot copy sums on this device, which are no parameters")
    model, opt = made(device, accum_steps=2, **AWAY)
    train(model, opt, device, count=4)
    twin, its = copy.deepcopy((model, opt))
    for net, optimizer in ((model, opt), (twin, its)):
        train(net, optimizer, device, count=2)
    check_same(its, opt, device)


def test_parameters_come_and_go_and_are_frozen(device):
    ends = []
    for where in (device, torch.device("cpu")):
        torch.manual_seed(0)
        params = [Parameter(torch.randn(size).bfloat16().to(where)) for size in (900, 5, 700)]
        opt = fa.AccumulatingOptimizer(
            torch.optim.SGD(params, lr=0.25, momentum=0.5), 2, **(AWAY if where == device else MASTERS)
        )
        more = Parameter(torch.randn(40).bfloat16().to(where))

        def window(of, opt=opt, where=where):
            for i in (1.0, 2.0):
                sum((p * p).sum() * i for p in of).backward()
                opt.step()
                opt.zero_grad()

        window(params)
        opt.add_param_group({"params": [more], "lr": 0.125})
        window([*params, more])
        params[0].requires_grad_(False)
        window([params[1], more])
        params[0].requires_grad_(True)
        with torch.no_grad():
            params[1].fill_(3.0)
        params[2].data = params[2].data.clone()
        window(params)
        ends.append(opt)
    check_same(*ends, device)


def test_parameters_of_several_devices(device):
    count = 2 if device.type == "late" else torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two devices")
    other, ends = torch.device(device.type, 1), []
    for places in ((device, other, "cpu"), ("cpu", "cpu", "cpu")):
        torch.manual_seed(1)
        layers = [moved(nn.Linear(40, 40), place) for place in places]
        settings = {"accum_steps": 2, "max_grad_norm": 0.01} | (AWAY if places[0] == device else {})
        params = [p for layer in layers for p in layer.parameters()]
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False), **settings)
        for number in range(6):
            x = torch.full((2, 40), number / 5 + 0.1)
            for layer, place in zip(layers, places):
                x = torch.tanh(layer(x.to(place)))
            opt.backward(x.square().mean(), weight=number + 1.0)
            opt.step()
        ends.append([p.detach().cpu() for p in params])
    assert_same(*ends, tolerance=1e-6)


def test_masters_reach_a_parameter_that_was_laid_out_anew(device):
    start, x = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    p = Parameter(start.to(device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, **AWAY)
    p.data = p.data.contiguous(memory_format=torch.channels_last)  # as module.to(memory_format=...) does
    opt.backward((p * x.to(device)).sum())
    opt.step()
    torch.testing.assert_close(p.cpu(), start - x)


@pytest.mark.parametrize("shapes", [[(3, 2), (0,), (), (0, 3), (600,)], [(0,), (3, 0)], [()]], ids=str)
def test_parameters_of_no_elements_and_single_numbers(device, shapes):
    ends = []
    for where in (device, torch.device("cpu")):
        params = [Parameter(torch.full(shape, 0.5, device=where)) for shape in shapes]
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1), 2, **(AWAY if where == device else {}))
        for number in range(4):
            opt.backward(sum((p * (number + i)).sum() for i, p in enumerate(params)))
            opt.step()
            opt.zero_grad()
        ends.append([p.detach().cpu() for p in params])
    assert_same(*ends)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"accum_steps": None}, {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}], ids=str
)
def test_the_device_holds_parameters_and_sums_and_nothing_else(late_device, device, settings):
    if late_device is None:
        pytest.skip("counts what the device of late_device.cpp allocates; benchmarks/bench_memory.py measures a GPU's")
    n, count = 1 << 14, 24
    gc.collect()
    begun = late_device.allocated()
    params = [Parameter(torch.ones(n, device=device, dtype=torch.bfloat16)) for _ in range(count)]
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW(params, lr=0.1), **({"accum_steps": 2} | AWAY | settings))
    sums = 3 if settings.get("rounding") else 4
    for _ in range(4):
        grads = [torch.ones_like(p) for p in params]
        with limits(bucket=1 << 30):
            torch.autograd.backward(params, grads)
        del grads
        gc.collect()
        late_device.reset_peak()
        opt.step()
        together = count * n * (2 + sums)
        temporary = (6 if settings.get("rounding") else 1) * 4 * n  # the reference's, and FP32 sums on their way
        assert late_device.peak() - begun <= together + temporary + 4096
        opt.zero_grad()
    assert all(x.device.type == "cpu" for x in state(opt))


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("then", ["step", "reset", "flush"])
def test_a_step_that_breaks_off_in_a_part_goes_on_there(device, monkeypatch, kind, at, when, then):
    """Parts that have been stepped are not stepped again.

    That in which it broke off is, with what it had come to.
    """
    sizes = [900, 1100, 40, 1200]
    params = [Parameter(torch.ones(size, device=device)) for size in sizes]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.25), 2, **AWAY)
    step, calls = torch.optim.SGD.step, []

    def breaking(self, closure=None):
        calls.append([p.numel() for group in self.param_groups for p in group["params"]])
        if len(calls) == at + 1 and when == "before":
            raise kind
        result = step(self, closure)
        if len(calls) == at + 1:
            raise kind
        return result

    monkeypatch.setattr(torch.optim.SGD, "step", breaking)
    monkeypatch.setattr(breaking, "__module__", step.__module__)

    def window(final):
        for i in (1.0, 3.0):
            (sum(p.sum() for p in params) * i).backward()
            if i == 3.0:
                final()
            else:
                opt.step()

    with limits(stepped=lambda _: 4):
        with pytest.raises(kind):
            window(opt.step)
        stepped = [i < at or (i == at and when == "after") for i in range(4)]
        assert [p[0].item() for p in params] == [0.5 if done else 1.0 for done in stepped]
        assert all(p is q for p, q in zip(opt.param_groups[0]["params"], params))
        if then != "step":
            opt.reset()
            opt.zero_grad()
        if then == "reset":
            window(opt.step)
        elif then == "flush":  # a window whose end nobody has known
            (sum(p.sum() for p in params) * 4).backward()
            opt.flush()
        else:
            opt.step()
    if then == "step":
        expected = [0.0 if i == at and when == "after" else 0.5 for i in range(4)]
    else:
        expected = [(0.5 if done else 1.0) - (0.5 if then == "reset" else 1.0) for done in stepped]
    assert [p[0].item() for p in params] == expected
    assert all((p.detach().cpu() == p[0].item()).all() for p in params)


def test_writing_masters_back_is_tried_again_without_another_step(device, monkeypatch):
    p = Parameter(torch.ones(1000, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.125), 1, **AWAY)
    p.sum().backward()
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr("fusedaccum.extensions.cpu_optimizer.send", lambda *_: 1 / 0)
        opt.step()
    opt.step()
    assert opt.updated and (p.cpu() == 0.875).all()


def test_a_window_that_is_left_out_changes_nothing(device):
    model, opt = made(device, accum_steps=2, nonfinite="skip_window", **AWAY)
    train(model, opt, device, count=2)
    before, parameters = weights(opt), [p.detach().cpu().clone() for p in model.parameters()]
    train(model, opt, device, count=2, bad=(1,))
    assert not opt.updated
    assert_same(weights(opt), before)
    assert_same([p.detach().cpu() for p in model.parameters()], parameters)


def test_sums_that_are_leaving_are_not_freed_before_they_have_left(late_device, device):
    if late_device is None:
        pytest.skip("counts what the device of late_device.cpp has not freed yet")
    gc.collect()
    begun = late_device.allocated()
    params = [Parameter(torch.ones(1000, device=device)) for _ in range(40)]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1), 1, **AWAY)
    sum(p.sum() for p in params).backward()
    with opt._accumulation.extensions.of(CpuOptimizer)._streams[device]:
        for _ in range(300):  # each takes a while
            torch.empty(1, pin_memory=True).copy_(params[0][:1].detach(), non_blocking=True)
    for p in params:
        p.grad = None
    del p, params, opt
    assert late_device.allocated() - begun >= 40 * 1024 * 4
    time.sleep(1)
    assert late_device.allocated() == begun


def test_a_dropped_wrapper_leaves_nothing_behind(late_device, device):
    gc.collect()
    before = late_device.allocated() if late_device else torch.cuda.memory_allocated()
    model, opt = made(device, accum_steps=1, **AWAY)
    train(model, opt, device, count=2)
    del model, opt  # what is freed is gone when the streams are done with it, without a garbage collection
    torch.accelerator.current_stream(device).synchronize()
    time.sleep(0.1)
    assert (
        late_device.allocated() if late_device else torch.cuda.memory_allocated()
    ) == before  # without a garbage collection


# -- what it does not work with --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "make", "message"),
    [
        (
            {"buffer_device": "cpu"},
            OPTIMIZERS["SGD"],
            r"optimizer_device='cpu'.*buffer_device is 'cpu'.*master_weights=True",
        ),
        ({"master_weights": "split"}, OPTIMIZERS["SGD"], r"optimizer_device='cpu'.*master_weights='split'.*leave"),
        (
            {"buffer_dtype": torch.bfloat16},
            OPTIMIZERS["SGD"],
            r"optimizer_device='cpu'.*use buffer_dtype=torch.float32",
        ),
        ({"buffer_dtype": None}, OPTIMIZERS["SGD"], r"optimizer_device='cpu'.*use buffer_dtype=torch.float32"),
        ({"accum_steps": None}, torch.optim.LBFGS, r"optimizer_device='cpu' does not work with LBFGS"),
        ({"optimizer_device": "cuda"}, OPTIMIZERS["SGD"], r"optimizer_device must be 'cpu', or None.*got 'cuda'"),
        (
            {},
            lambda ps: torch.optim.Adam(ps, capturable=True),
            r"capturable=True.*optimizer_device='cpu'.*without capturable",
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(device, settings, make, message):
    params = [Parameter(torch.ones(3, device=device))]
    if "capturable" in message:
        inner = torch.optim.Adam(params)
        inner.param_groups[0]["capturable"] = True
    else:
        inner = make(params)
    with pytest.raises(ValueError, match=message):
        fa.AccumulatingOptimizer(inner, **({"accum_steps": 2} | AWAY | settings))
    assert params[0].grad_dtype == torch.float32 and params[0].grad is None


def test_a_groups_16_bit_buffers_are_refused(device):
    groups = [
        {"params": [Parameter(torch.ones(3, device=device, dtype=torch.bfloat16))], "buffer_dtype": torch.bfloat16}
    ]
    with pytest.raises(ValueError, match=r"optimizer_device='cpu' steps FP32.*use torch.float32 there"):
        fa.AccumulatingOptimizer(torch.optim.SGD(groups, lr=0.1), 2, **AWAY)


def test_it_says_what_was_asked(device):
    assert "optimizer_device=" in repr(made(device, accum_steps=2, **AWAY)[1])


# Python says so of what is interrupted in a callback of the garbage collector's.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("settings", [{"accum_steps": 2}, {"accum_steps": 2, "max_grad_norm": 0.5}, {}], ids=str)
def test_a_step_that_was_interrupted_anywhere_is_called_again(device, settings):
    """It goes on; or says that the sums are half divided, and then the window is repeated."""
    start = [torch.randn(size).bfloat16() for size in (900, 40, 1200)]
    grads = [[torch.randn(x.shape).bfloat16() for x in start] for _ in range(2)]

    def backwards(params, opt):
        for number, these in enumerate(grads):
            torch.autograd.backward(params, [grad.to(device) for grad in these])
            if number == 0 and "accum_steps" in settings:
                opt.step()

    def trained(at):
        params = [Parameter(x.to(device)) for x in start]
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1, momentum=0.9), **settings, **AWAY)
        backwards(params, opt)
        return params, opt, interrupted(opt.step, at) is not None

    expected, repeated = [p.detach().cpu() for p in trained(10**6)[0]], 0
    for at in range(1, 10**6, 41):
        gc.collect()  # now, and not within the call
        params, opt, stopped = trained(at)
        if not stopped:
            break
        assert all(p is q for p, q in zip(opt.param_groups[0]["params"], params, strict=True)) and set(
            opt.state
        ) <= set(params)
        try:
            opt.step()
        except RuntimeError as error:
            assert "call opt.reset(), and repeat" in str(error)
            repeated += 1
            opt.reset(), opt.zero_grad()
            backwards(params, opt)
            opt.step()
        assert_same([p.detach().cpu() for p in params], expected)
    assert at > 500 and repeated < at / 41 / 3


def test_parameters_on_the_cpu_are_stepped_with_24_bits_too(device):
    """As an embedding may be that stays there. Sums of bf16 alone would end at 306."""
    params = [Parameter(torch.zeros(1, dtype=torch.bfloat16, device=where)) for where in ("cpu", device)]
    settings = {"buffer_dtype": torch.bfloat16, "rounding": "compensated", "reduction": "none"}
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0, foreach=False), 100, **settings, **AWAY)
    for factor in [256.0] + [0.5] * 99:
        with opt.micro_batch():
            for p in params:
                (p * factor).sum().backward()
        opt.step()
    assert [float(m) for m in opt.state_dict()["fusedaccum"]["masters"].values()] == [-305.5, -305.5]
