"""Closures: step() evaluates one once, and gives the inner optimizer one that returns the loss."""

import weakref
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from fusedaccum.core.closures import takes_closure
from torch import nn
from training import assert_same_parameters, data, mean_loss, model, parts, twin, wrapped, wrapper_of, zeros


class AliG(torch.optim.Optimizer):
    """Berrada et al., 2019: the step size is ``min(lr, loss / |g|^2)``."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        square = sum(p.grad.square().sum() for p in params)
        size = float(torch.clamp(loss.detach() / (square + 1e-5), max=self.param_groups[0]["lr"]))
        for p in params:
            p.sub_(size * p.grad)
        return loss


class Emo(torch.optim.SGD):
    """As the Emo family has it: the rate falls with a moving average of the loss.

    Without a closure the loss counts as 0.
    """

    average = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)() if closure is not None else 0.0
        self.average = 0.7 * self.average + 0.3 * float(loss)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (1 + self.average))
        return loss


def emo(parameters):
    return Emo(parameters, lr=0.3)


SIZES = (4, 8, 12)
WINDOWS = {
    "caller-owned": {},
    "drop-in": {"reduction": "none"},
    "counted": {"accum_steps": 3},
    "weighed": {"window_weight": 3},
    "clipped": {"accum_steps": 3, "max_grad_norm": 1e6},
}


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("settings", WINDOWS)
@pytest.mark.parametrize("make", [AliG, emo, torch.optim.AdamW])
def test_an_optimizer_that_reads_the_loss_gets_the_windows(make, settings, hooked):
    """Micro-batches of equal size: their losses' mean is the big batch's loss."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, make=make, **WINDOWS[settings]), make(big.parameters())

    @torch.no_grad()
    def hook(*_):
        for p in net.parameters():
            p.mul_(1.0)
            p.grad.mul_(1.0)

    if hooked:
        opt.register_step_pre_hook(hook)
    batches = [(x, y)] if settings in ("caller-owned", "drop-in") else parts(x, y, (8, 8, 8))
    for _ in range(3):
        for batch in batches:

            def closure(batch=batch):
                opt.zero_grad()
                loss = mean_loss(net, *batch)
                opt.backward(loss, weight=1)
                return loss

            opt.step(closure)

        def whole():
            plain.zero_grad()
            loss = mean_loss(big, x, y)
            loss.backward()
            return loss

        plain.step(whole)
        assert opt.updated
    assert_same_parameters(net, big, 0 if len(batches) == 1 and settings != "clipped" else 1e-12)


def test_the_loss_of_unequal_micro_batches_is_weighted_as_their_gradients_are():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 3, make=AliG), AliG(big.parameters())
    for xs, ys in parts(x, y, SIZES):

        def closure(xs=xs, ys=ys):
            loss = mean_loss(net, xs, ys)
            opt.backward(loss, weight=len(xs))
            return loss

        opt.step(closure)
    mean_loss(big, x, y).backward()
    plain.step(lambda: mean_loss(big, x, y))
    assert_same_parameters(net, big, 1e-12)


