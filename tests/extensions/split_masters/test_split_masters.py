"""Split masters have the bits of FP32 copies (the oracle), in 4 bytes with the parameter, not 6."""

import copy
import functools
import gc
import operator
import pickle

import fusedaccum as fa
import pytest
import torch
from fusedaccum.extensions.split_masters import SplitMasters
from sizes import limits
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

SHAPES = [(9, 8), (33,), (4, 3, 5), (70, 2), ()]
MATRICES = [shape for shape in SHAPES if len(shape) == 2]


class Elsewhere(torch.optim.Optimizer):
    """Not PyTorch's: what it does to a parameter depends on all, and on the number of steps."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / (1 + group["k"]) / float(norm))
            group["k"] += 1


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.1),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, fused=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True, amsgrad=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=0.01),
    "not PyTorch's": Elsewhere,
}
SPLIT = {"master_weights": "split"}
COPIES = {"master_weights": True}
COMPENSATED = {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}


def parameters(shapes=SHAPES, seed=0):
    """bf16 ones, and one in FP32 among them."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [Parameter(x if i == 1 else x.bfloat16()) for i, x in enumerate(values)]


def wrapper(params, settings, make=OPTIMIZERS["AdamW"], **more):
    return fa.AccumulatingOptimizer(make(params), **({"accum_steps": 2} | settings | more))


def window(params, opt, seed, micro_batches=2, factor=1.0):
    """Gradients that do not depend on the parameters, which round ties otherwise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(micro_batches):
        grads = [factor * torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
        torch.autograd.backward(params, grads)
        opt.step()
        opt.zero_grad()


def masters(opt):
    return opt.state_dict()["fusedaccum"]["masters"]


def away(x):
    """The nearest bf16 number, ties away from zero."""
    return ((x.detach().contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def assert_same(ours, theirs):
    """``ours`` is as ``theirs`` (FP32 copies): masters and state bit for bit, model except ties."""
    (mine, opt), (its, other) = ours, theirs
    mine_masters, its_masters = masters(opt), masters(other)
    assert mine_masters.keys() == its_masters.keys() and mine_masters
    for i, master in its_masters.items():
        assert torch.equal(mine_masters[i], master) and mine_masters[i].dtype is torch.float32
    for i, (p, q) in enumerate(zip(mine, its, strict=True)):
        assert torch.equal(p, away(its_masters[i]) if i in its_masters else q)
        for name, value in other.state[q].items():
            assert value is None or torch.equal(opt.state[p][name], value), name


def both(make=OPTIMIZERS["AdamW"], shapes=SHAPES, **more):
    pairs = []
    for settings in (SPLIT, COPIES):
        params = parameters(shapes)
        pairs.append((params, wrapper(params, settings, make, **more)))
    return pairs


def counted(monkeypatch, kind=torch.optim.AdamW):
    """Of every call of the inner optimizer's step(), how many parameters its groups hold."""
    sizes, step = [], kind.step

    def counting(self, closure=None):
        sizes.append(sum(len(group["params"]) for group in self.param_groups))
        return step(self, closure)

    monkeypatch.setattr(kind, "step", counting)
    monkeypatch.setattr(counting, "__module__", step.__module__, raising=False)
    return sizes


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [4, 300, 1 << 20], ids="{} bytes a part".format)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_masters_and_state_have_the_bits_of_fp32_copies(make, most):
    pairs = both(OPTIMIZERS[make], MATRICES if make == "Muon" else SHAPES, max_grad_norm=5.0)
    with limits(stepped=lambda _: most):
        for i in range(20):
            for params, opt in pairs:
                window(params, opt, i)
    assert_same(*pairs)


def test_a_literal_fp32_loop_has_the_same_bits():
    params = parameters()
    copies = [Parameter(p.detach().float()) for p in params]
    opt, plain = wrapper(params, SPLIT), OPTIMIZERS["AdamW"](copies)
    for i in range(10):
        window(params, opt, i)
        generator = torch.Generator().manual_seed(i)
        for _ in range(2):
            grads = [torch.randn(p.shape, generator=generator).to(p.dtype).float() for p in params]
            for q, grad in zip(copies, grads):
                q.grad = grad if q.grad is None else q.grad + grad
        for q in copies:
            q.grad /= 2
        plain.step()
        plain.zero_grad()
    saved = masters(opt)
    for i, q in enumerate(copies):
        assert torch.equal(saved.get(i, params[i]), q)


