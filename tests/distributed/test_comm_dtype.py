"""``comm_dtype``: what travels in bf16 is added in FP32, and FP32 buffers add nothing in less."""

from unittest import mock

import fusedaccum as fa
import fusedaccum.distributed.comm_dtype
import pytest
import torch
import torch.distributed as dist
from sizes import limits
from torch import nn

SHAPES = [(37,), (5, 3), (130,), (1,)]  # no multiple of the ranks


def gradients(seed, rank, dtype=torch.float32):
    """In FP32 of 13 bits, so that bf16 rounds them, and FP32 adds those of a few ranks exactly."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.float64:
        return [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]
    return [torch.randint(-4096, 4096, shape, generator=generator) / 64 for shape in SHAPES]


def added(rank, seed, bucket_bytes, dtype, settings):
    """The parameters after a step of SGD with lr=1 from zeros: the window's gradient, negated."""
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    with limits(REDUCED=bucket_bytes):
        inner = torch.optim.SGD(params, lr=1.0)
        opt = fa.AccumulatingOptimizer(inner, 2, process_group=dist.group.WORLD, **settings)
        for number in range(2):
            torch.autograd.backward(params, gradients(seed + number, rank, dtype))
            opt.step(**({"weight": 1.0} if settings.get("reduction") == "sum" else {}))
    return [p.detach() for p in params]


def expected(seed, size, travels, back, reduction, dtype=torch.float32):
    """The FP64 sum of what ranks send, each rounded to ``travels``; the sum itself to ``back``."""
    scale = 1 / size if reduction == "none" else 1.0
    parts = [zip(gradients(seed, rank, dtype), gradients(seed + 1, rank, dtype), strict=True) for rank in range(size)]
    sent = [[((a + b) * scale).to(travels).double() for a, b in of_rank] for of_rank in parts]
    sums = [torch.stack(of_all).sum(0).to(back).double() for of_all in zip(*sent, strict=True)]
    return [-(total / (1 if reduction == "none" else 2 * size)) for total in sums]


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shard", [False, True], ids=["all", "owners"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1], ids=["one bucket", "many"])
def test_what_travels_in_bf16_is_added_in_fp32(worlds, size, shard, reduction, bucket_bytes):
    seed = int(torch.randint(1 << 20, ()))
    settings = {"comm_dtype": torch.bfloat16, "shard": shard, "reduction": reduction}
    arguments = {"seed": seed, "bucket_bytes": bucket_bytes, "dtype": torch.float32, "settings": settings}
    back = torch.float32 if shard else torch.bfloat16  # the rank that steps gets it as it is
    theirs = expected(seed, size, torch.bfloat16, back, reduction)
    for ours in worlds(size).run(added, **arguments):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                a, b.float(), rtol=2e-7 if size == 3 else 0, atol=0, msg=lambda m: f"{seed}: {m}"
            )


@pytest.mark.parametrize("shard", [False, True], ids=["all", "owners"])
def test_fp64_sums_that_travel_in_fp32_are_added_in_fp64(worlds, shard):
    settings = {"comm_dtype": torch.float32, "shard": shard, "reduction": "sum"}
    arguments = {"seed": 1, "bucket_bytes": 1 << 20, "dtype": torch.float64, "settings": settings}
    back = torch.float64 if shard else torch.float32
    theirs = expected(1, 2, torch.float32, back, "sum", torch.float64)
    for ours in worlds(2).run(added, **arguments):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def again(rank, shard, late):
    """One large gradient; after the sums have gone, many small ones, on the ranks ``late`` only."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params, lr=1.0), 1, process_group=dist.group.WORLD, comm_dtype=torch.bfloat16, shard=shard
    )
    with limits(REDUCED=1):
        for number in range(9):
            if number == 0 or rank in late:
                torch.autograd.backward(params, [torch.full((3,), 0.5 if number else 256.0) for _ in params])
        opt.step()
    return torch.stack([p.detach() for p in params])


@pytest.mark.parametrize("late", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("shard", [False, True], ids=["all", "owners"])
def test_what_comes_after_sums_have_travelled_in_bf16_is_added_to_them(worlds, shard, late):
    mean = (3 * 256 + len(late) * 8 * 0.5) / 3  # 768 is a number of bf16, and 772 none
    for ours in worlds(3).run(again, shard=shard, late=late):
        torch.testing.assert_close(ours, torch.full((4, 3), -mean), rtol=1e-7, atol=0)


def weighed(rank, shard):
    """The bytes that this rank hands to the collectives which move sums."""
    moved = {"out": 0, "back": 0}

    def watch(name, call, of):
        def watched(*args, **kwargs):
            moved[name] += args[of].nbytes
            return call(*args, **kwargs)

        return watched

    p = nn.Parameter(torch.zeros(10_000))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([p], lr=1.0), 1, process_group=dist.group.WORLD, comm_dtype=torch.bfloat16, shard=shard
    )
    with (
        mock.patch.object(dist, "all_to_all_single", watch("out", dist.all_to_all_single, 1)),
        mock.patch.object(
            fusedaccum.distributed.comm_dtype,
            "_all_gather",
            watch("back", fusedaccum.distributed.comm_dtype._all_gather, 0),
        ),
        mock.patch.object(dist, "gather", watch("back", dist.gather, 0)),
    ):
        opt.backward(p.sum())
        opt.step()
    return moved


@pytest.mark.parametrize("shard", [False, True], ids=["all", "owners"])
def test_it_takes_the_bytes_of_a_ring_all_reduce_in_bf16(worlds, shard):
    """A ring sends (ranks - 1) / ranks of the elements twice, in bf16: the terms, then the sums."""
    for moved in worlds(3).run(weighed, shard=shard):
        assert 20_000 <= moved["out"] < 21_000  # of which a third stays here
        low = 4 * 10_000 / 3 if shard else 20_000  # to the owner a rank sends its part, in FP32
        assert low <= moved["back"] < 1.05 * low


def of_a_bf16_model(rank, ddp, settings):
    """Gradients 256 and 258 on two ranks, then 256 and 1: bf16 has neither 257 nor 128.5 + 257."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    module = nn.parallel.DistributedDataParallel(model) if ddp else model
    group = None if ddp else dist.group.WORLD
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_group=group, **settings)
    for pair in ((256.0, 258.0), (256.0, 1.0)):
        module(torch.full((1, 1), pair[rank], dtype=torch.bfloat16)).sum().backward()
    opt.normalize_()
    return model.weight.grad.dtype, float(model.weight.grad)


@pytest.mark.parametrize("ddp", [True, False], ids=["ddp", "plain"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_a_bf16_model_are_added_over_ranks_in_fp32(worlds, ddp, reduction):
    mean = (256 + 258 + 256 + 1) / (4 if reduction == "mean" else 2)
    for dtype, gradient in worlds(2).run(of_a_bf16_model, ddp=ddp, settings={"reduction": reduction}):
        assert dtype == torch.float32 and gradient == mean
