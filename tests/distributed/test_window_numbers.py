"""The loss and noise scale in last_window, for a window of all ranks, are the big batch's."""

import math
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parts import assert_close, made, mean_loss, micro_batches, sgd, share, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

COUNT, DECAY = 8, 0.5


def still(params):
    return torch.optim.SGD(params, lr=0.0)


def train(rank, settings, count):
    size = dist.get_world_size()
    model = made(torch.float64)
    opt = wrapped(model, still, process_group=dist.group.WORLD, **settings)
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
    """The gradient of ``sum(weight * loss)``, flattened."""
    total = sum(weight * mean_loss(model, x, y, use).double() for x, y, weight, use in micro_batches)
    grads = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None]), total.item()


def known_of(count, ranks, equal, together=False):
    """The oracle: loss and noise scale of each of two windows.

    They are from plain gradients of the big batch and of the small batches. ``together``: do the
    ranks' first micro-batches form one small batch, rather than one each?
    """
    model, averages = made(torch.float64), torch.zeros(2)
    for window in range(2):
        batch = [
            (x, y, 1.0 if equal else w, use and not together) for x, y, w, use in micro_batches(window, count, equal)
        ]
        whole, total = gradient(model, batch)
        firsts = [batch[:ranks]] if together else [[first] for first in batch[:ranks]]
        small, large = [sum(w for *_, w, _ in first) for first in firsts], sum(w for *_, w, _ in batch)
        of_firsts = sum(gradient(model, first)[0].square().sum() for first in firsts)
        # Least squares is exact here: two equations, E|S|^2 = square |G|^2 + weight tr(Sigma),
        # for two unknowns.
        equations = torch.tensor([[sum(w**2 for w in small), sum(small)], [large**2, large]])
        found = torch.linalg.solve(equations.double(), torch.stack([of_firsts, whole.square().sum()]).double())
        averages = DECAY * averages + (1 - DECAY) * found
        sq_gradient, trace = averages.clamp(min=0)
        assert 0 < trace / sq_gradient < math.inf
        yield total / large, (trace / sq_gradient).item()


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
    equal = settings.get("reduction") == "none"
    results = worlds(2).run(train, settings={**settings, "noise_scale": DECAY}, count=count)
    assert results[0] == results[1]
    for (loss, noise_scale), (of_batch, of_batches) in zip(results[0], known_of(count, 2, equal), strict=True):
        assert loss == pytest.approx(of_batch, rel=1e-6)
        assert noise_scale.item() == pytest.approx(of_batches, rel=1e-6)  # the model computes in FP32 in part


