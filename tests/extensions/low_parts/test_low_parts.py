"""``rounding="compensated"``: sums of 24 bits in a bf16 buffer and a byte beside it."""

import copy
import pickle

import fusedaccum as fa
import numpy as np
import pytest
import torch
from fusedaccum.extensions.low_parts import LowParts
from pairs import AddsToGrad
from torch import nn
from torch.nn import Parameter
from training import data, model, parts, sgd, wrapped

BF16 = torch.bfloat16
ON = {"buffer_dtype": BF16, "rounding": "compensated"}


def one(n=4096, value=0.0):
    return Parameter(torch.full((n,), value, dtype=BF16))


def low_of(opt, p):
    extension = opt._accumulation.extensions.of(LowParts)
    return extension._low[opt._sums.buffers.of[p].buffer]


def held(opt, p):
    """The sum that the buffer holds, in FP32."""
    wide = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
    assert opt._sums.read([opt._sums.buffers.of[p]], [wide])
    return wide


def put(p, opt, gradients, weights=None):
    """One micro-batch for each gradient; returns the window's."""
    for g, weight in zip(gradients, weights or [None] * len(gradients), strict=True):
        opt.backward((p * g).sum(), weight=weight)
        opt.step()
    return p.grad.clone()


def literal(gradients):
    """The definition in NumPy's integers: the two parts after each gradient that a window sums."""
    sums = np.zeros(gradients[0].numel(), dtype=np.float32)
    for g in gradients:
        new = (sums + g.float().numpy()).astype(np.float32)
        bits = new.view(np.uint32)
        bits = (bits + np.uint32(0x7F) + ((bits >> np.uint32(8)) & np.uint32(1))) & np.uint32(0xFFFFFF00)
        sums = bits.view(np.float32)
        yield (
            torch.from_numpy(((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).view(np.int16)).view(BF16),
            sums,
        )


def draw(n, elements=4096, noise=10.0):
    """Gradients of which the mean is a tenth of the noise."""
    return [(torch.randn(elements) / noise + torch.randn(elements)).bfloat16() for _ in range(n)]


def test_within_a_window_both_parts_are_those_of_the_definition():
    p, gradients = one(), draw(20)
    opt = wrapped(nn.ParameterList([p]), 21, reduction="sum", **ON)
    for g, (upper, sums) in zip(gradients, literal(gradients), strict=True):
        put(p, opt, [g], [1.0])
        assert torch.equal(p.grad, upper)
        whole = (p.grad.view(torch.int16).int() << 16) + (low_of(opt, p).int() << 8)
        assert torch.equal(whole.view(torch.float32), torch.from_numpy(sums))


# Micro-batches of a window, whether they are weighted, and which share of gradients must be FP32's.
LENGTHS = {"8": (8, False, 0.999), "8 by tokens": (8, True, 0.993), "64": (64, False, 0.984)}


@pytest.mark.parametrize("length", [*LENGTHS, pytest.param("512", marks=pytest.mark.slow)])
def test_nearly_all_gradients_are_those_of_fp32_buffers(length):
    n, by_tokens, share = (LENGTHS | {"512": (512, False, 0.973)})[length]
    gradients = draw(n, 16384)
    weights = torch.randint(1, 1000, (n,)).tolist() if by_tokens else [None] * n
    found, exact = (
        {},
        sum(g.double() * (w or 1) for g, w in zip(gradients, weights, strict=True)) / sum(w or 1 for w in weights),
    )
    for name, settings in {"fp32": {"buffer_dtype": torch.float32}, "24": ON, "bf16": {"buffer_dtype": BF16}}.items():
        p = one(16384)
        found[name] = put(p, wrapped(nn.ParameterList([p]), n, **settings), gradients, weights)
    same = {name: (found[name] == found["fp32"]).double().mean().item() for name in ("24", "bf16")}
    assert same["24"] >= share > 0.7 > same["bf16"]
    error = (found["24"].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 1.01 * (exact.bfloat16().double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizer_is_given_the_whole_sum_divided(make, clip):
    """It would divide the upper half by itself."""
    gradients, shown = draw(3), {}
    for how in ("fused", "foreach"):
        p = one()
        opt = fa.AccumulatingOptimizer(make([p], lr=1e-3, **{how: True}), 3, max_grad_norm=clip, **ON)
        shown[how] = put(p, opt, gradients)
    assert torch.equal(shown["fused"], shown["foreach"])
    exact = sum(g.double() for g in gradients) / 3
    exact *= 1.0 if clip is None else clip / (exact.norm() + 1e-6)
    assert (shown["fused"] == exact.bfloat16()).double().mean() > 0.999


def test_a_skip_is_still_left_to_a_fused_optimizer(monkeypatch):
    """Which decides on its device: nothing waits, and a window can be recorded."""
    p, seen, real = one(value=1.0), [], torch._fused_adamw_

    def step(*lists, grad_scale, found_inf, **settings):
        seen.append((grad_scale, found_inf))
        real(*lists, grad_scale=grad_scale, found_inf=found_inf, **settings)

    monkeypatch.setattr(torch, "_fused_adamw_", step)
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW([p], lr=1e-2, fused=True), 3, nonfinite="skip_window", **ON)
    for bad in (False, False, True, False):
        before, gradients = p.detach().clone(), draw(3)
        gradients[1][5] = float("nan") if bad else 1.0
        put(p, opt, gradients)
        assert torch.equal(p.detach(), before) is bad
        assert bool(opt.last_window.applied) is not bad
    # The first window makes the state that a skip must not make.
    assert seen == [(None, None), (None, 0.0), (None, 1.0), (None, 0.0)]


def trained(settings, steps=3, make=sgd, each=lambda step, opt, net: None, reload=None):
    """Weights and norms after some windows of unequal weights, mixed dtypes in one model."""
    net = model(torch.float32)
    net[2].bfloat16()
    net[0].bfloat16()
    opt = wrapped(net, 3, make=make, **settings)
    x, y = data(24, torch.float32)

    def run(net, x):
        x = torch.tanh(net[0](x.bfloat16()))
        return net[4](torch.tanh(net[2](x)).float())

    norms = []
    for _ in range(steps):
        for step, (a, b) in enumerate(parts(x, y, (7, 12, 5))):
            opt.backward(nn.functional.mse_loss(run(net, a), b), weight=float(len(a)))
            each(step, opt, net)
            opt.step()
            opt.zero_grad()
        norms.append(opt.last_window.grad_norm)
    return [p.detach().clone() for p in net.parameters()], norms


def close(found, expected, tolerance=2e-3):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def test_parameters_that_are_wider_have_plain_buffers_beside_them():
    opts = []
    found, _ = trained({**ON, "max_grad_norm": 0.01}, each=lambda step, opt, net: opts.append(opt))
    expected, _ = trained({"buffer_dtype": torch.float32, "max_grad_norm": 0.01})
    close(found, expected)
    buffers = opts[0]._sums.buffers
    assert {slot.dtype for slot in buffers.slots} == {torch.float32, BF16}
    low = opts[0]._accumulation.extensions.of(LowParts)._low
    assert set(low) == {slot.buffer for slot in buffers.slots if slot.dtype == BF16}


@pytest.mark.parametrize("narrow_first", [False, True])
def test_gradients_of_both_kinds_may_arrive_together(narrow_first):
    wide, narrow = Parameter(torch.zeros(3)), one(3)
    ps = [narrow, wide] if narrow_first else [wide, narrow]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(ps, lr=1.0), 4, reduction="none", **ON)
    for value in (256.0, 0.5, 0.5, 0.5):
        opt.backward(sum((p.float() * value).sum() for p in ps))
        if value == 0.5:
            assert torch.equal(held(opt, narrow), wide.grad)
        opt.step()
    assert torch.equal(narrow.grad, wide.grad.to(BF16))


def test_the_norm_is_that_of_24_bits():
    for settings, norm in ((ON, 306.0), ({"buffer_dtype": BF16}, 256.0)):
        p = one(1)
        opt = wrapped(nn.ParameterList([p]), 101, reduction="none", max_grad_norm=1e9, **settings)
        put(p, opt, [torch.tensor([256.0])] + 100 * [torch.tensor([0.5])])
        assert opt.last_window.grad_norm == norm


def test_the_first_gradient_overwrites_both_parts():
    p, gradients = one(), draw(6)
    opt = wrapped(nn.ParameterList([p]), 3, reduction="sum", **ON)
    first = put(p, opt, gradients[:3], [1.0] * 3)
    low_of(opt, p).fill_(-77)
    opt._sums.buffers.of[p].buffer.fill_(float("nan"))
    opt._sums.buffers.of[p].block.written()
    opt.zero_grad()
    put(p, opt, gradients[:2], [1.0] * 2)
    assert torch.equal(put(p, opt, gradients[2:3], [1.0]), first)


def test_what_other_code_writes_to_p_grad_is_all_that_counts():
    """A clip by hand, a hook that zeroes, an assignment: low parts belong to what was before."""
    p, gradients = one(), draw(3)
    for write in (lambda: p.grad.mul_(0.5), lambda: p.grad.zero_(), lambda: setattr(p, "grad", torch.ones_like(p))):
        opt = wrapped(nn.ParameterList([p]), 3, reduction="none", **ON)
        put(p, opt, gradients[:2])
        low_of(opt, p).fill_(-128)
        write()
        before = p.grad.float()
        assert torch.equal(put(p, opt, gradients[2:]), (before + gradients[2].float()).bfloat16())


def test_a_write_to_one_gradient_leaves_its_neighbours_sums():
    """They lose their low parts, which is less than bf16 would lose, and nothing else."""
    ps, gradients = [one(100), one(100)], draw(3, 100)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(ps, lr=1.0), 3, reduction="none", **ON)
    for i, g in enumerate(gradients):
        opt.backward(sum((p * g).sum() for p in ps))
        if i == 2:
            expected = ps[1].grad.clone()
            ps[0].grad.zero_()
        opt.step()
    assert not ps[0].grad.any()
    assert torch.equal(ps[1].grad, expected)


