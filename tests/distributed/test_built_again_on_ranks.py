"""Wrappers built again on parameters that several ranks hold: all ranks use the same order."""

import pytest
import torch
import torch.distributed as dist
from parts import assert_close, sgd, share, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard

DDP = nn.parallel.DistributedDataParallel


def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(model, window, rank):
    x, y, _, _ = share(window, 2, rank, 2, True)[0]
    return (model(x) - y).square().mean()


def searched(rank, how):
    """Three rates from the same weights; each wrapper is left inside a window, and held on to."""
    model, held, results = made(), [], []
    if how == "fsdp2":
        fully_shard(model)
    module = DDP(model) if how in ("ddp", "shard") else model
    start = [p.detach().clone() for p in model.parameters()]
    settings = {"group": {"process_group": dist.group.WORLD}, "shard": {"shard": True}}.get(how, {})
    for number, lr in enumerate((0.3, 0.1, 0.03)):
        with torch.no_grad():
            for p, was in zip(model.parameters(), start, strict=True):
                p.copy_(was)
        if number:
            with pytest.warns(RuntimeWarning, match="open window of an AccumulatingOptimizer around SGD"):
                opt = wrapped(module, sgd, accum_steps=2, **settings)
        else:
            opt = wrapped(module, sgd, accum_steps=2, **settings)
        for group in opt.param_groups:
            group["lr"] = lr
        for window in range(2):
            for _ in range(2):
                loss_of(module, window, rank).backward()
                opt.step()
        results += [(p.full_tensor() if how == "fsdp2" else p).detach().clone() for p in model.parameters()]
        loss_of(module, 5, rank).backward()
        opt.step()
        held.append(opt)
    for opt in held[:-1]:
        with pytest.raises(RuntimeError, match="has lost its parameters to another"):
            opt.step()
    return results


@pytest.mark.parametrize("how", ["ddp", "group", "shard", "fsdp2"])
def test_a_search_over_learning_rates(worlds, how):
    expected = []
    for lr in (0.3, 0.1, 0.03):
        model = made()
        opt = sgd(model.parameters())
        opt.param_groups[0]["lr"] = lr
        for window in range(2):
            opt.zero_grad()
            (sum(loss_of(model, window, rank) for rank in range(2)) / 2).backward()
            opt.step()
        expected += list(model.parameters())
    for ours in worlds(2).run(searched, how=how):
        assert_close(ours, expected)
