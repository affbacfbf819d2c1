"""The ranks agree on what is skipped, on checkpoints inside a window, and on failures."""

import contextlib
import datetime
import os
import re
import time
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from fusedaccum.distributed.reduce_buckets import ReduceBuckets
from parts import assert_close, big_batch, contents, made, mean_loss, sgd, share, wrapped
from sizes import limits
from torch import nn
from worlds import World

COUNT = 8


def with_a_bad_one(rank, nonfinite, bad_rank):
    model = made()
    opt = wrapped(model, accum_steps=4, process_group=dist.group.WORLD, nonfinite=nonfinite)
    told = []
    for window in range(2):
        for number, (x, y, weight, use) in enumerate(share(window, COUNT, rank, 2)):
            loss = mean_loss(model, x, y, use)
            if (window, number, rank) == (0, 2, bad_rank):
                loss = loss + model.second.weight.sum() * float("nan")
            opt.backward(loss, weight=weight)
            opt.step()
            opt.zero_grad()
        last = opt.last_window
        told.append(
            (bool(opt.updated), last.micro_batches, int(last.nonfinite), bool(last.applied), float(last.weight))
        )
    return contents(model, opt), told


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_bad_gradient_skips_the_window_of_all_ranks(worlds, bad_rank):
    model = made()
    opt = sgd(model.parameters())
    big_batch(model, opt, 1, COUNT)
    weights = [sum(w for *_, w, _ in share(window, COUNT, 0, 1)) for window in range(2)]
    for ours, told in worlds(2).run(with_a_bad_one, nonfinite="skip_window", bad_rank=bad_rank):
        assert_close(ours, contents(model, opt))
        assert told == [(False, COUNT, 1, False, weights[0]), (True, COUNT, 0, True, weights[1])]


def test_a_micro_batch_that_one_rank_drops_is_missing_for_all(worlds):
    """It still counts towards the end of the window, so that the rank does not fall behind."""
    model = made()
    opt = sgd(model.parameters())
    parts = share(0, COUNT, 0, 1)
    dropped = 2 * 2 + 1  # the third of rank 1
    kept = [part for k, part in enumerate(parts) if k != dropped]
    total = sum(w for *_, w, _ in kept)
    sum(mean_loss(model, x, y, use) * (w / total) for x, y, w, use in kept).backward()
    opt.step()
    big_batch(model, opt, 1, COUNT)
    for ours, told in worlds(2).run(with_a_bad_one, nonfinite="skip_micro_batch", bad_rank=1):
        assert_close(ours, contents(model, opt))
        assert told[0] == (True, COUNT - 1, 1, True, total) and told[1][1:3] == (COUNT, 0)


def nothing_but_dropped(rank):
    """The first window's only micro-batch is dropped; the other rank has no data for it."""
    model = made()
    settings = {"accum_steps": lambda window: (1, 2)[window], "nonfinite": "skip_micro_batch"}
    opt = wrapped(model, process_group=dist.group.WORLD, **settings)
    if rank == 0:
        x, y, weight, use = share(0, 1, 0, 1)[0]
        opt.backward(mean_loss(model, x, y, use) * float("nan"), weight=weight)
        opt.step()
    else:
        opt.flush()
    last = opt.last_window
    told = opt.updated, bool(last.applied), opt.progress, last.micro_batches, int(last.nonfinite)
    for x, y, weight, use in share(1, 4, rank, 2):
        opt.backward(mean_loss(model, x, y, use), weight=weight)
        opt.step()
    assert opt.updated
    return contents(model, opt), told


def test_a_window_of_which_all_was_dropped_closes_on_all_ranks(worlds):
    """Also where a flush() meets a step(); the next window's length may depend on its index."""
    model = made()
    opt = sgd(model.parameters())
    big_batch(model, opt, 1, 4)
    for ours, told in worlds(2).run(nothing_but_dropped):
        assert told == (False, False, {"window": 1, "micro_batch": "0/2"}, 0, 1)
        assert_close(ours, contents(model, opt))


def test_weight_zero_on_all_ranks_applies_nothing_and_says_so(worlds):
    worlds(2).run(weightless)


def weightless(rank):
    model = made()
    before = contents(model, wrapped(model, process_group=dist.group.WORLD))
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
    x, y, _, use = share(0, 1, 0, 1)[0]
    opt.backward(mean_loss(model, x, y, use), weight=0)
    with pytest.warns(RuntimeWarning, match="weight 0"):
        opt.step()
    opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, contents(model, opt)))
    # With weight 0 on one rank only, the micro-batch just adds nothing.
    opt.backward(mean_loss(model, x, y, use), weight=float(rank))
    opt.step()
    assert opt.updated and float(opt.last_window.weight) == 1.0


# -- checkpoints -----------------------------------------------------------------------------------


