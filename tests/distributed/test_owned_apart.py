"""shard=True: each rank steps its part and keeps only its state; all end with equal parameters."""

import copy
import math
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import adamw, assert_close, big_batch, made, mean_loss, sgd, share, wrapped
from sizes import limits
from torch import nn
from training import masters_of

WINDOWS, COUNT = 3, 8


def train(rank, make, settings, dtype=torch.float32, ddp=False, at=-1, folder=None, shard=True):
    """Train; after ``at`` micro-batches save, throw everything away, and load."""
    size = dist.get_world_size()

    def build():
        model = made(dtype)
        module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
        group = None if ddp else dist.group.WORLD
        steps = COUNT // size
        return model, module, wrapped(model, make, accum_steps=steps, process_group=group, shard=shard, **settings)

    model, module, opt = build()
    norms, number = [], 0
    for window in range(WINDOWS):
        for x, y, weight, use in share(window, COUNT, rank, size):
            if number == at:
                torch.save([model.state_dict(), opt.state_dict()], folder / f"{rank}")
                dist.barrier()
                model, module, opt = build()
                others = torch.load(folder / f"{(rank + 1) % size}", weights_only=True)[1]
                with pytest.raises(ValueError, match=f"shard=True and holds what rank {(rank + 1) % size} of {size}"):
                    opt.load_state_dict(others)
                states = torch.load(folder / f"{rank}", weights_only=True)
                model.load_state_dict(states[0])
                opt.load_state_dict(states[1])
            opt.backward(mean_loss(module, x, y, use), weight=weight)
            opt.step()
            opt.zero_grad()
            number += 1
        assert opt.updated and opt.last_window.micro_batches == COUNT
        norms.append(opt.last_window.grad_norm)
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    kept = sum(x.numel() for x in state), sum(p.numel() for p in masters_of(opt).values()), len(opt.state)
    return [p.detach().clone() for p in model.parameters()], [None if n is None else float(n) for n in norms], kept


def literal(make, limit=None):
    model = made()
    opt = make(model.parameters())
    norms = [big_batch(model, opt, window, COUNT, limit=limit) for window in range(WINDOWS)]
    return model, opt, norms


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_all_ranks_end_with_the_big_batchs_parameters(world, make, ddp):
    model, opt, _ = literal(make)
    results = world.run(train, make=make, settings={}, ddp=ddp)
    for ours, _, _ in results:
        assert_close(ours, list(model.parameters()), 1e-6 if make is sgd else 1e-5)
        assert all(torch.equal(a, b) for a, b in zip(ours, results[0][0]))
    whole = sum(x.numel() for entry in opt.state.values() for x in entry.values() if isinstance(x, torch.Tensor))
    assert sum(state for *_, (state, _, _) in results) == whole
    assert all(entries < len(opt.state) for *_, (_, _, entries) in results)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.05}, {"max_grad_norm": 0.05, "nonfinite": "skip_window"}])
def test_clipping_by_the_norm_of_all_parameters(worlds, settings):
    model, _, norms = literal(sgd, limit=0.05)
    for ours, ours_norms, _ in worlds(2).run(train, make=sgd, settings=settings):
        assert_close(ours, list(model.parameters()))
        assert ours_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    "settings", [{"comm_dtype": torch.bfloat16}, {"backend": "reference"}, {"buffer_dtype": torch.float64}]
)
def test_other_dtypes_and_backends(worlds, settings):
    model, _, _ = literal(sgd)
    for ours, _, _ in worlds(2).run(train, make=sgd, settings=settings):
        assert_close(ours, list(model.parameters()), WINDOWS * 2**-8 if "comm_dtype" in settings else 1e-6)


def skips_with_a_state_of_some(rank, shared):
    """The first window reaches one parameter alone.

    A fused optimizer has a state, and could decide by itself, only where that is.
    """
    params = [nn.Parameter(torch.ones(5)) for _ in range(2)]
    ranks = {"process_group": dist.group.WORLD, "shard": True} if shared else {}
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW(params, lr=0.1, fused=True), 1, nonfinite="skip_window", **ranks)
    for factors in ((1.0, None), (1.0, math.nan), (2.0, 3.0)):
        sum((p * factor).sum() for p, factor in zip(params, factors) if factor is not None).backward()
        opt.step()
        opt.zero_grad()
        assert opt.updated is (math.nan not in factors)
    return [p.detach() for p in params]


def test_ranks_of_which_one_has_a_state_skip_a_window_together(worlds):
    alone = skips_with_a_state_of_some(0, shared=False)
    for ours in worlds(2).run(skips_with_a_state_of_some, shared=True):
        assert_close(ours, alone)


