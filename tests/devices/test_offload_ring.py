"""Buffers in CPU memory: gradients and sums pass through a ring that bounds device memory."""

import gc

import fusedaccum as fa
import fusedaccum.extensions.ring
import fusedaccum.limits
import pytest
import torch
from fusedaccum.extensions.cpu_offload import CpuOffload
from fusedaccum.extensions.ring import loads
from offloading import assert_same
from sizes import limits
from torch import nn

# -- memory ----------------------------------------------------------------------------------------


class Made(torch.autograd.Function):
    """Its backward returns the parameter's gradient in new memory, and needs no other memory."""

    @staticmethod
    def forward(ctx, p, x):
        ctx.shape = p.shape
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(ctx.shape, device=grad.device), grad


@pytest.mark.parametrize("sizes", [[24], [24, 24, 24], [1] * 24, [5, 1, 9, 1, 1, 7]])
@limits(STAGE=1 << 14, SENT=1 << 14, bucket=1 << 40)  # as on a large GPU
def test_memory_for_gradients_is_bounded_by_the_ring(late_device, device, sizes):
    """``sizes`` are in stages. Bounds are for backward, and for step(), which brings sums back."""
    if late_device is None:
        pytest.skip("counts what the device of late_device.cpp allocates; benchmarks/bench_memory.py measures a GPU's")
    stage = fusedaccum.limits.STAGE
    params = [nn.Parameter(torch.zeros(stage // 4 * size, device=device)) for size in sizes]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.1, foreach=False), accum_steps=2, buffer_device="cpu")
    for _ in range(2):
        x = torch.ones(1, device=device, requires_grad=True)
        for p in params:
            x = Made.apply(p, x)
        gc.collect()
        before = late_device.allocated()
        late_device.reset_peak()
        x.sum().backward()
        ring = 0 if opt.last_window or len(opt.state) else fusedaccum.extensions.ring.STAGES
        during = (late_device.peak() - before) / stage
        assert (
            during < ring + 1 + max(sizes) + 0.2
        )  # the ring if it is yet to be made, the bucket, and the gradient that fills it
        late_device.reset_peak()
        opt.step()
        assert (late_device.peak() - before) / stage < fusedaccum.extensions.ring.STAGES + 2 * max(
            sizes
        ) + 0.2  # SGD makes a temporary
        assert all(p.grad is None for p in params)
    assert opt.updated and all((p.cpu() == -0.1).all() for p in params)


# -- gradients that others hold --------------------------------------------------------------------


@pytest.mark.parametrize("hooks", ["native", "python"])
def test_a_gradient_that_autograd_goes_on_adding_to(device, monkeypatch, hooks):
    """``h`` and ``p`` get one gradient tensor; autograd adds that of ``h``'s other use in place."""
    monkeypatch.setenv("FUSEDACCUM_INTAKE", hooks)
    w, p = (nn.Parameter(torch.randn(shape).to(device)) for shape in ((32, 32), (4, 32)))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([w, p], lr=1.0, foreach=False), accum_steps=1, buffer_device="cpu")
    x, factor, before = torch.randn(4, 32).to(device), torch.randn(4, 32), p.detach().cpu().clone()
    h = x @ w
    side = h * 100.0
    (((h + p) * factor.to(device)).sum() + side.sum()).backward()
    opt.step()
    torch.testing.assert_close(before - p.detach().cpu(), factor, rtol=0.0, atol=1e-5)


class Static(torch.autograd.Function):
    """Returns its gradient in the same memory each time, as graphed callables do."""

    memory: torch.Tensor

    @staticmethod
    def forward(ctx, p, value):
        ctx.value = value
        return p.sum() * 0

    @staticmethod
    def backward(ctx, _):
        return Static.memory.fill_(ctx.value), None


@pytest.mark.parametrize("hooks", ["native", "python"])
def test_gradients_in_static_memory_and_such_that_a_hook_writes_to(device, monkeypatch, hooks):
    monkeypatch.setenv("FUSEDACCUM_INTAKE", hooks)
    p, q = (nn.Parameter(torch.zeros(1000, device=device)) for _ in range(2))
    Static.memory = torch.empty(1000, device=device)
    kept = []
    q.register_hook(kept.append)
    sgd1 = torch.optim.SGD([p, q], lr=1.0, foreach=False)
    opt = fa.AccumulatingOptimizer(sgd1, accum_steps=3, reduction="none", buffer_device="cpu")
    for value in (1.0, 2.0, 4.0):
        (Static.apply(p, value) + (q * 1.0).sum()).backward()
        kept.pop().mul_(50)
        opt.step()
    assert (p.cpu() == -7).all() and (q.cpu() == -3).all()


# -- the two ops -----------------------------------------------------------------------------------


def late(x, device):
    """A copy on the device that the current stream has yet to make."""
    return x.pin_memory().to(device, non_blocking=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_and_scalars_are_read_when_the_current_stream_has_made_them(device, dtype):
    offload = CpuOffload()
    for _ in range(3):
        shapes = [(3000,), (), (0,), (7, 5), (400,)]
        buffers, grads = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(2))
        scale, decay = torch.rand((), dtype=torch.float64), torch.rand(())
        expected, stats, theirs = [x.clone() for x in buffers], fa.ops.Stats.empty(), fa.ops.Stats.empty()
        fa.ops.accumulate_(expected, grads, scale, decay=decay, stats=theirs)
        there = [late(x, device) for x in grads]
        how = {"overwrite": False, "rounding": None, "stats": stats, "backend": "auto"}
        offload.accumulate_(buffers, there, late(scale, device), decay=late(decay, device), **how)
        del there
        offload.finish_adds()
        assert_same(buffers, expected)
        torch.testing.assert_close(stats.sq_norm, theirs.sq_norm, rtol=1e-12, atol=0.0)
        assert stats.nonfinite == theirs.nonfinite == 0


def test_cast_brings_what_was_there_when_it_was_called(device):
    offload = CpuOffload()
    ins = [torch.randn(3000), torch.randn(8, 5).t(), torch.randn(6), torch.randn(1)]
    expected = [x.bfloat16() for x in ins]
    outs = [
        torch.full_like(x, torch.nan, dtype=torch.bfloat16, device=device) for x in (*ins[:2], torch.ones(12), ins[3])
    ]
    around, outs[2] = outs[2], outs[2][::2]
    offload.cast_(outs, ins, backend="auto")
    for x in ins:
        x.fill_(torch.nan)
    assert_same([x.cpu() for x in outs], expected)
    assert around[1::2].isnan().all()


@pytest.mark.parametrize("sizes", [[0], [1], [5, 0, 7], [255, 256, 257, 1], [3000], [17, 2000, 3, 900, 1]])
def test_loads_hold_every_element_once_and_fit_into_a_stage(sizes):
    tensors = [torch.empty(size, dtype=torch.bfloat16 if k % 2 else torch.float32) for k, size in enumerate(sizes)]
    found = []
    for load, used in loads(tensors):
        ends = fusedaccum.extensions.ring.HEAD
        for cut in load:
            nbytes = (cut.end - cut.begin) * tensors[cut.tensor].itemsize
            assert cut.place % 64 == 0 and cut.place >= ends and nbytes > 0
            ends = cut.place + nbytes
            found += [(cut.tensor, element) for element in range(cut.begin, cut.end)]
        assert load and ends <= used <= fusedaccum.limits.STAGE
    assert found == [(k, element) for k, size in enumerate(sizes) for element in range(size)]


def test_what_stats_count_is_of_all_loads(device):
    offload = CpuOffload()
    grad = torch.ones(3000)  # several loads
    grad[0] = grad[1500] = torch.inf
    buffers, stats = [torch.zeros(3000)], fa.ops.Stats.empty()
    how = {"overwrite": True, "decay": 1.0, "rounding": None, "stats": stats, "backend": "auto"}
    offload.accumulate_(buffers, [grad.to(device)], 1.0, **how)
    offload.finish_adds()
    assert stats.nonfinite == 2 and stats.sq_norm == torch.inf


def test_random_numbers_of_a_tensor_in_several_loads_may_wrap_around(device):
    offload, how = CpuOffload(), {"overwrite": False, "decay": 1.0, "stats": None, "backend": "auto"}
    draws = fa.ops.StochasticRounding(7, [(1 << 64) - 600])
    buffer, grad = torch.randn(2000).bfloat16(), torch.randn(2000).bfloat16()
    expected = buffer.clone()
    fa.ops.accumulate_([expected], [grad], 0.3, rounding=draws)
    offload.accumulate_([buffer], [grad.to(device)], 0.3, rounding=draws, **how)
    offload.finish_adds()
    assert torch.equal(buffer, expected)


def test_cast_follows_the_elements_and_not_the_memory(device):
    offload = CpuOffload()
    x = torch.randn(2, 3, 4, 5)
    out = torch.empty_like(x, dtype=torch.bfloat16, device=device, memory_format=torch.channels_last)
    offload.cast_([out], [x], backend="auto")
    assert torch.equal(out.cpu(), x.bfloat16())


def test_zeros_that_have_no_memory_are_added(device):
    offload, how = CpuOffload(), {"overwrite": False, "decay": 1.0, "rounding": None, "stats": None, "backend": "auto"}
    buffer = torch.ones(5)
    offload.accumulate_([buffer], [torch._efficientzerotensor(5, device=device)], 1.0, **how)
    offload.finish_adds()
    assert torch.equal(buffer, torch.ones(5))
