"""Training with pooled batch statistics, in micro-batches and big batches, and comparing them."""

import copy

import fusedaccum as fa
import torch


def statistics(model):
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def assert_same_statistics(model, oracle, tolerance=1e-6):
    ours, theirs = statistics(model), statistics(oracle)
    assert ours.keys() == theirs.keys() and ours
    for name, buffer in theirs.items():
        if name.endswith("num_batches_tracked"):
            assert ours[name] == buffer, name
        else:
            scale = buffer.abs().max()
            assert ours[name].dtype == buffer.dtype
            assert (ours[name].double() - buffer.double()).abs().max() <= tolerance * scale, name


def wrapped(model, accum_steps=None, **settings):
    return fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), accum_steps, **settings)


def backward(model, x):
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).mean().backward()


def train(model, opt, windows):
    for window in windows:
        for x in window:
            backward(model, x)
            opt.step()
            opt.zero_grad()


def big_batches(model, windows):
    """Each window as one forward pass (exact for the first layer: nothing below it is trained)."""
    for window in windows:
        model(torch.cat(window))


def micro_batches(shape, sizes=(5, 2, 8, 3), windows=3, dtype=torch.float32, offset=0.5):
    return [[torch.randn(n, *shape).mul(1.7).add(offset).to(dtype) for n in sizes] for _ in range(windows)]


def pair(layer):
    """A layer that pools its statistics, and a plain copy of it as the oracle."""
    oracle = copy.deepcopy(layer)
    return fa.accumulate_batchnorm(layer), oracle