def test_master_weights_are_kept_by_their_owner(worlds):
    whole = sum(p.numel() for p in made(torch.bfloat16).parameters() if p.dtype == torch.bfloat16)
    results = worlds(2).run(train, make=sgd, settings={"master_weights": True}, dtype=torch.bfloat16)
    assert sum(masters for *_, (_, masters, _) in results) == whole
    assert all(masters < whole for *_, (_, masters, _) in results)
    whole_here = {"make": sgd, "settings": {"master_weights": True}, "dtype": torch.bfloat16, "shard": False}
    theirs = worlds(2).run(train, **whole_here)[0][0]
    for ours, _, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


ELSEWHERE = [{"master_weights": "split"}, {"optimizer_device": "cpu"}]


@pytest.mark.parametrize("settings", ELSEWHERE, ids=str)
def test_masters_of_other_kinds_are_kept_by_their_owner(worlds, settings):
    how = {"make": sgd, "settings": settings, "dtype": torch.bfloat16}
    apart, together = (worlds(2).run(train, **how, shard=shard) for shard in (True, False))
    for ours, norms, (_, masters, _) in apart:
        assert masters < together[0][2][1] and norms == together[0][1]
        assert all(torch.equal(a, b) for a, b in zip(ours, together[0][0]))


@pytest.mark.parametrize("settings", ELSEWHERE, ids=str)
def test_masters_of_other_kinds_of_every_rank_go_on_bit_by_bit(worlds, tmp_path, settings):
    how = {"make": adamw, "settings": settings, "dtype": torch.bfloat16}
    straight, resumed = worlds(2).run(train, **how), worlds(2).run(train, **how, at=4, folder=tmp_path)
    for (ours, *_), (theirs, *_) in zip(resumed, straight):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("at", [4, 6])
def test_checkpoints_of_every_rank_go_on_bit_by_bit(worlds, tmp_path, at):
    straight = worlds(2).run(train, make=adamw, settings={})
    resumed = worlds(2).run(train, make=adamw, settings={}, at=at, folder=tmp_path)
    for (ours, *_), (theirs, *_) in zip(resumed, straight):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def loads_a_whole_state(rank, state):
    model = made()
    opt = wrapped(model, adamw, accum_steps=COUNT // 2, process_group=dist.group.WORLD, shard=True)
    opt.load_state_dict(copy.deepcopy(state["opt"]))  # the ranks got it in memory that they share
    model.load_state_dict(state["model"])
    for window in (1, 2):
        for x, y, weight, use in share(window, COUNT, rank, 2):
            opt.backward(mean_loss(model, x, y, use), weight=weight)
            opt.step()
            opt.zero_grad()
    return [p.detach() for p in model.parameters()], len(opt.state)


def test_a_plain_optimizers_state_is_loaded_in_parts(worlds):
    model = made()
    opt = adamw(model.parameters())
    big_batch(model, opt, 0, COUNT)
    state = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "opt": opt.state_dict()}
    results = worlds(2).run(loads_a_whole_state, state=state)
    for window in (1, 2):
        big_batch(model, opt, window, COUNT)
    for ours, entries in results:
        assert_close(ours, list(model.parameters()), 1e-5)
        assert entries < len(opt.state)


def nothing_of_its_own(rank, which):
    """Only one parameter gets a gradient: the rank that does not own it steps nothing itself."""
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params, lr=1.0), 1, process_group=dist.group.WORLD, shard=True, reduction="none"
    )
    params[which].sum().backward()
    opt.step()
    assert opt.updated and opt.last_window.applied
    return [p.detach() for p in params]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_steps_nothing_itself_is_told_that_parameters_were_changed(worlds, which):
    expected = [torch.full((4,), -1.0 if number == which else 0.0) for number in range(2)]
    for ours in worlds(2).run(nothing_of_its_own, which=which):
        assert_close(ours, expected)


@limits(REDUCED=400)
def collectives(rank):
    model = made()
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD, shard=True)
    for window in range(2):
        with torch.profiler.profile(acc_events=True) as profiler:
            ((x, y, _, use),) = share(window, 1, 0, 1)
            opt.backward(mean_loss(model, x, y, use))
            opt.step()
            opt.zero_grad()
    names = [event.name for event in profiler.events() if event.name.startswith("gloo:")]
    return names, len(opt._accumulation.ranks.reduce_buckets._buckets)


def test_one_reduction_and_one_broadcast_a_window_and_bucket(worlds):
    for names, buckets in worlds(2).run(collectives):
        assert names.count("gloo:reduce") == buckets and names.count("gloo:all_reduce") == 1
        assert 0 < names.count("gloo:broadcast") <= buckets  # none for a bucket without gradients


