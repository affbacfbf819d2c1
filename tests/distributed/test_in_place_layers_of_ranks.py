"""Layers that add their gradient to ``p.grad`` itself, under DDP and with a process group."""

import contextlib

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from torch import nn

DDP = nn.parallel.DistributedDataParallel
LR = 0.25


class AddsItself(torch.autograd.Function):
    """``x @ weight.t()``; adds to any ``weight.grad``, and goes on in one of two ways."""

    @staticmethod
    def forward(ctx, x, weight, returns):
        ctx.save_for_backward(x)
        ctx.weight, ctx.returns = weight, returns
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        into = weight.grad
        if into is None:
            return grad @ weight, grad.t() @ x, None
        into.addmm_(grad.t(), x)
        if not ctx.returns:
            return grad @ weight, None, None
        weight.grad = None
        return grad @ weight, into, None


class Net(nn.Module):
    def __init__(self, returns=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.returns = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), returns

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.returns is None:
            return self.last(x)
        return AddsItself.apply(x, self.last.weight, self.returns) + self.last.bias


def batches(rank):
    return torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def trained(rank, returns, ddp, owned, synced=False):
    net = Net(returns)
    module = DDP(net) if ddp else net
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(net.parameters(), lr=LR),
        None if owned else 3,
        process_group=None if ddp else dist.group.WORLD,
    )
    told = ""
    for number, x in enumerate(batches(rank)):
        apart = ddp and owned and number < 2 and not synced
        try:
            with module.no_sync() if apart else contextlib.nullcontext():
                module(x).square().mean().backward()
        except RuntimeError as error:
            return str(error), None
        if not owned:
            opt.step()
    if owned:
        opt.step()
    assert opt.updated
    return told, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("ddp, owned", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("returns", [True, False], ids=["returns p.grad", "returns nothing"])
def test_they_train_as_the_big_batch_of_all_ranks(worlds, returns, ddp, owned):
    big = Net()
    torch.stack([big(x).square().mean() for rank in range(2) for x in batches(rank)]).mean().backward()
    torch.optim.SGD(big.parameters(), lr=LR).step()
    for told, ours in worlds(2).run(trained, returns=returns, ddp=ddp, owned=owned):
        assert not told
        for p, q in zip(ours, big.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-12, atol=1e-15)


def test_a_sum_of_all_ranks_is_not_added_to(worlds):
    for told, _ in worlds(2).run(trained, returns=True, ddp=True, owned=True, synced=True):
        assert "layer of parameter param_groups[0]['params'][2] has added" in told and "inside no_sync()" in told
