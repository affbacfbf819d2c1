"""Split masters with sums of 24 bits: 15 bytes a parameter with AdamW, and 18 without the two."""

import copy

import fusedaccum as fa
import pytest
import torch
from fusedaccum.extensions.low_parts import LowParts
from sizes import limits
from torch import nn

BF16 = torch.bfloat16
SMALL = {"buffer_dtype": BF16, "rounding": "compensated", "master_weights": "split"}
WIDE = {"buffer_dtype": torch.float32, "master_weights": True}


class Seen(torch.optim.SGD):
    """Keeps what it is given to step with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gradients = []

    def step(self, closure=None):
        self.gradients += [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]
        super().step(closure)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(BF16)


def train(model, opt, windows):
    for window in range(windows):
        for micro, weight in enumerate((3.0, 1.0, 5.0, 2.0)):
            torch.manual_seed(10 * window + micro)
            x = torch.randn(16, 32).to(BF16)
            opt.backward(model(x).float().square().mean(), weight=weight)
            opt.step()
            opt.zero_grad()


def literal(windows):
    """Gradients of FP32 buffers and masters: parameters are the same while nothing is stepped."""
    model = net()
    inner = Seen(model.parameters(), lr=0.0)
    train(model, fa.AccumulatingOptimizer(inner, 4, **WIDE), windows)
    return inner.gradients


def test_what_is_stepped_with_has_24_bits():
    model = net()
    inner = Seen(model.parameters(), lr=0.0)
    train(model, fa.AccumulatingOptimizer(inner, 4, **SMALL), 2)
    theirs = literal(2)
    assert len(inner.gradients) == len(theirs) == 8
    for ours, exact in zip(inner.gradients, theirs, strict=True):
        assert ours.dtype == torch.float32
        error = (ours - exact).norm() / exact.norm()
        assert error < 2**-15 < (exact.bfloat16().float() - exact).norm() / exact.norm()


def test_masters_and_gradients_of_parts_with_and_without_low_bytes_do_not_overlap():
    class EachAlone(Seen):
        steps_each_alone = True

    model, before = net(), net()
    first, *others = model.parameters()
    inner = EachAlone([{"params": [first], "buffer_dtype": torch.float32}, {"params": others}], lr=0.0)
    opt = fa.AccumulatingOptimizer(inner, 4, **SMALL)
    with limits(stepped=lambda _: 4):
        train(model, opt, 2)
    expected = literal(2)
    by_size = [i for window in (expected[:4], expected[4:]) for i in sorted(window, key=torch.numel)]
    for ours, exact in zip(inner.gradients, by_size, strict=True):
        assert (ours - exact).norm() <= 2**-15 * exact.norm()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda ps: torch.optim.AdamW(ps, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    ],
)
def test_training_is_that_with_fp32_buffers_and_copies(make):
    found = []
    for settings in (SMALL, WIDE, {"buffer_dtype": BF16}):
        model = net()
        with limits(STEPPED_CPU=1024):
            opt = fa.AccumulatingOptimizer(make(model.parameters()), 4, max_grad_norm=0.5, **settings)
            train(model, opt, 5)
        found.append(torch.cat([p.detach().flatten().double() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten().double() for p in net().parameters()])
    ours, exact, narrow = found
    assert (ours - exact).norm() < 0.02 * (exact - start).norm()
    assert (ours == exact).double().mean() > 0.99 > (narrow == exact).double().mean()


def test_a_gradient_that_a_step_hook_clips_is_what_is_stepped_with():
    model = net()
    inner = Seen(model.parameters(), lr=0.0)
    opt = fa.AccumulatingOptimizer(inner, 4, **SMALL)
    opt.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
    train(model, opt, 1)
    assert all(g.abs().max() <= 1.01e-3 and g.dtype == torch.float32 for g in inner.gradients)


@pytest.mark.parametrize("micro", range(4))
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(micro):
    def make(model):
        return fa.AccumulatingOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), 4, **SMALL)

    straight = net()
    train(straight, make(straight), 3)
    model = net()
    opt = make(model)
    for window in range(3):
        for number, weight in enumerate((3.0, 1.0, 5.0, 2.0)):
            if (window, number) == (1, micro):
                weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
                model = net()
                opt = make(model)
                model.load_state_dict(weights)
                opt.load_state_dict(state)
            torch.manual_seed(10 * window + number)
            opt.backward(model(torch.randn(16, 32).to(BF16)).float().square().mean(), weight=weight)
            opt.step()
            opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), straight.parameters(), strict=True))


def test_fifteen_bytes_a_parameter():
    p = nn.Parameter(torch.zeros(1 << 16, dtype=BF16))
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW([p], fused=True), 2, **SMALL)
    for _ in range(4):
        opt.backward((p * torch.randn_like(p)).sum())
        opt.step()
    masters = opt._accumulation.extensions.all
    kept = [p, opt._sums.buffers.slots[0].block.flat, *opt.state[p].values()]
    kept += [low for e in masters if hasattr(e, "_low") for low in e._low.values()]
    assert any(isinstance(e, LowParts) for e in masters)
    stored = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    assert sum(stored.values()) == 15 * p.numel() + opt.state[p]["step"].nbytes


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("settings", [SMALL, WIDE, {"buffer_dtype": BF16, "rounding": "compensated"}])
def test_parameters_without_a_buffer_are_stepped_with_the_others(settings, hooked):
    """Frozen ones, or all of them before the first backward: nothing has made their buffers yet."""
    trained = []
    for frozen in (True, False):
        model = net()
        model[2].requires_grad_(False)
        opt = fa.AccumulatingOptimizer(torch.optim.AdamW((model if frozen else model[0]).parameters()), 4, **settings)
        if hooked:
            opt.register_step_post_hook(lambda *_: None)
        for _ in range(4):
            opt.step()
        opt.flush()
        train(model, opt, 2)
        model, state = copy.deepcopy(model), opt.state_dict()
        again = fa.AccumulatingOptimizer(torch.optim.AdamW((model if frozen else model[0]).parameters()), 4, **settings)
        again.load_state_dict(state)
        if hooked:
            again.register_step_post_hook(lambda *_: None)
        for _ in range(4):
            again.step()  # without gradients
        train(model, again, 2)
        assert again.last_window.applied
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *trained))
