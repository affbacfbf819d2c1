"""Other code calls step() or zero_grad() of the inner optimizer instead of the wrapper's.

It is an error, or does what it asks for.
"""

import copy
import gc
import inspect
import pickle
import weakref

import fusedaccum as fa
import pytest
import torch
from fusedaccum.inner import is_patched
from training import assert_grads, assert_same_parameters, data, gradient, mean_loss, model, parts, sgd, twin, wrapped

COUNTED = {
    "counted": {"accum_steps": 3},
    "weighed": {"window_weight": 3},
    "by a callable": {"accum_steps": lambda _: 3},
}
CALLS = {"step": lambda inner: inner.step(), "zero_grad": lambda inner: inner.zero_grad()}


def backward(net, opt, batch):
    opt.backward(mean_loss(net, *batch), weight=1)


@pytest.mark.parametrize("scheduled", ["", "before", "after"])
@pytest.mark.parametrize("when", ["after a backward", "between micro-batches"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", COUNTED)
def test_inside_a_counted_window_it_is_an_error_and_nothing_is_lost(case, call, when, scheduled):
    net, (x, y) = model(), data()
    inner = sgd(net.parameters())
    if scheduled == "before":
        torch.optim.lr_scheduler.StepLR(inner, 1)
    opt = fa.AccumulatingOptimizer(inner, **COUNTED[case])
    if scheduled == "after":
        torch.optim.lr_scheduler.StepLR(inner, 1)
    batches, expected = parts(x, y, (8, 8, 8)), gradient(net, x, y)
    for number, batch in enumerate(batches):
        backward(net, opt, batch)
        if when == "after a backward" or number:
            with pytest.raises(
                RuntimeError,
                match=rf"{call}\(\) of the optimizer inside an Acc.*in window 0, of which {number}.*wrapper",
            ):
                CALLS[call](inner)
        opt.step()
        if number < 2:
            with pytest.raises(RuntimeError, match=rf"of which {number + 1}.* micro-batches are in.*reduction='none'"):
                CALLS[call](inner)
    assert opt.updated
    assert_grads(net, expected)
    CALLS[call](inner)  # the window is closed


def test_steps_of_the_inner_optimizer_by_a_gradscaler_are_such_calls():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    inner, scaler = sgd(net.parameters()), torch.amp.GradScaler("cpu")
    opt = fa.AccumulatingOptimizer(inner, 2)
    scaler.scale(mean_loss(net, x, y)).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) of the optimizer inside.*call step\(\) of the wrapper"):
        scaler.step(inner)
    assert opt.progress["micro_batch"] == "0/2"


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("settings", [{"accum_steps": 1}, {}, {"reduction": "none"}, {"reduction": "sum"}], ids=str)
def test_where_nothing_is_to_be_kept_its_zero_grad_drops_as_the_wrappers_does(settings, to_none):
    """Two passes with a zero_grad() between: the first leaves nothing, not even a count."""
    net, (x, y) = model(), data()
    opt = wrapped(net, **settings)
    expected = gradient(net, x, y)
    for _ in range(2):
        opt.backward(5 * mean_loss(net, x, y), weight=3)
        opt.optimizer.zero_grad(set_to_none=to_none)
        opt.backward(mean_loss(net, x, y), weight=1)
        net_before = twin(net)
        opt.step()
        assert opt.updated
        assert_grads(net, expected)
        net.load_state_dict(net_before.state_dict())
        opt.optimizer.zero_grad(set_to_none=to_none)


class Own(torch.optim.SGD):
    """Calls its own zero_grad(), in step() and in another method."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()

    def clear(self):
        self.zero_grad()


@pytest.mark.parametrize("settings", [{"accum_steps": 2}, {}], ids=str)
def test_what_the_inner_optimizer_calls_itself_in_its_step_is_its_own_affair(settings):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, make=lambda ps: Own(ps, lr=0.1), **settings), Own(big.parameters(), lr=0.1)
    for _ in range(2):
        for batch in parts(x, y, (12, 12)):
            mean_loss(net, *batch).backward()
            if settings:
                opt.step()
        if not settings:
            opt.step()
        mean_loss(big, x, y).backward()
        plain.step()
    assert_same_parameters(net, big, 1e-12)


def test_a_guard_leaves_the_optimizer_what_it_was():
    net = model()
    inner, other = sgd(net.parameters()), sgd(model().parameters())
    opt = fa.AccumulatingOptimizer(inner, 2)
    for name in ("step", "zero_grad"):
        assert inspect.signature(getattr(inner, name)) == inspect.signature(getattr(other, name))
    assert not is_patched(inner)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    assert not is_patched(inner)
    for again in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert "step" not in vars(again) and "zero_grad" not in vars(again)
    before = inner.step
    for _ in range(3):
        fa.AccumulatingOptimizer(inner, 2)
    assert inner.step is before  # guarded once
    inner.step = lambda closure=None: None
    assert is_patched(inner)
    del opt


def test_a_guard_holds_neither_the_optimizer_nor_the_wrapper():
    net, (x, y) = model(), data()
    inner = sgd(net.parameters())
    opt = fa.AccumulatingOptimizer(inner, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    gc.disable()
    try:
        alive = weakref.ref(opt)
        del opt
        assert alive() is None
        inner.zero_grad()
        mean_loss(net, x, y).backward()
        inner.step()
        alive = weakref.ref(inner)
        del inner
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("call", CALLS)
def test_an_optimizer_that_was_wrapped_before_is_guarded_for_its_new_wrapper(call):
    net, (x, y) = model(), data()
    inner = sgd(net.parameters())
    for _ in range(2):
        opt = fa.AccumulatingOptimizer(inner, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    with pytest.raises(RuntimeError, match="of the optimizer inside an AccumulatingOptimizer"):
        CALLS[call](inner)
