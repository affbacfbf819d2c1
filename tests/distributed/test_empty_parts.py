"""Parameters of no elements, or with none on a rank, and single numbers, in shared windows."""

import math

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

COUNT, WINDOWS, RANKS = 2, 2, 2


class Net(nn.Module):
    """Gradients are small whole numbers, which no sum rounds. Empty parameters are used or not."""

    def __init__(self, shapes, dtype, uses_empty=True):
        super().__init__()
        self.uses_empty = uses_empty
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes)

    def forward(self, x):
        used = [(p * (x + i)).sum() for i, p in enumerate(self.parts) if p.numel() or self.uses_empty]
        return sum(y.full_tensor() if isinstance(y, DTensor) else y for y in used)


def value(window, number, rank):
    return float(8 * window + 4 * number + 2 * rank)


def literal(shapes, dtype, alike):
    """The big batch in plain PyTorch, and its norms. ``alike``: do all ranks see the same?"""
    model = Net(shapes, dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    norms = []
    for window in range(WINDOWS):
        opt.zero_grad()
        values = [value(window, number, rank * (not alike)) for number in range(COUNT) for rank in range(RANKS)]
        (sum(map(model, values)) / len(values)).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad.float() for p in model.parameters() if p.grad is not None])))
        opt.step()
    return [p.detach() for p in model.parameters()], norms


def train(rank, shapes, how, dtype, settings):
    module = model = Net(shapes, dtype, uses_empty=how != "FSDP2")
    if how == "DDP":
        module = DDP(model)
    elif how == "FSDP2":
        module = fully_shard(model)
    elif how == "tensor parallel":
        mesh = init_device_mesh("cpu", (RANKS,))
        for i, p in enumerate(model.parts):
            where = [Shard(0) if p.ndim else Replicate()]
            model.parts[i] = nn.Parameter(distribute_tensor(p.detach(), mesh, where))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5),
        COUNT,
        max_grad_norm=math.inf,
        process_group=dist.group.WORLD if how == "group" else None,
        **settings,
    )
    norms = []
    for window in range(WINDOWS):
        for number in range(COUNT):
            opt.backward(module(value(window, number, rank * (how != "tensor parallel"))), weight=3)
            opt.step()
            opt.zero_grad()
        norms.append(float(opt.last_window.grad_norm))
    return [full(p) for p in model.parameters()], norms


MIXED = [(3, 2), (0,), (), (0, 3), (2,), (1, 2), (3, 0)]


@pytest.mark.parametrize("shapes", [MIXED, [(0,), (3, 0)], [()], [(0, 2), (4,)]], ids=str)
@pytest.mark.parametrize(
    "how, dtype, settings",
    [
        ("DDP", torch.float32, {}),
        ("DDP", torch.bfloat16, {"master_weights": True, "comm_dtype": torch.bfloat16}),
        ("group", torch.float32, {"nonfinite": "skip_micro_batch"}),
        ("group", torch.bfloat16, {"buffer_dtype": None}),
        ("group", torch.float32, {"shard": True}),
        ("group", torch.bfloat16, {"shard": True, "master_weights": True}),
        ("tensor parallel", torch.float32, {}),
        ("tensor parallel", torch.float32, {"nonfinite": "skip_micro_batch"}),
    ],
)
def test_empty_parameters_and_single_numbers_train_over_ranks(worlds, how, dtype, settings, shapes):
    theirs, norms = literal(shapes, torch.float32 if "master_weights" in settings else dtype, how == "tensor parallel")
    for ours, told in worlds(RANKS).run(train, shapes=shapes, how=how, dtype=dtype, settings=settings):
        assert [p.to(dtype).tolist() for p in theirs] == [p.tolist() for p in ours]
        assert told == pytest.approx(norms)


# FSDP2 refuses single numbers, and gradients of no elements.
FOR_FSDP2 = [(3, 2), (0,), (0, 3), (2,), (1, 2), (1,), (3, 0)]


@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip_micro_batch"}, {"buffer_dtype": torch.float64}])
def test_empty_parameters_that_fsdp2_shards_and_shards_of_no_elements(worlds, settings):
    theirs, norms = literal(FOR_FSDP2, torch.float32, False)
    for ours, told in worlds(RANKS).run(train, shapes=FOR_FSDP2, how="FSDP2", dtype=torch.float32, settings=settings):
        assert [p.tolist() for p in theirs] == [p.tolist() for p in ours]
        assert told == pytest.approx(norms)


def refused(rank, wrapped):
    """What a backward of a used parameter without elements raises."""
    model = fully_shard(Net([(3, 2), (0,)], torch.float32))
    opt = torch.optim.SGD(model.parameters(), lr=0.25)
    if wrapped:
        opt = fa.AccumulatingOptimizer(opt, COUNT)
    with pytest.raises(RuntimeError) as raised:
        model(1.0).backward()
    return str(raised.value)


def test_a_gradient_of_no_elements_under_fsdp2_raises_as_without_the_wrapper(worlds):
    assert worlds(RANKS).run(refused, wrapped=True) == worlds(RANKS).run(refused, wrapped=False)
