"""Buffers in CPU memory: failures lose nothing, and what cannot be meant is refused."""

import gc
import itertools
import threading
import time
import warnings
from contextlib import contextmanager

import fusedaccum as fa
import fusedaccum.extensions.cpu_offload
import pytest
import torch
from fusedaccum.extensions.cpu_offload import CpuOffload
from offloading import assert_same, contents, made, micro_batches, moved, sgd, train
from torch import nn


def test_a_thread_that_fails_is_told_of_until_reset(device, monkeypatch):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    plain, calls = fa.ops.accumulate_, itertools.count()

    def fails_once(*args, **kwargs):
        if next(calls) == 3:
            raise MemoryError("injected")
        plain(*args, **kwargs)

    monkeypatch.setattr(fa.ops, "accumulate_", fails_once)
    with pytest.raises(RuntimeError, match=r"call opt.reset\(\) to drop it") as told:
        train(model, opt, device, count=2)
    assert isinstance(told.value.__cause__, MemoryError)
    for call in (opt.step, opt.flush, opt.state_dict):
        with pytest.raises(RuntimeError, match=r"opt.reset\(\)"):
            call()
    opt.reset()
    train(model, opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_a_failure_is_told_of_by_the_next_step(device, monkeypatch):
    model, opt = made(device, accum_steps=4, buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    with monkeypatch.context() as broken:
        broken.setattr(fa.ops, "accumulate_", lambda *_, **__: 1 / 0)
        (model(x) - y).square().mean().backward()
        opt._accumulation.extensions.of(CpuOffload)._last.result()
    with pytest.raises(RuntimeError, match=r"call opt.reset\(\)"):
        opt.step()


def test_an_interrupt_while_gradients_are_on_their_way(device, monkeypatch):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    plain, calls = fusedaccum.extensions.cpu_offload.free_stage, itertools.count()

    def interrupted(ring):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return plain(ring)

    monkeypatch.setattr(fusedaccum.extensions.cpu_offload, "free_stage", interrupted)
    with pytest.warns(RuntimeWarning, match="so the open window was dropped"), pytest.raises(KeyboardInterrupt):
        train(model, opt, device, count=2)
    train(model, opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_writing_masters_back_is_tried_again_without_another_step(device, monkeypatch):
    p = nn.Parameter(torch.ones(100, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.125), 1, master_weights=True, buffer_device="cpu")
    p.sum().backward()
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(CpuOffload, "cast_", lambda *_, **__: 1 / 0)
        opt.step()
    opt.step()
    assert opt.updated and (p.cpu() == 0.875).all()


@pytest.mark.parametrize(
    "where", [{"buffer_device": "cpu", "master_weights": True}, {"optimizer_device": "cpu"}], ids=str
)
@pytest.mark.parametrize("at", range(4))
def test_masters_win_over_a_model_that_they_were_half_written_to(device, monkeypatch, where, at):
    p = nn.Parameter(torch.ones(1000, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.125), 1, **where)
    p.sum().backward()
    plain, calls = fusedaccum.extensions.ring.free_stage, itertools.count()

    def interrupted(ring):
        if next(calls) == at:
            raise KeyboardInterrupt
        return plain(ring)

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(fusedaccum.extensions.ring, "free_stage", interrupted)
        opt.step()
    opt.step()
    assert opt.updated and (p.cpu() == 0.875).all()
    assert (opt.state_dict()["fusedaccum"]["masters"][0] == 0.875).all()


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW])
def test_masters_take_the_state_that_is_there_when_they_are_made(device, make):
    ends = []
    for where in ({}, {"master_weights": True, "buffer_device": "cpu"}):
        torch.manual_seed(1)
        model = moved(nn.Linear(20, 10), device)
        inner = make(model.parameters(), lr=0.1, foreach=False)
        model(torch.ones(3, 20, device=device)).square().mean().backward()
        inner.step()
        inner.zero_grad()
        opt = fa.AccumulatingOptimizer(inner, accum_steps=1, **where)
        for _ in range(3):
            model(torch.ones(3, 20, device=device)).square().mean().backward()
            opt.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    # Without buffer_device the step runs on the device; CUDA's kernels round a multiply-add once.
    assert_same(*ends, tolerance=1e-6 if device.type == "cuda" else 0.0)
    assert all(x.device.type == "cpu" for entry in opt.state.values() for x in entry.values())


def test_capturable_masters_are_refused(device):
    p = nn.Parameter(torch.ones(3, device=device))
    inner = torch.optim.Adam([p])
    inner.param_groups[0]["capturable"] = True
    with pytest.raises(
        ValueError, match=r"capturable=True.*buffer_device='cpu' and master_weights=True.*build it without capturable"
    ):
        fa.AccumulatingOptimizer(inner, master_weights=True, buffer_device="cpu")
    fa.AccumulatingOptimizer(inner, buffer_device="cpu")


def test_a_backward_that_breaks_off_drops_the_window(device):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")

    def fails(_):
        raise ValueError("injected")

    x, y = next(micro_batches(device, 1))
    hidden = torch.relu(x @ model.turned)
    hidden.register_hook(fails)
    out = model.layers(hidden).float()
    with pytest.raises(ValueError, match="injected"):
        ((model.head(out) - y).square().mean()).backward()
    with pytest.warns(RuntimeWarning, match="the open window was dropped"):
        opt.step()
    opt.reset()
    train(model, opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_a_dropped_wrapper_leaves_nothing_behind(device):
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    (model(x) - y).square().mean().backward()  # the offload thread is still at work
    del opt
    gc.collect()
    (model(x) - y).square().mean().backward()
    assert model.head.weight.grad is not None
    gc.collect()
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("fusedaccum-offload") and _stays(thread)
    ]


def _stays(thread):
    thread.join(timeout=5)
    return thread.is_alive()


@pytest.mark.parametrize("end", ["step", "flush"])
def test_gradients_by_hand_are_refused_and_nothing_is_lost(device, end):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    for number, (x, y) in enumerate(micro_batches(device, 2)):
        (model(x) - y).square().mean().backward()
        if number == 0:
            model.unused.grad = torch.ones_like(model.unused)
            with pytest.raises(RuntimeError, match=r"\.grad was set by hand.*buffer_device.*set it to None"):
                getattr(opt, end)()
            model.unused.grad = None
        opt.step()
    assert_same(contents(model, opt), contents(straight, its))


def test_what_reads_p_grad_is_refused(device):
    model, opt = made(device, accum_steps=1, buffer_device="cpu")
    x, y = next(micro_batches(device, 1))
    (model(x) - y).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"normalize_\(\) makes p.grad.*clip with max_grad_norm="):
        opt.normalize_()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"GradScaler looks for overflows in p.grad.*use bf16"):
        scaler.step(opt)
    opt.step()
    assert opt.updated


