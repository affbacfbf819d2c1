"""Adds to main_grad when something fails: nothing counts twice, is lost or left behind silently."""

import copy
import gc
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from adding import Adding, Net, Product, marked, train, wrapped
from torch import nn
from torch.nn import functional
from training import assert_same_parameters, data, mean_loss, sgd

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("each_intake")]
RTOL = 1e-12


def test_a_window_that_is_skipped_leaves_nothing():
    net, fresh = marked(Net()), marked(Net())
    opt = wrapped(net, 3, nonfinite="skip_window")
    x, y = data(seed=9)
    for factor in (1.0, float("inf"), 1.0):
        mean_loss(net, x * factor, y).backward()
        opt.step()
    assert not opt.updated and opt.last_window.nonfinite > 0
    assert not net.first.weight.main_grad.any()
    train(net, opt)
    train(fresh, wrapped(fresh, 3, nonfinite="skip_window"))
    assert_same_parameters(net, fresh, 0)


def test_a_bad_gradient_of_such_a_layer_alone_skips_the_window():
    weight = marked(Adding(6, 2, bias=False)).weight
    opt = fa.AccumulatingOptimizer(sgd([weight]), 3, nonfinite="skip_window")
    for factor, applied in (((1.0, float("nan"), 1.0), False), ((1.0, 1.0, 1.0), True)):
        for f in factor:
            Product.apply(f * torch.ones(4, 6), weight).sum().backward()
            opt.step()
        assert opt.updated is applied and bool(opt.last_window.nonfinite > 0) is not applied


@pytest.mark.parametrize("first", [True, False])
def test_a_pass_that_breaks_off_before_any_hook_drops_the_window(first):
    weight = marked(Adding(6, 2, bias=False)).weight
    opt = fa.AccumulatingOptimizer(sgd([weight]), 3)
    if not first:
        Product.apply(torch.ones(4, 6), weight).sum().backward()
        opt.step()

    def fail(grad):
        raise ValueError("on purpose")

    handle = weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        Product.apply(torch.ones(4, 6), weight).sum().backward()
    handle.remove()
    assert weight.main_grad.any()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.zero_grad()
    assert not weight.main_grad.any() and weight.grad is None


@pytest.mark.parametrize("where", ["between two", "in a hook"])
@pytest.mark.parametrize("through", ["backward", "opt.backward"])
def test_a_pass_that_breaks_off_drops_the_window(where, through):
    """The layer's mark shows that it has added something that cannot be taken out of the sums."""
    net, fresh = marked(Net()), marked(Net())
    opt = wrapped(net, 3)
    x, y = data(seed=9)
    mean_loss(net, x, y).backward()
    opt.step()

    def fail(grad):
        raise ValueError("on purpose")

    h = torch.tanh(net.first(x))
    middle = net.middle(h)
    loss = functional.mse_loss(net.last(middle), y)
    if where == "in a hook":
        handle = net.twice.weight.register_hook(fail)
    else:
        h.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"), pytest.warns(RuntimeWarning, match="dropped") as caught:
        if through == "backward":
            try:
                loss.backward()
            finally:
                opt.zero_grad()  # any method of the wrapper notices
        else:
            opt.backward(loss)
    assert len([w for w in caught if "dropped" in str(w.message)]) == 1
    if where == "in a hook":
        handle.remove()
    assert not net.first.weight.main_grad.any() and not net.twice.weight.main_grad.any()
    train(net, opt)
    train(fresh, wrapped(fresh, 3))
    assert_same_parameters(net, fresh, 0)


def test_an_inner_step_that_raises_is_repeated():
    net, plain = marked(Net()), Net()
    opt = wrapped(net, 1)
    broken = iter([True])

    def fail(*_):
        if next(broken, False):
            raise ValueError("on purpose")

    opt.optimizer.register_step_pre_hook(fail)
    mean_loss(net, *data()).backward()
    with pytest.raises(ValueError, match="on purpose"):
        opt.step()
    opt.step()
    assert opt.updated
    optimizer = sgd(plain.parameters())
    mean_loss(plain, *data()).backward()
    optimizer.step()
    assert_same_parameters(net, plain, RTOL)


