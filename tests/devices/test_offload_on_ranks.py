"""``buffer_device="cpu"`` where ranks share windows: no sum leaves before all was added to it."""

import copy

import fusedaccum as fa
import late
import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import World

WINDOWS = 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))


def batch(window, rank):
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(2 * window + rank))


def trained(rank, first_pass):
    """The first pass is known to be its window's last, as ``first_pass`` says."""
    late.loaded()
    model = net().to("late:0")
    steps = {"accum_steps": 1} if first_pass in ("counted", "loaded") else {}
    inner = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    opt = fa.AccumulatingOptimizer(inner, **steps, process_group=dist.group.WORLD, buffer_device="cpu")
    for window in range(WINDOWS):
        if first_pass == "a recipe's":
            recipe = fa.MicroBatcher(lambda x: model(x).square().mean(), opt, micro_batch_size=3, device="late:0")
            recipe.step(batch(window, rank))
        else:
            loss = model(batch(window, rank).to("late:0")).square().mean()
            opt.backward(loss, weight=3, last=first_pass == "said")
            opt.step()
        if first_pass == "loaded":
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    return [p.detach().cpu() for p in model.parameters()]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(2, tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device made for tests is for machines without a GPU")
@pytest.mark.parametrize("first_pass", ["counted", "said", "loaded", "a recipe's"])
def test_windows_of_one_pass_are_the_big_batchs(late_device, world, first_pass):
    big = net()
    opt = torch.optim.SGD(big.parameters(), lr=0.1)
    for window in range(WINDOWS):
        opt.zero_grad()
        big(torch.cat([batch(window, rank) for rank in range(2)])).square().mean().backward()
        opt.step()
    for ours in world.run(trained, first_pass=first_pass):
        for p, q in zip(ours, big.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=0, atol=1e-5)
