"""Parameters that tensor parallelism splits, alone and under FSDP2, train as in one process."""

from unittest import mock

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from fusedaccum.autograd.streams import join
from parts import Block, assert_close, contents, full, share, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WINDOWS, COUNT = 3, 8


def tensor_parallel(rank, parallel):
    torch.manual_seed(2)
    model = Block()
    if parallel:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = wrapped(model, accum_steps=COUNT, max_grad_norm=0.05)
    norms = []
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, COUNT, 0, 1):  # all ranks see the same
            opt.backward((model(x) - y).square().mean(), weight=weight)
            opt.step()
            opt.zero_grad()
        norms.append(float(opt.last_window.grad_norm))
    return contents(model, opt), norms


def test_tensor_parallel_parameters(worlds):
    theirs, norms = tensor_parallel(0, False)
    for ours, ours_norms in worlds(2).run(tensor_parallel, parallel=True):
        assert_close(ours, theirs, 1e-5)
        assert ours_norms == pytest.approx(norms, rel=1e-5)


def partial(rank):
    """A gradient that arrives as parts of a sum is added up before it is accumulated."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    x = DTensor.from_local(torch.full((4,), float(rank + 1)), mesh, [torch.distributed.tensor.Partial()])
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    for _ in range(2):
        p.register_hook(lambda _: x).remove()
        torch.autograd.backward(p, x)
        opt.step()
    return full(p)


def test_gradients_in_parts(worlds):
    for p in worlds(2).run(partial):
        assert torch.equal(p, torch.full((4,), -2.0))


def queued_on_another_stream(rank):
    """Returns the tensors whose memory is kept: their types and shapes.

    Stands in for the streams, which a CPU does not have.
    """
    kept, grad = [], distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    here, elsewhere = (mock.Mock(device=grad.device) for _ in range(2))
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda _: here),
        mock.patch("fusedaccum.autograd.streams.current_name", lambda _: (0, 0, 1)),
        mock.patch.object(torch.cuda, "Stream", lambda **_: elsewhere),
        mock.patch.object(torch.Tensor, "record_stream", lambda self, _: kept.append((type(self), self.shape))),
    ):
        join([(1, 0, 1)], [grad])
    return kept


def test_the_memory_of_a_parts_gradient_is_kept_where_it_lies(worlds):
    """DTensor has no record_stream of its own: PyTorch refuses it."""
    assert worlds(2).run(queued_on_another_stream) == [[(torch.Tensor, (2,))]] * 2


def parts_over_ranks(rank):
    model = Block()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"is a DTensor that FSDP2 does not add up.*fully_shard"):
        wrapped(model, process_group=dist.group.WORLD)


def nothing_over_tensor_parallelism(rank, reduction):
    model = Block()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = wrapped(model, accum_steps=2, reduction=reduction)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    for weight in (0.0, 4.0):
        opt.backward(model(x / weight if weight == 0 else x).sum(), weight=weight)
        opt.step()
    return all(
        p.to_local().isfinite().all() if isinstance(p, DTensor) else p.isfinite().all() for p in model.parameters()
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_weight_of_0_adds_nothing_over_tensor_parallelism(worlds, reduction):
    assert all(worlds(2).run(nothing_over_tensor_parallelism, reduction=reduction))


def test_tensor_parallelism_over_data_parallel_ranks_is_fsdp2s(worlds):
    worlds(2).run(parts_over_ranks)


def two_dimensions(rank):
    """Tensor parallelism within pairs, FSDP2 between them, over which alone weights are summed."""
    torch.manual_seed(2)
    model = Block()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    opt = wrapped(model, accum_steps=COUNT // 2, max_grad_norm=0.05)
    norms = []
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, COUNT, mesh["data"].get_local_rank(), 2):
            opt.backward((model(x) - y).square().mean(), weight=weight)
            opt.step()
            opt.zero_grad()
        assert opt.last_window.micro_batches == COUNT
        norms.append(float(opt.last_window.grad_norm))
    return contents(model, opt), norms


def test_fsdp2_over_tensor_parallelism(worlds):
    theirs, norms = tensor_parallel(0, False)
    for ours, ours_norms in worlds(4).run(two_dimensions):
        assert_close(ours, theirs, 1e-5)
        assert ours_norms == pytest.approx(norms, rel=1e-5)
