"""MicroBatcher when other things than memory fail: what it refuses, what errors leave behind."""

import warnings

import fusedaccum as fa
import fusedaccum.autograd.collector
import fusedaccum.ops
import fusedaccum.recipes.micro_batcher
import pytest
import torch
from out_of_memory import Memory, Points, assert_close, batch, function, made, oracle, sgd, weight
from torch import nn

pytestmark = pytest.mark.long


def test_one_sample_that_does_not_fit():
    memory = Memory(7)
    before = memory.net.weight.detach().clone()
    batcher = fa.MicroBatcher(memory, memory.opt)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"one sample does not fit.*checkpointing.*The window was dropped.*injected"
    ):
        batcher.step(torch.randn(4, 9))
    assert memory.sizes == [4, 2, 1] and (memory.net.weight == before).all() and memory.net.weight.grad is None
    memory.room = 9
    batcher.step(torch.randn(4, 9))
    assert memory.opt.updated and memory.opt.last_window.micro_batches == 4


def test_a_number_of_samples_that_does_not_fit():
    memory = Memory(7)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"micro_batch_size=8 does not fit; give a smaller one, or 'auto'.*injected"
    ):
        fa.MicroBatcher(memory, memory.opt, 8).step(torch.randn(16, 1))


@pytest.mark.parametrize("size", ["auto", 4])
def test_another_error_drops_the_window_and_the_batch_can_come_again(monkeypatch, size):
    expected = oracle([batch()])[0]
    for point in (1, 5, 12, 20, 30, 33, 40, 50):
        with monkeypatch.context() as patched:
            model, opt = made()
            Points(patched, model, [point], error=ValueError)
            batcher = fa.MicroBatcher(function(model), opt, size, weight=weight)
            batcher._sizes.of(batch()).limit = 4
            with warnings.catch_warnings(), pytest.raises(ValueError, match="injected"):
                warnings.simplefilter(
                    "ignore"
                )  # it warns that the window was dropped if part of a micro-batch had been added
                batcher.step(batch())
            assert all(p.grad is None for p in model.parameters()) and opt.last_window is None
            batcher.step(batch())
        assert_close(model, expected, 1e-12)


def test_an_error_of_the_optimizer_drops_the_window(monkeypatch):
    expected = oracle([batch()])[0]
    model, opt = made()
    batcher = fa.MicroBatcher(function(model), opt, weight=weight)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(opt.optimizer, "step", lambda: 1 / 0)
        batcher.step(batch())
    batcher.step(batch())
    assert_close(model, expected, 1e-12)


def test_an_open_window_is_not_joined():
    model, opt = made()
    model(batch()["x"]).sum().backward()
    with pytest.raises(RuntimeError, match=r"opt holds an open window.*opt.reset\(\)"):
        fa.MicroBatcher(function(model), opt).step(batch())
    opt.step()
    fa.MicroBatcher(function(model), opt).step(batch())


def test_bad_arguments():
    model, opt = made()
    for size in ("big", None, True):
        with pytest.raises(TypeError, match=r"micro_batch_size must be an int, got .*; 'auto' finds what fits"):
            fa.MicroBatcher(model, opt, size)
    with pytest.raises(ValueError, match=r"micro_batch_size must be an int, got the float 2.0; write 2; 'auto' finds"):
        fa.MicroBatcher(model, opt, 2.0)
    with pytest.raises(ValueError, match=r"micro_batch_size must be at least 1, got 0"):
        fa.MicroBatcher(model, opt, 0)
    with pytest.raises(TypeError, match=r"opt must be an AccumulatingOptimizer, got a SGD; wrap it"):
        fa.MicroBatcher(model, opt.optimizer)
    with pytest.raises(TypeError, match=r"model_or_fn must be a module or a function.*got a int"):
        fa.MicroBatcher(3, opt)
    with pytest.raises(TypeError, match=r"weight must be a function.*got 3"):
        fa.MicroBatcher(model, opt, weight=3)
    del opt
    for how in ({"accum_steps": 2}, {"window_weight": 2.0}):
        with pytest.raises(ValueError, match=r"opt closes windows itself.*leave accum_steps and window_weight out"):
            fa.MicroBatcher(model, made(**how)[1])
    with pytest.raises(ValueError, match=r"opt is LBFGS.*in a closure"):
        fa.MicroBatcher(model, made(make=torch.optim.LBFGS)[1])


