"""Loops in which steps and backwards do not pair up: two rival models, two steps on a batch."""

import copy
import gc
import re
import warnings
from contextlib import nullcontext
from functools import partial

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from training import (
    assert_grads,
    assert_same_parameters,
    data,
    gradient,
    masters_of,
    mean_loss,
    model,
    parts,
    twin,
    wrapped,
)


def gan():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"makes": nn.Linear(2, 6), "judges": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))}
    ).double()


def losses(net, real, noise):
    """The judge's loss, and a function for the maker's, which comes after the judge's step."""
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
    """WGAN-GP, unchanged: the maker's loss reaches the judge, which zeroes before its backward."""
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
    """`if (i + 1) % 4 == 0:` left around step(): the window would be 16 micro-batches long.

    Two backwards are often of two losses.
    """
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


def test_chunks_of_a_loss_beside_their_backward_are_no_forgotten_condition():
    """Two chunks of the head's loss, each with a backward to the hidden state, and one from there.

    They are as many passes as the window has micro-batches.
    """
    net, (x, y) = model(), data()
    opt = wrapped(net, 3)
    body, head = net[:4], net[4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in parts(x, y, [8, 8, 8]):
            hidden = body(part[0])
            leaf = hidden.detach().requires_grad_()
            for chunk in (slice(0, 4), slice(4, 8)):
                (nn.functional.mse_loss(head(leaf[chunk]), part[1][chunk]) / 2).backward()
            hidden.backward(leaf.grad)
            opt.step()
    assert_grads(net, gradient(model(), x, y))


def test_a_loss_of_other_parameters_beside_two_of_all_is_no_forgotten_condition():
    net, (x, y) = model(), data()
    opt = wrapped(net, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            mean_loss(net, x, y).backward()
            mean_loss(net, x, y).backward()
            net[0].weight.square().sum().backward()
            opt.step()


def test_a_gan_in_windows_that_the_caller_ends_clears_gradients_by_its_models():
    """Each zero_grad() drops the other loss's gradient, as in plain PyTorch, without a warning."""
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
    """`if opt.updated:` after each micro-batch; step() comes after each, or after every fourth."""
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


INSIDE = "a scheduler steps inside window 0, of which 1/4 micro-batches are in"


@pytest.mark.parametrize("of", ["wrapper", "inner, before", "inner, after", "inner with masters"])
@pytest.mark.parametrize("when", ["micro-batch", "window", "epoch", "long epoch", "partial window", "before the step"])
def test_a_scheduler_that_moves_inside_the_first_window_is_warned_of(when, of):
    """Also one of the inner optimizer, whose step() PyTorch would miss.

    What it says itself of the wrong order, it still says.
    """
    net = model(torch.bfloat16 if of == "inner with masters" else torch.float64)
    x, y = data(dtype=net[0].weight.dtype)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    make = torch.optim.lr_scheduler.CosineAnnealingLR
    scheduler = make(inner, 100) if of in ("inner, before", "inner with masters") else None
    # Windows of 16 reach over the end of epochs of 10 or 5.
    opt = fa.AccumulatingOptimizer(inner, 16 if when == "long epoch" else 4, master_weights=of == "inner with masters")
    scheduler = scheduler or make(opt if of == "wrapper" else inner, 100)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(20):
            mean_loss(net, x, y).backward()
            if when == "before the step":
                scheduler.step()
            opt.step()
            every = {"micro-batch": 1, "epoch": 5, "long epoch": 10}.get(when)
            if (every and number % every == every - 1) or (when == "window" and opt.updated):
                scheduler.step()
            if when == "partial window" and number == 1:
                opt.flush()
                scheduler.step()
    expected = {
        "micro-batch": INSIDE,
        "before the step": "Detected call of `lr_scheduler.step()` before `optimizer.step()`",
    }
    found = [str(w.message) for w in told]
    assert len(found) == (when in expected) and all(message.startswith(expected[when]) for message in found)
    assert all(w.filename == __file__ for w in told)


@pytest.mark.parametrize("chain", [torch.optim.lr_scheduler.ChainedScheduler, torch.optim.lr_scheduler.SequentialLR])
def test_several_schedulers_in_one_are_warned_of_once(chain):
    net, (x, y) = model(), data()
    opt = wrapped(net, 4)
    several = [torch.optim.lr_scheduler.ConstantLR(opt), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]
    settings = {"milestones": [2]} if chain is torch.optim.lr_scheduler.SequentialLR else {}
    scheduler = chain(opt, several, **settings) if settings else chain(several)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(8):
            mean_loss(net, x, y).backward()
            opt.step()
            scheduler.step()
    assert [str(w.message).partition(":")[0] for w in told if "inside window" in str(w.message)] == [INSIDE]


def test_a_scheduler_of_an_optimizer_that_was_stepped_before_it_was_wrapped():
    """Its own first step() was before that: PyTorch has nothing to say, and we have."""
    net, (x, y) = model(), data()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    mean_loss(net, x, y).backward()
    inner.step()
    inner.zero_grad()
    fa.AccumulatingOptimizer(inner, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_an_optimizer_whose_wrapper_is_gone_answers_its_scheduler_by_itself():
    net, (_x, _y) = model(), data()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    fa.AccumulatingOptimizer(inner, 4)
    gc.collect()
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()
    copy.deepcopy(inner)


@pytest.mark.parametrize("how", ["block", "apart", "one of two", "all", "none", "window_weight"])
def test_a_weight_that_is_missing_beside_others_is_warned_of_once(how):
    """A second loss of each micro-batch, in windows that the caller ends.

    Then one micro-batch of two; then window_weight without any.
    """
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


# -- gradients not for the step: adversarial attacks, and several losses' that are combined --------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(11, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 3))
        self.double()

    def forward(self, ids, delta=0.0):
        return self.head((self.words(ids) + delta).mean(1))


def test_a_missing_weight_is_warned_of_beside_one_of_a_rejected_micro_batch():
    p = torch.nn.Parameter(torch.zeros(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p]), 3, nonfinite="skip_micro_batch")
    opt.backward((p * torch.nan).sum(), weight=2)
    opt.step()
    opt.backward(p.sum())
    with pytest.warns(
        RuntimeWarning, match="some micro-batches of this window were given a weight and others were not"
    ):
        opt.step()


def test_a_warning_that_is_an_error_loses_no_batch_statistics():
    """That of a missing zero_grad(): the next step() applies the window, which has closed."""
    net = fa.accumulate_batchnorm(nn.BatchNorm1d(3))
    plain = copy.deepcopy(nn.BatchNorm1d(3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), reduction="none")
    x = torch.randn(2, 8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x[0]).sum().backward()
        opt.step()
        net(x[1]).sum().backward()
        with pytest.raises(RuntimeWarning, match=r"with no zero_grad\(\) between"):
            opt.step()
        opt.step()
    for part in x:
        plain(part)
    torch.testing.assert_close(net.running_mean, plain.running_mean)
    assert net.num_batches_tracked == 2


def texts(count):
    g = torch.Generator().manual_seed(5)
    return [(torch.randint(11, (4, 5), generator=g), torch.randint(3, (4,), generator=g)) for _ in range(count)]


def freelb(net, ids, y, backward, passes=3):
    """Zhu et al., 2020: steps along delta's gradient; the model's is the mean over the steps."""
    delta = torch.full((4, 5, 6), 0.01, dtype=torch.float64)
    for _ in range(passes):
        delta.requires_grad_()
        backward(cross_entropy(net(ids, delta), y) / passes)
        delta = (delta + 0.1 * delta.grad / delta.grad.norm()).detach()


def pgd(net, ids, y, zero_grad, attacks=3):
    """Madry et al., 2018, as packaged for language models.

    p.grad is set aside for the attacks, and put back before the last backward.
    """
    words = net.words.weight
    cross_entropy(net(ids), y).backward()
    kept = {p: p.grad.clone() for p in net.parameters()}
    before = words.data.clone()
    for attack in range(attacks):
        words.data.add_(0.3 * words.grad / words.grad.norm())
        if attack < attacks - 1:
            zero_grad()
        else:
            for p, grad in kept.items():
                p.grad = grad
        cross_entropy(net(ids), y).backward()
    words.data = before


def pgd_beside_the_window(net, ids, y, attacks=3):
    """The same, as the guide has it: gradients of an attack never get into p.grad."""
    words = net.words.weight
    loss = cross_entropy(net(ids), y)
    loss.backward(retain_graph=True)
    before = words.data.clone()
    for _ in range(attacks):
        (grad,) = torch.autograd.grad(loss, [words])
        words.data.add_(0.3 * grad / grad.norm())
        loss = cross_entropy(net(ids), y)
    loss.backward()
    words.data = before


def plain_steps(run, count, length):
    """Plain PyTorch: steps the mean of separate gradients, without accumulation in p.grad."""
    net = Classifier()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for number, (ids, y) in enumerate(texts(count)):
        opt.zero_grad()
        run(net, ids, y)
        for total, p in zip(sums, net.parameters(), strict=True):
            total += p.grad / length
        if number % length == length - 1:
            for total, p in zip(sums, net.parameters(), strict=True):
                p.grad = total.clone()
                total.zero_()
            opt.step()
    return net


def all_told(run):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in told]


@pytest.mark.parametrize("windows", ["block", "apart", "opt.backward", "ended by the caller"])
def test_adversarial_steps_of_one_micro_batch(windows):
    """As many as the window has micro-batches, which a forgotten condition looks like.

    A block says what they are.
    """
    net = Classifier()
    length = 1 if windows == "ended by the caller" else 3
    settings = {"reduction": "none"} if length == 1 else {"accum_steps": length}
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **settings)

    def run():
        for ids, y in texts(6):
            with opt.micro_batch() if windows == "block" else nullcontext():
                freelb(net, ids, y, opt.backward if windows == "opt.backward" else torch.Tensor.backward)
            opt.step()
            opt.zero_grad()

    told = all_told(run)
    assert_same_parameters(net, plain_steps(lambda *of: freelb(*of, torch.Tensor.backward), 6, length), 1e-12)
    assert len(told) == (windows in ("apart", "opt.backward"))
    assert all("adversarial steps), put them into one `with opt.micro_batch():`" in message for message in told)


