"""A small regression and its big-batch step, the oracle for tests of the wrapper."""

import copy

import fusedaccum as fa
import torch
from torch import nn


def model(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def data(n=24, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, size, generator=g, dtype=torch.float64) for size in (6, 3))
    return x.to(dtype), y.to(dtype)


def mean_loss(net, x, y):
    return nn.functional.mse_loss(net(x), y)


def sum_loss(net, x, y):
    """The sum over the items of each item's mean squared error."""
    return ((net(x) - y) ** 2).mean(1).sum()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrapped(net, *args, make=sgd, **kwargs):
    return fa.AccumulatingOptimizer(make(net.parameters()), *args, **kwargs)


def masters_of(opt):
    return {slot.param: slot.stepped for slot in opt._sums.buffers.slots if slot.stepped is not slot.param}


def zeros(n=1, dtype=torch.float32):
    return nn.Parameter(torch.zeros(n, dtype=dtype))


def wrapper_of(parameters, *args, make=None, **kwargs):
    make = make or (lambda ps: torch.optim.SGD(ps, lr=1.0))
    return fa.AccumulatingOptimizer(make(parameters), *args, **kwargs)


def gradient(net, x, y):
    """The loss's gradient by plain PyTorch."""
    return torch.autograd.grad(mean_loss(net, x, y), list(net.parameters()))


def assert_grads(net, expected, rtol=1e-12):
    for p, e in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.double(), e.double(), rtol=rtol, atol=rtol)


def big_batch_step(net, optimizer, x, y, loss=mean_loss):
    """One step of plain PyTorch on the whole batch."""
    optimizer.zero_grad()
    loss(net, x, y).backward()
    optimizer.step()


def parts(x, y, sizes):
    """The batch, cut into micro-batches of these sizes."""
    assert sum(sizes) == len(x)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def twin(net):
    """A copy with the same weights, for the oracle."""
    return copy.deepcopy(net)


def assert_same_parameters(a, b, rtol):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        scale = max(q.detach().abs().max().item(), 1e-30)
        worst = (p.detach().double() - q.detach().double()).abs().max().item() / scale
        assert worst <= rtol, f"{name}: relative difference {worst:.3g} > {rtol:g}"


def grads(net):
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def closed(noise_scale, weight=80.0, micro_batches=10):
    """What a schedule is told of a window that had this noise scale."""
    of = torch.tensor
    return fa.LastWindow(micro_batches, of(weight), None, None, of(True), None, of(noise_scale))
