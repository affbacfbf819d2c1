"""PyTorch's ways over ranks that the guide leaves out: they work, or the error says what to do."""

import contextlib
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, made, mean_loss, sgd, share, wrapped
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

DDP = nn.parallel.DistributedDataParallel


def fsdp1(rank, strategy, original, first):
    model = made()
    model.frozen.requires_grad_(True)  # a flat parameter requires gradients as a whole or not at all
    opt = None if first else wrapped(model, accum_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch deprecates some of it
        module = FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy[strategy], use_orig_params=original, device_id=torch.device("cpu")
        )
    if opt is None:
        with pytest.raises(ValueError, match=r"parameter param_groups\[0\]\['params'\]\[0\] is in .*FSDP1.*use FSDP2"):
            wrapped(module, accum_steps=2)
        opt = wrapped(nn.Linear(2, 1))
        with pytest.raises(ValueError, match="FSDP1"):
            opt.add_param_group({"params": list(module.parameters())})
    else:
        x, y, _, _ = share(0, 1, 0, 1)[0]
        with pytest.raises(RuntimeError, match=r"FSDP1.*use FSDP2"):
            mean_loss(module, x, y, False).backward()
            opt.step()


# It used to be accepted: gradients were divided by weights that had not multiplied them, and
# replicas diverged.
@pytest.mark.parametrize(
    "strategy, original, first", [("FULL_SHARD", True, True), ("NO_SHARD", False, True), ("NO_SHARD", True, False)]
)
def test_fsdp1_is_refused(worlds, strategy, original, first):
    worlds(2).run(fsdp1, strategy=strategy, original=original, first=first)


def tried_out(rank, when):
    """Windows beside a DDP forward that the wrapper does not see.

    It is made before the wrapper is built, or by module.forward(); no backward follows, or
    (``instead``) one does.
    """
    model = plain()
    module = DDP(model)
    if when == "before":
        module(torch.ones(1, 12))
    opt = wrapped(model, accum_steps=2)
    for window in range(2):
        for x, y, weight, _ in share(window, 4, rank, 2):
            if when == "between":
                module.forward(torch.ones(1, 12))
            output = module.forward(x) if when == "instead" and window == 1 else module(x)
            opt.backward((output - y).square().mean(), weight=weight)
            opt.step()
    return list(model.parameters())


def plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def big(windows):
    model = plain()
    opt = sgd(model.parameters())
    for window in range(windows):
        batch = share(window, 4, 0, 1)
        x, y = (torch.cat([part[i] for part in batch]) for i in range(2))
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    return list(model.parameters())


@pytest.mark.parametrize("when", ["before", "between", "instead"])
def test_a_forward_of_ddp_that_the_wrapper_does_not_see(worlds, when):
    for ours in worlds(2).run(tried_out, when=when):
        assert_close(ours, big(2))


def not_called(rank, how):
    model = plain()
    module = replicate(model) if how == "replicate" else DDP(model)
    module(torch.ones(1, 12))  # replicate() creates its DistributedDataParallel here
    opt = wrapped(model, accum_steps=2)
    parts = share(0, 4, rank, 2)
    x, y, _, _ = parts[0]
    with pytest.raises(RuntimeError, match=r"without a call of the module.*call module\(x\)"):
        (module(x) if how == "replicate" else module.forward(x)).sum().backward()
    for x, y, weight, _ in [] if how == "replicate" else parts:
        opt.backward((module(x) - y).square().mean(), weight=weight)
        opt.step()
    return list(model.parameters())


@pytest.mark.parametrize("how", ["module.forward(x)", "replicate"])
def test_ddp_that_is_not_called_is_refused(worlds, how):
    for ours in worlds(2).run(not_called, how=how):
        if how != "replicate":
            assert_close(ours, big(1))