def test_ties_go_away_from_zero_and_nothing_is_lost():
    p = Parameter(torch.tensor([1.0, -1.0, 3.0], dtype=torch.bfloat16))
    opt = wrapper([p], SPLIT, lambda ps: torch.optim.SGD(ps, lr=1.0), accum_steps=1)
    half = 2.0**-8  # of the last bit of 1.0
    for after in ([1 + 2 * half, -1 - 2 * half, 3.0], [1 + 2 * half, -1 - 2 * half, 3 + 4 * half]):
        torch.autograd.backward([p], [torch.tensor([-half, half, -half], dtype=torch.bfloat16)])
        opt.step()
        opt.zero_grad()
        assert p.tolist() == after
    assert masters(opt)[0].tolist() == [1 + 2 * half, -1 - 2 * half, 3 + 2 * half]


def test_updates_that_bf16_would_lose_add_up():
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = wrapper([p], SPLIT, lambda ps: torch.optim.SGD(ps, lr=2**-12), accum_steps=1)
    for _ in range(16):
        p.sum().backward()
        opt.step()
    assert (p == 1 - 2**-8).all()


def test_nans_stay_nans_and_others_are_not_touched():
    params = parameters()
    opt = wrapper(params, SPLIT, accum_steps=1)
    grads = [torch.randn(p.shape).to(p.dtype) for p in params]
    grads[0][0, 0] = float("nan")
    torch.autograd.backward(params, grads)
    opt.step()
    nan = masters(opt)[0].isnan()
    assert nan[0, 0] and nan.sum() == 1 and torch.equal(params[0].isnan(), nan)
    assert masters(opt)[0].view(torch.int32)[0, 0] == 0x7FC00000


def test_parameters_of_other_layouts_keep_theirs():
    p = Parameter(torch.randn(2, 3, 4, 4).bfloat16().to(memory_format=torch.channels_last))
    q = Parameter(torch.randn(6, 4).bfloat16().t())
    opt = wrapper([p, q], SPLIT, accum_steps=1)
    copies = [Parameter(x.detach().float()) for x in (p, q)]
    plain = OPTIMIZERS["AdamW"](copies)
    for _ in range(3):
        grads = [torch.randn_like(x) for x in (p, q)]
        torch.autograd.backward([p, q], grads)
        opt.step()
        opt.zero_grad()
        for x, grad in zip(copies, grads):
            x.grad = grad.float()
        plain.step()
    for i, x in enumerate(copies):
        assert torch.equal(masters(opt)[i], x) and opt.state[(p, q)[i]]["exp_avg"].stride() == x.stride()


# -- memory ----------------------------------------------------------------------------------------


def tensors():
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, Parameter)]


@pytest.mark.parametrize(
    ("settings", "beside"),
    [({}, 0), (SPLIT, 2 + 4 / 4), ({**SPLIT, **COMPENSATED}, 2 + 4 / 4 + 3 - 4 + 4 / 4), (COPIES, 4)],
    ids=str,
)
def test_bytes_a_parameter(settings, beside):
    """Of split masters also, on a CPU, FP32 numbers of a part: of one parameter of four.

    Of 24-bit sums beside them the gradients of a part, too.
    """
    n = 1 << 16
    before = tensors()  # other tests', which need not have a storage; held, so that no new one gets an old one's id
    params = [Parameter(torch.ones(n, dtype=torch.bfloat16)) for _ in range(4)]
    opt = wrapper(params, settings, lambda ps: torch.optim.SGD(ps, lr=1.0), accum_steps=1)
    for _ in range(2):
        sum(p.sum() for p in params).backward()
        with limits(stepped=lambda _: 4 * n):
            opt.step()
    known = {id(x) for x in before}
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors() if id(x) not in known}
    assert sum(held.values()) == pytest.approx(4 * n * (2 + 4 + beside), rel=1e-3)  # the parameter, its buffer


