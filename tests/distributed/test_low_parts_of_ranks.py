"""``rounding="compensated"`` on ranks that share windows: sums travel in FP32, and keep 24 bits."""

from unittest import mock

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from fusedaccum.distributed.reduce_buckets import ReduceBuckets
from fusedaccum.extensions.low_parts import LowParts
from sizes import limits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

ON = {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}
SHAPES = [(37,), (5, 3), (130,), (1,)]  # no multiple of the ranks
COUNT = 6


def gradients(seed, rank):
    """Small integers after one large one: bf16 sums lose all of them, and 24 bits none."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    small = [[torch.randint(1, 4, shape, generator=generator).bfloat16() for shape in SHAPES] for _ in range(COUNT - 1)]
    return [[torch.full(shape, 4096.0).bfloat16() for shape in SHAPES], *small]


def exact(seed, size):
    of_all = [gradients(seed, rank) for rank in range(size)]
    return [sum(of[i][k].double() for of in of_all for i in range(COUNT)) for k in range(len(SHAPES))]


def expected(seed, size):
    return [total.bfloat16() for total in exact(seed, size)]


def run(rank, seed, shard, bucket_bytes, comm_dtype, saves):
    """What the window's gradients are on the rank that steps them, and its norm."""
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    settings = {"reduction": "sum", "process_group": dist.group.WORLD, "max_grad_norm": 1e9, "comm_dtype": comm_dtype}

    def made():
        return fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), COUNT, shard=shard, **settings, **ON)

    with limits(REDUCED=bucket_bytes):
        opt = made()
        for number, of in enumerate(gradients(seed, rank)):
            if saves and number == COUNT // 2:
                state = opt.state_dict()
                opt.reset()
                opt = made()
                opt.load_state_dict(state)
            torch.autograd.backward(params, of)
            opt.step(weight=1.0 if number == 0 and rank == 0 else 0.0)
    return [p.detach() for p in params], opt.last_window.grad_norm


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shard", [False, True], ids=["all", "owners"])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1], ids=["one bucket", "many"])
@pytest.mark.parametrize("saves", [False, True], ids=["straight", "resumed"])
def test_the_sums_of_all_ranks_have_24_bits(worlds, size, shard, bucket_bytes, saves):
    seed = int(torch.randint(1 << 20, ()))
    settings = {"shard": shard, "bucket_bytes": bucket_bytes, "comm_dtype": None, "saves": saves}
    theirs = expected(seed, size)
    norm = sum(x.square().sum() for x in exact(seed, size)).sqrt()
    for ours, measured in worlds(size).run(run, seed=seed, **settings):
        assert all(torch.equal(-a, b) for a, b in zip(ours, theirs, strict=True)), seed
        torch.testing.assert_close(measured, norm, rtol=1e-7, atol=0)


@pytest.mark.parametrize("comm_dtype", [torch.float32, torch.bfloat16])
def test_they_may_travel_in_another_dtype(worlds, comm_dtype):
    theirs = expected(1, 2)
    settings = {"shard": False, "bucket_bytes": 1 << 20, "saves": False}
    for ours, _ in worlds(2).run(run, seed=1, comm_dtype=comm_dtype, **settings):
        if comm_dtype is torch.float32:
            assert all(torch.equal(-a, b) for a, b in zip(ours, theirs, strict=True))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(-a, b, rtol=2**-7, atol=0)


def by_modules(rank, kind, settings):
    """DistributedDataParallel's, or FSDP2's, parameters after three windows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8)).bfloat16()
    if kind == "ddp":
        net = DistributedDataParallel(net)
    else:
        mesh, added = (
            init_device_mesh("cpu", (dist.get_world_size(),)),
            MixedPrecisionPolicy(reduce_dtype=torch.float32),
        )
        fully_shard(net, mesh=mesh, mp_policy=added)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), 4, **settings)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for _ in range(4):
            x = torch.randn(8, 16, generator=generator).bfloat16()
            opt.backward(net(x).float().square().mean(), weight=1.0)
            opt.step()
            opt.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().float() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_modules_of_pytorch(worlds, kind):
    """One rounding may differ here and there: nearly all are the same as with FP32 buffers."""
    theirs = worlds(2).run(by_modules, kind=kind, settings={"buffer_dtype": torch.float32})[0]
    results = worlds(2).run(by_modules, kind=kind, settings=ON)
    for ours in results:
        same = [(a == b).double().mean() for a, b in zip(ours, theirs, strict=True)]
        assert min(same) > 0.9
        assert all(torch.equal(a, b) for a, b in zip(ours, results[0], strict=True))


def again(rank, late, shard, reduction):
    """One large gradient; after the sums have gone, many small ones, on the ranks ``late`` only."""
    params = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(4)]
    group, in_flight = dist.group.WORLD, []
    inner = torch.optim.SGD(params, lr=1.0)
    settings = {"process_group": group, "shard": shard, "reduction": reduction, "max_grad_norm": 1e9}
    opt = fa.AccumulatingOptimizer(inner, 1, **settings, **ON)
    send = ReduceBuckets._send

    def counted(self, bucket):
        send(self, bucket)
        in_flight.append(sum(flight.wide is not None for flight in self._in_flight))

    with limits(REDUCED=1), mock.patch.object(ReduceBuckets, "_send", counted):
        for number in range(9):
            if number == 0 or rank in late:
                torch.autograd.backward(
                    params, [torch.full((3,), 0.5 if number else 256.0 + rank).bfloat16() for _ in params]
                )
        opt.step(**({"weight": 1.0} if reduction == "sum" else {}))
    return torch.stack([p.detach() for p in params]), opt.last_window.grad_norm, max(in_flight)


@pytest.mark.parametrize("late", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("shard", [False, True], ids=["all", "owners"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_what_comes_after_the_sums_have_gone_is_added_to_them(worlds, late, shard, reduction):
    """In FP32, of which two buckets are under way at most. The norm tells of all 24 bits."""
    total = (256 + 256 + 258 + len(late) * 8 * 0.5) / 3  # in bf16, 257 is 256
    for ours, norm, under_way in worlds(3).run(again, late=late, shard=shard, reduction=reduction):
        assert torch.equal(ours, torch.full((4, 3), -total).bfloat16())
        assert norm.item() == pytest.approx(total * 12**0.5, rel=1e-4)
        assert under_way <= 2


def lacking(rank):
    """A window where this rank has no gradient for a parameter that had one the window before."""
    params = [nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)) for _ in range(2)]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params, lr=1.0), 2, process_group=dist.group.WORLD, reduction="none", **ON
    )
    for window in range(2):
        for value in (256.0, 0.75):
            lacks = window == 1 and rank == 1
            torch.autograd.backward(params[: 1 if lacks else 2], [torch.full((5,), value).bfloat16()] * (2 - lacks))
            opt.step()
        if window == 0:
            low = opt._accumulation.extensions.of(LowParts)._low
            for part in low.values():
                part.fill_(99)
            opt.zero_grad()
    return [p.grad for p in params]


def test_what_a_rank_has_no_gradient_for_it_adds_nothing_to(worlds):
    for ours in worlds(2).run(lacking):
        assert torch.equal(ours[0], torch.full((5,), 256.75).bfloat16())
        assert torch.equal(ours[1], torch.full((5,), 256.75 / 2).bfloat16())
