"""What one rank makes of windows and sums of several, where another number of ranks goes on."""

import fusedaccum as fa
import pytest
import torch
from fusedaccum.core.checkpoint import plain
from fusedaccum.core.window import Window
from fusedaccum.distributed import resharding
from fusedaccum.extensions.loss_scale import LossScale
from fusedaccum.extensions.losses import Loss, Losses
from torch import nn


def alone(**settings):
    p = nn.Parameter(torch.zeros(3, dtype=settings.pop("dtype", torch.float32)))
    return fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), **settings)


def saved(*windows, schedule=None):
    """What ranks have saved of their windows, as far as :func:`resharding.window` reads it."""
    return [{"window": None if window is None else plain(window), "schedule": schedule} for window in windows]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_a_window_are_those_of_both_ranks(reduction):
    opt = alone(accum_steps=9, reduction=reduction)
    losses = opt._accumulation.extensions.of(Losses)
    nothing = losses.save()
    parts = [
        nothing | {"sum": vars(Loss(3.0, 1.0)), "count": 2},
        nothing | {"sum": vars(Loss(2.0)), "count": 1},
        nothing,
    ]
    joined = losses.join(parts, mine=[0, 1, 2], ranks=1)
    share = 1 / 3 if reduction == "none" else 1.0
    assert joined["sum"] == {"known": pytest.approx(5.0 * share), "raw": pytest.approx(share)} and joined["count"] == 3
    assert losses.join(parts, mine=[1], ranks=2)["count"] == 1 and losses.join(parts, mine=[], ranks=4)["count"] == 0


def test_counts_and_weights_of_a_window_are_those_of_both_ranks():
    opt = alone(accum_steps=9)
    held = [
        Window(3, 4, micro_batches=2, weight=5.0, dropped=1, nonfinite=1),
        Window(3, 4, micro_batches=1, weight=2.0, dropped=1, nonfinite=1, void=True, carried=3),
    ]
    mine = resharding.window(opt, saved(*held, None))
    expected = {"index": 3, "length": 9, "micro_batches": 3, "weight": 7.0, "dropped": 2, "nonfinite": 2}
    # Ranks count what they have dropped, and one process alone does not.
    expected |= {"void": True, "carried": (2 + 1 + 1 + 1 + 3) - 3}
    assert {name: mine[name] for name in expected} == expected
    with pytest.raises(ValueError, match=r"holds 8 micro-batches.*accum_steps=9 or more"):
        resharding.window(alone(accum_steps=8), saved(*held))


def test_the_window_is_as_long_as_the_schedule_that_was_saved_with_it_says():
    settings = {"accum_steps": fa.schedules.noise_scale(start=2, at_most=64), "noise_scale": 0.9}
    opt = alone(**settings)
    grown = {"steps": 8, "seen": 40}
    mine = resharding.window(
        opt, saved(*(Window(3, 8, micro_batches=n, weight=float(n)) for n in (2, 1)), schedule=grown)
    )
    assert (mine["length"], mine["micro_batches"]) == (8, 3)
    assert settings["accum_steps"].steps == 2  # nothing is loaded yet


def test_a_window_of_which_nothing_fell_to_this_rank_is_not_empty():
    opt = alone(accum_steps=4)
    opt._ledger.restore(3, Window(3, 4, carried=1), None)
    with pytest.raises(ValueError, match=r"inside a window with accum_steps=4, and this wrapper has accum_steps=8"):
        alone(accum_steps=8).load_state_dict(opt.state_dict())


def test_weights_still_to_come_are_those_of_both_ranks():
    held = [Window(0, None, micro_batches=n, unweighed=n) for n in (2, 1)]
    mine = resharding.window(alone(reduction="sum"), saved(*held))
    assert mine["unweighed"] == 3 and mine["carried"] == 0
    assert resharding.window(alone(), saved(Window(0, None), None)) is None


def test_a_loss_scale_that_the_sums_carry_goes_on_and_is_lost_where_a_part_of_them_has_lost_it():
    opt = alone(reduction="sum")
    scale = opt._accumulation.extensions.of(LossScale)
    parts = [{"scale": torch.tensor(8.0), "unit": unit, "unit_lost": unit == 1.0} for unit in (None, 64.0, 1.0)]
    joined = {"scale": torch.tensor(8.0), "unit": 64.0}
    assert scale.join(parts, mine=[0, 1], ranks=2) == {**joined, "unit_lost": False}
    assert scale.join(parts, mine=[0, 2], ranks=2) == {**joined, "unit_lost": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_both_ranks_are_added_whatever_they_were_divided_by(dtype):
    """32-bit buffers may hold a mean since normalize_(); narrower ones always do, saved as sums."""
    opt = alone(dtype=dtype, buffer_dtype=None)
    ranks = [{"divisors": {0: 2.0}, "shards": []}, {"divisors": {0: torch.tensor(3.0)}, "shards": []}]
    wide = dtype == torch.float32
    sums = torch.tensor([2.0, 4.0, 6.0]), torch.tensor([30.0, 3.0, 9.0])
    rows = {s: total / (float(ranks[s]["divisors"][0]) if wide else 1.0) for s, total in enumerate(sums)}
    found = resharding.added_up(opt, 0, rows, ranks)
    assert found["divisor"] == (1.0 if wide else 5.0)
    torch.testing.assert_close(found["sum"] * found["divisor"], sums[0] + sums[1])


def test_sums_that_come_normalised_are_a_mean_over_fewer_ranks():
    opt = alone(reduction="none")
    ranks = [{"divisors": {0: 1.0}, "shards": shards} for shards in ([], [])]
    assert resharding.added_up(opt, 0, {0: torch.ones(3), 1: torch.ones(3)}, ranks)["sum"].tolist() == [1.0] * 3
    ranks = [{"divisors": {0: 1.0}, "shards": [0]} for _ in range(2)]  # FSDP2's sums are the mean already
    assert resharding.added_up(opt, 0, {0: torch.ones(3)}, ranks)["sum"].tolist() == [1.0] * 3