def refused(rank):
    model = made()
    opt = wrapped(model, process_group=dist.group.WORLD, shard=True)
    x, y, _, use = share(0, 1, 0, 1)[0]
    opt.backward(mean_loss(model, x, y, use))
    with pytest.raises(RuntimeError, match=r"normalize_\(\).*shard=True.*max_grad_norm"):
        opt.normalize_()
    opt.step()
    with pytest.raises(ValueError, match="shard=True, whose state is spread over the ranks"):
        fa.DistributedState(opt)
    with pytest.raises(TypeError, match="must be an AccumulatingOptimizer, got a SGD; wrap it"):
        fa.DistributedState(opt.optimizer)
    with pytest.raises(ValueError, match="buffer_device='cpu'"):
        fa.AccumulatingOptimizer(
            sgd(made().parameters()), process_group=dist.group.WORLD, shard=True, buffer_device="cpu"
        )


def test_what_cannot_be_meant_is_refused(worlds):
    worlds(2).run(refused)


class SharedOut(torch.optim.SGD):
    """Steps every second parameter here and the others elsewhere, as some make of Muon does.

    Ranks tell each other by collectives.
    """

    def step(self, closure=None):
        def tell(p):
            dist.all_reduce(p)

        for p in self.param_groups[0]["params"]:
            tell(p.detach())


class OfRanks(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.over = dist.group.WORLD


class TwoInside(torch.optim.SGD):
    """Hands some parameters to another optimizer, on all ranks alike."""

    def __init__(self, params, lr):
        first, *rest = params
        super().__init__([first, *rest], lr=lr)
        self.other = torch.optim.AdamW([first], lr=lr)


def shared_out_twice(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.13 warns of what it uses itself
        from torch.distributed.optim import ZeroRedundancyOptimizer
    params = [nn.Parameter(torch.zeros(1)) for _ in range(6)]
    settings = {"accum_steps": 1, "process_group": dist.group.WORLD, "shard": True}
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=1.0)
    for inner, how in (
        (zero, r"ZeroRedundancyOptimizer \(it has a \.(world_size|process_group)\)"),
        (SharedOut(params, lr=1.0), r"SharedOut \(its step\(\) calls all_reduce\(\)\)"),
        (OfRanks(params, lr=1.0), r"OfRanks \(it has a \.over\)"),
    ):
        with pytest.raises(ValueError, match=rf"shard=True has each rank step a part.*so has {how}.*leave shard out"):
            fa.AccumulatingOptimizer(inner, **settings)
    opt = fa.AccumulatingOptimizer(TwoInside(params, lr=1.0), **settings)
    sum(params).backward()
    opt.step()
    return [float(p.detach()) for p in params]


def test_an_optimizer_that_shares_out_its_parameters_itself_is_refused(worlds):
    assert worlds(2).run(shared_out_twice) == [[-1.0] * 6] * 2


def added_later(rank):
    model = made()
    opt = wrapped(nn.ModuleList([model.second]), accum_steps=2, process_group=dist.group.WORLD, shard=True)
    opt.add_param_group({"params": [*model.first.parameters(), model.scale]})
    for window in range(2):
        for x, y, weight, _ in share(window, 4, rank, 2):
            opt.backward(mean_loss(model, x, y, False), weight=weight)
            opt.step()
            opt.zero_grad()
    return [p.detach() for p in model.parameters()], len(opt.state)


def test_groups_that_are_added_later_are_shared_out_too(worlds):
    model = made()
    opt = sgd([model.second.weight])
    opt.add_param_group({"params": [*model.first.parameters(), model.scale]})
    for window in range(2):
        opt.zero_grad()
        parts = share(window, 4, 0, 1)
        total = sum(part[2] for part in parts)
        sum(mean_loss(model, x, y, False) * (w / total) for x, y, w, _ in parts).backward()
        opt.step()
    for ours, entries in worlds(2).run(added_later):
        assert_close(ours, list(model.parameters()))
        assert 0 < entries < 4


def late(rank, after):
    """Whether a group is added after wrapping, in the run that saves and in the one that loads."""

    def build(added_after):
        torch.manual_seed(0)
        first, *others = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        inner = torch.optim.SGD([first, others[0]] if added_after else [first, *others], lr=0.1, momentum=0.9)
        opt = fa.AccumulatingOptimizer(inner, 1, process_group=dist.group.WORLD, shard=True)
        if added_after:
            opt.add_param_group({"params": others[1:]})
        return [first, *others], opt

    def window(params, opt):
        opt.backward(sum(p.sum() for p in params))
        opt.step()
        opt.zero_grad()

    params, opt = build(after[0])
    window(params, opt)
    saved, weights = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    window(params, opt)
    again, opt = build(after[1])
    with torch.no_grad():
        for p, x in zip(again, weights, strict=True):
            p.copy_(x)
    if after[0] != after[1]:
        with pytest.raises(ValueError, match=r"stepped the parameters \[.*\], and here it steps"):
            opt.load_state_dict(saved)
        return
    opt.load_state_dict(saved)
    window(again, opt)
    assert all(map(torch.equal, params, again))


@pytest.mark.parametrize("after", [(False, False), (True, True), (False, True), (True, False)])
def test_what_was_shared_out_otherwise_is_not_loaded(worlds, after):
    worlds(2).run(late, after=after)