def changed_on_one_rank(rank):
    model = made(torch.float64)
    opt = wrapped(model, still, accum_steps=COUNT // 2, process_group=dist.group.WORLD, noise_scale=DECAY)
    said = []
    for window in range(3):
        for number, (x, y, weight, use) in enumerate(share(window, COUNT, rank, 2)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that p.grad was written to
                opt.backward(mean_loss(model, x, y, use), weight=weight)
            opt.step()
            if (window, number, rank) == (1, 0, 0):
                model.first.weight.grad = None
        said.append(float(opt.last_window.noise_scale))
    return said


def test_ranks_agree_on_a_noise_scale_that_one_of_them_cannot_measure(worlds):
    first, second = worlds(2).run(changed_on_one_rank)
    assert first == second and first[0] == first[1] != first[2]


# -- shards: FSDP2 adds up the ranks' micro-batches first: the small batch is one of every rank ----


def shards(rank, settings, mesh_shape, sync, plain):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
    model = made(torch.float64)
    ignored = {model.scale} if plain else set()
    fully_shard([model.first, model.second], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    opt = wrapped(model, still, noise_scale=DECAY, **settings)
    reduction, said = settings.get("reduction"), []
    for window in range(2):
        parts = share(window, COUNT, rank, size, reduction == "none")
        for number, (x, y, weight, _) in enumerate(parts):
            model.set_requires_gradient_sync(sync or number == len(parts) - 1)
            loss = mean_loss(model, x, y, False) * {"sum": weight, "none": size / COUNT}.get(reduction, 1)
            if reduction == "sum":
                loss.backward()
                opt.step(weight=weight)
            else:
                opt.backward(loss, weight=weight if reduction is None else None)
                if "accum_steps" in settings or number == len(parts) - 1:
                    opt.step()
        said.append((opt.last_window.noise_scale, opt.last_window.micro_batches))
    return said


@pytest.mark.parametrize(
    ("settings", "mesh_shape"),
    [
        ({}, (2,)),
        ({"accum_steps": 4}, (2,)),
        ({"accum_steps": 4, "reduction": "sum", "max_grad_norm": 1.0}, (2,)),
        ({"accum_steps": 4, "reduction": "none"}, (2,)),
        pytest.param({"accum_steps": 2}, (2, 2), marks=pytest.mark.slow),
        pytest.param({"accum_steps": 2, "reduction": "none"}, (2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_noise_scale_of_shards_is_that_of_all_ranks(worlds, settings, mesh_shape):
    size = math.prod(mesh_shape)
    results = worlds(size).run(shards, settings=settings, mesh_shape=mesh_shape, sync=True, plain=False)
    equal = settings.get("reduction") == "none"
    for said in results:
        for (noise_scale, count), (_, expected) in zip(said, known_of(COUNT, size, equal, together=True), strict=True):
            assert count == COUNT and noise_scale.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("accum_steps", "sync"), [(4, False), (1, True)], ids=["sent once a window", "one each"])
def test_shards_that_have_seen_one_batch_tell_nothing(worlds, accum_steps, sync):
    settings = {"accum_steps": accum_steps}
    for said in worlds(2).run(shards, settings=settings, mesh_shape=(2,), sync=sync, plain=False):
        assert said == [(None, 2 * accum_steps)] * 2


def beside_shards(rank):
    with pytest.raises(ValueError, match=r"noise_scale=0.5: FSDP2 shards other parameters but not .*Shard it too"):
        shards(rank, {"accum_steps": 4}, (2,), True, True)


def test_parameters_beside_shards_have_a_small_batch_of_their_own(worlds):
    worlds(2).run(beside_shards)


def split(rank, parallel):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    if parallel:
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    opt = wrapped(model, still, accum_steps=COUNT, noise_scale=DECAY)
    for window in range(2):
        for x, y, weight, _ in micro_batches(window, COUNT):  # all ranks see the same
            opt.backward((model(x.double()) - y).square().mean(), weight=weight)
            opt.step()
    return opt.last_window.noise_scale.item()


def test_the_noise_scale_over_tensor_parallelism_is_that_of_one_process(worlds):
    assert worlds(2).run(split, parallel=True) == pytest.approx([split(0, False)] * 2, rel=1e-9)


# -- over another number of ranks ------------------------------------------------------------------


def normalised(rank, path, begin, end):
    """A caller-owned window of four micro-batches, saved after two of them."""
    model, size = made(), dist.get_world_size()
    opt = wrapped(model, reduction="none", process_group=dist.group.WORLD if size > 1 else None)
    if begin:
        dcp.load({"opt": fa.DistributedState(opt, path)}, checkpoint_id=path)
    for x, y, _, use in list(micro_batches(0, 4, equal=True))[begin + rank : end : size]:
        opt.backward(mean_loss(model, x, y, use) * size / 4)
    if not begin:
        dcp.save({"opt": fa.DistributedState(opt)}, checkpoint_id=path)
        return None
    opt.step()
    return float(opt.last_window.loss), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_the_loss_of_a_window_that_others_began(worlds, tmp_path, before, after):
    model = made()
    opt = sgd(model.parameters())
    loss = sum(mean_loss(model, x, y, use) for x, y, _, use in micro_batches(0, 4, equal=True)) / 4
    loss.backward()
    opt.step()
    worlds(before).run(normalised, path=tmp_path, begin=0, end=2)
    for ours, parameters in worlds(after).run(normalised, path=tmp_path, begin=2, end=4):
        assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
        assert_close(parameters, list(model.parameters()))
