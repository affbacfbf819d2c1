"""fa.explain for another device: what CPU buffers hold and move, on both sides and in between."""

import fusedaccum as fa
import pytest
import torch
from fusedaccum.extensions.cpu_offload import CpuOffload
from fusedaccum.extensions.cpu_optimizer import CpuOptimizer
from sizes import limits
from torch import nn
from torch.overrides import TorchFunctionMode
from training import masters_of

SETTINGS = {
    "buffers in CPU memory": {},
    "masters there too": {"master_weights": True},
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("fusedaccum.recipes.calibration.HOOKED", 4)
    with limits(bucket=1 << 40, SENT=3000):  # as on a large GPU
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SETTINGS)
def test_cpu_side_of_buffers_in_cpu_memory(device, small, monkeypatch, name, dtype):
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).to(device, dtype)
    found = fa.explain(net, desired_batch=8, micro_batch=2)
    mode = next(mode for mode in found.modes if mode.name == name)
    assert mode.seconds > 0 and set(found.bandwidths) >= {p.kernel for p in mode.passes}
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), accum_steps=4, buffer_device="cpu", **SETTINGS[name]
    )
    moved = []
    watched(monkeypatch, moved)
    for _ in range(4):
        sum((p.float() ** 2).sum() for p in net.parameters()).backward()
        opt.step()
    buffers = sum(block.flat.nbytes for block in opt._sums.buffers.blocks)
    masters = sum(m.nbytes for m in masters_of(opt).values())
    ring = sum(
        stage.there.nbytes for ring in opt._accumulation.extensions.of(CpuOffload)._rings.values() for stage in ring
    )
    assert mode.cpu == {"buffers": buffers, "ring": ring, **({"masters": masters} if masters else {})}
    assert mode.memory["ring"] == ring
    assert mode.memory["gradients"] == net[0].weight.nbytes  # each fills a bucket by itself
    assert sum(p.bytes for p in mode.passes if p.kernel.lane == "cpu") == sum(moved)


AWAY = {
    "optimizer on the CPU": {},
    "24-bit sums, optimizer on the CPU": {"buffer_dtype": torch.bfloat16, "rounding": "compensated"},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", AWAY)
def test_both_sides_of_an_optimizer_in_cpu_memory(device, small, monkeypatch, name, dtype):
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).to(device, dtype)
    found = fa.explain(net, desired_batch=8, micro_batch=2, optimizer=torch.optim.AdamW)
    named = {mode.name: mode for mode in found.modes}
    if name not in named:
        assert dtype == torch.float32 and AWAY[name]
        return
    mode = named[name]
    assert mode.seconds > 0 and set(found.bandwidths) >= {p.kernel for p in mode.passes}
    inner = torch.optim.AdamW(net.parameters())
    opt = fa.AccumulatingOptimizer(inner, accum_steps=4, optimizer_device="cpu", **AWAY[name])
    moved = []
    watched(monkeypatch, moved)
    for _ in range(4):
        sum((p.float() ** 2).sum() for p in net.parameters()).backward()
        opt.step()
    away = opt._accumulation.extensions.of(CpuOptimizer)
    ring = sum(stage.here.nbytes for ring in away._rings.values() for stage in ring)
    state = sum(x.nbytes for entry in opt.state.values() for x in entry.values())
    assert mode.cpu == {
        "masters": sum(m.nbytes for m in masters_of(opt).values()),
        "buffers": sum(x.nbytes for x in away._pinned.values()),
        "ring": ring,
        "optimizer": pytest.approx(state, rel=1e-2),
    }
    assert mode.memory.keys() == {"model", "buffers", "gradients"}
    assert sum(p.bytes for p in mode.passes if p.kernel.lane != "link") == sum(moved)
    link = sum(p.bytes for p in mode.passes if p.kernel.lane == "link")
    assert link == sum(4 * p.numel() + p.nbytes for p in net.parameters())


def watched(monkeypatch, moved):
    """Appends to ``moved`` the bytes that the ops on the CPU read and write."""
    accumulate_, cast_, scale_ = fa.ops.accumulate_, fa.ops.cast_, fa.ops.scale_

    def size(tensors):
        return sum(x.nbytes for x in tensors)

    def watched_accumulate_(buffers, grads, *args, overwrite=False, **kwargs):
        moved.append(size(grads) + (1 if overwrite else 2) * size([*buffers, *(kwargs.get("low") or ())]))
        accumulate_(buffers, grads, *args, overwrite=overwrite, **kwargs)

    def watched_cast_(outs, ins, *args, **kwargs):
        moved.append(size(outs) + size([*ins, *(kwargs.get("low") or ())]))
        cast_(outs, ins, *args, **kwargs)

    def watched_scale_(tensors, *args, **kwargs):
        moved.append(2 * size([*tensors, *(kwargs.get("low") or ())]))
        scale_(tensors, *args, **kwargs)

    monkeypatch.setattr(fa.ops, "accumulate_", watched_accumulate_)
    monkeypatch.setattr(fa.ops, "cast_", watched_cast_)
    monkeypatch.setattr(fa.ops, "scale_", watched_scale_)


class Pinned(TorchFunctionMode):
    """Records on which devices pinned memory is allocated."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self.devices.add(made.device.type)
        return made


def test_the_link_ends_in_cpu_memory_whatever_the_default_device_is(device, small):
    net = nn.Linear(64, 64).to(device)
    with torch.device(device), Pinned() as pinned:
        fa.explain(net, desired_batch=8, micro_batch=2)
    assert pinned.devices == {"cpu"}