def interrupted(rank, folder, at):
    """Three windows; after ``at`` micro-batches each rank starts anew from its own checkpoint."""
    model = made()
    opt = wrapped(model, accum_steps=4, process_group=dist.group.WORLD)
    number = 0
    for window in range(3):
        for x, y, weight, use in share(window, COUNT, rank, 2):
            if number == at:
                torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, folder / f"{at}-{rank}")
                dist.barrier()
                model = made(seed=5)
                opt = wrapped(model, accum_steps=4, process_group=dist.group.WORLD)
                saved = torch.load(folder / f"{at}-{rank}", weights_only=True)
                model.load_state_dict(saved["model"])
                opt.load_state_dict(saved["opt"])
                if at % 4:
                    others = torch.load(folder / f"{at}-{1 - rank}", weights_only=True)
                    with pytest.raises(ValueError, match=f"rank {1 - rank} of 2.*rank {rank} of 2"):
                        opt.load_state_dict(others["opt"])
                    alone = wrapped(made(), accum_steps=4)
                    with pytest.raises(ValueError, match=f"rank {rank} of 2.*rank None"):
                        alone.load_state_dict(saved["opt"])
            opt.backward(mean_loss(model, x, y, use), weight=weight)
            opt.step()
            opt.zero_grad()
            number += 1
    return contents(model, opt)


@pytest.mark.parametrize("at", [4, 5, 7])
def test_checkpoints_go_on_bit_by_bit(worlds, tmp_path, at):
    straight = worlds(2).run(interrupted, folder=tmp_path, at=-1)
    for ours, theirs in zip(worlds(2).run(interrupted, folder=tmp_path, at=at), straight):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def looks_at_the_end(rank, goes_back):
    model = made()
    opt = wrapped(model, accum_steps=2, process_group=dist.group.WORLD)
    first, last = share(0, 4, rank, 2)

    def backward(x, y, weight, use):
        opt.backward(mean_loss(model, x, y, use), weight=weight)

    backward(*first)
    opt.step()
    if goes_back:
        saved = opt.state_dict()
        backward(*last)
        opt.normalize_()
        opt.load_state_dict(saved)
    backward(*last)
    opt.step()
    assert opt.updated
    return contents(model, opt)


def test_a_window_that_is_those_of_all_ranks_already_goes_back_to_a_checkpoint(worlds):
    """After normalize_() no rank holds its own part of the sums; loading a state brings it back."""
    straight = worlds(2).run(looks_at_the_end, goes_back=False)
    for ours, theirs in zip(worlds(2).run(looks_at_the_end, goes_back=True), straight):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_copies_are_refused(worlds):
    worlds(2).run(copied)


def copied(rank):
    import copy

    with pytest.raises(RuntimeError, match="process group cannot be copied"):
        copy.deepcopy(wrapped(made(), process_group=dist.group.WORLD))


# -- what cannot be meant --------------------------------------------------------------------------


def test_bad_arguments():
    model = made()
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed\.ProcessGroup.*got 'world'"):
        wrapped(model, process_group="world")
    with pytest.raises(ValueError, match=r"comm_dtype must be one of .*got torch\.float16"):
        wrapped(model, comm_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"comm_dtype=torch\.bfloat16 is for windows that ranks share"):
        wrapped(model, comm_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="shard=True is for windows that ranks share"):
        wrapped(model, shard=True)
    with pytest.raises(ValueError, match="shard must be one of True, False, got 'yes'"):
        wrapped(model, shard="yes")


def unlike(rank, how):
    model = nn.Sequential(nn.Linear(3, 4 if how == "shapes" and rank else 2), nn.Linear(2, 2), nn.Conv2d(2, 2, 2))
    if how == "memory formats" and rank:
        model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"ranks must have the same parameters.*rank 0 has|rank 1 has"):
        params = list(model.parameters())[: -1 if how == "numbers" and rank else None]
        fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), process_group=dist.group.WORLD)


@pytest.mark.parametrize("how", ["shapes", "numbers", "memory formats"])
def test_ranks_with_other_parameters_are_told_so(worlds, how):
    worlds(2).run(unlike, how=how)


def the_same_in_another_format(rank):
    """Memory formats that differ only in strides of dimensions of size 1, which mean nothing."""
    model = nn.Conv2d(1, 2, 2, bias=False)
    if rank:
        model.to(memory_format=torch.channels_last)
    dist.broadcast(model.weight.data, 0)
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
    before = model.weight.detach().clone()
    x = torch.arange(4.0).reshape(1, 1, 2, 2)
    opt.backward(model(x).sum())
    opt.step()
    assert_close([before - model.weight], [(0.01 * before + x.expand(2, 1, 2, 2)) * 0.3])


def test_memory_formats_that_come_to_the_same(worlds):
    worlds(2).run(the_same_in_another_format)


def other_values(rank):
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    opt = wrapped(model, process_group=dist.group.WORLD)
    before = contents(model, opt)
    model(torch.ones(1, 3)).sum().backward()
    where = r", on this rank first in param_groups\[0\]\['params'\]\[0\]" if rank else ""
    with pytest.raises(RuntimeError, match=rf"different values{where}, and .*broadcast"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, contents(model, opt)))
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    model(torch.ones(1, 3)).sum().backward()
    opt.step()  # training can go on
    return contents(model, opt)


