"""What a window of all ranks says of itself: its loss and its noise scale are those of the big batch."""

import math

import pytest
import torch
import torch.distributed as dist
from parts import made, mean_loss, micro_batches, sgd, share, wrapped
from torch.nn.parallel import DistributedDataParallel

COUNT, DECAY = 8, 0.5


def train(rank, settings, count):
    size = dist.get_world_size()
    model = made(torch.float64)
    opt = wrapped(model, sgd, process_group=dist.group.WORLD, **settings)
    for group in opt.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    said = []
    for window in range(2):
        for x, y, weight, use in share(window, count, rank, size, settings.get("reduction") == "none"):
            loss = mean_loss(model, x, y, use) * {"sum": weight, "none": 1 / (count / size)}.get(
                settings.get("reduction"), 1
            )
            opt.backward(loss, weight=None if settings.get("reduction") == "none" else weight)
            if "accum_steps" in settings:
                opt.step()
        if "accum_steps" not in settings:
            opt.step()
        said.append((opt.last_window.loss.item(), opt.last_window.noise_scale))
    return said


def one_rank_alone(rank):
    model = made(torch.float64)
    opt = wrapped(model, sgd, process_group=dist.group.WORLD, noise_scale=DECAY)
    said = []
    for window in range(2):
        for x, y, weight, use in share(window, COUNT, rank, 2) if rank == 0 or window == 0 else ():
            opt.backward(mean_loss(model, x, y, use), weight=weight)
        opt.step()
        said.append((opt.last_window.loss.item(), opt.last_window.noise_scale.item()))
    return said


def test_a_window_that_not_all_ranks_have_measured_changes_nothing(worlds):
    results = worlds(2).run(one_rank_alone)
    assert results[0] == results[1]
    (_, before), (loss, after) = results[0]
    assert math.isfinite(loss) and before == after


def behind_ddp(rank):
    model = DistributedDataParallel(made(torch.float64))
    opt = wrapped(model, sgd, noise_scale=DECAY)
    for x, y, weight, use in share(0, 2, rank, 2):
        opt.backward(mean_loss(model, x, y, use), weight=weight)
    opt.step()
    return opt.last_window.micro_batches, opt.last_window.noise_scale


def test_sums_that_have_gone_during_the_first_micro_batch_are_not_taken_for_this_rank_s(worlds):
    assert worlds(2).run(behind_ddp) == [(2, None)] * 2


def gradient(model, micro_batches):
    """Of ``sum(weight * loss)``, flat."""
    total = sum(weight * mean_loss(model, x, y, use).double() for x, y, weight, use in micro_batches)
    grads = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None]), total.item()


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, COUNT),
        ({"accum_steps": 4}, COUNT),
        ({"accum_steps": 4, "reduction": "sum"}, COUNT),
        ({"accum_steps": 4, "reduction": "none"}, COUNT),
        ({"accum_steps": 1}, 2),
    ],
    ids=["owned", "counted", "sum", "none", "one a rank"],
)
def test_loss_and_noise_scale_are_those_of_all_ranks(worlds, settings, count):
    model, equal = made(torch.float64), settings.get("reduction") == "none"
    averages = torch.zeros(2)
    results = worlds(2).run(train, settings={**settings, "noise_scale": DECAY}, count=count)
    for window in range(2):
        batch = [(x, y, 1.0 if equal else w, use) for x, y, w, use in micro_batches(window, count, equal)]
        weights = [w for _, _, w, _ in batch]
        whole, total = gradient(model, batch)
        # Least squares is exact here: two equations, E|S|^2 = square |G|^2 + weight tr(Sigma), for two unknowns.
        firsts = [next(iter(share(window, count, rank, 2, equal))) for rank in range(2)]
        firsts = [(x, y, 1.0 if equal else w, use) for x, y, w, use in firsts]
        of_firsts = sum(gradient(model, [first])[0].square().sum() for first in firsts)
        equations = torch.tensor(
            [[sum(w**2 for *_, w, _ in firsts), sum(w for *_, w, _ in firsts)], [sum(weights) ** 2, sum(weights)]]
        )
        known = torch.stack([of_firsts, whole.square().sum()]).double()
        averages = DECAY * averages + (1 - DECAY) * torch.linalg.solve(equations.double(), known)
        for said in results:
            loss, noise_scale = said[window]
            assert loss == pytest.approx(total / sum(weights), rel=1e-6)
            sq_gradient, trace = averages.clamp(min=0)
            assert noise_scale.item() == pytest.approx(
                (trace / sq_gradient).item(), rel=1e-6
            )  # the model computes in FP32 in part
            assert 0 < noise_scale < math.inf
    assert results[0] == results[1]