@pytest.mark.parametrize("zeroes", ["model", "opt"])
def test_gradients_that_an_attack_sets_aside_in_windows_that_the_caller_ends(zeroes):
    net = Classifier()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), reduction="none")

    def run():
        for ids, y in texts(4):
            pgd(net, ids, y, net.zero_grad if zeroes == "model" else opt.zero_grad)
            opt.step()
            opt.zero_grad()

    assert all_told(run) == []
    assert_same_parameters(net, plain_steps(lambda n, *of: pgd(n, *of, n.zero_grad), 4, 1), 1e-12)


@pytest.mark.parametrize("zeroes", ["model", "opt"])
def test_gradients_that_an_attack_sets_aside_in_counted_windows_are_told_the_way_out_once(zeroes):
    """The attacks follow the window's sum there, as they would in a plain loop that accumulates."""
    net = Classifier()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), accum_steps=2)

    def run():
        for ids, y in texts(8):
            pgd(net, ids, y, net.zero_grad if zeroes == "model" else opt.zero_grad)
            opt.step()

    told = all_told(run)
    assert len(told) == 2 and "p.grad was written to" in told[1]
    assert re.search(r"attack.*torch\.autograd\.grad\(loss, (inputs|parameters)\)", told[0])


def test_an_attack_by_autograd_grad_leaves_counted_windows_alone():
    net = Classifier()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), accum_steps=2)

    def run():
        for ids, y in texts(8):
            with opt.micro_batch():
                pgd_beside_the_window(net, ids, y)
            opt.step()

    assert all_told(run) == []
    assert_same_parameters(net, plain_steps(lambda n, *of: pgd(n, *of, n.zero_grad), 8, 2), 1e-12)


