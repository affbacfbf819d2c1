"""What windows count, remember and forget: weights, non-finite micro-batches, the adds' norms."""

import fusedaccum as fa
import pytest
import torch
from fusedaccum.core import adding, norms
from fusedaccum.core.window import Schedule
from sizes import limits
from torch import nn
from training import assert_same_parameters, big_batch_step, data, mean_loss, model, parts, sgd, twin, wrapped


def test_a_weight_tensor_may_be_overwritten_after_it_was_given():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, tokens = wrapped(net, 3), torch.zeros((), dtype=torch.float64)
    for xs, ys in parts(x, y, (4, 8, 12)):
        tokens.fill_(len(xs))
        opt.backward(mean_loss(net, xs, ys), weight=tokens)
        tokens.fill_(1e6)
        opt.step()
    big_batch_step(big, sgd(big.parameters()), x, y)
    assert_same_parameters(net, big, 1e-12)


def test_no_device_is_waited_for_to_learn_whether_a_weighed_window_may_be_complete():
    unreadable = torch.ones((), device="meta")
    assert Schedule.checked(None, 10).may_complete(None, 1, unreadable)


def test_nothing_moves_to_the_default_device():
    """With a CPU model and "cuda" as the default device, a step would otherwise wait for a GPU."""
    net, (x, y) = model(), data()
    there, batch = twin(net), parts(x, y, (12, 12))

    def train(net):
        asked = {"buffer_dtype": None, "rounding": "stochastic", "nonfinite": "skip_window"}
        opt = wrapped(net, 2, max_grad_norm=0.1, noise_scale=0.5, **asked)
        for xs, ys in batch:
            opt.backward(mean_loss(net, xs, ys), weight=len(xs))
            opt.step()
        return opt.last_window.as_dict()

    here = train(net)
    with torch.device("meta"):
        assert train(there) == here
    assert_same_parameters(there, net, 0)


def test_what_holds_nothing_stays_off_the_default_device():
    opt = wrapped(model(), 1, nonfinite="skip_window")
    with torch.device("meta"):
        opt.step()
        empty, into = fa.ops.stats([]), fa.ops.Stats.empty("cpu")
        fa.ops.accumulate_([], [], 1.0, stats=into)
    assert opt.last_window.grad_norm == empty.sq_norm == empty.nonfinite == into.sq_norm == into.nonfinite == 0


def test_micro_batches_that_were_not_finite_are_counted_not_elements():
    p = nn.Parameter(torch.zeros(8))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, nonfinite="skip_window")
    for factor in (1.0, float("nan"), float("inf")):
        (p * factor).sum().backward()
        opt.step()
    assert opt.last_window.nonfinite == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_told_of_a_window_are_not_rounded_to_the_default_dtype(dtype):
    tokens, p = 2**24 + 1, nn.Parameter(torch.zeros(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), reduction="none")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        p.sum().backward()
        opt.record_loss(float(tokens))
        opt.step(weight=tokens)
    finally:
        torch.set_default_dtype(before)
    assert opt.last_window.weight == tokens and opt.last_window.loss == tokens


def test_dropped_micro_batches_are_reported():
    p = nn.Parameter(torch.zeros(8))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, nonfinite="skip_micro_batch")
    for factor in (1.0, float("nan"), 1.0):
        (p * factor).sum().backward()
        opt.step()
    assert opt.updated
    assert opt.last_window.micro_batches == 2
    assert opt.last_window.nonfinite == 1


def test_micro_batches_without_a_weight_count_one_each():
    p = nn.Parameter(torch.zeros(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), reduction="none")
    for _ in range(3):
        p.sum().backward()
    opt.step()
    assert opt.last_window.weight == 3


@pytest.mark.parametrize("settings", [{"accum_steps": 2}, {"window_weight": 2.0}], ids=lambda s: next(iter(s)))
def test_the_norm_of_a_window_takes_no_pass_of_its_own(settings, monkeypatch):
    net, (x, y) = model(), data()
    opt = wrapped(net, max_grad_norm=1.0, **settings)
    monkeypatch.setattr(norms.ops, "stats", lambda *_, **__: pytest.fail("read the buffers once more"))
    for xs, ys in parts(x, y, (12, 12)):
        opt.backward(mean_loss(net, xs, ys), weight=1.0)
        opt.step()
    assert opt.updated


def test_a_norm_is_of_what_p_grad_holds_after_normalize():
    net, (x, y) = model(), data()
    big = twin(net)
    opt = wrapped(net, 2, max_grad_norm=1e-3)
    for k, (xs, ys) in enumerate(parts(x, y, (12, 12))):
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        if k == 1:
            opt.normalize_()
        opt.step()
    mean_loss(big, x, y).backward()
    norm = torch.nn.utils.clip_grad_norm_(big.parameters(), 1e-3)
    sgd(big.parameters()).step()
    torch.testing.assert_close(opt.last_window.grad_norm.double(), norm, rtol=1e-12, atol=0)
    assert_same_parameters(net, big, 1e-9)


