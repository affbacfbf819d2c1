"""last_window.loss is the big batch's loss; and what a log and a progress bar get."""

import math

import fusedaccum as fa
import numpy as np
import pytest
import torch
from torch import nn
from training import data, mean_loss, model, parts, sgd, sum_loss, wrapped

SIZES = (5, 9, 3, 7)


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("settings", [{}, {"accum_steps": 4}, {"window_weight": 24}], ids=str)
def test_loss_is_the_big_batchs(settings, tensors):
    net, (x, y) = model(), data(sum(SIZES))
    expected = mean_loss(net, x, y).item()
    opt = wrapped(net, **settings)
    for i, (a, b) in enumerate(parts(x, y, SIZES)):
        opt.backward(mean_loss(net, a, b), weight=torch.tensor(len(a)) if tensors else len(a))
        if settings or i == 3:
            opt.step()
    assert opt.updated
    loss = opt.last_window.loss
    assert loss.dtype == torch.float64 and loss.shape == () and not loss.requires_grad
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_loss_of_sums_with_a_late_weight():
    net, (x, y) = model(), data(sum(SIZES))
    expected = sum_loss(net, x, y).item() / len(x)
    opt = wrapped(net, reduction="sum")
    for a, b in parts(x, y, SIZES):
        loss = sum_loss(net, a, b)
        loss.backward()
        opt.record_loss(loss)
    opt.step(weight=len(x))
    assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("settings", [{"reduction": "none"}, {"reduction": "none", "accum_steps": 4}], ids=str)
def test_loss_that_the_caller_has_normalised(settings):
    net, (x, y) = model(), data(sum(SIZES))
    expected = mean_loss(net, x, y).item()
    opt = wrapped(net, **settings)
    for i, (a, b) in enumerate(parts(x, y, SIZES)):
        loss = mean_loss(net, a, b) * len(a) / len(x)
        loss.backward()
        opt.record_loss(loss.item() if i == 2 else loss)
        if "accum_steps" in settings or i == 3:
            opt.step()
    assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("accum_steps", [None, 2])
def test_not_recorded_again_where_backward_has(accum_steps):
    net, (x, y) = model(), data(8)
    opt = wrapped(net, accum_steps)
    loss = mean_loss(net, x, y)
    opt.backward(loss)
    with pytest.raises(RuntimeError, match=r"leave record_loss\(\) out|lacks its loss"):
        opt.record_loss(loss)
    opt.step()
    if accum_steps:
        opt.flush()
    assert opt.last_window.loss.item() == loss.item()


def test_recorded_in_a_group_and_in_parts():
    net, (x, y) = model(), data(12)
    opt = wrapped(net)
    (a, b), (c, d), (e, f) = parts(x, y, (4, 4, 4))
    first, second = mean_loss(net, a, b), mean_loss(net, c, d)
    with opt.micro_batch(weight=8):  # one micro-batch with two losses
        first.backward()
        second.backward()
        opt.record_loss(first)
        opt.record_loss(second)
    opt.backward(mean_loss(net, e, f), weight=4)
    expected = (8 * (first + second) + 4 * mean_loss(net, e, f)).item() / 12
    opt.step()
    assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-12)


def test_recorded_once_a_micro_batch_where_backward_counts_it():
    net, (x, y) = model(), data(8)
    opt = wrapped(net)
    loss = mean_loss(net, x, y)
    loss.backward()
    opt.record_loss(loss)
    with pytest.raises(RuntimeError, match="lacks its loss"):
        opt.record_loss(loss)
    opt.step()
    assert opt.last_window.loss.item() == loss.item()


def test_unknown_where_somebody_else_has_run_a_part():
    net, (x, y) = model(), data(8)
    opt = wrapped(net, accum_steps=1)
    mean_loss(net, x, y).backward()
    opt.backward(mean_loss(net, x, y))
    opt.step()
    assert opt.last_window.loss is None
    loss = mean_loss(net, x, y)
    opt.backward(loss, gradient=torch.tensor(0.5, dtype=loss.dtype))
    opt.step()
    assert opt.last_window.loss is None


def test_told_after_a_micro_batch_was_rejected():
    """In caller-owned windows, the wrapper knows until step() which micro-batch was rejected."""
    net, (x, y) = model(), data(12)
    (a, b), (c, d) = parts(x, y, (4, 8))
    opt = wrapped(net, nonfinite="skip_micro_batch")
    told = []
    for inputs, targets in ((a, b), (a * math.nan, b), (c, d)):
        loss = mean_loss(net, inputs, targets)
        loss.backward()
        opt.record_loss(loss)
        told.append(loss.item())
    opt.step()
    assert opt.last_window.micro_batches == 2
    assert opt.last_window.loss.item() == pytest.approx((told[0] + told[2]) / 2, rel=1e-12)