def test_a_pass_into_a_window_that_could_not_be_applied_is_refused():
    net = marked(Net())
    opt = wrapped(net, 1)

    def fail(*_):
        raise ValueError("on purpose")

    handle = opt.optimizer.register_step_pre_hook(fail)
    mean_loss(net, *data()).backward()
    with pytest.raises(ValueError, match="on purpose"):
        opt.step()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"main_grad, which .* does not show"):
        mean_loss(net, *data()).backward()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.reset()
    fresh = marked(Net())
    train(net, opt)
    train(fresh, wrapped(fresh, 1))
    assert_same_parameters(net, fresh, 0)


def test_a_gradient_set_by_hand_is_refused():
    net = marked(Net())
    opt = wrapped(net, 2)
    net.first.weight.grad = torch.ones_like(net.first.weight)
    with pytest.raises(RuntimeError, match=r"does not show: it was set by hand.* opt.reset\(\)"):
        mean_loss(net, *data()).backward()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.reset()
    mean_loss(net, *data()).backward()
    assert net.first.weight.grad is net.first.weight.main_grad


@pytest.mark.parametrize("weight", [2.0, torch.tensor(1.0, device="meta")], ids=["two", "unknown"])
def test_weights_under_mean_are_refused_before_backward(weight):
    net = marked(Net())
    opt = wrapped(net, 2)
    loss = mean_loss(net, *data())
    with pytest.raises(ValueError, match=r"weight is .*reduction='mean'.*use reduction='sum'"):
        opt.backward(loss, weight=weight)
    assert not net.first.weight.main_grad.any() and net.last.weight.grad is None
    opt.backward(loss, weight=1)


def test_a_loss_scale_that_changes_within_a_window_is_refused():
    net = marked(Net())
    opt = wrapped(net, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for i in range(3):
        loss = scaler.scale(mean_loss(net, *data()))
        if i == 2:
            with pytest.raises(RuntimeError, match=r"needs 0.5 times it: .* or a GradScaler has changed its scale"):
                loss.backward()
            break
        loss.backward()
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nonfinite": "raise"}, "nonfinite='raise' must see them first"),
        ({"nonfinite": "skip_micro_batch"}, "nonfinite='skip_micro_batch' must see them first"),
        ({"buffer_dtype": torch.bfloat16}, "use buffer_dtype=torch.float32"),
        ({"buffer_dtype": None}, "use buffer_dtype=torch.float32"),
    ],
)
def test_what_cannot_be_is_refused_at_wrapping(settings, message):
    net = marked(Net().bfloat16())
    with pytest.raises(ValueError, match=f"weight has the attribute.*{message}|param_groups.*{message}"):
        wrapped(net, 2, **settings)
    assert not hasattr(net.first.weight, "main_grad")
    wrapped(net, 2)


def test_somebody_elses_main_grad_is_refused():
    net = marked(Net())
    net.twice.weight.main_grad = torch.zeros(8, 8)
    with pytest.raises(ValueError, match="already has a main_grad from elsewhere"):
        wrapped(net, 2)


def test_without_the_wrapper_the_layer_fails_instead_of_training_on_nothing():
    net = marked(Net())
    opt = wrapped(net, 2)
    mean_loss(net, *data()).backward()
    del opt
    gc.collect()
    with pytest.raises(AttributeError, match="main_grad"):
        mean_loss(net, *data()).backward()
    net.zero_grad()
    train(net, wrapped(net, 3))


def test_buffers_that_go_late_leave_alone_what_was_lent_since():
    net, fresh = marked(Net().float()), marked(Net().float().double())
    opt = wrapped(net, 3)
    kept = opt._sums.buffers  # as an exception's frames may keep them
    net.double()
    opt.load_state_dict(opt.optimizer.state_dict())
    del kept
    gc.collect()
    train(net, opt)
    train(fresh, wrapped(fresh, 3))
    assert_same_parameters(net, fresh, 0)


