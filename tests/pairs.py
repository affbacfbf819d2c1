"""Two features at once: a window of unequal weights ends with the big batch's step."""

from dataclasses import dataclass, field

import adding
import fusedaccum as fa
import pytest
import torch
from torch import nn
from training import data, parts

SIZES = (5, 12, 7)


class AddsToGrad(torch.autograd.Function):
    """``x @ weight.t()``; backward adds to a ``weight.grad``, if any, and returns nothing then."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            return grad @ weight, grad.t() @ x
        torch.addmm(weight.grad, grad.t(), x, out=weight.grad)
        return grad @ weight, None


class Net(nn.Module):
    """A weight for each way a gradient may come. What it normalises has no part in its output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.normal = nn.BatchNorm1d(6, affine=False)
        self.first, self.second, self.last = nn.Linear(6, 8), adding.Adding(8, 8, bias=False), nn.Linear(8, 3)
        self.narrow = nn.Parameter(torch.linspace(0.5, 1.5, 8).to(torch.bfloat16))
        self.in_place = False

    def forward(self, x):
        x = x + 0 * self.normal(x)
        weight = self.first.weight
        hidden = AddsToGrad.apply(x, weight) if self.in_place else x @ weight.t()
        return self.last(torch.tanh(self.second(torch.tanh(hidden + self.first.bias)) * self.narrow.float()))


@dataclass
class On:
    """How to turn a feature on.

    Attributes:
        settings: of the wrapper.
        scaler: True if the loop is GradScaler's.
        sums: True if the losses are sums over items, as they must be.
        fused: True if the optimizer is.
        prepare: called with the model, before it is wrapped.
        wrap: makes the wrapper, or several, of which the first is given the weights.
    """

    settings: dict = field(default_factory=dict)
    scaler: bool = False
    sums: bool = False
    fused: bool = False
    prepare: object = None
    taken_over: bool = False
    two: bool = False


def mark(net):
    net.second.weight.grad_added_to_main_grad = False


def add_in_place(net):
    net.in_place = True


def widen(net):
    """A fused optimizer takes gradients of the parameters' own dtype."""
    net.narrow = nn.Parameter(net.narrow.float())


ON = {
    "ChangingOwners": On(taken_over=True),
    "SharedBackward": On(two=True),
    "Losses": On(),
    "NoiseScale": On({"noise_scale": 0.5}),
    "SkipWindow": On({"nonfinite": "skip_window"}),
    "SkipMicroBatch": On({"nonfinite": "skip_micro_batch"}),
    "Raise": On({"nonfinite": "raise"}),
    "NormSpike": On({"skip_norm": 1e6}),
    "LossScale": On(scaler=True),
    "RunningMeans": On({"buffer_dtype": None}),
    "RandomRounding": On({"buffer_dtype": None, "rounding": "stochastic"}),
    "LowParts": On({"buffer_dtype": torch.bfloat16, "rounding": "compensated"}),
    "BatchNormStats": On(prepare=fa.accumulate_batchnorm),
    "InPlaceLayers": On(sums=True, prepare=add_in_place),
    "MainGrads": On(sums=True, prepare=mark),
    "FusedOptimizers": On(fused=True, prepare=widen),
    "MasterWeights": On({"master_weights": True}),
    "SplitMasters": On({"master_weights": "split"}),
    "CpuOptimizer": On({"optimizer_device": "cpu"}),
}


def sgd(params, fused=False):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, fused=fused)


def loss_of(net, x, y, sums):
    each = (net(x) - y).square().mean(1)
    return each.sum() if sums else each.mean()


def big_batch():
    """The oracle: the model after one plain step on all samples, and the loss."""
    net = Net()
    optimizer = sgd(net.parameters())
    x, y = data(sum(SIZES), torch.float32)
    loss = loss_of(net, x, y, False)
    loss.backward()
    optimizer.step()
    return net, loss


def made(net, one, other):
    """The wrappers; the first is given the weights."""
    settings = {"accum_steps": len(SIZES), "reduction": "sum" if one.sums or other.sums else "mean"}
    settings |= one.settings | other.settings
    groups = [list(net.parameters())]
    if one.two or other.two:
        groups = [[net.last.weight], [p for p in net.parameters() if p is not net.last.weight]]
    if one.taken_over or other.taken_over:
        for group in groups:
            fa.AccumulatingOptimizer(sgd(group), accum_steps=2)
    return [fa.AccumulatingOptimizer(sgd(group, one.fused or other.fused), **settings) for group in groups]


def check(a, b, device="cpu"):
    sums = a.sums or b.sums
    plain, loss = big_batch()
    net = Net().to(device)
    for of in (a, b):
        if of.prepare is not None:
            of.prepare(net)
    opts = made(net, a, b)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if a.scaler or b.scaler else None
    for x, y in parts(*data(sum(SIZES), torch.float32), SIZES):
        of_part = loss_of(net, x.to(device), y.to(device), sums)
        opts[0].backward(of_part if scaler is None else scaler.scale(of_part), weight=float(len(x)))
        for opt in opts:
            late = {"weight": float(len(x))} if sums and opt is not opts[0] else {}
            opt.step(**late) if scaler is None else scaler.step(opt, **late)
        if scaler is not None:
            scaler.update()
        for opt in opts:
            opt.zero_grad()
    assert all(opt.updated and opt.last_window.weight == sum(SIZES) for opt in opts)
    assert opts[0].last_window.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        rtol = 1e-2 if name == "narrow" else 1e-5
        ours = ours.detach().cpu().to(theirs.dtype)
        torch.testing.assert_close(ours, theirs.detach(), rtol=rtol, atol=rtol * 0.1, msg=lambda m, n=name: f"{n}: {m}")
    if ON["BatchNormStats"] in (a, b):
        torch.testing.assert_close(net.normal.running_var.cpu(), plain.normal.running_var, rtol=1e-5, atol=1e-6)
    if ON["NoiseScale"] in (a, b):
        assert all(opt.last_window.noise_scale is not None or scaler is not None for opt in opts)
