"""What else scripts do: several wrappers, DDP's own options, changes to p.grad, other call orders.

Each case was once wrong.
"""

import datetime
import threading
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, big_batch, contents, made, mean_loss, one_batch, sgd, share, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

DDP = nn.parallel.DistributedDataParallel


def one(value=1.0, size=2):
    return nn.Parameter(torch.full((size,), value))


# -- windows that a rank ends alone ----------------------------------------------------------------


def last_is_bad(rank, how):
    """The bad micro-batch is the last of its window, whose sums are sent at once."""
    model = made()
    module = DDP(model, find_unused_parameters=True) if how == "owned" else model
    settings = {"reduction": "none"} if how == "owned" else {"accum_steps": 2}
    group = None if how == "owned" else dist.group.WORLD
    if how == "fsdp2":
        fully_shard(model)
        group = None
    opt = wrapped(model, process_group=group, nonfinite="skip_micro_batch", **settings)
    for number, (x, y, _, _) in enumerate(share(0, 4, rank, 2, True)):
        loss = mean_loss(module, x, y, False) / (2 if how == "owned" else 1)
        if number == 1 and rank == 1:
            loss = loss * float("nan")
        loss.backward()
        if how != "owned":
            opt.step()
            opt.zero_grad()
    if how == "owned":
        opt.step()
    assert opt.updated and opt.last_window.micro_batches == (2 if how == "fsdp2" else 3)
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


@pytest.mark.parametrize("how", ["counted", "owned", "fsdp2"])
def test_a_bad_last_micro_batch_is_left_out(worlds, how):
    model = made()
    opt = sgd(model.parameters())
    parts = [share(0, 4, rank, 2, True) for rank in range(2)]
    kept = [parts[0][0], parts[1][0], *([] if how == "fsdp2" else [parts[0][1]])]
    for x, y, _, _ in kept:
        (mean_loss(model, x, y, False) / (4 if how == "owned" else len(kept))).backward()
    opt.step()
    for ours in worlds(2).run(last_is_bad, how=how):
        assert_close(ours, list(model.parameters()))


def weighed_and_flushed(rank):
    """With window_weight, one rank runs out of data; its flush() ends the window for all."""
    p = one()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), window_weight=100, process_group=dist.group.WORLD)
    for _ in range(2 - rank):
        opt.backward((p * (rank + 1)).sum(), weight=3)
        opt.step()
    if rank == 1:
        opt.flush()
    return p.detach(), float(opt.last_window.weight)


def test_a_flush_ends_a_weighed_window_on_all_ranks(worlds):
    for p, weight in worlds(2).run(weighed_and_flushed):
        assert weight == 9 and torch.allclose(p, torch.full((2,), 1 - (3 + 3 + 6) / 9))


def parts_of(rank):
    return share(0, 10, rank, 2)[: 5 - 2 * rank]


def weighed_without_data(rank):
    """The other way to go on: to take part in every step() with nothing."""
    model = made()
    opt = wrapped(model, window_weight=20.0, process_group=dist.group.WORLD)
    parts, weights = parts_of(rank), []
    for number in range(5):
        if number < len(parts):
            x, y, weight, use = parts[number]
            opt.backward(mean_loss(model, x, y, use), weight=weight)
        else:
            with opt.micro_batch(weight=0):
                pass
        opt.step()
        if opt.updated:
            weights.append(float(opt.last_window.weight))
    opt.flush()
    return contents(model, opt), [*weights, float(opt.last_window.weight)]


def test_a_rank_without_data_takes_part_in_weighed_windows(worlds):
    model, window, weights = made(), [], []
    opt = sgd(model.parameters())
    for number in range(5):
        window += [part for rank in range(2) for part in parts_of(rank)[number : number + 1]]
        if sum(weight for *_, weight, _ in window) >= 20 or number == 4:
            weights.append(sum(weight for *_, weight, _ in window))
            one_batch(model, opt, window)
            window = []
    assert len(weights) > 1
    for ours, theirs in worlds(2).run(weighed_without_data):
        assert_close(ours, contents(model, opt))
        assert theirs == weights


