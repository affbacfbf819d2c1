"""Gradients that are non-finite only in one rank's part of a split parameter.

All ranks with parts of it drop the micro-batch together.
"""

import contextlib
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import assert_close, sgd, share, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

COUNT, BAD = 3, 1


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * 1.0


def spoiled(module, arguments, output):
    output.register_hook(lambda grad: grad * float("nan"))


def with_a_bad_part(rank, nonfinite, over=1):
    """Tensor parallelism within each pair of ranks, and FSDP2 over ``over`` pairs."""
    model, size = Layers(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (over, 2), mesh_dim_names=("data", "layers"))
    parallelize_module(model, mesh["layers"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if over > 1:
        fully_shard(model, mesh=mesh["data"])
    opt = wrapped(model, accum_steps=COUNT, nonfinite=nonfinite)
    for window in range(2):
        for number, (x, y, weight, _) in enumerate(share(window, COUNT * over, rank // 2, over)):
            bad = (window, number) == (0, BAD)
            handle = model.up.register_forward_hook(spoiled) if bad and rank == size - 1 else None
            opt.backward((model(x) - y).square().mean(), weight=weight)
            if handle is not None:
                handle.remove()
            with pytest.raises(FloatingPointError) if bad and nonfinite == "raise" else contextlib.nullcontext():
                opt.step()
            opt.zero_grad()
        if window == 0 and over == 1:
            opt.flush()  # a window of one process would wait for another micro-batch
        assert opt.updated and opt.last_window.micro_batches == over * (COUNT - (window == 0))
    return [p.full_tensor().detach() for p in model.parameters()]


def literal(over=1):
    model = Layers()
    opt = sgd(model.parameters())
    for window in range(2):
        opt.zero_grad()
        batch = share(window, COUNT * over, 0, 1)
        parts = [part for k, part in enumerate(batch) if (window, k // over) != (0, BAD)]
        total = sum(part[2] for part in parts)
        sum((model(x) - y).square().mean() * (w / total) for x, y, w, _ in parts).backward()
        opt.step()
    return list(model.parameters())


@pytest.mark.parametrize("nonfinite", ["skip_micro_batch", "raise"])
def test_a_bad_part_is_left_out_with_the_others(worlds, nonfinite):
    for ours in worlds(2).run(with_a_bad_part, nonfinite=nonfinite):
        assert_close(ours, literal())


def test_a_bad_part_is_left_out_with_those_of_fsdp2(worlds):
    for ours in worlds(4).run(with_a_bad_part, nonfinite="skip_micro_batch", over=2):
        assert_close(ours, literal(over=2))


def infinite_sum(rank):
    """A gradient in parts, each of them finite, whose sum overflows."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, nonfinite="skip_micro_batch")
    for value in (1.0, 3e38, 2.0):
        torch.autograd.backward(p, DTensor.from_local(torch.full((4,), value), mesh, [Partial()]))
        opt.step()
    opt.flush()
    return p.full_tensor().detach(), opt.last_window.micro_batches


def test_a_sum_that_overflows_is_left_out(worlds):
    for p, count in worlds(2).run(infinite_sum):
        assert torch.equal(p, torch.full((4,), 1 - (2.0 + 4.0) / 2)) and count == 2


def scaled(rank, kind, wrap):
    """The loss scales after each micro-batch, one of which overflows in the part of one rank."""
    mesh = init_device_mesh("cpu", (2,))
    if kind == "tensor parallelism":
        model = Layers()
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        model = fully_shard(nn.Linear(12, 3), mesh=mesh)  # the last rank has the last output's weights
    scaler = (ShardedGradScaler if kind == "FSDP2, its scaler" else torch.amp.GradScaler)("cpu", init_scale=8.0)
    opt = wrapped(model, accum_steps=COUNT, nonfinite="skip_micro_batch") if wrap else sgd(model.parameters())
    scales = []
    for number, (x, y, _, _) in enumerate(share(0, COUNT, 0, 1)):
        handle = model.up.register_forward_hook(spoiled) if hasattr(model, "up") and rank == number == BAD else None
        output = model(x)
        if handle is not None:
            handle.remove()
        elif number == BAD and not hasattr(model, "up"):
            output.register_hook(lambda grad: grad * torch.tensor([1.0, 1.0, float("nan")]))
        scaler.scale((output - y).square().mean()).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")  # PyTorch's scaler causes it
            scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
    assert not any(p.isnan().any() for p in model.parameters())
    return scales


@pytest.mark.parametrize("kind", ["tensor parallelism", "FSDP2", "FSDP2, its scaler"])
def test_a_scaler_backs_off_on_all_ranks_for_a_part_of_one(worlds, kind):
    plain = worlds(2).run(scaled, kind=kind, wrap=False)
    assert worlds(2).run(scaled, kind=kind, wrap=True) == plain == [[8.0, 4.0, 4.0]] * 2
