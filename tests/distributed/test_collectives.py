"""Sums are sent once per window and bucket, during the last backward, and never by DDP."""

import warnings

import fusedaccum as fa
import fusedaccum.distributed.reduce_buckets
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, big_batch, contents, made, mean_loss, sgd, share, wrapped
from sizes import limits
from torch import nn
from torch.utils.checkpoint import checkpoint

COUNT = 8
HEADERS = 1  # one small all-reduce per window, besides one per bucket


def counted(run):
    """Names of the collectives that PyTorch's profiler saw during ``run()``, DDP's included."""
    with torch.profiler.profile(acc_events=True) as profiler:
        run()
    return [event.name for event in profiler.events() if event.name.startswith("gloo:")]


def collectives(rank, ddp, bucket_bytes, settings):
    with limits(REDUCED=bucket_bytes):
        model = made()
        module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
        group = None if ddp else dist.group.WORLD
        opt = wrapped(model, accum_steps=4, process_group=group, **settings)
        calls = []
        for window in range(3):
            for x, y, weight, use in share(window, COUNT, rank, 2):

                def micro_batch(x=x, y=y, weight=weight, use=use):
                    opt.backward(mean_loss(module, x, y, use), weight=weight)
                    opt.step()
                    opt.zero_grad()

                calls.append(counted(micro_batch))
        return calls, len(opt._accumulation.ranks.reduce_buckets._buckets)


@pytest.mark.parametrize("settings", [{}, {"comm_dtype": torch.bfloat16}])
@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 400])
def test_one_all_reduce_a_window_and_bucket(worlds, ddp, bucket_bytes, settings):
    """A narrower dtype takes two: terms go to the rank that adds them, and sums come back."""
    each = ["gloo:all_to_all", "gloo:all_gather"] if settings else ["gloo:all_reduce"]
    for calls, buckets in worlds(2).run(collectives, ddp=ddp, bucket_bytes=bucket_bytes, settings=settings):
        assert buckets == (1 if bucket_bytes > 400 else 3)
        for window in range(1, 3):  # in the first window, we and DDP's first forward also compare the parameters
            *inside, last = calls[4 * window : 4 * window + 4]
            assert inside == [[], [], []]
            # Those of several buckets overlap.
            assert sorted(last) == sorted(each * buckets + ["gloo:all_reduce"] * HEADERS)


def plain_ddp_is_counted(rank):
    """The collectives of plain DDP, which the count must see."""
    module = nn.parallel.DistributedDataParallel(made(), find_unused_parameters=True)
    x, y, _, use = share(0, 1, 0, 1)[0]
    return counted(lambda: mean_loss(module, x, y, use).backward())


def test_the_count_sees_ddp(worlds):
    for calls in worlds(2).run(plain_ddp_is_counted):
        assert any("all_reduce" in name or "allreduce" in name for name in calls), calls


class Watch(torch.autograd.Function):
    """Records how many buckets have been sent when backward gets here."""

    @staticmethod
    def forward(ctx, x, opt, seen):
        ctx.opt, ctx.seen = opt, seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(len(ctx.opt._accumulation.ranks.reduce_buckets._in_flight))
        return grad, None, None


@limits(REDUCED=1, bucket=1 << 40, SENT=1)  # as on a large GPU
def overlapped(rank, told):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    group = dist.group.WORLD
    opt = wrapped(layers, process_group=group) if told else wrapped(layers, accum_steps=2, process_group=group)
    seen = []
    for number in range(4):
        x, here = torch.randn(3, 8), []
        for layer in layers:
            x = Watch.apply(layer(x).tanh(), opt, here)
        opt.backward(x.sum(), last=told and number % 2 == 1)
        seen.append(here)
        if not told or number % 2 == 1:
            opt.step()
            opt.zero_grad()
    return seen


@pytest.mark.parametrize("told", [False, True], ids=["counted", "last="])
def test_sums_go_while_the_last_backward_computes(worlds, told):
    for seen in worlds(2).run(overlapped, told=told):
        for window in (0, 2):
            assert seen[window] == [0, 0, 0, 0]
            later = seen[window + 1]
            assert later[0] == 0 and later[-1] >= 4, seen  # two buckets per layer that backward is done with
            assert later == sorted(later)


