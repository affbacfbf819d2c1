"""A contrastive loss over the embeddings of all ranks, cached on each of them."""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import Gathered, assert_close, made, sgd, wrapped
from torch import nn
from torch.nn import functional as F

SAMPLES = 12  # of all ranks


def batch(window):
    generator = torch.Generator().manual_seed(window)
    return [torch.randn(SAMPLES, 12, generator=generator) for _ in range(2)]


def info_nce(model, a, b):
    target = torch.arange(len(a))
    logits = model.scale.sum() * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def train(rank, ddp, settings):
    model = made()
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    opt = wrapped(model, **settings, **({} if ddp else {"process_group": dist.group.WORLD}))

    def of_all_ranks(a, b):
        return info_nce(model, Gathered.apply(a), Gathered.apply(b))

    for window in range(2):
        views = [view.tensor_split(dist.get_world_size())[rank] for view in batch(window)]
        fa.cached_backward(of_all_ranks, [module, module], views, micro_batch_size=4, opt=opt)
        opt.step()
        opt.zero_grad()
        assert opt.updated
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("settings", [{}, {"accum_steps": 1}, {"reduction": "none"}], ids=["owned", "counted", "none"])
def test_a_loss_over_gathered_embeddings_is_that_of_the_big_batch(worlds, ddp, settings):
    model = made()
    opt = sgd(model.parameters())
    for window in range(2):
        info_nce(model, *map(model, batch(window))).backward()
        opt.step()
        opt.zero_grad()
    for ours in worlds(2).run(train, ddp=ddp, settings=settings):
        assert_close(ours, list(model.parameters()))
