"""Ctrl-C at every point where Python looks for it: training goes on right.

Nothing outside the wrapper stays changed.
"""

import functools
import os
import warnings

import fusedaccum as fa
import pytest
import torch
from fusedaccum.core.ledger import Ledger
from fusedaccum.extensions.nonfinite import SkipMicroBatch
from interrupting import interrupted
from torch import nn
from training import assert_same_parameters, twin

pytestmark = pytest.mark.long


def modes():
    """What is global, or the model's."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_rng_state()


def model(dtype):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
    net[1].bias.requires_grad_(False)
    return net


def made(dtype, **settings):
    net = model(dtype)
    return net, fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2, **settings)


def backward(net, x):
    net(x).square().mean().backward()


def in_a_block(net, opt, x):
    with opt.micro_batch(weight=1):
        backward(net, x)


def closing(call):
    """A call that is to be interrupted at a window's end."""

    def prepare(net, opt, x):
        backward(net, x)
        opt.step()
        backward(net, x)
        return lambda: call(opt)

    return prepare


def inside(call):
    """A call that is to be interrupted inside a window."""

    def prepare(net, opt, x):
        backward(net, x)
        return lambda: call(net, opt, x)

    return prepare


CALLS = {
    "the closing step": closing(lambda opt: opt.step()),
    "a step inside a window": inside(lambda net, opt, x: opt.step()),
    "flush": inside(lambda net, opt, x: opt.flush()),
    "normalize_": closing(lambda opt: opt.normalize_()),
    "backward": inside(lambda net, opt, x: backward(net, x)),
    "opt.backward": inside(lambda net, opt, x: opt.backward(net(x).square().mean())),
    "a block": lambda net, opt, x: lambda: in_a_block(net, opt, x),
    "reset": inside(lambda net, opt, x: opt.reset()),
    "zero_grad": inside(lambda net, opt, x: opt.zero_grad()),
    "state_dict": inside(lambda net, opt, x: opt.state_dict()),
    "load_state_dict": inside(lambda net, opt, x: opt.load_state_dict(opt.state_dict())),
    "add_param_group": inside(lambda net, opt, x: opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})),
}
MOST = 3000  # points that a call may have
# From one of them that is tried to the next; 1 tries all, in three minutes.
EVERY = int(os.environ.get("INTERRUPT_EVERY", 23))


def points():
    return range(1, MOST, EVERY)


@pytest.fixture(autouse=True)
def no_search_for_batch_norm(monkeypatch):
    """Which goes through all objects that there are, at the end of every wrapper's first window."""
    monkeypatch.setattr("fusedaccum.extensions.batch_norm.modules_alive", lambda *_: [])


# Python says so of what is interrupted in a callback of the garbage collector's.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"nonfinite": "skip_window", "max_grad_norm": 1e9}),
        *({"master_weights": True}, {"master_weights": "split"}, {"optimizer_device": "cpu"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_outside_stays_changed_and_training_goes_on(name, settings, monkeypatch):
    """By turns, hooks are those in C++ and in Python, and the traceback is forgotten or kept."""
    dtype = torch.bfloat16 if settings.keys() & {"master_weights", "optimizer_device"} else torch.float32
    kept = []
    for at in points():
        remembered = at % 2
        monkeypatch.setenv("FUSEDACCUM_INTAKE", "python" if at % 4 > 1 else "auto")
        net, opt = made(dtype, **settings)
        x, parameters = torch.randn(4, 3, dtype=dtype), list(net.parameters())
        call = CALLS[name](net, opt, x)
        before, frozen = modes(), [p.requires_grad for p in parameters]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            interrupt = interrupted(call, at)
        if interrupt is None:
            break
        if remembered:
            kept = [interrupt]
        del interrupt
        assert before[:3] == modes()[:3] and torch.equal(before[3], torch.get_rng_state()), at
        assert [p.requires_grad for p in parameters] == frozen, at
        held = [p for group in opt.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(held, parameters, strict=False)), at
        assert set(opt.state) <= set(held), at
        if remembered and name == "a block":
            continue  # of which Python may not have left the end yet
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the open window was dropped
            opt.reset()
        if name == "add_param_group":
            continue
        plain = twin(net)
        for _ in range(2):
            backward(net, x)
            opt.step()
        assert opt.updated and opt.last_window.micro_batches == 2, at
        if dtype is torch.float32:
            backward(plain, x)
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
            assert_same_parameters(net, plain, 1e-6)
    assert 20 < at < MOST - EVERY and kept


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nonfinite": "skip_window"},
        {"master_weights": True},
        {"master_weights": "split"},
        {"optimizer_device": "cpu"},
    ],
    ids=str,
)
def test_a_step_that_was_interrupted_is_called_again(settings):
    """It goes on; or says that the sums are half divided, and then the window is repeated."""
    dtype = torch.bfloat16 if settings.keys() & {"master_weights", "optimizer_device"} else torch.float32
    start, batches, repeated = model(dtype), torch.randn(2, 4, 3, dtype=dtype), 0

    def window(net, opt, at):
        """Returns whether there was an interrupt in its last step."""
        backward(net, batches[0])
        opt.step()
        backward(net, batches[1])
        return interrupted(opt.step, at) is not None

    def trained(at):
        net = twin(start)
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2, **settings)
        return net, opt, window(net, opt, at)

    expected, _, _ = trained(MOST)
    for at in points():
        net, opt, stopped = trained(at)
        if not stopped:
            break
        try:
            opt.step()
        except RuntimeError as error:
            assert "call opt.reset(), and repeat" in str(error)
            repeated += 1
            opt.reset()
            window(net, opt, MOST)
        assert_same_parameters(net, expected, 0)
    assert at > 100 and repeated < at / 3