def test_after_normalize_the_gradient_can_be_clipped_by_hand():
    p, gradients = one(), draw(4)
    opt = wrapped(nn.ParameterList([p]), 4, **ON)
    for i, g in enumerate(gradients):
        opt.backward((p * g).sum())
        if i == 3:
            opt.normalize_()
            shown = p.grad.clone()
            norm = nn.utils.clip_grad_norm_([p], 0.25)
        opt.step()
    mean = torch.stack([g.double() for g in gradients]).mean(0)
    torch.testing.assert_close(norm.double(), mean.norm(), rtol=2**-7, atol=0)
    torch.testing.assert_close(shown.double(), mean, rtol=2**-8, atol=1e-8)
    torch.testing.assert_close(p.grad.double(), mean * 0.25 / mean.norm(), rtol=2**-6, atol=1e-8)


def test_zeros_are_zeros():
    p = one()
    opt = wrapped(nn.ParameterList([p]), reduction="none", **ON)
    opt.backward((p * draw(1)[0]).sum())
    low_of(opt, p).fill_(127)
    opt.zero_grad(set_to_none=False)
    assert not p.grad.any() and not held(opt, p).any()
    gradient = draw(1)[0]
    assert torch.equal(put(p, opt, [gradient]), gradient)


def test_when_a_window_has_closed_the_gradient_is_all_that_is_held():
    p = one()
    opt = wrapped(nn.ParameterList([p]), 3, **ON)
    gradient = put(p, opt, draw(3))
    assert low_of(opt, p).any()
    assert torch.equal(held(opt, p), gradient.float())


