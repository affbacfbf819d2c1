"""The same training, one device per rank: NCCL on 4, 2 or 1 GPUs; gloo runs it on the CPU."""

import pytest
import torch
import torch.distributed as dist
from parts import adamw, assert_close, big_batch, made, mean_loss, share, wrapped
from sizes import limits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from worlds import World

WINDOWS, COUNT = 3, 8


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def one_device_each(request, tmp_path_factory):
    """The kind of device, and a world whose ranks have one each."""
    if request.param == "cpu":
        world = World(2, tmp_path_factory.mktemp("world"))
    elif torch.cuda.is_available():
        ranks = max(n for n in (1, 2, 4) if n <= torch.cuda.device_count())  # these divide COUNT
        world = World(ranks, tmp_path_factory.mktemp("world"), backend="nccl")
    else:
        pytest.skip("needs a CUDA device")
    yield request.param, world
    world.close()


@limits(REDUCED=400)
def train(rank, kind, how, settings):
    size, device = dist.get_world_size(), torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    model = made().to(device)
    module, group = model, None
    if how == "ddp":
        module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif how == "fsdp2":
        fully_shard([model.first, model.second])
        fully_shard(model)
    else:
        group = dist.group.WORLD
    opt = wrapped(model, adamw, accum_steps=COUNT // size, process_group=group, shard=how == "shard", **settings)
    norms = []
    for window in range(WINDOWS):
        for x, y, weight, _ in share(window, COUNT, rank, size):
            loss = mean_loss(module, x.to(device), y.to(device), False)
            opt.backward(loss, weight=torch.tensor(weight, device=device))
            opt.step()
            opt.zero_grad()
        norms.append(float(opt.last_window.grad_norm))
    assert all(p.device.type == kind for p in model.parameters())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().cpu() for p in whole], norms


@pytest.mark.parametrize("how", ["plain", "ddp", "shard", "fsdp2"])
@pytest.mark.parametrize("settings", [{}, {"comm_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_windows_over_devices_are_the_big_batch(one_device_each, how, settings):
    kind, world = one_device_each
    model = made()
    opt = adamw(model.parameters())
    norms = [big_batch(model, opt, window, COUNT, limit=0.05, sometimes=False) for window in range(WINDOWS)]
    arguments = {"kind": kind, "how": how, "settings": {**settings, "max_grad_norm": 0.05}}
    tolerance = 2e-2 if settings and how != "fsdp2" else 1e-4 if kind == "cuda" else 1e-5
    for ours, ours_norms in world.run(train, **arguments):
        assert ours_norms == pytest.approx(norms, rel=2**-8 if settings else 1e-4)
        assert_close(ours, list(model.parameters()), tolerance)
