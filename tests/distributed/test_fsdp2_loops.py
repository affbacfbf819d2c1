"""FSDP2 with unusual orders of calls, held-back gradients, and outputs that are not tensors."""

import dataclasses
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, big_batch, full, made, mean_loss, micro_batches, one_batch, sgd, share, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def in_other_orders(rank, how):
    model = made()
    fully_shard([model.first, model.second], reshard_after_forward=how != "late")
    fully_shard(model, reshard_after_forward=how != "late")
    inner = sgd(model.parameters())
    if how == "late":
        with torch.no_grad():
            model(torch.ones(1, 12))
    opt = fa.AccumulatingOptimizer(inner, None if how in ("zero after forward", "eval between") else 2)
    for window in range(2):
        losses = []
        for x, y, weight, _ in share(window, 4, rank, 2, how != "late" and how != "weight once"):
            loss = mean_loss(model, x, y, False)
            if how == "weight once":
                opt.backward(loss / 2, weight=weight)
                opt.backward(mean_loss(model, x, y, False) / 2)
            elif how in ("two forwards", "zero after forward", "eval between"):
                losses.append(loss)
                continue
            else:
                opt.backward(loss, weight=weight)
            opt.step()
            opt.zero_grad()
        if how == "two forwards":
            for loss in losses:
                loss.backward()
                opt.step()
        if how == "zero after forward":
            opt.zero_grad()
            (sum(losses) / 2).backward()
            opt.step()
        if how == "eval between":
            (sum(losses) / 2).backward()
            model(torch.ones(1, 12))
            opt.normalize_()
            assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()) > 0
            opt.step()
            opt.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize("how", ["zero after forward", "two forwards", "eval between", "weight once", "late"])
def test_fsdp2_in_other_orders(worlds, how):
    model = made()
    opt = sgd(model.parameters())
    for window in range(2):
        opt.zero_grad()
        parts = share(window, 4, 0, 1, how not in ("late", "weight once"))
        total = sum(part[2] for part in parts)
        sum(mean_loss(model, x, y, False) * (w / total) for x, y, w, _ in parts).backward()
        opt.step()
    for ours in worlds(2).run(in_other_orders, how=how):
        assert_close(ours, list(model.parameters()))


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list


class Returning(nn.Module):
    """Returns a dataclass nested in other containers."""

    def __init__(self):
        super().__init__()
        self.net = made()

    def forward(self, x, use):
        return {"all": [Output(self.net(x, use), [None])]}


def in_a_dataclass(rank):
    module = fully_shard(Returning())
    opt = wrapped(module.net, accum_steps=2)
    for x, y, weight, _ in share(0, 4, rank, 2):
        opt.backward((module(x, False)["all"][0].logits - y).square().mean(), weight=weight)
        opt.step()
    return [p.full_tensor().detach() for p in module.parameters()]


def with_an_output_dtype(rank, call, settings):
    model = made()
    fully_shard([model.first, model.second])
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    opt = wrapped(model, **settings)
    for window in range(2):
        for x, y, *_ in share(window, 4, rank, 2, equal=True):
            loss = mean_loss(model, x, y, False)
            assert loss.dtype == torch.float64
            opt.backward(loss) if call == "opt.backward" else loss.backward()
            if settings:
                opt.step()
        if not settings:
            opt.step()
        opt.zero_grad()
    return [full(p) for p in model.parameters()], opt.last_window


@pytest.mark.parametrize("call", ["opt.backward", "loss.backward"])
@pytest.mark.parametrize(
    "settings", [{}, {"accum_steps": 2}, {"accum_steps": 2, "nonfinite": "skip_micro_batch"}], ids=str
)
def test_the_roots_output_in_another_dtype(worlds, call, settings):
    """FSDP2 hooks the output before it casts it.

    So it queues the reduction of what is left at the end of backward after our hook.
    """
    model = made()
    opt = sgd(model.parameters())
    for window in range(2):
        with torch.no_grad():
            loss = sum(float(mean_loss(model, x, y, False)) for x, y, *_ in micro_batches(window, 4, True)) / 4
        big_batch(model, opt, window, 4, equal=True, sometimes=False)
    for params, last in worlds(2).run(with_an_output_dtype, call=call, settings=settings):
        assert_close(params, [p.detach() for p in model.parameters()])
        assert last.micro_batches == 4
        if call == "opt.backward":
            assert float(last.loss) == pytest.approx(loss)