# -- gradients that come after the sums have been sent ---------------------------------------------


@limits(REDUCED=400)
def twice_a_micro_batch(rank, how, settings):
    """Two backwards before each step(), the second after sums were sent; ranks differ in this."""
    model = made()
    opt = wrapped(model, accum_steps=2, process_group=dist.group.WORLD, **settings)
    for window in range(3):
        parts = share(window, COUNT, rank, dist.get_world_size())
        for number in (0, 2):
            for k, (x, y, _, use) in enumerate(parts[number : number + 2]):
                loss = mean_loss(model, x, y, use) / (2 if settings.get("reduction") == "none" else 1)
                if how == "checkpoint":
                    loss = loss + checkpoint(lambda z: model(z).sum() * 0, x.requires_grad_(), use_reentrant=True)
                if how == "one rank" and rank == 0:
                    if k == 0:
                        held = loss
                        continue
                    loss = held + loss
                loss.backward()
            if how == "saved":
                opt.load_state_dict(opt.state_dict())
            opt.step()
            opt.zero_grad()
    return list(model.parameters()) if settings.get("shard") else contents(model, opt)


@pytest.mark.parametrize("how", ["all", "one rank", "checkpoint", "saved"])
@pytest.mark.parametrize("shard", [False, True], ids=["", "shard"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_come_after_the_sums_have_gone(worlds, how, shard, reduction):
    model = made()
    opt = sgd(model.parameters())
    for window in range(3):
        opt.zero_grad()
        parts = [share(window, COUNT, rank, 2) for rank in range(2)]
        for of_rank in parts:
            for x, y, _, use in of_rank:
                (mean_loss(model, x, y, use) / 4).backward()  # 2 ranks, 2 micro-batches each, of two passes that add up
        opt.step()
    theirs = list(model.parameters()) if shard else contents(model, opt)
    for ours in worlds(2).run(twice_a_micro_batch, how=how, settings={"shard": shard, "reduction": reduction}):
        assert_close(ours, theirs)


# -- DistributedDataParallel with windows that the caller owns -------------------------------------


def as_under_ddp(rank, no_sync):
    """A loop written for DDP: no_sync() for all but the last backward, then clipping by hand.

    Or it sets what no_sync() sets, as nanoGPT does.
    """
    model = made()
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    opt = wrapped(model, reduction="none")
    norms, calls = [], []
    for window in range(3):
        parts = share(window, COUNT, rank, 2, True)
        for number, (x, y, _, _) in enumerate(parts):
            last = number == len(parts) - 1

            def backward(x=x, y=y):
                (mean_loss(module, x, y, False) / 4).backward()

            if no_sync == "attribute":
                module.require_backward_grad_sync = last
            with module.no_sync() if no_sync == "block" and not last else torch.enable_grad():
                calls.append(len(counted(backward)))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        assert module.require_backward_grad_sync
        opt.step()
        opt.zero_grad()
    return contents(model, opt), norms, calls


@pytest.mark.parametrize("no_sync", ["block", "attribute", None])
def test_a_loop_written_for_ddp_finds_the_gradient_of_all_ranks_after_backward(worlds, no_sync):
    model = made()
    opt = sgd(model.parameters())
    norms = []
    for window in range(3):
        opt.zero_grad()
        for rank in range(2):
            for x, y, _, _ in share(window, COUNT, rank, 2, True):
                (mean_loss(model, x, y, False) / 4).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= 2
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        opt.step()
    for ours, ours_norms, calls in worlds(2).run(as_under_ddp, no_sync=no_sync):
        assert_close(ours, contents(model, opt))
        assert ours_norms == pytest.approx(norms, rel=1e-5)  # p.grad is what DDP would leave there
        assert [calls[k] > 0 for k in range(4, 12)] == 2 * [not no_sync, not no_sync, not no_sync, True]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.norm(x))


def batch_statistics(rank):
    torch.manual_seed(3)
    module = nn.parallel.DistributedDataParallel(Normed())
    opt = wrapped(module, accum_steps=2)
    means = []
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*BatchNorm layer")
        for _ in range(6):
            opt.backward(module(torch.randn(4, 12)).square().mean())
            means.append(module.module.norm.running_mean.clone())
            opt.step()
            opt.zero_grad()
    return means


def test_module_buffers_are_the_first_ranks_once_a_window(worlds):
    first, second = worlds(2).run(batch_statistics)
    momentum = 0.1
    for window in range(3):  # inside a window each rank follows its own batches
        assert not torch.equal(first[2 * window], second[2 * window])
    torch.manual_seed(1)
    batch = [torch.randn(4, 12) for _ in range(6)]
    for window in range(1, 3):
        expected = (1 - momentum) * first[2 * window - 1] + momentum * batch[2 * window].mean(0)
        torch.testing.assert_close(second[2 * window], expected)


def test_ddp_made_after_the_wrapper_is_refused(worlds):
    worlds(2).run(ddp_too_late)


def ddp_too_late(rank):
    model = made()
    opt = wrapped(model, accum_steps=2)
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    x, y, _, use = share(0, 1, 0, 1)[0]
    with module.no_sync(), pytest.raises(RuntimeError, match="DistributedDataParallel module first"):
        opt.backward(mean_loss(module, x, y, use))
    del opt


def unhooked(rank):
    model = made()
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    opt = wrapped(model, accum_steps=2)
    del opt
    x, y, _, use = share(0, 1, 0, 1)[0]
    mean_loss(module, x, y, use).backward()
    return model.second.weight.grad


def test_a_dropped_wrapper_leaves_ddp_as_it_was(worlds):
    first, second = worlds(2).run(unhooked)
    model = made()
    x, y, _, use = share(0, 1, 0, 1)[0]
    mean_loss(model, x, y, use).backward()
    torch.testing.assert_close(first, model.second.weight.grad)
    assert torch.equal(first, second)


@limits(REDUCED=4096)
def big_model(rank):
    """The size of buckets, and the memory for their casts, is bounded."""
    layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(12))
    for p in layers.parameters():
        dist.broadcast(p.data, 0)
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(layers.parameters(), lr=1.0), 1, process_group=dist.group.WORLD, comm_dtype=torch.bfloat16
    )
    most = []

    def under_way(*_):
        most.append(sum(flight.work is not None for flight in opt._accumulation.ranks.reduce_buckets._in_flight))
        return real(*_)

    real = fusedaccum.distributed.reduce_buckets.InFlight.__init__
    fusedaccum.distributed.reduce_buckets.InFlight.__init__ = under_way
    try:
        sum(layer.weight.sum() for layer in layers).backward()
    finally:
        fusedaccum.distributed.reduce_buckets.InFlight.__init__ = real
    opt.step()
    return most


