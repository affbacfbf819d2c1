"""The four policies for NaN and infinity; a skipped micro-batch leaves nothing behind."""

import copy
import math
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from pairs import AddsToGrad
from sizes import limits
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    assert_same_parameters,
    big_batch_step,
    data,
    grads,
    mean_loss,
    model,
    parts,
    sgd,
    sum_loss,
    twin,
    wrapped,
    wrapper_of,
    zeros,
)

BAD = [float("nan"), float("inf"), float("-inf")]


def run(opt, net, batches, bad=(), value=float("nan"), raises=()):
    """Run these micro-batches; those numbered in ``bad`` spoil one element of one gradient."""
    for i, (xs, ys) in enumerate(batches):
        loss = mean_loss(net, xs, ys)
        if i in bad:
            spoil = torch.zeros_like(net[2].weight)
            spoil[1, 3] = value
            loss = loss + (net[2].weight * spoil).sum()
        opt.backward(loss, weight=len(xs))
        if i in raises:
            with pytest.raises(FloatingPointError, match=r"param_groups\[0\]\['params'\]\[2\].*dropped"):
                opt.step()
        else:
            opt.step()


def test_propagate_propagates():
    net, (x, y) = model(), data()
    opt = wrapped(net, 3, nonfinite="propagate")
    run(opt, net, parts(x, y, (8, 8, 8)), bad=[1])
    assert opt.updated
    assert net[2].weight.isnan().sum() == 1 and net[0].weight.isfinite().all()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("value", BAD)
def test_skip_window_applies_nothing_of_it_and_goes_on(value, bad, fused):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)

    def make(ps):
        return torch.optim.Adam(ps, lr=1e-2, eps=1e-3, fused=fused)

    opt, plain = wrapped(net, 3, make=make, nonfinite="skip_window"), make(big.parameters())
    run(opt, net, parts(x, y, (8, 8, 8)), bad=[bad], value=value)
    assert not opt.updated
    assert not opt.last_window.applied and opt.last_window.nonfinite == 1 and opt.last_window.micro_batches == 3
    assert_same_parameters(net, big, 0)
    run(opt, net, parts(x, y, (8, 8, 8)))
    assert opt.updated and opt.last_window.applied and opt.last_window.nonfinite == 0
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-6)


def test_fp16_sums_that_a_fused_optimizer_scales_are_not_read_again_and_a_skip_leaves_nothing_in_it(monkeypatch):
    p, q = (nn.Parameter(torch.ones(8, dtype=torch.float16)) for _ in range(2))
    inner, plain = (torch.optim.Adam([x], lr=0.25, fused=True) for x in (p, q))
    opt = fa.AccumulatingOptimizer(inner, 1, buffer_dtype=None, nonfinite="skip_window")
    monkeypatch.setattr(fa.ops, "stats", lambda *_, **__: pytest.fail("read what the adds have measured"))
    for factor in (1.0, float("inf")):
        (p * factor).sum().backward()
        opt.step()
    assert not opt.updated
    del opt
    p.grad = torch.ones_like(p)
    inner.step()
    for _ in range(2):
        q.grad = torch.ones_like(q)
        plain.step()
    assert torch.equal(p, q)


def test_skip_window_sees_a_sum_that_overflows():
    p = nn.Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, nonfinite="skip_window")
    for _ in range(2):
        (p * 3e38).sum().backward()
        opt.step()
    assert not opt.updated and not opt.last_window.applied


