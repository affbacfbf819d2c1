"""Loops in which steps and backwards do not pair up: two models that train against each other, and two steps on one batch."""

import warnings
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from training import assert_same_parameters, data, mean_loss, model, parts, twin, wrapped


def gan():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"makes": nn.Linear(2, 6), "judges": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))}
    ).double()


def losses(net, real, noise):
    """The judge's loss, and the maker's as a function, because it is computed after the judge's step."""
    made = net["makes"](noise)
    judged = softplus(-net["judges"](real)).mean() + softplus(net["judges"](made.detach())).mean()
    return judged, lambda: softplus(-net["judges"](made)).mean()


def adam(net, half):
    return torch.optim.Adam(net[half].parameters(), lr=1e-2)


@pytest.mark.parametrize("how", ["frozen", "inputs"])
def test_neither_loss_leaves_a_gradient_in_the_others_window(how):
    net = gan()
    big, generator = twin(net), torch.Generator().manual_seed(1)
    batches = [[torch.randn(4, n, generator=generator).double() for n in (6, 2)] for _ in range(6)]
    ours = {half: fa.AccumulatingOptimizer(adam(net, half), 3) for half in net}
    theirs = {half: adam(big, half) for half in big}
    for i, batch in enumerate(batches):
        for n, optimizers, share in ((net, ours, 1), (big, theirs, 3)):
            judged, made_by = losses(n, *batch)
            (judged / share).backward()
            if n is net or i % 3 == 2:
                optimizers["judges"].step()
                optimizers["judges"].zero_grad()
            if how == "frozen":
                n["judges"].requires_grad_(False)
                (made_by() / share).backward()
                n["judges"].requires_grad_(True)
            else:
                (made_by() / share).backward(inputs=list(n["makes"].parameters()))
            if n is net or i % 3 == 2:
                optimizers["makes"].step()
                optimizers["makes"].zero_grad()
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_zero_grad_says_that_it_keeps_what_the_other_loss_has_left(steps):
    net = gan()
    opt = fa.AccumulatingOptimizer(adam(net, "judges"), steps)
    judged, made_by = losses(net, torch.randn(4, 6).double(), torch.randn(4, 2).double())
    judged.backward()
    opt.step()
    opt.zero_grad()
    made_by().backward()
    with pytest.warns(RuntimeWarning, match=r"part of the next micro-batch.*requires_grad_\(False\)"):
        opt.zero_grad()


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("how", ["plain", "wrapper", "block"])
def test_a_step_that_is_left_under_the_old_condition_is_warned_of(steps, how):
    """`if (i + 1) % 4 == 0:` left around step(): the window would be 16 micro-batches long. Two backwards are often of two losses."""
    net, (x, y) = model(), data()
    opt = wrapped(net, steps)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2 * steps):  # two windows
            with opt.micro_batch() if how == "block" else nullcontext():
                for part in parts(x, y, [24 // steps] * steps):
                    loss = mean_loss(net, *part)
                    opt.backward(loss) if how == "wrapper" else loss.backward()
            opt.step()
            opt.zero_grad()
    told = [w for w in told if "is step() called only after every" in str(w.message)]
    assert len(told) == (steps == 4 and how != "block")


class SAM(torch.optim.SGD):
    """Foret et al., 2020, as packaged: climbs along one gradient, and descends from there along another."""

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        self.climbed = [(p, 0.05 * p.grad / norm) for p in params]
        for p, by in self.climbed:
            p.add_(by)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p, by in self.climbed:
            p.sub_(by)
        self.step()
        if zero_grad:
            self.zero_grad()


@pytest.mark.parametrize("zero_grad", [False, True])
def test_an_optimizer_of_two_steps_takes_a_window_each(zero_grad):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, make=SAM), SAM(big.parameters())
    for _ in range(3):
        for ours, its in ((opt.first_step, plain.first_step), (opt.second_step, plain.second_step)):
            for xs, ys in parts(x, y, (5, 4, 15)):
                opt.backward(mean_loss(net, xs, ys), weight=len(xs))
            opt.normalize_()
            ours(zero_grad=zero_grad)
            if not zero_grad:
                opt.zero_grad()
            mean_loss(big, x, y).backward()
            its(zero_grad=True)
    assert_same_parameters(net, big, 1e-12)
