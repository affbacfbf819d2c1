"""last_window.noise_scale by the paper's formulas and per-sample gradients; a schedule by it."""

import copy
import math

import fusedaccum as fa
import pytest
import torch
from fusedaccum import schedules
from fusedaccum.extensions.noise_scale import NoiseScale
from torch import nn
from training import closed


def wrapped(parameters, lr=0.0, **settings):
    return fa.AccumulatingOptimizer(torch.optim.SGD(parameters, lr=lr), **{"noise_scale": 0.9, **settings})


def windows(sizes, dtype=torch.float64):
    """Micro-batches of these sizes, for linear regression with much noise."""
    return [[(torch.randn(n, 6).to(dtype), torch.randn(n, 1).to(dtype)) for n in window] for window in sizes]


def sq_norm(model, x, y):
    grads = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
    return sum(g.double().square().sum() for g in grads).item()


def of_paper(model, data, decay):
    """The paper's appendix A.1 as printed, averaged window by window."""
    sq_gradient = trace = 0.0
    for window in data:
        small, large = window[0], [torch.cat(parts) for parts in zip(*window)]
        b, n = len(small[0]), len(large[0])
        if b == n:
            continue
        of_small, of_large = sq_norm(model, *small), sq_norm(model, *large)
        sq_gradient = decay * sq_gradient + (1 - decay) * (n * of_large - b * of_small) / (n - b)
        trace = decay * trace + (1 - decay) * (of_small - of_large) / (1 / b - 1 / n)
    return trace / sq_gradient if sq_gradient > 0 else math.inf


def telling(sizes, dtype=torch.float64, decay=0.9):
    """A model and windows of these sizes, with both averages positive, so nothing is clamped."""
    while True:
        model, data = nn.Linear(6, 1).to(dtype), windows(sizes, dtype)
        with torch.no_grad():
            model.weight.fill_(0.7)
        if all(0 < of_paper(model, data[: i + 1], decay) < math.inf for i in range(len(data))):
            return model, data


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float64, {}),
        (torch.float32, {}),
        (torch.float64, {"max_grad_norm": 0.1}),
        (torch.float64, {"nonfinite": "skip_micro_batch"}),
        (torch.float64, {"nonfinite": "skip_window"}),
        (torch.float64, {"reduction": "sum"}),
        (torch.float64, {"backend": "reference"}),
    ],
    ids=str,
)
def test_noise_scale_is_the_papers(dtype, settings):
    model, data = telling([(9, 20, 5), (16, 8), (7,), (20, 9, 1, 30)], dtype)
    opt = wrapped(model.parameters(), **settings)
    total = settings.get("reduction") == "sum"
    loss_of = nn.MSELoss(reduction="sum" if total else "mean")
    for i, window in enumerate(data):
        for x, y in window:
            opt.backward(loss_of(model(x), y), weight=len(x))
        opt.step()
        expected = of_paper(model, data[: i + 1], 0.9)
        assert opt.last_window.noise_scale.item() == pytest.approx(
            expected, rel=1e-9 if dtype == torch.float64 else 1e-4
        )


def test_weights_that_come_with_step():
    model, data = telling([(9, 20, 5), (16, 8, 2)])
    opt = wrapped(model.parameters(), reduction="sum", accum_steps=3)
    for window in data:
        for x, y in window:
            nn.functional.mse_loss(model(x), y, reduction="sum").backward()
            opt.step(weight=len(x))
    assert opt.last_window.noise_scale.item() == pytest.approx(of_paper(model, data, 0.9), rel=1e-9)


@pytest.mark.parametrize("settings", [{"accum_steps": 3}, {"accum_steps": 3, "reduction": "none"}, {}], ids=str)
def test_without_weights_the_unit_is_the_micro_batch(settings):
    model, data = telling([(4, 4, 4)] * 4)
    opt = wrapped(model.parameters(), **settings)
    for window in data:
        for i, (x, y) in enumerate(window):
            nn.functional.mse_loss(model(x), y).backward()
            if "accum_steps" in settings or i == 2:
                opt.step()
    assert opt.last_window.noise_scale.item() == pytest.approx(of_paper(model, data, 0.9) / 4, rel=1e-9)


