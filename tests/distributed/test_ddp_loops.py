"""DDP loops with caller-owned windows, when gradients are dropped or a rank has no more data."""

import contextlib

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, made, mean_loss, one_batch, sgd, share, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard

DDP = nn.parallel.DistributedDataParallel


def dropped(rank, at):
    """The only micro-batch of rank ``at`` is dropped; its backward brings the other's gradient."""
    model = made()
    opt = wrapped(DDP(model, find_unused_parameters=True), nonfinite="skip_micro_batch")
    x, y, weight, _ = share(0, 2, rank, 2)[0]
    opt.backward(mean_loss(model, x, y, False) * (float("nan") if rank == at else 1.0), weight=weight)
    opt.step()
    last = opt.last_window
    return list(model.parameters()), last.micro_batches, float(last.weight), int(last.nonfinite)


@pytest.mark.parametrize("at", range(2))
def test_what_other_ranks_have_gathered_is_no_micro_batch_here(worlds, at):
    model = made()
    opt = sgd(model.parameters())
    x, y, weight, _ = share(0, 2, 1 - at, 2)[0]
    mean_loss(model, x, y, False).backward()
    opt.step()
    for ours, *told in worlds(2).run(dropped, at=at):
        assert_close(ours, list(model.parameters()))
        assert told == [1, weight, 1]


def without_data(rank, warm, sync):
    """Rank 1 calls flush() at the other's window ends, from the first or (``warm``) second on."""
    model = made()
    module = DDP(model, find_unused_parameters=True)
    opt = wrapped(module)
    told = []
    for window in range(3):
        if rank == 0 or (warm and window == 0):
            parts = share(window, 4, 0, 1) if rank == 0 else share(10, 1, 0, 1)
            for number, (x, y, weight, use) in enumerate(parts):
                last = sync and number == len(parts) - 1
                with contextlib.nullcontext() if last else module.no_sync():
                    opt.backward(mean_loss(module, x, y, use), weight=weight)
            opt.step()
            opt.zero_grad()
        else:
            opt.flush()
        told.append((opt.updated, opt.last_window.micro_batches))
    opt.flush()
    assert not opt.updated
    return list(model.parameters()), told


@pytest.mark.parametrize("sync", [True, False], ids=["last synced", "no_sync"])
@pytest.mark.parametrize("warm", [True, False], ids=["later", "never any"])
def test_a_rank_that_has_run_out_of_data_flushes(worlds, warm, sync):
    model = made()
    opt = sgd(model.parameters())
    for window in range(3):
        one_batch(model, opt, share(window, 4, 0, 1) + (share(10, 1, 0, 1) if warm and window == 0 else []))
    for ours, told in worlds(2).run(without_data, warm=warm, sync=sync):
        assert_close(ours, list(model.parameters()))
        assert told == [(True, 5 if warm else 4), (True, 4), (True, 4)]


def normalised(rank, ddp, how):
    """Rank 1 has nothing in the second window: its only micro-batch was dropped, or it had none."""
    model = made()
    module = DDP(model, find_unused_parameters=True) if ddp else model
    opt = wrapped(module, nonfinite="skip_micro_batch", process_group=None if ddp else dist.group.WORLD)
    for window in range(3):
        x, y, weight, _ = share(window, 2, rank, 2)[0]
        nothing = rank == window == 1
        if not (nothing and how == "no data"):
            opt.backward(mean_loss(module, x, y, False) * (float("nan") if nothing else 1.0), weight=weight)
        opt.normalize_()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
        assert opt.updated and opt.last_window.micro_batches == (1 if window == 1 else 2)
        opt.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("how", ["dropped", "no data"])
@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
def test_a_rank_with_nothing_normalises_what_the_others_have(worlds, ddp, how):
    model = made()
    opt = sgd(model.parameters())
    for window in range(3):
        parts = share(window, 2, 0, 1)[: 1 if window == 1 else 2]
        one_batch(model, opt, [(x, y, weight, False) for x, y, weight, _ in parts], limit=0.05)
    for ours in worlds(2).run(normalised, ddp=ddp, how=how):
        assert_close(ours, list(model.parameters()))


