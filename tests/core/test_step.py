"""The wrapper in a training loop: norms, reset, closures, hooks, schedulers, groups, copies."""

import copy
import gc
import inspect
import math
import pickle
import types
from contextlib import contextmanager

import fusedaccum as fa
import fusedaccum.core.apply
import pytest
import torch
from fusedaccum.extensions import fused_optimizers
from fusedaccum.extensions.noise_scale import NoiseScale
from fusedaccum.inner import steps_each_alone
from sizes import limits
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import (
    assert_grads,
    assert_same_parameters,
    big_batch_step,
    data,
    gradient,
    grads,
    mean_loss,
    model,
    parts,
    sgd,
    twin,
    wrapped,
    wrapper_of,
    zeros,
)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("limit", [0.05, 1e6], ids=["clips", "does not clip"])
@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_max_grad_norm_clips_the_finished_window_once(fused, limit, owned):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)

    def make(ps):
        return torch.optim.SGD(ps, lr=0.1, fused=fused)

    opt, plain = wrapped(net, None if owned else 3, make=make, max_grad_norm=limit), make(big.parameters())
    for _ in range(2):
        for xs, ys in parts(x, y, (4, 8, 12)):
            opt.backward(mean_loss(net, xs, ys), weight=len(xs))
            if not owned:
                opt.step()
        if owned:
            opt.step()
        plain.zero_grad()
        mean_loss(big, x, y).backward()
        norm = nn.utils.clip_grad_norm_(big.parameters(), limit)
        plain.step()
        torch.testing.assert_close(opt.last_window.grad_norm.float(), norm, rtol=1e-5, atol=0)
    assert_same_parameters(net, big, 2e-6)


FUSED = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, eps=1e-2, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, eps=1e-2, fused=True),
}


@pytest.mark.parametrize("make", FUSED)
@pytest.mark.parametrize("dtypes", ["fp64", "fp64 and fp32", "fp64 buffers"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip_window", "raise"])
def test_a_clipped_window_in_fp64_is_not_divided_in_a_fused_optimizers_fp32(make, dtypes, nonfinite):
    """Weights, norm and coefficient do not fit FP32 exactly; ``grad_scale`` is FP32."""
    net, (x, y) = model(torch.float32 if dtypes == "fp64 buffers" else torch.float64), data()
    if dtypes == "fp64 and fp32":
        net[2].float()
        net[1].register_forward_hook(lambda _, args, output: output.float())
        net[2].register_forward_hook(lambda _, args, output: output.double())
    x, y = x.to(net[0].weight.dtype), y.to(net[0].weight.dtype)
    big, limit = twin(net), 0.05
    buffers = torch.float64 if dtypes == "fp64 buffers" else torch.float32
    opt = wrapped(
        net, make=FUSED[make], window_weight=2.4, max_grad_norm=limit, nonfinite=nonfinite, buffer_dtype=buffers
    )
    plain = FUSED[make](big.parameters())
    for _ in range(3):
        for xs, ys in parts(x, y, (5, 8, 11)):
            opt.backward(mean_loss(net, xs, ys), weight=len(xs) * 0.1)
            opt.step()
        plain.zero_grad()
        mean_loss(big, x, y).backward()
        norm = nn.utils.clip_grad_norm_(big.parameters(), limit)
        plain.step()
        assert opt.updated and float(norm) > limit
        tight = 1e-12 if dtypes == "fp64" else 1e-6
        torch.testing.assert_close(opt.last_window.grad_norm.double(), norm.double(), rtol=tight, atol=0)
    for p, q in zip(net.parameters(), big.parameters()):
        tight = 1e-12 if dtypes == "fp64" else 2e-7 if p.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(p, q, rtol=tight, atol=tight)


@pytest.mark.parametrize("make", FUSED)
def test_a_window_in_fp64_that_is_not_finite_is_not_stepped_by_a_fused_optimizer(make):
    net, (x, y) = model(), data()
    opt = wrapped(net, 2, make=FUSED[make], max_grad_norm=0.05, nonfinite="skip_window")
    for window in range(3):
        before = [p.detach().clone() for p in net.parameters()]
        for factor in (1.0, float("inf") if window == 1 else 1.0):
            (mean_loss(net, x, y) * factor).backward()
            opt.step()
        assert bool(opt.updated) == (window != 1) == (not all(map(torch.equal, before, net.parameters())))


class Clipping(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)
        return super().step(closure)


def clipping(how, parameters):
    """A fused optimizer that clips in step().

    It is overridden, or patched, or patched by an LR scheduler after that.
    """
    if how == "overridden":
        return Clipping(parameters, lr=0.1, fused=True)
    inner = torch.optim.SGD(parameters, lr=0.1, fused=True)
    step = inner.step

    def clip_first(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)
        return step(closure)

    inner.step = types.MethodType(clip_first, inner)
    if how == "scheduled":
        torch.optim.lr_scheduler.StepLR(inner, 1)
    return inner


@pytest.mark.parametrize("how", ["overridden", "patched", "scheduled"])
def test_a_step_around_pytorchs_fused_one_finds_the_windows_gradient(how):
    """Clipping inside step(), as detectron2 does it, comes before PyTorch's step().

    So the division must not be left to PyTorch's.
    """
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 3, make=lambda ps: clipping(how, list(ps))), clipping(how, list(big.parameters()))
    for _ in range(3):
        for part in parts(x, y, (8, 8, 8)):
            mean_loss(net, *part).backward()
            opt.step()
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-6)