@pytest.mark.slow
def test_within_ten_percent_of_per_sample_gradients(threads):
    """The oracle is tr(Sigma) / |G|^2 of a CNN with fixed weights, by single samples' gradients."""
    pytest.importorskip("sklearn")
    from demo.data import digits
    from demo.models import DigitsCNN

    threads(1)  # layers this small gain nothing from a second thread, and lose much if other processes use it
    images, labels = digits()
    model = DigitsCNN(width=8)
    loss_of = nn.functional.cross_entropy

    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(parameters, x, y):
        return loss_of(torch.func.functional_call(model, parameters, x[None]), y[None])

    each = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0), chunk_size=300)(parameters, images, labels)
    mean = sum(g.double().mean(0).square().sum() for g in each.values())
    trace = sum(g.double().var(0, correction=0).sum() for g in each.values())

    opt = wrapped(model.parameters(), noise_scale=0.999)
    for _ in range(400):  # leaves an error of about 4%
        for picked in torch.randint(len(images), (256,)).split([16, 240]):
            opt.backward(loss_of(model(images[picked]), labels[picked]), weight=len(picked))
        opt.step()
    assert opt.last_window.noise_scale.item() == pytest.approx((trace / mean).item(), rel=0.1)


def test_no_pass_over_the_buffers_of_its_own(monkeypatch):
    """The norms come with the adds: ops.stats, which would read the buffers, is never called."""
    opt = wrapped(nn.Linear(6, 1).parameters(), accum_steps=3)
    monkeypatch.setattr(fa.ops, "stats", None)
    (weight, bias) = opt.param_groups[0]["params"]
    for _ in range(6):
        (weight.sum() * torch.randn(()) + bias.sum()).backward()
        opt.step()
    assert opt.last_window.noise_scale is not None


def test_only_the_first_and_the_last_micro_batch_are_measured(monkeypatch):
    """An add in between computes no norm, so it does not pay for one."""
    opt = wrapped(nn.Linear(6, 1, bias=False).parameters(), accum_steps=4)
    plain, measured = fa.ops.accumulate_, []
    monkeypatch.setattr(
        fa.ops, "accumulate_", lambda *args, **how: measured.append(how["stats"] is not None) or plain(*args, **how)
    )
    (weight,) = opt.param_groups[0]["params"]
    for _ in range(8):
        weight.sum().backward()
        opt.step()
    assert measured == [True, False, False, True] * 2


def test_dropped_micro_batches_and_windows_leave_no_trace():
    model, (window,) = telling([(4, 4, 4)])
    opt = wrapped(model.parameters(), nonfinite="skip_micro_batch")
    for x, y in [(torch.full((4, 6), math.nan).double(), window[0][1]), *window]:
        opt.backward(nn.functional.mse_loss(model(x), y), weight=4)
    opt.step()
    known = opt.last_window.noise_scale.item()
    assert known == pytest.approx(of_paper(model, [window], 0.9), rel=1e-9)

    del opt
    model.zero_grad()
    opt = wrapped(model.parameters())
    for bad in (False, True):
        for x, y in window:
            opt.backward(nn.functional.mse_loss(model(x), y) * (math.inf if bad else 1), weight=4)
        opt.step()
        assert opt.last_window.noise_scale.item() == pytest.approx(known, rel=1e-9)


def test_one_micro_batch_a_window_tells_nothing():
    model = nn.Linear(6, 1)
    opt = wrapped(model.parameters(), accum_steps=1)
    model(torch.randn(4, 6)).sum().backward()
    opt.step()
    assert opt.last_window.noise_scale is None
    del opt
    model.zero_grad()
    opt = wrapped(model.parameters(), noise_scale=None)
    model(torch.randn(4, 6)).sum().backward()
    opt.step()
    assert opt.last_window.noise_scale is None


@pytest.mark.parametrize("accum_steps", [None, 2])
def test_grad_scaler(accum_steps):
    """The loss scale does not matter, even if it changes inside a window.

    A caller-owned first window learns it too late, and is left out.
    """
    model, data = telling([(4, 4)] * 5, torch.float32)
    opt = wrapped(model.parameters(), accum_steps=accum_steps, reduction="none")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for window in data:
        for i, (x, y) in enumerate(window):
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            if accum_steps or i == 1:
                scaler.step(opt)
                scaler.update()
        opt.zero_grad()
    expected = of_paper(model, data if accum_steps else data[1:], 0.9) / 4
    assert opt.last_window.noise_scale.item() == pytest.approx(expected, rel=1e-4)