def evaluated_before_the_step(rank, closes):
    model = made()
    fully_shard([model.first, model.second])
    fully_shard(model)
    opt = wrapped(model, accum_steps=None if closes == "step" else 4)
    losses = []
    for window in range(2):
        parts = share(window, 4, rank, 2)
        for x, y, weight, _ in parts:
            opt.backward(mean_loss(model, x, y, False), weight=weight)
            if closes == "flush":
                opt.step()
        with torch.no_grad():
            model(parts[0][0])  # leaves the root's parameters gathered
        opt.step() if closes == "step" else opt.flush()
        with torch.no_grad():
            losses.append([float(mean_loss(model, x, y, False)) for x, y, *_ in micro_batches(window, 4)])
        model.reshard()
    return [full(p) for p in model.parameters()], losses


@pytest.mark.parametrize("closes", ["step", "flush"])
def test_an_evaluation_just_before_the_step_keeps_no_old_weights(worlds, closes):
    """In plain PyTorch the next forward uses the root's parameters of before the step."""
    model = made()
    opt = sgd(model.parameters())
    theirs = []
    for window in range(2):
        big_batch(model, opt, window, 4, sometimes=False)
        with torch.no_grad():
            theirs.append([float(mean_loss(model, x, y, False)) for x, y, *_ in micro_batches(window, 4)])
    for params, losses in worlds(2).run(evaluated_before_the_step, closes=closes):
        assert_close(params, [p.detach() for p in model.parameters()])
        assert losses == [pytest.approx(window, rel=1e-4) for window in theirs]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before torch 2.13 FSDP2 does not look into dataclasses")
def test_fsdp2_that_returns_a_dataclass(worlds):
    model = made()
    opt = sgd(model.parameters())
    big_batch(model, opt, 0, 4, sometimes=False)
    for ours in worlds(2).run(in_a_dataclass):
        assert_close(ours, list(model.parameters()))


def unreduced(rank, call):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(made(), mesh=mesh if call == "set_requires_all_reduce" else None)
    opt = wrapped(model, accum_steps=2)
    x, y, weight, _ = share(0, 1, 0, 1)[0]
    getattr(model, call)(False)
    opt.backward(mean_loss(model, x, y, False), weight=weight)
    opt.step()
    for end in (opt.flush, opt.state_dict):
        with pytest.raises(RuntimeError, match=rf"still holds gradients.*{call}\(True\)"):
            end()
    opt.reset()
    getattr(model, call)(True)
    for _ in range(2):
        opt.backward(mean_loss(model, x, y, False), weight=weight)
        opt.step()
    plain = made()
    theirs = sgd(plain.parameters())
    mean_loss(plain, x, y, False).backward()
    theirs.step()
    assert_close([p.full_tensor() for p in model.parameters()], list(plain.parameters()))
    opt.backward(mean_loss(model, x, y, False), weight=weight)
    with pytest.raises(RuntimeError, match=r"use opt\.backward\(loss\) for each"):
        mean_loss(model, x, y, False).backward()