class Dividing(torch.optim.Optimizer):
    """Divides by ``grad_scale`` in its own step(), as PyTorch's fused ones do, and says so."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        self.divided_by = float(self.grad_scale)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / self.grad_scale)


def test_another_optimizer_that_divides_itself_is_left_to_do_it():
    p = nn.Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(Dividing([p], {"fused": True}), 2)
    for factor in (1, 3):
        (p * factor).sum().backward()
        opt.step()
    assert opt.optimizer.divided_by == 2 and (p == -2).all()


class DividingByProperty(Dividing):
    """Keeps ``grad_scale`` where it finds it again."""

    _step_supports_amp_scaling = True
    grad_scale = property(lambda self: self._scale, lambda self, scale: setattr(self, "_scale", scale))


@pytest.mark.parametrize("make", [Dividing, DividingByProperty])
@pytest.mark.parametrize("says_so", [True, False])
def test_whether_an_optimizer_divides_itself_is_asked_at_each_step(make, says_so):
    p = nn.Parameter(torch.zeros(3))
    inner = make([p], {"fused": True})
    opt = fa.AccumulatingOptimizer(inner, 2)
    inner._step_supports_amp_scaling = says_so
    if not says_so:
        inner.grad_scale = 1.0
    for factor in (1, 3):
        (p * factor).sum().backward()
        opt.step()
    assert inner.divided_by == (2 if says_so else 1) and (p == -2).all()


def test_an_exception_on_the_way_into_a_fused_step_leaves_no_scale_there(monkeypatch):
    """The next step, with a step pre-hook, takes gradients that are divided already."""
    p = nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([p], lr=1.0, momentum=0.5, fused=True)
    opt = fa.AccumulatingOptimizer(inner, 2, nonfinite="skip_window")
    values = iter(["grad_scale", "found_inf"])

    def fails(value, device, fp32_on=fused_optimizers._fp32_on):
        if next(values) == "found_inf":
            raise MemoryError
        return fp32_on(value, device)

    def window():
        for _ in range(2):
            (3 * p).sum().backward()
            opt.step()

    window()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(fused_optimizers, "_fp32_on", fails)
        window()
    opt.reset()
    opt.register_step_pre_hook(lambda *_: None)
    window()
    assert (p == -3 - 4.5).all()


def test_a_tiny_norm_is_clipped_as_pytorch_clips_it():
    """PyTorch clips by ``limit / (norm + 1e-6)``: for a norm of 1e-6, half of ``limit / norm``."""
    net, big = nn.Parameter(torch.zeros(2).double()), nn.Parameter(torch.zeros(2).double())
    opt, plain = fa.AccumulatingOptimizer(sgd([net]), 2, max_grad_norm=1e-6), sgd([big])
    for _ in range(2):
        (net * torch.tensor([6e-7, 8e-7])).sum().backward()
        opt.step()
    (big * torch.tensor([6e-7, 8e-7])).sum().backward()
    nn.utils.clip_grad_norm_([big], 1e-6)
    plain.step()
    torch.testing.assert_close(net, big, rtol=1e-6, atol=0)


@pytest.mark.parametrize("patched", [False, True])
def test_an_lr_scheduler_is_no_reason_to_bring_all_offloaded_gradients_at_once(patched):
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    if patched:
        inner.step = types.MethodType(lambda self, closure=None: None, inner)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    assert steps_each_alone(inner) is not patched


@pytest.mark.parametrize("says", [None, False, True])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_of_others_is_stepped_in_parts_if_it_says_so(base, says):
    own = type("Own", (base,), {} if says is None else {"steps_each_alone": says})([nn.Parameter(torch.zeros(3))])
    assert steps_each_alone(own) is bool(says)
    own.register_step_pre_hook(lambda *_: None)
    assert not steps_each_alone(own)


def test_no_limit_leaves_a_window_alone_whose_norm_overflows():
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), max_grad_norm=math.inf)
    (p * 1e200).sum().backward()
    opt.step()
    assert (p == -1e200).all() and opt.last_window.grad_norm == math.inf


def test_grad_norm_covers_parameters_the_last_micro_batch_did_not_touch():
    net = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()
    x, y = data()
    opt = wrapped(net, 2, max_grad_norm=math.inf)
    opt.backward(mean_loss(net[0], x, y) + mean_loss(net[1], x, y))
    opt.step()
    opt.backward(mean_loss(net[1], x, y))
    opt.step()
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    torch.testing.assert_close(opt.last_window.grad_norm, norm)


@pytest.mark.filterwarnings("ignore:p.grad was written to")
def test_grad_norm_sees_gradients_changed_by_hand():
    """A norm taken with the adds is not used once other code has written into p.grad."""
    net, (x, y) = model(), data()
    opt = wrapped(net, max_grad_norm=math.inf)
    mean_loss(net, x, y).backward()
    net[0].weight.grad.mul_(3)
    mean_loss(
        net[2:], torch.ones(2, 10).double(), torch.ones(2, 3).double()
    ).backward()  # writes to the same storage again
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm() / 2
    opt.step()
    torch.testing.assert_close(opt.last_window.grad_norm, norm)


@pytest.mark.filterwarnings("ignore:p.grad was written to")
@pytest.mark.parametrize("put", ["written", "replaced", "one of two blocks"])
@pytest.mark.parametrize("steps", [None, 2])
def test_a_gradient_changed_after_the_last_backward_is_clipped_by_its_own_norm(steps, put):
    """No later write to the buffers would tell that the norm taken with the last add is stale."""
    net, (x, y) = model(), data()
    net[2].float()
    net.insert(2, nn.Identity())

    def loss():
        return nn.functional.mse_loss(net[4:](net[3](net[:3](x).float()).double()), y)

    opt = wrapped(net, steps, max_grad_norm=0.05, make=lambda ps: torch.optim.SGD(ps, lr=1.0))
    for number in range(2):
        loss().backward()
        if steps and number == 0:
            opt.step()
    for p in net.parameters() if put != "one of two blocks" else [net[0].weight]:
        if put == "replaced":
            p.grad = p.grad * 7
        else:
            p.grad.mul_(7)
    expected = [p.grad.double() / 2 for p in net.parameters()]
    norm = torch.cat([g.flatten() for g in expected]).norm()
    before = [p.detach().clone() for p in net.parameters()]
    opt.step()
    torch.testing.assert_close(opt.last_window.grad_norm, norm, rtol=1e-6, atol=0)
    for p, was, g in zip(net.parameters(), before, expected, strict=True):
        torch.testing.assert_close((was - p.detach()).double(), g * 0.05 / norm, rtol=1e-4, atol=1e-7)


def test_reset_drops_a_partial_window():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    mean_loss(net, 5 * x, y).backward()
    opt.step()
    opt.reset()
    assert all(p.grad is None for p in net.parameters())
    for xs, ys in parts(x, y, (12, 12)):
        mean_loss(net, xs, ys).backward()
        opt.step()
    assert opt.updated
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_step_without_gradients_does_what_the_inner_optimizer_does():
    net, before = model(), model()
    opt = wrapped(net)
    opt.step()
    assert not opt.updated and not opt.last_window.applied
    assert_same_parameters(net, before, 0)


def test_step_without_backward_counts_as_a_micro_batch_without_gradients():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    expected = [g / 2 for g in gradient(net, x, y)]
    opt.step()
    assert opt.updated and opt.last_window.micro_batches == 2
    assert_grads(net, expected)


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_step_takes_a_closure(owned):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, None if owned else 2), sgd(big.parameters())
    losses = []
    for xs, ys in [(x, y)] if owned else parts(x, y, (12, 12)):

        def closure(xs=xs, ys=ys):
            opt.zero_grad()
            loss = mean_loss(net, xs, ys)
            loss.backward()
            return loss

        losses.append(opt.step(closure))
    assert opt.updated
    torch.testing.assert_close(sum(losses) / len(losses), mean_loss(big, x, y))
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("make", [sgd, torch.optim.LBFGS], ids=["sgd", "lbfgs"])
def test_a_step_that_raises_has_not_updated(make):
    net, (x, y) = model(), data()
    opt = wrapped(net, make=make)

    def closure():
        loss = mean_loss(net, x, y)
        loss.backward()
        return loss

    def broken():
        raise FileNotFoundError

    opt.step(closure)
    assert opt.updated
    with pytest.raises(FileNotFoundError):
        opt.step(broken)
    assert not opt.updated


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("through", ["inner", "wrapper", "every optimizer"])
def test_step_hooks_run_once_a_window_and_see_the_finished_gradient(fused, through):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    seen, after = [], []
    opt = wrapped(net, 2, make=lambda ps: torch.optim.SGD(ps, lr=0.1, fused=fused))
    before, behind = {
        "inner": (opt.optimizer.register_step_pre_hook, opt.optimizer.register_step_post_hook),
        "wrapper": (opt.register_step_pre_hook, opt.register_step_post_hook),
        "every optimizer": (register_optimizer_step_pre_hook, register_optimizer_step_post_hook),
    }[through]
    hooks = before(lambda *_: seen.append(grads(net))), behind(lambda *_: after.append(True))
    expected = gradient(net, x, y)
    for xs, ys in parts(x, y, (4, 20)):
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        opt.step()
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(after) == 1
    for got, want in zip(seen[0], expected, strict=True):
        torch.testing.assert_close(got, want)


def test_scheduler_on_the_wrapper_moves_once_a_window():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    reference = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    for _ in range(3):
        for xs, ys in parts(x, y, (12, 12)):
            mean_loss(net, xs, ys).backward()
            opt.step()
            if opt.updated:
                scheduler.step()
        big_batch_step(big, plain, x, y)
        reference.step()
    assert opt.optimizer.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"])
    assert_same_parameters(net, big, 1e-12)


def test_groups_state_and_defaults_are_the_inner_optimizers():
    net, (x, y) = model(), data()
    opt = wrapped(net, 1)
    assert opt.param_groups is opt.optimizer.param_groups
    assert opt.state is opt.optimizer.state
    assert opt.defaults is opt.optimizer.defaults
    opt.param_groups[0]["lr"] = 0.0
    before = twin(net)
    mean_loss(net, x, y).backward()
    opt.step()
    assert_same_parameters(net, before, 0)
    opt.load_state_dict(opt.state_dict())  # the inner optimizer makes new groups and a new state
    assert opt.param_groups is opt.optimizer.param_groups and opt.state is opt.optimizer.state


def test_what_a_protocol_asks_of_an_optimizer_is_found():
    """From Python 3.12 on, isinstance() with a protocol does not call __getattr__."""
    opt = wrapped(model(), 2)
    for name in ("param_groups", "state", "defaults"):
        inspect.getattr_static(opt, name)
        assert getattr(opt, name) is getattr(opt.optimizer, name)
    opt.defaults = {"lr": 3.0}
    assert opt.optimizer.defaults == {"lr": 3.0} and "defaults" not in vars(opt)


def test_add_param_group_accumulates_the_new_parameters():
    net, (x, y) = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double(), data()
    big = twin(net)
    opt = fa.AccumulatingOptimizer(sgd(net[0].parameters()), 2)
    plain = sgd(big[0].parameters())
    for o, n in ((opt, net), (plain, big)):
        o.add_param_group({"params": list(n[1].parameters()), "lr": 0.2})
    for xs, ys in parts(x, y, (4, 20)):
        opt.backward(mean_loss(net[0], xs, ys) + mean_loss(net[1], xs, ys), weight=len(xs))
        opt.step()
    plain.zero_grad()
    (mean_loss(big[0], x, y) + mean_loss(big[1], x, y)).backward()
    plain.step()
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("how", ["add_param_group", "assigned"])
def test_a_run_that_took_in_parameters_on_the_way_is_resumed(how):
    """Lightning's BackboneFinetuning adds a group.

    When a run is resumed, it assigns the groups, and then loads the state.
    """

    def start():
        net = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        net[1].requires_grad_(False)
        return net, fa.AccumulatingOptimizer(torch.optim.AdamW(net[0].parameters()), 2)

    def train(net, opt):
        for xs, ys in parts(x, y, (4, 20)):
            opt.backward(mean_loss(net[0], xs, ys) + mean_loss(net[1], xs, ys), weight=len(xs))
            opt.step()

    (net, opt), (x, y) = start(), data(dtype=torch.float32)
    train(net, opt)
    net[1].requires_grad_(True)
    opt.add_param_group({"params": list(net[1].parameters()), "lr": 0.2})
    train(net, opt)
    resumed, again = start()
    resumed[1].requires_grad_(True)
    if how == "assigned":
        group = {**again.param_groups[0], "params": list(resumed[1].parameters())}
        again.param_groups = [*again.param_groups, group]
    else:
        again.add_param_group({"params": list(resumed[1].parameters())})
    resumed.load_state_dict(net.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for n, o in ((net, opt), (resumed, again)):
        train(n, o)
    assert_same_parameters(resumed, net, 0)


def test_weight_decay_and_step_count_do_not_move_inside_a_window():
    net, (x, y) = model(), data()
    opt = wrapped(net, 4, make=lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5))
    before = twin(net)
    for _ in range(3):
        mean_loss(net, x, y).backward()
        opt.step()
        assert not opt.state
        assert_same_parameters(net, before, 0)
    mean_loss(net, x, y).backward()
    opt.step()
    assert {int(s["step"]) for s in opt.state.values()} == {1}


@pytest.mark.parametrize("make", [sgd, lambda ps: torch.optim.AdamW(ps, fused=True)], ids=["sgd", "fused"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike_and_apart(how, make):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    opt = wrapped(net, 3, make=make, max_grad_norm=0.1)
    batches = parts(x, y, (4, 8, 12))
    mean_loss(net, *batches[0]).backward()
    opt.step()
    net2, opt2 = copy.deepcopy((net, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((net, opt)))
    assert opt2.param_groups[0]["params"][0] is net2[0].weight
    for n, o in ((net, opt), (net2, opt2)):
        for batch in [*batches[1:], *batches * 8]:  # rounding shows after some steps
            mean_loss(n, *batch).backward()
            o.step()
        assert o.updated
    assert_same_parameters(net2, net, 0)
    assert net2[0].weight is not net[0].weight


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_knows_the_last_window(how):
    net, (x, y) = model(), data()
    opt = wrapped(net, 1, max_grad_norm=0.1)
    opt.backward(mean_loss(net, x, y))
    opt.step()
    _, opt2 = copy.deepcopy((net, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((net, opt)))
    assert opt2.updated and opt2.last_window.as_dict() == opt.last_window.as_dict()


def test_a_shallow_copy_is_refused_and_the_open_window_kept():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    held = grads(net)
    with pytest.raises(TypeError, match="deepcopy"):
        copy.copy(opt)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), held, strict=True))


def test_dropping_the_wrapper_gives_the_parameters_back():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    opt = wrapped(net, 4)
    mean_loss(net, x, y).backward()
    assert net[0].weight.grad.dtype is torch.float32
    del opt
    gc.collect()
    net.zero_grad()
    mean_loss(net, x, y).backward()
    assert all(p.grad.dtype is torch.bfloat16 for p in net.parameters())
    again = wrapped_again(net)
    mean_loss(net, x, y).backward()
    again.step()
    assert again.updated


def wrapped_again(net):
    net.zero_grad()
    return wrapped(net, 1)


@pytest.mark.parametrize("applied", [True, False])
def test_what_last_window_reports_has_the_dtypes_that_it_documents(applied):
    """Whatever the user's default is: FP32 would count tokens up to 2**24."""
    net = model()
    opt = wrapped(net, 1, nonfinite="skip_window")
    x, y = data()
    opt.backward(mean_loss(net, x, y) * (1.0 if applied else float("nan")), weight=2.0**24 + 1)
    opt.step()
    last = opt.last_window
    found = {name: getattr(last, name) for name in ("weight", "applied", "nonfinite", "loss")}
    dtypes = {"weight": torch.float64, "applied": torch.bool, "nonfinite": torch.int64, "loss": torch.float64}
    assert {name: value.dtype for name, value in found.items()} == dtypes
    assert last.weight == 2**24 + 1 and last.applied.item() is applied


