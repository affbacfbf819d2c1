"""Garbage is collected at other times on each rank: nothing done together may depend on it."""

import contextlib
import datetime
import gc
import weakref

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from fusedaccum.modules import modules_alive
from parts import made, mean_loss, share, wrapped
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from worlds import COUNT_FROZEN, World


@contextlib.contextmanager
def collecting_by_hand():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def only_on(rank, at):
    if rank == at:
        gc.collect()


def in_a_cycle(module):
    """Lets a module outlive its last user, as if it knew its parent or kept a bound method."""
    module.itself = [module]
    return module


# -- modules without users -------------------------------------------------------------------------


def sharded_by_a_dropped_module(rank, at):
    with collecting_by_hand():
        parameters = list(fully_shard(nn.Linear(4, 4)).parameters())
        only_on(rank, at)
        return fa.AccumulatingOptimizer(torch.optim.SGD(parameters, lr=1.0))._accumulation.ranks.alone


def test_a_dropped_fsdp2_module_shares_windows_on_no_rank(worlds):
    for at in range(2):
        assert worlds(2).run(sharded_by_a_dropped_module, at=at) == [True, True]


def dropped_ddp(rank, at, when):
    model = made()
    x, y, weight, use = share(0, 1, 0, 1)[0]
    with collecting_by_hand():
        opt = wrapped(model, accum_steps=1) if when == "after" else None
        in_a_cycle(DDP(model, find_unused_parameters=True))
        only_on(rank, at)
        opt = opt or wrapped(model, accum_steps=1)
        opt.backward(mean_loss(model, x, y, use), weight=weight)
        opt.step()
        opt.load_state_dict(opt.state_dict())
        return opt._accumulation.ranks.alone


def test_a_dropped_ddp_module_shares_windows_on_no_rank(worlds):
    for when in ("before", "after"):
        for at in range(2):
            assert worlds(2).run(dropped_ddp, at=at, when=when) == [True, True]


def frozen(rank):
    gc.get_freeze_count, found = COUNT_FROZEN, []
    for module in (DDP(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))):
        gc.freeze()
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
        found.append(not opt._accumulation.ranks.alone)
    return found, gc.is_tracked(module) and not any(x is module for x in gc.get_objects())


def test_frozen_modules_are_found_and_stay_frozen(tmp_path):
    """``gc.freeze()`` hides objects from the collector and from gc.get_objects().

    It saves long trainings the collector's time.
    """
    with contextlib.closing(World(2, tmp_path)) as world:  # a world of its own: what is frozen stays frozen
        assert world.run(frozen) == [([True, True], True)] * 2


def test_who_has_frozen_nothing_has_nothing_frozen():
    """Otherwise cycles that the user drops later would never be collected."""
    layer, before = nn.Linear(4, 4), COUNT_FROZEN()
    assert modules_alive(nn.Linear, lambda module: module is layer) == [layer]
    assert COUNT_FROZEN() <= before


def dropped_batchnorm(rank, at):
    """A BatchNorm layer that was replaced, beside one that stays."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    fa.accumulate_batchnorm(model)
    with collecting_by_hand():
        in_a_cycle(model[2])
        model[2] = nn.Identity()
        only_on(rank, at)
        opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        opt.step()
    return model[0].running_mean


def test_a_dropped_batchnorm_layer_is_pooled_on_no_rank(worlds):
    samples = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for at in range(2):
        for mean in worlds(2).run(dropped_batchnorm, at=at):
            torch.testing.assert_close(mean, torch.cat(samples).mean(0) * 0.1)


# -- the order in which modules are found ----------------------------------------------------------


def normed(size):
    return DDP(nn.Sequential(nn.Linear(2, size), nn.BatchNorm1d(size, affine=False)))


def two_ddp_modules(rank, at):
    """Two DDP modules, whose buffers are broadcast one after the other."""
    with collecting_by_hand():
        modules = [normed(3)]
        only_on(rank, at)  # makes the first module older than the second for the collector
        modules.append(normed(5))
        parameters = [p for module in modules for p in module.parameters()]
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(parameters, lr=1.0), 1)
        assert opt._accumulation.ranks.replicas.modules == modules
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))
        opt.backward(sum(module(x).square().mean() for module in modules))
        opt.step()
    return [module.module[1].running_mean for module in modules]


def test_ddp_modules_come_in_the_order_of_their_parameters(worlds):
    for at in range(2):
        first, second = worlds(2).run(two_ddp_modules, at=at)
        assert all(torch.equal(a, b) for a, b in zip(first, second))


def sharded_over(group):
    return fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))


def two_meshes(rank, at):
    groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20)) for _ in range(2)]
    with collecting_by_hand():
        modules = [sharded_over(groups[0])]
        only_on(rank, at)
        modules.append(sharded_over(groups[1]))
        parameters = [p for module in modules for p in module.parameters()]
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(parameters, lr=1.0), 1)
        shared = opt._accumulation.ranks.fully_sharded.group
    return shared.group_name == groups[0].group_name


def test_fsdp2_modules_of_two_groups_share_windows_over_the_first_ones(worlds):
    for at in range(2):
        assert worlds(2).run(two_meshes, at=at) == [True, True]


# -- wrappers without users ------------------------------------------------------------------------


def a_second_wrapper(rank, at, cycle):
    model = made()
    x, y, weight, use = share(0, 1, 0, 1)[0]
    groups = []
    with collecting_by_hand():
        for _ in range(2):
            opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
            opt.backward(mean_loss(model, x, y, use), weight=weight)
            opt.step()
            opt.zero_grad()
            groups.append(opt._accumulation.ranks.group.process_group.group_name)
            if cycle:
                opt.itself = opt
            del opt
            only_on(rank, at)
    return groups


def test_ranks_that_have_not_all_collected_a_wrapper_take_a_new_group_together(worlds):
    for at in range(2):
        first, second = worlds(2).run(a_second_wrapper, at=at, cycle=True)
        assert first == second and first[0] != first[1]


def test_the_group_of_a_dropped_wrapper_that_is_in_no_cycle_is_free_at_once(worlds):
    for at in range(2):
        first, second = worlds(2).run(a_second_wrapper, at=at, cycle=False)
        assert first == second and first[0] == first[1]


def destroyed(rank):
    model, seen = made(), []
    x, y, weight, use = share(0, 1, 0, 1)[0]
    for _ in range(2):
        opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
        own = weakref.ref(opt._accumulation.ranks.group.process_group)
        opt.backward(mean_loss(model, x, y, use), weight=weight)
        opt.step()
        dist.destroy_process_group(own())
        seen.append(own())
        loss = mean_loss(model, x, y, use)
        with pytest.raises(RuntimeError, match=r"destroy_process_group\(\) has been called; call it at the very end"):
            opt.backward(loss, weight=weight)
        opt.reset()
        opt.zero_grad()
        del opt
        gc.collect()
    return seen


def test_a_wrapper_does_not_keep_its_group_alive_after_it_was_destroyed(worlds):
    """A thread of gloo's that outlived it aborted the process at its end.

    It did so in a third of all runs. A later wrapper makes a new group.
    """
    assert worlds(2).run(destroyed) == [[None, None], [None, None]]