def pipeline(rank, sharded, reduction="mean"):
    """Two stages on two ranks each; a window is two runs of the schedule, of four parts each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "replicas"))
    number, replica = mesh.get_coordinate()
    first, tanh, second = plain()
    layers = second if number else nn.Sequential(first, tanh)
    module = (
        fully_shard(layers, mesh=mesh["replicas"]) if sharded else DDP(layers, process_group=mesh.get_group("replicas"))
    )
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    passes = 8 if reduction == "none" else 1
    schedule = ScheduleGPipe(stage, 4, lambda y, target: (y - target).square().mean() / passes, scale_grads=False)
    opt = wrapped(layers, reduction=reduction)
    for window in range(2):
        for run in range(2):
            x, y = (x[replica::2].contiguous() for x in whole_batch(2 * window + run))  # as PyTorch 2.10 wants it
            if sharded:
                with pytest.raises(RuntimeError, match="while no backward runs, as pipeline schedules"):
                    schedule.step(target=y) if number else schedule.step(x)
                return None
            schedule.step(target=y) if number else schedule.step(x)
        opt.step()
        opt.zero_grad()
    assert opt.last_window.micro_batches == 16
    return list(layers.parameters())


@contextlib.contextmanager
def synchronised(module):
    """Accelerate's trigger_sync_in_backward(): the next backward is synchronised.

    It is so although its forward ran within no_sync().
    """
    before = module.require_backward_grad_sync, module.require_forward_param_sync
    module.require_backward_grad_sync = module.require_forward_param_sync = True
    module.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        module.require_backward_grad_sync, module.require_forward_param_sync = before


def triggered(rank, order, forwards, wraps):
    """Two forwards, then two backwards; ``order`` says which of these are synchronised.

    Returns the gradients after each, and the parameters.
    """
    model, grads = plain(), []
    module = DDP(model)
    opt = sgd(model.parameters())
    opts = [fa.AccumulatingOptimizer(opt, reduction="none")] if wraps == 1 else [opt]
    if wraps == 2:  # over one module
        opts = [fa.AccumulatingOptimizer(sgd(part.parameters()), reduction="none") for part in (model[0], model[2])]
    for window in range(3):
        with module.no_sync() if forwards == "no_sync" else contextlib.nullcontext():
            losses = [(module(x) - y).square().mean() / 2 for x, y, *_ in share(window, 4, rank, 2)]
        for loss, synced in zip(losses, order, strict=True):
            with synchronised(module) if synced else contextlib.nullcontext():
                loss.backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert module.require_backward_grad_sync
    return grads, list(model.parameters())


@pytest.mark.parametrize("wraps", [1, 2], ids=["one wrapper", "two"])
def test_a_backward_is_synchronised_although_its_forward_was_not(worlds, wraps):
    plain_ddp = worlds(2).run(triggered, order=(False, True), forwards="no_sync", wraps=0)
    wrapped_ddp = worlds(2).run(triggered, order=(False, True), forwards="no_sync", wraps=wraps)
    for (ours, after), (theirs, theirs_after) in zip(wrapped_ddp, plain_ddp, strict=True):
        for a, b in zip([*ours, after], [*theirs, theirs_after], strict=True):
            assert_close(a, b)


def test_to_synchronise_a_backward_that_is_so_already_changes_nothing(worlds):
    (first, after), (second, others) = worlds(2).run(triggered, order=(True, True), forwards="synced", wraps=1)
    for a, b in zip([*first, after], [*second, others], strict=True):
        assert all(map(torch.equal, a, b))
    model = plain()
    opt = sgd(model.parameters())
    for window in range(3):
        opt.zero_grad()
        for rank in range(2):
            for x, y, *_ in share(window, 4, rank, 2):
                ((model(x) - y).square().mean() / 4).backward()
        opt.step()
    assert_close(after, list(model.parameters()))


def whole_batch(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(16, size, generator=generator) for size in (12, 3)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_of_ddp_stages(worlds, reduction):
    model = plain()
    opt = sgd(model.parameters())
    for window in range(2):
        x, y = (torch.cat(both) for both in zip(whole_batch(2 * window), whole_batch(2 * window + 1), strict=True))
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    expected = list(model.parameters())
    for rank, ours in enumerate(worlds(4).run(pipeline, sharded=False, reduction=reduction)):
        assert_close(ours, expected[2:] if rank > 1 else expected[:2])


def test_a_pipeline_of_fsdp2_stages_is_refused(worlds):
    worlds(4).run(pipeline, sharded=True)


def zero(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.13 warns of what it uses itself
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = plain()
    module = DDP(model)
    inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01)
    with pytest.raises(
        ValueError, match=r"master_weights=True.*ZeroRedundancyOptimizer, which.*\(\.optim\).*shard=True"
    ):
        fa.AccumulatingOptimizer(inner, master_weights=True)
    opt = fa.AccumulatingOptimizer(inner, accum_steps=2)
    for window in range(2):
        for x, y, weight, _ in share(window, 4, rank, 2):
            opt.backward((module(x) - y).square().mean(), weight=weight)
            opt.step()
    return list(model.parameters())


def test_zero_redundancy_optimizer(worlds):
    for ours in worlds(2).run(zero):
        assert_close(ours, big(2))


def zero_clipped_and_saved(rank, ddp):
    """Clipped by the norm of all parameters, whoever steps them; saved inside the second window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def of(model):
        inner = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01)
        group = None if ddp else dist.group.WORLD
        return fa.AccumulatingOptimizer(inner, accum_steps=2, max_grad_norm=0.3, process_group=group)

    model = plain()
    module = DDP(model) if ddp else model
    opt, norms = of(model), []
    for window in range(3):
        for number, (x, y, weight, _) in enumerate(share(window, 4, rank, 2)):
            opt.backward((module(x) - y).square().mean(), weight=weight)
            opt.step()
            if (window, number) == (1, 0):
                for to in range(2):  # as plain ZeroRedundancyOptimizer has it
                    opt.consolidate_state_dict(to=to)
                    if rank == to:
                        told = opt.state_dict()
                del opt
                model.zero_grad()
                opt = of(model)
                opt.load_state_dict(told)
        norms.append(float(opt.last_window.grad_norm))
    return list(model.parameters()), norms


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
def test_zero_redundancy_optimizer_is_clipped_and_saved(worlds, ddp):
    model, norms = plain(), []
    opt = sgd(model.parameters())
    for window in range(3):
        x, y = (torch.cat([part[i] for part in share(window, 4, 0, 1)]) for i in range(2))
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        opt.step()
    assert max(norms) > 0.3
    for ours, our_norms in worlds(2).run(zero_clipped_and_saved, ddp=ddp):
        assert_close(ours, list(model.parameters()))
        assert our_norms == pytest.approx(norms, rel=1e-5)


