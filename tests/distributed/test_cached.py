"""A contrastive loss over the embeddings of all ranks, with fa.cached_backward on each of them."""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import Gathered, assert_close, made, sgd, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

SAMPLES = 12  # of all ranks


def batch(window):
    generator = torch.Generator().manual_seed(window)
    return [torch.randn(SAMPLES, 12, generator=generator) for _ in range(2)]


def info_nce(scale, a, b):
    target = torch.arange(len(a))
    logits = scale * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def train(rank, ddp, settings):
    model = made()
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    opt = wrapped(model, **settings, **({} if ddp else {"process_group": dist.group.WORLD}))

    def of_all_ranks(a, b):
        return info_nce(model.scale.sum(), Gathered.apply(a), Gathered.apply(b))

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
        info_nce(model.scale.sum(), *map(model, batch(window))).backward()
        opt.step()
        opt.zero_grad()
    for ours in worlds(2).run(train, ddp=ddp, settings=settings):
        assert_close(ours, list(model.parameters()))


def sharded(rank, settings, size):
    model = made()
    fully_shard([model.first, model.second])
    fully_shard(model)
    opt = wrapped(model, max_grad_norm=0.5, **settings)
    norms = []

    def of_all_ranks(a, b):
        return info_nce(5.0, Gathered.apply(a), Gathered.apply(b))

    for window in range(2):
        views = [view.tensor_split(dist.get_world_size())[rank] for view in batch(window)]
        fa.cached_backward(of_all_ranks, [model, model], views, micro_batch_size=size, opt=opt)
        opt.step()
        opt.zero_grad()
        norms.append(opt.last_window.grad_norm.item())
    return [p.full_tensor().detach() for p in model.parameters()], norms


@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.parametrize("settings", [{}, {"accum_steps": 1}, {"reduction": "none"}], ids=["owned", "counted", "none"])
def test_with_fsdp2(worlds, settings, size):
    model, norms = made(), []
    opt = sgd(model.parameters())
    for window in range(2):
        info_nce(5.0, *map(model, batch(window))).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        opt.step()
        opt.zero_grad()
    for ours, ours_norms in worlds(2).run(sharded, settings=settings, size=size):
        assert_close(ours, list(model.parameters()))
        assert ours_norms == pytest.approx(norms, rel=1e-5)