def test_an_overflow_leaves_no_trace():
    model, data = telling([(4, 4, 4)] * 2, torch.float32)
    opt = wrapped(model.parameters(), accum_steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    known = []
    for window, factor in zip(data, (1.0, math.inf)):
        for i, (x, y) in enumerate(window):
            scaler.scale(nn.functional.mse_loss(model(x), y) * (factor if i == 1 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
        known.append(opt.last_window.noise_scale.item())
    assert not opt.last_window.applied and known[1] == known[0] > 0


@pytest.mark.parametrize("way", ["normalize_", "unscale_"])
def test_a_window_clipped_by_hand_tells_nothing(way):
    """The norm after clipping does not belong with the norm of the first micro-batch."""
    model, data = telling([(4, 4, 4)] * 2, torch.float32)
    opt = wrapped(model.parameters(), accum_steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=way == "unscale_")
    known = []
    for clips, window in zip((False, True), data):
        for i, (x, y) in enumerate(window):
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            if clips and i == 2:
                scaler.unscale_(opt)
                opt.normalize_()
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(opt)
            scaler.update()
        known.append(opt.last_window.noise_scale.item())
    assert known[0] == known[1] > 0


@pytest.mark.filterwarnings("ignore:p.grad was written to")
@pytest.mark.parametrize("saved", [False, True], ids=["run through", "resumed"])
def test_gradients_zeroed_after_a_window_say_nothing_of_the_next(saved):
    """Gradients changed inside a window do, also across a checkpoint."""
    model, data = telling([(4, 4)] * 3)
    opt = wrapped(model.parameters(), accum_steps=2)
    known = []
    for window, inside in zip(data, (False, False, True), strict=True):
        for i, (x, y) in enumerate(window):
            opt.backward(nn.functional.mse_loss(model(x), y), weight=4)
            opt.step()
            if i == 1 or inside:
                for p in model.parameters():
                    p.grad.zero_()
            if saved:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        known.append(float(opt.last_window.noise_scale))
    assert known[:2] == pytest.approx([of_paper(model, data[: i + 1], 0.9) for i in range(2)])
    assert known[2] == known[1]


def test_gradients_changed_before_a_checkpoint_in_the_first_micro_batch_tell_nothing():
    model, (window,) = telling([(4, 4)])
    opt = wrapped(model.parameters(), accum_steps=2)
    for x, y in window:
        opt.backward(nn.functional.mse_loss(model(x), y), weight=4)
        if x is window[0][0]:
            model.weight.grad.zero_()
            opt.load_state_dict(opt.state_dict())
        opt.step()
    assert opt.last_window.noise_scale is None


def test_normalized_by_us_is_still_measured():
    model, (window,) = telling([(4, 4, 4)])
    opt = wrapped(model.parameters())
    for x, y in window:
        opt.backward(nn.functional.mse_loss(model(x), y), weight=4)
    opt.normalize_()
    opt.step()
    assert opt.last_window.noise_scale.item() == pytest.approx(of_paper(model, [window], 0.9), rel=1e-9)


def test_unscaled_before_anybody_knew_the_scale():
    model, data = telling([(4, 4)] * 3, torch.float32)
    opt = wrapped(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for window in data:
        for x, y in window:
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert opt.last_window.noise_scale is None


def test_a_checkpoint_goes_into_the_averages_that_a_graph_may_write_to():
    model, data = telling([(4, 4)] * 2)
    opt = wrapped(model.parameters(), accum_steps=2)
    for window in data:
        noise = opt._accumulation.extensions.of(NoiseScale)
        there = noise.averages
        state = opt.state_dict()
        for x, y in window:
            opt.backward(nn.functional.mse_loss(model(x), y))
            opt.step()
    opt.load_state_dict(state)
    assert noise.averages is there and torch.equal(there, state["fusedaccum"]["noise_scale"]["averages"])


def test_state_is_kept_inside_a_window():
    model, data = telling([(4, 4, 4)] * 3, torch.float32)

    def run(opt, micro_batches):
        for x, y in micro_batches:
            opt.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
            opt.step()

    def make():
        return wrapped(model.parameters(), accum_steps=schedules.noise_scale(3, at_most=3))

    micro_batches = [pair for window in data for pair in window]
    opt = make()
    run(opt, micro_batches[:4])
    state = copy.deepcopy(opt.state_dict())
    run(opt, micro_batches[4:])
    expected = opt.last_window
    opt.reset()
    opt = None
    opt = make()
    opt.load_state_dict(state)
    run(opt, micro_batches[4:])
    assert torch.equal(opt.last_window.noise_scale, expected.noise_scale)
    assert torch.equal(opt.last_window.loss, expected.loss)
    assert opt.settings.schedule.accum_steps.state_dict() == {"steps": 3, "seen": 3}


# -- what follows it -------------------------------------------------------------------------------


def test_schedule_makes_windows_as_large_as_the_noise_scale():
    torch.manual_seed(5)
    model = nn.Linear(6, 1)
    schedule = schedules.noise_scale(start=3, at_most=1000)
    opt = wrapped(model.parameters(), accum_steps=schedule, noise_scale=0.99)
    for _ in range(3000):  # draws of g = G + noise, with |G|^2 = 1 and tr(Sigma) = 40
        g = torch.eye(6)[0] + torch.randn(6) * (40 / 6 / 4) ** 0.5
        opt.backward((model.weight[0] * g).sum(), weight=4)
        opt.step()
    assert schedule.steps == schedule(0) == pytest.approx(40 / 4, rel=0.3)


def test_schedule_looks_every_so_often_and_keeps_its_bounds():
    schedule = schedules.noise_scale(start=4, at_most=20, every=3, growth=2.0)
    seen = []
    for _ in range(12):
        schedule.window_closed(closed(1e6), 1)
        seen.append(schedule.steps)
    assert seen == [4, 4, 8, 8, 8, 16, 16, 16, 20, 20, 20, 20]
    for value, steps in ((math.nan, 20), (80.0, 10), (0.0, 5), (0.0, 2), (0.0, 2), (math.inf, 4), (24.0, 3)):
        for _ in range(3):
            schedule.window_closed(closed(value), 1)
        assert schedule.steps == steps
    slow = schedules.noise_scale(start=2, at_most=4, every=1, growth=1.1)
    for steps in (3, 4, 4):
        slow.window_closed(closed(1e6), 1)
        assert slow.steps == steps
    fast = schedules.noise_scale(start=2, at_most=9, every=1, growth=math.inf)
    fast.window_closed(closed(math.inf), 1)
    assert fast.steps == 9
    over_ranks = schedules.noise_scale(start=4, at_most=20, every=1)
    over_ranks.window_closed(closed(64.0), 2)  # 8 samples per micro-batch, on each of two ranks
    assert over_ranks.steps == 4
    half = schedules.noise_scale(start=4, at_most=20, every=1, fraction=0.5)
    half.window_closed(closed(64.0), 1)
    assert half.steps == 4


def test_ramps():
    ramp = schedules.linear(2, 10, windows=4)
    assert [ramp(i) for i in range(7)] == [2, 4, 6, 8, 10, 10, 10]
    ramp = schedules.geometric(16, 1, windows=4)
    assert [ramp(i) for i in range(6)] == [16, 8, 4, 2, 1, 1]
    ramp = schedules.piecewise({10: 8, 0: 3, 20: 1})
    assert [ramp(i) for i in (0, 9, 10, 19, 20, 10**9)] == [3, 3, 8, 8, 1, 1]
    model = nn.Linear(2, 1)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters()), schedules.linear(1, 3, windows=2))
    sizes = []
    for _ in range(9):
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        if opt.updated:
            sizes.append(opt.last_window.micro_batches)
    assert sizes == [1, 2, 3, 3]
    copy.deepcopy(opt)


def test_scaled_lr():
    assert schedules.scaled_lr(0.1, batch=1024, base_batch=256, rule="linear") == pytest.approx(0.4)
    assert schedules.scaled_lr(0.1, batch=1024, base_batch=256, rule="sqrt") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: wrapped([nn.Parameter(torch.ones(1))], noise_scale=True),
            TypeError,
            "noise_scale must be a number or None",
        ),
        (lambda: wrapped([nn.Parameter(torch.ones(1))], noise_scale=1.0), ValueError, "less than 1, got 1.0"),
        (lambda: wrapped([nn.Parameter(torch.ones(1))], noise_scale=-0.1), ValueError, "at least 0"),
        (
            lambda: wrapped(
                [nn.Parameter(torch.ones(1))], noise_scale=None, accum_steps=schedules.noise_scale(2, at_most=4)
            ),
            ValueError,
            "add noise_scale=0.95",
        ),
        (lambda: schedules.noise_scale(2, at_most=4, fraction="1"), TypeError, "fraction must be a number, got '1'"),
        (lambda: schedules.piecewise([(0, 4)]), TypeError, "steps must be a dict .* got a list"),
        (
            lambda: schedules.noise_scale(2, at_most=4, every=0),
            ValueError,
            "every must be at least 1, got 0; it counts windows",
        ),
        (lambda: schedules.piecewise({1: 4}), ValueError, "window 0"),
        (lambda: schedules.piecewise({0: 4, 1.5: 2}), ValueError, "got the window 1.5"),
        (lambda: schedules.piecewise({0: 2.0}), ValueError, r"steps\[0\] must be an int, got the float 2.0"),
        (lambda: schedules.linear(0, 4, 2), ValueError, "start must be at least 1"),
        (lambda: schedules.geometric(1, 4.0, 2), ValueError, "end must be an int"),
        (lambda: schedules.linear(1, 4, 0), ValueError, "windows must be at least 1"),
        (lambda: schedules.noise_scale(8, at_most=4), ValueError, "at_least <= start <= at_most"),
        (lambda: schedules.noise_scale(2, at_most=4, fraction=0.0), ValueError, "fraction must be greater than 0"),
        (lambda: schedules.noise_scale(2, at_most=4, growth=1.0), ValueError, "growth must be greater than 1"),
        (lambda: schedules.scaled_lr(0.1, batch=1, base_batch=0, rule="sqrt"), ValueError, "base_batch must be finite"),
        (
            lambda: schedules.scaled_lr(0.1, batch=1, base_batch=1, rule="root"),
            ValueError,
            "rule must be one of 'linear', 'sqrt'",
        ),
    ],
)
def test_bad_input(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    ("gradients", "value"), [((1.0, -1.0), math.inf), ((0.0, 1.0), 0.0)], ids=["gradient", "noise"]
)
def test_an_average_below_zero_counts_as_zero(gradients, value):
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = wrapped([p], accum_steps=2)
    for g in gradients:
        opt.backward(p.sum() * g)
        opt.step()
    assert opt.last_window.noise_scale.item() == value


