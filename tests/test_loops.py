"""Loops in which steps and backwards do not pair up: two models that train against each other, and two steps on one batch."""

import warnings
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from training import assert_same_parameters, data, gradient, mean_loss, model, parts, twin, wrapped


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


def test_zero_grad_says_that_it_keeps_what_the_other_loss_has_left():
    net = gan()
    opt = fa.AccumulatingOptimizer(adam(net, "judges"), 3)
    judged, made_by = losses(net, torch.randn(4, 6).double(), torch.randn(4, 2).double())
    judged.backward()
    opt.step()
    opt.zero_grad()
    made_by().backward()
    with pytest.warns(RuntimeWarning, match=r"part of the next micro-batch.*requires_grad_\(False\)"):
        opt.zero_grad()


ONE_MICRO_BATCH = {
    "counted": {"accum_steps": 1},
    "by a callable": {"accum_steps": lambda index: 1},
    "16-bit buffers": {"accum_steps": 1, "buffer_dtype": torch.bfloat16},
    "held": {"accum_steps": 1, "nonfinite": "skip_micro_batch"},
    "caller-owned": {},
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("settings", ONE_MICRO_BATCH)
def test_a_window_of_one_micro_batch_drops_what_another_loss_has_left(settings, to_none):
    """An unchanged WGAN-GP: the maker's loss reaches the judge, whose zero_grad() comes before its own backward."""
    net = gan().float()
    if settings == "16-bit buffers":
        net = net.bfloat16()
    dtype, big = net["makes"].weight.dtype, twin(net)
    for n in (net, big):
        opts = {half: adam(n, half) for half in n}
        if n is net:
            opts = {half: fa.AccumulatingOptimizer(opt, **ONE_MICRO_BATCH[settings]) for half, opt in opts.items()}
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            judged, made_by = losses(n, *(torch.randn(4, size, generator=generator).to(dtype) for size in (6, 2)))
            opts["judges"].zero_grad(set_to_none=to_none)
            judged.backward()
            opts["judges"].step()
            opts["makes"].zero_grad(set_to_none=to_none)
            made_by().backward()
            opts["makes"].step()
    assert_same_parameters(net, big, 0)


def test_a_window_of_one_micro_batch_still_counts_those_that_were_left_out():
    p = nn.Parameter(torch.zeros(()))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, nonfinite="skip_micro_batch")
    for factor in (torch.nan, torch.inf, 2.0):
        opt.zero_grad()
        (p * factor).backward()
        opt.step()
    assert (p.item(), opt.last_window.nonfinite, opt.last_window.micro_batches) == (-2, 2, 1)


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


def test_a_gan_in_windows_that_the_caller_ends_clears_gradients_by_its_models():
    """Each model's zero_grad() drops what the other's loss has left in it, as in plain PyTorch, and nothing is warned of."""
    net = gan()
    big, generator = twin(net), torch.Generator().manual_seed(1)
    batches = [[torch.randn(4, n, generator=generator).double() for n in (6, 2)] for _ in range(4)]
    for n in (net, big):
        opts = {half: adam(n, half) for half in n}
        if n is net:
            opts = {half: fa.AccumulatingOptimizer(opt, reduction="none") for half, opt in opts.items()}
        for batch in batches:
            judged, made_by = losses(n, *batch)
            n["judges"].zero_grad()
            judged.backward()
            opts["judges"].step()
            n["makes"].zero_grad()
            made_by().backward()
            opts["makes"].step()
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("zeroes", ["opt", "to zeros", "model", "never"])
def test_what_is_done_once_a_window_is_done_once(steps, zeroes):
    """`if opt.updated:` after every micro-batch, in a loop that calls step() after each, or after every fourth."""
    net, (x, y) = model(), data()
    opt = wrapped(net, steps)
    at = []
    for number in range(12):
        mean_loss(net, x, y).backward()
        if steps or number % 4 == 3:
            opt.step()
            if zeroes == "model" and opt.updated:
                net.zero_grad()
            elif zeroes in ("opt", "to zeros"):
                opt.zero_grad(set_to_none=zeroes == "opt")
        if opt.updated:
            at.append(number)
    assert at == [3, 7, 11]


def test_a_window_that_is_dropped_has_not_updated():
    net, (x, y) = model(), data()
    opt = wrapped(net)
    for drop in (opt.reset, opt.zero_grad):
        mean_loss(net, x, y).backward()
        opt.step()
        assert opt.updated
        mean_loss(net, x, y).backward()
        drop()
        assert not opt.updated


