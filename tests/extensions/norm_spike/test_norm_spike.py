"""``skip_norm``: windows with a norm above a limit are skipped, as in a loop over big batches."""

import copy
import io
import math
import re

import fusedaccum as fa
import pytest
import torch
from fusedaccum.extensions.norm_spike import NormSpike
from pages import ROOT
from torch import nn
from training import assert_same_parameters, data, mean_loss, model, parts, twin, wrapped, zeros

SPIKES = {5: 30.0, 9: 8.0, 10: 1e3, 14: math.inf, 16: math.nan}  # windows, and what their losses are multiplied by


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def fused_adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-3, fused=True)


class Plain:
    """The oracle: plain PyTorch on big batches, and a mean kept in Python numbers."""

    def __init__(self, net, optimizer, limit, max_grad_norm=None):
        self.net, self.optimizer, self.limit, self.max_grad_norm = net, optimizer, limit, max_grad_norm
        self.norms, self.said = [], []

    def allowed(self):
        if not isinstance(self.limit, fa.TimesMean):
            return self.limit
        count = len(self.norms)
        if count < self.limit.after:
            return math.inf
        weights = [self.limit.decay ** (count - 1 - i) for i in range(count)]
        return self.limit.factor * sum(w * n for w, n in zip(weights, self.norms, strict=True)) / sum(weights)

    def step(self, x, y, factor):
        self.optimizer.zero_grad()
        (mean_loss(self.net, x, y) * factor).backward()
        grads = [p.grad for p in self.net.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([g.double().norm() for g in grads])).item()
        limit = self.allowed()
        applied = math.isfinite(norm) and norm <= limit
        if applied:
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.max_grad_norm)
            self.optimizer.step()
        if math.isfinite(norm):
            self.norms.append(min(norm, limit))
        self.said.append((applied, limit))


def windows(count, dtype=torch.float64):
    for index in range(count):
        yield *data(24, dtype, seed=100 + index), SPIKES.get(index, 1.0)


def run(opt, net, x, y, factor, scaler=None):
    for xs, ys in parts(x, y, (5, 12, 7)):
        loss = mean_loss(net, xs, ys) * factor
        opt.backward(loss if scaler is None else scaler.scale(loss), weight=len(xs))
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        opt.zero_grad()


LIMITS = [4.0, fa.TimesMean(3.0, decay=0.9, after=3), fa.TimesMean(1.5, decay=0.0, after=1)]


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("make", [sgd, fused_adam])
@pytest.mark.parametrize("limit", LIMITS, ids=["number", "mean", "last norm"])
def test_what_is_applied_is_what_a_plain_loop_applies(limit, make, max_grad_norm):
    net = model()
    big = twin(net)
    opt = wrapped(net, 3, make=make, skip_norm=limit, max_grad_norm=max_grad_norm)
    plain = Plain(big, make(big.parameters()), limit, max_grad_norm)
    for x, y, factor in windows(20):
        run(opt, net, x, y, factor)
        plain.step(x, y, factor)
        applied, allowed = plain.said[-1]
        assert opt.updated is applied and bool(opt.last_window.applied) is applied
        if isinstance(limit, fa.TimesMean):
            assert opt.last_window.norm_limit.item() == pytest.approx(allowed, rel=1e-9)
        else:
            assert opt.last_window.norm_limit is None
    assert len({applied for applied, _ in plain.said}) == 2  # some were left out
    assert_same_parameters(net, big, 1e-9)


def test_a_norm_that_is_the_limit_is_applied_and_one_above_it_is_not():
    p = zeros(2, torch.float64)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, skip_norm=5.0)
    for grad, after in (([3.0, 4.0], [-3.0, -4.0]), ([3.0, 4.0 + 1e-12], [-3.0, -4.0])):
        (p * torch.tensor(grad, dtype=torch.float64)).sum().backward()
        opt.step()
        assert p.tolist() == after


@pytest.mark.filterwarnings("ignore:window 1 has weight 0")
def test_a_gradient_that_was_set_by_hand_in_a_window_of_weight_0_does_not_enter_the_mean():
    p = zeros()
    limit = fa.TimesMean(3.0, decay=0.9, after=1)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), reduction="sum", skip_norm=limit)
    for grad, weight in ((2.0, 1), (5.0, 0), (2.0, 1)):
        p.grad = torch.full((1,), grad)
        opt.step(weight=weight)
        opt.zero_grad()
    assert p == -4 and opt.last_window.norm_limit == 3 * 2.0


