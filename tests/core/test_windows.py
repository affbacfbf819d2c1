"""A window equals the one big batch it stands for, stepped by plain torch.optim."""

import copy
import inspect

import pytest
import torch
from torch import nn
from training import (
    assert_same_parameters,
    big_batch_step,
    data,
    mean_loss,
    model,
    parts,
    sgd,
    sum_loss,
    twin,
    wrapped,
    wrapper_of,
    zeros,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD-fused": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, eps=1e-3),
    "Adam-amsgrad-fused": lambda ps: torch.optim.Adam(ps, lr=1e-2, eps=1e-3, amsgrad=True, fused=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3),
    "AdamW-fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, eps=1e-3),
    "Adagrad-fused": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, eps=1e-3, fused=True),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1.0, eps=1e-3),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2, eps=1e-3),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2, eps=1e-3),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=1e-2, eps=1e-3),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, eps=1e-3, momentum=0.5),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-3),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2, eps=(1e-3, 1e-3)),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2),
}
# Muon orthogonalises in bf16: a difference in the gradient's last bit can grow to bf16's last bit.
LOOSER = {"Muon": 2e-3}


def test_every_torch_optimizer_is_tried():
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    elsewhere = {"LBFGS", "SparseAdam"}  # have tests of their own
    assert classes - elsewhere == {name.split("-")[0] for name in OPTIMIZERS}


@pytest.mark.parametrize("sizes", [(6, 6, 6, 6), (1, 11, 4, 8)], ids=["equal", "unequal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_window_equals_big_batch(name, dtype, sizes):
    net, (x, y) = model(dtype), data(dtype=dtype)
    big, make = twin(net), OPTIMIZERS[name]
    opt, plain = wrapped(net, len(sizes), make=make), make(list(big.parameters()))
    for _ in range(3):
        for xs, ys in parts(x, y, sizes):
            opt.backward(mean_loss(net, xs, ys), weight=len(xs))
            opt.step()
            opt.zero_grad()
        assert opt.updated
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, LOOSER.get(name, TOLERANCE[dtype]))


def test_window_equals_big_batch_lbfgs():
    """The closure runs the whole window, as often as LBFGS calls it."""
    net, (x, y) = model(), data()
    big = twin(net)

    def make(ps):
        return torch.optim.LBFGS(ps, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    opt, plain = wrapped(net, make=make), make(big.parameters())

    def window():
        opt.zero_grad()
        total = 0.0
        for xs, ys in parts(x, y, (1, 11, 12)):
            loss = mean_loss(net, xs, ys)
            opt.backward(loss, weight=len(xs))
            total += loss.detach() * len(xs) / len(x)
        return total

    def whole():
        plain.zero_grad()
        loss = mean_loss(big, x, y)
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(window)
        plain.step(whole)
        assert opt.updated and opt.last_window.micro_batches == 3
    assert_same_parameters(net, big, 1e-9)  # a line search amplifies rounding


@pytest.mark.parametrize("bad_at", [0, 1, 2])
def test_lbfgs_steps_what_is_left_of_a_window_with_a_bad_micro_batch(bad_at):
    net, (x, y) = model(), data()
    big = twin(net)

    def make(ps):
        return torch.optim.LBFGS(ps, lr=0.5, max_iter=5)

    opt, plain = wrapped(net, make=make, nonfinite="skip_micro_batch"), make(big.parameters())
    batches = parts(x, y, (12, 12))
    batches.insert(bad_at, (x * torch.nan, y))

    def window():
        for batch in batches:
            opt.backward(mean_loss(net, *batch), weight=12)
        return mean_loss(net, x, y).detach()

    def whole():
        plain.zero_grad()
        loss = mean_loss(big, x, y)
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(window)
        plain.step(whole)
        assert opt.updated and opt.last_window.micro_batches == 2
    assert_same_parameters(net, big, 1e-9)


def test_lbfgs_without_closure_says_what_to_do():
    opt = wrapped(model(), make=torch.optim.LBFGS)
    with pytest.raises(TypeError, match="closure"):
        opt.step()


@pytest.mark.filterwarnings("ignore:window 0 has weight 0")
def test_lbfgs_reports_a_window_without_weight_as_not_applied():
    net, (x, y) = model(), data()
    opt, before = wrapped(net, make=torch.optim.LBFGS, reduction="sum"), twin(net)

    def whole():
        opt.backward(sum_loss(net, x, y), weight=0)
        return 0.0

    opt.step(whole)
    assert not opt.updated and not opt.last_window.applied
    assert_same_parameters(net, before, 0)


def test_lbfgs_of_a_model_that_was_cast_is_refused():
    """Its hooks are gone, so its windows' micro-batches could not be told apart."""
    net = model()
    opt = wrapped(net, make=torch.optim.LBFGS)
    net.float()
    with pytest.raises(RuntimeError, match=r"was torch\.float64 .* when it was wrapped and is torch\.float32"):
        opt.step(lambda: pytest.fail("evaluated"))


@pytest.mark.parametrize("tensor_weights", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_with_unequal_micro_batches(reduction, tensor_weights):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 4, reduction=reduction), sgd(big.parameters())
    for xs, ys in parts(x, y, (1, 11, 4, 8)):
        weight = torch.tensor(len(xs)) if tensor_weights else len(xs)
        if reduction == "mean":
            opt.backward(mean_loss(net, xs, ys), weight=weight)
            opt.step()
        elif reduction == "sum":
            sum_loss(net, xs, ys).backward()
            opt.step(weight=weight)
        else:
            (sum_loss(net, xs, ys) / len(x)).backward()
            opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)
    assert opt.last_window.micro_batches == 4
    assert opt.last_window.weight == (4 if reduction == "none" else 24)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_weights_given_with_backward_do_not_scale_a_sum(reduction):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 4, reduction=reduction), sgd(big.parameters())
    for xs, ys in parts(x, y, (1, 11, 4, 8)):
        loss = sum_loss(net, xs, ys)
        opt.backward(loss if reduction == "sum" else loss / len(x), weight=len(xs))
        opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)
    assert opt.last_window.weight == 24