@pytest.mark.parametrize("accum_steps", [None, 2])
def test_raises_also_over_a_checkpoint_between_backward_and_step(accum_steps):
    net, (x, y) = model(), data()
    opt = wrapped(net, accum_steps, nonfinite="raise")
    opt.backward(mean_loss(net, x * float("nan"), y))
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(FloatingPointError, match="the micro-batch was dropped"):
        opt.step()
    assert opt.progress["window"] == 0


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("bad", [[0], [2], [4], [0, 1, 3]], ids=str)
def test_dropped_micro_batch_leaves_no_trace(policy, value, bad):
    """Counts, weights and, bit for bit, parameters are those of a run without that micro-batch."""
    x, y = data(30)
    batches = parts(x, y, (4, 8, 2, 6, 10))
    good = [batch for i, batch in enumerate(batches) if i not in bad]
    net, clean = model(), model()
    opt, ref = (wrapped(n, len(good), nonfinite=policy) for n in (net, clean))
    run(opt, net, batches, bad=bad, value=value, raises=bad if policy == "raise" else ())
    run(ref, clean, good)
    assert ref.updated and opt.last_window.weight == ref.last_window.weight
    assert opt.last_window.micro_batches == ref.last_window.micro_batches == len(good)
    last_good = max(set(range(5)) - set(bad))
    assert opt.last_window.nonfinite == sum(i < last_good for i in bad)  # later ones belong to the next window
    assert_same_parameters(net, clean, 0)


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
def test_dropped_first_micro_batch_leaves_p_grad_none(policy):
    """A parameter only the bad micro-batch reached has no gradient: it does not decay or move."""
    net, (x, y) = model(), data()
    opt = wrapped(net, 2, nonfinite=policy)
    run(opt, net, [(x, y)], bad=[0], raises=[0] if policy == "raise" else ())
    assert grads(net) == [None] * 6
    assert not opt.updated


def test_a_micro_batch_without_gradients_counts_after_step_has_raised():
    p = nn.Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, nonfinite="raise")
    (p * torch.nan).sum().backward()
    with pytest.raises(FloatingPointError):
        opt.step()
    opt.step()
    p.sum().backward()
    opt.step()
    assert (p == -0.5).all()


def test_bad_gradient_is_shown_until_step():
    """So a GradScaler, or any code that checks p.grad, sees it."""
    net, (x, y) = model(), data()
    opt = wrapped(net, 3, nonfinite="skip_micro_batch")
    run(opt, net, [(x, y)])
    held = grads(net)
    opt.backward(mean_loss(net, x * float("nan"), y), weight=len(x))
    shown = [p.grad for p in net.parameters() if p.grad is not None]
    assert len(shown) == 1 and not shown[0].isfinite().all()
    opt.step()
    for p, g in zip(net.parameters(), held, strict=True):
        assert torch.equal(p.grad, g)


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
def test_caller_owned_windows_drop_single_passes(policy):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, nonfinite=policy), sgd(big.parameters())
    first, second = parts(x, y, (12, 12))
    mean_loss(net, *first).backward()
    mean_loss(net, x * float("nan"), y).backward()
    mean_loss(net, *second).backward()
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            opt.step()
    opt.step()
    assert opt.updated and opt.last_window.micro_batches == 2 and opt.last_window.nonfinite == 1
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_zero_grad_says_nothing_of_a_pass_that_was_dropped_already():
    net, (x, y) = model(), data()
    opt = wrapped(net, 4, nonfinite="skip_micro_batch")
    mean_loss(net, x * float("nan"), y).backward()
    opt.zero_grad()  # warnings are errors
    opt.step()
    assert opt.progress["micro_batch"] == "0/4"


def test_flush_tells_of_a_dropped_pass_as_step_does():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, nonfinite="raise"), sgd(big.parameters())
    mean_loss(net, x * float("nan"), y).backward()
    with pytest.raises(FloatingPointError, match="the micro-batch was dropped"):
        opt.flush()
    mean_loss(net, x, y).backward()
    opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_zeros_in_p_grad_do_not_make_a_dropped_micro_batch_count(reduction, policy):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, reduction=reduction, nonfinite=policy), sgd(big.parameters())
    for n, spoilt in ((1, 1.0), (0, float("nan"))):
        opt.zero_grad(set_to_none=False)
        opt.backward(sum_loss(net, x * spoilt, y), weight=1)
        with pytest.raises(FloatingPointError) if spoilt != 1 and policy == "raise" else nullcontext():
            opt.step()
            assert opt.last_window.micro_batches == n
    big_batch_step(big, plain, x, y, sum_loss)
    if policy == "raise":  # and the window goes on
        opt.backward(sum_loss(net, x, y), weight=1)
        opt.step()
        assert opt.last_window.micro_batches == 1 and opt.last_window.nonfinite == 1
        big_batch_step(big, plain, x, y, sum_loss)
    else:  # zeros are a gradient
        plain.zero_grad(set_to_none=False)
        plain.step()
    assert_same_parameters(net, big, 1e-12)