def projected(gradients):
    """Yu et al., 2020, without shuffling: takes out of each gradient what contradicts another."""
    flat = [torch.cat([g.flatten() for g in of_loss]) for of_loss in gradients]
    found = [g.clone() for g in flat]
    for ours in found:
        for other in flat:
            if (along := ours @ other) < 0:
                ours -= along * other / (other @ other)
    whole = sum(found).split([g.numel() for g in gradients[0]])
    return [part.view_as(g) for part, g in zip(whole, gradients[0], strict=True)]


class PCGrad:
    """As packaged: clears and reads p.grad for every loss, and puts their combination there."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def pc_backward(self, losses):
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = []
        for loss in losses:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            gradients.append([p.grad.clone() for p in params])
        for p, grad in zip(params, projected(gradients), strict=True):
            p.grad = grad

    def step(self):
        self.optimizer.step()


def contradicting(net, x, y):
    out = net(x)
    return mean_loss(net, x, y), -(out[:, 0] - y[:, 1]).square().mean(), (out + y).abs().mean()


def test_losses_combined_round_a_wrapper_whose_windows_the_caller_ends():
    net, (x, y) = model(), data()
    big = twin(net)

    def run():
        ours = PCGrad(fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), reduction="none"))
        theirs = PCGrad(torch.optim.SGD(big.parameters(), lr=0.1))
        for n, opt in ((net, ours), (big, theirs)) * 3:
            opt.pc_backward(contradicting(n, x, y))
            opt.step()

    assert all_told(run) == []
    assert_same_parameters(net, big, 1e-12)


def test_losses_combined_round_a_wrapper_with_counted_windows_are_told_the_way_out_once():
    net, (x, y) = model(), data()
    opt = PCGrad(wrapped(net, 2))

    def run():
        for _ in range(6):
            opt.pc_backward(contradicting(net, x, y))
            opt.step()

    told = all_told(run)
    assert len(told) == 2
    for message in told:
        assert "torch.autograd.backward(parameters, gradients)" in message
    assert re.search(r"combine.*PCGrad.*torch\.autograd\.grad\(loss, parameters\)", told[0])


def test_losses_combined_as_the_warning_says_join_the_window():
    net, (x, y) = model(), data()
    big, opt = twin(net), wrapped(net, 2, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    plain = torch.optim.SGD(big.parameters(), lr=0.1)
    params = list(net.parameters())

    def run():
        for number, part in enumerate(parts(x, y, [4] * 6)):
            losses = contradicting(net, *part)
            own = projected([torch.autograd.grad(loss, params, retain_graph=True) for loss in losses])
            torch.autograd.backward(params, own)
            opt.step()
            losses = contradicting(big, *part)
            own = projected([torch.autograd.grad(loss, list(big.parameters()), retain_graph=True) for loss in losses])
            for p, grad in zip(big.parameters(), own, strict=True):
                p.grad = grad / 2 if p.grad is None else p.grad + grad / 2
            if number % 2:
                plain.step()
                plain.zero_grad()

    assert all_told(run) == []
    assert_same_parameters(net, big, 1e-12)


class SAM(torch.optim.SGD):
    """Foret et al., 2020, as packaged: climbs along one gradient, descends along another."""

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
    """A parameter without a gradient decays if p.grad was zeroed, not if it was removed."""
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
        torch.testing.assert_close(masters_of(opt)[p], was, rtol=0, atol=1e-8)


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


def test_lbfgs_as_a_drop_in_says_that_it_does_not_add_to_a_gradient_that_was_stepped():
    p = nn.Parameter(torch.ones(3))
    opt = fa.AccumulatingOptimizer(torch.optim.LBFGS([p], lr=0.1, max_iter=2), reduction="none")

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    with pytest.warns(RuntimeWarning, match=r"with no zero_grad\(\) between"):
        opt.step(closure)
    opt.step(closure)  # once


class OwnSGD(torch.optim.Optimizer):
    """As somebody else may write it."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, partial(torch.optim.SGD, fused=True), OwnSGD], ids=["SGD", "fused", "own"]
)
def test_a_gradient_that_was_clipped_is_stepped_again_as_it_was_clipped(make):
    """Three steps of a gradient of norm 8, clipped to 4: plain PyTorch clips it in place."""
    p = nn.Parameter(torch.ones(4))
    opt = fa.AccumulatingOptimizer(make([p], lr=0.25), reduction="none", max_grad_norm=4.0)
    (4 * p).sum().backward()
    for number in range(3):
        opt.step()
        torch.testing.assert_close(p.detach(), torch.full((4,), 1 - 0.5 * (number + 1)), atol=1e-5, rtol=0)