def unequal_with_batch_norm(rank):
    torch.manual_seed(3)
    module = DDP(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    opt = wrapped(module, accum_steps=2)
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*BatchNorm layer")
        for _ in range(2 if rank == 0 else 0):
            opt.backward(module(torch.randn(3, 4)).square().mean())
            opt.step()
        if rank == 1:
            opt.flush()
    return module.module[0].running_mean


def test_a_rank_without_data_gets_the_batch_statistics_too(worlds):
    first, second = worlds(2).run(unequal_with_batch_norm)
    assert torch.equal(first, second) and first.abs().sum() > 0


# -- several wrappers ------------------------------------------------------------------------------


def two_wrappers(rank):
    """Two wrappers, one group, and one backward for both, in an order that depends on the rank."""
    a, b = [one(), one()], [one(), one()]
    group = dist.group.WORLD
    first = fa.AccumulatingOptimizer(torch.optim.SGD(a, lr=1.0), 1, process_group=group)
    second = fa.AccumulatingOptimizer(torch.optim.SGD(b, lr=1.0), 1, process_group=group)
    loss = (a[0] * 1).sum() + (b[0] * 100 + b[1] * 100).sum()
    if rank == 0:
        loss = loss + (a[1] * 4).sum()
    loss.backward()
    for opt in (first, second):
        opt.step()
    return [float(p[0].detach()) for p in (*a, *b)]


def test_two_wrappers_do_not_mix_their_sums(worlds):
    for found in worlds(2).run(two_wrappers):
        assert found == [1 - 1, 1 - 2, 1 - 100, 1 - 100]


def on_some_ranks(rank):
    """First a wrapper that the other ranks do not build, then one that all of them build."""
    alone = dist.new_group([0])
    if rank == 0:
        fa.AccumulatingOptimizer(torch.optim.SGD([one()], lr=1.0), 1, process_group=alone)
    both = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))
    p = one()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, process_group=both)
    opt.backward(p.sum() * 2 * rank)
    opt.step()
    return p.detach()


def test_a_wrapper_that_some_ranks_build_is_in_nobodys_way(worlds):
    for p in worlds(2).run(on_some_ranks):
        assert torch.equal(p, torch.zeros(2))


def shared_module(rank, told):
    """Two wrappers over one DDP module, dropped in the order in which they were made."""
    model = made()
    module = DDP(model, find_unused_parameters=True)
    rest = [p for name, p in model.named_parameters() if not name.startswith("second") and p.requires_grad]
    first = fa.AccumulatingOptimizer(sgd(model.second.parameters()), 2)
    second = fa.AccumulatingOptimizer(sgd(rest), 2)
    for x, y, weight, _ in share(0, 4, rank, 2):
        loss = mean_loss(module, x, y, False)
        if told == "both":
            with first.micro_batch(weight=weight), second.micro_batch(weight=weight):
                loss.backward()
        else:
            first.backward(loss, weight=weight)
        first.step()
        second.step()
    assert module.require_backward_grad_sync
    found = [p.detach().clone() for p in model.parameters()]
    del first, second
    assert module.require_backward_grad_sync
    model.zero_grad()
    x, y, _, _ = share(1 + rank, 1, 0, 1)[0]
    mean_loss(module, x, y, False).backward()  # now DDP reduces again itself
    return found, model.second.weight.grad.clone()


@pytest.mark.parametrize("told", ["both", "one"])
def test_two_wrappers_over_one_ddp_module(worlds, told):
    model = made()
    opt = sgd(model.parameters())
    big_batch(model, opt, 0, 4, sometimes=False)
    (ours, grad), (others, other_grad) = worlds(2).run(shared_module, told=told)
    assert_close(ours, list(model.parameters()))
    assert_close(others, list(model.parameters()))
    assert torch.equal(grad, other_grad)


def partly(rank):
    model = made()
    module = DDP(model, find_unused_parameters=True)
    opt = wrapped(model.first, accum_steps=1)
    x, y, _, _ = share(0, 1, 0, 1)[0]
    with pytest.raises(RuntimeError, match=r"parameter scale of the .* belongs to no AccumulatingOptimizer \(4 such"):
        mean_loss(module, x, y, False).backward()
    del opt


def test_parameters_that_no_wrapper_gathers_are_told_of(worlds):
    worlds(2).run(partly)


def ddp_options(rank):
    model = made()
    with pytest.raises(ValueError, match="static_graph=True"):
        wrapped(DDP(model, static_graph=True))
    module = DDP(model, find_unused_parameters=True)
    module.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(ValueError, match="communication hook"):
        wrapped(module)