def test_layers_that_add_by_themselves_are_refused(device):
    weight = nn.Parameter(torch.ones(3).to(device))
    weight.grad_added_to_main_grad = False
    with pytest.raises(ValueError, match=r"main_grad.*buffer_device='cpu'.*leave buffer_device out"):
        fa.AccumulatingOptimizer(sgd([weight]), buffer_device="cpu")


def test_fused_layers_go_the_plain_way(device):
    straight, its = made(device, accum_steps=2)
    train(straight, its, device, count=2)
    model, opt = made(device, accum_steps=2, buffer_device="cpu")
    train(fa.fuse_linear(model), opt, device, count=2)
    assert_same(contents(model, opt), contents(straight, its))


def test_parameters_on_the_cpu_are_as_without(device):
    """Half of the model is on the CPU already."""
    ends = []
    for where in ({}, {"buffer_device": "cpu"}):
        torch.manual_seed(1)
        first, second = nn.Linear(7, 6), moved(nn.Linear(6, 300), device)  # of which each is a part
        opt = fa.AccumulatingOptimizer(sgd([*first.parameters(), *second.parameters()]), accum_steps=2, **where)
        for number in range(6):
            second(torch.tanh(first(torch.full((2, 7), number / 5))).to(device)).square().mean().backward()
            if where and number:
                assert first.weight.grad is not None and second.weight.grad is None
            opt.step()
        ends.append(contents(nn.ModuleList([first, second]), opt))
    assert_same(*ends)


def test_nothing_is_warned_of(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, opt = made(device, accum_steps=2, buffer_device="cpu")
        train(model, opt, device)


def test_reset_waits_for_a_failure_on_its_way(device, monkeypatch):
    p = nn.Parameter(torch.ones(3, device=device))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), accum_steps=2, buffer_device="cpu")

    def fails_late(*_, **__):
        time.sleep(0.2)
        raise MemoryError("injected")

    with monkeypatch.context() as broken:
        broken.setattr(fusedaccum.extensions.cpu_offload, "_add", fails_late)
        p.sum().backward()
    opt.reset()
    for _ in range(2):
        p.sum().backward()
        opt.step()
    assert torch.equal(p.cpu(), torch.zeros(3))


@pytest.mark.filterwarnings("ignore:.*was set to None inside an open window")
def test_a_gradient_that_a_method_takes_away_is_not_stepped(device):
    class Clearing(torch.optim.SGD):
        def clear(self):
            for p in self.param_groups[0]["params"]:
                p.grad = None

    p = nn.Parameter(torch.ones(3, device=device))
    opt = fa.AccumulatingOptimizer(Clearing([p], lr=1.0), buffer_device="cpu", master_weights=True)
    p.sum().backward()
    opt.clear()
    opt.step()
    assert (p.cpu() == 1).all()
    p.sum().backward()
    opt.step()
    assert (p.cpu() == 0).all()


@pytest.mark.parametrize("then", ["step", "reset"])
def test_an_interrupt_after_a_part_was_stepped_does_not_step_it_twice(device, monkeypatch, then):
    """Or leave it out of the next window, if this one is dropped."""
    brought, interrupts = CpuOffload.brought, []

    @contextmanager
    def interrupted(self, slots):
        with brought(self, slots):
            yield
        if not interrupts:
            interrupts.append(slots)
            raise KeyboardInterrupt

    monkeypatch.setattr(CpuOffload, "brought", interrupted)
    params = [nn.Parameter(torch.ones(3000, device=device)) for _ in range(3)]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.25, foreach=False), 1, buffer_device="cpu")
    sum(p.sum() for p in params).backward()
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert len(interrupts[0]) < len(params)
    if then == "reset":
        opt.reset()
        sum(p.sum() for p in params).backward()
    opt.step()
    for p in params:
        twice = then == "reset" and any(slot.param is p for slot in interrupts[0])
        assert torch.equal(p.cpu(), torch.full((3000,), 0.5 if twice else 0.75))
