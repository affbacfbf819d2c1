"""Faults that a review found, each reproduced as it was found. The expected numbers are plain PyTorch's."""

import copy
import math

import fusedaccum as fa
import pytest
import torch
from fusedaccum.autograd import collector
from torch.nn import Parameter


def zeros(n=1, dtype=torch.float32):
    return Parameter(torch.zeros(n, dtype=dtype))


def wrap(parameters, *args, make=None, **kwargs):
    make = make or (lambda ps: torch.optim.SGD(ps, lr=1.0))
    return fa.AccumulatingOptimizer(make(parameters), *args, **kwargs)


def test_norm_taken_before_unscale_is_not_believed():
    p = zeros()
    opt, scaler = wrap([p], max_grad_norm=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum() * 0.5).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    assert p.item() == -0.5 and opt.last_window.grad_norm == 0.5


def test_clipping_by_hand_after_a_rejected_micro_batch_does_not_reach_the_sums():
    p, q = zeros(), zeros()
    opt = wrap([p, q], nonfinite="skip_micro_batch")
    (p + q).sum().backward()
    (p * math.nan + q).sum().backward()
    torch.nn.utils.clip_grad_norm_([p, q], 10.0)
    opt.step()
    assert p.item() == q.item() == -1


@pytest.mark.parametrize("look", ["state_dict", "deepcopy", "normalize_"])
def test_looking_at_a_rejected_micro_batch_leaves_no_trace(look):
    p, q = zeros(), zeros()
    opt = wrap([p, q], 2, nonfinite="skip_micro_batch")
    (p + q).sum().backward()
    opt.step()
    (p * math.nan + q).sum().backward()
    if look == "normalize_":
        with pytest.raises(RuntimeError, match="1 micro-batches"):
            opt.normalize_()
    else:
        opt.state_dict() if look == "state_dict" else copy.deepcopy(opt)
    opt.step()
    (p + q).sum().backward()
    opt.step()
    assert p.item() == q.item() == -1


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
def test_a_rejected_gradient_that_is_one_number_expanded_can_be_written_in_place(clip):
    p = zeros(3)
    opt, scaler = wrap([p], nonfinite="skip_micro_batch"), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum() * math.inf).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2 and not opt.updated


def test_unscale_of_a_rejected_micro_batch_leaves_the_sums_alone():
    p, q = zeros(), zeros()
    opt, scaler = wrap([p, q], 2, nonfinite="skip_micro_batch"), torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True, False):
        scaler.scale((p * (math.inf if bad else 2.0) + q * 2.0).sum()).backward()
        if bad:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert p.item() == q.item() == -2


def test_gradient_replaced_by_a_step_hook_does_not_survive_its_window():
    p = zeros()
    opt = wrap([p], 2)
    opt.register_step_pre_hook(lambda *_: setattr(p, "grad", p.grad.clamp(-10, 10)))
    for _ in range(4):
        p.sum().backward()
        opt.step()
    assert p.item() == -2


def test_reset_drops_a_gradient_put_in_by_hand():
    p = zeros()
    opt = wrap([p], 1)
    p.sum().backward()
    p.grad = p.grad * 100
    opt.reset()
    p.sum().backward()
    opt.step()
    assert p.item() == -1


