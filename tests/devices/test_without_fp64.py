"""A device without FP64, as Apple's are (mps): everything runs in FP32 there, in plain PyTorch."""

import copy
import math

import fusedaccum as fa
import fusedaccum.scalars
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


class NoFp64(TorchFunctionMode):
    """On the device, no function of PyTorch's makes an FP64 tensor."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == self.device.type and x.dtype == torch.float64:
                raise TypeError(f"{func} made an FP64 tensor on {x.device}")
        return result


@pytest.fixture
def device(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("GPUs that can run this test have FP64")
    monkeypatch.setattr(fusedaccum.scalars, "WITHOUT_FP64", (device.type,))
    with NoFp64(device):
        yield device


def test_the_device_has_none(device):
    with pytest.raises(TypeError, match="made an FP64 tensor"):
        torch.zeros(3, dtype=torch.float64, device=device)
    with pytest.raises(TypeError, match="made an FP64 tensor"):
        torch.zeros(3, device=device).double()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 2))


SETTINGS = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.05},
    "skip-window": {"nonfinite": "skip_window", "max_grad_norm": 0.05},
    "skip-micro-batch": {"nonfinite": "skip_micro_batch"},
    "noise-scale": {"noise_scale": 0.9},
    "norm-spike": {"skip_norm": fa.TimesMean(1.1, after=1)},
    "16-bit": {"buffer_dtype": torch.bfloat16, "rounding": "stochastic", "max_grad_norm": 0.05},
    "masters": {"master_weights": True, "max_grad_norm": 0.05},
}


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaler"])
@pytest.mark.parametrize("case", SETTINGS)
def test_training_there_is_training_on_the_cpu(device, case, scaled):
    """Losses and some weights are tensors on the device.

    A checkpoint within a window is resumed where it was made, or what the CPU began in FP64 is
    finished on the device.
    """
    torch.manual_seed(1)
    dtype, rtol = (torch.bfloat16, 2**-8) if case in ("16-bit", "masters") else (torch.float32, 1e-5)
    net, data = Net().to(dtype), torch.randn(11, 3, 4, dtype=dtype)
    parameters, reported = train(net, data, CPU, CPU, 9, SETTINGS[case], scaled)
    for begins, resumed_at in ((device, 9), (CPU, 9), (CPU, 11)):
        there, reported_there = train(net, data, begins, device, resumed_at, SETTINGS[case], scaled)
        assert reported_there == pytest.approx(reported, rel=rtol, abs=1e-6, nan_ok=True)
        torch.testing.assert_close(there, parameters, rtol=rtol, atol=rtol / 10)


def train(net, data, begins, ends, resumed_at, settings, scaled):
    """The parameters at the end, and what the windows reported.

    (Of batch statistics, the simulated device hands out only zeros.)
    """
    net = copy.deepcopy(net).to(begins)
    fa.accumulate_batchnorm(net)
    opt, scaler = wrapped(net, settings), torch.amp.GradScaler(begins.type, init_scale=8.0, enabled=scaled)
    reported = []

    def report():
        if opt.updated:
            reported.extend(float(v) for v in opt.last_window.as_dict().values() if v is not None)

    for i, x in enumerate([*data, None]):
        if i == resumed_at:
            saved, kept, scale = opt.state_dict(), net.state_dict(), scaler.state_dict()
            net = Net().to(ends, data.dtype)
            net.load_state_dict(kept)
            fa.accumulate_batchnorm(net)
            opt, scaler = wrapped(net, settings), torch.amp.GradScaler(ends.type, enabled=scaled)
            opt.load_state_dict(saved)
            scaler.load_state_dict(scale)
        if x is None:
            break
        x = x.to(next(net.parameters()).device)
        loss = net(x * math.nan if i == 4 and settings.get("nonfinite") else x).float().square().mean()
        opt.backward(scaler.scale(loss), weight=torch.tensor(1.0 + i % 3, device=loss.device if i % 2 else "cpu"))
        scaler.step(opt)
        scaler.update()
        report()
    opt.flush()
    report()
    return [x.detach().cpu() for x in net.parameters()], reported


def wrapped(net, settings):
    return fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, foreach=False), 2, **settings)


@pytest.mark.parametrize("first", [0, 1])
def test_losses_on_the_device_and_on_the_cpu_are_added_up(device, first):
    p = nn.Parameter(torch.ones(3, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1, foreach=False), 2)
    for i, factor in enumerate((2.0, 4.0)):
        loss = (p * factor).sum()
        loss.backward()
        opt.record_loss(loss.to(CPU if i == first else device))
        opt.step()
    assert float(opt.last_window.loss) == 9.0


class Seeing(TorchDispatchMode):
    """Changes nothing; but where a mode is active, the ops go through PyTorch's dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_functional_layer(device):
    buffers, grads = [torch.ones(5, device=device)], [torch.full((5,), 3.0, device=device).bfloat16()]
    stats = fa.ops.Stats.empty(device)
    fa.ops.accumulate_(buffers, grads, 0.5, decay=2.0, stats=stats)
    assert buffers[0].tolist() == [3.5] * 5
    assert (stats.sq_norm.dtype, stats.sq_norm.item()) == (torch.float32, 5 * 3.5**2)
    assert fa.ops.stats(buffers).sq_norm.item() == 5 * 3.5**2
    with Seeing():
        fa.ops.accumulate_(buffers, grads, 0.5)
    assert buffers[0].tolist() == [5.0] * 5
    wide = fa.ops.Stats(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64))
    with pytest.raises(ValueError, match=r"stats.sq_norm is on cpu"):
        fa.ops.scale_(buffers, 2.0, stats=wide)