def test_last_window_is_none_before_the_first():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    assert opt.last_window is None
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.last_window is None
    mean_loss(net, x, y).backward()
    opt.step()
    last = opt.last_window
    assert (last.micro_batches, last.weight, last.grad_norm, last.nonfinite, last.applied) == (2, 2, None, None, True)


def test_a_step_that_breaks_off_at_the_windows_end_can_be_called_again(monkeypatch):
    """The window is already complete, and it is applied exactly once."""
    net = nn.Linear(3, 2).double()
    before, (x, y) = net.weight.detach().clone(), (torch.randn(8, 3).double(), torch.randn(8, 2).double())
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), 2, max_grad_norm=1e3)
    expected = torch.autograd.grad(nn.functional.mse_loss(net(x), y), net.weight)[0]
    for part in range(2):
        nn.functional.mse_loss(net(x[part::2]), y[part::2]).backward()
        if part:
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(fusedaccum.core.apply, "conclude", interrupted)
                opt.step()
        opt.step()
    assert opt.last_window.micro_batches == 2
    torch.testing.assert_close(before - net.weight.detach(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("where", ["step", "report", "noise scale"])
def test_a_step_that_breaks_off_after_it_has_stepped_can_be_called_again(monkeypatch, where):
    """Then it only finishes the report: parameters move once; no empty micro-batch is counted."""
    nets, (x, y) = [model(), model()], data()
    failing, plain = (wrapped(net, 2, noise_scale=0.5) for net in nets)
    params_broadcast = []  # a collective, in which the other ranks would not join a second time
    monkeypatch.setattr(failing._accumulation.ranks, "broadcast_params", params_broadcast.append)
    for window in range(3):
        for part in range(2):
            for net, opt in zip(nets, (failing, plain), strict=True):
                opt.backward(mean_loss(net, x[part::2], y[part::2]), weight=1)
            plain.step()
            if window == 1 and part == 1:
                with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                    if where == "step":
                        patched.setattr(fusedaccum.core.apply, "among_hooks", interrupted_after)
                    elif where == "report":
                        patched.setattr(fusedaccum.core.apply.Conclusion, "last_window", interrupted)
                    else:
                        patched.setattr(NoiseScale, "_update", interrupted)
                    failing.step()
                assert failing.updated == (where != "step")
                assert_same_parameters(*nets, 0)
            failing.step()
    assert_same_parameters(*nets, 0)
    assert params_broadcast == [True, True, True] and failing.last_window.noise_scale.isfinite()
    assert failing.last_window.as_dict() == plain.last_window.as_dict()


def test_a_step_that_breaks_off_is_forgotten_with_its_window(monkeypatch):
    opt = wrapped(model(), 3)
    saved = opt.state_dict()
    opt.step()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(opt._accumulation, "complete", interrupted)
        opt.step()
    opened = opt.state_dict()
    assert opened["fusedaccum"]["window"]["micro_batches"] == 2 and saved["fusedaccum"]["window"] is None
    opt.load_state_dict(opened)
    opt.step()
    assert opt.last_window.micro_batches == 3


def interrupted(*_):
    raise KeyboardInterrupt


@contextmanager
def interrupted_after(*_):
    yield
    raise KeyboardInterrupt


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_wrapped_where_no_gradients_are_made(mode):
    net = nn.Linear(3, 2)
    with mode():
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    before = net.bias.detach().clone()
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    torch.testing.assert_close(before - net.bias.detach(), torch.ones(2))


def test_flush_with_lbfgs_does_nothing_or_says_what_steps():
    p = nn.Parameter(torch.ones(2))
    opt = fa.AccumulatingOptimizer(torch.optim.LBFGS([p]))
    opt.flush()

    def closure():
        opt.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.flush()
    assert opt.progress["window"] == 1
    (p**2).sum().backward()
    shown = p.grad.clone()
    with pytest.raises(TypeError, match=r"LBFGS steps only in step\(closure\)"):
        opt.flush()
    assert opt.progress["window"] == 1 and torch.equal(p.grad, shown)


def test_gradient_replaced_by_a_step_hook_does_not_survive_its_window():
    p = zeros()
    opt = wrapper_of([p], 2)
    opt.register_step_pre_hook(lambda *_: setattr(p, "grad", p.grad.clamp(-10, 10)))
    for _ in range(4):
        p.sum().backward()
        opt.step()
    assert p.item() == -2


@pytest.mark.parametrize("again", ["step", "flush"])
@pytest.mark.parametrize("steps", [None, 2], ids=["caller-owned", "counted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_step_that_raises_can_be_tried_again(dtype, steps, again):
    p = zeros(3, dtype)
    opt, fail = wrapper_of([p], steps), [True]

    def hook(*_):
        if fail:
            raise MemoryError

    opt.register_step_pre_hook(hook)
    for i in range(2):
        (p * torch.tensor([1.0, 2.0, 3.0], dtype=dtype)).sum().backward()
        if steps and i == 0:
            opt.step()
    with pytest.raises(MemoryError):
        opt.step()
    assert not opt.updated
    fail.clear()
    getattr(opt, again)()
    assert opt.updated and opt.last_window.micro_batches == 2
    assert p.tolist() == [-1, -2, -3]


@limits(bucket=1)
def test_a_window_is_not_tried_again_when_one_that_broke_off_has_overwritten_it():
    p, q = zeros(), zeros()
    opt, fail = wrapper_of([p, q], 1), [MemoryError, MemoryError]

    def hook(*_):
        if fail:
            raise fail.pop()

    opt.register_step_pre_hook(hook)
    (p + q).sum().backward()
    with pytest.raises(MemoryError):
        opt.step()
    first = q * 1.0
    first.register_hook(hook)
    with pytest.raises(MemoryError), pytest.warns(RuntimeWarning, match="broken off"):
        opt.backward((first + p).sum())
    opt.step()
    assert not opt.updated and not opt.last_window.applied and p.item() == q.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_whose_step_post_hook_raises_is_not_stepped_again(dtype):
    p = zeros(3, dtype)
    opt, fail = wrapper_of([p], 1, master_weights=dtype is torch.bfloat16), [OSError]

    def hook(*_):
        if fail:
            raise fail.pop()

    opt.register_step_post_hook(hook)
    p.sum().backward()
    with pytest.raises(OSError):
        opt.step()
    assert p.tolist() == [-1, -1, -1]
    opt.step()
    assert p.tolist() == [-1, -1, -1] and opt.updated and opt.last_window.micro_batches == 1
