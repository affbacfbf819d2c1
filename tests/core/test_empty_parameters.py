"""Parameters of no elements or no dimensions train as in plain PyTorch in every mode."""

import copy
import math
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from torch import nn

COUNT, WINDOWS = 2, 3


class Net(nn.Module):
    """Gradients are small whole numbers, which no mode rounds. Weights are used as in a sum."""

    def __init__(self, shapes):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, x):
        return sum((p * (x + i)).sum() for i, p in enumerate(self.parts))


SHAPES = {
    "beside others": [(3, 2), (0,), (), (0, 3), (2,), (3, 0)],
    "only empty ones": [(0,), (3, 0)],
    "only one number": [()],
    "an empty one first": [(0, 2), (4,)],
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def adamw(**settings):
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.25, **settings)


def literal(model, make, limit=None, skip=()):
    """The big batch in plain PyTorch; returns what it trains, and the norms."""
    model, norms = copy.deepcopy(model), []
    opt = make(model.parameters())
    for window in range(WINDOWS):
        opt.zero_grad()
        (sum(model(float(4 * window + 2 * number)) for number in range(COUNT)) / COUNT).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)))
        if window not in skip:
            opt.step()
    return list(model.parameters()), norms


def assert_equal(model, theirs, **tolerance):
    for ours, p in zip(model.parameters(), theirs, strict=True):
        assert ours.shape == p.shape
        torch.testing.assert_close(ours, p.to(ours.dtype), **(tolerance or {"rtol": 0, "atol": 0}))


MODES = {
    "fp32": (torch.float32, sgd, {}),
    "bf16 parameters": (torch.bfloat16, sgd, {}),
    "16-bit buffers": (torch.float32, sgd, {"buffer_dtype": None}),
    "bf16 buffers": (torch.bfloat16, sgd, {"buffer_dtype": torch.bfloat16, "rounding": "stochastic"}),
    "fp64 buffers": (torch.float32, sgd, {"buffer_dtype": torch.float64}),
    "low parts": (torch.bfloat16, sgd, {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}),
    "masters": (torch.bfloat16, sgd, {"master_weights": True}),
    "masters of a fused optimizer": (torch.bfloat16, adamw(fused=True), {"master_weights": True}),
    "fused": (torch.float32, adamw(fused=True), {"max_grad_norm": math.inf}),
    "for each": (torch.float32, adamw(foreach=True), {}),
    "one by one": (torch.float32, adamw(foreach=False), {}),
    "norm": (torch.float32, sgd, {"max_grad_norm": math.inf}),
    "noise scale": (torch.float32, sgd, {"noise_scale": 0.9}),
    "raise": (torch.float32, sgd, {"nonfinite": "raise"}),
    "skip_window": (torch.float32, sgd, {"nonfinite": "skip_window", "max_grad_norm": math.inf}),
    "skip_micro_batch": (torch.float32, sgd, {"nonfinite": "skip_micro_batch"}),
    "reference": (torch.float32, sgd, {"backend": "reference"}),
    "none": (torch.float32, sgd, {"reduction": "none", "accum_steps": None}),
    "sum": (torch.float32, sgd, {"reduction": "sum"}),
    "window_weight": (torch.float32, sgd, {"window_weight": 6, "accum_steps": None}),
}


def micro_batch(opt, model, window, number):
    loss = model(float(4 * window + 2 * number))
    if opt.reduction == "none":
        (loss / COUNT).backward()
    else:
        opt.backward(loss * (3 if opt.reduction == "sum" else 1), weight=3)


def train(model, opt, at_the_end=lambda: None):
    for window in range(WINDOWS):
        for number in range(COUNT):
            micro_batch(opt, model, window, number)
            if number == COUNT - 1:
                at_the_end()
            if opt.reduction != "none" or number == COUNT - 1:
                opt.step()
                opt.zero_grad()


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_empty_parameters_and_single_numbers_train_as_in_plain_pytorch(mode, shapes):
    dtype, make, settings = MODES[mode]
    model = Net(SHAPES[shapes])
    theirs, norms = literal(model if settings.get("master_weights") else model.to(dtype), make)
    opt = fa.AccumulatingOptimizer(make(model.to(dtype).parameters()), **{"accum_steps": COUNT, **settings})
    train(model, opt)
    assert opt.updated
    assert_equal(model, theirs)
    if "max_grad_norm" in settings:
        assert float(opt.last_window.grad_norm) == pytest.approx(norms[-1])


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("how", ["max_grad_norm", "fused", "by hand"])
def test_empty_parameters_and_single_numbers_are_clipped(how, shapes):
    model = Net(SHAPES[shapes])
    make = adamw(fused=True) if how == "fused" else sgd
    theirs, _ = literal(model, make, limit=0.5)
    opt = fa.AccumulatingOptimizer(make(model.parameters()), COUNT, max_grad_norm=None if how == "by hand" else 0.5)

    def clip():
        opt.normalize_()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    train(model, opt, clip if how == "by hand" else lambda: None)
    assert_equal(model, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("mode", ["fp32", "bf16 buffers", "masters", "skip_micro_batch"])
def test_checkpoints_inside_windows_bring_empty_parameters_and_single_numbers_back(mode, shapes, tmp_path):
    dtype, make, settings = MODES[mode]
    model = Net(SHAPES[shapes])
    theirs, _ = literal(model if settings.get("master_weights") else model.to(dtype), make)
    opt = fa.AccumulatingOptimizer(make(model.to(dtype).parameters()), COUNT, **settings)
    for window in range(WINDOWS):
        for number in range(COUNT):
            micro_batch(opt, model, window, number)
            opt.step()
            opt.zero_grad()
            torch.save((model.state_dict(), opt.state_dict()), tmp_path / "state")
            weights, state = torch.load(tmp_path / "state")
            model = Net(SHAPES[shapes]).to(dtype)
            model.load_state_dict(weights)
            opt = fa.AccumulatingOptimizer(make(model.parameters()), COUNT, **settings)
            opt.load_state_dict(state)
    assert_equal(model, theirs)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("nonfinite", ["skip_window", "raise"])
def test_a_gradient_without_elements_is_finite_whatever_the_loss_is(nonfinite, shapes):
    model, empty = Net(SHAPES[shapes]), shapes == "only empty ones"
    theirs, _ = literal(model, sgd, skip=[] if empty else [1])
    opt = fa.AccumulatingOptimizer(sgd(model.parameters()), COUNT, nonfinite=nonfinite)
    for window in range(WINDOWS):
        for number in range(COUNT):
            bad = (window, number) == (1, 1)
            (model(float(4 * window + 2 * number)) * (math.nan if bad else 1)).backward()
            with pytest.raises(FloatingPointError) if bad and nonfinite == "raise" and not empty else nullcontext():
                opt.step()
            if bad and nonfinite == "raise":
                opt.reset()
    assert_equal(model, theirs)


@pytest.mark.parametrize("shapes", SHAPES)
def test_empty_parameters_and_single_numbers_under_a_grad_scaler(shapes):
    model = Net(SHAPES[shapes])
    theirs, _ = literal(model, sgd)
    opt = fa.AccumulatingOptimizer(sgd(model.parameters()), COUNT)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for window in range(WINDOWS):
        for number in range(COUNT):
            scaler.scale(model(float(4 * window + 2 * number))).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert_equal(model, theirs)