def test_weighed_windows_close_at_their_weight():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, window_weight=12), sgd(big.parameters())
    closed = []
    for xs, ys in parts(x, y, (5, 4, 3, 2, 10)):
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        opt.step()
        closed.append(opt.updated)
    assert closed == [False, False, True, False, True]
    for part in (slice(0, 12), slice(12, 24)):
        big_batch_step(big, plain, x[part], y[part])
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("share", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "tensor"])
def test_weights_that_are_shares_of_a_window_close_it(share):
    """Ten times 0.1 adds up to 0.9999999999999999, which must close the window.

    But 10**6 - 1 tokens of a million must not.
    """
    net, (x, y) = model(), data()
    opt = wrapped(net, window_weight=1)
    for i in range(30):
        opt.backward(mean_loss(net, x, y), weight=share)
        opt.step()
        assert opt.updated == (i % 10 == 9)
    net = model()
    opt = wrapped(net, window_weight=10**6)
    opt.backward(mean_loss(net, x, y), weight=10**6 - 1)
    opt.step()
    assert not opt.updated


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_weighed_windows_count_weights_given_at_step(reduction):
    net, (x, y) = model(), data()
    opt = wrapped(net, window_weight=12, reduction=reduction)
    closed = []
    for xs, ys in parts(x, y, (5, 4, 3, 2, 10)):
        sum_loss(net, xs, ys).backward()
        opt.step(weight=len(xs))
        closed.append(opt.updated)
    assert closed == [False, False, True, False, True]


def test_scheduled_windows_take_their_length_from_the_window_index():
    net, (x, y) = model(), data()
    asked = []
    opt = wrapped(net, lambda index: asked.append(index) or index + 1)
    closed = []
    for _ in range(6):
        mean_loss(net, x, y).backward()
        opt.step()
        closed.append(opt.updated)
    assert closed == [True, False, True, False, False, True]
    assert asked == [0, 1, 2]


def test_caller_owned_windows_count_backward_passes():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net), sgd(big.parameters())
    for sizes in ((8, 8, 8), (12, 12)):
        for xs, ys in parts(x, y, sizes):
            mean_loss(net, xs, ys).backward()
        opt.step()
        assert opt.updated and opt.last_window.micro_batches == len(sizes)
        opt.zero_grad()
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_caller_owned_windows_take_the_total_weight_at_the_end():
    """The numbers of micro-batches and tokens may be unknown until the caller closes the window."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, reduction="sum"), sgd(big.parameters())
    for xs, ys in parts(x, y, (1, 11, 12)):
        sum_loss(net, xs, ys).backward()
    opt.step(weight=len(x))
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)
    assert opt.last_window.micro_batches == 3 and opt.last_window.weight == 24


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_micro_batch_groups_backward_passes(owned):
    """A loss in two parts, each with its own backward, is one micro-batch."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, None if owned else 2), sgd(big.parameters())
    for xs, ys in parts(x, y, (6, 18)):
        with opt.micro_batch(weight=len(xs)):
            (0.25 * mean_loss(net, xs, ys)).backward()
            (0.75 * mean_loss(net, xs, ys)).backward()
        if not owned:
            opt.step()
    if owned:
        opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)
    assert opt.last_window.micro_batches == 2