@pytest.mark.parametrize("again", ["step", "flush"])
@pytest.mark.parametrize("steps", [None, 2], ids=["caller-owned", "counted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_step_that_raises_can_be_tried_again(dtype, steps, again):
    p = zeros(3, dtype)
    opt, fail = wrap([p], steps), [True]

    def hook(*_):
        if fail:
            raise MemoryError

    opt.register_step_pre_hook(hook)
    for i in range(2):
        (p * torch.tensor([1.0, 2.0, 3.0], dtype=dtype)).sum().backward()
        if steps and i == 0:
            opt.step()
    with pytest.raises(MemoryError):
        opt.step()
    assert not opt.updated
    fail.clear()
    getattr(opt, again)()
    assert opt.updated and opt.last_window.micro_batches == 2
    assert p.tolist() == [-1, -2, -3]


def test_a_window_is_not_tried_again_when_one_that_broke_off_has_overwritten_it(monkeypatch):
    monkeypatch.setattr(collector, "bucket_bytes", lambda _: 1)
    p, q = zeros(), zeros()
    opt, fail = wrap([p, q], 1), [MemoryError, MemoryError]

    def hook(*_):
        if fail:
            raise fail.pop()

    opt.register_step_pre_hook(hook)
    (p + q).sum().backward()
    with pytest.raises(MemoryError):
        opt.step()
    first = q * 1.0
    first.register_hook(hook)
    with pytest.raises(MemoryError), pytest.warns(RuntimeWarning, match="broken off"):
        opt.backward((first + p).sum())
    opt.step()
    assert not opt.updated and not opt.last_window.applied and p.item() == q.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_whose_step_post_hook_raises_is_not_stepped_again(dtype):
    p = zeros(3, dtype)
    opt, fail = wrap([p], 1, master_weights=dtype is torch.bfloat16), [OSError]

    def hook(*_):
        if fail:
            raise fail.pop()

    opt.register_step_post_hook(hook)
    p.sum().backward()
    with pytest.raises(OSError):
        opt.step()
    assert p.tolist() == [-1, -1, -1]
    opt.step()
    assert p.tolist() == [-1, -1, -1] and opt.updated and opt.last_window.micro_batches == 1


def test_fused_sgd_whose_first_window_is_skipped():
    """PyTorch creates the momentum with empty_like, and does not fill it when found_inf is set."""
    p = zeros(300)
    opt = wrap([p], nonfinite="skip_window", make=lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9, fused=True))
    (p * math.inf).sum().backward()
    opt.step()
    assert not opt.updated
    p.sum().backward()
    opt.step()
    assert opt.updated and p.eq(-1).all()


class Showing(torch.optim.Optimizer):
    """Steps another optimizer, and forwards all attributes to it."""

    def __init__(self, optim):
        self.optim = optim

    def __getattr__(self, name):
        return getattr(self.optim, name)

    def step(self, closure=None):
        return self.optim.step(closure)


def test_an_optimizer_round_a_fused_one_gets_the_finished_gradient():
    """It used to get the undivided sum, with a grad_scale that the fused optimizer never saw."""
    p = zeros()
    opt = wrap([p], 4, make=lambda ps: Showing(torch.optim.SGD(ps, lr=1.0, fused=True)))
    for _ in range(4):
        p.sum().backward()
        opt.step()
    assert p.item() == -1


def test_one_group_of_a_fused_optimizer_is_not_fused():
    a, b = zeros(3), zeros(3)
    groups = [{"params": [a]}, {"params": [b], "fused": False}]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(groups, lr=1.0, fused=True), 4)
    for _ in range(4):
        (a.sum() + b.sum()).backward()
        opt.step()
    assert a.tolist() == b.tolist() == [-1] * 3


def test_checkpoint_of_masters_does_not_overwrite_other_weights_loaded_before():
    p = Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = wrap([p], master_weights=True)
    (p * 0.0).sum().backward()
    opt.step()
    q = Parameter(torch.full((4,), 5.0, dtype=torch.bfloat16))
    other = wrap([q], master_weights=True)
    other.load_state_dict(opt.state_dict())
    (q * 0.0).sum().backward()
    other.step()
    assert q.tolist() == [5] * 4


def test_fp16_gradient_that_overflows_only_in_the_final_cast_is_skipped():
    p = zeros(2, torch.float16)
    opt = wrap([p], 2, reduction="none", nonfinite="skip_window")
    for _ in range(2):
        (p * 40000.0).sum().backward()
        opt.step()
    assert not opt.updated and p.tolist() == [0, 0]


def test_dropped_first_micro_batch_is_reported_although_zero_grad_follows():
    p = zeros()
    opt = wrap([p], 2, nonfinite="skip_micro_batch")
    for value in (math.nan, 1.0, 1.0):
        (p * value).sum().backward()
        opt.step()
        opt.zero_grad()
    assert opt.last_window.nonfinite == 1 and opt.last_window.micro_batches == 2


def test_weight_at_step_of_a_caller_owned_window():
    p = zeros()
    opt = wrap([p], reduction="none")
    p.sum().backward()
    p.sum().backward()
    opt.step(weight=10)
    assert opt.last_window.weight == 10 and p.item() == -2
    opt = wrap([zeros()], reduction="sum")
    q = opt.param_groups[0]["params"][0]
    opt.backward(q.sum(), weight=2)
    with pytest.raises(ValueError, match="nothing to weigh"):
        opt.step(weight=10)


def test_lbfgs_takes_the_weight_at_step_and_refuses_to_skip_a_window():
    p = zeros()
    opt = wrap([p], reduction="sum", make=lambda ps: torch.optim.LBFGS(ps, lr=1.0, max_iter=1))

    def closure():
        loss = ((p - 3) ** 2).sum()
        loss.backward()
        return loss

    opt.step(closure, weight=2)
    assert opt.last_window.weight == 2 and p.grad.item() == -3
    with pytest.raises(ValueError, match="LBFGS"):
        wrap([zeros()], nonfinite="skip_window", make=torch.optim.LBFGS)


