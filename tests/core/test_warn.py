"""Warnings point at the line of user code that led to them."""

import inspect
import warnings

import pytest
from fusedaccum.extensions import batch_norm
from torch import nn
from training import data, mean_loss, model, wrapped


def line():
    return inspect.currentframe().f_back.f_lineno


def weightless(call):
    net, (x, y) = model(), data()
    opt = wrapped(net, 1 if call == "step" else 2)
    opt.backward(mean_loss(net, x, y), weight=0)
    if call == "flush":
        return opt.flush(), line()
    return opt.step(), line()


def taken_away():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    net[0].weight.grad = None
    return mean_loss(net, x, y).backward(), line()


def broken_off(inside):
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()

    def fail(grad):
        raise ValueError("broken off")

    opt.step()
    handle = net[0].weight.register_hook(fail)
    if inside:
        with pytest.raises(ValueError, match="broken off"), opt.micro_batch():
            mean_loss(net, x, y).backward()
        return None, line() - 2
    with pytest.raises(ValueError, match="broken off"):
        mean_loss(net, x, y).backward()
    handle.remove()
    return mean_loss(net, x, y).backward(), line()


def kept():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    return opt.zero_grad(), line()


def running_statistics():
    net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    x, y = data()
    opt = wrapped(net, 2)
    for _ in range(2):
        mean_loss(net, x, y).backward()
        opt.step(), (at := line())
    return None, at


@pytest.mark.usefixtures("each_intake", "small_buckets")
@pytest.mark.parametrize(
    ("lead", "message"),
    [
        pytest.param(lambda: weightless("step"), "has weight 0", id="step"),
        pytest.param(lambda: weightless("flush"), "has weight 0", id="flush"),
        pytest.param(taken_away, "was set to None", id="p.grad is None"),
        pytest.param(lambda: broken_off(inside=False), "was broken off", id="broken off"),
        pytest.param(lambda: broken_off(inside=True), "part of its gradients had been added", id="micro_batch"),
        pytest.param(kept, "opt.zero_grad() inside a window keeps", id="zero_grad"),
        pytest.param(running_statistics, "BatchNorm layer", id="BatchNorm"),
    ],
)
def test_a_warning_points_at_the_users_line(lead, message, monkeypatch):
    monkeypatch.setattr(batch_norm, "_noted", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, at = lead()
    (warning,) = (w for w in caught if message in str(w.message))
    assert (warning.filename, warning.lineno) == (__file__, at)
