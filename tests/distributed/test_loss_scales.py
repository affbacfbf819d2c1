"""Loss scales over ranks: one rank's overflow, scalers that diverge, sums of different scales."""

import itertools
import re
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from fusedaccum.extensions.loss_scale import all_equal
from parts import assert_close, contents, sgd, wrapped
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def scaled(rank, scaler_class, windows, at=3, interval=100, **settings):
    """A GradScaler loop in which one rank overflows once."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = wrapped(model, accum_steps=2, process_group=dist.group.WORLD, **settings)
    if scaler_class is ShardedGradScaler:
        scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    said = []
    for number in range(2 * windows):
        torch.manual_seed(10 * number + rank)
        x = torch.randn(3, 4)
        loss = model(x).square().mean()
        if (number, rank) == (at, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        said.append((bool(opt.updated), scaler.get_scale(), [str(w.message) for w in caught]))
    return contents(model, opt), said


def literally(windows, without=None):
    """The oracle: training with only these windows, each a mean over both ranks' micro-batches."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = sgd(model.parameters())
    for window in windows:
        opt.zero_grad()
        parts = [(2 * window + k, rank) for k in range(2) for rank in range(2)]
        kept = [part for part in parts if part != without]
        for number, rank in kept:
            torch.manual_seed(10 * number + rank)
            (model(torch.randn(3, 4)).square().mean() / len(kept)).backward()
        opt.step()
    return contents(model, opt)


SCALERS = [torch.amp.GradScaler, ShardedGradScaler]


@pytest.mark.parametrize("scaler_class", SCALERS)
@pytest.mark.parametrize("at", [2, 3])
def test_an_overflow_on_one_rank_skips_the_window_of_all(worlds, scaler_class, at):
    """Also where no other rank's scaler can see it; all ranks go on with the smallest scale."""
    for rank, (ours, said) in enumerate(worlds(2).run(scaled, scaler_class=scaler_class, windows=3, at=at)):
        assert_close(ours, literally([0, 2]))
        assert [updated for updated, *_ in said] == [False, True, False, False, False, True]
        backed_off = at if rank == 1 else 3
        assert [scale for _, scale, _ in said] == [1024.0] * backed_off + [512.0] * (6 - backed_off)
        assert not any(warned for *_, warned in said)


