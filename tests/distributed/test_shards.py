"""Parameters that FSDP2 shards train as in one process on the big batch."""

import copy
import math
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from fusedaccum.distributed import data_parallel
from parts import Block, assert_close, big_batch, contents, full, made, mean_loss, sgd, share, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import masters_of

WINDOWS, COUNT = 3, 8


def sharded(dtype=torch.float32, mesh=None, **settings):
    model = made(dtype)
    fully_shard([model.first, model.second], mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def fsdp(rank, settings, equal, sync, bare=False, mesh_shape=None, group=False):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")) if mesh_shape else None
    model = sharded(mesh=mesh)
    opt = wrapped(model, accum_steps=COUNT // size, process_group=dist.group.WORLD if group else None, **settings)
    norms = []
    for window in range(WINDOWS):
        parts = share(window, COUNT, rank, size, equal)
        for number, (x, y, weight, _) in enumerate(parts):
            model.set_requires_gradient_sync(sync or number == len(parts) - 1)
            loss = mean_loss(model, x, y, False)
            if settings.get("reduction") == "sum":
                loss = loss * weight
            if bare:
                loss.backward()
            else:
                opt.backward(loss, weight=weight)
            opt.step()
            opt.zero_grad()
        assert opt.updated and opt.last_window.micro_batches == COUNT
        norms.append(opt.last_window.grad_norm)
    assert all(isinstance(p, DTensor) and (p.grad is None or isinstance(p.grad, DTensor)) for p in model.parameters())
    return contents(model, opt), [None if n is None else float(n) for n in norms]


def literal(equal, limit=None):
    model = made()
    opt = sgd(model.parameters())
    norms = [big_batch(model, opt, window, COUNT, equal, limit, sometimes=False) for window in range(WINDOWS)]
    return contents(model, opt), norms


@pytest.mark.parametrize("sync", [True, False], ids=["every micro-batch", "once a window"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}], ids=["mean", "sum"])
def test_fsdp2_is_the_big_batch(worlds, settings, equal, sync):
    theirs, _ = literal(equal)
    for ours, _ in worlds(2).run(fsdp, settings=settings, equal=equal, sync=sync):
        assert_close(ours, theirs)


def test_fsdp2_in_a_plain_loop(worlds):
    theirs, _ = literal(True)
    for ours, _ in worlds(2).run(fsdp, settings={}, equal=True, sync=True, bare=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("sync", [True, False])
def test_norm_and_clipping_of_shards(worlds, sync):
    theirs, norms = literal(False, limit=0.05)
    for ours, ours_norms in worlds(4).run(fsdp, settings={"max_grad_norm": 0.05}, equal=False, sync=sync):
        assert_close(ours, theirs)
        assert ours_norms == pytest.approx(norms, rel=1e-5)


def test_replicated_shards_are_not_counted_twice(worlds):
    theirs, norms = literal(False, limit=0.05)
    arguments = {"settings": {"max_grad_norm": 0.05}, "equal": False, "sync": True, "mesh_shape": (2, 2)}
    for ours, ours_norms in worlds(4).run(fsdp, **arguments):
        assert_close(ours, theirs)
        assert ours_norms == pytest.approx(norms, rel=1e-5)


def after_a_hook(rank):
    """Returns the parameters after a window, and those whose gradients' memory was kept."""
    model, taken, keep = sharded(), [], data_parallel.keep
    for module in (model.first, model.second, model):
        module.set_all_reduce_hook(lambda shards: shards.mul_(3.0))
    opt = wrapped(model, lambda params: torch.optim.SGD(params, lr=0.1), accum_steps=2)
    data_parallel.keep = taken.append
    try:
        for x, y, weight, _ in share(0, 4, rank, 2):
            opt.backward(mean_loss(model, x, y, False), weight=weight)
            opt.step()
    finally:
        data_parallel.keep = keep
    return contents(model, opt), sum(x.numel() for x in taken)


def test_memory_of_what_fsdp2_reduces_on_another_stream_is_kept_for_it(worlds):
    oracle = made()
    opt = torch.optim.SGD(oracle.parameters(), lr=0.3)
    big_batch(oracle, opt, 0, 4, sometimes=False)
    reduced = sum(p.numel() for p in oracle.parameters() if p.grad is not None)
    results = worlds(2).run(after_a_hook)
    assert sum(kept for _, kept in results) == 2 * reduced
    for ours, _ in results:
        assert_close(ours, contents(oracle, opt))


def counted(rank, split, weighed):
    """How often buffers are read for a norm, and the norms: ours and plain PyTorch's."""
    torch.manual_seed(2)
    model, size = Block(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if split:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    literal = Block()
    for p, q in zip(literal.parameters(), model.parameters(), strict=True):
        p.data.copy_(full(q))
    closes = {"window_weight": 2.0 * size} if weighed else {"accum_steps": 2}
    opt = wrapped(model, **closes, max_grad_norm=math.inf)
    reads, norms, stats = [], [], fa.ops.stats
    fa.ops.stats = lambda *args, **kwargs: reads.append(args) or stats(*args, **kwargs)
    try:
        for x, y, _, _ in share(0, 2, 0, 1) if split else share(0, 2 * size, rank, size):
            opt.backward((model(x) - y).square().sum(), weight=1.0)
            opt.step()
            assert "weight" not in opt.progress  # nobody has asked the other ranks
    finally:
        fa.ops.stats = stats
    batch = share(0, 2 if split else 2 * size, 0, 1)
    sum((literal(x) - y).square().sum() for x, y, _, _ in batch).div(len(batch)).backward()
    norms = [float(opt.last_window.grad_norm), float(nn.utils.get_total_norm([p.grad for p in literal.parameters()]))]
    return len(reads), norms


@pytest.mark.parametrize(
    ("split", "weighed"),
    [(True, False), (False, False), (False, True)],
    ids=["tensor parallelism", "FSDP2", "FSDP2, windows of a weight"],
)
def test_the_norm_of_shards_comes_with_the_adds(worlds, split, weighed):
    for reads, (ours, theirs) in worlds(2).run(counted, split=split, weighed=weighed):
        assert reads == 0 and ours == pytest.approx(theirs, rel=1e-5)


# -- dtypes ----------------------------------------------------------------------------------------


NARROW = r"adds up the gradient of parameter .* in torch\.bfloat16.*reduce_dtype=torch\.float32"


def low_precision(rank, kind):
    """Gradients that FSDP2 reduces in bf16 and we add in FP32: one large, then many small ones."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    if kind == "bf16 model":
        model = model.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy if kind == "mixed precision" else MixedPrecisionPolicy())
    settings = {"master_weights": True} if kind == "bf16 model" else {}
    with pytest.warns(RuntimeWarning, match=NARROW):
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), 64, **settings)
    before = full(masters_of(opt)[model.weight] if settings else model.weight)
    for number in range(64):
        (model(torch.ones(1, 4, dtype=model.weight.dtype)).sum() * (256.0 if number == 0 else 0.5)).backward()
        if number == 5:
            assert model.weight.grad.dtype == torch.float32 and isinstance(model.weight.grad, DTensor)
        opt.step()
        opt.zero_grad()
    after = full(masters_of(opt)[model.weight] if settings else model.weight)
    if settings:
        assert torch.equal(full(model.weight), after.bfloat16())
        state = opt.state_dict()
        fresh = fully_shard(nn.Linear(4, 4, bias=False).bfloat16())
        with pytest.warns(RuntimeWarning, match=NARROW):
            other = fa.AccumulatingOptimizer(torch.optim.SGD(fresh.parameters(), lr=1.0), 64, **settings)
        other.load_state_dict(state)
        assert torch.equal(full(next(iter(masters_of(other).values()))), after)
    return before - after


@pytest.mark.parametrize("kind", ["bf16 model", "mixed precision"])
def test_fp32_buffers_over_bf16_reductions(worlds, kind):
    exact = (256.0 + 63 * 0.5) / 64
    for step in worlds(2).run(low_precision, kind=kind):
        torch.testing.assert_close(step, torch.full((4, 4), exact), rtol=1e-6, atol=1e-6)
    assert (
        float(torch.tensor(256.0).bfloat16() + torch.tensor(0.5).bfloat16()) == 256.0
    )  # a sum in bf16 would lose the small ones


# -- what goes wrong -------------------------------------------------------------------------------


def with_a_bad_one(rank, nonfinite):
    """A gradient that is non-finite in one rank's shard only."""
    model = sharded()
    opt = wrapped(model, accum_steps=4, nonfinite=nonfinite)
    for window in range(2):
        for number, (x, y, weight, _) in enumerate(share(window, COUNT, rank, 2)):
            loss = mean_loss(model, x, y, False)
            if (window, number) == (0, 2):
                loss = loss + (model(x)[0, 2] * (float("nan") if rank else 1.0)) * 0.0
            opt.backward(loss, weight=weight)
            opt.step()
            opt.zero_grad()
        if window == 0:
            told = bool(opt.updated), opt.last_window.micro_batches
    return contents(model, opt), told


@pytest.mark.parametrize("nonfinite", ["skip_window", "skip_micro_batch"])
def test_the_ranks_skip_together(worlds, nonfinite):
    model = made()
    opt = sgd(model.parameters())
    if nonfinite == "skip_micro_batch":
        kept = [part for k, part in enumerate(share(0, COUNT, 0, 1)) if k // 2 != 2]
        total = sum(part[2] for part in kept)
        sum(mean_loss(model, x, y, False) * (w / total) for x, y, w, _ in kept).backward()
        opt.step()
    big_batch(model, opt, 1, COUNT, sometimes=False)
    for ours, told in worlds(2).run(with_a_bad_one, nonfinite=nonfinite):
        assert told == ((False, COUNT) if nonfinite == "skip_window" else (True, COUNT - 2))
        assert_close(ours, contents(model, opt))


def by_hand(rank, normalize):
    """Clips p.grad by hand at each window's end."""
    model = sharded()
    opt = wrapped(model, reduction="mean" if normalize else "none")
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, COUNT, rank, 2, not normalize):
            loss = mean_loss(model, x, y, False)
            if normalize:
                opt.backward(loss, weight=weight)
            else:
                (loss / 4).backward()
        if normalize:
            opt.normalize_()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
        opt.zero_grad()
    return contents(model, opt)


@pytest.mark.parametrize("normalize", [True, False])
def test_clipped_by_hand(worlds, normalize):
    theirs, _ = literal(not normalize, limit=0.05)
    for ours in worlds(2).run(by_hand, normalize=normalize):
        assert_close(ours, theirs)


def changed_by_hand(rank, split, factor):
    """The user replaces each running sum by a view of it, or by a tensor with its own memory."""
    torch.manual_seed(2)
    model, mesh = Block(), init_device_mesh("cpu", (2,))
    plain = copy.deepcopy(model)
    if split:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    opt, theirs = wrapped(model, accum_steps=2), sgd(plain.parameters())
    for number, (x, y, _, _) in enumerate(share(0, 2, 0, 1)):
        (model(x) - y).square().mean().backward()
        with pytest.warns(RuntimeWarning, match=r"p\.grad was written to") if number == 1 else nullcontext():
            opt.step()
        (plain(x) - y).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True) if number == 0 else ():
            p.grad = p.grad.detach() if factor == 1 else p.grad * factor
            q.grad *= factor
    for q in plain.parameters():
        q.grad /= 2
    theirs.step()
    assert_close([full(p) for p in model.parameters()], list(plain.parameters()), 1e-5)


@pytest.mark.parametrize("factor", [1, 0.5])
@pytest.mark.parametrize("split", [True, False], ids=["tensor parallel", "FSDP2"])
def test_a_running_sum_that_was_changed_by_hand(worlds, split, factor):
    worlds(2).run(changed_by_hand, split=split, factor=factor)


def nothing_on_one(rank):
    """Rank 0's micro-batch has weight 0, but FSDP2 adds up its gradient all the same."""
    model = sharded()
    opt = wrapped(model, accum_steps=1, reduction="sum")
    x, y, weight, _ = share(0, 2, rank, 2, equal=True)[0]
    opt.backward(mean_loss(model, x, y, False), weight=weight * rank)
    opt.step()
    return [full(p) for p in model.parameters()], float(opt.last_window.loss)


def test_a_weight_of_0_keeps_nothing_out_of_what_fsdp2_adds_up(worlds):
    model = made()
    opt = sgd(model.parameters())
    parts = [share(0, 2, rank, 2, equal=True)[0] for rank in range(2)]
    loss = sum(mean_loss(model, x, y, False) for x, y, _, _ in parts) / parts[1][2]
    loss.backward()
    opt.step()
    for ours, our_loss in worlds(2).run(nothing_on_one):
        assert_close(ours, list(model.parameters()))
        assert our_loss == pytest.approx(loss.item(), rel=1e-6)


def refused(rank):
    model = sharded()
    with pytest.raises(ValueError, match=r"buffer_device='cpu'.*DTensor"):
        wrapped(model, buffer_device="cpu")
    with pytest.raises(ValueError, match=r"shard=True.*are shards already"):
        wrapped(model, accum_steps=2, shard=True)
    with pytest.raises(ValueError, match=r"master_weights='split'.*DTensor; use master_weights=True"):
        wrapped(sharded(torch.bfloat16), master_weights="split")
    opt = wrapped(model, accum_steps=2)
    x, y, _weight, _ = share(0, 1, 0, 1)[0]
    with (
        pytest.raises(ValueError, match=r"weight=2: FSDP2 adds up.*opt\.backward\(loss, weight"),
        opt.micro_batch(weight=2),
    ):
        pass
    mean_loss(model, x, y, False).backward()
    opt.step()
    with pytest.warns(RuntimeWarning, match="set to None inside an open window"):
        model.zero_grad()
        opt.step()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(opt)


def test_what_cannot_be_meant_is_refused(worlds):
    worlds(2).run(refused)


def added_later(rank):
    """Adds a group of shards to a wrapper that has shards."""
    model = sharded()
    opt = fa.AccumulatingOptimizer(sgd([model.second.weight, model.scale]), accum_steps=COUNT // 2)
    opt.add_param_group({"params": list(model.first.parameters())})
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, COUNT, rank, 2):
            opt.backward(mean_loss(model, x, y, False), weight=weight)
            opt.step()
            opt.zero_grad()
    return [full(p) for p in model.parameters()]


def test_groups_of_shards_that_are_added_later(worlds):
    model = made()
    opt = sgd(model.parameters())
    for window in range(WINDOWS):
        big_batch(model, opt, window, COUNT, sometimes=False)
    for ours in worlds(2).run(added_later):
        assert_close(ours, list(model.parameters()))


class Keeping(torch.optim.SGD):
    """Keeps every gradient without copying it, and beside it what it was."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("kept", []).append((p.grad, p.grad.full_tensor().clone()))
        return super().step()


def kept(rank):
    model = sharded()
    opt = fa.AccumulatingOptimizer(Keeping(model.parameters(), lr=0.1), 1)
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, 2, rank, 2, True):
            opt.backward(mean_loss(model, x, y, False), weight=weight)
            opt.step()
    kept = [pair for entry in opt.state.values() for pair in entry["kept"]]
    return [torch.equal(grad.full_tensor(), was) for grad, was in kept]


def test_gradients_of_shards_that_the_inner_optimizer_keeps_stay_what_they_were(worlds):
    for same in worlds(2).run(kept):
        assert same and all(same)


def interrupted(rank, at, folder):
    model = sharded()
    opt = wrapped(model, accum_steps=4)
    number = 0
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, COUNT, rank, 2):
            if number == at:
                saved = {"model": model.state_dict(), "opt": opt.state_dict()}
                torch.save(saved, folder / f"{rank}")
                model = sharded()
                opt = wrapped(model, accum_steps=4)
                saved = torch.load(folder / f"{rank}", weights_only=False)
                model.load_state_dict(saved["model"])
                opt.load_state_dict(saved["opt"])
            opt.backward(mean_loss(model, x, y, False), weight=weight)
            opt.step()
            opt.zero_grad()
            number += 1
    return contents(model, opt)


def test_checkpoints_of_shards_go_on_bit_by_bit(worlds, tmp_path):
    straight = worlds(2).run(interrupted, at=-1, folder=tmp_path)
    for ours, theirs in zip(worlds(2).run(interrupted, at=6, folder=tmp_path), straight):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