def test_what_ddp_cannot_do_without_its_reduction_is_refused(worlds):
    worlds(2).run(ddp_options)


# -- changes to p.grad -----------------------------------------------------------------------------


def clipped_with_one_unused(rank):
    model = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
    for p in model.parameters():
        nn.init.ones_(p)
    module = DDP(Both(model), find_unused_parameters=True)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), reduction="none")
    module(torch.ones(1, 2), rank == 0).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    opt.step()
    return norm, contents(model, opt)


class Both(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, use_b):
        y = self.layers["a"](x).sum()
        return y + 3 * self.layers["b"](x).sum() if use_b else y


def test_clipping_by_hand_sees_what_other_ranks_have(worlds):
    grad = torch.tensor([1.0, 1.0, 1.5, 1.5])  # the mean over two ranks
    expected = 1 - 0.5 * grad / grad.norm()
    for norm, (a, b) in worlds(2).run(clipped_with_one_unused):
        assert norm == pytest.approx(float(grad.norm()))
        torch.testing.assert_close(torch.cat([a[0], b[0]]), expected, rtol=1e-5, atol=1e-5)


def used_by_one_rank(rank):
    """After the first window, one rank uses layer b. Sums of 16-bit buffers are sent at the end."""
    model = Both(nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)}).to(torch.bfloat16))
    for p in model.parameters():
        nn.init.zeros_(p)
    module = DDP(model, find_unused_parameters=True)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), reduction="none", buffer_dtype=None)
    found = []
    for window in range(3):
        factor = 32 if window == 0 else 1
        (factor * module(torch.ones(1, 2, dtype=torch.bfloat16), window == 0 or rank == 0)).backward()
        opt.step()
        found.append(model.layers["b"].weight[0, 0].item())
        opt.zero_grad()
    return found


def test_narrow_buffers_of_what_a_rank_has_not_used_hold_nothing(worlds):
    for found in worlds(2).run(used_by_one_rank):
        assert found == [-3 * 32, -3 * (32 + 0.5), -3 * (32 + 0.5 + 0.5)]


def new_group_of_other_values(rank):
    p, q = one(), one(1.0 + rank)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, process_group=dist.group.WORLD)
    p.sum().backward()
    opt.step()
    opt.add_param_group({"params": [q]})
    (p + q).sum().backward()
    with pytest.raises(RuntimeError, match="hold different values"):
        opt.step()


def test_groups_that_are_added_are_compared_too(worlds):
    worlds(2).run(new_group_of_other_values)


def new_group_of_other_shapes(rank):
    p, q = one(), one(size=2 + rank)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="must have the same parameters"):
        opt.add_param_group({"params": [q]})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [one()]})  # training can go on
    p.sum().backward()
    opt.step()
    return p.detach(), len(opt.state_dict()["fusedaccum"]["shapes"])


def test_a_group_that_cannot_be_added_leaves_nothing_behind(worlds):
    for p, count in worlds(2).run(new_group_of_other_shapes):
        assert torch.equal(p, torch.zeros(2)) and count == 2


def new_group_of_ranks(rank, kind, named):
    """Added to a wrapper without ranks, which refuses, or with a process_group, which takes it."""
    module = nn.Linear(2, 1, bias=False)
    module = fully_shard(module) if kind == "FSDP2" else nn.parallel.DistributedDataParallel(module)
    group = {"params": list(module.parameters())}
    p = one()
    inner = torch.optim.SGD([p], lr=1.0)
    if named:
        opt = fa.AccumulatingOptimizer(inner, 1, process_group=dist.group.WORLD)
        opt.add_param_group(group)
        before = whole(module).clone()
        opt.backward(module(torch.full((1, 2), 1.0 + rank)).sum() + p.sum())
        opt.step()
        return whole(module) - before
    opt = fa.AccumulatingOptimizer(inner, 1)
    with pytest.raises(ValueError, match=rf"param_groups\[1\]\['params'\]\[0\] is in an? {kind} module"):
        opt.add_param_group(group)
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [one()]})  # training can go on


def whole(module):
    (p,) = module.parameters()
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


@pytest.mark.parametrize("kind", ["FSDP2", "DistributedDataParallel"])
def test_a_group_of_ranks_is_not_added_to_a_wrapper_of_one(worlds, kind):
    worlds(2).run(new_group_of_ranks, kind=kind, named=False)
    for step in worlds(2).run(new_group_of_ranks, kind=kind, named=True):
        assert torch.equal(step, torch.full((1, 2), -1.5))


