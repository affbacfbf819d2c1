"""Loops written for DDP, which own their windows: a rank whose gradients were dropped."""

import pytest
from parts import assert_close, made, mean_loss, sgd, share, wrapped
from torch import nn

DDP = nn.parallel.DistributedDataParallel


def dropped(rank, at):
    """The only micro-batch of rank ``at`` is dropped; the end of its backward shows it what the other has."""
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
