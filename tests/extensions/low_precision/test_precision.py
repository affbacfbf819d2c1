"""Dtypes of parameters and buffers: what FP32 buffers and masters keep, and what 16-bit ones do."""

import copy
import functools
import gc
import itertools
import math

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn import Parameter
from training import assert_same_parameters, data, masters_of, mean_loss, model, parts, twin, wrapped


def one(value, dtype, n=1):
    return Parameter(torch.full((n,), value, dtype=dtype))


def gather(p, opt, values):
    """Run one micro-batch for each value, with that value as its gradient."""
    for value in values:
        opt.backward((p * torch.as_tensor(value, dtype=p.dtype)).sum())
        opt.step()


def test_bf16_gradients_256_then_1_gather_to_257():
    p = one(0.0, torch.bfloat16)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, reduction="none")
    gather(p, opt, [256.0, 1.0])
    assert p.grad.dtype is torch.float32 and p.grad.item() == 257
    q = one(0.0, torch.bfloat16)
    narrow = fa.AccumulatingOptimizer(torch.optim.SGD([q], lr=1.0), 3, reduction="none", buffer_dtype=None)
    gather(q, narrow, [256.0, 1.0])
    assert q.grad.dtype is torch.bfloat16 and q.grad.item() == 256


def test_a_thousand_small_bf16_gradients_do_not_drift():
    torch.manual_seed(0)
    gradients = (1e-3 * (1 + torch.rand(1000, 64))).bfloat16()
    exact = gradients.double().mean(0)
    p, plain = one(0.0, torch.bfloat16, 64), one(0.0, torch.bfloat16, 64)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1001)
    for g in gradients:
        (p * g).sum().backward()
        opt.step()
        (plain * g).sum().backward()
    drift = ((p.grad.double() / 1000 - exact) / exact).abs().max()
    plain_drift = ((plain.grad.double() / 1000 - exact) / exact).abs().max()
    assert drift < 1e-6
    assert plain_drift > 0.05


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_buffer_is_never_narrower_than_the_gradient(dtype, asked):
    p = one(1.0, dtype, 3)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=asked)
    gather(p, opt, [0.5])
    expected = dtype if asked is None else torch.promote_types(dtype, asked)
    assert p.grad.dtype is expected
    gather(p, opt, [0.25])
    assert p.grad.dtype is dtype  # the finished gradient, as the inner optimizer took it
    assert p.grad.tolist() == [0.375] * 3
    assert p.tolist() == [0.625] * 3


@pytest.mark.parametrize("dtype, asked", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_parameters_own_grad_dtype_does_not_stop_backward(dtype, asked):
    """Code that accumulates bf16 gradients in FP32 by hand sets it."""
    p = one(0.0, dtype)
    p.grad_dtype = asked
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=None)
    gather(p, opt, [256.0, 2.0])
    assert p.item() == -129 and p.grad.dtype is dtype


def test_a_grad_dtype_that_is_narrower_than_its_parameter_rounds_no_gradient():
    p = one(0.0, F)
    p.grad_dtype = B
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    gather(p, opt, [257.0, 257.0])
    assert p.item() == -257


class Gradient(torch.autograd.Function):
    """Its input's gradient is a tensor that was given, in the dtype that this has."""

    @staticmethod
    def forward(ctx, p, grad):
        ctx.grad = grad
        return p.float().sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.grad, None


def bring(p, grads):
    """Backward passes that bring these gradients, one after another."""
    for grad in grads:
        Gradient.apply(p, grad).backward()
        yield