def test_losses_that_backward_has_recorded_do_as_well():
    """A partial window, too: flush() has no closure to call."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2, make=AliG), AliG(big.parameters())
    for batch in parts(x, y, (8, 8, 8)):
        opt.backward(mean_loss(net, *batch))
        opt.step()
    opt.flush()
    for rows in (slice(0, 16), slice(16, 24)):
        plain.zero_grad()
        loss = mean_loss(big, x[rows], y[rows])
        loss.backward()
        plain.step(lambda loss=loss: loss)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("steps", [None, 2])
def test_a_loss_that_is_missing_is_asked_for_before_anything_is_counted(steps):
    net, (x, y) = model(), data()
    opt, before = wrapped(net, steps, make=AliG), twin(net)
    mean_loss(net, x, y).backward()
    with pytest.raises(
        TypeError, match=r"the step\(\) of AliG needs the loss: call opt\.step\(closure\), or opt\.backward"
    ):
        opt.step()
    assert opt.progress["window"] == 0 and opt.progress["micro_batch"] == ("0/2" if steps else 1)
    assert_same_parameters(net, before, 0)
    opt.record_loss(mean_loss(net, x, y))
    opt.step()


def test_step_hooks_see_the_closure_as_in_plain_pytorch():
    p, seen = nn.Parameter(torch.zeros(1)), {}
    plain = torch.optim.SGD([p], lr=1.0)
    for opt in (plain, fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))):
        told = seen[opt] = []
        opt.register_step_pre_hook(lambda _, args, kwargs, told=told: told.append((len(args), len(kwargs))))
        p.sum().backward()
        opt.step()
        p.sum().backward()
        opt.step(lambda: 2.0)
        opt.zero_grad()
    assert seen[plain] == seen[opt]


def test_an_optimizer_that_takes_no_closure_gets_none():
    class Bare(torch.optim.SGD):
        def step(self):
            super().step()

    p = nn.Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(Bare([p], lr=1.0))
    assert not takes_closure(opt.optimizer)

    def closure():
        loss = p.sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert p.item() == -1


def test_an_optimizer_that_would_take_any_argument_needs_none():
    class Open(torch.optim.SGD):
        def step(self, closure=None, *args, **kwargs):
            assert not (args or kwargs)
            return super().step(closure)

    p = nn.Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(Open([p], lr=1.0), 2)
    for gradient in (1.0, 3.0):
        (gradient * p).sum().backward()
        opt.step()
    assert p.item() == -2


class Climbs(torch.optim.SGD):
    """SAM, where nothing but its step() tells."""

    how = "weights"

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = [p.grad.clone() for p in params]
        if self.how in ("weights", "both"):
            for p in params:
                p.add_(p.grad)
        if self.how in ("gradients", "both"):
            self.zero_grad()
        torch.enable_grad()(closure)()
        for p, g in zip(params, grads, strict=True):
            p.sub_(g)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("how", ["weights", "gradients", "both"])
@pytest.mark.parametrize("steps", [None, 1])
def test_one_that_has_to_evaluate_it_again_is_refused(steps, how, masters):
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16 if masters else torch.float32))
    inner = Climbs([p], lr=1.0)
    inner.how = how
    opt = fa.AccumulatingOptimizer(inner, steps, master_weights=masters)

    def closure():
        loss = (p**2).sum()
        loss.backward()
        return loss

    with pytest.raises(TypeError, match=r"before it called its closure: optimizer is Climbs, whose.*normalize_\(\)"):
        opt.step(closure)


def test_gradients_that_are_dropped_are_noticed_beside_a_parameter_that_never_has_one():
    p, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))

    class Drops(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            self.zero_grad()
            torch.enable_grad()(closure)()
            super().step()

    opt = fa.AccumulatingOptimizer(Drops([unused, p], lr=1.0))

    def closure():
        loss = p.sum()
        loss.backward()
        return loss

    with pytest.raises(TypeError, match=r"dropped the gradients, before it called its closure: optimizer is Drops"):
        opt.step(closure)


def test_a_window_of_weight_0_needs_no_loss():
    net, (x, y) = model(), data()
    opt, before = wrapped(net, 2, make=AliG), twin(net)
    for _ in range(2):
        opt.backward(mean_loss(net, x, y), weight=0)
        with pytest.warns(RuntimeWarning, match="weight") if opt.progress["micro_batch"] == "1/2" else nullcontext():
            opt.step()
    assert not opt.updated and opt.progress["window"] == 1
    assert_same_parameters(net, before, 0)


def test_sam_is_refused_before_its_closure_runs():
    class SAM(torch.optim.SGD):
        first_step = second_step = torch.optim.SGD.step

    p = nn.Parameter(torch.ones(2))
    opt = fa.AccumulatingOptimizer(SAM([p], lr=1.0))
    with pytest.raises(TypeError, match=r"SAM, whose step\(\) cannot do without its closure.*first_step\(\)"):
        opt.step(lambda: pytest.fail("called"))
    p.sum().backward()
    opt.step()  # of its base class
    assert p.tolist() == [0, 0]


def test_a_loss_is_not_kept_after_its_step():
    net, (x, y) = model(), data()
    opt, alive = wrapped(net, reduction="none"), []

    def closure():
        loss = mean_loss(net, x, y)
        loss.backward()
        alive.append(weakref.ref(loss))
        return loss

    opt.step(closure)
    assert alive[0]() is None


def test_a_drop_in_that_steps_again_hands_on_the_new_loss():
    net, (x, y) = model(), data()
    big = twin(net)
    for n, o in ((net, wrapped(net, reduction="none", make=AliG)), (big, AliG(big.parameters()))):
        loss = mean_loss(n, x, y)
        loss.backward()
        o.step(lambda loss=loss: loss)
        with torch.no_grad():
            again = mean_loss(n, x, y)
        o.step(lambda again=again: again)
    assert_same_parameters(net, big, 0)


@pytest.mark.parametrize("steps", [2, 3])
def test_the_closure_of_a_window_returns_the_windows_loss(steps):
    seen = []

    class Reads(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(closure())
            return super().step()

    p = nn.Parameter(torch.ones(()))
    opt = fa.AccumulatingOptimizer(Reads([p], lr=0.0), steps)
    for number in range(2 * steps):

        def closure(number=number):
            loss = (number + 1) * p
            opt.backward(loss)
            return loss

        opt.step(closure)
    assert [loss.dtype for loss in seen[::steps]] == [torch.float32] * len(seen[::steps])  # as the closure's
    assert [float(loss) for loss in seen] == [(steps + 1) / 2, (3 * steps + 1) / 2]


def test_lbfgs_takes_the_weight_at_step_and_refuses_to_skip_a_window():
    p = zeros()
    opt = wrapper_of([p], reduction="sum", make=lambda ps: torch.optim.LBFGS(ps, lr=1.0, max_iter=1))

    def closure():
        loss = ((p - 3) ** 2).sum()
        loss.backward()
        return loss

    opt.step(closure, weight=2)
    assert opt.last_window.weight == 2 and p.grad.item() == -3
    with pytest.raises(ValueError, match="LBFGS"):
        wrapper_of([zeros()], nonfinite="skip_window", make=torch.optim.LBFGS)


def test_lbfgs_as_a_drop_in_steps_again_with_the_gradient_as_it_was_clipped():
    """A closure without a backward leaves p.grad as it is, as in plain PyTorch.

    There, clip_grad_norm_ comes after the backward.
    """

    def moved(make, clip):
        p = nn.Parameter(torch.tensor([3.0, 4.0]))
        opt = make([p])

        def closure(backward):
            loss = (p**2).sum()
            if backward:
                loss.backward()
                clip([p])
            return loss.detach()

        for backward in (True, False, False):
            opt.step(lambda backward=backward: closure(backward))
        return p.detach()

    lbfgs = lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=1)  # noqa: E731
    ours = moved(lambda ps: fa.AccumulatingOptimizer(lbfgs(ps), reduction="none", max_grad_norm=1.0), lambda ps: None)
    theirs = moved(lbfgs, lambda ps: nn.utils.clip_grad_norm_(ps, 1.0))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
