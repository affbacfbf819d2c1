"""All ranks leave out the same windows, by the norm of the gradient of all of them."""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, contents, made, mean_loss, sgd, share, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

COUNT, WINDOWS, SPIKE = 8, 6, 4
LIMIT = fa.TimesMean(2.0, decay=0.5, after=2)


def factor(window, number):
    """One micro-batch of one rank has a loss that is too large."""
    return 40.0 if (window, number) == (SPIKE, 3) else 1.0


def train(rank, kind):
    size = dist.get_world_size()
    model = made(torch.float64)
    if kind == "fsdp2":
        fully_shard([model.first, model.second])
        fully_shard(model)
    how = {"process_group": dist.group.WORLD} if kind != "fsdp2" else {}
    opt = wrapped(model, sgd, accum_steps=COUNT // size, skip_norm=LIMIT, shard=kind == "shard", **how)
    told = []
    for window in range(WINDOWS):
        for number, (x, y, weight, _) in enumerate(share(window, COUNT, rank, size)):
            opt.backward(mean_loss(model, x, y, False) * factor(window, number * size + rank), weight=weight)
            opt.step()
            opt.zero_grad()
        told.append((opt.updated, float(opt.last_window.grad_norm), float(opt.last_window.norm_limit)))
    return contents(model, opt), told


@pytest.mark.parametrize("kind", ["group", "shard", "fsdp2"])
def test_all_ranks_leave_out_what_the_big_batch_would(worlds, kind):
    model = made(torch.float64)
    opt, norms, expected = sgd(model.parameters()), [], []
    for window in range(WINDOWS):
        held = share(window, COUNT, 0, 1)
        total = sum(weight for *_, weight, _ in held)
        opt.zero_grad()
        sum(
            mean_loss(model, x, y, False) * (factor(window, number) * weight / total)
            for number, (x, y, weight, _) in enumerate(held)
        ).backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
        weights = [0.5 ** (len(norms) - 1 - i) for i in range(len(norms))]
        mean = sum(w * n for w, n in zip(weights, norms, strict=True)) / sum(weights) if norms else 0.0
        limit = 2.0 * mean if len(norms) >= 2 else float("inf")
        if norm <= limit:
            opt.step()
        norms.append(min(norm.item(), limit))
        expected.append((bool(norm <= limit), norm.item(), limit))
    assert [applied for applied, *_ in expected] == [window != SPIKE for window in range(WINDOWS)]
    results = worlds(2).run(train, kind=kind)
    assert results[0][1] == results[1][1]
    for ours, told in results:
        count = len(list(model.parameters()))  # with shard=True a rank has a part of the state
        assert_close(ours[:count], contents(model, opt)[:count], 1e-5)  # the model computes in FP32 in part
        for (updated, norm, limit), (applied, of_batch, allowed) in zip(told, expected, strict=True):
            assert updated is applied
            assert norm == pytest.approx(of_batch, rel=1e-5) and limit == pytest.approx(allowed, rel=1e-5)


def alone(rank, limit):
    model = DistributedDataParallel(nn.Linear(4, 2))
    opt = wrapped(model, sgd, accum_steps=1, skip_norm=limit)
    with model.no_sync():
        opt.backward(model(torch.ones(3, 4)).square().mean() * (1 + rank))
        if isinstance(limit, fa.TimesMean):
            with pytest.raises(RuntimeError, match=r"but with skip_norm=TimesMean\(factor=2.0"):
                opt.step()
            return None
        opt.step()
    return opt.updated


def test_ranks_that_step_alone_have_no_common_mean_but_may_have_a_number(worlds):
    assert worlds(2).run(alone, limit=LIMIT) == [None, None]
    assert worlds(2).run(alone, limit=1e-9) == [False, False]


def one_owner(rank):
    p = nn.Parameter(torch.ones(4))
    limit = fa.TimesMean(2.0, after=2)
    opt = fa.AccumulatingOptimizer(sgd([p]), 1, process_group=dist.group.WORLD, shard=True, skip_norm=limit)
    told = []
    for window in range(5):
        opt.backward((p * (100.0 if window == 3 else 1.0)).sum())
        opt.step()
        opt.zero_grad()
        told.append((bool(opt.last_window.applied), float(opt.last_window.norm_limit)))
    return told


def test_a_rank_that_steps_nothing_has_the_same_mean(worlds):
    one, other = worlds(2).run(one_owner)
    assert one == other and [applied for applied, _ in one] == [True, True, True, False, True]


def measures_on_one_rank(rank):
    p = nn.Parameter(torch.ones(4))
    settings = {"noise_scale": 0.5} if rank == 0 else {}
    with pytest.raises(ValueError, match="the ranks' wrappers have different features"):
        fa.AccumulatingOptimizer(sgd([p]), 2, process_group=dist.group.WORLD, **settings)


def test_features_on_one_rank_alone_are_refused_by_all(worlds):
    worlds(2).run(measures_on_one_rank)