def test_ranks_with_other_values_are_told_so(worlds):
    first, second = worlds(2).run(other_values)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def cannot_work(rank):
    model = made()
    opt = wrapped(model)
    with pytest.raises(ValueError, match="nonfinite='raise' would raise on one rank"):
        wrapped(model, process_group=dist.group.WORLD, nonfinite="raise")
    for net in (model, nn.parallel.DistributedDataParallel(made())):
        group = {} if net is not model else {"process_group": dist.group.WORLD}
        with pytest.raises(ValueError, match=r"LBFGS, .*ranks .*cannot share its windows; use another optimizer"):
            fa.AccumulatingOptimizer(torch.optim.LBFGS(net.parameters()), **group)
    model(torch.ones(1, 12)).sum().backward()
    opt.step()  # it still has the parameters
    assert opt.updated


def test_what_cannot_work_together_is_refused(worlds):
    worlds(2).run(cannot_work)


# -- ranks that fail -------------------------------------------------------------------------------


def fails(rank, how, where):
    """Rank 1 raises or dies in the second window, before its first or its last micro-batch."""
    model = made()
    opt = wrapped(model, accum_steps=2, process_group=dist.group.WORLD)
    x, y, _, use = share(0, 1, 0, 1)[0]
    for number in range(4):
        loss = mean_loss(model, x, y, use)
        if rank == 1 and number == (2 if where == "middle" else 3):
            if how == "dies":
                os._exit(1)
            raise ValueError("no more data")
        opt.backward(loss)
        opt.step()
        opt.zero_grad()


@pytest.mark.slow  # it waits for a timeout
@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("where", ["middle", "last"])
def test_a_rank_that_goes_is_an_error_on_the_others_within_the_timeout(tmp_path, how, where):
    world = World(2, tmp_path, timeout=4)
    try:
        begin = time.monotonic()
        (fine, answer), (other_fine, other) = world.answers(fails, how=how, where=where)
        assert not fine and "could not reach the others at the end of window 1" in answer
        assert not other_fine and ("died" in other if how == "dies" else "no more data" in other)
        assert time.monotonic() - begin < 60
    finally:
        world.close()


@limits(bucket=1, REDUCED=1)
def breaks_off(rank):
    """A backward that fails on one rank after part of the sums has been sent."""
    model = made()
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
    x, y, _, use = share(0, 1, 0, 1)[0]
    if rank == 1:

        def fail(_):
            raise ValueError("broken layer")

        model.first.weight.register_hook(fail)
    with contextlib.suppress(ValueError):
        opt.backward(mean_loss(model, x, y, use))
    return opt


def goes_on_after(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = breaks_off(rank)
        opt.step()


@limits(REDUCED=1)
def goes_on_after_an_interruption(rank):
    """step() sends several buckets, and is interrupted on one rank after the first."""
    model = made()
    opt = wrapped(model, process_group=dist.group.WORLD)
    x, y, _, use = share(0, 1, 0, 1)[0]
    real, calls = ReduceBuckets._reduce, []

    def reduce(*arguments):
        calls.append(arguments)
        if rank == 1 and len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    ReduceBuckets._reduce = reduce
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            opt.backward(mean_loss(model, x, y, use))
            opt.step()
            opt.zero_grad()


@pytest.mark.slow  # it waits for a timeout
@pytest.mark.parametrize("case", ["backward", "step"])
def test_what_breaks_off_on_one_rank_is_an_error_on_both(tmp_path, case):
    world = World(2, tmp_path, timeout=4)
    try:
        cases = {"backward": goes_on_after, "step": goes_on_after_an_interruption}
        (fine, answer), (other_fine, other) = world.answers(cases[case])
        assert not fine and "could not reach the others" in answer
        assert not other_fine and "out of step with the others" in other
    finally:
        world.close()


@pytest.mark.slow  # it waits for a timeout
def test_the_message_names_the_rank_and_what_pytorch_said(tmp_path):
    world = World(2, tmp_path, timeout=3)
    try:
        answers = world.answers(one_window_more)
        assert answers[1][0]
        assert re.search(r"rank 0 could not reach.*closes fewer windows.*PyTorch says: ", answers[0][1], re.DOTALL)
    finally:
        world.close()


def one_window_more(rank):
    model = made()
    opt = wrapped(model, process_group=dist.group.WORLD)
    before = None
    for _ in range(2 - rank):
        x, y, _, use = share(0, 1, 0, 1)[0]
        opt.backward(mean_loss(model, x, y, use))
        before = contents(model, opt)
        try:
            opt.step()
        except RuntimeError:
            assert all(torch.equal(a, b) for a, b in zip(before, contents(model, opt)))
            raise
        opt.zero_grad()
    time.sleep(5)
    return datetime.datetime.now().isoformat()
