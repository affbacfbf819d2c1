"""16-bit buffers over ranks: sums to be added up round with different random numbers.

Replicas round with the same.
"""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STOCHASTIC = {"buffer_dtype": None, "rounding": "stochastic"}


def of_all_ranks(mine):
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.stack(parts)


def rounding_errors(rank):
    """Errors of each rank's running mean, if all ranks have the same gradients and seed."""
    p = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), process_group=dist.group.WORLD, **STOCHASTIC)
    factors = torch.tensor([0.7, 1.1, 0.9], dtype=torch.bfloat16)
    for factor in factors:
        (p * factor).sum().backward()
    assert opt.progress["micro_batch"] == len(factors)
    return of_all_ranks(p.grad.float()) - factors.float().mean()


def test_rounding_errors_of_ranks_do_not_add_up(worlds):
    first, second = worlds(2).run(rounding_errors)[0]
    assert min(first.std(), second.std()) > 1e-4  # there are errors
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.1


def replicas(rank, kind, rounding):
    """The replicated parameters after training with each rank's own seed and weights."""
    torch.manual_seed(1)
    layers = {"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer.bfloat16())
    if kind == "tensor parallelism":
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        same, group = [*model.norm.parameters(), model.down.bias.to_local()], None
    else:
        apart = set(model.down.parameters()) if kind == "replicas beside others" else None  # summed over the ranks
        group = dist.group.WORLD if apart else None
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh, ignored_params=apart)
        model.set_gradient_divide_factor(1.0)  # or the two kinds could not share a kernel call
        same = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    torch.manual_seed(100 + rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = fa.AccumulatingOptimizer(inner, 4, buffer_dtype=None, rounding=rounding, process_group=group)
    generator = torch.Generator().manual_seed(0 if kind == "tensor parallelism" else rank)
    for _ in range(8):
        loss = model(torch.randn(8, 16, generator=generator).bfloat16()).float().square().mean()
        opt.backward(loss, weight=1 if kind == "tensor parallelism" else 3 + rank)
        opt.step()
    return [of_all_ranks(p.detach()) for p in same]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", ["tensor parallelism", "replicas of shards", "replicas beside others"])
def test_replicas_stay_alike(worlds, kind, rounding):
    for first, second in worlds(2).run(replicas, kind=kind, rounding=rounding)[0]:
        assert torch.equal(first, second)
