"""As tests/core/test_old_checkpoints.py, of two ranks."""

import torch
import torch.distributed as dist
from old_checkpoints import resumed


def go_on(rank):
    return resumed("two_ranks", rank, dist.group.WORLD)


def test_a_window_of_two_ranks_goes_on_as_where_it_was_saved(worlds):
    for ours, theirs in worlds(2).run(go_on):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
