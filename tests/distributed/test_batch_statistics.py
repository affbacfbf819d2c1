"""BatchNorm over ranks: a window's statistics are those of all ranks' micro-batches."""

import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fusedaccum.extensions import batch_norm as statistics
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import batch_norm
from torch.nn.parallel import DistributedDataParallel as DDP

WINDOWS, COUNT = 2, 4  # micro-batches per window, of all ranks


class FakeSync(nn.SyncBatchNorm):
    """Stands in on the CPU for SyncBatchNorm, which needs GPUs.

    Gradients are only those of the rank's own samples.
    """

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = [None] * size
        dist.all_gather_object(parts, x.detach())
        parts[rank] = x
        self.num_batches_tracked.add_(1)
        y = batch_norm(
            torch.cat(parts), self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
        )
        return y.split([len(part) for part in parts])[rank]


def micro_batch(window, number):
    generator = torch.Generator().manual_seed(100 * window + number)
    n = int(torch.randint(2, 7, (), generator=generator))
    return torch.randn(n, 3, generator=generator) * 2 + number


def made(kind):
    torch.manual_seed(2)
    layer = FakeSync(3) if kind == "sync" else nn.BatchNorm1d(3)
    model = nn.Sequential(layer, nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    fa.accumulate_batchnorm(model)
    return (DDP(model) if kind == "ddp" else model), model


def wrapped(module, kind, **settings):
    group = None if kind == "ddp" or not dist.is_initialized() else dist.group.WORLD
    return fa.AccumulatingOptimizer(torch.optim.SGD(module.parameters(), lr=0.01), process_group=group, **settings)


def gather(module, opt, window, numbers):
    for number in numbers:
        module(micro_batch(window, number)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def oracle(windows):
    layer = nn.BatchNorm1d(3)
    for numbers, window in windows:
        layer(torch.cat([micro_batch(window, number) for number in numbers]))
    return layer.state_dict()


def assert_statistics(state, expected, moves):
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(state[f"0.{name}"], expected[name], rtol=1e-6, atol=1e-6)
    assert state["0.num_batches_tracked"] == state["2.num_batches_tracked"] == moves


def assert_alike(states):
    for state in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(state.values(), states[0].values()))


def all_train(rank, kind):
    size = dist.get_world_size()
    module, model = made(kind)
    opt = wrapped(module, kind, accum_steps=COUNT // size)
    for window in range(WINDOWS):
        gather(module, opt, window, range(rank, COUNT, size))
    return model.state_dict()


@pytest.mark.parametrize("kind", ["plain", "ddp", "sync"])
def test_the_population_is_that_of_all_ranks(world, kind):
    states = world.run(all_train, kind=kind)
    assert_alike(states)
    assert_statistics(states[0], oracle([(range(COUNT), window) for window in range(WINDOWS)]), WINDOWS)


def inner_norm(rank, wraps):
    """A BatchNorm whose input is that of the model, after a layer with parameters."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
        model[0].bias.zero_()
    if wraps == "each":
        fully_shard(model[1])
    fully_shard(model)
    return fa.accumulate_batchnorm(model)


def sharded(rank, wraps):
    model = inner_norm(rank, wraps)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), accum_steps=2)
    gather(model, opt, 0, [rank])
    saved = opt.state_dict()
    gather(model, opt, 0, [2 + rank])
    opt.load_state_dict(saved)
    model[1].reset_running_stats()
    gather(model, opt, 0, [2 + rank])
    gather(model, opt, 1, [rank, 2 + rank])
    return model.state_dict()


@pytest.mark.parametrize("wraps", ["root", "each"])
def test_fsdp2_takes_the_parameters_out_of_a_layer_while_it_runs(worlds, wraps):
    expected = oracle([(range(COUNT), window) for window in range(WINDOWS)])
    for state in worlds(2).run(sharded, wraps=wraps):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(state[f"1.{name}"], expected[name], rtol=1e-6, atol=1e-6)


def held_back_and_bad(rank, bad):
    """FSDP2 reduces the gradients of micro-batches 0 and 1 together, and those of 2 and 3."""
    model = inner_norm(rank, "root")
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), accum_steps=4, nonfinite="skip_micro_batch"
    )
    for number in range(4):
        model.set_requires_gradient_sync(number % 2 == 1)
        loss = model(micro_batch(0, 2 * number + rank)).square().mean()
        (loss * float("nan") if number == bad and rank == 0 else loss).backward()
        opt.step()
    return model.state_dict(), opt.last_window.micro_batches


@pytest.mark.parametrize("bad", [1, 2])
def test_what_fsdp2_holds_back_is_left_out_with_a_bad_micro_batch(worlds, bad):
    kept = [number for number in range(4) if number // 2 != bad // 2]
    expected = oracle([([2 * number + rank for number in kept for rank in range(2)], 0)])
    for state, micro_batches in worlds(2).run(held_back_and_bad, bad=bad):
        assert micro_batches == 4
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(state[f"1.{name}"], expected[name], rtol=1e-6, atol=1e-6)


def without_data(rank, kind, second):
    """The second rank has less for the first window, or nothing, and nothing for the second."""
    module, model = made(kind)
    opt = wrapped(module, kind, accum_steps=2)
    gather(module, opt, 0, [0, 1] if rank == 0 else second)
    if rank == 1:
        opt.flush()
    gather(module, opt, 1, [0, 1] if rank == 0 else [])
    if rank == 1:
        opt.flush()
    opt.flush()  # no rank has anything left
    return model.state_dict()


@pytest.mark.parametrize("second", [[2], []], ids=["less", "nothing"])
@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_ranks_without_data_move_along(worlds, kind, second):
    states = worlds(2).run(without_data, kind=kind, second=second)
    assert_alike(states)
    assert_statistics(states[0], oracle([([0, 1, *second], 0), ([0, 1], 1)]), 2)


def unequal_calls(rank):
    module, model = made("plain")
    opt = wrapped(module, "plain", accum_steps=1)
    sum(module(micro_batch(0, number)).square().mean() for number in ([0, 1] if rank == 0 else [2])).backward()
    opt.step()
    return model.state_dict()


def test_a_second_call_on_one_rank_moves_all(worlds):
    states = worlds(2).run(unequal_calls)
    assert_alike(states)
    expected = nn.BatchNorm1d(3)
    for numbers in ([0, 2], [1]):
        expected(torch.cat([micro_batch(0, number) for number in numbers]))
    assert_statistics(states[0], expected.state_dict(), 2)


def saving(rank, path):
    size = dist.get_world_size()
    module, model = made("plain")
    opt = wrapped(module, "plain", accum_steps=2)
    gather(module, opt, 0, range(rank, 4, size))
    gather(module, opt, 1, [rank])
    dcp.save({"opt": fa.DistributedState(opt)}, checkpoint_id=path)
    return model.state_dict()


def loading(rank, path, model_state):
    module, model = made("plain")
    model.load_state_dict(model_state)
    opt = wrapped(module, "plain", accum_steps=2 if dist.is_initialized() else 4)
    dcp.load({"opt": fa.DistributedState(opt, path)}, checkpoint_id=path)
    gather(module, opt, 1, [2 + rank] if dist.is_initialized() else [2, 3])
    return model.state_dict()


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_resumed_inside_a_window_on_as_many_ranks_or_one(worlds, tmp_path, ranks):
    saved = worlds(2).run(saving, path=tmp_path)[0]
    if ranks == 1:
        states = [loading(0, tmp_path, saved)]
    else:
        states = worlds(2).run(loading, path=tmp_path, model_state=saved)
        assert_alike(states)
    assert_statistics(states[0], oracle([(range(COUNT), 0), (range(COUNT), 1)]), 2)


def of_its_own(rank):
    """BatchNorm layers that nobody pools, under DDP that broadcasts no buffers: plain, wrapped."""
    found = []
    for wraps in (False, True):
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch 2.14 has another name for it
            module = DDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), broadcast_buffers=False)
        opt = torch.optim.SGD(module.parameters(), lr=0.01)
        opt = fa.AccumulatingOptimizer(opt, accum_steps=1) if wraps else opt
        for window in range(WINDOWS):
            module(micro_batch(window, rank)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        found.append({key: value.clone() for key, value in module.module[0].named_buffers()})
    return found


def test_ranks_keep_statistics_of_their_own_where_ddp_does_not_broadcast_them(worlds):
    results = worlds(2).run(of_its_own)
    for plain, ours in results:
        torch.testing.assert_close(ours, plain)
    assert not torch.equal(results[0][1]["running_mean"], results[1][1]["running_mean"])


def noted(rank):
    """True if this rank, of ``rank + 1`` micro-batches, tells of a layer that is not pooled."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(statistics, "_noted", False)
    torch.manual_seed(2)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    opt = wrapped(model, "plain", reduction="none")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(rank + 1):
            model(micro_batch(0, number)).square().mean().backward()
        opt.step()
    monkeypatch.undo()
    return any("BatchNorm layer" in str(of.message) for of in told)


def test_a_rank_notes_layers_left_out_after_several_micro_batches_of_its_own(worlds):
    assert worlds(2).run(noted) == [False, True]