@pytest.mark.parametrize("when", ["micro-batch", "window", "epoch", "partial window"])
def test_a_scheduler_that_moves_inside_the_first_window_is_warned_of(when):
    net, (x, y) = model(), data()
    opt = wrapped(net, 4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(10):
            mean_loss(net, x, y).backward()
            opt.step()
            if when == "micro-batch" or (when == "window" and opt.updated) or (when == "epoch" and number % 5 == 4):
                scheduler.step()
            if when == "partial window" and number == 1:
                opt.flush()
                scheduler.step()
    expected = ["a scheduler steps inside window 0, of which 1/4 micro-batches are in"] if when == "micro-batch" else []
    assert [str(w.message).partition(":")[0] for w in told] == expected
    assert all(w.filename == __file__ for w in told)


@pytest.mark.parametrize("how", ["block", "apart", "one of two", "all", "none", "window_weight"])
def test_a_weight_that_is_missing_beside_others_is_warned_of_once(how):
    """A second loss of each micro-batch, in windows that the caller ends; then one micro-batch of two; then window_weight without any."""
    net, (x, y) = model(), data()
    opt = wrapped(net, window_weight=3.0) if how == "window_weight" else wrapped(net)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(6):
            with opt.micro_batch(weight=400) if how == "block" else nullcontext():
                loss = mean_loss(net, x, y)
                if how in ("apart", "all") or (how == "one of two" and number % 2):
                    opt.backward(loss, weight=400)
                else:
                    loss.backward()
                if how in ("block", "apart"):
                    net[0].weight.square().sum().backward()
            if number % 2 or how == "window_weight":
                opt.step()
    assert [str(w.message).partition(":")[0] for w in told] == {
        "apart": ["some micro-batches of this window were given a weight and others were not"],
        "one of two": ["some micro-batches of this window were given a weight and others were not"],
        "window_weight": ["window_weight=3, but this micro-batch was given no weight"],
    }.get(how, [])


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


def adamw(ps, fused=False):
    return torch.optim.AdamW(ps, lr=1e-2, fused=fused)


DROP_INS = {
    "AdamW": (adamw, {}),
    "SGD": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), {}),
    "fused": (lambda ps: adamw(ps, True), {}),
    "measured": (lambda ps: adamw(ps, True), {"max_grad_norm": 1e9}),
    "skips": (adamw, {"nonfinite": "skip_window"}),
    "bf16": (adamw, {"buffer_dtype": None}),
}


def changed(net, how):
    """What loops do between a step() and another that no backward precedes."""
    first, *others = net.parameters()
    if how == "zeroed":
        net.zero_grad()
    elif how == "zeroed to zeros":
        net.zero_grad(set_to_none=False)
    elif how == "written":
        first.grad.mul_(3)
    elif how == "replaced":
        first.grad = first.grad + 1
    elif how == "removed":
        first.grad = None
    elif how == "all replaced":
        for p in others:
            p.grad = -p.grad


@pytest.mark.parametrize("how", ["left", "zeroed", "zeroed to zeros", "written", "replaced", "removed", "all replaced"])
@pytest.mark.parametrize("case", DROP_INS)
def test_a_drop_in_steps_again_on_what_p_grad_holds(case, how):
    make, settings = DROP_INS[case]
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    net, (x, y) = model(dtype), data(dtype=dtype)
    big = twin(net)
    opt, plain = wrapped(net, reduction="none", make=make, **settings), make(big.parameters())
    for _ in range(2):
        for n, o in ((net, opt), (big, plain)):
            o.zero_grad()
            for part in parts(x, y, (12, 12)):
                (mean_loss(n, *part) / 2).backward()
            o.step()
            for _ in range(2):
                changed(n, how)
                o.step()
                if how in ("zeroed", "removed"):
                    break
    assert_same_parameters(net, big, 0)
    assert [p.grad is None for p in net.parameters()] == [p.grad is None for p in big.parameters()]


@pytest.mark.parametrize("how", ["zeroed", "zeroed to zeros", "written", "all replaced and one written"])
@pytest.mark.parametrize("case", DROP_INS)
def test_a_drop_in_adds_to_what_other_code_has_made_of_p_grad(case, how):
    """A parameter that the next backward does not reach decays if p.grad was zeroed, and is left alone if it was removed."""
    make, settings = DROP_INS[case]
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    net, (x, y) = model(dtype), data(dtype=dtype)
    net.append(nn.Linear(3, 3, dtype=dtype))
    big = twin(net)
    opt, plain = wrapped(net, reduction="none", make=make, **settings), make(big.parameters())
    for number in range(4):
        for n, o in ((net, opt), (big, plain)):
            mean_loss(n if number % 2 == 0 else n[:-1], x, y).backward()
            o.step()
            for part in how.split(" and one "):
                changed(n, part)
    assert_same_parameters(net, big, 0)


