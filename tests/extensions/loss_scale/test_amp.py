"""A plain GradScaler loop works unchanged, with scale changes and overflows inside a window."""

import math

import fusedaccum as fa
import pytest
import torch
from torch import nn
from training import (
    assert_same_parameters,
    big_batch_step,
    data,
    mean_loss,
    model,
    parts,
    sgd,
    twin,
    wrapped,
    wrapper_of,
    zeros,
)


def scaler_loop(opt, net, scaler, batches, overflow=(), clip=None, steps=None, normalize_first=False):
    """scale, backward, step, update on every micro-batch."""
    for i, (xs, ys) in enumerate(batches):
        loss = mean_loss(net, xs, ys)
        scaled = scaler.scale(loss)
        if i in overflow:
            scaled = scaled * float("inf")
        opt.backward(scaled, weight=len(xs))
        if clip is not None and (i + 1) % steps == 0:
            if normalize_first:
                opt.normalize_()
            scaler.unscale_(opt)
            if not normalize_first:
                opt.normalize_()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(opt)
        scaler.update()


def adam(fused):
    return lambda ps: torch.optim.Adam(ps, lr=1e-2, eps=1e-3, fused=fused)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("interval", [1, 2, 3, 1000], ids=lambda n: f"grows every {n}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["f32", "f64"])
def test_window_equals_big_batch_whatever_the_scale_does(dtype, tolerance, interval, fused):
    net, (x, y) = model(dtype), data(dtype=dtype)
    big = twin(net)
    opt, plain = wrapped(net, 4, make=adam(fused)), adam(False)(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    for _ in range(3):
        scaler_loop(opt, net, scaler, parts(x, y, (1, 11, 4, 8)))
        assert opt.updated
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, tolerance)
    if interval < 12:
        assert scaler.get_scale() > 1024


@pytest.mark.parametrize("normalize_first", [False, True], ids=["unscale-first", "normalize-first"])
@pytest.mark.parametrize("interval", [1, 2, 1000], ids=lambda n: f"grows every {n}")
@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_unscale_and_clip_by_hand_at_the_boundary(interval, normalize_first, clip):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    for _ in range(3):
        scaler_loop(opt, net, scaler, parts(x, y, (4, 8, 12)), clip=clip, steps=3, normalize_first=normalize_first)
        plain.zero_grad()
        mean_loss(big, x, y).backward()
        nn.utils.clip_grad_norm_(big.parameters(), clip)
        plain.step()
    assert_same_parameters(net, big, 2e-6)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_one_overflow_skips_the_window_and_backs_off_once(bad, fused):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 4, make=adam(fused)), adam(False)(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    batches = parts(x, y, (1, 11, 4, 8))
    for window in range(4):
        scaler_loop(opt, net, scaler, batches, overflow=[bad] if window == 1 else [])
        if window == 1:
            assert not opt.updated and not opt.last_window.applied
            assert opt.last_window.nonfinite == 1 and opt.last_window.micro_batches == 4
            assert scaler.get_scale() == 512
        else:
            assert opt.updated and opt.last_window.applied
            big_batch_step(big, plain, x, y)
        assert_same_parameters(net, big, 2e-6)
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("measured", [{"max_grad_norm": 1.0}, {"noise_scale": 0.5}], ids=str)
@pytest.mark.parametrize("accum_steps", [None, 2])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_that_a_norm_has_met_is_one(bad, accum_steps, measured):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    opt = wrapped(net, accum_steps, **measured)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i, (a, b) in enumerate(parts(x, y, (12, 12))):
        scaler.scale(mean_loss(net, a * (float("inf") if i == bad else 1), b)).backward()
        if accum_steps or i == 1:
            scaler.step(opt)
            scaler.update()
    assert not opt.updated and opt.last_window.nonfinite == 1


@pytest.mark.parametrize("bad", [0, 1])
def test_a_window_with_an_overflow_has_no_finite_norm(bad):
    """Also where what came before it, or after it, was finite: the sums are not the window's."""
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    opt, scaler = wrapped(net, 2, max_grad_norm=1.0), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler_loop(opt, net, scaler, parts(x, y, (12, 12)), overflow=(bad,))
    assert not opt.updated and not opt.last_window.grad_norm.isfinite()
    scaler_loop(opt, net, scaler, parts(x, y, (12, 12)))
    assert opt.updated and opt.last_window.grad_norm.isfinite()


@pytest.mark.parametrize("bad", [0, 2])
def test_overflow_in_the_very_first_window(bad):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 4), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler_loop(opt, net, scaler, parts(x, y, (1, 11, 4, 8)), overflow=[bad])
    assert not opt.updated
    scaler_loop(opt, net, scaler, parts(x, y, (1, 11, 4, 8)))
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-6)


