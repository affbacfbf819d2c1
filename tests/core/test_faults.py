"""Exceptions anywhere in the wrapper's calls: everything counts once.

A call that raised is made again, or a lost window is repeated.
"""

import copy
import functools
import random
from contextlib import contextmanager

import fusedaccum as fa
import fusedaccum.extensions.master_weights as masters
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from training import assert_same_parameters, data, mean_loss, model, twin, wrapped

pytestmark = pytest.mark.long


class Fault(BaseException):
    """Raised where no code expects it, as Ctrl-C is."""


class Faults(TorchFunctionMode):
    """Counts the calls of PyTorch's functions, and raises before or after one of them.

    The reference backend is made of these functions.

    Attributes:
        met: how many there were. fired: has it raised?
    """

    def __init__(self, at, after):
        super().__init__()
        self.at, self.after = at, after
        self.met, self.fired, self.off = 0, False, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        counts = not self.off and not any(other in str(func) for other in ("profiler", "set_grad_enabled"))
        fires = counts and self.met == self.at
        self.met, self.fired = self.met + counts, self.fired or fires
        if fires and not self.after:
            raise Fault
        result = func(*args, **(kwargs or {}))
        if fires:
            raise Fault
        return result

    @contextmanager
    def none(self):
        """In the block, nothing is counted."""
        self.off = True
        yield
        self.off = False


class Steps(torch.optim.SGD):
    """Nothing raises in its own step: what that leaves half done is not the wrapper's business."""

    faults = None

    def step(self):
        with self.faults.none():
            super().step()


def again(faults, call):
    for _ in range(2):
        try:
            with faults:
                return call()
        except Fault:
            pass
    raise AssertionError("a fault is raised only once")


def window(net, opt, faults, weight, normalize, x, y):
    """Two micro-batches. A call that a fault breaks off is made again."""
    for part in (slice(0, None, 2), slice(1, None, 2)):
        again(faults, lambda part=part: opt.backward(mean_loss(net, x[part], y[part]), weight=weight))
        if normalize and part.start == 1:
            again(faults, opt.normalize_)
        again(faults, opt.step)


LOST = ("so the open window was dropped", "call opt.reset(), and repeat")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"reduction": "sum", "buffer_dtype": None},
        {"max_grad_norm": 1e-2, "nonfinite": "skip_window"},
        {"noise_scale": 0.9},
        {"nonfinite": "skip_micro_batch"},
        {"normalize": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_call_may_raise(settings, dtype, after):
    torch.manual_seed(0)
    start, (x, y) = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype), data(24, dtype)
    settings = {"buffer_dtype": torch.float32} | settings
    normalize, weight = settings.pop("normalize", False), 12 if settings.get("reduction") == "sum" else None

    def trained(at):
        net, faults, repeated = twin(start), Faults(at, after), 0
        opt = fa.AccumulatingOptimizer(Steps(net.parameters(), lr=0.5), 2, backend="reference", **settings)
        opt.optimizer.faults = faults
        for turn in range(3):
            try:
                window(net, opt, faults if turn == 1 else Faults(-1, after), weight, normalize, x, y)
            except (RuntimeError, RuntimeWarning) as error:
                if not any(so in str(error) for so in LOST):
                    raise
                repeated += 1
                opt.reset()
                window(net, opt, Faults(-1, after), weight, normalize, x, y)
            assert opt.updated and opt.last_window.micro_batches == 2
        return net, faults, repeated

    expected, none, _ = trained(-1)
    repeats = []
    for at in range(random.randrange(5), none.met, 5):
        net, faults, repeated = trained(at)
        assert faults.fired, at
        assert_same_parameters(net, expected, 0)
        repeats.append(repeated)
    assert 0 < sum(repeats) < 0.6 * len(repeats)


def test_an_exception_while_masters_take_their_places_puts_the_model_back(monkeypatch):
    nets, (x, y) = [model(torch.bfloat16), model(torch.bfloat16)], data(dtype=torch.bfloat16)
    failing, plain = (wrapped(net, master_weights=True) for net in nets)
    states_of = masters.states_of

    def interrupted(inner):
        monkeypatch.setattr(masters, "states_of", states_of)
        raise KeyboardInterrupt

    for window in range(3):
        for net, opt in zip(nets, (failing, plain), strict=True):
            mean_loss(net, x, y).backward()
            if opt is failing and window == 1:
                monkeypatch.setattr(masters, "states_of", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    opt.step()
                assert all(a is b for a, b in zip(opt.param_groups[0]["params"], net.parameters(), strict=True))
            opt.step()
    assert_same_parameters(*nets, 0)


def test_an_interrupt_while_masters_leave_their_places_leaves_the_models_there():
    nets, (x, y) = [model(torch.bfloat16), model(torch.bfloat16)], data(dtype=torch.bfloat16)
    failing, plain = (wrapped(net, master_weights=True) for net in nets)

    class Interrupted(dict):
        def clear(self):
            failing._accumulation.extensions.of(masters.MasterWeights)._gradients = {}
            raise KeyboardInterrupt

    for window in range(3):
        for net, opt in zip(nets, (failing, plain), strict=True):
            mean_loss(net, x, y).backward()
            if opt is failing and window == 1:
                opt._accumulation.extensions.of(masters.MasterWeights)._gradients = Interrupted()
                with pytest.raises(KeyboardInterrupt):
                    opt.step()
                assert all(a is b for a, b in zip(opt.param_groups[0]["params"], net.parameters(), strict=True))
            opt.step()
    assert_same_parameters(*nets, 0)


def test_a_fused_layer_does_not_add_to_sums_of_which_some_are_divided(monkeypatch):
    net = fa.fuse_linear(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    opt, x = wrapped(net), torch.randn(5, 6)
    for _ in range(2):
        net(x).sum().backward()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fa.ops, "scale_", interrupted)
        opt.normalize_()
    for call in (net(x).sum().backward, opt.step):
        with pytest.raises(RuntimeError, match=r"call opt\.reset\(\), and repeat"):
            call()


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_a_checkpoint_says_that_it_lacks_a_window_whose_step_broke_off(owned):
    class BreaksOnce(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            if not self.broken:
                self.broken = True
                raise RuntimeError("broke off")
            wrapper.state_dict()  # in the middle of a step that will be whole
            return super().step(closure)

    p = torch.nn.Parameter(torch.zeros(1))
    wrapper = fa.AccumulatingOptimizer(BreaksOnce([p], lr=1.0), None if owned else 1)
    p.sum().backward()
    with pytest.raises(RuntimeError, match="broke off"):
        wrapper.step()
    for saved in (wrapper.state_dict, functools.partial(copy.deepcopy, (p, wrapper))):
        with pytest.warns(RuntimeWarning, match=r"no checkpoint or copy holds; call step\(\) again"):
            saved()
    wrapper.step()
    assert p == -1
    wrapper.state_dict()
    p.sum().backward()
    wrapper.optimizer.broken = False
    with pytest.raises(RuntimeError, match="broke off"):
        wrapper.step()
    wrapper.reset()
    wrapper.state_dict()
