"""Mistakes that are told: other libraries' names, a wrong optimizer, a loss divided twice."""

import contextlib
import inspect
import math
import warnings

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from training import assert_grads, data, gradient, mean_loss, model, parts, wrapped

OTHERS = {
    "gradient_accumulation_steps": "accum_steps",
    "accumulation_steps": "accum_steps",
    "gradient_accumulation": "accum_steps",
    "accumulate_grad_batches": "accum_steps",
    "num_micro_batches": "accum_steps",
    "steps": "accum_steps",
    "n_steps": "accum_steps",
    "acum_steps": "accum_steps",
    "accum_step": "accum_steps",
    "grad_acumulation_steps": "accum_steps",
    "clip_grad_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "Max_Grad_Norm": "max_grad_norm",
    "weight": "window_weight",
    "dtype": "buffer_dtype",
    "grad_accum_dtype": "buffer_dtype",
    "device": "buffer_device",
    "reduce_dtype": "comm_dtype",
    "non_finite": "nonfinite",
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_argument_by_another_librarys_name_is_answered_with_ours(name):
    net = model()
    message = rf"^AccumulatingOptimizer\(\) has no argument {name}=4; did you mean {OTHERS[name]}=\?$"
    with pytest.raises(TypeError, match=message):
        wrapped(net, **{name: 4})
    assert wrapped(net, 2).accum_steps == 2  # nothing was begun


def test_an_argument_of_the_inner_optimizer_is_sent_there():
    with pytest.raises(
        TypeError, match=r"no argument lr=0\.1; give it to the optimizer that is wrapped: .*lr=\.\.\.\)"
    ):
        fa.AccumulatingOptimizer(model().parameters(), lr=0.1)


def test_an_argument_that_nobody_knows_is_answered_with_all_that_there_are():
    with pytest.raises(
        TypeError, match=r"no argument colour='red'; its arguments are accum_steps, backend, .*window_weight$"
    ):
        wrapped(model(), colour="red")


def test_a_long_value_is_shown_shortened():
    with pytest.raises(TypeError, match=r"has no argument params_of=.{10,60}; its arguments") as raised:
        wrapped(model(), params_of=list(range(10000)))
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda opt, loss: opt.backward(loss, weights=4),
            r"^opt\.backward\(\) has no argument weights=4; did you mean weight=\?",
        ),
        (lambda opt, loss: opt.backward(loss, num_items=4), r"did you mean weight=\?"),
        (lambda opt, loss: opt.backward(loss, retain_graphs=True), r"did you mean retain_graph=\?"),
        (lambda opt, loss: opt.backward(loss, is_last=True), r"did you mean last=\?"),
        (
            lambda opt, loss: opt.micro_batch(tokens=4),
            r"^opt\.micro_batch\(\) has no argument tokens=4; did you mean weight=\?",
        ),
    ],
)
def test_an_argument_of_a_micro_batch_by_another_name_is_answered_and_changes_nothing(call, message):
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    for half in parts(x, y, (12, 12)):
        with pytest.raises(TypeError, match=message):
            call(opt, mean_loss(net, *half))
        opt.backward(mean_loss(net, *half), weight=12)
        opt.step()
    assert opt.last_window.micro_batches == 2 and opt.last_window.weight == 24
    assert_grads(net, gradient(model(), x, y))


def test_signatures_are_those_that_are_documented():
    shown = inspect.signature(fa.AccumulatingOptimizer)
    assert list(shown.parameters)[:3] == ["optimizer", "accum_steps", "window_weight"]
    assert shown.parameters["reduction"].default == "mean"
    assert list(inspect.signature(fa.AccumulatingOptimizer.micro_batch).parameters) == ["self", "weight", "last"]
    everything = [
        *shown.parameters.values(),
        *inspect.signature(fa.AccumulatingOptimizer.micro_batch).parameters.values(),
    ]
    assert not {p.kind for p in everything} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


class Duck:
    """Another library's optimizer that is no torch.optim.Optimizer."""

    param_groups = ()

    def step(self):
        raise AssertionError


def adamw():
    return torch.optim.AdamW(model().parameters())


