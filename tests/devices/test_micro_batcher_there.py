"""MicroBatcher with a device: micro-batches go there singly, gradients leave for CPU buffers."""

import fusedaccum as fa
import fusedaccum.extensions.cpu_offload
import pytest
import torch
from fusedaccum.extensions.retries import Attempt
from offloading import made
from sizes import limits


def whole():
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(9, 48, generator=generator).bfloat16(), "y": torch.randn(9, 5, generator=generator)}


def expected(device):
    model, opt = made(device, buffer_dtype=torch.float32)
    x, y = (value.to(device) for value in whole().values())
    (model(x) - y).square().mean().backward()
    opt.step()
    return model


@pytest.mark.parametrize("where", [{}, {"buffer_device": "cpu"}], ids=str)
@limits(bucket=1)
def test_errors_while_gradients_arrive(device, monkeypatch, where):
    theirs, attempts = expected(device), []
    for point in range(1, 12):
        model, opt = made(device, **where)
        met = 0

        def arrives(_):
            nonlocal met
            met += 1
            if met == point:  # noqa: B023
                raise torch.OutOfMemoryError("injected")

        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(arrives)
        monkeypatch.setattr(
            fusedaccum.recipes.micro_batcher, "Attempt", lambda done: attempts.append(Attempt(done)) or attempts[-1]
        )
        batcher = fa.MicroBatcher(lambda part: (model(part["x"]) - part["y"]).square().mean(), opt, device=device)  # noqa: B023
        batcher.step(whole())
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.cpu().float(), q.cpu().float(), rtol=2e-2, atol=2e-3)
        assert opt.last_window.weight == 9 and batcher.micro_batch_size in (5, 9)
    assert any(attempt.done for attempt in attempts) and not any(attempt.lost for attempt in attempts)


def test_an_add_that_broke_in_the_middle_begins_the_window_anew(device, monkeypatch):
    theirs = expected(device)
    plain, calls = fusedaccum.extensions.cpu_offload.free_stage, iter(range(100))

    def no_room(ring):
        if next(calls) == 4:
            raise MemoryError
        return plain(ring)

    model, opt = made(device, buffer_device="cpu")
    monkeypatch.setattr(fusedaccum.extensions.cpu_offload, "free_stage", no_room)
    fa.MicroBatcher(lambda part: (model(part["x"]) - part["y"]).square().mean(), opt, device=device).step(whole())
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.cpu().float(), q.cpu().float(), rtol=2e-2, atol=2e-3)
    assert opt.last_window.weight == 9