def test_few_buckets_are_under_way_in_memory_of_their_own(worlds):
    for most in worlds(2).run(big_model):
        assert len(most) == 12 and max(most) == fusedaccum.distributed.reduce_buckets.UNDER_WAY - 1


def test_the_big_batch_that_ranks_are_compared_with_is_one_mean_over_all_tokens():
    ours, theirs = made(), made()
    big_batch(ours, sgd(ours.parameters()), 0, 3, sometimes=False)
    parts = share(0, 3, 0, 1)
    opt = sgd(theirs.parameters())
    mean_loss(theirs, torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), False).backward()
    opt.step()
    assert_close(list(ours.parameters()), list(theirs.parameters()))


def looked_between(rank):
    """Between a forward and its backward the model is evaluated, within no_sync()."""
    model = made()
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    opt = wrapped(model, reduction="none")
    (x, y, _, _), (a, b, _, _) = share(0, 4, rank, 2, True)
    with module.no_sync():
        (mean_loss(module, x, y, False) / 2).backward()
    loss = mean_loss(module, a, b, False) / 2
    with torch.no_grad(), module.no_sync():
        module(a, False)
    loss.backward()
    assert opt.last_window is None
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_forward_without_gradients_does_not_say_whether_a_backward_is_synchronised(worlds):
    model = made()
    for rank in range(2):
        for x, y, _, _ in share(0, 4, rank, 2, True):
            (mean_loss(model, x, y, False) / 4).backward()
    for ours in worlds(2).run(looked_between):
        assert_close(ours, [p.grad for p in model.parameters() if p.grad is not None])