@pytest.mark.parametrize("policy", ["skip_micro_batch", "raise"])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_dropping_one_micro_batch_wins_and_the_scale_still_backs_off(bad, policy):
    net, (x, y) = model(torch.float32), data(30, dtype=torch.float32)
    clean = twin(net)
    batches = parts(x, y, (4, 8, 2, 6, 10))
    opt = wrapped(net, 4, nonfinite=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    if policy == "raise":
        scaler_loop(opt, net, scaler, batches[:bad])
        with pytest.raises(FloatingPointError):
            scaler_loop(opt, net, scaler, batches[bad : bad + 1], overflow=[0])
        scaler.update()
        scaler_loop(opt, net, scaler, batches[bad + 1 :])
    else:
        scaler_loop(opt, net, scaler, batches, overflow=[bad])
    good = [batch for i, batch in enumerate(batches) if i != bad]
    assert opt.last_window.micro_batches == 4 and opt.last_window.applied
    big_batch_step(clean, sgd(clean.parameters()), *(torch.cat(parts) for parts in zip(*good, strict=True)))
    assert_same_parameters(net, clean, 1e-6)
    assert scaler.get_scale() == 512


def test_flush_knows_the_loss_scale():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 8), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scaler_loop(opt, net, scaler, parts(x, y, (1, 11, 4, 8)))
    opt.flush()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-6)


def test_max_grad_norm_is_of_the_unscaled_window():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 3, max_grad_norm=0.05), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for _ in range(2):
        scaler_loop(opt, net, scaler, parts(x, y, (4, 8, 12)))
        plain.zero_grad()
        mean_loss(big, x, y).backward()
        norm = nn.utils.clip_grad_norm_(big.parameters(), 0.05)
        plain.step()
        torch.testing.assert_close(opt.last_window.grad_norm.float(), norm, rtol=1e-5, atol=0)
    assert_same_parameters(net, big, 2e-6)


def test_disabled_scaler_and_a_loop_that_drops_its_scaler():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    for scaler in (
        torch.amp.GradScaler("cpu", enabled=False),
        torch.amp.GradScaler("cpu", init_scale=64.0),
        torch.amp.GradScaler("cpu", enabled=False),
        torch.amp.GradScaler("cpu", init_scale=16.0),
    ):
        scaler_loop(opt, net, scaler, parts(x, y, (4, 8, 12)))
        big_batch_step(big, plain, x, y)
        assert_same_parameters(net, big, 1e-6)


def test_caller_owned_window_with_a_scaler():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for _ in range(3):
        for xs, ys in parts(x, y, (8, 8, 8)):
            scaler.scale(mean_loss(net, xs, ys)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-6)