def test_a_norm_leaves_out_a_gradient_that_was_taken_away():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2, max_grad_norm=1e6)
    for k, (xs, ys) in enumerate(parts(x, y, (12, 12))):
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        if k == 1:
            net[0].weight.grad = None
            with pytest.warns(RuntimeWarning, match="grad was set to None"):
                opt.step()
        else:
            opt.step()
    norm = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(opt.last_window.grad_norm.double(), norm, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:p.grad was written to")
def test_a_running_mean_that_is_replaced_by_a_copy_stays_a_running_mean():
    sums = []
    for copies in (False, True):
        p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
        opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 4, buffer_dtype=None)
        for k in range(4):
            (p * (k + 1.0)).sum().backward()
            if copies:
                p.grad = p.grad.clone()
            opt.step()
        sums.append(p.detach().clone())
    assert torch.equal(*sums)
    assert (sums[0] == -2.5).all()


def test_parameters_touched_after_normalize_and_not_touched_are_divided_alike():
    a, b = (nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), accum_steps=None)
    for _ in range(2):
        opt.backward((a * 2.0 + b * 4.0).sum(), weight=1.0)
    opt.normalize_()
    opt.backward((a * 8.0).sum(), weight=2.0)
    opt.step()
    assert (a == -(2.0 + 2.0 + 16.0) / 4.0).all()
    assert (b == -(4.0 + 4.0) / 4.0).all()


def test_two_overflows_in_a_window_back_the_scale_off_once():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    for factor in (1.0, float("inf"), float("inf"), 1.0):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 32.0
    assert not opt.last_window.applied
    assert (p == 0).all()


def test_a_checkpoint_forgets_the_norm_of_a_gradient_changed_by_hand():
    net, (x, y) = model(), data()
    opt = wrapped(net, max_grad_norm=1e6)
    opt.backward(mean_loss(net, x, y))
    net[0].weight.grad.mul_(3.0)
    again = twin(net)
    resumed = wrapped(again, max_grad_norm=1e6)
    resumed.load_state_dict(opt.state_dict())
    for optimizer in (opt, resumed):
        optimizer.step()
    assert resumed.last_window.grad_norm == opt.last_window.grad_norm


def test_a_norm_is_of_the_gradient_that_was_put_in_by_hand():
    net, (x, y) = model(), data()
    opt = wrapped(net, max_grad_norm=1e6)
    opt.backward(mean_loss(net, x, y))
    net[0].weight.grad = net[0].weight.grad * 3.0
    opt.step()
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    torch.testing.assert_close(opt.last_window.grad_norm.double(), norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("nonfinite", ["raise", "skip_micro_batch", "skip_window", "propagate"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("zero_at", [0, 1, 2])
def test_a_micro_batch_of_weight_0_may_hold_anything(nonfinite, reduction, kind, zero_at):
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, reduction=reduction, nonfinite=nonfinite)
    for i in range(3):
        factor, weight = (float("nan"), 0.0) if i == zero_at else (1.0, 5.0)
        opt.backward((p * factor).sum(), weight=kind(weight))
        opt.step()
    assert opt.updated and not opt.last_window.nonfinite
    assert (p == {"mean": -1.0, "sum": -0.2, "none": -2.0}[reduction]).all()
    assert opt.last_window.loss == 0


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_weight_of_0_that_comes_late_keeps_nothing_out(reduction):
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, reduction=reduction)
    opt.backward(p.sum())
    opt.backward(p.sum(), weight=0)
    opt.step()
    opt.backward(p.sum(), weight=1)
    opt.step()
    assert (p == -3).all()


@pytest.mark.parametrize("fails_at", [1, 2])
@limits(bucket=1)  # a call per parameter
def test_out_of_memory_while_a_bucket_is_added_counts_nothing_twice_and_loses_nothing_unsaid(fails_at, monkeypatch):
    net, (x, y) = model(), data()
    big = twin(net)
    opt = wrapped(net, 2)
    halves = parts(x, y, (12, 12))
    mean_loss(net, *halves[0]).backward()
    opt.step()
    calls, accumulate_ = 0, adding.ops.accumulate_

    def short_of_memory(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return accumulate_(*args, **kwargs)

    monkeypatch.setattr(adding.ops, "accumulate_", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        mean_loss(net, *halves[1]).backward()
    if fails_at == 1:  # nothing of the micro-batch was added: it may be repeated
        mean_loss(net, *halves[1]).backward()
        opt.step()
    else:
        with pytest.warns(RuntimeWarning, match="the open window was dropped"):
            opt.reset()
        for xs, ys in halves:
            mean_loss(net, xs, ys).backward()
            opt.step()
    assert opt.updated
    big_batch_step(big, sgd(big.parameters()), x, y)
    assert_same_parameters(net, big, 1e-12)