def normalised_nothing(rank):
    model = made()
    opt = wrapped(model, process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"normalize_\(\) found no gradient"):
        opt.normalize_()
    x, y, weight, _ = share(0, 2, rank, 2)[0]
    opt.backward(mean_loss(model, x, y, False), weight=weight)
    opt.step()
    return opt.last_window.micro_batches


def test_where_no_rank_has_anything_to_normalise_all_can_go_on(worlds):
    assert worlds(2).run(normalised_nothing) == [2, 2]


def interrupted(rank, at, sync):
    """On the ranks ``at``, the second micro-batch fails before its backward."""
    model = made()
    module = DDP(model, find_unused_parameters=True)
    opt = wrapped(module)
    for window in range(2):
        for number, (x, y, weight, _) in enumerate(share(window, 6, rank, 2)):
            unsynced = contextlib.nullcontext() if sync else module.no_sync()
            with unsynced, contextlib.suppress(ArithmeticError), opt.micro_batch(weight=weight):
                loss = mean_loss(module, x, y, False)
                if number == 1 and rank in at:
                    raise ArithmeticError
                loss.backward()
        opt.step()
        opt.zero_grad()
    return list(model.parameters()), opt.last_window.micro_batches


@pytest.mark.parametrize("sync", [True, False], ids=["synced", "no_sync"])
def test_an_exception_before_a_backward_costs_its_micro_batch_only(worlds, sync):
    at = (0, 1) if sync else (1,)  # a synchronised backward is one of all ranks
    model = made()
    opt = sgd(model.parameters())
    for window in range(2):
        parts = [(i, part) for i, part in enumerate(share(window, 6, 0, 1)) if i not in [2 + rank for rank in at]]
        one_batch(model, opt, [(x, y, weight, False) for _, (x, y, weight, _) in parts])
    for ours, micro_batches in worlds(2).run(interrupted, at=at, sync=sync):
        assert_close(ours, list(model.parameters()))
        assert micro_batches == 6 - len(at)


def clipped(rank, how):
    """A 16-bit model with gradients 4 and 0 on the two ranks, so 2 in the mean."""
    module = DDP(nn.Linear(4, 1, bias=False).bfloat16())
    nn.init.zeros_(module.module.weight)
    limit = 1.0 if how == "max_grad_norm" else None
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    opt = fa.AccumulatingOptimizer(optimizer, reduction="none", buffer_dtype=None, max_grad_norm=limit)
    module(torch.full((1, 4), 0.0 if rank else 4.0, dtype=torch.bfloat16)).sum().backward()
    if how == "normalize_":
        opt.normalize_()
        assert float(nn.utils.clip_grad_norm_(module.parameters(), 1.0)) == 4.0
    opt.step()
    return module.module.weight.detach().float()


@pytest.mark.parametrize("how", ["max_grad_norm", "normalize_"])
def test_narrow_buffers_are_clipped_by_what_all_ranks_have(worlds, how):
    for weight in worlds(2).run(clipped, how=how):
        assert torch.equal(weight, torch.full((1, 4), -0.5))


def grouped(rank, other):
    """Rank 0's micro-batch takes two passes, the first of which sends its sums.

    The other rank's takes one, or it has none.
    """
    model = made(torch.float64)  # all parameters of this dtype are used, so their sums are sent
    module = DDP(model, find_unused_parameters=True)
    opt = wrapped(model, reduction="none")
    norms = []
    for window in range(3):
        if rank == 1 and other == "no data":
            opt.flush()
            continue
        x, y, _, _ = share(window, 2, rank, 2, True)[0]
        passes = 1 if rank else 2
        with opt.micro_batch():
            for _ in range(passes):
                (mean_loss(module, x, y, False) / passes).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        opt.step()
        opt.zero_grad()
    return list(model.parameters()), norms