def test_counted_windows_take_all_backward_passes_between_steps_as_one_micro_batch():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    for xs, ys in parts(x, y, (12, 12)):
        (0.25 * mean_loss(net, xs, ys)).backward()
        (0.75 * mean_loss(net, xs, ys)).backward()
        opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("last", ["step", "backward"])
def test_flush_divides_a_partial_window_by_what_it_holds(last):
    net, (x, y) = model(), data(15)
    big = twin(net)
    opt, plain = wrapped(net, 8), sgd(big.parameters())
    for i, (xs, ys) in enumerate(parts(x, y, (5, 5, 5))):
        mean_loss(net, xs, ys).backward()
        if i < 2 or last == "step":
            opt.step()
            assert not opt.updated
    opt.flush()
    assert opt.updated and opt.last_window.micro_batches == 3
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)
    opt.flush()
    assert not opt.updated and opt.last_window.micro_batches == 3


def test_parameters_without_a_gradient_in_some_micro_batches():
    """If only some micro-batches take a branch, the others count as zeros, as in the big batch."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3), "unused": nn.Linear(2, 2)}).double()
    x, y = data()

    def losses(net, xs, ys, branch):
        return ((net["a"](xs) + (net["b"](xs) if branch else 0) - ys) ** 2).mean(1)

    def decayed(ps):
        return torch.optim.SGD(ps, lr=0.1, weight_decay=0.5)

    big = twin(net)
    opt, plain = wrapped(net, 3, make=decayed), decayed(big.parameters())
    for _ in range(2):
        batches = parts(x, y, (8, 8, 8))
        for i, (xs, ys) in enumerate(batches):
            losses(net, xs, ys, branch=i == 1).mean().backward()
            opt.step()
            opt.zero_grad()
        plain.zero_grad()
        torch.cat([losses(big, xs, ys, i == 1) for i, (xs, ys) in enumerate(batches)]).mean().backward()
        plain.step()
    assert_same_parameters(net, big, 1e-12)  # and the unused layer has not decayed


def test_micro_batch_of_weight_zero_adds_nothing_even_nan():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    halves = parts(x, y, (12, 12))
    opt.backward(mean_loss(net, *halves[0]), weight=12)
    opt.step()
    opt.backward(mean_loss(net, x * float("nan"), y), weight=0)
    opt.step()
    opt.backward(mean_loss(net, *halves[1]), weight=12)
    opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("weight", [0, torch.tensor(0)], ids=["number", "tensor"])
def test_window_of_weight_zero_applies_nothing_and_says_so(weight):
    net, (x, y) = model(), data()
    before = twin(net)
    opt = wrapped(net, 1)
    opt.backward(mean_loss(net, x, y), weight=weight)
    with pytest.warns(RuntimeWarning, match="weight 0"):
        opt.step()
    assert not opt.updated and not opt.last_window.applied
    assert_same_parameters(net, before, 0)


def test_layer_used_twice():
    """The first touch is tracked per parameter, and the gradients of both uses are added."""
    torch.manual_seed(0)
    shared = nn.Linear(6, 6).double()
    net = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(6, 3).double())
    x, y = data()
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    for _ in range(2):
        for xs, ys in parts(x, y, (8, 8, 8)):
            mean_loss(net, xs, ys).backward()
            opt.step()
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_three_ways_to_say_the_same_window_agree_bitwise():
    x, y = data()
    results = []
    for kwargs in ({"accum_steps": 3}, {}, {"window_weight": 3}):
        net = model()
        opt = wrapped(net, **kwargs)
        for xs, ys in parts(x, y, (8, 8, 8)):
            opt.backward(mean_loss(net, xs, ys), weight=1)
            if kwargs:
                opt.step()
        if not kwargs:
            opt.step()
        assert opt.updated
        results.append(net)
    for other in results[1:]:
        assert_same_parameters(results[0], other, 0)


def test_backends_agree_bitwise():
    x, y = data(dtype=torch.float32)
    results = []
    for backend in ("reference", "auto"):
        net = model(torch.float32)
        opt = wrapped(net, 3, backend=backend)
        for xs, ys in parts(x, y, (2, 10, 12)):
            opt.backward(mean_loss(net, xs, ys), weight=len(xs))
            opt.step()
        results.append(net)
    assert_same_parameters(*results, 0)


def test_a_weight_written_to_afterwards_stays_what_it_was():
    net, (x, y) = model(), data(24)
    other, tokens = twin(net), torch.zeros((), dtype=torch.float64)
    opt = wrapped(net, 4)
    for a, b in parts(x, y, (5, 9, 3, 7)):
        opt.backward(mean_loss(net, a, b), weight=tokens.fill_(len(a)))
        tokens.zero_()
        opt.step()
    big_batch_step(other, sgd(other.parameters()), x, y)
    assert opt.last_window.weight == len(x)
    assert_same_parameters(net, other, 1e-12)


def test_a_weight_is_no_truth_value():
    net, (x, y) = model(), data()
    opt = wrapped(net)
    with pytest.raises(ValueError, match=r"weight must hold one real number, got a torch\.bool tensor"):
        opt.backward(mean_loss(net, x, y), weight=torch.tensor(True))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("weights", [(0, 1, 3), (1, 1, 0)])
def test_a_weight_that_only_divides_is_the_same_as_a_tensor(weights, reduction):
    """Of such weights only 0 keeps a gradient out."""
    nets = []
    for make in (float, lambda w: torch.tensor(float(w))):
        net, (x, y) = model(), data()
        opt = wrapped(net, 3, reduction=reduction)
        for part, w in zip(parts(x, y, (8, 8, 8)), weights, strict=True):
            opt.backward(sum_loss(net, *part), weight=make(w))
            opt.step()
        nets.append(net)
    assert_same_parameters(*nets, 1e-12)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_of_weights_that_stay_on_their_device_only_0_keeps_a_gradient_out(reduction):
    """Asked of the ledger: a weight in CPU memory is read when it is given."""
    ledger = wrapped(model(), 3, reduction=reduction)._ledger
    assert [float(ledger._factor(torch.tensor(weight))) for weight in (0.0, 0.5, 1.0, 3.0)] == [0, 1, 1, 1]


def test_repr_says_what_was_asked_for_and_where_the_window_is():
    net, (x, y) = model(), data()
    opt = wrapped(net, 8, max_grad_norm=1.0, buffer_dtype=torch.float64)
    for _ in range(2):
        mean_loss(net, x, y).backward()
        opt.step()
    first, *rest = repr(opt).splitlines()
    assert first == (
        "AccumulatingOptimizer(accum_steps=8, buffer_dtype=torch.float64, max_grad_norm=1.0): window 0, 2/8 "
        "micro-batches, for"
    )
    assert "\n".join(rest) == repr(opt.optimizer)
    weighed = wrapped(model(), window_weight=4096.0)
    assert repr(weighed).startswith("AccumulatingOptimizer(window_weight=4096.0): window 0, 0 micro-batches, weight 0")


@pytest.mark.parametrize("first", [None, 8])
def test_normalize_asks_for_the_weights_of_summed_losses(first):
    net, (x, y) = model(), data()
    opt = wrapped(net, reduction="sum")
    for (xs, ys), weight in zip(parts(x, y, (8, 16)), (first, None)):
        opt.backward(sum_loss(net, xs, ys), weight=weight)
    with pytest.raises(ValueError, match=r"pass the number of items: opt\.backward\(loss, weight=n\)"):
        opt.normalize_()
    big = model()
    sum_loss(big, x, y).backward()
    for p, q in zip(net.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)  # still the sum


def test_weight_at_step_of_a_caller_owned_window():
    p = zeros()
    opt = wrapper_of([p], reduction="none")
    p.sum().backward()
    p.sum().backward()
    opt.step(weight=10)
    assert opt.last_window.weight == 10 and p.item() == -2
    opt = wrapper_of([zeros()], reduction="sum")
    q = opt.param_groups[0]["params"][0]
    opt.backward(q.sum(), weight=2)
    with pytest.raises(ValueError, match="nothing to weigh"):
        opt.step(weight=10)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip_micro_batch"}, {"master_weights": True}], ids=str)
def test_a_tied_weight_that_its_group_lists_twice(settings):
    """PyTorch warns and steps it twice, but it has one gradient, which counts once in the norm."""
    dtype = torch.bfloat16 if "master_weights" in settings else torch.float64
    net, x = torch.nn.Linear(3, 2).to(dtype), torch.randn(4, 3).to(dtype)
    big = copy.deepcopy(net).double()

    def make(ps):
        return torch.optim.SGD(ps, lr=1.0, foreach=False)

    opt = wrapper_of([net.weight, net.bias, net.weight], 2, max_grad_norm=0.125, make=make, **settings)
    plain = make([big.weight, big.bias, big.weight])
    for part in x.chunk(2):
        net(part).sum().backward()
        opt.step()
    (big(x.double()).sum() / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(big.parameters(), 0.125)
    plain.step()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(opt.last_window.grad_norm, norm, rtol=tolerance, atol=0)
    for p, q in zip(net.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=tolerance)
    opt.load_state_dict(opt.state_dict())
