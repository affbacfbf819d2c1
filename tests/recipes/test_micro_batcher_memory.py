"""MicroBatcher out of memory: the big batch's gradient, whatever broke off and was repeated."""

import copy
import itertools
import random
import weakref

import fusedaccum as fa
import fusedaccum.ops
import fusedaccum.recipes.micro_batcher
import pytest
import torch
from fusedaccum.core.extension import Extension, Extensions
from fusedaccum.extensions import fused_layers, nonfinite
from out_of_memory import Net, Points, assert_close, batch, function, made, oracle, ran, sgd, weight
from pairs import AddsToGrad
from sizes import limits
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_buckets")]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_error_at_every_point_of_a_window(monkeypatch, each_intake, reduction):
    expected, loss = oracle([batch()])
    _, points, _, _ = ran(monkeypatch, reduction=reduction)
    partial = 0
    for point in range(1, points.met + 1, 1 if reduction == "mean" else 3):
        model, broken, losses, opt = ran(monkeypatch, [point], reduction=reduction)
        assert_close(model, expected, 1e-12)
        torch.testing.assert_close(losses[0], loss, rtol=1e-12, atol=0)
        assert opt.last_window.weight == weight(batch()) and opt.last_window.micro_batches in (4, 5, 6)
        assert not any(attempt.lost for attempt in broken.attempts)
        partial += broken.partial
    assert points.met > 50 and partial > 5


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.1}, {"nonfinite": "skip_micro_batch"}], ids=str)
def test_fp32_with_errors_within_errors(monkeypatch, settings):
    """With several errors, several windows in FP32 stay within 1e-6 of the big batch in FP64."""
    make = sgd if "max_grad_norm" not in settings else lambda params: torch.optim.SGD(params, lr=5.0)
    _, points, _, _ = ran(monkeypatch, dtype=torch.float32, windows=3, make=make, **settings)
    expected, (model, *_) = (
        oracle_of(make, settings),
        ran(monkeypatch, windows=3, make=make, dtype=torch.float32, **settings),
    )
    assert_close(model, expected, 1e-6)
    chance, depth, lost = random.Random(0), 0, 0
    for _ in range(30):
        first = chance.randint(12, 30)
        fail = [first, first + chance.randint(14, 30), points.met + chance.randint(-60, 0)]
        with limits(bucket=1):
            model, broken, _, opt = ran(monkeypatch, fail, 11, dtype=torch.float32, windows=3, make=make, **settings)
        assert_close(model, expected, 1e-6)
        assert opt.last_window.weight == weight(batch())
        depth += any(attempt.done and attempt.taken for attempt in broken.broken)
        lost += any(attempt.lost for attempt in broken.broken)
    # "skip_micro_batch" judges a micro-batch as a whole, so it cannot be added in parts.
    assert lost > 0 if "nonfinite" in settings else depth > 4 and lost == 0


def oracle_of(make, settings):
    if "max_grad_norm" not in settings:
        return oracle([batch(seed=seed) for seed in (3, 4, 5)], make=make)[0]
    model = made(make=make)[0]
    optimizer = make(model.parameters())
    for seed in (3, 4, 5):
        optimizer.zero_grad()
        function(model)(batch(seed=seed)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"], error_if_nonfinite=True)
        optimizer.step()
    return model


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.bfloat16, "mean"), (torch.float16, "sum")])
def test_16_bit_buffers_hold_means_of_their_own(monkeypatch, dtype, reduction):
    """A part counted twice or left out, or a wrong weight, would be an error of a tenth or more."""
    make = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    expected = oracle([batch()], make=make)[0]
    start = made()[0]
    settings = {"dtype": dtype, "buffer_dtype": None, "reduction": reduction, "make": make}
    _, points, _, _ = ran(monkeypatch, **settings)
    for point in range(1, points.met + 1, 11):
        _, _, _, opt = ran(monkeypatch, [point, point + 13], **settings)
        for p, q, before in zip(opt.param_groups[0]["params"], expected.parameters(), start.parameters(), strict=True):
            if p.grad is not None:
                moved = before.detach() - q.detach()
                assert (p.grad.double() - moved).norm() <= 0.03 * moved.norm()