@pytest.mark.parametrize("other", ["one pass", "no data"])
def test_a_rank_whose_micro_batch_takes_more_passes(worlds, other):
    model = made(torch.float64)
    opt = sgd(model.parameters())
    norms = []
    for window in range(3):
        opt.zero_grad()
        for x, y, _, _ in share(window, 2, 0, 1, True)[: 2 if other == "one pass" else 1]:
            (mean_loss(model, x, y, False) / 2).backward()  # the mean over the ranks
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        opt.step()
    for ours, our_norms in worlds(2).run(grouped, other=other):
        assert_close(ours, list(model.parameters()))
        assert our_norms == pytest.approx(norms[: len(our_norms)], rel=1e-5)  # norms of p.grad as it is before step()


def sent_every_time(rank):
    """A loop without no_sync(): one large gradient, then many small ones."""
    module = DDP(nn.Linear(4, 1, bias=False))
    nn.init.zeros_(module.module.weight)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), comm_dtype=torch.bfloat16)
    for number in range(64):
        module(torch.full((1, 4), 0.5 if number else 256.0)).sum().backward()
    opt.step()
    return module.module.weight.detach()


def test_sums_that_travel_again_are_not_rounded_again(worlds):
    for weight in worlds(2).run(sent_every_time):
        assert torch.equal(weight, torch.full((1, 4), -(256 + 63 * 0.5) / 64))  # 256 + 0.5 is 256 in bf16


class Plain(nn.Module):
    """Every parameter is used, as DDP wants it by default."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x):
        return self.net(x)


def stepped_again(rank, size, how, quiet):
    """Two windows, each stepped twice, by the wrapper and by plain DDP.

    Rank ``quiet`` has no backward in the second window.
    """
    plain, model = DDP(Plain()), Plain()
    if how == "fsdp2":
        fully_shard(model)
    module = DDP(model) if how in ("ddp", "shard") else model
    group = dist.group.WORLD if how == "group" else None
    makes = torch.optim.AdamW  # which steps a gradient again by another amount
    opt = wrapped(module, makes, reduction="none", shard=how == "shard", process_group=group)
    its = makes(plain.parameters())
    for window in range(2):
        for number, (m, o) in enumerate(((module, opt), (plain, its))):
            o.zero_grad()
            x, y, _, _ = share(window, size, rank, size, True)[0]
            silent = window == 1 and rank == quiet
            if not (silent and number == 0):
                ((m(x) - y).square().mean() * (0.0 if silent else 1.0)).backward()
            o.step()
            o.step()
        assert opt.updated
    ours = [p.full_tensor() if how == "fsdp2" else p for p in model.parameters()]
    return [p.detach() for p in ours], [p.detach() for p in plain.parameters()]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["ddp", "group", "shard", "fsdp2"])
def test_a_drop_in_of_several_ranks_steps_again_on_the_same_gradient(worlds, how, size):
    for ours, theirs in worlds(size).run(stepped_again, size=size, how=how, quiet=None):
        assert_close(ours, theirs)


@pytest.mark.parametrize("how", ["ddp", "shard"])
def test_a_rank_without_a_backward_takes_part_in_the_others_window_before_it_steps_again(worlds, how):
    for ours, theirs in worlds(2).run(stepped_again, size=2, how=how, quiet=1):
        assert_close(ours, theirs)


def not_zeroed(rank):
    """Rank 1 has no backward in the second window; the first's p.grad must not count again."""
    model = made()
    opt = wrapped(model, torch.optim.SGD, reduction="none", process_group=dist.group.WORLD)
    for window in range(2):
        x, y, _, _ = share(window, 2, rank, 2)[0]
        if not rank == window == 1:
            with pytest.warns(RuntimeWarning, match="no zero_grad") if window else contextlib.nullcontext():
                mean_loss(model, x, y, False).backward()
                opt.step()
        else:
            opt.step()
    return list(model.parameters())


def test_a_gradient_that_is_left_does_not_count_in_a_window_that_another_rank_has_begun(worlds):
    model = made()
    opt = torch.optim.SGD(model.parameters())
    for window in range(2):
        opt.zero_grad()
        for x, y, _, _ in share(window, 2, 0, 1)[: 2 - window]:
            (mean_loss(model, x, y, False) / 2).backward()
        opt.step()
    for ours in worlds(2).run(not_zeroed):
        assert_close(ours, list(model.parameters()))