def test_the_loss_of_a_rejected_micro_batch_is_not_that_of_the_one_before():
    net, (x, y) = model(), data(12)
    opt = wrapped(net, nonfinite="skip_micro_batch")
    mean_loss(net, x, y).backward()  # of which nothing is recorded
    loss = mean_loss(net, x * math.nan, y)
    loss.backward()
    opt.record_loss(loss)
    opt.step()
    assert opt.last_window.micro_batches == 1 and opt.last_window.loss is None


@pytest.mark.parametrize("accum_steps", [None, 1])
def test_told_plainly_where_every_window_is_unscaled(accum_steps):
    net, (x, y) = model(torch.float32), data(8, torch.float32)
    opt = wrapped(net, accum_steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        loss = mean_loss(net, x, y)
        scaler.scale(loss).backward()
        opt.record_loss(loss)
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert opt.last_window.loss.item() == loss.item()


@pytest.mark.parametrize("accum_steps", [None, 1, 2])
def test_a_closures_result_is_recorded(accum_steps):
    net, (x, y) = model(), data(8)
    expected = mean_loss(net, x, y).item()
    opt = wrapped(net, accum_steps)
    for a, b in parts(x, y, (4, 4) if accum_steps == 2 else (8,)):

        def closure(a=a, b=b):
            loss = mean_loss(net, a, b)
            loss.backward()
            return loss

        opt.step(closure)
    assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("result", [3, 0.5, np.float32(0.25), torch.tensor(2), torch.tensor([1.5])], ids=repr)
def test_a_closures_result_may_be_any_number(result):
    net, (x, y) = model(), data(8)
    opt = wrapped(net, 1)

    def closure():
        mean_loss(net, x, y).backward()
        return result

    assert opt.step(closure) is result
    assert opt.last_window.loss.item() == float(result)


def test_a_closure_that_evaluates_a_part_of_the_micro_batch_does_not_know_its_loss():
    net, (x, y) = model(), data(8)
    opt = wrapped(net, 1)

    def closure():
        loss = mean_loss(net, x, y)
        loss.backward()
        return loss

    closure()
    opt.step(closure)
    assert opt.last_window.loss is None


def test_a_loss_written_to_afterwards_stays_what_it_was():
    net, (x, y) = model(), data(8)
    opt = wrapped(net)
    loss = mean_loss(net, x, y)
    expected = loss.item()
    opt.backward(loss)
    loss.detach().zero_()
    opt.step()
    assert opt.last_window.loss.item() == expected


def test_unknown_where_a_micro_batchs_loss_is():
    net, (x, y) = model(), data(8)
    opt = wrapped(net, accum_steps=2)
    opt.backward(mean_loss(net, x, y))
    opt.step()
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.last_window.loss is None and "loss" not in opt.last_window.as_dict()


@pytest.mark.parametrize("settings", [{}, {"accum_steps": 4}], ids=str)
def test_dropped_and_weightless_micro_batches_have_no_part(settings):
    net, (x, y) = model(), data(12)
    (a, b), (c, d) = parts(x, y, (4, 8))
    expected = mean_loss(net, x, y).item()
    opt = wrapped(net, nonfinite="skip_micro_batch", **settings)
    nan = a * math.nan
    micro_batches = [(a, b, 4), (nan, b, 4), (nan, b, 0), (nan, b, torch.tensor(0)), (c, d, torch.tensor(8))]
    for inputs, targets, weight in micro_batches:
        opt.backward(mean_loss(net, inputs, targets), weight=weight)
        if settings:
            opt.step()
    if not settings:
        opt.step()
    assert opt.last_window.micro_batches == 4 and opt.last_window.nonfinite == 1
    assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("accum_steps", [None, 2])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled"])
def test_a_grad_scalers_scale_is_taken_off(accum_steps, unscale):
    net, (x, y) = model(torch.float32), data(8, torch.float32)
    opt = wrapped(net, accum_steps=accum_steps, make=lambda p: torch.optim.SGD(p, lr=0.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    expected = mean_loss(net, x, y).item()
    for window in range(3):
        for i, (a, b) in enumerate(parts(x, y, (4, 4))):
            loss = mean_loss(net, a, b)
            if (i + window) % 2:
                opt.backward(scaler.scale(loss))
            else:
                scaler.scale(loss).backward()
                opt.record_loss(loss)
            if unscale and window and i == 1:
                scaler.unscale_(opt)
            if accum_steps or i == 1:
                scaler.step(opt)
                scaler.update()
        assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("accum_steps", [None, 2])
def test_a_scaled_loss_that_overflows_is_infinite_as_in_a_plain_loop(accum_steps, bad):
    net, (x, y) = model(torch.float32), data(8, torch.float32)
    opt = wrapped(net, accum_steps=accum_steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    recorded = []
    for i, (a, b) in enumerate(parts(x, y, (4, 4))):
        loss = scaler.scale(mean_loss(net, a, b * (100 if i == bad else 0.1)))
        recorded.append(loss.item() / scaler.get_scale())
        opt.backward(loss)
        if accum_steps or i == 1:
            scaler.step(opt)
            scaler.update(scaler.get_scale())  # the same, so that both losses carry one
    assert recorded[bad] == math.inf > recorded[1 - bad]
    assert opt.last_window.loss.item() == sum(recorded) / 2


def test_unknown_where_a_loss_scale_came_and_went_unseen():
    net, (x, y) = model(torch.float32), data(8, torch.float32)
    opt = wrapped(net, accum_steps=1, make=lambda p: torch.optim.SGD(p, lr=0.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    said = []
    for unscale, through in ((True, True), (False, True), (False, False), (False, False)):
        loss = mean_loss(net, x, y)
        opt.backward(scaler.scale(loss) if through else loss)
        if unscale:
            scaler.unscale_(opt)
        if through:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        said.append(opt.last_window.loss)
    right = pytest.approx(loss.item())
    assert said == [None, right, None, right]


def test_recorded_plainly_after_the_last_window_of_a_scaler():
    net, (x, y) = model(torch.float32), data(8, torch.float32)
    opt = wrapped(net, accum_steps=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(mean_loss(net, x, y)).backward()
    scaler.step(opt)
    loss = mean_loss(net, x, y)
    loss.backward()
    opt.record_loss(loss)
    opt.step()
    assert opt.last_window.loss.item() == pytest.approx(loss.item())


def test_loss_over_a_checkpoint_inside_a_window():
    net, (x, y) = model(), data(8)
    opt = wrapped(net, accum_steps=2, make=lambda p: torch.optim.SGD(p, lr=0.0))
    expected = mean_loss(net, x, y).item()
    (a, b), (c, d) = parts(x, y, (4, 4))
    opt.backward(mean_loss(net, a, b))
    opt.step()
    state = opt.state_dict()
    opt.reset()
    opt.load_state_dict(state)
    opt.backward(mean_loss(net, c, d))
    opt.step()
    assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "error", "says"),
    [
        ("0.5", TypeError, "loss must be a number or a tensor of one element, got '0.5'"),
        (torch.ones(2), ValueError, r"shape \(2,\)"),
        (0.5, RuntimeError, "no micro-batch that lacks its loss"),
    ],
)
@pytest.mark.parametrize("accum_steps", [None, 2])
def test_bad_input(accum_steps, loss, error, says):
    net, (x, y) = model(), data(8)
    opt = wrapped(net, accum_steps)
    with pytest.raises(error, match=says):
        opt.record_loss(loss)
    opt.backward(mean_loss(net, x, y))
    if accum_steps is None:
        with pytest.raises(RuntimeError, match="lacks its loss"):
            opt.record_loss(1.0)
    opt.step()
    with pytest.raises(error, match=says):
        opt.record_loss(loss)


def test_numbers_are_told_to_the_last_digit():
    net, (x, y) = model(), data(8)
    opt = wrapped(net, reduction="sum")
    tokens = 2**24 + 1  # FP32 cannot represent it
    sum_loss(net, x, y).backward()
    opt.record_loss(0.1 * tokens)
    opt.step(weight=tokens)
    assert opt.last_window.weight.item() == tokens
    assert opt.last_window.loss.item() == pytest.approx(0.1, rel=1e-15)


def test_as_dict_for_a_log():
    net, (x, y) = model(), data(8)
    opt = wrapped(net, max_grad_norm=math.inf, noise_scale=0.5)
    for a, b in parts(x, y, (4, 4)):
        opt.backward(mean_loss(net, a, b), weight=4)
    opt.step()
    log = opt.last_window.as_dict("window/")
    assert all(type(value) is float for value in log.values())
    assert set(log) == {
        f"window/{k}" for k in ("micro_batches", "weight", "loss", "grad_norm", "applied", "noise_scale")
    }
    assert log["window/micro_batches"] == 2 and log["window/weight"] == 8 and log["window/applied"] == 1
    assert log["window/loss"] == opt.last_window.loss.item()
    assert set(wrapped_once(nonfinite="skip_window").as_dict()) >= {"nonfinite"}


def wrapped_once(**settings):
    net, (x, y) = model(), data(8)
    opt = wrapped(net, **settings)
    opt.backward(mean_loss(net, x, y))
    opt.step()
    return opt.last_window


def test_progress():
    p = nn.Parameter(torch.ones(1))

    def steps(weight, count, **settings):
        opt = fa.AccumulatingOptimizer(sgd([p]), **settings)
        seen = [opt.progress]
        for _ in range(count):
            opt.backward(p.sum(), weight=weight)
            if settings:
                opt.step()
            seen.append(opt.progress)
        opt.zero_grad()
        p.grad = None
        return seen

    counted = [
        {"window": 0, "micro_batch": "0/2"},
        {"window": 0, "micro_batch": "1/2"},
        {"window": 1, "micro_batch": "0/3"},
    ]
    assert steps(None, 2, accum_steps=lambda index: 2 + index) == counted
    weighed = [
        {"window": 0, "micro_batch": 0, "weight": "0/5"},
        {"window": 0, "micro_batch": 1, "weight": "2.5/5"},
        {"window": 1, "micro_batch": 0, "weight": "0/5"},
    ]
    assert steps(2.5, 2, window_weight=5) == weighed
    assert steps(torch.tensor(2.5), 2, window_weight=5) == weighed
    assert steps(None, 2) == [{"window": 0, "micro_batch": n} for n in range(3)]
    assert steps(1_234_567, 1, window_weight=4_194_304)[1]["weight"] == "1234567/4194304"  # tokens, digit by digit


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_recorded_loss_counts_as_its_gradient_does(reduction, inside):
    """Times its weight only under "mean": a sum, or what is normalised already, is added as is."""
    net, (x, y) = model(), data(sum(SIZES))
    expected = mean_loss(net, x, y).item()
    opt = wrapped(net, reduction=reduction)
    for a, b in parts(x, y, SIZES):
        share = {"mean": 1.0, "sum": len(a), "none": len(a) / len(x)}[reduction]
        loss = mean_loss(net, a, b) * share
        with opt.micro_batch(weight=len(a)):
            loss.backward()
            if inside:
                opt.record_loss(loss)
        if not inside:
            opt.record_loss(loss)
    with opt.micro_batch(weight=0):
        (mean_loss(net, x, y) * 5).backward()
    opt.record_loss(torch.tensor(torch.nan))  # of weight 0: it adds nothing
    opt.step()
    assert opt.last_window.loss.item() == pytest.approx(expected, rel=1e-12)


def test_unknown_where_losses_were_counted_before_unscale_hid_their_scale():
    net, (x, y) = model(torch.float32), data(8, torch.float32)
    opt = wrapped(net, make=lambda p: torch.optim.SGD(p, lr=0.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        for a, b in parts(x, y, (4, 4)):
            opt.backward(scaler.scale(mean_loss(net, a, b)))
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert opt.last_window.applied and opt.last_window.loss is None


@pytest.mark.filterwarnings("ignore:.*weight")
def test_a_window_of_weight_0_has_no_loss():
    net, (x, y) = model(), data(8)
    opt = wrapped(net, 2)
    for _ in range(2):
        opt.backward(mean_loss(net, x, y), weight=0)
        opt.step()
    assert opt.last_window.micro_batches == 2 and opt.last_window.loss is None


def test_a_window_without_micro_batches_has_no_loss():
    """All that it had was left out, so that its loss is unknown, and not 0."""
    net = model()
    opt = wrapped(net, nonfinite="skip_micro_batch")
    x, y = data()
    opt.backward(mean_loss(net, x * float("nan"), y))
    opt.step()
    assert opt.last_window.micro_batches == 0 and opt.last_window.loss is None


def test_a_checkpoint_between_windows_holds_no_loss():
    net = model()
    opt = wrapped(net)
    opt.backward(mean_loss(net, *data()))
    opt.step()
    saved = opt.state_dict()["fusedaccum"]["losses"]
    assert saved["count"] == 0 and saved["sum"] == {"known": 0.0, "raw": 0.0}