@pytest.mark.parametrize("alone", [True, False])
def test_what_an_optimizer_keeps_in_its_state_has_memory_of_its_own(alone):
    """That of gradients and weights is lent, part by part, step by step."""

    class Keeps(torch.optim.SGD):
        steps_each_alone = alone

        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                for key, found in ("p.grad", p.grad), ("p.data", p.data):
                    self.state[p][key] = found, found.clone()
                self.state["of all"][len(self.state["of all"])] = p.grad, p.grad.clone()
                self.state[p]["itself"] = p

    params = [Parameter(torch.randn(n).bfloat16()) for n in (64, 64, 32)]
    opt = wrapper(params, {**SPLIT, **COMPENSATED}, lambda ps: Keeps(ps, lr=0.1))
    with limits(stepped=lambda _: 4 * 64):
        for i in range(2):
            window(params, opt, i)
    of_all, states = opt.state["of all"], [opt.state[p] for p in params]
    kept = [state[key] for state in states for key in ("p.grad", "p.data")] + list(of_all.values())
    assert len(kept) == 12 and all(torch.equal(found, copied) for found, copied in kept)
    assert [type(state["itself"]) for state in states] == [Parameter] * 3


@pytest.mark.parametrize("more", [{}, COMPENSATED], ids=["fp32", "24 bits"])
def test_methods_that_only_read_may_come_between_forward_and_backward(more):
    class Own(torch.optim.SGD):
        def learning_rate(self):
            return self.param_groups[0]["lr"]

    p = Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Own([p], lr=0.5), 2, **SPLIT, **more)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))  # FP32 weights that are taken over when one looks
    for _ in range(4):
        loss = (p * p).sum()
        assert opt.learning_rate() == 0.5
        loss.backward()
        opt.step()


@pytest.mark.parametrize("settings", [SPLIT, {**SPLIT, **COMPENSATED}, COPIES], ids=str)
def test_a_method_changes_the_gradient_that_is_stepped_with(settings):
    class Own(torch.optim.SGD):
        def replaces(self):
            for p in self.param_groups[0]["params"]:
                p.grad = p.grad * 0.5

        def writes(self):
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(0.5)

    for method in ("replaces", "writes"):
        p = Parameter(torch.zeros(4, dtype=torch.bfloat16))
        opt = fa.AccumulatingOptimizer(Own([p], lr=1.0), 1, **settings)
        p.sum().backward()
        opt.normalize_()
        getattr(opt, method)()
        opt.step()
        assert p.tolist() == [-0.5] * 4


def test_weights_loaded_by_a_step_hook_are_taken_over():
    found = []
    for settings in (SPLIT, COPIES):
        p = Parameter(torch.zeros(4, dtype=torch.bfloat16))
        opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, **settings)
        for i in range(4):
            p.sum().backward()
            if i == 1:
                saved = copy.deepcopy(opt.state_dict())
                hook = opt.register_step_post_hook(lambda *_, opt=opt, saved=saved: opt.load_state_dict(saved))
            opt.step()
            if i == 1:
                hook.remove()
            opt.zero_grad()
        found.append((p.tolist(), opt.state_dict()["fusedaccum"]["masters"][0].tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [torch.optim.AdamW, functools.partial(torch.optim.AdamW, fused=True)])
def test_a_parameter_that_gets_other_strides(make):
    found = []
    for settings in (SPLIT, COPIES):
        torch.manual_seed(0)
        p = Parameter(torch.randn(9, 8).bfloat16())
        opt = fa.AccumulatingOptimizer(make([p], lr=0.1), 1, **settings)
        for i in range(4):
            if i == 2:
                p.data = (torch.randn(8, 9) + 100).bfloat16().t()  # like no weight before
            p.backward(torch.randn(9, 8).bfloat16())
            opt.step()
            opt.zero_grad()
        found.append(opt.state_dict()["fusedaccum"]["masters"][0])
    assert torch.equal(*found)


@pytest.mark.parametrize("settings", [SPLIT, {**SPLIT, **COMPENSATED}, COPIES], ids=str)
def test_a_hook_that_clips_gradients_of_which_masters_have_copies(settings):
    p = Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, **settings)
    p.data = p.data.t().contiguous().t()
    opt.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_([p], 0.25))
    p.sum().backward()
    opt.step()
    assert (p == -0.25).all()


