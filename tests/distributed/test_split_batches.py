"""MicroBatcher over ranks: each rank cuts its part of the desired batch in its own way."""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, contents, made, sgd, wrapped
from sizes import limits
from torch import nn

SAMPLES = (11, 6)  # of each rank's batch


def whole(window):
    generator = torch.Generator().manual_seed(window)
    return [torch.randn(sum(SAMPLES), size, generator=generator) for size in (12, 3)]


def train(rank, size, ddp, broken_rank, point):
    """Three windows; on one rank memory runs out at the ``point``-th gradient.

    Returns parameters and state, the sizes and the losses.
    """
    model = made()
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
    with limits(bucket=1):
        opt = wrapped(model, sgd, **({} if ddp else {"process_group": dist.group.WORLD}))
    met, sizes, losses = 0, [], []

    def arrives(_):
        nonlocal met
        met += 1
        if rank == broken_rank and met == point:
            raise torch.OutOfMemoryError("injected")

    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(arrives)
    batcher = fa.MicroBatcher(lambda part: (module(part[0], True) - part[1]).square().mean(), opt, size)
    for window in range(3):
        losses.append(float(batcher.step([x.split(SAMPLES)[rank] for x in whole(window)])))
        sizes.append(batcher.micro_batch_size)
    assert opt.last_window.weight == sum(SAMPLES)
    return contents(model, opt), sizes, losses


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize(("size", "point"), [("auto", 3), ("auto", 8), (4, 0)])
def test_a_window_is_the_big_batch_of_all_ranks(worlds, size, ddp, point):
    model = made()
    opt = sgd(model.parameters())
    expected = []
    for window in range(3):
        opt.zero_grad()
        x, y = whole(window)
        loss = (model(x, True) - y).square().mean()
        loss.backward()
        opt.step()
        expected.append(float(loss.detach()))
    results = worlds(2).run(train, size=size, ddp=ddp, broken_rank=1, point=point)
    for ours, _, losses in results:
        assert_close(ours, contents(model, opt), 3e-6)  # FP32, and three steps
        assert losses == pytest.approx(expected, rel=1e-6)
    sizes = [sizes for _, sizes, _ in results]
    if size == 4:
        assert sizes == [[4] * 3] * 2
    else:  # each rank finds its own
        assert sizes == [[11] * 3, [3, 3, 3] if point == 3 else [6, 3, 3]]


def fails_once(rank, size, fails, idle):
    """Three windows; rank 1's first fails before any backward, and is passed again.

    Rank 0 has no data for the second window if it is ``idle`` then.
    """
    model, left = made(), [fails] if rank == 1 else []
    opt = wrapped(model, sgd, process_group=dist.group.WORLD)

    def loss(part):
        if left:
            raise left.pop()
        return (model(part[0], True) - part[1]).square().mean()

    batcher = fa.MicroBatcher(loss, opt, size)
    for window in range(3):
        batch = [x.split(SAMPLES)[rank] for x in whole(window)]
        if idle and rank == 0 and window == 1:
            opt.flush()
            continue
        try:
            batcher.step(batch)
        except ValueError:
            batcher.step(batch)
    return contents(model, opt)


@pytest.mark.parametrize("idle", [False, True], ids=["all have data", "one has none"])
@pytest.mark.parametrize("fails", [ValueError("a bad sample"), torch.OutOfMemoryError("injected")], ids=["bad", "full"])
def test_a_rank_may_run_a_window_again_or_have_no_data_for_one(worlds, fails, idle):
    model = made()
    opt = sgd(model.parameters())
    for window in range(3):
        opt.zero_grad()
        x, y = (z.split(SAMPLES)[1] if idle and window == 1 else z for z in whole(window))
        (model(x, True) - y).square().mean().backward()
        opt.step()
    for ours in worlds(2).run(fails_once, size="auto", fails=fails, idle=idle):
        assert_close(ours, contents(model, opt), 3e-6)


def shards(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = made()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    with pytest.raises(ValueError, match=r"micro_batch_size='auto' repeats.*FSDP2.*give a number"):
        fa.MicroBatcher(model, opt)
    batcher = fa.MicroBatcher(lambda part: (model(part[0], True) - part[1]).square().mean(), opt, 3)
    batcher.step([x[rank * 8 : rank * 8 + 8] for x in whole(0)])
    batcher.step([x[rank * 10 : rank * 10 + (10, 4)[rank]] for x in whole(1)])  # alone they would be cut into 4 and 2
    assert opt.last_window.micro_batches == 8
    with pytest.raises(
        ValueError, match=r"micro_batch_size=3 cuts a rank's batch into 4.*as many.*one has a batch of 2"
    ):
        batcher.step([x[: (10, 2)[rank]] for x in whole(2)])
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]


def test_shards_take_a_number_of_samples(worlds):
    model = made()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for window, samples in enumerate((16, 14)):
        x, y = (x[:samples] for x in whole(window))
        opt.zero_grad()
        (model(x, True) - y).square().mean().backward()
        opt.step()
    for ours in worlds(2).run(shards):
        assert_close(ours, list(model.parameters()), 1e-6)