def test_a_step_without_a_backward_counts_after_a_flush_that_found_only_a_dropped_micro_batch():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2, nonfinite="skip_micro_batch")
    opt.backward(mean_loss(net, x * float("nan"), y))
    opt.flush()
    opt.step()
    assert opt.progress["micro_batch"] == "1/2"


def test_grouped_passes_are_dropped_together():
    net, (x, y) = model(), data()
    clean = model()
    opt, ref = wrapped(net, 2, nonfinite="skip_micro_batch"), wrapped(clean, 2)
    for i, (xs, ys) in enumerate(parts(x, y, (4, 8, 12))):
        with opt.micro_batch(weight=len(xs)):
            mean_loss(net, xs, ys).backward()
            mean_loss(net, xs * (float("nan") if i == 1 else 1), ys).backward()
        opt.step()
        if i != 1:
            with ref.micro_batch(weight=len(xs)):
                mean_loss(clean, xs, ys).backward()
                mean_loss(clean, xs, ys).backward()
            ref.step()
    assert opt.updated and opt.last_window.micro_batches == 2
    assert_same_parameters(net, clean, 0)


def test_ungrouped_second_pass_is_refused_because_it_could_not_be_skipped_without_a_trace():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2, nonfinite="skip_micro_batch")
    mean_loss(net, x, y).backward()
    held = grads(net)
    with pytest.raises(RuntimeError, match=r"opt\.micro_batch\(\)"):
        mean_loss(net, x, y).backward()
    for p, g in zip(net.parameters(), held, strict=True):
        assert torch.equal(p.grad, g)
    opt.step()


@pytest.mark.parametrize("bad", range(3))
@limits(bucket=1)
def test_every_bucket_of_a_pass_is_looked_at(bad):
    params = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), 2, nonfinite="skip_window")
    for factors in ([1.0] * 3, [float("inf") if k == bad else 1.0 for k in range(3)]):
        sum((p * factor).sum() for p, factor in zip(params, factors, strict=True)).backward()
        opt.step()
    assert not opt.updated and int(opt.last_window.nonfinite) == 1
    assert not any(p.any() for p in params)


