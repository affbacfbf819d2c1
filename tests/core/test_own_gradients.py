"""Gradients computed by the user's code (torch.autograd.grad, torch.func, evolution strategies)."""

import contextlib
import copy
import functools
import math
import weakref

import fusedaccum as fa
import pytest
import torch
from training import assert_grads, data, gradient, mean_loss, model, parts, wrapped, wrapper_of, zeros

SIZES = (4, 8, 12)


@pytest.mark.parametrize(
    "settings",
    [
        {"accum_steps": 3},
        {"window_weight": 24},
        {"accum_steps": 3, "nonfinite": "skip_micro_batch"},
        {"accum_steps": 3, "master_weights": True},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("beside_a_backward", [False, True])
def test_a_backward_of_their_own_brings_them_into_the_window(settings, beside_a_backward):
    """Each micro-batch's rows, weighted: half by autograd, if it has a backward, others by hand."""
    (net, (x, y)), counted = (model(), data()), len(settings) > 0
    parameters, opt = list(net.parameters()), wrapped(net, make=lambda ps: torch.optim.SGD(ps, lr=0.0), **settings)
    expected = gradient(net, x, y)
    for xs, ys in parts(x, y, SIZES):
        if counted:
            opt.zero_grad()
        with opt.micro_batch(weight=len(xs)):
            half = len(xs) // 2 if beside_a_backward else 0
            if half:
                (mean_loss(net, xs[:half], ys[:half]) / 2).backward()
            share = (mean_loss(net, xs[half:], ys[half:]) / (2 if half else 1),)
            torch.autograd.backward(parameters, torch.autograd.grad(*share, parameters))
        if counted:
            opt.step()
    if not counted:
        opt.step()
    assert opt.updated and opt.last_window.micro_batches == 3
    assert_grads(net, expected)


def test_a_backward_of_their_own_in_16_bit_buffers():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    parameters, opt = list(net.parameters()), wrapped(net, 3, buffer_dtype=None)
    for xs, ys in parts(x, y, (8, 8, 8)):
        mean_loss(net, xs, ys).backward()
        torch.autograd.backward(parameters, gradient(net, xs, ys))
        opt.step()
    assert_grads(net, [2 * g for g in gradient(model(), *data())], rtol=0.05)


def assign(p, g):
    p.grad = g


def alias(p, g):
    p._grad = g


def write(p, g):
    p.grad = torch.empty_like(p) if p.grad is None else p.grad
    p.grad.copy_(g)


@pytest.mark.parametrize("put", [assign, alias, write])
def test_one_that_takes_the_place_of_the_windows_is_warned_of(put):
    """A plain loop: zero_grad(), gradient by hand, step(). The window would hold only the last."""
    net, (x, y) = model(), data()
    opt = wrapped(net, 3)
    for number, batch in enumerate(parts(x, y, (8, 8, 8))):
        opt.zero_grad()
        for p, g in zip(net.parameters(), gradient(net, *batch), strict=True):
            put(p, g)
        told = pytest.warns(
            RuntimeWarning, match=r"the window's sum, to which more.*torch\.autograd\.backward\(parameters, grad"
        )
        with told if number == 1 else contextlib.nullcontext():
            opt.step()
    assert opt.updated


def test_one_per_window_is_that_windows():
    net, (x, y) = model(), data()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), accum_steps=2)
    for _ in range(3):
        expected = gradient(net, x, y)
        for p, g in zip(net.parameters(), expected, strict=True):
            p.grad = g.clone()
        opt.step()
        assert_grads(net, expected)
        mean_loss(net, x, y).backward()
        opt.step()
        assert opt.updated
        assert_grads(net, expected)
        opt.zero_grad()


def a3c(shared, worker, opt, batches):
    """The worker's gradients become the shared model's: from then on both have the same tensors."""
    for batch in batches:
        worker.load_state_dict(shared.state_dict())
        for p in worker.parameters():
            if p.grad is not None:
                p.grad.zero_()
        mean_loss(worker, *batch).backward()
        for mine, its in zip(shared.parameters(), worker.parameters(), strict=True):
            if mine.grad is None:
                mine._grad = its.grad
        opt.step()


