"""The wrapper's windows on a GPU."""

import fusedaccum as fa
import pytest
import torch
from gpu_cases import DEVICE, batches, every_kernel, needs_gpu
from torch import nn
from training import assert_same_parameters, big_batch_step, data, mean_loss, model, parts, sgd, twin


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (4, 6, 14)], ids=["equal", "unequal"])
@every_kernel
def test_a_window_is_the_big_batch(backend, sizes, fused):
    net = model(torch.float64).to(DEVICE)
    big = twin(net)
    opt = fa.AccumulatingOptimizer(
        torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, fused=fused), 3, backend=backend
    )
    x, y, micro_batches = batches(torch.float64, sizes)
    for xs, ys in micro_batches:
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        opt.step()
        opt.zero_grad()
    big_batch_step(big, torch.optim.AdamW(big.parameters(), lr=1e-2, eps=1e-3, fused=fused), x, y)
    assert_same_parameters(net, big, 1e-12)


@every_kernel
def test_bf16_gradients_gather_in_fp32_and_clip(backend):
    p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16, device=DEVICE))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([p], lr=1.0),
        2,
        reduction="none",
        max_grad_norm=float("inf"),
        master_weights=True,
        backend=backend,
    )
    for factor in (256.0, 1.0):
        (p * factor).sum().backward()
        opt.step()
    assert opt.last_window.grad_norm == 257.0 * 8
    state = opt.state_dict()["fusedaccum"]["masters"]
    assert all((master == -257.0).all() for master in state.values())


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
@every_kernel
def test_what_is_not_finite_leaves_no_trace(backend, policy):
    net = model(torch.float32).to(DEVICE)
    before = twin(net)
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 2, nonfinite=policy, backend=backend)
    _, _, micro_batches = batches(torch.float32, (12, 12))
    for factor, (xs, ys) in zip((1.0, float("nan")), micro_batches):
        (mean_loss(net, xs, ys) * factor).backward()
        opt.step()
    assert not opt.updated
    assert_same_parameters(net, before, 0)


@every_kernel
def test_a_grad_scaler_skips_the_window_and_backs_off(backend):
    net = model(torch.float32).to(DEVICE)
    before = twin(net)
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 2, backend=backend)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
    _, _, micro_batches = batches(torch.float32, (12, 12))
    for factor, (xs, ys) in zip((1.0, float("inf")), micro_batches):
        scaler.scale(mean_loss(net, xs, ys) * factor).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 32.0
    assert_same_parameters(net, before, 0)


@needs_gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"buffer_device": "cpu", "master_weights": True}, {"optimizer_device": "cpu"}],
    ids=["there", "offloaded", "optimizer away"],
)
def test_loading_takes_a_model_that_was_moved_after_it_was_wrapped(settings):
    """As Accelerate and Hugging Face's Trainer do."""
    nets = [model(torch.float32), model(torch.float32).to(DEVICE)]
    opts = [fa.AccumulatingOptimizer(sgd(net.parameters()), 2, **settings) for net in nets]
    nets[0].to(DEVICE)
    opts[0].load_state_dict(opts[0].state_dict())
    x, y = (t.to(DEVICE) for t in data(dtype=torch.float32))
    for net, opt in zip(nets, opts):
        for xs, ys in parts(x, y, (6, 6, 6, 6)):
            mean_loss(net, xs, ys).backward()
            opt.step()
        assert opt.updated and opt.last_window.micro_batches == 2
    assert_same_parameters(*nets, 0)


def graphed_callable(net, sample):
    return torch.cuda.make_graphed_callables(net, (sample,))


def with_graphs_of_its_own(net, sample):
    return torch.compile(net, mode="reduce-overhead")


@needs_gpu
@every_kernel
@pytest.mark.parametrize("first", [True, False], ids=["graphed, then wrapped", "wrapped, then graphed"])
@pytest.mark.parametrize("graphed", [graphed_callable, with_graphs_of_its_own])
def test_gradients_in_the_memory_of_graphs_are_added_before_the_next_replay(backend, graphed, first):
    """pytorch#96693, #169545: each replay writes its gradients over those of the one before."""
    net = model(torch.float64).to(DEVICE)
    big = twin(net)
    x, y, micro_batches = batches(torch.float64, (8, 8, 8))

    def wrapped():
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, fused=True)
        return fa.AccumulatingOptimizer(inner, 3, max_grad_norm=0.1, backend=backend)

    opt = wrapped() if first is False else None
    run = graphed(net, micro_batches[0][0])
    opt = opt or wrapped()
    oracle = torch.optim.AdamW(big.parameters(), lr=1e-2, eps=1e-3, fused=True)
    for _ in range(5):  # the compiler warms up, records, and replays
        for xs, ys in micro_batches:
            torch.compiler.cudagraph_mark_step_begin()
            opt.backward(mean_loss(run, xs, ys))
            opt.step()
            opt.zero_grad()
        oracle.zero_grad()
        mean_loss(big, x, y).backward()
        norm = nn.utils.clip_grad_norm_(big.parameters(), 0.1)
        oracle.step()
        torch.testing.assert_close(opt.last_window.grad_norm, norm, rtol=1e-10, atol=0)
        assert_same_parameters(net, big, 1e-10)