def test_as_extensions_hear_that_a_micro_batch_is_over(monkeypatch):
    """Called again, the step goes on: it is not that of another micro-batch, without gradients."""
    net, ended, calls = model(torch.float32), SkipMicroBatch.ended, []
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 3, nonfinite="skip_micro_batch")

    def stops_once(extension, rejected):
        calls.append(rejected)
        if len(calls) == 2:
            raise KeyboardInterrupt
        ended(extension, rejected)

    monkeypatch.setattr(SkipMicroBatch, "ended", stops_once)
    backward(net, torch.randn(4, 3))
    opt.step()
    backward(net, torch.randn(4, 3))
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    opt.step()
    assert opt.progress == {"window": 0, "micro_batch": "2/3"}


def stopped_before_it_closes(monkeypatch, call, steps):
    """A wrapper whose window of two micro-batches ``call`` was about to close.

    Returns its model, it, the batch, and the model that the big batch trains.
    """
    close, net, x = Ledger.close_window, model(torch.float32), torch.randn(4, 3)
    opt, big = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), steps), twin(net)

    def stops(ledger):
        monkeypatch.setattr(Ledger, "close_window", close)
        raise KeyboardInterrupt

    backward(net, x)
    opt.step()
    backward(net, x)
    monkeypatch.setattr(Ledger, "close_window", stops)
    with pytest.raises(KeyboardInterrupt):
        getattr(opt, call)()
    backward(big, x)
    torch.optim.SGD(big.parameters(), lr=0.1).step()
    return net, opt, x, big


@pytest.mark.parametrize(("call", "steps"), [("step", 2), ("flush", 3)])
def test_a_call_that_was_about_to_close_a_window_closes_it_when_called_again(monkeypatch, call, steps):
    net, opt, x, big = stopped_before_it_closes(monkeypatch, call, steps)
    getattr(opt, call)()
    assert opt.updated
    assert_same_parameters(net, big, 1e-6)
    opt.zero_grad()
    backward(net, x)
    opt.step()  # the next window's first micro-batch
    assert opt.progress == {"window": 1, "micro_batch": f"1/{steps}"}
    assert_same_parameters(net, big, 1e-6)


def test_a_window_that_was_about_to_close_is_open(monkeypatch):
    """A checkpoint has it, without a warning, and what comes next joins it."""
    net, opt, x, big = stopped_before_it_closes(monkeypatch, "step", 2)
    saved = opt.state_dict()["fusedaccum"]
    assert saved["window"]["micro_batches"] == 2 and len(saved["buffers"]) == 3
    backward(net, x)
    opt.step()
    assert opt.updated and opt.last_window.micro_batches == 3
    assert_same_parameters(net, big, 1e-6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_forward_of_a_pooled_batch_norm_leaves_the_layer_as_it_was():
    for at in range(1, MOST):
        layer = nn.BatchNorm1d(3)
        layer.running_mean.fill_(5.0)
        before = {name: x.clone() for name, x in layer.state_dict().items()}
        fa.accumulate_batchnorm(layer)
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), 2)
        if interrupted(functools.partial(layer, torch.randn(4, 3)), at) is None:
            break
        opt.reset()
        assert layer.momentum == 0.1, at
        assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items()), at
    assert at > 50


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_cached_backward_leaves_gradients_on():
    for at in range(1, MOST):
        net = nn.Linear(3, 4)
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2)
        call = functools.partial(fa.cached_backward, torch.var, net, torch.randn(4, 3), micro_batch_size=2, opt=opt)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the open window was dropped
            stopped = interrupted(call, at)
        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert enabled, at
        if stopped is None:
            break
    assert at > 100


class TwoNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()

    def forward(self, x):
        return self.one(x) + self.other(2 * x)


def over(opt):
    """True if ``step()`` has nothing left to do: Ctrl-C came as it returned."""
    ledger, accumulation = opt._ledger, opt._accumulation
    if ledger.micro is not None or opt._closing.broke_off:
        return False
    return ledger.window is None or not (ledger.complete() or accumulation.step_under_way)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stopped", [2, 3], ids=["inside a window", "at its end"])
def test_a_step_called_again_pools_what_batch_norms_have_seen(stopped):
    batches = [torch.randn(4, 3).double() * (i + 1) for i in range(6)]
    big, lost = TwoNorms(), []
    for i in range(0, 6, 2):
        big(torch.cat(batches[i : i + 2]))
    for at in range(1, MOST):
        net = fa.accumulate_batchnorm(TwoNorms())
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2)
        try:
            for i, x in enumerate(batches):
                opt.backward((net(x) - 1).square().mean())
                interrupt = interrupted(opt.step, at if i == stopped else MOST)
                if i == stopped and interrupt is None:
                    break
                if not over(opt):
                    opt.step()
                opt.zero_grad()
            else:
                same = zip(net.buffers(), big.buffers(), strict=True)
                if not all(torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12) for a, b in same):
                    lost.append(at)
                continue
            break
        except RuntimeError as error:
            assert "call opt.reset(), and repeat" in str(error)
    assert at > 200 and len(lost) <= 4  # where micro_batch_counted() is not called any more