def test_a_pass_right_after_one_that_broke_off_is_refused_where_the_two_mix():
    torch.manual_seed(2)
    net = marked(nn.Sequential(nn.Linear(6, 5), Adding(5, 3, bias=False)).double())
    fresh = copy.deepcopy(net)
    marked(fresh)
    opt = wrapped(net, 2)
    x, y = data()

    def fail(grad):
        raise ValueError("on purpose")

    h = net[0](x)
    h.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        functional.mse_loss(net[1](h), y).backward()
    with (
        pytest.raises(RuntimeError, match=r"broken off.*this pass is refused: call opt.reset\(\)"),
        pytest.warns(RuntimeWarning, match="dropped"),
    ):
        mean_loss(net, x, y).backward()
    opt.reset()
    for model, o in ((net, opt), (fresh, wrapped(fresh, 2))):
        train(model, o)
    assert_same_parameters(net, fresh, 0)


def test_backward_after_normalize_is_refused():
    net = marked(Net())
    opt = wrapped(net)
    for _ in range(2):
        mean_loss(net, *data()).backward()
    opt.normalize_()
    with pytest.raises(RuntimeError, match=r"after opt.normalize_\(\), when main_grad holds a mean"):
        mean_loss(net, *data()).backward()


def test_a_main_grad_that_was_replaced_is_refused():
    net = marked(Net())
    opt = wrapped(net, 2)
    net.first.weight.main_grad = torch.zeros_like(net.first.weight)
    with pytest.raises(RuntimeError, match="which other code has replaced"):
        mean_loss(net, *data()).backward()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.reset()
    mean_loss(net, *data()).backward()
    assert net.first.weight.grad is net.first.weight.main_grad


def test_overflows_back_a_scaler_off_once_a_window():
    scales = []
    for net in (Net(), marked(Net())):
        opt, scaler = wrapped(net, 6), torch.amp.GradScaler("cpu", init_scale=64.0)
        x, y = data()
        for i in range(12):
            scaler.scale(mean_loss(net, x * (float("inf") if i in (1, 2) else 1.0), y)).backward()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        assert opt.updated
    assert scales[:12] == scales[12:] and scales[-1] == 32.0


@pytest.mark.parametrize("mark", [True, False])
def test_an_unapplied_window_is_forgotten_when_another_has_begun(mark):
    net = marked(Net()) if mark else Net()
    opt = wrapped(net, 2)

    def fail(*_):
        raise ValueError("on purpose")

    handle = opt.optimizer.register_step_pre_hook(fail)
    mean_loss(net, *data()).backward()
    opt.step()
    mean_loss(net, *data()).backward()
    with pytest.raises(ValueError, match="on purpose"):
        opt.step()
    handle.remove()
    handle = net.first.bias.register_hook(fail)
    with pytest.raises((RuntimeError, ValueError), match="main_grad" if mark else "on purpose"):
        mean_loss(net, *data()).backward()
    handle.remove()
    with pytest.warns(RuntimeWarning, match="dropped") if mark else nullcontext():
        opt.step()
    assert not opt.updated and opt.last_window is None


class BreaksOnce(torch.optim.SGD):
    broken = False

    def step(self, closure=None):
        if not self.broken:
            self.broken = True
            raise ArithmeticError("once")
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:backward was broken off")
@pytest.mark.parametrize("turned", [False, True])
def test_a_buffer_that_another_parameters_cast_has_written_over_takes_no_gradient(turned):
    """The step broke off after ``a``'s gradient was cast to bf16 into ``b``'s adjacent memory."""
    a, b = (nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2))
    for p in (a, b):
        p.grad_added_to_main_grad = False
    opt = fa.AccumulatingOptimizer(BreaksOnce([b, a] if turned else [a, b], lr=0.5), 1)
    add_to_main_grad(a, 2.0)
    with pytest.raises(ArithmeticError):
        opt.step()
    with pytest.raises(RuntimeError, match=r"call opt.reset\(\) before backward"):
        add_to_main_grad(b, 3.0)
    opt.reset()
    add_to_main_grad(b, 3.0)
    assert b.grad.tolist() == [3.0] * 64


class AddsNumber(torch.autograd.Function):
    """``(p * factor).sum()``, whose backward adds the gradient to main_grad."""

    @staticmethod
    def forward(ctx, p, factor):
        ctx.p, ctx.factor = p, factor
        return (p.float() * factor).sum()

    @staticmethod
    def backward(ctx, grad):
        ctx.p.main_grad.data.add_(grad * ctx.factor)
        ctx.p.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.p), None


def add_to_main_grad(p, factor):
    AddsNumber.apply(p, factor).backward()