def test_state_that_the_inner_optimizer_refuses_leaves_the_open_window():
    p = zeros()
    opt = wrap([p], 2)
    p.sum().backward()
    opt.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    p.sum().backward()
    opt.step()
    assert opt.updated and p.item() == -1


def test_deepcopy_with_plain_tensors_as_parameters():
    p = torch.zeros(2, requires_grad=True)
    opt = wrap([p], 2)
    p.sum().backward()
    opt.step()
    other = copy.deepcopy(opt)
    q = other.param_groups[0]["params"][0]
    q.sum().backward()
    other.step()
    assert q.tolist() == [-1, -1] and p.tolist() == [0, 0]


def test_groups_and_state_that_are_set_reach_the_inner_optimizer():
    opt = wrap([zeros()], 2)
    for name in ("param_groups", "state"):
        value = copy.copy(getattr(opt, name))
        setattr(opt, name, value)
        assert getattr(opt.optimizer, name) is value and name not in vars(opt)


def test_plain_step_in_a_window_that_a_scaler_began_is_refused():
    p = zeros()
    opt, scaler = wrap([p], 2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(opt)
    scaler.update()
    p.sum().backward()
    with pytest.raises(RuntimeError, match="through the scaler"):
        opt.step()


def test_two_gradients_swapped_by_hand():
    p, q = zeros(), zeros()
    opt = wrap([p, q])
    (p + 5 * q).sum().backward()
    p.grad, q.grad = q.grad, p.grad
    opt.step()
    assert (p.item(), q.item()) == (-5, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["grad.data", "model.to"])
@pytest.mark.parametrize("at", [1, 2])
def test_memory_of_a_gradient_replaced_inside_a_window(at, how, dtype):
    """``model.to(dtype)`` replaces the memory of every p.grad with another dtype, even if it changes no parameter."""
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


@pytest.mark.parametrize("at", ["inside a window", "between windows"])
def test_parameters_become_channels_last_under_a_fused_optimizer(at):
    """A fused optimizer walks through parameter and gradient in memory order, so their strides must agree."""

    def make(ps):
        return torch.optim.SGD(ps, lr=0.1, fused=True)

    net = torch.nn.Conv2d(4, 6, 3).double()
    big, x = copy.deepcopy(net), torch.randn(3, 4, 4, 5, 5, dtype=torch.float64)
    opt, plain = wrap(list(net.parameters()), 2, make=make), make(big.parameters())
    for window, batch in enumerate(x):
        for i, part in enumerate(batch.chunk(2)):
            if window == 1 and i == (at == "inside a window"):
                net.to(memory_format=torch.channels_last)
            net(part).square().mean().backward()
            opt.step()
            opt.zero_grad()
        plain.zero_grad()
        big(batch).square().mean().backward()
        plain.step()
    assert net.weight.is_contiguous(memory_format=torch.channels_last)
    for p, q in zip(net.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("settings", [{}, {"nonfinite": "skip_micro_batch"}, {"master_weights": True}], ids=str)
def test_a_tied_weight_that_its_group_lists_twice(settings):
    """PyTorch warns and steps it twice, but it has one gradient, which counts once in the norm."""
    dtype = torch.bfloat16 if "master_weights" in settings else torch.float64
    net, x = torch.nn.Linear(3, 2).to(dtype), torch.randn(4, 3).to(dtype)
    big = copy.deepcopy(net).double()

    def make(ps):
        return torch.optim.SGD(ps, lr=1.0, foreach=False)

    opt = wrap([net.weight, net.bias, net.weight], 2, max_grad_norm=0.125, make=make, **settings)
    plain = make([big.weight, big.bias, big.weight])
    for part in x.chunk(2):
        net(part).sum().backward()
        opt.step()
    (big(x.double()).sum() / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(big.parameters(), 0.125)
    plain.step()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(opt.last_window.grad_norm, norm, rtol=tolerance, atol=0)
    for p, q in zip(net.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=tolerance)
    opt.load_state_dict(opt.state_dict())


def test_a_gradient_without_elements_put_in_by_hand():
    """All tensors without elements have the same address."""
    empty, other = zeros(0), zeros(2, torch.bfloat16)
    opt = wrap([empty, other], 2)
    for _ in range(2):
        (empty.sum() + other.sum()).backward()
        opt.step()
    opt.zero_grad()
    empty.grad, other.grad = torch.zeros(0), torch.full((2,), 4.0, dtype=torch.bfloat16)
    opt.step()
    opt.flush()
    assert other.tolist() == [-1 - 4] * 2


def test_restored_buffers_share_their_storage():
    net = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
    opt = wrap(list(net.parameters()), 3)
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert len({p.grad.untyped_storage().data_ptr() for p in net.parameters()}) == 1