@pytest.mark.parametrize("limit", LIMITS[:2], ids=["number", "mean"])
def test_a_loss_scale_changes_nothing(limit):
    nets = [model(torch.float32) for _ in range(2)]
    opts = [wrapped(net, 3, make=sgd, skip_norm=limit) for net in nets]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    said = []
    for x, y, factor in windows(14, torch.float32):
        run(opts[0], nets[0], x, y, factor)
        run(opts[1], nets[1], x, y, factor, scaler)
        said.append([opt.updated for opt in opts])
        assert opts[1].last_window.grad_norm.item() == pytest.approx(opts[0].last_window.grad_norm.item(), rel=1e-5)
    assert all(a is b for a, b in said) and len({a for a, _ in said}) == 2
    assert_same_parameters(nets[1], nets[0], 1e-5)


def test_an_overflow_that_a_scaler_finds_does_not_enter_the_mean():
    net = model(torch.float32)
    opt = wrapped(net, 3, make=sgd, skip_norm=fa.TimesMean(3.0, after=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for index, (x, y, _) in enumerate(windows(4, torch.float32)):
        run(opt, net, x, y, math.inf if index == 1 else 1.0, scaler)
        if index == 1:
            assert not opt.updated
            between = opt.state_dict()["fusedaccum"]["norm_spike"]["seen"].clone()
        if index == 0:
            before = opt.state_dict()["fusedaccum"]["norm_spike"]["seen"].clone()
    assert torch.equal(before, between) and opt.updated


@pytest.mark.parametrize("micro_batches", [0, 1])
def test_a_checkpoint_goes_on_with_the_same_mean(micro_batches):
    def made():
        net = model()
        return net, wrapped(net, 3, make=sgd, skip_norm=fa.TimesMean(2.0, decay=0.9, after=4))

    net, opt = made()
    stream = list(windows(14))
    for x, y, factor in stream[:8]:
        run(opt, net, x, y, factor)
    x, y, factor = stream[8]
    for xs, ys in parts(x, y, (5, 12, 7))[:micro_batches]:
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        opt.step()
    file = io.BytesIO()
    torch.save([net.state_dict(), opt.state_dict()], file)
    other, resumed = made()
    file.seek(0)
    weights, state = torch.load(file)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    said = [[], []]
    for n, o, kept in ((net, opt, said[0]), (other, resumed, said[1])):
        for xs, ys in parts(x, y, (5, 12, 7))[micro_batches:]:
            o.backward(mean_loss(n, xs, ys), weight=len(xs))
            o.step()
        for window in stream[9:]:
            run(o, n, *window)
            kept.append((o.updated, o.last_window.norm_limit))
    assert said[0] == said[1] and not all(updated for updated, _ in said[0])
    assert_same_parameters(other, net, 0)


def test_a_copy_of_model_and_wrapper_has_a_mean_of_its_own():
    net = model()
    opt = wrapped(net, 3, make=sgd, skip_norm=fa.TimesMean(2.0, after=2))
    for x, y, factor in windows(4):
        run(opt, net, x, y, factor)
    other, copied = copy.deepcopy((net, opt))
    before = copied.state_dict()["fusedaccum"]["norm_spike"]["seen"]
    run(opt, net, *data(24, seed=7), 1.0)
    assert torch.equal(copied.state_dict()["fusedaccum"]["norm_spike"]["seen"], before)
    run(copied, other, *data(24, seed=7), 1.0)
    assert_same_parameters(other, net, 0)


def test_a_checkpoint_goes_into_the_mean_that_a_graph_may_write_to():
    net = model()
    opt = wrapped(net, 3, make=sgd, skip_norm=fa.TimesMean(2.0, after=2))
    run(opt, net, *data(24), 1.0)
    seen = opt._accumulation.extensions.of(NormSpike)._seen
    state = opt.state_dict()
    saved = state["fusedaccum"]["norm_spike"]["seen"].clone()
    run(opt, net, *data(24), 2.0)
    assert not torch.equal(seen, saved)
    opt.load_state_dict(state)
    assert opt._accumulation.extensions.of(NormSpike)._seen is seen and torch.equal(seen, saved)


def test_windows_without_weight_or_gradients_do_not_enter_the_mean():
    net = model()
    opt = wrapped(net, 1, make=sgd, skip_norm=fa.TimesMean(2.0, after=1))
    run_one = lambda weight: (opt.backward(mean_loss(net, *data()), weight=weight), opt.step())  # noqa: E731
    run_one(3)
    limit = opt.last_window.grad_norm * 2
    with pytest.warns(RuntimeWarning, match="has weight 0"):
        run_one(0)
    opt.step()
    run_one(1)
    assert opt.last_window.norm_limit == limit


def test_a_step_that_breaks_off_counts_its_window_once(monkeypatch):
    net = model()
    opt = wrapped(net, 1, make=sgd, skip_norm=fa.TimesMean(9.0, after=1))
    run_one = lambda: (opt.backward(mean_loss(net, *data())), opt.step())  # noqa: E731
    run_one()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(opt._accumulation.sums, "shown_as_is", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        run_one()
    opt.step()
    assert opt.state_dict()["fusedaccum"]["norm_spike"]["seen"][2] == 2


def test_norms_that_stay_higher_are_let_through_after_some_windows():
    p = zeros(1, torch.float64)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, skip_norm=fa.TimesMean(2.0, decay=0.9, after=5))
    said = []
    for norm in [1.0] * 20 + [10.0] * 60:
        (p * norm).sum().backward()
        opt.step()
        said.append(opt.updated)
    assert all(said[:20]) and not said[20] and not said[25] and said[-1]
    assert said[said.index(True, 20) :] == [True] * (80 - said.index(True, 20))


BAD = {
    "text": ("3x", TypeError, "skip_norm must be a number or None, got '3x'"),
    "zero": (0, ValueError, r"skip_norm must be greater than 0, got 0; .*TimesMean\(3.0\)"),
    "nan": (math.nan, ValueError, "skip_norm must be greater than 0, got nan"),
    "bool": (True, TypeError, "skip_norm must be a number or None, got True"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_limits_are_refused(name):
    value, error, match = BAD[name]
    with pytest.raises(error, match=match):
        wrapped(model(), 2, skip_norm=value)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"factor": 1.0}, ValueError, "factor must be greater than 1, and finite, got 1.0"),
        ({"factor": math.inf}, ValueError, "factor must be greater than 1, and finite, got inf"),
        ({"factor": "3"}, TypeError, "factor must be a number, got '3'"),
        ({"factor": 3.0, "decay": 1.0}, ValueError, "decay must be at least 0 and less than 1, got 1.0"),
        ({"factor": 3.0, "after": 0}, ValueError, "after must be at least 1, got 0"),
        ({"factor": 3.0, "after": 2.5}, ValueError, "after must be an int, got the float 2.5"),
    ],
)
def test_bad_means_are_refused(arguments, error, match):
    with pytest.raises(error, match=re.escape(match)):
        fa.TimesMean(**arguments)