@limits(bucket=64)
def test_skip_micro_batch_holds_more_than_a_bucket():
    test_dropped_micro_batch_leaves_no_trace("skip_micro_batch", float("nan"), [2])


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["in the first micro-batch", "later"])
def test_a_scaler_finds_overflows_wherever_gradients_are_held(first, reentrant, policy):
    """With everything in re-entrant checkpoints nothing signals the end of a pass.

    The scaler used to look at the sums before it.
    """
    net, (x, _) = model(torch.float32), data(dtype=torch.float32)
    opt = wrapped(net, 8, nonfinite=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    expected = 64.0
    for i in range(4):
        loss = scaler.scale(checkpoint(net, x.requires_grad_(), use_reentrant=reentrant).mean())
        bad = first or i > 0
        (loss * (float("inf") if bad else 1)).backward()
        with pytest.raises(FloatingPointError) if bad and policy == "raise" else nullcontext():
            scaler.step(opt)
        scaler.update()
        expected *= 0.5 if bad else 1.0
        assert scaler.get_scale() == expected
    assert opt.progress["micro_batch"] == ("0/8" if first else "1/8")


@pytest.mark.parametrize("policy", ["propagate", "skip_micro_batch"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_clipping_by_hand_after_normalize_sees_held_gradients(reentrant, policy):
    net, (x, _) = model(), data()
    opt = wrapped(net, nonfinite=policy, make=lambda ps: torch.optim.SGD(ps, lr=1.0))
    before = [p.detach().clone() for p in net.parameters()]
    for part in x.requires_grad_().split(12):
        (100 * checkpoint(net, part, use_reentrant=reentrant).square().mean()).backward()
    opt.normalize_()
    assert nn.utils.clip_grad_norm_(net.parameters(), 0.5) > 0.5
    opt.step()
    moved = torch.stack([(p - q).square().sum() for p, q in zip(net.parameters(), before, strict=True)]).sum().sqrt()
    assert moved.item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise", "skip_window"])
def test_a_micro_batch_of_weight_0_is_no_bad_one_whatever_it_holds(policy):
    p = torch.nn.Parameter(torch.ones(()))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1), 2, nonfinite=policy)
    opt.backward(p * math.nan, weight=0)
    opt.step()
    opt.backward(2 * p, weight=1)
    opt.step()
    assert p.item() == pytest.approx(0.8) and opt.last_window.micro_batches == 2 and opt.last_window.nonfinite == 0


def test_clipping_by_hand_after_a_rejected_micro_batch_does_not_reach_the_sums():
    p, q = zeros(), zeros()
    opt = wrapper_of([p, q], nonfinite="skip_micro_batch")
    (p + q).sum().backward()
    (p * math.nan + q).sum().backward()
    torch.nn.utils.clip_grad_norm_([p, q], 10.0)
    opt.step()
    assert p.item() == q.item() == -1


@pytest.mark.parametrize("look", ["state_dict", "deepcopy", "normalize_"])
def test_looking_at_a_rejected_micro_batch_leaves_no_trace(look):
    p, q = zeros(), zeros()
    opt = wrapper_of([p, q], 2, nonfinite="skip_micro_batch")
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
    opt, scaler = wrapper_of([p], nonfinite="skip_micro_batch"), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum() * math.inf).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2 and not opt.updated


def test_fp16_gradient_that_overflows_only_in_the_final_cast_is_skipped():
    p = zeros(2, torch.float16)
    opt = wrapper_of([p], 2, reduction="none", nonfinite="skip_window")
    for _ in range(2):
        (p * 40000.0).sum().backward()
        opt.step()
    assert not opt.updated and p.tolist() == [0, 0]


def test_dropped_first_micro_batch_is_reported_although_zero_grad_follows():
    p = zeros()
    opt = wrapper_of([p], 2, nonfinite="skip_micro_batch")
    for value in (math.nan, 1.0, 1.0):
        (p * value).sum().backward()
        opt.step()
        opt.zero_grad()
    assert opt.last_window.nonfinite == 1 and opt.last_window.micro_batches == 2


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
def test_ctrl_c_before_a_rejected_gradient_is_shown_leaves_the_next_micro_batch_alone(policy, monkeypatch):
    p = zeros(2, torch.float64)
    opt = fa.AccumulatingOptimizer(sgd([p]), 2, nonfinite=policy)

    def interrupted(then):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(opt._accumulation.ranks, "pass_ends", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opt.backward((p * math.nan).sum())
    opt.backward((3 * p).sum())
    assert (p.grad == 3).all()
    opt.step()
    assert opt.progress == {"window": 0, "micro_batch": "1/2"}


@pytest.mark.parametrize("in_place", [False, True], ids=["", "added by its layer"])
def test_a_backward_that_reaches_no_parameter_does_not_end_a_micro_batch_that_was_judged(in_place):
    """As opt.step() does: what follows is of the same micro-batch, and judged by itself."""
    p, other = zeros((1, 2), torch.float64), zeros(2, torch.float64)
    x = torch.ones(1, 2, dtype=torch.float64)
    opt = fa.AccumulatingOptimizer(sgd([p]), 3, nonfinite="skip_micro_batch")
    opt.backward(AddsToGrad.apply(x, p).sum())  # returns the first gradient of a window
    opt.step()
    for factor in (1, 2):
        opt.backward(AddsToGrad.apply(factor * x, p).sum() if in_place else (factor * p).sum())
        opt.backward(other.sum())
    opt.step()
    assert (p.grad == 4).all() and opt.progress["micro_batch"] == "2/3"
