"""Layers whose backward adds to ``p.grad`` itself train as layers that return the gradient."""

import copy
import itertools
import warnings

import fusedaccum as fa
import pytest
import torch
from torch import nn
from training import assert_same_parameters, data, mean_loss, parts, sgd, sum_loss, twin

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("each_intake")]


class AddsItself(torch.autograd.Function):
    """``x @ weight.t()``. Backward adds to any ``weight.grad``, then goes on as ``way`` says."""

    @staticmethod
    def forward(ctx, x, weight, way):
        ctx.save_for_backward(x)
        ctx.weight, ctx.way = weight, way
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        for_input, into = grad @ weight, weight.grad
        if into is None:
            return for_input, grad.t() @ x, None
        torch.addmm(into, grad.t().to(into.dtype), x.to(into.dtype), out=into)
        if ctx.way == "returns nothing":  # DeepSeek's TileKernels
            return for_input, None, None
        if ctx.way != "returns p.grad, which autograd adds to itself":
            weight.grad = None  # torchtitan
        returned = {"takes p.grad away": into, "a view": into.view_as(into), "detached": into.detach()}
        return for_input, returned.get(ctx.way, into), None


RIGHT = ["returns nothing", "takes p.grad away", "a view", "detached"]
WAYS = [*RIGHT, "returns p.grad, which autograd adds to itself"]


class Layer(nn.Linear):
    way = None

    def forward(self, x):
        return super().forward(x) if self.way is None else AddsItself.apply(x, self.weight, self.way) + self.bias


class Net(nn.Module):
    """A layer in the middle, one at the end, and one that is ordinary."""

    def __init__(self, way=None, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = Layer(6, 5), Layer(5, 5), Layer(5, 3)
        self.to(dtype)
        self.middle.way = self.last.way = way

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def train(net, opt, windows=3, every=True, loss=mean_loss, **weights):
    """Three micro-batches a window. ``every``: is step() called after each?"""
    for window in range(windows):
        for batch in parts(*data(seed=window, dtype=net.first.weight.dtype), (8, 8, 8)):
            opt.backward(loss(net, *batch), **weights) if weights else loss(net, *batch).backward()
            if every:
                opt.step()
        if not every:
            opt.step()
        opt.zero_grad()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "settings",
    [
        *({"nonfinite": policy} for policy in ("propagate", "skip_window", "skip_micro_batch", "raise")),
        {"max_grad_norm": 0.05},
        {"master_weights": True},
        {"noise_scale": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("accum_steps", [3, None])
@pytest.mark.parametrize("way", WAYS)
def test_train_as_the_plain_loop_does_with_the_same_layers(way, accum_steps, reduction, settings):
    net, plain = Net(way), Net(way)
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), accum_steps, reduction=reduction, **settings)
    train(net, opt, every=accum_steps is not None)
    assert opt.updated and opt.last_window.micro_batches == 3
    optimizer = sgd(plain.parameters())
    for window in range(3):
        for batch in parts(*data(seed=window), (8, 8, 8)):
            mean_loss(plain, *batch).backward()
        for p in plain.parameters():
            p.grad /= 3 if reduction == "mean" else 1
        nn.utils.clip_grad_norm_(plain.parameters(), settings.get("max_grad_norm", torch.inf))
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(net, plain, 1e-10)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", [{}, {"buffer_dtype": None}, {"buffer_dtype": None, "reduction": "none"}], ids=str)
@pytest.mark.parametrize("way", RIGHT)
def test_in_bf16(way, settings):
    """In FP32 buffers sums are exact, in 16-bit ones as plain PyTorch adds them.

    The numbers are powers of two, so that nothing else rounds.
    """
    values = [256.0, 1.0, 2.0, 0.5]
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([weight], lr=1.0), 4, **settings)
    for value in values:
        AddsItself.apply(torch.full((1, 1), value, dtype=torch.bfloat16), weight, way).sum().backward()
        seen = weight.grad.clone()
        opt.step()
    expected = torch.zeros(1, 1, dtype=seen.dtype)
    for value in values:
        expected += value
    assert torch.equal(seen, expected)
    assert torch.equal(weight.grad, (expected / (1 if settings.get("reduction") else 4)).bfloat16())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", RIGHT)
def test_losses_that_are_sums_of_micro_batches_of_any_size(way):
    net, big = Net(way), Net()
    opt, plain = fa.AccumulatingOptimizer(sgd(net.parameters()), 3, reduction="sum"), sgd(big.parameters())
    for window in range(3):
        for x, y in parts(*data(seed=window), (4, 8, 12)):
            sum_loss(net, x, y).backward()
            opt.step(weight=len(x))
        opt.zero_grad()
        mean_loss(big, *data(seed=window)).backward()
        plain.step()
        plain.zero_grad()
    assert_same_parameters(net, big, 1e-10)