def test_a_layer_that_adds_to_p_grad_itself_adds_in_bf16():
    weight, x = Parameter(torch.randn(4, 6).to(BF16)), [torch.randn(5, 6).to(BF16) for _ in range(4)]
    opt = wrapped(nn.ParameterList([weight]), 4, reduction="none", **ON)

    def plain(x):
        return (x @ weight.t()).square().sum()

    for inputs in x[:2]:
        opt.backward(plain(inputs))
        opt.step()
    assert low_of(opt, weight).any()
    before = weight.grad.clone()
    opt.backward(AddsToGrad.apply(x[2], weight).square().sum())
    assert torch.equal(held(opt, weight), weight.grad.float()) and not torch.equal(weight.grad, before)
    opt.step()


@pytest.mark.parametrize("how", ["checkpoint", "copy", "pickle"])
def test_an_open_window_goes_on_to_the_bit(how):
    gradients = draw(7)
    p = one()
    opt = wrapped(nn.ParameterList([p]), 7, **ON)
    put(p, opt, gradients[:5])
    if how == "checkpoint":
        q = one()
        other = wrapped(nn.ParameterList([q]), 7, **ON)
        other.load_state_dict(opt.state_dict())
    else:
        q, other = copy.deepcopy((p, opt)) if how == "copy" else pickle.loads(pickle.dumps((p, opt)))
    assert torch.equal(put(q, other, gradients[5:]), put(p, opt, gradients[5:]))


def test_a_state_of_a_window_of_plain_bf16_sums_goes_on():
    """It has no low parts; its buffers hold a running mean, and say so."""
    gradients, p, q = draw(4), one(), one()
    plain = wrapped(nn.ParameterList([p]), 4, buffer_dtype=BF16)
    put(p, plain, gradients[:2])
    opt = wrapped(nn.ParameterList([q]), 4, **ON)
    opt.load_state_dict(plain.state_dict())
    found = put(q, opt, gradients[2:])
    exact = torch.stack([g.double() for g in gradients]).mean(0)
    torch.testing.assert_close(found.double(), exact, rtol=2**-6, atol=1e-2)