@pytest.mark.parametrize("unscale", [False, True], ids=["plain", "unscaled"])
@pytest.mark.parametrize("known", [False, True], ids=["first-window", "later"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_caller_owned_window_that_drops_a_micro_batch_has_its_scale_taken_off_once(bad, known, unscale):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big, batches = twin(net), parts(x, y, (8, 8, 8))
    opt, plain = wrapped(net, nonfinite="skip_micro_batch"), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def window(bad, unscale):
        for i, (xs, ys) in enumerate(batches):
            (scaler.scale(mean_loss(net, xs, ys)) * (float("inf") if i == bad else 1)).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if opt.updated:
            good = [batch for i, batch in enumerate(batches) if i != bad]
            big_batch_step(big, plain, *(torch.cat(parts) for parts in zip(*good, strict=True)))

    if known:
        window(None, False)
    window(bad, unscale)
    # unscale_() saw only the bad gradient, and the scale of the others is not known yet.
    assert opt.updated == (known or not unscale or bad < 2)
    assert opt.last_window.nonfinite == 1
    window(None, False)
    assert opt.updated
    assert_same_parameters(net, big, 2e-6)


@pytest.mark.parametrize("normalize_first", [False, True], ids=["unscale-first", "normalize-first"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_caller_owned_window_that_drops_a_micro_batch_and_is_normalized_by_hand(bad, normalize_first):
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), nonfinite="skip_micro_batch")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    for i in range(3):
        scaler.scale((p * (float("nan") if i == bad else 1.0)).sum()).backward()
    calls = [lambda: scaler.unscale_(opt), opt.normalize_]
    for call in reversed(calls) if normalize_first else calls:
        call()
    scaler.step(opt)
    assert opt.updated and (p == -2).all()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("settings", [{}, {"accum_steps": 1}], ids=str)
def test_an_overflow_of_gradients_that_were_put_into_p_grad_by_hand_is_heeded(settings, unscale):
    p, q = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    wrapper = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), **settings)
    for param, opt in ((p, wrapper), (q, torch.optim.SGD([q], lr=1.0))):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (2.0, float("inf"), 3.0):
            (param.grad,) = torch.autograd.grad(scaler.scale((param * factor).sum()), param)
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert torch.equal(p, q) and (q == -5).all()


def test_an_overflow_of_the_sums_is_heeded_in_a_window_that_has_dropped_a_micro_batch():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), nonfinite="skip_micro_batch")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for factor in (float("nan"), 3e38, 3e38):  # the last two are finite, and their sum is not
        scaler.scale((p * factor).sum()).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    assert not opt.updated and not p.any() and opt.last_window.nonfinite == 2


@pytest.mark.parametrize("then", ["set by hand", "loaded"])
def test_an_overflow_is_not_taken_for_that_of_a_micro_batch_that_was_dropped_before(then):
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, nonfinite="skip_micro_batch")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def backward(factor):
        scaler.scale((p * factor).sum()).backward()

    if then == "loaded":
        backward(3e38)
        scaler.step(opt)
        scaler.update()
        backward(3e38)
        saved = opt.state_dict()
        opt.reset()
        backward(float("nan"))
        opt.load_state_dict(saved)
    else:
        backward(float("nan"))
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        p.grad = torch.full((4,), float("inf"))
    scaler.unscale_(opt)
    scaler.step(opt)
    opt.flush()
    assert not opt.updated and not p.any()


def test_a_look_at_the_state_brings_the_sums_back_from_behind_a_dropped_micro_batch():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, nonfinite="skip_micro_batch")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, 1.0, 1.0, float("nan"), 1.0):
        scaler.scale((p * factor).sum()).backward()
        if factor != 1:
            opt.state_dict()
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert opt.updated and (p == -2).all()


@pytest.mark.parametrize("seen", [False, True], ids=["never seen", "seen before a checkpoint"])
def test_unscale_that_would_hide_the_scale_is_refused(seen):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    opt = wrapped(net, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if seen:
        scaler_loop(opt, net, scaler, parts(x, y, (12, 12)))
        opt.load_state_dict(opt.state_dict())
    scaler.scale(mean_loss(net, x, y)).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    with pytest.raises(RuntimeError, match="hid the loss scale"):
        scaler.scale(mean_loss(net, x, y)).backward()


def test_unscale_on_every_micro_batch_once_the_scale_is_known():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for window in range(3):
        for xs, ys in parts(x, y, (8, 8, 8)):
            scaler.scale(mean_loss(net, xs, ys)).backward()
            if window > 0:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-6)


def test_an_overflow_is_counted_once_where_the_adds_have_counted_it():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, nonfinite="skip_window")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for factor in (1.0, float("inf")):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert opt.last_window.nonfinite == 1


def test_a_refused_step_is_no_scalers_step_any_more():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(p.sum()).backward()
    with pytest.raises(ValueError, match="comes too late"):
        scaler.step(opt, weight=2)
    opt.reset()
    p.sum().backward()
    opt.step()
    assert (p == -1).all()


@pytest.mark.parametrize("accum_steps", [None, 1, 2])
def test_a_loop_that_has_done_with_its_scaler(accum_steps):
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), accum_steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for window in range(4):
        for _ in range(accum_steps or 1):
            (scaler.scale(p.sum()) if window < 2 else p.sum()).backward()
            if window < 2:
                scaler.step(opt)
                scaler.update()
            elif window == 2 and accum_steps is None:  # going on without the scaler might be a mistake
                with pytest.raises(RuntimeError, match=r"call opt.reset\(\) first to go on without it"):
                    opt.step()
                opt.reset()
                p.sum().backward()
                opt.step()
            else:
                opt.step()
        assert (p == -1 - window).all()