@pytest.mark.parametrize("accum_steps", [3, None])
@pytest.mark.parametrize("way", RIGHT)
def test_a_weight_comes_too_late_for_what_was_added_without_it(way, accum_steps):
    """The error names the parameter. The window, its sum spoilt, is dropped; the next is right."""
    net, plain = Net(way), Net()
    opt, optimizer = fa.AccumulatingOptimizer(sgd(net.parameters()), accum_steps), sgd(plain.parameters())
    x, y = data()
    opt.backward(mean_loss(net, x, y), weight=2)
    opt.step() if accum_steps else None
    told = r"the layer of parameter .*\['params'\]\[4\] has added its gradient .* the window needs 2 times it.*reduction='sum'"
    with pytest.raises(RuntimeError, match=told), pytest.warns(RuntimeWarning, match="the open window was dropped"):
        opt.backward(mean_loss(net, x, y), weight=2)
    train(net, opt, every=accum_steps is not None)
    for window in range(3):
        mean_loss(plain, *data(seed=window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(net, plain, 1e-10)


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
@pytest.mark.parametrize("where", ["in the layer", "in another"])
@pytest.mark.parametrize("way", RIGHT)
def test_a_micro_batch_that_is_not_finite_cannot_be_left_out(way, where, policy):
    net, plain = Net(way), Net()
    opt, optimizer = fa.AccumulatingOptimizer(sgd(net.parameters()), 3, nonfinite=policy), sgd(plain.parameters())
    x, y = data()
    mean_loss(net, x, y).backward()
    opt.step()
    if where == "in another":
        net.first.bias.register_hook(lambda grad: grad * torch.nan)
    told = f"nonfinite='{policy}' met NaN or infinity in a micro-batch that it cannot leave out.*use 'skip_window'"
    with pytest.raises(RuntimeError, match=told), pytest.warns(RuntimeWarning, match="the open window was dropped"):
        mean_loss(net, x * (torch.nan if where == "in the layer" else 1), y).backward()
    net.first.bias._backward_hooks = None
    opt.reset()
    train(net, opt)
    for window in range(3):
        mean_loss(plain, *data(seed=window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(net, plain, 1e-10)


def test_a_window_that_is_not_finite_is_skipped():
    net, plain = Net(RIGHT[1]), Net()
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 3, nonfinite="skip_window")
    x, y = data()
    for factor in (1, torch.nan, 1):
        mean_loss(net, x * factor, y).backward()
        opt.step()
    assert not opt.updated and opt.last_window.nonfinite > 0
    assert_same_parameters(net, plain, 0)


def test_after_normalize_there_is_a_mean_to_which_a_layer_cannot_add():
    net = Net(RIGHT[1])
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()))
    x, y = data()
    for _ in range(2):
        mean_loss(net, x, y).backward()
    opt.normalize_()
    with pytest.raises(RuntimeError, match=r"which holds a mean: after opt\.normalize_\(\)"):
        mean_loss(net, x, y).backward()
    with pytest.warns(RuntimeWarning, match="the open window was dropped"):
        opt.reset()
    assert all(p.grad is None for p in net.parameters())


def test_a_layer_that_still_finds_the_gradient_of_a_closed_window_says_so():
    net = Net("takes p.grad away")
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 1)
    x, y = data()
    mean_loss(net, x, y).backward()
    opt.step()  # and no zero_grad()
    net.last.bias.requires_grad_(False)  # whose gradient would come first, and clear the others
    with pytest.raises(
        RuntimeError, match=r"\[4\]\.grad itself, which still held.* call opt\.zero_grad\(\) after opt\.step"
    ):
        mean_loss(net, x, y).backward()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", RIGHT)
def test_hooks_that_look_at_p_grad_find_the_sum(way):
    net, plain = Net(way), Net()
    opt, seen = fa.AccumulatingOptimizer(sgd(net.parameters()), 3), ([], [])
    for model, found in zip((net, plain), seen, strict=True):
        model.middle.weight.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.clone()))
    for batch in parts(*data(), (8, 8, 8)):
        for model in (net, plain):
            mean_loss(model, *batch).backward()
        opt.step()
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=0)


@pytest.mark.parametrize("way, settings", [*itertools.product(RIGHT, ({}, {"nonfinite": "skip_micro_batch"}))], ids=str)
def test_an_open_window_is_resumed_from_its_checkpoint(way, settings):
    net = Net(way)
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 3, **settings)
    first, second, third = parts(*data(), (8, 8, 8))
    for batch in (first, second):
        mean_loss(net, *batch).backward()
        opt.step()
    resumed = twin(net)
    again = fa.AccumulatingOptimizer(sgd(resumed.parameters()), 3, **settings)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for model, optimizer in ((net, opt), (resumed, again)):
        mean_loss(model, *third).backward()
        optimizer.step()
        assert optimizer.updated
    assert_same_parameters(net, resumed, 0)


# It looks like that, and the figures are right.
@pytest.mark.filterwarnings("ignore:.*was set to None inside an open window", "ignore:p.grad was written to")
def test_fused_weights_that_an_ordinary_layer_shares():
    """Autograd adds both before they arrive: the sum, this micro-batch in it, is a new tensor."""
    net, plain = Net("takes p.grad away"), Net()
    opt, optimizer = fa.AccumulatingOptimizer(sgd(net.parameters()), 3, reduction="none"), sgd(plain.parameters())
    for model, step in ((net, opt.step), (plain, lambda: None)):
        for x, y in parts(*data(), (8, 8, 8)):
            (mean_loss(model, x, y) + model.middle.weight.square().sum()).backward()
            step()
    optimizer.step()
    assert_same_parameters(net, plain, 1e-10)


@pytest.mark.parametrize("way", RIGHT)
def test_what_such_a_layer_had_added_in_a_pass_that_broke_off_is_not_judged_later(way):
    """A layer has added NaN to p.grad, and then the pass broke off."""
    net, broken = Net(way), []
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2, nonfinite="skip_micro_batch")
    (x, y), *_ = parts(*data(), (12, 12))
    mean_loss(net, x, y).backward()
    opt.step()
    net.first.weight.register_hook(lambda _: 1 / 0 if broken else None)
    broken.append(True)
    with pytest.raises(ZeroDivisionError):
        mean_loss(net, x * torch.nan, y).backward()
    broken.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the window was dropped
        opt.reset()
    plain = twin(net)
    for _ in range(2):
        mean_loss(net, x, y).backward()
        opt.step()
    for layer in (plain.middle, plain.last):
        layer.way = None
    mean_loss(plain, x, y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert opt.updated
    assert_same_parameters(net, plain, 1e-12)