@pytest.mark.parametrize("scaler_class", SCALERS)
def test_after_an_overflow_on_one_rank_scales_grow_again_together(worlds, scaler_class):
    """A rank's scaler counts from its own overflow; all of them from the latest, then."""
    for _, said in worlds(2).run(scaled, scaler_class=scaler_class, windows=24, at=2, interval=8):
        assert [number // 2 for number, (updated, *_) in enumerate(said) if number % 2 and not updated] == [1]
        # Halved in micro-batch 2, or with its window's end, and doubled after every 8 from then on.
        assert [scale for _, scale, _ in said[3::8]] == [512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0]


@pytest.mark.parametrize("scaler_class", SCALERS)
def test_a_window_whose_sums_carry_different_loss_scales_is_not_applied_and_says_so(worlds, scaler_class):
    """Window 1's last micro-batch is dropped on one rank; its scaler backs off after the end."""
    settings = {"scaler_class": scaler_class, "windows": 4, "nonfinite": "skip_micro_batch"}
    for rank, (ours, said) in enumerate(worlds(2).run(scaled, **settings)):
        assert_close(ours, literally([0, 1, 3], without=(3, 1)))
        assert [updated for updated, *_ in said] == [False, True, False, True, False, False, False, True]
        backed_off = 3 if rank == 1 else 5
        assert [scale for _, scale, _ in said] == [1024.0] * backed_off + [512.0] * (8 - backed_off)
        warned = [message for *_, messages in said for message in messages]
        assert len(warned) == 1 and re.match(
            rf"the loss scale of window 2 is {(1024, 512)[rank]} on this rank", warned[0]
        )


def unscaled(rank, scaler_class):
    """Rank 1 drops its only micro-batch: unscale_() sees it there, and the common sum elsewhere."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD, nonfinite="skip_micro_batch")
    scaler = scaler_class("cpu", init_scale=1024.0, growth_interval=100)
    before = contents(model, opt)
    for number in range(2):
        loss = model(torch.ones(3, 4)).square().mean() * (float("inf") if rank > number else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        if number == 0 and scaler_class is torch.amp.GradScaler:
            with pytest.raises(
                RuntimeError, match=r"loss scale of window 0 is .* on this rank and another.*ShardedGradScaler"
            ):
                scaler.step(opt)
            return all(torch.equal(a, b) for a, b in zip(before, contents(model, opt)))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert (opt.updated, scaler.get_scale()) == (number == 1, 512.0)
    return contents(model, opt)


def test_sums_that_one_rank_has_unscaled_and_another_not_are_not_applied(worlds):
    assert worlds(2).run(unscaled, scaler_class=torch.amp.GradScaler) == [True, True]
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = sgd(model.parameters())
    model(torch.ones(3, 4)).square().mean().backward()
    opt.step()
    for ours in worlds(2).run(unscaled, scaler_class=ShardedGradScaler):  # it tells both ranks of the overflow
        assert_close(ours, contents(model, opt))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 9, 36, 72, 1000])
def test_scales_of_many_ranks_are_told_apart_whatever_their_sums_are_rounded_to(ranks):
    """A scale that grew by 1.5 is not a power of two; its sum over 7, 9 or 36 ranks is rounded."""
    for scale in torch.rand(100).add(1).mul(2**16).tolist():
        for other in [scale, scale / 2, scale * 1.001] if ranks > 1 else [scale]:
            scales = [scale] * (ranks - 1) + [other]
            *_, total = itertools.accumulate(scales)
            *_, squares = itertools.accumulate(s**2 for s in scales)
            assert all_equal(total, squares, ranks) == (other == scale)


def normalised_first(rank):
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for window in range(3):
        torch.manual_seed(20 * window + rank)
        scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
        opt.normalize_()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return contents(model, opt)


def test_a_window_that_normalize_has_ended_before_the_scaler_was_seen(worlds):
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = sgd(model.parameters())
    for window in range(3):
        opt.zero_grad()
        for rank in range(2):
            torch.manual_seed(20 * window + rank)
            (model(torch.randn(3, 4)).square().mean() / 2).backward()
        opt.step()
    for ours in worlds(2).run(normalised_first):
        assert_close(ours, contents(model, opt))


def without_data(rank):
    """The last rank has no data, and its scaler is never used."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = wrapped(model, accum_steps=2, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for window in range(2):
        if rank == dist.get_world_size() - 1:
            opt.flush()
            continue
        for k in range(2):
            torch.manual_seed(100 * rank + 10 * window + k)
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return contents(model, opt)


@pytest.mark.parametrize("others", [1, 2])
def test_a_rank_without_data_takes_off_the_others_loss_scale(worlds, others):
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    opt = sgd(model.parameters())
    for window in range(2):
        opt.zero_grad()
        for rank, k in itertools.product(range(others), range(2)):
            torch.manual_seed(100 * rank + 10 * window + k)
            (model(torch.randn(3, 4)).square().mean() / (2 * others)).backward()
        opt.step()
    for ours in worlds(others + 1).run(without_data):
        assert_close(ours, contents(model, opt))


def overflows_then_idles(rank):
    """Only rank 0 overflows; in the next window rank 1 has no data."""
    p = nn.Parameter(torch.zeros(2))
    opt = fa.AccumulatingOptimizer(sgd([p]), process_group=dist.group.WORLD)
    scaler, said = torch.amp.GradScaler("cpu", init_scale=256.0), []
    for window in range(3):
        if (window, rank) == (1, 1):
            opt.flush()
        else:
            opt.backward(scaler.scale(p.sum() * (float("inf") if (window, rank) == (0, 0) else 1.0)))
            scaler.step(opt)
            scaler.update()
        said.append((bool(opt.updated), scaler.get_scale()))
        opt.zero_grad()
    return said


def test_a_rank_without_data_goes_on_with_the_smallest_scale(worlds):
    first, second = worlds(2).run(overflows_then_idles)
    assert first == [(False, 128.0), (True, 128.0), (True, 128.0)] and second == [(False, 256.0), *first[1:]]


def one_never_has_data(rank):
    """Rank 1 overflows in the first micro-batch of a window; rank 2 never meets its scaler."""
    p = nn.Parameter(torch.zeros(2))
    opt = fa.AccumulatingOptimizer(sgd([p]), 2, process_group=dist.group.WORLD)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=256.0), []
    for window in range(3):
        for micro in range(2 if rank < 2 else 0):
            loss = p.sum() * (float("inf") if (window, micro, rank) == (1, 0, 1) else 1.0)
            opt.backward(scaler.scale(loss))
            scaler.step(opt)
            scaler.update()
        if rank == 2:
            opt.flush()
        scales.append((bool(opt.updated), scaler.get_scale()))
        opt.zero_grad()
    return scales


def test_a_rank_that_knows_no_scale_has_no_part_in_the_smallest(worlds):
    *others, idle = worlds(3).run(one_never_has_data)
    assert others == [[(True, 256.0), (False, 128.0), (True, 128.0)]] * 2
    assert idle == [(True, 256.0), (False, 256.0), (True, 256.0)]


def resumed_without_data(rank):
    """Rank 1 knows no scale but the checkpoint's, which is an old one."""

    def train(scale, flushes, saved=None):
        p = nn.Parameter(torch.zeros(2))
        opt = fa.AccumulatingOptimizer(sgd([p]), process_group=dist.group.WORLD)
        if saved is not None:
            opt.load_state_dict(saved)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        if flushes:
            opt.flush()
        else:
            opt.backward(scaler.scale(p.sum()))
            scaler.step(opt)
            scaler.update()
        return bool(opt.updated), scaler.get_scale(), opt.state_dict()

    *_, saved = train(64.0, False)
    return train(256.0, rank == 1, saved)[:2]


def test_a_checkpoints_old_scale_is_not_taken_for_a_ranks(worlds):
    assert worlds(2).run(resumed_without_data)[0] == (True, 256.0)


def one_has_seen_no_scaler(rank):
    p = nn.Parameter(torch.ones(4))
    opt = wrapped_parameter(p)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if rank == 0:
        scaler.scale(p.sum()).backward()
        opt.flush()
    else:
        for factor in (1.0, float("inf")):
            scaler.scale((p * factor).sum()).backward()
            scaler.step(opt)
            scaler.update()
    return p.tolist(), bool(opt.last_window.applied)


def wrapped_parameter(p):
    return fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1), 2, process_group=dist.group.WORLD)


def test_an_overflow_on_another_rank_skips_the_window_of_one_that_has_seen_no_scaler(worlds):
    assert worlds(2).run(one_has_seen_no_scaler) == [([1.0] * 4, False)] * 2