@pytest.mark.parametrize("settings", [{"reduction": "none"}, {}, {"accum_steps": 1}, {"buffer_dtype": None}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_assigned_once_and_written_to_ever_after_is_followed(dtype, settings):
    shared, (x, y) = model(dtype), data(dtype=dtype)
    plain, batches = copy.deepcopy(shared), parts(x, y, (8, 8, 8))
    make = functools.partial(torch.optim.SGD, lr=0.1)
    a3c(shared, model(dtype), wrapped(shared, make=make, **settings), batches)
    a3c(plain, model(dtype), make(plain.parameters()), batches)
    for p, q in zip(shared.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("then", ["a step", "replaced", "removed", "zeroed"])
def test_a_tensor_that_was_assigned_is_followed_as_long_as_it_is_p_grad(then):
    pairs = []
    for wrap in (False, True):
        p, t = torch.nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
        opt = torch.optim.SGD([p], lr=1.0)
        opt = fa.AccumulatingOptimizer(opt, reduction="none") if wrap else opt
        p.grad = t
        opt.step()
        if then == "replaced":
            p.grad = torch.full((3,), 5.0)
        elif then == "removed":
            p.grad = None
        elif then == "zeroed":
            opt.zero_grad()
        t.mul_(3)
        opt.step()
        t.mul_(2)
        if then in ("removed", "zeroed"):
            p.sum().backward()
        opt.step()
        pairs.append(p.detach())
    assert torch.equal(*pairs)


def test_a_tensor_that_was_assigned_is_not_kept_alive():
    p = torch.nn.Parameter(torch.ones(3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), reduction="none")
    p.grad = torch.ones(3)
    alive = weakref.ref(p.grad)
    opt.step()
    assert alive() is None


def test_reset_drops_a_gradient_put_in_by_hand():
    p = zeros()
    opt = wrapper_of([p], 1)
    p.sum().backward()
    p.grad = p.grad * 100
    opt.reset()
    p.sum().backward()
    opt.step()
    assert p.item() == -1


def test_two_gradients_swapped_by_hand():
    p, q = zeros(), zeros()
    opt = wrapper_of([p, q])
    (p + 5 * q).sum().backward()
    p.grad, q.grad = q.grad, p.grad
    opt.step()
    assert (p.item(), q.item()) == (-5, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["grad.data", "model.to"])
@pytest.mark.parametrize("at", [1, 2])
def test_memory_of_a_gradient_replaced_inside_a_window(at, how, dtype):
    """``model.to(dtype)`` replaces the memory of every p.grad with another dtype.

    It does so even if it changes no parameter.
    """
    net = torch.nn.Linear(3, 2, bias=False).to(dtype)
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), 3, reduction="none", max_grad_norm=math.inf
    )
    for k in range(3):
        net(torch.full((1, 3), 2.0**k, dtype=dtype)).sum().backward()
        if k == at:
            if how == "model.to":
                net.to(dtype)
            else:
                net.weight.grad.data = 3 * net.weight.grad
        opt.step()
    expected = sum((3.0 if how == "grad.data" and k <= at else 1.0) * 2**k for k in range(3))
    assert net.weight.grad.tolist() == [[expected] * 3] * 2
    assert opt.last_window.grad_norm == pytest.approx(expected * 6**0.5)


def test_a_gradient_without_elements_put_in_by_hand():
    """All tensors without elements have the same address."""
    empty, other = zeros(0), zeros(2, torch.bfloat16)
    opt = wrapper_of([empty, other], 2)
    for _ in range(2):
        (empty.sum() + other.sum()).backward()
        opt.step()
    opt.zero_grad()
    empty.grad, other.grad = torch.zeros(0), torch.full((2,), 4.0, dtype=torch.bfloat16)
    opt.step()
    opt.flush()
    assert other.tolist() == [-1 - 4] * 2