def test_lbfgs_is_refused():
    with pytest.raises(ValueError, match="skip_norm does not work with LBFGS"):
        wrapped(model(), make=torch.optim.LBFGS, skip_norm=1.0)


@pytest.mark.parametrize("limit", [math.inf, fa.TimesMean(3.0)], ids=["inf", "mean"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_above_a_limit_that_is_not_known_yet(value, limit):
    p = zeros(2)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, skip_norm=limit)
    (p * value).sum().backward()
    opt.step()
    assert not opt.updated and p.tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:p.grad was written to")
def test_a_window_that_another_rule_leaves_out_is_left_out():
    """What was not finite has been replaced by hand, so that only the count of the adds tells."""
    p = zeros(2)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, skip_norm=10.0, nonfinite="skip_window")
    (p * math.nan).sum().backward()
    p.grad = torch.ones_like(p)
    opt.step()
    assert not opt.updated and opt.last_window.grad_norm.isfinite()


def test_norms_of_zero_do_not_make_every_other_one_too_large():
    """Rewards, say, that only come after a while."""
    p = zeros(2)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, skip_norm=fa.TimesMean(3.0, after=3))
    said = []
    for factor in [0.0] * 5 + [1.0] * 5:
        opt.backward((p * factor).sum())
        opt.step()
        said.append(opt.updated)
    assert all(said) and opt.last_window.norm_limit == pytest.approx(3 * math.sqrt(2))


def test_a_state_without_a_mean_begins_a_new_one():
    net = model()
    opt = wrapped(net, 3, make=sgd, skip_norm=fa.TimesMean(2.0, after=1))
    other = wrapped(model(), 3, make=sgd)
    run(opt, net, *data(24), 1.0)
    opt.load_state_dict(other.state_dict())
    run(opt, net, *data(24), 100.0)
    assert opt.updated and opt.last_window.norm_limit == math.inf


def test_the_guide_says_how_long_norms_that_stay_higher_are_left_out():
    (said,) = re.findall(
        r"\(of ten times\s+the\s+norm, with these numbers, after (\d+)\)", (ROOT / "docs/guide.md").read_text()
    )
    p = zeros(1, torch.float64)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.0), 1, skip_norm=fa.TimesMean(3.0))
    left_out = 0
    for norm in [1.0] * 200 + [10.0] * 100:
        (p * norm).sum().backward()
        opt.step()
        left_out += not opt.updated
    assert left_out == int(said)