def test_clipping_by_hand_before_each_of_two_steps():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    for n, o in ((net, wrapped(net, reduction="none")), (big, wrapped(big).optimizer)):
        mean_loss(n, x, y).backward()
        for limit in (0.1, 0.05):
            nn.utils.clip_grad_norm_(n.parameters(), limit)
            o.step()
    assert_same_parameters(net, big, 0)


def test_masters_are_stepped_again_too():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    opt = wrapped(net, reduction="none", make=lambda ps: torch.optim.SGD(ps, lr=1e-3), master_weights=True)
    before = [p.detach().float() for p in net.parameters()]
    expected = gradient(net, x, y)
    mean_loss(net, x, y).backward()
    for _ in range(3):
        opt.step()
        assert opt.updated
    for p, was, g in zip(net.parameters(), before, expected, strict=True):
        for _ in range(3):
            was = was - 1e-3 * g.float()
        torch.testing.assert_close(opt._masters.of[p], was, rtol=0, atol=1e-8)


@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"accum_steps": 1}], ids=str)
def test_windows_that_divide_apply_nothing_twice(settings):
    p = nn.Parameter(torch.ones(()))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1), **settings)
    opt.backward(2 * p, weight=1)
    opt.step()
    opt.step(**({"weight": 1} if settings == {"reduction": "sum"} else {}))
    assert p.item() == pytest.approx(0.8) and not opt.updated


def test_a_step_that_raises_is_stepped_once_and_then_again(monkeypatch):
    p, fail = nn.Parameter(torch.ones(())), []
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1), reduction="none")
    opt.register_step_pre_hook(lambda *_: fail.pop()() if fail else None)
    (2 * p).backward()
    opt.step()
    fail.append(lambda: pytest.fail("no memory", pytrace=False))
    with pytest.raises(pytest.fail.Exception):
        opt.step()
    assert p.item() == pytest.approx(0.8)
    opt.step()
    assert p.item() == pytest.approx(0.6)


@pytest.mark.parametrize("settings", [{"reduction": "none"}, {}, {"accum_steps": 2}], ids=str)
@pytest.mark.parametrize("zeroes", ["never", "opt", "model", "before backward", "to zeros"])
def test_a_drop_in_says_once_that_it_does_not_add_to_a_gradient_that_was_stepped(zeroes, settings):
    net, (x, y) = model(), data()
    opt = wrapped(net, **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            if zeroes == "before backward":
                opt.zero_grad()
            mean_loss(net, x, y).backward()
            mean_loss(net, x, y).backward()
            opt.step()
            if zeroes == "model" and opt.updated:
                net.zero_grad()
            elif zeroes in ("opt", "to zeros"):
                opt.zero_grad(set_to_none=zeroes == "opt")
    told = [w for w in told if "with no zero_grad() between" in str(w.message)]
    assert len(told) == (zeroes == "never" and "reduction" in settings)
    assert all(w.filename == __file__ for w in told)


@pytest.mark.parametrize("evaluations", [1, 4])
@pytest.mark.parametrize("how", ["before", "before, adds", "by hand", "zeroes", "nothing"])
def test_lbfgs_as_a_drop_in_takes_a_backward_before_its_step(how, evaluations):
    """The closure of plain LBFGS may leave the backward to whoever has run it before."""
    net, (x, y) = model(), data()
    big = twin(net)

    def make(ps):
        return torch.optim.LBFGS(ps, lr=0.1, max_iter=evaluations)

    for n, o in ((net, wrapped(net, reduction="none", make=make)), (big, make(big.parameters()))):
        for _ in range(2):
            if how != "nothing":
                o.zero_grad()
                mean_loss(n, x, y).backward()
            ran = []

            def closure(n=n, o=o, ran=ran):
                loss = mean_loss(n, x, y)
                if how == "zeroes":
                    o.zero_grad()
                    loss.backward()
                if how == "by hand":
                    for p, g in zip(n.parameters(), torch.autograd.grad(loss, list(n.parameters())), strict=True):
                        p.grad = g
                if how == "before, adds" and not ran:
                    loss.backward()
                ran.append(1)
                return loss.detach()

            o.step(closure)
    assert_same_parameters(net, big, 1e-12)