WRITE = r"AccumulatingOptimizer\(torch\.optim\.AdamW\(model\.parameters\(\)\), \.\.\.\)$"
INSTEAD = {
    "model": (model, r"torch\..*\.Sequential; wrap the optimizer of the model: " + WRITE),
    "generator": (lambda: model().parameters(), r"generator; parameters go to the optimizer that is wrapped: " + WRITE),
    "list": (lambda: list(model().parameters()), r"list; parameters go to the optimizer.*" + WRITE),
    "groups": (lambda: [{"params": list(model().parameters())}], r"list; parameters go to the optimizer.*" + WRITE),
    "parameter": (lambda: nn.Parameter(torch.zeros(2)), r"torch\.nn\.parameter\.Parameter; parameters go to.*" + WRITE),
    "none": (lambda: None, r"None; write " + WRITE),
    "name": (lambda: "adamw", r"str; write " + WRITE),
    "optimizer_class": (
        lambda: torch.optim.AdamW,
        r"the class AdamW; build it first: AccumulatingOptimizer\(AdamW\(model",
    ),
    "scheduler": (
        lambda: torch.optim.lr_scheduler.StepLR(adamw(), 1),
        r"StepLR; wrap the scheduler's optimizer.*StepLR\(opt, \.\.\.\)$",
    ),
    "scaler": (
        lambda: torch.amp.GradScaler("cpu"),
        r"GradScaler; wrap the optimizer, and give the wrapper to.*scaler\.step\(opt\)$",
    ),
    "optimizers": (lambda: [adamw(), adamw()], r"list; wrap each of them: \[AccumulatingOptimizer\(optimizer"),
    "duck": (
        Duck,
        r"Duck; it has an optimizer's attributes and methods.*: class Inner\(Duck, torch\.optim\.Optimizer\): pass$",
    ),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_what_is_no_optimizer_is_answered_with_what_to_write_for_it(what):
    make, message = INSTEAD[what]
    with pytest.raises(TypeError, match=r"^optimizer must be a torch\.optim\.Optimizer, got .*" + message) as raised:
        fa.AccumulatingOptimizer(make(), 4)
    assert ("class Inner(" in str(raised.value)) is (what == "duck")


def test_a_model_before_the_optimizer_is_answered_by_the_model():
    """As Accelerate and DeepSpeed take them; the second argument here is accum_steps."""
    net = model()
    with pytest.raises(TypeError, match="Sequential; wrap the optimizer of the model"):
        fa.AccumulatingOptimizer(net, torch.optim.AdamW(net.parameters()))


# -- a loss divided twice --------------------------------------------------------------------------

N = 4
WAYS = {
    "/ N": lambda loss: loss / N,
    "* (1 / N)": lambda loss: loss * (1 / N),
    "in place": lambda loss: loss.div_(N),
    "/ float(N)": lambda loss: loss / float(N),
    "then a loss scale": lambda loss: torch.amp.GradScaler("cpu").scale(loss / N),
    "after another division": lambda loss: loss / 3 / N,
    "before another division": lambda loss: loss / N / 3,
}


def told_of(run):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [w for w in told if "had been divided" in str(w.message) or "were divided by" in str(w.message)]


def loop(net, divide, opt, steps=3 * N, loss_of=mean_loss, each=None, **kwargs):
    x, y = data()

    def run():
        for number in range(steps):
            opt.backward(divide(loss_of(net, x, y)), **kwargs)
            if each is None or number % each == each - 1:
                opt.step()

    return told_of(run)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("windows", ["counted", "callable", "ended by the caller"])
def test_a_loss_divided_by_the_number_of_micro_batches_is_warned_of_once(way, windows):
    net = model()
    steps = {"counted": N, "callable": lambda index: N if index else 2}.get(windows)
    opt = wrapped(net, steps)
    told = loop(net, WAYS[way], opt, each=N if steps is None else None)
    assert [str(w.message).partition(",")[0] for w in told] == [
        f"the losses that opt.backward() was given were divided by {N}"
    ]
    assert "Leave that division out, or pass reduction='none'" in str(told[0].message)
    assert told[0].filename == __file__


def test_a_division_by_2_is_warned_of_too():
    net = model()
    told = loop(net, lambda loss: loss / 2, wrapped(net, 2))
    assert len(told) == 1 and "divided by 2," in str(told[0].message)


def test_the_gradient_is_as_much_too_small_as_the_warning_says():
    net, (x, y) = model(), data()
    opt = wrapped(net, N)
    with pytest.warns(RuntimeWarning, match="divided by 4"):
        for part in parts(x, y, (6,) * N):
            opt.backward(mean_loss(net, *part) / N)
            opt.step()
    assert_grads(net, [g / N for g in gradient(model(), x, y)])


def summed(net, x, y):
    return mse_loss(net(x), y, reduction="sum")


def by_hand(net, x, y):
    return -(-((net(x) - y) ** 2).sum(1)).sum()


def tasks(net, x, y):
    out = net(x)
    return sum(mse_loss(out * k, y) for k in range(1, N + 1))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(
    ("divide", "settings", "call"),
    [
        pytest.param(lambda loss: loss, {}, {}, id="not divided"),
        pytest.param(lambda loss: loss / 3, {}, {}, id="by another number"),
        pytest.param(lambda loss: loss * N, {}, {}, id="multiplied"),
        *(
            pytest.param(lambda loss, by=by: loss / by * by, {}, {}, id=f"by {by}")
            for by in (math.nan, math.inf, -math.inf, 5e-324, 2**60, -N, 0.25)
        ),
        pytest.param(lambda loss: 0 * loss, {}, {}, id="by zero"),
        pytest.param(lambda loss: N / loss, {}, {}, id="the number is divided"),
        pytest.param(lambda loss: loss * N / N, {}, {}, id="multiplied before, to undo it"),
        pytest.param(lambda loss: loss / torch.tensor(float(N)), {}, {}, id="by a tensor, whose value is not read"),
        pytest.param(lambda loss: Twice.apply(loss / N), {}, {}, id="far inside"),
        pytest.param(lambda loss: loss / N, {"reduction": "none"}, {}, id="none"),
        pytest.param(lambda loss: loss / N, {"window_weight": 16}, {"weight": 4}, id="by the weight"),
        pytest.param(lambda loss: loss / N, {}, {"weight": N}, id="a number of items that is the weight"),
        pytest.param(lambda loss: loss / N, {}, {"loss_of": summed}, id="a sum over items"),
        pytest.param(lambda loss: loss / N, {}, {"loss_of": by_hand}, id="a sum over items, by hand"),
        pytest.param(lambda loss: loss / N, {}, {"loss_of": tasks}, id="as many terms"),
        pytest.param(lambda loss: loss / 1, {"accum_steps": 1}, {}, id="one micro-batch"),
        pytest.param(lambda loss: loss / N, {"accum_steps": lambda index: 3}, {}, id="of another length"),
    ],
)
def test_other_divisions_are_not_warned_of(divide, settings, call):
    net = model()
    settings = settings if settings.keys() & {"accum_steps", "window_weight"} else {"accum_steps": N, **settings}
    assert loop(net, divide, wrapped(net, **settings), **call) == []


@pytest.mark.parametrize("number", [0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308, -2.0])
@pytest.mark.parametrize("divides", [True, False])
def test_a_loss_times_any_number_is_looked_at_without_harm(divides, number):
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    loss = mean_loss(net, x, y)
    opt.backward(loss / number if divides and number else loss * number)
    opt.step()
    assert opt.progress["micro_batch"] == "1/2"


def test_a_mean_over_items_that_is_then_divided_is_warned_of():
    net = model()
    assert len(loop(net, lambda loss: loss / 24 / N, wrapped(net, N), loss_of=summed)) == 1


@pytest.mark.parametrize("windows", [N, None])
def test_passes_of_one_micro_batch_may_be_divided_by_their_number(windows):
    """FreeLB's: as many adversarial steps as the window has micro-batches."""
    net, (x, y) = model(), data()
    opt = wrapped(net, windows, reduction="mean" if windows else "none")

    def run():
        for _ in range(2 * N):
            for part in parts(x, y, (6,) * N):
                opt.backward(mean_loss(net, *part) / N)
            opt.step()
            opt.zero_grad()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the first micro-batch had")
        assert told_of(run) == []


def test_what_checkpointing_has_saved_is_not_asked_for():
    """A chunk of the loss, computed again in backward: asking would compute it earlier."""
    net, (x, y) = model(), data()
    opt, calls = wrapped(net, N), []

    def loss(out):
        calls.append(torch.is_grad_enabled())
        return cross_entropy(out, y.argmax(1)) * torch.tensor(1 / N, dtype=out.dtype)

    def run():
        for _ in range(N):
            opt.backward(checkpoint(loss, net(x), use_reentrant=False))
            opt.step()

    assert told_of(run) == []
    assert len(calls) == 2 * N


def test_a_division_is_not_held_against_a_window_that_is_not_its_own():
    """A window of plain passes between two: 2 divides one window's loss and is another's length."""
    p = torch.nn.Parameter(torch.ones(()))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1))
    opt.backward(p * 3.0 / 2)
    opt.step()
    opt.zero_grad()
    for _ in range(2):
        (p * 3.0).backward()
    opt.step()
    opt.zero_grad()
    opt.backward(p * 3.0)
    opt.step()


@pytest.mark.parametrize(
    ("passes", "steps", "blocks", "warned"),
    [(5, 0, False, True), (9, 0, False, True), (9, 1, False, False), (9, 0, True, False), (4, 0, False, False)],
    ids=["a pass too many", "step() forgotten", "one step()", "one micro-batch", "no more than a window"],
)
def test_passes_that_no_step_has_ended_are_told_of_by_flush(passes, steps, blocks, warned):
    p = torch.nn.Parameter(torch.ones(()))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1), 4)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with opt.micro_batch() if blocks else contextlib.nullcontext():
            for i in range(passes):
                (p * 3.0).backward()
                if i < steps:
                    opt.step()
        opt.flush()
    told = [str(w.message) for w in told if "flush() takes" in str(w.message)]
    assert len(told) == warned and all(f"takes {passes} backward passes" in text for text in told)