@pytest.mark.parametrize("call", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_gradients_that_fsdp2_holds_back(worlds, call):
    worlds(2).run(unreduced, call=call)


def owned_and_held_back(rank):
    """Passes whose gradients are held back are micro-batches; those for an input's are not."""
    model = made()
    fully_shard(model)
    opt = wrapped(model)
    for window in range(2):
        for number, (x, y, _, _) in enumerate(share(window, 6, rank, 2, True)):
            model.set_requires_gradient_sync(number == 2)
            mean_loss(model, x, y, False).backward()
            seen = x.clone().requires_grad_()
            torch.autograd.grad(model(seen).sum(), seen)
            model(seen).sum().backward(inputs=seen)
        opt.step()
        opt.zero_grad()
    return [full(p) for p in model.parameters()], opt.last_window.micro_batches


def test_gradients_that_fsdp2_holds_back_in_windows_of_the_caller(worlds):
    model = made()
    opt = sgd(model.parameters())
    for window in range(2):
        big_batch(model, opt, window, 6, True, sometimes=False)
    for ours, count in worlds(2).run(owned_and_held_back):
        assert_close(ours, list(model.parameters()))
        assert count == 6


def held_back_and_bad(rank, bad, synced):
    model = made()
    fully_shard(model)
    opt = wrapped(model, accum_steps=4, nonfinite="skip_micro_batch")
    for number, (x, y, weight, _) in enumerate(share(0, 8, rank, 2)):
        model.set_requires_gradient_sync(number in synced)
        loss = mean_loss(model, x, y, False)
        opt.backward(loss * float("nan") if number == bad and rank == 0 else loss, weight=weight)
        opt.step()
    assert opt.updated is (len(synced) > 1)
    return [p.full_tensor().detach() for p in model.parameters()], opt.last_window


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_micro_batches_that_fsdp2_holds_back_are_left_out_with_a_bad_one(worlds, bad):
    kept = [(x, y, w, False) for number, (x, y, w, _) in enumerate(share(0, 8, 0, 1)) if number // 4 != bad // 2]
    model = made()
    opt = sgd(model.parameters())
    one_batch(model, opt, kept)
    weight = sum(weight for *_, weight, _ in kept)
    with torch.no_grad():
        loss = sum(float(mean_loss(made(), x, y, False)) * weight for x, y, weight, _ in kept) / weight
    for ours, last in worlds(2).run(held_back_and_bad, bad=bad, synced=(1, 3)):
        assert_close(ours, list(model.parameters()))
        assert (last.micro_batches, last.weight, last.nonfinite) == (4, weight, 4)
        assert float(last.loss) == pytest.approx(loss)
    for ours, last in worlds(2).run(held_back_and_bad, bad=bad, synced=(3,)):
        assert_close(ours, list(made().parameters()), 0)
        assert (last.micro_batches, last.weight) == (0, 0)


def held_back_beside(rank, frozen):
    model = made()
    model.requires_grad_(not frozen)
    fully_shard(model.second.requires_grad_(True))
    opt = wrapped(model, accum_steps=2, nonfinite="skip_micro_batch", process_group=torch.distributed.group.WORLD)
    model.second.set_requires_gradient_sync(False)
    (x, y, weight, _), *_ = share(0, 2, rank, 2)
    with nullcontext() if frozen else pytest.raises(RuntimeError, match="which is not FSDP2's, are added at once"):
        opt.backward(mean_loss(model, x, y, False), weight=weight)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_bad_micro_batch_could_not_take_with_it_is_an_error(worlds, frozen):
    """FSDP2 holds back the gradients of one half; the other's, unless frozen, are added at once."""
    worlds(2).run(held_back_beside, frozen=frozen)


def two_sgds(model, beside):
    first = [p for n, p in model.named_parameters() if (n.startswith("first") if beside else p.ndim == 2)]
    theirs = {id(p) for p in first}
    second = [p for p in model.parameters() if id(p) not in theirs]
    return torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.3)


def two_wrappers(rank, beside, parts, held):
    """For matrices and for vectors (as Muon and AdamW), or for what FSDP2 shards and the rest."""
    model = made()
    fully_shard(model.first)
    if not beside:
        fully_shard(model)
    group = dist.group.WORLD if beside else None
    first, second = two_sgds(model, beside)
    first = fa.AccumulatingOptimizer(first, accum_steps=2)
    second = fa.AccumulatingOptimizer(second, accum_steps=2, process_group=group)
    for window in range(2):
        for number, (x, y, weight, _) in enumerate(share(window, 4, rank, 2)):
            (model.first if beside else model).set_requires_gradient_sync(number == 1 or not held)
            first.backward(mean_loss(model, x, y, False) / parts, weight=weight)
            if parts == 2:
                first.backward(mean_loss(model, x, y, False) / parts)
            first.step()
            second.step()
        told = [float(opt.last_window.weight) for opt in (first, second)]
    return [full(p) for p in model.parameters()], told


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("beside, parts", [(False, 1), (True, 1), (False, 2)])
def test_a_weight_in_the_loss_is_that_of_all_wrappers(worlds, beside, parts, held):
    model = made()
    opts = two_sgds(model, beside)
    for window in range(2):
        batch = share(window, 4, 0, 1)
        total = sum(w for *_, w, _ in batch)
        model.zero_grad()
        sum(mean_loss(model, x, y, False) * (w / total) for x, y, w, _ in batch).backward()
        for opt in opts:
            opt.step()
    for ours, told in worlds(2).run(two_wrappers, beside=beside, parts=parts, held=held):
        assert_close(ours, list(model.parameters()))
        assert told == [total, total]


def normalised_beside(rank):
    model = made()
    fully_shard(model)
    first, second = two_sgds(model, False)
    opts = [fa.AccumulatingOptimizer(first, 1), fa.AccumulatingOptimizer(second, 1, reduction="none")]
    x, y, _, _ = share(0, 1, 0, 1)[0]
    with pytest.raises(RuntimeError, match=r"multiplied by weight=2 for another wrapper.*give both the same reduction"):
        opts[0].backward(mean_loss(model, x, y, False), weight=2)


def test_a_weight_in_the_loss_of_a_wrapper_that_takes_none_is_an_error(worlds):
    worlds(2).run(normalised_beside)


def told_beside(rank):
    model = made()
    fully_shard(model.first)
    first, second = two_sgds(model, True)
    sharded, beside = (
        fa.AccumulatingOptimizer(first, 1),
        fa.AccumulatingOptimizer(second, 1, process_group=dist.group.WORLD),
    )
    x, y, _, _ = share(0, 1, 0, 1)[0]
    with pytest.raises(
        RuntimeError, match=r"has weight=2, which was given to another wrapper, but FSDP2 needs it in the loss"
    ):
        beside.backward(mean_loss(model, x, y, False), weight=2)
    assert not sharded.updated


def test_a_weight_that_fsdp2s_wrapper_was_not_told_is_an_error(worlds):
    worlds(2).run(told_beside)


def built_after_a_forward(rank):
    """The root does not reshard after a forward, so the module then has other parameters."""
    model = made()
    fully_shard([model.first, model.second])
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, 12))
    with pytest.raises(ValueError, match=r"FSDP2 has gathered for a forward.*model\.reshard\(\)"):
        wrapped(model)
    model.reshard()
    wrapped(model)


