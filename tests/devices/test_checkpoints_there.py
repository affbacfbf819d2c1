"""Open windows of a device whose checkpoint comes by way of the CPU (``map_location="cpu"``)."""

import itertools

import pytest
import torch
from fusedaccum.core.sums import Sums
from fusedaccum.extensions.losses import Losses
from offloading import assert_same, contents, made, micro_batches, train
from torch.utils._pytree import tree_map_only

NARROW = {"buffer_dtype": torch.bfloat16}
COMPENSATED = {**NARROW, "rounding": "compensated"}
SETTINGS = {
    "FP32": {},
    "bf16": NARROW,
    "stochastic": {**NARROW, "rounding": "stochastic"},
    "24 bits": COMPENSATED,
    "24 bits, split masters": {**COMPENSATED, "master_weights": "split"},
    "24 bits, optimizer on the CPU": {**COMPENSATED, "optimizer_device": "cpu"},
    "optimizer on the CPU": {"optimizer_device": "cpu"},
    "buffers on the CPU": {"buffer_device": "cpu"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_open_window_goes_on(device, name):
    straight, its = made(device, accum_steps=3, **SETTINGS[name])
    train(straight, its, device)
    model, opt = made(device, accum_steps=3, **SETTINGS[name])
    for x, y in itertools.islice(micro_batches(device, 8), 4):
        (model(x) - y).square().mean().backward()
        opt.step()
        opt.zero_grad()
    saved, of_optimizer = tree_map_only(torch.Tensor, torch.Tensor.cpu, (model.state_dict(), opt.state_dict()))
    resumed, again = made(device, accum_steps=3, **SETTINGS[name])
    with torch.no_grad():
        for key, p in resumed.named_parameters():
            p.copy_(saved[key])
    again.load_state_dict(of_optimizer)
    train(resumed, again, device, start=4)
    assert_same(contents(resumed, again), contents(straight, its), 0.0 if device.type == "late" else 1e-3)


@pytest.mark.parametrize("of", ["sums", "a feature"])
def test_a_window_that_loads_halfway_is_dropped(device, monkeypatch, of):
    model, opt = made(device, accum_steps=3)
    x, y = next(micro_batches(device, 1))
    (model(x) - y).square().mean().backward()
    opt.step()
    saved, restore = opt.state_dict(), Sums.restore

    def fails(owner, slot, *saved):
        if of == "a feature" or slot.index == 2:
            raise torch.OutOfMemoryError("injected")
        restore(owner, slot, *saved)

    monkeypatch.setattr(*((Sums, "restore") if of == "sums" else (Losses, "load")), fails)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        opt.load_state_dict(saved)
    assert opt.progress["micro_batch"] == "0/3" and all(p.grad is None for p in model.parameters())
    monkeypatch.undo()
    opt.load_state_dict(saved)
    assert opt.progress["micro_batch"] == "1/3"