def test_a_weight_of_the_whole_window_does_not_tell_its_first_micro_batchs():
    model, (window,) = telling([(9, 20, 5)])
    opt = wrapped(model.parameters(), reduction="sum")
    for x, y in window:
        nn.functional.mse_loss(model(x), y, reduction="sum").backward()
    opt.step(weight=34)
    assert opt.last_window.noise_scale is None


def test_a_checkpoint_is_not_written_to_and_one_of_the_beginning_forgets_the_averages():
    model, data = telling([(4, 4)] * 2)

    def run(opt, window):
        for x, y in window:
            opt.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
            opt.step()
        return float(opt.last_window.noise_scale)

    opt = wrapped(model.parameters(), accum_steps=2)
    beginning = copy.deepcopy(opt.state_dict())
    run(opt, data[0])
    state = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(beginning)
    assert run(opt, data[0]) == pytest.approx(of_paper(model, data[:1], 0.9), rel=1e-9)
    del opt
    model.zero_grad()
    for _ in range(2):
        opt = wrapped(model.parameters(), accum_steps=2)
        opt.load_state_dict(state)
        assert run(opt, data[1]) == pytest.approx(of_paper(model, data, 0.9), rel=1e-9)
        del opt
        model.zero_grad()


class LooksAround(torch.optim.SGD):
    """As SAM does: a backward of its own in step(), whose gradient it does not step with."""

    def step(self, closure=None):
        (p,) = self.param_groups[0]["params"]
        grad = p.grad.clone()
        with torch.enable_grad():
            (p * torch.arange(4.0)).square().sum().backward()
        p.grad = grad
        return super().step()