def test_a_window_that_is_stepped_again_is_reported_as_it_was():
    p = nn.Parameter(torch.ones(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.25), reduction="none", max_grad_norm=4.0)
    for loss in ((4 * p).sum(), (0 * p).sum()):
        opt.backward(loss)
    for _ in range(2):
        opt.step()
        assert opt.last_window.as_dict() == {"micro_batches": 2, "weight": 2, "grad_norm": 8, "applied": 1, "loss": 16}
        assert opt.progress["window"] == 1


def test_a_gradient_that_was_written_to_between_two_steps_is_clipped_anew():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), reduction="none", max_grad_norm=1.0)
    (4 * p).sum().backward()
    opt.step()
    p.grad.mul_(3)
    opt.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -1.0), atol=1e-5, rtol=0)
    assert opt.last_window.grad_norm == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"reduction": "none"}], ids=str)
def test_one_gradient_that_is_removed_leaves_the_others_of_a_window_that_the_caller_ends(settings):
    a, b = (nn.Parameter(torch.ones(())) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), **settings)
    (a + b).backward()
    a.grad = None
    with pytest.warns(RuntimeWarning, match="set to None inside an open window"):
        (a + b).backward()
    assert (a.grad.item(), b.grad.item()) == (1, 2)
    opt.step()
    assert opt.last_window.micro_batches == 2


def test_windows_need_not_agree_in_whether_they_are_weighed():
    p = nn.Parameter(torch.ones(()))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1), 1)
    for weight in (3, None, 5):
        opt.backward(p * 1.0, weight=weight)
        opt.step()
        opt.zero_grad()
    assert opt.last_window.weight == 5
