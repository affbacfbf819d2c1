"""How ``fusedaccum.schedules`` round, and what they learn nothing from.

(What they follow is in test_noise_scale.py.)
"""

import math

import numpy as np
import pytest
import torch
from fusedaccum import schedules
from training import closed


def test_schedule_learns_nothing_from_a_window_without_micro_batches_or_weight():
    schedule = schedules.noise_scale(start=4, at_most=20, every=1)
    for window in (closed(64.0, micro_batches=0), closed(64.0, weight=0.0)):
        schedule.window_closed(window, 1)
        assert schedule.steps == 4


def test_schedule_rounds_to_the_nearest_and_may_always_shrink_by_one():
    schedule = schedules.noise_scale(start=6, at_most=20, every=1)
    schedule.window_closed(closed(6.9 * 8), 1)
    assert schedule.steps == 7
    slow = schedules.noise_scale(start=4, at_most=4, every=1, growth=1.1)
    for steps in (3, 2, 2):
        slow.window_closed(closed(0.0), 1)
        assert slow.steps == steps
    default = schedules.noise_scale(start=4, at_most=100, every=1)
    default.window_closed(closed(1000.0), 1)
    assert default.steps == 8  # at most twice as long


def test_numbers_that_stand_for_ints_are_ints_in_a_checkpoint():
    schedule = schedules.noise_scale(start=np.int64(4), at_least=np.int64(4), at_most=torch.tensor(4))
    schedule.window_closed(closed(64.0), 1)
    assert type(schedule(0)) is type(schedule.state_dict()["steps"]) is int


def test_a_loaded_schedule_keeps_its_own_bounds():
    for start, expected in ((32, 16), (8, 8), (1, 2)):
        schedule = schedules.noise_scale(start=4, at_least=2, at_most=16)
        schedule.load_state_dict(schedules.noise_scale(start=start, at_least=1, at_most=64).state_dict())
        assert schedule(0) == expected


def test_ramps_round_to_the_nearest():
    ramp = schedules.linear(1, 4, windows=5)
    assert [ramp(i) for i in range(6)] == [1, 2, 2, 3, 3, 4]
    ramp = schedules.geometric(1, 15, windows=2)
    assert [ramp(i) for i in range(3)] == [1, 4, 15]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: schedules.piecewise({0: 4, True: 2}), "got the window True"),
        (lambda: schedules.scaled_lr(0.1, batch=math.inf, base_batch=1, rule="sqrt"), "batch must be finite"),
    ],
)
def test_what_is_no_window_and_no_batch_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_learning_rates_that_are_no_numbers_are_refused_by_name():
    with pytest.raises(TypeError, match=r"lr must be a number, got '0\.1'"):
        schedules.scaled_lr("0.1", batch=2, base_batch=1, rule="sqrt")
    with pytest.raises(ValueError, match=r"rule must be one of 'linear', 'sqrt', got \['linear'\]"):
        schedules.scaled_lr(0.1, batch=2, base_batch=1, rule=["linear"])
