"""Over ranks, layers that add their gradients to main_grad train as layers that do not."""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from adding import Net, marked
from torch import nn
from training import data, sgd, sum_loss


def trained(rank, mark, ddp, counts, settings):
    net = marked(Net()) if mark else Net()
    model = nn.parallel.DistributedDataParallel(net) if ddp else net
    group = None if ddp else dist.group.WORLD
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 3, reduction="sum", process_group=group, **settings)
    for window in range(3):
        x, y = data(seed=2 * window + rank)
        count = counts[rank] if window == 1 else 3
        for k in range(count):
            at = slice(4 * k, 4 * (k + 1))
            opt.backward(sum_loss(model, x[at], y[at]), weight=4)
            opt.step()
        if count < 3:
            opt.flush()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("ddp", [False, True], ids=["group", "DDP"])
@pytest.mark.parametrize("settings", [{}, {"shard": True, "max_grad_norm": 0.05}], ids=["whole", "shard"])
@pytest.mark.parametrize("counts", [(3, 3), (0, 3), (3, 1)], ids=str)
def test_trains_as_the_unfused_model(worlds, ddp, settings, counts):
    arguments = {"ddp": ddp, "counts": counts, "settings": settings}
    theirs = worlds(2).run(trained, mark=False, **arguments)
    for ours in worlds(2).run(trained, mark=True, **arguments):
        for a, b in zip(ours, theirs[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