def test_another_wrapper_of_the_same_parameters_has_low_parts_too():
    p, gradients = one(), draw(8)
    wrapped(nn.ParameterList([p]), 4, buffer_dtype=torch.float32)
    opt = wrapped(nn.ParameterList([p]), 8, **ON)
    q = one()
    expected = put(q, wrapped(nn.ParameterList([q]), 8, **ON), gradients)
    assert torch.equal(put(p, opt, gradients), expected)
    fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 8, buffer_dtype=torch.float32)
    assert p.grad is None


def test_groups_that_come_and_go_take_their_low_parts_with_them():
    ps, gradients = [one(300), one(300), one(300)], draw(2, 300)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(ps[:2], lr=1.0), 2, reduction="none", **ON)
    opt.add_param_group({"params": ps[2:]})
    for g in gradients:
        opt.backward(sum((p * g).sum() for p in ps))
        opt.step()
    expected = (gradients[0].float() + gradients[1].float()).bfloat16()
    assert all(torch.equal(p.grad, expected) for p in ps)
    opt.param_groups = [{**opt.param_groups[0], "params": ps[1:]}]
    extension = opt._accumulation.extensions.of(LowParts)
    assert set(extension._low) == {opt._sums.buffers.of[p].buffer for p in ps[1:] if opt._sums.buffers.of[p].placed}


def test_a_window_that_is_skipped_leaves_the_next_one_alone():
    p, gradients = one(64), draw(4, 64)
    bad = gradients[0].clone()
    bad[3] = float("inf")
    opt = wrapped(nn.ParameterList([p]), 2, nonfinite="skip_window", reduction="none", **ON)
    before = p.detach().clone()
    put(p, opt, [bad, gradients[1]])
    assert torch.equal(p, before) and not opt.last_window.applied
    opt.zero_grad()
    assert torch.equal(put(p, opt, gradients[2:]), (gradients[2].float() + gradients[3].float()).bfloat16())


def test_a_loss_scale_is_taken_off():
    p, gradients = one(), draw(4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    opt = wrapped(nn.ParameterList([p]), 4, **ON)
    for g in gradients:
        scaler.scale((p * g).sum()).backward()
        scaler.step(opt)
        scaler.update()
    q = one()
    expected = put(q, wrapped(nn.ParameterList([q]), 4, **ON), gradients)
    assert torch.equal(p.grad, expected) and torch.equal(p, q)


def test_three_bytes_a_parameter():
    p = one(1 << 16)
    opt = wrapped(nn.ParameterList([p]), 2, **ON)
    put(p, opt, draw(1, 1 << 16))
    (block,) = opt._sums.buffers.blocks
    stored = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (block.flat, low_of(opt, p))}
    assert sum(stored.values()) == 3 * p.numel()


@pytest.mark.parametrize(
    ("dtype", "settings", "message"),
    [
        (BF16, {"buffer_dtype": torch.float32}, "is for bf16 buffers"),
        (BF16, {"buffer_dtype": torch.float16}, "use buffer_dtype=torch.bfloat16"),
        (torch.float16, {"buffer_dtype": None}, "FP16 has not the range"),
        (BF16, {"buffer_device": "cpu"}, "leave it out"),
        (BF16, {"master_weights": True}, "master_weights=True"),
    ],
)
def test_what_does_not_work_with_it_is_refused(dtype, settings, message):
    p = Parameter(torch.zeros(3, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, **{**ON, **settings})
    assert p.grad_dtype == dtype
    fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)


def test_a_wider_gradient_is_refused_and_named():
    p = one(3)
    opt = wrapped(nn.ParameterList([p]), 2, **ON)
    p.grad_dtype = None
    with pytest.raises(RuntimeError, match="never narrower than the gradient"):
        p.grad = torch.ones(3)
        opt.step()


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 8, dtype=BF16), lambda: nn.Embedding(9, 8, dtype=BF16)])
def test_a_layer_that_would_write_its_buffer_itself_returns_its_gradient(make):
    net = nn.Sequential(make())
    plain = copy.deepcopy(net)
    fa.fuse_embedding(fa.fuse_linear(net))
    opt = wrapped(net, 9, reduction="sum", **ON)
    inputs = [
        torch.randn(4, 8, dtype=BF16) if type(plain[0]) is nn.Linear else torch.randint(9, (4,)) for _ in range(8)
    ]
    sums = torch.zeros_like(plain[0].weight, dtype=torch.float32)
    for x in inputs:
        opt.backward(net(x).square().sum(), weight=1.0)
        opt.step(weight=1.0)
        sums += torch.autograd.grad(plain(x).square().sum(), plain[0].weight)[0].float()
    torch.testing.assert_close(held(opt, net[0].weight), sums, rtol=2**-14, atol=1e-4)