def parameters_that_leave(rank, shard):
    """The first layer's bias leaves after a window, and the others change places.

    The optimizer's state stays where it is.
    """
    model = made()
    opt = wrapped(model, accum_steps=2, process_group=dist.group.WORLD, shard=shard)
    threads = None
    for window in range(4):
        (group,) = opt.param_groups
        for i, (x, y, w, use) in enumerate(share(window, 4, rank, 2)):
            opt.backward(mean_loss(model, x, y, use), weight=w)
            if i == 0:
                with pytest.raises(RuntimeError, match="inside a window that ranks share"):
                    opt.param_groups = [{**group, "params": group["params"][::-1]}]
            opt.step()
        kept = [p for p in group["params"] if p is not model.first.bias]
        if window == 0:
            model.first.bias.requires_grad_(False)
            opt.param_groups = [{**group, "params": kept[::-1]}]
            threads = threading.active_count()
            continue
        wrong = {
            "shapes": [one(size=2 + rank), *kept],
            "order": kept[:: -1 if rank else 1],
            "additions": [*kept, one()] if rank else kept[::-1],
        }
        for params in wrong.values():
            with pytest.raises(ValueError, match="must have the same parameters in the same order"):
                opt.param_groups = [{**group, "params": params}]
            assert opt.param_groups[0] is group
        model.scale.requires_grad_(rank == 0)
        with pytest.raises(ValueError, match="must have the same parameters in the same order"):
            opt.param_groups = [{**group, "params": kept[::-1]}]
        model.scale.requires_grad_(True)
        opt.param_groups = [{**group, "params": kept[::-1]}]
    assert opt.progress["window"] == 4 and threading.active_count() == threads
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("shard", [False, True])
def test_parameters_that_leave_between_windows(worlds, shard):
    model = made()
    opt = sgd(model.parameters())
    for window in range(4):
        big_batch(model, opt, window, 4)
        if window == 0:
            model.first.bias.requires_grad_(False)
            model.first.bias.grad = None
            opt.param_groups[0]["params"] = [p for p in opt.param_groups[0]["params"] if p is not model.first.bias]
    for ours in worlds(2).run(parameters_that_leave, shard=shard):
        assert_close(ours, list(model.parameters()))


def refused_removal(rank):
    model = made()
    opt = wrapped(model, accum_steps=2, process_group=dist.group.WORLD)
    for window in range(2):
        for x, y, w, use in share(window, 4, rank, 2):
            opt.backward(mean_loss(model, x, y, use), weight=w)
            opt.step()
        (group,) = opt.param_groups
        with pytest.raises(ValueError, match="must have the same parameters in the same order"):
            opt.param_groups = [{**group, "params": group["params"][1 + rank :]}]
    return [p.detach() for p in model.parameters()]


def test_what_a_refused_assignment_would_have_removed_is_trained_on(worlds):
    model = made()
    opt = sgd(model.parameters())
    for window in range(2):
        big_batch(model, opt, window, 4)
    for ours in worlds(2).run(refused_removal):
        assert_close(ours, list(model.parameters()))


def shards_that_leave(rank):
    """FSDP2 goes on to average their gradients over the ranks, and to add these to p.grad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    opt = fa.AccumulatingOptimizer(sgd([{"params": layer.parameters()} for layer in model]), 1)
    for window in range(2):
        ((x, y, _, _),) = share(window, 2, rank, 2, equal=True)
        (model(x) - y).square().mean().backward()
        opt.step()
        if window == 0:
            opt.param_groups = opt.param_groups[1:]
    assert opt.updated
    return [(p.grad if i < 2 else p).full_tensor().detach() for i, p in enumerate(model.parameters())]


def test_shards_may_leave(worlds):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))
    opt = sgd([{"params": layer.parameters()} for layer in model])
    for window in range(2):
        opt.zero_grad()
        parts = [share(window, 2, rank, 2, equal=True)[0] for rank in range(2)]
        (sum((model(x) - y).square().mean() for x, y, _, _ in parts) / 2).backward()
        if window == 1:
            kept = [p.grad.clone() for p in model[0].parameters()]
            model[0].zero_grad()
        opt.step()
    for ours in worlds(2).run(shards_that_leave):
        assert_close(ours, [*kept, *model[1].parameters()])
