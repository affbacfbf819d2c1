"""FSDP2 modules over different ranks: experts, each over its own, beside layers over all."""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import Gathered, assert_close, micro_batches, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

WINDOWS, COUNT, EXPERTS = 3, 8, 2


class Total(torch.autograd.Function):
    """The sum over the ranks, of which each rank uses some rows."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Experts(nn.Module):
    """The sum of all experts' outputs; each expert works on the rows of all ranks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 16, 3))

    def forward(self, x):
        if not dist.is_initialized():
            return torch.einsum("ni,eio->no", x, self.weight)
        everyone = torch.einsum("ni,eio->no", Gathered.apply(x), self.weight.to_local())
        return Total.apply(everyone).chunk(dist.get_world_size())[dist.get_rank()].clone()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.experts, self.first = Experts(), nn.Linear(12, 16)

    def forward(self, x):
        return self.experts(torch.tanh(self.first(x)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def expert_parallel(says_so=True):
    """The model on two ranks with one expert each. ``says_so``: is its weight a DTensor?"""
    model = Net()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "experts"))
    weight = distribute_tensor(model.experts.weight, mesh["experts"], [Shard(0)])
    model.experts.weight = nn.Parameter(weight if says_so else weight.to_local().detach())
    fully_shard(model.experts, mesh=mesh["copies"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def train(rank, first):
    model = expert_parallel()
    parameters = [model.experts.weight, *model.first.parameters()]
    opt = fa.AccumulatingOptimizer(
        sgd(parameters if first else parameters[::-1]), accum_steps=COUNT // 2, max_grad_norm=0.5
    )
    norms = []
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, COUNT, rank, 2, equal=True):
            opt.backward((model(x) - y).square().mean(), weight=weight)
            opt.step()
            opt.zero_grad()
        assert opt.last_window.micro_batches == COUNT
        norms.append(float(opt.last_window.grad_norm))
    return [p.full_tensor().detach() for p in parameters], norms


@pytest.mark.parametrize("first", [True, False], ids=["experts first", "experts last"])
def test_experts_beside_layers_over_all_ranks_are_the_big_batch(worlds, first):
    model = Net()
    optimizer = sgd(model.parameters())
    norms = []
    for window in range(WINDOWS):
        optimizer.zero_grad()
        for x, y, _, _ in micro_batches(window, COUNT, equal=True):
            ((model(x) - y).square().mean() / COUNT).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    for ours, ours_norms in worlds(2).run(train, first=first):
        assert_close(ours, list(model.parameters()))
        assert ours_norms == pytest.approx(norms, rel=1e-5)


def refused_beside_others(rank):
    """A parameter of only one rank, on the mesh of a weight that is spread as it should be."""
    model = Net()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "experts"))
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight, mesh["experts"], [Shard(0)]))
    model.experts.alone = nn.Parameter(torch.ones(3))
    fully_shard(model.experts, mesh=mesh["copies"])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for parameters in (list(model.named_parameters()), list(model.named_parameters())[::-1]):
        with pytest.raises(
            ValueError, match=rf"experts.alone is a DTensor of ranks \[{rank}\].*shared by ranks \[0, 1\]"
        ):
            fa.AccumulatingOptimizer(sgd(parameters))


def test_every_shard_of_a_mesh_is_looked_at(worlds):
    worlds(2).run(refused_beside_others)


def refused(rank):
    model = expert_parallel(says_so=False)
    with pytest.raises(ValueError, match=rf"experts.*of ranks \[{rank}\].*shared by ranks \[0, 1\].*distribute_tensor"):
        fa.AccumulatingOptimizer(sgd(model.named_parameters()))
    model = expert_parallel()
    opt = fa.AccumulatingOptimizer(sgd([model.experts.weight]))  # its windows are this rank's alone
    with pytest.raises(ValueError, match=r"over ranks \[0, 1\].*process_group"):
        opt.add_param_group({"params": list(model.first.parameters())})
    assert len(opt.param_groups) == 1
    del opt
    opt = fa.AccumulatingOptimizer(sgd([model.experts.weight]), process_group=dist.group.WORLD)
    opt.add_param_group({"params": list(model.first.parameters())})


def test_shards_of_other_ranks_than_share_the_windows_are_refused(worlds):
    worlds(2).run(refused)