def test_a_backward_of_the_inner_optimizer_is_not_taken_for_a_part_of_the_window_that_it_steps():
    said = []
    for kind in (torch.optim.SGD, LooksAround):
        torch.manual_seed(0)
        p = nn.Parameter(torch.ones(4))
        opt = fa.AccumulatingOptimizer(kind([p], lr=0.0), reduction="sum", noise_scale=0.5)
        for _ in range(3):
            for _ in range(4):
                opt.backward((p * (1 + torch.randn(4))).sum(), weight=1.0)
            opt.step()
            said.append(opt.last_window.noise_scale.item())
            opt.zero_grad()
    assert said[:3] == said[3:] and math.isfinite(said[0])


def test_a_state_without_averages_begins_new_ones():
    def run(p, opt, *factors):
        for factor in factors:
            opt.backward((p * factor).sum())
            opt.step()
            opt.zero_grad()

    p, q = (nn.Parameter(torch.ones(4)) for _ in range(2))
    plain = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.0), 3)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([q], lr=0.0), 3, noise_scale=0.5)
    run(p, plain, 1.0, 2.0)
    run(q, opt, 1.0, 2.0, 3.0, 1000.0)
    opt.load_state_dict(plain.state_dict())
    run(q, opt, 3.0)
    assert opt.last_window.noise_scale is None