def test_an_add_that_broke_in_the_middle_begins_the_window_anew(monkeypatch):
    """It is not known what such a call has written."""
    expected = oracle([batch()])[0]
    plain = fusedaccum.ops.accumulate_

    def half(buffers, grads, scale, **how):
        if next(calls) == 0:
            plain(buffers[:1], grads[:1], scale, **how)
            raise MemoryError
        plain(buffers, grads, scale, **how)

    for before in range(9):
        calls = itertools.count(-before)
        with monkeypatch.context() as patched:
            patched.setattr(fusedaccum.ops, "accumulate_", half)
            model, points, _, opt = ran(monkeypatch, backend="reference")
        assert_close(model, expected, 1e-12)
        assert sum(attempt.lost for attempt in points.attempts) == 1 and opt.last_window.weight == weight(batch())


class Segments(Net):
    """With re-entrant checkpoints, a tied weight gets several gradients in one pass."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in (self.first, self.second, self.first):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.head(x) + self.frozen


def test_reentrant_checkpoints(monkeypatch, each_intake):
    expected = oracle([batch()], net=Segments)[0]
    _, points, _, _ = ran(monkeypatch, net=Segments)
    lost = 0
    for point in range(1, points.met + 1, 3):
        model, broken, _, opt = ran(monkeypatch, [point], net=Segments)
        assert_close(model, expected, 1e-12)
        assert opt.last_window.weight == weight(batch())
        lost += sum(attempt.lost for attempt in broken.attempts)
    assert lost > 5


@pytest.mark.parametrize("checkpointed", ["the window before", "the part before"])
@pytest.mark.parametrize("breaks_in", ["forward", "backward"])
def test_a_checkpointed_pass_before_does_not_make_the_window_begin_anew(each_intake, checkpointed, breaks_in):
    """Nothing of it is left in what breaks off afterwards, of which all is known."""
    layer, head, x = nn.Linear(3, 4).double(), nn.Linear(4, 1).double(), torch.randn(12, 3, dtype=torch.float64)
    parameters, ran, breaks = [*layer.parameters(), *head.parameters()], [], []

    def out_of_memory(_=None):
        breaks.clear()
        raise torch.OutOfMemoryError("injected")

    def loss_of(part):
        rows, fails = (
            (part[:, None] == x).all(2).nonzero()[:, 1].tolist(),
            bool(breaks) and part is not x and breaks[0] in ran,
        )
        ran.extend(rows)
        within = checkpointed == "the window before" if not breaks else checkpointed == "the part before" and 0 in rows
        hidden = checkpoint(layer, part.clone().requires_grad_(), use_reentrant=True) if within else layer(part)
        if fails and breaks_in == "forward":
            out_of_memory()
        if fails:
            hidden.register_hook(out_of_memory)  # when the head has its gradient
        return head(hidden).square().mean()

    opt = fa.AccumulatingOptimizer(torch.optim.SGD(parameters, lr=0.0))
    batcher = fa.MicroBatcher(loss_of, opt)
    batcher.step(x)
    batcher._sizes.of(x).limit = 4
    ran.clear()
    breaks.append(3)  # once the first part, which holds this row, has run
    batcher.step(x)
    assert sorted(ran) == sorted([*range(12), *range(4, 8)])  # the second part twice, and no other
    expected = torch.autograd.grad(head(layer(x)).square().mean(), parameters)
    for p, gradient in zip(parameters, expected):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-12)


def test_fused_layers(monkeypatch):
    """They add their gradients themselves if the weight is a number.

    They go the plain way where a gradient may have to be left out.
    """
    fused = lambda dtype: fa.fuse_linear(Net(dtype))  # noqa: E731
    expected = oracle([batch()])[0]
    model, opt = made(net=fused)
    calls = []
    prepare = fused_layers._prepare
    monkeypatch.setattr(fused_layers, "_prepare", lambda *args: calls.append(args) or prepare(*args))
    fa.MicroBatcher(function(model), opt, 4, weight=lambda part: float(weight(part))).step(batch())
    assert_close(model, expected, 1e-12)
    assert calls
    _, points, _, _ = ran(monkeypatch, net=fused)
    for point in range(1, points.met + 1, 3):
        assert_close(ran(monkeypatch, [point], net=fused)[0], expected, 1e-12)


@pytest.mark.parametrize("nonfinite", ["skip_window", "skip_micro_batch"])
def test_what_is_not_finite_is_seen_also_where_it_broke_off(monkeypatch, nonfinite):
    """Also a NaN of a parameter whose gradient is there, which the retry leaves out."""
    whole = batch()
    bad = float(whole["x"][4:8, 0].max())
    assert bad > 0

    class Poisoned(Net):
        def __init__(self, dtype):
            super().__init__(dtype)
            self.sometimes.register_hook(lambda grad: grad * float("nan") if self.has_bad else grad)

        def forward(self, x):
            self.has_bad = bool((x[:, 0] == bad).any())
            return super().forward(x)

    start = made()[0]
    kept = {key: torch.cat([value[:4], value[8:]]) for key, value in whole.items()}
    _, points, _, _ = ran(monkeypatch, net=Poisoned, nonfinite=nonfinite)
    for point in range(1, points.met + 1, 2):
        model, _, _, opt = ran(monkeypatch, [point], net=Poisoned, nonfinite=nonfinite)
        assert opt.last_window.nonfinite >= 1
        if nonfinite == "skip_window":
            assert not opt.last_window.applied
            assert_close(model, start, 0.0)
        elif opt.last_window.weight == weight(kept):  # the second micro-batch of four was dropped, as without an error
            assert_close(model, oracle([kept])[0], 1e-12)
        else:
            assert opt.last_window.applied and not any(p.isnan().any() for p in model.parameters())


@limits(bucket=1)
def test_what_was_not_finite_in_a_batch_that_was_given_up_is_forgotten():
    """Its last attempt breaks off when one of two gradients has been added and counted."""
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    short, arrived = True, itertools.count(1)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p, q], lr=1.0), nonfinite="skip_window")

    def arrives(_):
        if short and next(arrived) % 2 == 0:
            raise torch.OutOfMemoryError("injected")

    p.register_hook(arrives)
    q.register_hook(arrives)
    batcher = fa.MicroBatcher(lambda part: ((p + q) * part[:, None]).mean(0).sum(), opt, "auto")
    with pytest.raises(torch.OutOfMemoryError):
        batcher.step(torch.full((4,), float("nan")))
    short = False
    batcher.step(torch.ones(4))
    assert opt.updated and opt.last_window.nonfinite == 0 and (p == -1).all() and (q == -1).all()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_broke_off_is_freed_before_the_next_try(where):
    model, opt = made()
    seen, alive = [], []

    def breaks(*_):
        if len(seen) == 1:
            raise torch.OutOfMemoryError("injected")

    def watch(module, args, output):
        alive.append([ref() for ref in seen])
        seen.append(weakref.ref(output))
        cycle = [output]
        cycle.append(cycle)
        if where == "backward":
            output.register_hook(breaks)

    model.first.register_forward_hook(watch)
    if where == "forward":
        model.head.register_forward_hook(breaks)
    fa.MicroBatcher(function(model), opt, weight=weight).step(batch())
    assert len(alive) == 3 and alive[1] == [None]


class Dropping(Net):
    def forward(self, x):
        return super().forward(torch.dropout(x, 0.5, True))


def test_the_same_seed_gives_the_same_bits(monkeypatch):
    def bits(fail):
        torch.manual_seed(7)
        return [p.detach() for p in ran(monkeypatch, fail, net=Dropping)[0].parameters()]

    for fail in ([], [9], [15, 33], [30, 36]):
        assert all(map(torch.equal, bits(fail), bits(fail)))


def test_a_forward_that_broke_off_has_drawn_nothing():
    ends = []
    for point in (None, "first", "second", "head"):
        model, opt = made(net=Dropping)
        fails = point is not None

        def breaks(*_):
            nonlocal fails
            fails, now = False, fails
            if now:
                raise torch.OutOfMemoryError("injected")

        batcher = fa.MicroBatcher(function(model), opt, weight=weight)
        if point is None:
            batcher._sizes.of(batch()).limit = 6
        else:
            getattr(model, point).register_forward_hook(breaks)
        torch.manual_seed(7)
        batcher.step(batch())
        ends.append([p.detach() for p in model.parameters()])
    assert all(all(map(torch.equal, ends[0], end)) for end in ends[1:])


def test_pooled_batch_statistics_hold_every_sample_once(monkeypatch):
    class Normed(Net):
        def __init__(self, dtype):
            super().__init__(dtype)
            self.norm = nn.BatchNorm1d(6).to(dtype)

        def forward(self, x):
            return super().forward(self.norm(x))

    plain = nn.BatchNorm1d(6).double()
    plain(batch()["x"])
    net = lambda dtype: fa.accumulate_batchnorm(Normed(dtype))  # noqa: E731
    _, points, _, _ = ran(monkeypatch, first=6, net=net)  # halved, it is still 3: a single sample has no statistics
    for point in range(1, points.met + 1, 7):
        norm = ran(monkeypatch, [point], 6, net=net)[0].norm
        torch.testing.assert_close((norm.running_mean, norm.running_var), (plain.running_mean, plain.running_var))


def test_the_noise_scale_is_not_measured_of_a_mixture(monkeypatch):
    """The first micro-batch is the small sample, unless some parameters accumulated more."""
    *_, opt = ran(monkeypatch, noise_scale=0.9)
    assert opt.last_window.noise_scale is not None
    _, points, _, opt = ran(monkeypatch, [22], noise_scale=0.9)
    assert points.partial == 1 and opt.last_window.noise_scale is None


def test_an_error_after_it_was_counted_begins_the_window_anew():
    calls = []

    class Failing(Extension):
        key = "failing"

        def micro_batch_counted(self, micro):
            calls.append(len(calls))
            if len(calls) == 2:
                raise MemoryError

    model, opt = made()
    opt._ledger._extensions = Extensions([Failing()])
    batcher = fa.MicroBatcher(function(model), opt, weight=weight)
    batcher._sizes.of(batch()).limit = 6
    batcher.step(batch())
    assert_close(model, oracle([batch()])[0], 1e-12)
    assert opt.last_window.weight == weight(batch()) and len(calls) > 3


def test_extensions_are_told_what_counts(monkeypatch):
    told = []

    class Listening(Extension):
        key = "listening"

        def micro_batch_counted(self, micro):
            told.append("counted")

        def micro_batch_dropped(self):
            told.append("dropped")

        def window_closed(self):
            told.append("closed")

    with monkeypatch.context() as patched:
        model, opt = made()
        opt._ledger._extensions = Extensions([Listening()])
        Points(patched, model, [12])
        batcher = fa.MicroBatcher(function(model), opt, weight=weight)
        batcher.step(batch())
    assert told == ["dropped", "counted", "counted", "closed"]


def test_a_function_that_runs_a_backward_of_its_own(monkeypatch):
    """If an attempt breaks off, nobody knows which of its passes a parameter has accumulated.

    So the window starts over.
    """
    lost = 0
    for point in range(5, 200, 12):
        with monkeypatch.context() as patched, limits(bucket=1):
            model, opt = made()
            expected, loss_of = twin_step(model), function(model)

            def twice(part, loss_of=loss_of):
                (loss_of(part) / 4).backward()
                return loss_of(part) * 0.75

            points = Points(patched, model, [point])
            fa.MicroBatcher(twice, opt, weight=weight).step(batch())
            assert_close(model, expected, 1e-12)
            lost += sum(attempt.lost for attempt in points.attempts)
            if points.met < point:
                break
    assert lost > 3


def twin_step(model):
    """The parameters after a plain step on the whole batch."""
    twin = copy.deepcopy(model)
    opt = sgd(twin.parameters())
    function(twin)(batch()).backward()
    opt.step()
    return twin


def test_memory_that_runs_out_while_a_micro_batch_is_judged_whose_layer_has_added_it(monkeypatch):
    """No one can tell what the layer added from what was there: the whole batch is repeated."""
    p = nn.Parameter(torch.zeros(1, 3, dtype=torch.float64))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), reduction="sum", nonfinite="skip_micro_batch")
    judged, count = [], nonfinite.count

    def short_of_memory(sums, grads):
        judged.append(grads)
        if len(judged) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return count(sums, grads)

    def loss(part):
        if len(part) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return AddsToGrad.apply(part, p).sum()

    monkeypatch.setattr(nonfinite, "count", short_of_memory)
    samples = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None].expand(8, 3).contiguous()
    fa.MicroBatcher(loss, opt, "auto").step(samples)
    assert len(judged) > 2
    torch.testing.assert_close(p.detach(), -samples.mean(0, keepdim=True))