def test_a_micro_batch_without_gradients_after_the_scalers_last_was_dropped():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, nonfinite="skip_micro_batch")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for value in (1.0, 1.0, torch.inf):
        scaler.scale((p * value).sum()).backward()
        scaler.step(opt)
        scaler.update()
    opt.step()
    p.sum().backward()
    opt.step()
    assert (p == -1.5).all()


@pytest.mark.parametrize("accum_steps", [None, 2])
def test_a_scalers_step_without_a_window_steps_nothing(accum_steps):
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), accum_steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for backward in (*[True] * (accum_steps or 1), False):
        if backward:
            opt.backward(scaler.scale(p.sum()))
        scaler.step(opt)
        scaler.update()
    assert (p == -1).all() and not opt.updated


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("accum_steps", [None, 1, 3])
def test_another_scaler_takes_over_between_windows(accum_steps, resumed):
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), accum_steps)
    one, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (1024.0, 65536.0))
    for window, scaler in enumerate((one, other, other)):
        if window == 1 and resumed:  # by a script that does not save its scaler
            state = opt.state_dict()
            del opt
            p.grad = None
            opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), accum_steps)
            opt.load_state_dict(state)
        for _ in range(accum_steps or 1):
            opt.backward(scaler.scale(p.sum()))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert torch.equal(p, torch.full_like(p, -1.0 - window))
        assert (opt.last_window.loss is None) == (window == 1)  # which was divided by the other scale


def test_another_scaler_within_a_window_is_refused():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    for init_scale in (1024.0, 1024.0, 1024.0, 4096.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        scaler.scale(p.sum()).backward()
        if init_scale == 4096.0:
            with pytest.raises(
                RuntimeError, match="scale 4096, but the window began under another one, whose scale is 1024"
            ):
                scaler.step(opt)
        else:
            scaler.step(opt)
            scaler.update()
    assert torch.equal(p, torch.full_like(p, -1.0))
    opt.reset()
    for _ in range(2):
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        scaler.scale(p.sum()).backward()
        scaler.step(opt)
    assert torch.equal(p, torch.full_like(p, -2.0))


def test_another_scaler_takes_over_after_a_dropped_micro_batch():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, nonfinite="skip_micro_batch")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, math.inf):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 512.0
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(p.sum()).backward()
    opt.record_loss(3.0)
    scaler.step(opt)
    assert torch.equal(p, torch.full_like(p, -2.0))
    assert float(opt.last_window.loss) == 3.0  # which carries no scale


def test_a_scaler_that_begins_within_a_window_is_refused():
    p = nn.Parameter(torch.zeros(4))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    p.sum().backward()
    opt.step()
    scaler.scale(p.sum()).backward()
    with pytest.raises(RuntimeError, match="in a window that began with opt"):
        scaler.step(opt)
    scaler.update()
    opt.reset()
    for _ in range(2):
        scaler.scale(p.sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert torch.equal(p, torch.full_like(p, -1.0))


def test_norm_taken_before_unscale_is_not_believed():
    p = zeros()
    opt, scaler = wrapper_of([p], max_grad_norm=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum() * 0.5).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    assert p.item() == -0.5 and opt.last_window.grad_norm == 0.5


def test_unscale_of_a_rejected_micro_batch_leaves_the_sums_alone():
    p, q = zeros(), zeros()
    opt, scaler = wrapper_of([p, q], 2, nonfinite="skip_micro_batch"), torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True, False):
        scaler.scale((p * (math.inf if bad else 2.0) + q * 2.0).sum()).backward()
        if bad:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    assert p.item() == q.item() == -2


def test_plain_step_in_a_window_that_a_scaler_began_is_refused():
    p = zeros()
    opt, scaler = wrapper_of([p], 2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(p.sum()).backward()
    scaler.step(opt)
    scaler.update()
    p.sum().backward()
    with pytest.raises(RuntimeError, match="through the scaler"):
        opt.step()