@pytest.mark.parametrize("kind", [torch.optim.SGD, type("Own", (torch.optim.SGD,), {})])
def test_a_step_that_breaks_off_behind_the_optimizers_is_not_made_twice(kind, monkeypatch):
    p = Parameter(torch.zeros(4, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(kind([p], lr=1.0), 1, **SPLIT)
    p.sum().backward()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(SplitMasters, "_write", interrupted)
        opt.step()
    opt.step()
    assert p.tolist() == [-1.0] * 4


def test_the_memory_of_a_part_stays_for_the_next_step():
    params = parameters([(64,), (8,), (64,)])
    opt = wrapper(params, {**SPLIT, **COMPENSATED})
    with limits(stepped=lambda _: 4 * 64):
        window(params, opt, 0)
        masters = opt._accumulation.extensions.of(SplitMasters)
        (kept,) = masters._scratch.values()
        opt.state_dict()
        window(params, opt, 1)
    assert masters._scratch[kept.device] is kept and kept.numel() == 2 * 64


def test_a_step_joins_no_more_than_a_part_or_one_parameter(monkeypatch):
    params = parameters([(64,), (8,), (16,), (200,), (16,), (16,)])  # the small ones share a part
    opt = wrapper(params, SPLIT)
    sizes, room = counted(monkeypatch), []
    join = SplitMasters._join

    def seen(self, slots):
        join(self, slots)
        room.append(sum(x.numel() for x in self._scratch.values()))

    monkeypatch.setattr(SplitMasters, "_join", seen)
    masters = opt._accumulation.extensions.of(SplitMasters)
    with limits(stepped=lambda _: 4 * 64):
        window(params, opt, 0)
        assert sizes == [4, 1, 1] and max(room) == 256  # 200, and the gap after it
        (kept,) = masters._scratch.values()
        assert kept.numel() == 256
        opt.register_step_pre_hook(lambda *_: None)  # all at once
        window(params, opt, 1)
    assert max(room) > 256 and not masters._scratch


@pytest.mark.parametrize("more", [{}, COMPENSATED], ids=["fp32", "24 bits"])
def test_parts_of_all_sizes_have_their_middle_in_one_place(monkeypatch, more):
    """There a call goes over to the next thread, which has what it wrote last in its caches."""
    params = parameters([(1024,), (8,), (512,), (2048,)])
    opt = wrapper(params, {**SPLIT, **more})
    middles, join = [], SplitMasters._join

    def seen(self, slots):
        join(self, slots)
        for x in [slot.stepped for slot in slots if slot.param in self._joined] + list(self._lent.values()):
            middles.append(x.storage_offset() + x.numel() // 2)

    monkeypatch.setattr(SplitMasters, "_join", seen)
    with limits(stepped=lambda _: 4):
        window(params, opt, 0)
    assert middles == ([1024, 2048 + 1024] if more else [1024]) * 3


# -- other code ------------------------------------------------------------------------------------


def lowered(params, opt):
    """Make the lower halves differ from 0."""
    window(params, opt, 7)
    assert any((low != 0).any() for low in opt._accumulation.extensions.of(SplitMasters)._low.values())


WRITES = {
    "zero_": lambda p: p.zero_(),
    "mask": lambda p: p.mul_(torch.arange(p.numel()).view(p.shape) % 2),
    "copy_": lambda p: p.copy_(torch.randn(p.shape)),
    "data": lambda p: setattr(p, "data", torch.randn(p.shape).bfloat16()),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_other_code_writes_is_what_is_stepped(write):
    """The lower half is void: the masters are what was written, and go on from there in FP32."""
    params = parameters()
    opt = wrapper(params, SPLIT, lambda ps: torch.optim.SGD(ps, lr=2**-10), accum_steps=1)
    lowered(params, opt)
    with torch.no_grad():
        WRITES[write](params[0])
    written = params[0].detach().float()
    assert torch.equal(masters(opt)[0], written)
    for _ in range(3):
        torch.autograd.backward(params[:1], [torch.ones_like(params[0])])
        opt.step()
        opt.zero_grad()
        written -= 2**-10
    assert torch.equal(masters(opt)[0], written) and torch.equal(params[0], away(written))


def test_zeros_that_nobody_notices_are_no_nans():
    params = parameters()
    opt = wrapper(params, SPLIT, lambda ps: torch.optim.SGD(ps, lr=2**-10), accum_steps=1)
    lowered(params, opt)
    opt.param_groups[0]["lr"] = 0.0
    params[0].data.zero_()
    window(params, opt, 8)
    assert masters(opt)[0].abs().max() < 1e-38 and (params[0] == 0).all()


def test_step_hooks_are_called_once_and_see_all_masters():
    params, seen = parameters(), []
    opt = wrapper(params, SPLIT, lambda ps: torch.optim.SGD(ps, lr=1.0), accum_steps=1)
    lowered(params, opt)
    expected = masters(opt)

    def before(optimizer, args, kwargs):
        held = optimizer.param_groups[0]["params"]
        seen.append(len(held))
        for i, p in enumerate(held):
            assert torch.equal(p, expected.get(i, params[i])) and p.dtype is torch.float32
            p.grad = p.grad.sign()

    opt.register_step_pre_hook(before)
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(params[0].detach().clone()))
    try:
        with limits(stepped=lambda _: 4):
            torch.autograd.backward(params, [torch.full_like(p, 3.0) for p in params])
            opt.step()
    finally:
        hook.remove()
    assert seen[0] == len(params) and len(seen) == 2 and torch.equal(seen[1], params[0].detach())
    for i, master in expected.items():
        assert torch.equal(masters(opt)[i], master - 1)


def test_a_hook_may_write_to_the_model():
    params = parameters()
    opt = wrapper(params, SPLIT, lambda ps: torch.optim.SGD(ps, lr=1.0), accum_steps=1)
    opt.register_step_post_hook(lambda *_: params[0].data_ptr() and params[0].detach().fill_(2.0) is None)
    window(params, opt, 0, 1)
    assert (params[0] == 2).all() and (masters(opt)[0] == 2).all()


class Telling(torch.optim.SGD):
    def learning_rate(self):
        return self.param_groups[0]["lr"]

    @torch.no_grad()
    def halve(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


def test_the_inner_optimizers_methods_work_on_the_masters_and_write_only_what_they_change():
    params = parameters()
    opt = wrapper(params, SPLIT, lambda ps: Telling(ps, lr=2**-12), accum_steps=1)
    lowered(params, opt)
    expected = masters(opt)
    loss = sum((p * p).sum() for p in params)
    assert opt.learning_rate() == 2**-12
    loss.backward()  # the parameters have not been written to since the forward
    opt.halve()
    assert all(torch.equal(masters(opt)[i], master / 2) for i, master in expected.items())


def test_a_drop_ins_step_without_a_backward_steps_every_part_again():
    pairs = both(OPTIMIZERS["SGD"], accum_steps=None, reduction="none")
    for params, opt in pairs:
        with limits(stepped=lambda _: 4):
            torch.autograd.backward(params, [torch.ones_like(p) for p in params])
            for _ in range(3):
                opt.step()
    assert_same(*pairs)


@pytest.mark.parametrize("nonfinite", ["skip_window", "raise"])
def test_a_window_that_is_left_out_changes_nothing(nonfinite):
    params = parameters()
    opt = wrapper(params, SPLIT, OPTIMIZERS["AdamW fused"], nonfinite=nonfinite)
    window(params, opt, 0)
    before, model = masters(opt), [p.detach().clone() for p in params]
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError):
            window(params, opt, 1, factor=float("inf"))
        opt.reset()
    else:
        window(params, opt, 1, factor=float("inf"))
    assert all(torch.equal(masters(opt)[i], x) for i, x in before.items())
    assert all(torch.equal(p, x) for p, x in zip(params, model))


def test_a_grad_scaler():
    pairs = both()
    for params, opt in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for i in range(4):
            generator = torch.Generator().manual_seed(i)
            grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
            scaler.scale(sum((p * g).float().sum() for p, g in zip(params, grads))).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert_same(*pairs)


def test_parameters_come_and_go():
    pairs = both()
    more = torch.randn(5).bfloat16()
    for i, (params, opt) in enumerate(pairs):
        window(params, opt, 0)
        params.append(Parameter(more.clone()))
        opt.add_param_group({"params": params[-1:], "lr": 0.25})
        window(params, opt, 1)
        gone = params.pop(0)
        gone.grad = None
        del opt.state[gone]
        opt.param_groups = [opt.param_groups[0] | {"params": params[:-1]}, opt.param_groups[1]]
        window(params, opt, 2)
        if i == 0:
            assert gone not in opt._accumulation.extensions.of(SplitMasters)._low
    assert_same(*pairs)


def test_frozen_parameters_and_those_without_a_gradient_stay():
    pairs = both(OPTIMIZERS["SGD"])
    for params, opt in pairs:
        window(params, opt, 0)
        params[2].requires_grad_(False)
        some = [params[0], params[1], params[4]]
        window(some, opt, 1)
        window([params[3]], opt, 2)
    assert_same(*pairs)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("to", [SPLIT, COPIES], ids=["to split", "to copies"])
@pytest.mark.parametrize("of", [SPLIT, COPIES], ids=["from split", "from copies"])
def test_checkpoints_of_one_kind_load_into_the_other_in_either_order(of, to, first):
    params = parameters()
    opt = wrapper(params, of)
    for i in range(3):
        window(params, opt, i)
    window(params, opt, 3, 1)  # into the next window
    weights, state = copy.deepcopy(([p.detach() for p in params], opt.state_dict()))
    fresh = parameters(seed=1)
    resumed = wrapper(fresh, to)
    window(fresh, resumed, 9)

    def load_model():
        with torch.no_grad():
            for p, x in zip(fresh, weights):
                p.copy_(x)

    loads = [load_model, lambda: resumed.load_state_dict(state)]
    for load in loads if first == "model" else loads[::-1]:
        load()
    assert all(torch.equal(masters(resumed)[i], x) for i, x in masters(opt).items())  # before any step, too
    for i in range(4, 7):
        window(params, opt, i, 2)
        window(fresh, resumed, i, 2)
    assert all(torch.equal(masters(resumed)[i], x) for i, x in masters(opt).items())
    for p, q in zip(params, fresh):
        assert all(torch.equal(x, resumed.state[q][name]) for name, x in opt.state[p].items())


def test_a_state_loaded_into_another_model_leaves_its_weights():
    params, other = parameters(), parameters(seed=1)
    opt, resumed = (wrapper(ps, SPLIT, lambda ps: torch.optim.SGD(ps, lr=0.0)) for ps in (params, other))
    before = [p.detach().clone() for p in other]
    resumed.load_state_dict(opt.state_dict())
    window(other, resumed, 0)
    assert all(torch.equal(p, x) for p, x in zip(other, before))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_bit_by_bit(how):
    params = parameters()
    opt = wrapper(params, SPLIT)
    window(params, opt, 0, 3)
    pairs = [(params, opt), how((params, opt))]
    pairs.append(how(pairs[1]))  # of one that has not stepped yet
    for i in range(1, 3):
        for mine, its in pairs:
            window(mine, its, i)
    for mine, its in pairs[1:]:
        assert_same((mine, its), (params, opt))


def test_saving_changes_nothing_and_is_a_copy():
    params = parameters()
    opt = wrapper(params, SPLIT)
    window(params, opt, 0)
    saved = masters(opt)
    kept = copy.deepcopy(saved)
    window(params, opt, 1)
    assert all(torch.equal(saved[i], x) and not torch.equal(masters(opt)[i], x) for i, x in kept.items())


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("of", [SPLIT, COPIES], ids=["from split", "from copies"])
def test_ties_in_a_checkpoint_keep_their_fp32_bits(of, first):
    """The model has them rounded to even, or away from zero."""
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    p, q = (Parameter(torch.full((2,), value, dtype=torch.bfloat16)) for value in (1.0, 5.0))
    opt, resumed = wrapper([p], of, sgd, accum_steps=1), wrapper([q], SPLIT, sgd, accum_steps=1)
    torch.autograd.backward([p], [torch.tensor([-(2.0**-8), -(2.0**-8) * 3], dtype=torch.bfloat16)])
    opt.step()
    ties = torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 * 3])
    assert torch.equal(masters(opt)[0], ties)
    state = copy.deepcopy(opt.state_dict())
    for what in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
        if what == "optimizer":
            resumed.load_state_dict(state)
        else:
            with torch.no_grad():
                q.copy_(p)
    torch.autograd.backward([q], [torch.zeros_like(q)])
    resumed.step()
    assert torch.equal(masters(resumed)[0], ties) and torch.equal(q, away(ties))


def test_what_was_loaded_does_not_change_with_what_it_was_loaded_from():
    (_, opt), (copies, live) = both()
    window(copies, live, 0)
    expected = copy.deepcopy(masters(live))
    opt.load_state_dict(live.state_dict())
    window(copies, live, 1)
    assert all(torch.equal(masters(opt)[i], x) for i, x in expected.items())


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_breaks_off_in_a_part_goes_on_there(monkeypatch, kind, at, when):
    """Stepped parts are not stepped again; that in which it broke off is, with what it came to."""
    pairs = both(OPTIMIZERS["SGD"])
    step, calls = torch.optim.SGD.step, []

    def breaking(self, closure=None):
        calls.append(len(calls))
        if len(calls) == at + 1 and when == "before":
            raise kind
        result = step(self, closure)
        if len(calls) == at + 1:
            raise kind
        return result

    (params, opt), (its, plain) = pairs
    for i in range(2):
        for mine, wrapped in pairs:
            window(mine, wrapped, i)
    for mine, wrapped in pairs:
        window(mine, wrapped, 2, 1)
        generator = torch.Generator().manual_seed(3)
        torch.autograd.backward(mine, [torch.randn(p.shape, generator=generator).to(p.dtype) for p in mine])
    plain.step()
    before, after = masters(opt), masters(plain)
    monkeypatch.setattr(torch.optim.SGD, "step", breaking)
    monkeypatch.setattr(breaking, "__module__", step.__module__)
    with limits(stepped=lambda _: 4):
        with pytest.raises(kind):
            opt.step()
        order = sorted(range(len(params)), key=lambda i: params[i].numel())
        stepped = order[: at + (when == "after")]
        for i, master in opt._accumulation.extensions.of(SplitMasters).save().items():
            assert torch.equal(master, (after if i in stepped else before)[i])
            assert torch.equal(params[i], away(master))
        assert all(map(operator.is_, opt.param_groups[0]["params"], params)) and set(opt.state) == set(params)
        opt.step()
    assert calls == list(range(len(SHAPES) + 1))
    if when == "before":
        assert_same((params, opt), (its, plain))
    monkeypatch.undo()
    opt.zero_grad()
    window(params, opt, 4)
    assert opt.updated


# -- what it does not work with --------------------------------------------------------------------


def test_fp16_is_refused_and_nothing_is_touched():
    params = [*parameters(), Parameter(torch.zeros(3, dtype=torch.float16))]
    with pytest.raises(
        ValueError, match=r"master_weights='split'.*\[5\].*float16.*range.*use bf16 parameters, or master_weights=True"
    ):
        wrapper(params, SPLIT)
    opt = wrapper(params[:-1], SPLIT)
    with pytest.raises(ValueError, match="float16"):
        opt.add_param_group({"params": params[-1:]})
    window(params[:-1], opt, 0)
    assert opt.updated


@pytest.mark.parametrize(
    ("settings", "make", "message"),
    [
        (
            {"buffer_device": "cpu"},
            OPTIMIZERS["SGD"],
            r"master_weights='split'.*buffer_device='cpu'.*use master_weights=True",
        ),
        (
            {"buffer_dtype": torch.bfloat16},
            OPTIMIZERS["SGD"],
            r"master_weights='split'.*use buffer_dtype=torch.float32",
        ),
        ({"accum_steps": None}, torch.optim.LBFGS, r"master_weights='split' does not work with LBFGS"),
        ({"master_weights": "splits"}, OPTIMIZERS["SGD"], r"one of True, False, 'split', got 'splits'"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(settings, make, message):
    with pytest.raises(ValueError, match=message):
        wrapper(parameters(), SPLIT | settings, make)


def test_it_says_what_was_asked():
    assert "master_weights='split'" in repr(wrapper(parameters(), SPLIT))