def test_layers_that_add_by_themselves_take_a_number():
    p = nn.Parameter(torch.ones(3))
    p.grad_added_to_main_grad = False
    opt = fa.AccumulatingOptimizer(sgd([p]), reduction="sum")
    with pytest.raises(ValueError, match=r"micro_batch_size='auto'.*main_grad.*give a number"):
        fa.MicroBatcher(print, opt)
    fa.MicroBatcher(lambda x: (x * p).sum(), opt, 2).step(torch.ones(5, 3))
    assert (p == 0.5).all()


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda x: x, r"a loss of shape \(2, 1\)"),
        (lambda x: None, "a NoneType"),
        (lambda x: {}, "a dict"),
        (lambda x: 1.0, "a float"),
    ],
)
def test_what_is_no_loss(loss, got):
    memory = Memory(7)
    with pytest.raises(
        TypeError, match=rf"model_or_fn must return the micro-batch's loss.*got {got}.*MicroBatcher\(lambda"
    ):
        fa.MicroBatcher(loss, memory.opt).step(torch.randn(2, 1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_bad_batches_and_weights(reduction):
    model, opt = made(reduction=reduction)
    for given, message in (
        ({}, "holds no tensors"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, "holds 3"),
        (torch.ones(0, 6), "no samples"),
    ):
        with pytest.raises(ValueError, match=message):
            fa.MicroBatcher(model, opt).step(given)
    with pytest.raises(ValueError, match=r"weight must be finite and not negative, got -1"):
        fa.MicroBatcher(function(model), opt, weight=lambda part: -1).step(batch())


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
            ),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_is_an_out_of_memory_error(error, is_one):
    assert fusedaccum.recipes.micro_batcher.is_out_of_memory(error) is is_one


def test_the_error_that_pytorch_raises_here():
    memory = Memory(100)

    def loss(x):
        if len(x) > 2:
            torch.empty(1 << 50, device="cuda" if torch.cuda.is_available() else "cpu")
        return memory(x)

    fa.MicroBatcher(loss, memory.opt).step(torch.randn(5, 1))
    assert memory.sizes == [2, 1, 2]


def test_what_is_no_loss_and_no_batch_is_refused():
    net, x = nn.Linear(3, 1), torch.randn(6, 3)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="has no graph"):
        fa.MicroBatcher(lambda part: net(part).mean().detach(), opt).step(x)
    with pytest.raises(TypeError, match=r"got a DataLoader; use `for loss in batcher.epoch\(loader\)"):
        fa.MicroBatcher(lambda part: net(part).mean(), opt).step(torch.utils.data.DataLoader(x))
    assert not opt._ledger.is_open


def test_two_wrappers_cannot_share_a_batcher():
    a, b = nn.Linear(3, 3), nn.Linear(3, 1)
    opt, other = (fa.AccumulatingOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (a, b))
    with pytest.raises(ValueError, match=r"a parameter of shape .* belongs to another Acc"):
        fa.MicroBatcher(lambda part: b(a(part)).mean(), opt).step(torch.randn(4, 3))
    assert not opt._ledger.is_open and not other._ledger.is_open


@pytest.mark.parametrize("call", ["zero_grad", "reset"])
def test_a_function_that_drops_the_window_is_found_out(call):
    net, x = nn.Linear(3, 1), torch.randn(8, 3)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def whole_script(part):
        getattr(opt, call)()
        return net(part).mean()

    before = net.weight.clone()
    with pytest.raises(RuntimeError, match=r"leave opt\.step"):
        fa.MicroBatcher(whole_script, opt, 4).step(x)
    assert torch.equal(net.weight, before)