B, H, F = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "settings", [{}, {"buffer_dtype": B}, {"buffer_dtype": None}, {"master_weights": True}], ids=str
)
@pytest.mark.parametrize("when", ["before it is wrapped", "after it was wrapped"])
@pytest.mark.parametrize("comes", [B, H, F])
@pytest.mark.parametrize("allowed", [None, B, H, F])
@pytest.mark.parametrize("dtype", [B, H, F])
def test_what_a_parameters_grad_dtype_lets_through_is_not_rounded(dtype, allowed, comes, when, settings, each_intake):
    """Plain PyTorch sums in ``grad_dtype`` (None: the first gradient's); so we, or in a wider one.

    A buffer that turns out too narrow only when a gradient arrives is an error, which names both.
    """
    values = (256.0, 1.0, float(torch.randint(1, 100, ())))
    p, plain = one(0.0, dtype), one(0.0, dtype)
    plain.grad_dtype = allowed
    if "before" in when:
        p.grad_dtype = allowed
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, reduction="none", **settings)
    if "after" in when:
        p.grad_dtype = allowed
    for _ in bring(plain, [torch.tensor([v], dtype=comes) for v in values]):
        pass
    try:
        for _ in bring(p, [torch.tensor([v], dtype=comes) for v in values]):
            summed = p.grad.clone()
            opt.step()
    except RuntimeError as error:
        arrived = comes if allowed is None else allowed
        buffer = torch.promote_types(dtype, settings.get("buffer_dtype", F) or dtype)
        needed = torch.promote_types(arrived, buffer)
        assert needed != buffer and not (allowed is not None and "before" in when)
        assert f"parameter param_groups[0]['params'][0] got a {arrived} gradient" in str(error)
        assert f"buffer is {buffer}" in str(error) and f"pass buffer_dtype={needed}" in str(error)
        assert p.grad is None and p == 0
        return
    assert summed.double() in (plain.grad.double(), torch.tensor(sum(values)).double())
    assert opt.updated and p.grad.dtype == (F if settings.get("master_weights") else dtype)


def test_an_fp64_gradient_of_a_16_bit_parameter_is_named(each_intake):
    p = one(0.0, B)
    p.grad_dtype = None
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    with pytest.raises(
        RuntimeError, match=r"got a torch.float64 gradient.*buffer is torch\.float32.*pass buffer_dtype"
    ):
        next(bring(p, [torch.tensor([1.0], dtype=torch.float64)]))
    assert p.grad is None and opt.progress["micro_batch"] == "0/2"


def test_a_gradient_wider_than_its_buffer_that_is_put_in_by_hand_is_named():
    p = one(0.0, B)
    p.grad_dtype = None
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=None)
    p.grad = torch.tensor([257.0])
    with pytest.raises(RuntimeError, match=r"got a torch.float32 gradient.*pass buffer_dtype=torch\.float32"):
        opt.step()


@pytest.mark.parametrize("lets_go", ["groups", "dropped"])
@pytest.mark.parametrize("theirs", [None, H, F, B])
def test_a_parameter_that_a_wrapper_lets_go_of_has_its_grad_dtype_back(theirs, lets_go):
    p = one(0.0, B)
    p.grad_dtype = theirs
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    (p * 256).sum().backward()
    assert p.grad.dtype is F
    if lets_go == "groups":
        opt.param_groups = []
    else:
        p.grad = None
        del opt
        gc.collect()
    assert p.grad_dtype == theirs and p.grad is None
    after = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=None)
    (p * 2).sum().backward()
    assert p.grad.dtype == (F if theirs in (F, H) else B)
    del after


def test_a_grad_dtype_that_was_the_parameters_own_follows_it_to_another_dtype():
    p = one(0.0, F)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=torch.float64)
    p.data = p.data.bfloat16()
    opt.param_groups = []
    assert p.grad_dtype is B
    (p * 2).sum().backward()
    assert p.grad.dtype is B


