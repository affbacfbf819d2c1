"""What tests of offloaded buffers train: all kinds of parameters, in all kinds of windows."""

import fusedaccum as fa
import torch
from torch import nn


class Net(nn.Module):
    """Parameters of two dtypes, some with unusual strides, one frozen, and one without gradient."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(128, 48).t() / 7)
        self.layers = nn.Sequential(nn.Linear(128, 37), nn.Tanh(), nn.Linear(37, 19, bias=False), nn.Tanh())
        self.to(torch.bfloat16)
        self.head = nn.Linear(19, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.gappy = nn.Parameter(torch.ones(5, 4)[:, ::2])
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        x = self.layers(torch.relu(x @ self.turned)).float()
        return self.head(x) * self.scale + self.frozen + self.gappy.sum(1)

    def last(self):
        """An element of the parameter whose gradient is added last."""
        return self.turned[-1, -1].float()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, foreach=False)


class CountsSteps(torch.optim.SGD):
    """A third-party optimizer that keeps a count of its own in every group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def micro_batches(device, count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(4, 48, generator=generator)
        yield x.bfloat16().to(device), torch.randn(4, 5, generator=generator).to(device)


def moved(model, device):
    """A ``model.to(device)`` that keeps strides, even with gaps."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            there = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device)
            setattr(module, name, nn.Parameter(there.copy_(p.detach()), requires_grad=p.requires_grad))
    return model


def made(device, make=sgd, **settings):
    torch.manual_seed(1)
    model = moved(Net(), device)
    return model, fa.AccumulatingOptimizer(make(model.parameters()), **settings)


def weight_of(kind, number, device):
    weight = [3.0, 1.0, 2.5][number % 3]
    return {"none": None, "number": weight}.get(kind, torch.tensor(weight, device=device))


def train(model, opt, device, count=8, kind="none", bad=(), start=0, before_step=lambda model, opt: None):
    """Train on ``count`` micro-batches, with a non-finite gradient in the ``bad`` ones.

    Returns what last_window said after each.
    """
    said = []
    for number, (x, y) in enumerate(micro_batches(device, count)):
        if number < start:
            continue
        loss = (model(x) - y).square().mean()
        if number in bad:
            loss = loss + model.last() * float("nan")
        opt.backward(loss, weight=weight_of(kind, number, device))
        before_step(model, opt)
        opt.step()
        said.append(report(opt))
        opt.zero_grad()
    opt.flush()
    return [*said, report(opt)]


def report(opt):
    last = opt.last_window
    return last and (last.micro_batches, float(last.weight), last.nonfinite and int(last.nonfinite), bool(last.applied))


def contents(model, opt):
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [x.detach().cpu() for x in [*model.parameters(), *state]]


def assert_same(ours, theirs, tolerance=0.0):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and not a.isnan().any()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