def joined(rank):
    module = DDP(plain())
    opt = wrapped(module, accum_steps=2)
    with pytest.raises(RuntimeError, match=r"join\(\).*leave it out.*opt\.flush\(\)"), module.join():
        for x, y, weight, _ in share(0, 4, rank, 2)[: 2 - rank]:
            opt.backward((module(x) - y).square().mean(), weight=weight)
            opt.step()


def test_join_is_refused(worlds):
    worlds(2).run(joined)


def ignored(rank, gathered):
    """DDP ignores a part of the model, whose gradients are the rank's own (sharded embeddings)."""
    model = plain()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
    module = DDP(model)
    if gathered:
        with pytest.raises(ValueError, match=r"told to ignore parameter 2\.weight.*leave it out"):
            wrapped(module)
        model[2].requires_grad_(False)
        opt = wrapped(module)
        model[2].requires_grad_(True)
        with pytest.raises(ValueError, match=r"told to ignore parameter 2\.weight.*leave it out"):
            module(torch.ones(1, 12)).sum().backward()
        model[2].requires_grad_(False)
        opt.backward(module(torch.ones(1, 12)).sum())
        return None
    opt = fa.AccumulatingOptimizer(sgd(model[0].parameters()), accum_steps=2)
    for x, y, weight, _ in share(0, 4, rank, 2):
        opt.backward((module(x) - y).square().mean(), weight=weight)
        opt.step()
    assert model[2].weight.grad is not None
    return list(model.parameters())


@pytest.mark.parametrize("gathered", [True, False])
def test_parameters_that_ddp_ignores(worlds, gathered):
    for ours in worlds(2).run(ignored, gathered=gathered):
        if not gathered:
            assert_close(ours, [*big(1)[:2], *plain()[2].parameters()])


def delayed(rank):
    model = plain()
    late = [("2.weight", model[2].weight)]
    module = DDP(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[0].weight)
    with pytest.raises(ValueError, match=r"parameter 2\.weight, or to delay its reduction"):
        wrapped(module)


def test_parameters_whose_reduction_ddp_delays(worlds):
    worlds(2).run(delayed)