def test_finished_gradient_of_bf16_parameters_is_the_fp32_sum_rounded_once():
    """Also with so many elements that several waves of narrowing share the buffer's storage."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(300, 700), nn.Linear(33, 5), nn.Linear(700, 300)]).bfloat16()
    opt = wrapped(net, 3)
    exact = {name: torch.zeros(p.shape) for name, p in net.named_parameters()}
    for _ in range(3):
        for name, p in net.named_parameters():
            g = torch.randn(p.shape).bfloat16()
            exact[name] += g.float()
            (p * g).sum().backward()
        opt.step()
    for name, p in net.named_parameters():
        assert p.grad.dtype is torch.bfloat16
        assert torch.equal(p.grad, (exact[name] * (1 / 3)).bfloat16()), name


def test_narrowing_takes_no_memory_of_its_own():
    net = nn.Linear(64, 64).bfloat16()
    opt = wrapped(net, 1)
    net(torch.ones(2, 64).bfloat16()).sum().backward()
    storage = net.weight.grad.untyped_storage().data_ptr()
    opt.step()
    assert net.weight.grad.dtype is torch.bfloat16
    assert net.weight.grad.untyped_storage().data_ptr() == storage


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighed", [False, True], ids=["mean", "tokens"])
def test_running_sum_in_16_bit_buffers_does_not_overflow_where_the_mean_fits(dtype, weighed):
    big = torch.finfo(dtype).max * 0.75
    p = one(0.0, dtype, 4)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.0), 4, buffer_dtype=None)
    for i in range(4):
        opt.backward((p * big).sum(), weight=512 * (i + 1) if weighed else None)
        opt.step()
    assert torch.isfinite(p.grad).all()
    torch.testing.assert_close(p.grad, torch.full_like(p, big), rtol=2e-2, atol=0)


@pytest.mark.parametrize("wide_first", [True, False])
def test_wide_and_16_bit_buffers_of_one_bucket(wide_first):
    """FP32 sums, and FP16 running means, whose sum would overflow, in calls of their own."""
    params = [one(0.0, torch.float32, 4), one(0.0, torch.float16, 4)]
    wide, narrow = params
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params if wide_first else params[::-1], lr=0.0), 4, buffer_dtype=None
    )
    for i in range(3):
        opt.backward((wide * 60000.0).sum() + (narrow * 60000.0).sum())
        opt.step()
        assert wide.grad.tolist() == [(i + 1) * 60000.0] * 4
        assert narrow.grad.tolist() == [60000.0] * 4
    opt.flush()
    assert wide.grad.tolist() == narrow.grad.tolist() == [60000.0] * 4


def test_running_mean_counts_micro_batches_that_did_not_touch_a_parameter():
    p, q = one(0.0, torch.bfloat16), one(0.0, torch.bfloat16)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p, q], lr=0.0), 4, buffer_dtype=None, max_grad_norm=1e9)
    for both in (True, False, False, True):
        loss = p.sum() * 8
        opt.backward(loss + q.sum() * 8 if both else loss)
        opt.step()
    assert p.grad.item() == 8 and q.grad.item() == 4
    assert opt.last_window.grad_norm.item() == pytest.approx((64 + 16) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sum_reduction_in_16_bit_buffers_with_weights_that_come_late(dtype):
    big = torch.finfo(dtype).max * 0.75
    p = one(0.0, dtype, 4)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.0), 4, buffer_dtype=None, reduction="sum")
    for _ in range(4):
        (p * big).sum().backward()
        opt.step(weight=1)
    torch.testing.assert_close(p.grad, torch.full_like(p, big), rtol=2e-2, atol=0)


def test_stochastic_rounding_keeps_what_nearest_loses():
    torch.manual_seed(3)
    values = [1.0] + [0.001] * 200
    results = {}
    for rounding in ("nearest", "stochastic"):
        p = one(0.0, torch.bfloat16, 4096)
        opt = fa.AccumulatingOptimizer(
            torch.optim.SGD([p], lr=0.0), 202, reduction="none", buffer_dtype=torch.bfloat16, rounding=rounding
        )
        gather(p, opt, values)
        results[rounding] = p.grad.double().mean().item()
    exact = 1 + 200 * torch.tensor(0.001).bfloat16().item()
    assert results["nearest"] == 1.0
    assert results["stochastic"] == pytest.approx(exact, rel=2e-3)


def test_stochastic_rounding_is_seeded_by_pytorch_and_does_not_depend_on_the_backend():
    grads = []
    for seed, backend in ((1, "auto"), (1, "reference"), (2, "auto")):
        torch.manual_seed(seed)
        p = one(0.0, torch.bfloat16, 999)
        opt = fa.AccumulatingOptimizer(
            torch.optim.SGD([p], lr=0.0), 9, buffer_dtype=torch.bfloat16, rounding="stochastic", backend=backend
        )
        gather(p, opt, [0.1, 0.7, 0.3])
        grads.append(p.grad.clone())
    assert torch.equal(grads[0], grads[1])
    assert not torch.equal(grads[0], grads[2])


def test_stochastic_rounding_goes_on_when_its_counter_is_used_up():
    sums, g = [], torch.randn(2, 64)
    for draws in (0, 1 << 20):
        torch.manual_seed(5)
        p = one(0.0, torch.bfloat16, 64)
        opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, buffer_dtype=None, rounding="stochastic")
        state = opt.state_dict()
        state["fusedaccum"]["rounding"]["draws"] = [draws]
        opt.load_state_dict(state)
        gather(p, opt, g)
        sums.append(p.grad.clone())
    assert torch.equal(*sums)


def test_stochastic_rounding_draws_anew_for_every_add_and_parameter():
    torch.manual_seed(0)
    params = [one(0.0, torch.bfloat16, 512) for _ in range(3)]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params[:2], lr=0.0), 2, reduction="none", buffer_dtype=torch.bfloat16, rounding="stochastic"
    )
    opt.add_param_group({"params": params[2:]})
    patterns = []
    for _ in range(2):
        for value in (1.0, 0.003):
            sum(p.sum() * value for p in params).backward()
            opt.step()
        patterns += [tuple((p.grad > 1).tolist()) for p in params]
    assert all(0 < sum(pattern) < 512 for pattern in patterns)
    assert len(set(patterns)) == 6


def test_random_numbers_of_every_add_and_parameter_are_whole_blocks_of_their_own(monkeypatch):
    """Blocks are of 8 numbers, as many as kernels draw at a time."""
    asked, plain = [], fa.ops.accumulate_

    def watched(buffers, *args, rounding, **kwargs):
        asked.extend(
            (counter, counter + buffer.numel()) for counter, buffer in zip(rounding.counters, buffers, strict=True)
        )
        plain(buffers, *args, rounding=rounding, **kwargs)

    monkeypatch.setattr(fa.ops, "accumulate_", watched)
    params = [one(0.0, torch.bfloat16, n) for n in (3, 1, 8, 13, 2)]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params[:3], lr=0.0), 2, buffer_dtype=torch.bfloat16, rounding="stochastic"
    )
    opt.add_param_group({"params": params[3:]})
    for _ in range(3):
        sum(p.sum() for p in params).backward()
        opt.step()
    asked.sort()
    assert len(asked) == 3 * len(params)
    assert all(begin % 8 == 0 for begin, _ in asked)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(asked))


@pytest.mark.parametrize("steps_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_master_weights_train_as_an_fp32_model_fed_the_same_gradients(kind, steps_fused):
    """The oracle is FP32 training on the bf16 model's gradients.

    The model is always the masters rounded. Adagrad starts with state.
    """
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)

    def make(ps):
        return kind(ps, lr=1e-3, fused=steps_fused)

    masters = [Parameter(p.detach().float()) for p in net.parameters()]
    plain = make(masters)
    opt = wrapped(net, 3, make=make, master_weights=True)
    for _ in range(5):
        sums = [torch.zeros_like(m) for m in masters]
        for xs, ys in parts(x, y, (8, 8, 8)):
            for total, g in zip(sums, torch.autograd.grad(mean_loss(net, xs, ys), list(net.parameters())), strict=True):
                total += g.float()
            mean_loss(net, xs, ys).backward()
            opt.step()
        for m, total in zip(masters, sums, strict=True):
            m.grad = total / 3
        plain.step()
        for p, m in zip(net.parameters(), masters, strict=True):
            torch.testing.assert_close(p.detach(), m.detach().bfloat16(), rtol=0, atol=2**-9)
    for p, m in zip(net.parameters(), masters, strict=True):
        torch.testing.assert_close(masters_of(opt)[p].detach(), m.detach(), rtol=1e-5, atol=1e-7)


def test_master_weights_keep_updates_that_bf16_would_lose():
    p, q = one(1.0, torch.bfloat16), one(1.0, torch.bfloat16)
    with_masters = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1e-3), 1, master_weights=True)
    without = fa.AccumulatingOptimizer(torch.optim.SGD([q], lr=1e-3), 1)
    for _ in range(100):
        p.sum().backward()
        with_masters.step()
        q.sum().backward()
        without.step()
    assert q.item() == 1.0
    assert p.item() == pytest.approx(0.9, abs=2**-8)


def test_masters_do_not_step_with_gradients_of_an_earlier_window():
    p, q = (Parameter(torch.randn(3).bfloat16()) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p, q], lr=1.0), 1, master_weights=True)
    (p.sum() + q.sum()).backward()
    opt.step()
    before = q.detach().clone()
    for loss in (p.sum(), 0 * q.sum()):  # the second shows whether the first has moved the master of q
        loss.backward()
        opt.step()
    assert torch.equal(q, before)


def test_master_weights_are_not_seen_outside():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    opt = wrapped(net, 1, make=lambda ps: torch.optim.AdamW(ps, lr=1e-3), master_weights=True)
    ids = [id(p) for p in net.parameters()]
    groups = []
    opt.register_step_pre_hook(lambda inner, *_: groups.append([p.dtype for p in inner.param_groups[0]["params"]]))
    mean_loss(net, x, y).backward()
    opt.step()
    assert [id(p) for p in opt.param_groups[0]["params"]] == ids
    assert {id(p) for p in opt.state} == set(ids)
    assert groups == [[torch.float32] * len(ids)]
    assert all(s["exp_avg"].dtype is torch.float32 for s in opt.state.values())
    opt.load_state_dict(opt.state_dict())
    assert all(s["exp_avg"].dtype is torch.float32 for s in opt.state.values())


def test_master_weights_take_over_the_state_of_an_optimizer_that_has_stepped_without_them():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    plain = torch.optim.AdamW(net.parameters(), lr=1e-3)
    mean_loss(net, x, y).backward()
    plain.step()
    plain.zero_grad()
    kept = [s["exp_avg"].clone() for s in plain.state.values()]
    opt = fa.AccumulatingOptimizer(plain, 1, master_weights=True)
    for s, was in zip(opt.state.values(), kept, strict=True):
        assert s["exp_avg"].dtype is s["exp_avg_sq"].dtype is torch.float32
        assert torch.equal(s["exp_avg"], was.float())
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.updated


def test_master_weights_take_over_a_state_loaded_into_the_inner_optimizer():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    opt = wrapped(net, 1, make=lambda ps: torch.optim.AdamW(ps, lr=1e-3), master_weights=True)
    for _ in range(2):
        mean_loss(net, x, y).backward()
        opt.step()
        opt.optimizer.load_state_dict(copy.deepcopy(opt.optimizer.state_dict()))
        assert all(s["exp_avg"].dtype is s["exp_avg_sq"].dtype is torch.float32 for s in opt.state.values())
    inner = opt.optimizer
    del opt
    inner.load_state_dict(inner.state_dict())
    assert all(s["exp_avg"].dtype is torch.bfloat16 for s in inner.state.values())


def test_a_count_of_steps_stays_on_the_cpu():
    """Reading it there waits for no device; PyTorch's own load_state_dict leaves it there, too."""
    p = Parameter(torch.zeros(3, dtype=torch.bfloat16, device="meta"))
    plain = torch.optim.Adagrad([p])
    fa.AccumulatingOptimizer(plain, 1, master_weights=True)
    assert plain.state[p]["sum"].dtype is torch.float32
    assert plain.state[p]["step"].device.type == "cpu"