def test_parameters_that_fsdp2_has_gathered_are_refused(worlds):
    worlds(2).run(built_after_a_forward)


def held_back_in_a_block(rank, block):
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    opt = wrapped(net, accum_steps=2)
    fa.accumulate_batchnorm(net)
    for number, x in enumerate(torch.arange(48.0).view(2, 2, 4, 3)[rank]):
        net.set_requires_gradient_sync(number == 1)
        with opt.micro_batch() if block else nullcontext():
            net(x).square().mean().backward()
        opt.step()
    return net[0].running_mean.tolist(), float(opt.last_window.micro_batches)


def test_a_block_whose_backward_fsdp2_holds_back_is_not_empty(worlds):
    world = worlds(2)
    assert world.run(held_back_in_a_block, block=True) == world.run(held_back_in_a_block, block=False)


def bad_after_a_window_was_dropped(rank, by):
    """A window is dropped while FSDP2 holds gradients back.

    In the next one, some that it holds back come with a bad one.
    """
    model = made()
    fully_shard(model)
    opt = wrapped(model, accum_steps=4, nonfinite="skip_micro_batch")
    parts = iter(share(0, 18, rank, 2))

    def run(reduces, factor=1.0):
        model.set_requires_gradient_sync(reduces)
        x, y, weight, _ = next(parts)
        opt.backward(mean_loss(model, x, y, False) * factor, weight=weight)
        opt.step()

    run(True)
    if by == "load_state_dict":
        state = opt.state_dict()
        run(True)
    run(False)
    opt.reset() if by == "reset" else opt.load_state_dict(state)
    run(False)
    run(True, float("nan") if rank == 0 else 1.0)
    while not opt.updated:
        run(True)
    return [full(p) for p in model.parameters()], opt.last_window.micro_batches, float(opt.last_window.weight)


@pytest.mark.parametrize("by, kept", [("reset", [4, 5]), ("load_state_dict", [0, 5])])
def test_what_fsdp2_held_back_of_a_dropped_window_does_not_count_in_the_next_one(worlds, by, kept):
    """``kept``: the micro-batches of each rank that make the window."""
    batch = [part for rank in range(2) for number, part in enumerate(share(0, 18, rank, 2)) if number in kept]
    batch = [(x, y, weight, False) for x, y, weight, _ in batch]
    model = made()
    one_batch(model, sgd(model.parameters()), batch)
    for ours, count, weight in worlds(2).run(bad_after_a_window_was_dropped, by=by):
        assert_close(ours, list(model.parameters()))
        assert (count, weight) == (4, sum(weight for *_, weight, _ in batch))