class Handing(torch.optim.Optimizer):
    """Passes all on to another optimizer, as wrappers do, without PyTorch's hooks for loading."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state
        self._optimizer_step_pre_hooks = {}

    def step(self, closure=None):
        return self.inner.step(closure)


def test_master_weights_with_an_optimizer_that_has_no_hooks():
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Handing(torch.optim.SGD([p], lr=2**-10)), 1, master_weights=True)
    for _ in range(4):
        p.sum().backward()
        opt.step()
    assert (p == 1 - 2**-8).all()


def clamp(parameters):
    for p in parameters:
        p.detach().clamp_(-0.1, 0.1)


def replace(net, gradient):
    for p in net.parameters():
        p.grad = gradient(p)


HOOKS = {  # name: kind of step hook, and what it does with the model and the inner optimizer
    "a model clamped after the step": ("post", lambda net, _: clamp(net.parameters())),
    "groups clamped after the step": ("post", lambda _, inner: clamp(inner.param_groups[0]["params"])),
    "a model clamped before the step": ("pre", lambda net, _: clamp(net.parameters())),
    "gradients replaced": ("pre", lambda net, _: replace(net, lambda p: -p.grad)),
    "16-bit gradients": ("pre", lambda net, _: replace(net, lambda p: p.detach().clone())),
    "gradients taken away": ("pre", lambda net, _: net.zero_grad()),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_what_step_hooks_do_to_the_model_counts_with_master_weights(hook, fused):
    """As without. Rounding stepped masters into the model once lost what hooks wrote there."""
    x, y = data(dtype=torch.bfloat16)
    trained, seen = [], []
    kind, do = HOOKS[hook]
    for masters in (True, False):
        net = model(torch.bfloat16)
        # PyTorch 2.13's fused SGD steps bf16 wrongly on the CPU; the masters are FP32.
        make = functools.partial(torch.optim.SGD, lr=0.5, fused=fused and masters)
        opt = wrapped(net, 1, make=make, master_weights=masters)
        handle = getattr(opt, f"register_step_{kind}_hook")(lambda inner, *_, net=net: do(net, inner))
        opt.register_step_post_hook(lambda *_, net=net: seen.append(copy.deepcopy(net)))
        mean_loss(net, x, y).backward()
        opt.step()
        if "groups" not in hook:
            assert_same_parameters(seen[-1], net, 0)
        trained.append(net)
        before = copy.deepcopy(net)
        handle.remove()
        (0 * mean_loss(net, x, y)).backward()
        opt.step()  # shows whether the masters have followed the model
        assert_same_parameters(net, before, 0)
    assert_same_parameters(*trained, 2**-7)


def vector_loaded(net, other):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(other.parameters()), net.parameters())


@pytest.mark.parametrize("load", [lambda net, other: net.load_state_dict(other.state_dict()), vector_loaded])
def test_master_weights_take_over_weights_loaded_into_the_model(load):
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    opt = wrapped(net, 1, make=lambda ps: torch.optim.SGD(ps, lr=1e-5), master_weights=True)
    mean_loss(net, x, y).backward()
    opt.step()
    other = model(torch.bfloat16, seed=7)
    load(net, other)
    mean_loss(net, x, y).backward()
    opt.step()
    assert_same_parameters(net, other, 1e-2)  # the loaded weights, not the old ones
    assert_same_parameters(twin(net), net, 0)


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_16_bit_buffers_may_begin_with_a_micro_batch_of_weight_0(tensors):
    net, (x, y) = model(torch.bfloat16), data(8, torch.bfloat16)
    expected = torch.autograd.grad(mean_loss(net, x, y), list(net.parameters()))
    opt = wrapped(net, 2, buffer_dtype=torch.bfloat16, make=lambda p: torch.optim.SGD(p, lr=0.0))
    for weight in (0, 8):
        opt.backward(mean_loss(net, x, y), weight=torch.tensor(weight) if tensors else weight)
        opt.step()
    assert opt.last_window.applied
    for p, e in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, rtol=0.01, atol=0.0)


def test_a_grad_dtype_that_is_set_while_a_wrapper_has_the_parameter_stays_when_it_lets_go():
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    p.grad_dtype = torch.float32
    opt.param_groups = []
    assert p.grad_dtype is torch.float32


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 3.0, 2.0)])
@pytest.mark.parametrize("normalized", [False, True])
def test_the_norm_of_16_bit_buffers_that_micro_batches_have_reached_in_turn(weights, normalized):
    """Each holds a mean with a divisor of its own."""
    params = [nn.Parameter(torch.zeros(1, dtype=B)) for _ in range(3)]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params, lr=0.0), 3 if not normalized else None, buffer_dtype=B, max_grad_norm=100.0
    )
    for p, weight in zip(params, weights):
        opt.backward((64.0 * p).sum(), weight=weight)
        if not normalized:
            opt.step()
    if normalized:
        opt.normalize_()
        opt.step()
    exact = 64.0 * math.sqrt(sum(w**2 for w in weights)) / sum(weights)
    assert float(opt.last_window.grad_norm) == pytest.approx(exact, rel=4e-3)


def test_a_micro_batch_that_is_loaded_has_a_divisor_of_its_own():
    """Weight 4096 is loaded where 1 was open, with whose divisor fp16 sums would overflow."""

    def made():
        p = Parameter(torch.zeros(4, dtype=torch.float16))
        return p, fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=None)

    def backward(p, opt, weight):
        opt.backward((p.float() * 20).sum(), weight=weight)

    p, opt = made()
    backward(p, opt, 4096)
    state = copy.deepcopy(opt.state_dict())
    q, other = made()
    backward(q, other, 1)
    other.load_state_dict(state)
    for part in (backward, lambda *_: other.step(), backward, lambda *_: other.step()):
        part(q, other, 4096)
    assert (q == -30).all()  # the loaded micro-batch had two passes of 20, the other one


def test_an_add_that_raises_before_it_has_begun_draws_no_random_numbers(monkeypatch):
    p = Parameter(torch.zeros(64, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=None, rounding="stochastic", max_grad_norm=1.0
    )
    (0.3 * p).sum().backward()
    opt.step()

    def no_memory(slot):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("fusedaccum.core.adding._room_for_stats", no_memory)
        (0.3 * p).sum().backward()
    assert opt.state_dict()["fusedaccum"]["rounding"]["draws"] == [1]


def test_a_wrapper_that_is_refused_draws_no_random_number():
    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="is for 16-bit buffers"):
        fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), rounding="stochastic")
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize(("reduction", "shown"), [("mean", [4, 7]), ("sum", [4, 6]), ("none", [4, 12])])
def test_what_16_bit_buffers_hold_inside_a_window(reduction, shown):
    """Gradients of 4 and 8, of weights 1 and 3: by weight, by number, or as a sum."""
    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, reduction=reduction, buffer_dtype=None)
    for factor, weight, held in zip((4, 8), (1, 3), shown):
        opt.backward((factor * p).sum(), weight=weight)
        opt.step()
        assert (p.grad == held).all()
