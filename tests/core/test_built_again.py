"""A wrapper built again on the same parameters: the last has them, as with plain optimizers."""

import copy
import re
import warnings

import fusedaccum as fa
import pytest
import torch
from fusedaccum.extensions.main_grad import MainGrads
from torch import nn
from training import assert_same_parameters, data, gradient, mean_loss, model, parts, sgd, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")

SETTINGS = {
    "counted": {"accum_steps": 2},
    "weighed": {"window_weight": 2},
    "caller-owned": {},
    "drop-in": {"reduction": "none"},
    "16 bits": {"accum_steps": 2, "buffer_dtype": None},
    "held": {"accum_steps": 2, "nonfinite": "skip_micro_batch"},
    "clipped": {"accum_steps": 2, "max_grad_norm": 0.1},
}


def trained(net, opt, batches, steps=2):
    """``steps`` windows of two micro-batches."""
    for _ in range(steps):
        for number, batch in enumerate(batches):
            opt.backward(mean_loss(net, *batch), weight=1)
            if not (opt.accum_steps is None and opt.window_weight is None) or number == 1:
                opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("leaves", ["nothing", "a gradient", "an open window"])
@pytest.mark.parametrize("case", SETTINGS)
def test_a_search_over_learning_rates_under_one_name(case, leaves):
    """Each rate starts from the same weights. The oracle's wrapper has parameters of its own."""
    dtype, settings = torch.bfloat16 if case == "16 bits" else torch.float32, SETTINGS[case]
    net, (x, y) = model(dtype), data(dtype=dtype)
    start, batches = copy.deepcopy(net.state_dict()), parts(x, y, (12, 12))
    for number, lr in enumerate((0.3, 0.1, 0.03)):
        net.load_state_dict(start)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=lr), **settings)
        dropped = number > 0 and leaves == "an open window"
        assert [
            bool(re.search(r"open window of an.*around SGD.*dropped.*flush\(\)", str(w.message))) for w in told
        ] == ([True] * dropped)
        assert all(w.filename == __file__ for w in told)
        fresh = model(dtype)
        trained(fresh, fa.AccumulatingOptimizer(torch.optim.SGD(fresh.parameters(), lr=lr), **settings), batches)
        trained(net, opt, batches)
        assert_same_parameters(net, fresh, 0)
        if leaves != "nothing":
            opt.backward(mean_loss(net, x, y), weight=1)
        if leaves == "a gradient":
            opt.step()
            opt.flush()
            assert net[0].weight.grad is not None


CALLS = {
    "step": lambda opt, p: opt.step(),
    "step(closure)": lambda opt, p: opt.step(lambda: pytest.fail("called")),
    "flush": lambda opt, p: opt.flush(),
    "reset": lambda opt, p: opt.reset(),
    "zero_grad": lambda opt, p: opt.zero_grad(),
    "backward": lambda opt, p: opt.backward(p.sum()),
    "micro_batch": lambda opt, p: opt.micro_batch().__enter__(),
    "normalize_": lambda opt, p: opt.normalize_(),
    "state_dict": lambda opt, p: opt.state_dict(),
    "load_state_dict": lambda opt, p: opt.load_state_dict(opt.optimizer.state_dict()),
    "add_param_group": lambda opt, p: opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "param_groups": lambda opt, p: setattr(opt, "param_groups", opt.param_groups),
    "deepcopy": lambda opt, p: copy.deepcopy(opt),
    "record_loss": lambda opt, p: opt.record_loss(1.0),
}


@pytest.mark.parametrize("open_window", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_one_that_lost_its_parameters_says_so_at_every_call(call, open_window):
    p = nn.Parameter(torch.ones(2))
    old = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    if open_window:
        p.sum().backward()
        with pytest.warns(RuntimeWarning, match="open window"):
            new = fa.AccumulatingOptimizer(torch.optim.AdamW([p], lr=1.0), 1)
    else:
        new = fa.AccumulatingOptimizer(torch.optim.AdamW([p], lr=1.0), 1)
    groups = copy.copy(old.param_groups)
    with pytest.raises(
        RuntimeError, match=r"around SGD.*has lost its parameters to.*around AdamW, built at test_built_again\.py:\d"
    ):
        CALLS[call](old, p)
    assert old.param_groups == groups
    p.sum().backward()
    new.step()
    assert new.updated and new.last_window.micro_batches == 1


def test_reading_from_the_one_that_lost_its_parameters_is_no_call():
    net, (x, y) = model(), data()
    old = wrapped(net, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(old, 1)
    mean_loss(net, x, y).backward()
    old.step()
    wrapped(net, 1)
    assert old.last_window.micro_batches == 1 and old.updated and "SGD" in repr(old) and old.progress["window"] == 1
    scheduler.step()
    assert old.param_groups[0]["lr"] < 0.1


def test_a_gradient_that_a_closed_window_has_left_is_gone():
    net, (x, y) = model(), data()
    big = twin(net)
    opt = wrapped(net, 1)
    mean_loss(net, x, y).backward()
    opt.step()
    big.load_state_dict(net.state_dict())
    opt = wrapped(net, 1)
    assert all(p.grad is None for p in net.parameters())
    plain = sgd(big.parameters())
    for n, o in ((net, opt), (big, plain)):
        mean_loss(n, x, y).backward()
        o.step()
    assert_same_parameters(net, big, 0)


@pytest.mark.parametrize(
    "what",
    ["a gradient by hand", "a bad argument", "a complex parameter", "inside a block", "ranks that are not there"],
)
def test_one_that_cannot_be_built_takes_nothing_from_the_old_one(what):
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    batches = parts(x, y, (12, 12))
    mean_loss(net, *batches[0]).backward()
    opt.step()
    inner, settings, error = torch.optim.SGD(net.parameters(), lr=1.0), {}, ValueError
    if what == "a gradient by hand":
        held = net[0].weight.grad
        net[0].weight.grad = torch.ones_like(held)
    elif what == "a bad argument":
        settings = {"reduction": "average"}
    elif what == "a complex parameter":
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    elif what == "ranks that are not there":
        settings = {"comm_dtype": torch.bfloat16}
    else:
        error = RuntimeError
    if what == "inside a block":
        with opt.micro_batch():
            with pytest.raises(RuntimeError, match=r"inside micro_batch\(\); build another after the block"):
                fa.AccumulatingOptimizer(inner)
            mean_loss(net, *batches[1]).backward()
    else:
        with pytest.raises(error):
            fa.AccumulatingOptimizer(inner, 2, **settings)
        if what == "a gradient by hand":
            net[0].weight.grad = held
        mean_loss(net, *batches[1]).backward()
    expected = gradient(net, x, y)
    opt.step()
    for p, g in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_run_that_was_broken_off_and_whose_traceback_is_alive(where):
    """As a notebook keeps it in sys.last_traceback, with all that its frames hold."""
    net, (x, y) = model(), data()
    broken = [True]

    def interrupt(*_):
        if broken:
            raise KeyboardInterrupt

    def run():
        opt = wrapped(net, 1)
        if where == "step":
            opt.register_step_pre_hook(interrupt)
        out = net(x)
        if where == "backward":
            out.register_hook(interrupt)
        loss = nn.functional.mse_loss(out, y)
        if where == "forward":
            interrupt()
        loss.backward()
        opt.step()
        return opt

    with pytest.raises(KeyboardInterrupt) as alive:
        run()
    broken.clear()
    before = twin(net)
    opt = run()
    assert opt.updated and alive.tb is not None
    plain = sgd(before.parameters())
    mean_loss(before, x, y).backward()
    plain.step()
    assert_same_parameters(net, before, 0)


def test_two_that_share_a_parameter_on_purpose_meet_the_error_at_the_firsts_step():
    shared, own = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    first = fa.AccumulatingOptimizer(torch.optim.SGD([shared, own], lr=1.0), 2)
    second = fa.AccumulatingOptimizer(torch.optim.SGD([shared], lr=1.0), 2)
    (shared + own).sum().backward()
    with pytest.raises(RuntimeError, match=r"Of two optimizers for one parameter, wrap only one"):
        first.step()
    second.step()
    assert second.progress["micro_batch"] == "1/2"


def test_one_that_takes_a_parameter_in_later_has_it():
    shared, own = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    first = fa.AccumulatingOptimizer(torch.optim.SGD([shared], lr=1.0), 1)
    second = fa.AccumulatingOptimizer(torch.optim.SGD([own], lr=1.0), 1)
    second.add_param_group({"params": [shared]})
    (shared + 2 * own).sum().backward()
    second.step()
    assert (shared.item(), own.item()) == (-1, -2)
    with pytest.raises(RuntimeError, match="has lost its parameters"):
        first.step()


def test_the_same_inner_optimizer_wrapped_again_keeps_its_state():
    net, (x, y) = model(), data()
    big = twin(net)
    inner, plain = sgd(net.parameters()), sgd(big.parameters())
    for _ in range(3):
        opt = fa.AccumulatingOptimizer(inner, 2)
        for batch in parts(x, y, (12, 12)):
            mean_loss(net, *batch).backward()
            opt.step()
        plain.zero_grad()
        mean_loss(big, x, y).backward()
        plain.step()
    assert_same_parameters(net, big, 1e-12)


def test_layers_that_add_to_main_grad_add_to_the_new_ones():
    layer = nn.Linear(3, 2)
    layer.weight.grad_added_to_main_grad = False
    old = wrapped(layer, 2)
    before = layer.weight.main_grad
    new = wrapped(layer, 2)
    ours, theirs = (opt._accumulation.extensions.of(MainGrads) for opt in (new, old))
    assert layer.weight.main_grad is not before and ours.slots and not theirs.slots
    del old, theirs
    assert layer.weight.main_grad is ours.slots[0].buffer


@pytest.mark.parametrize("asked", [None, torch.bfloat16, torch.float32, "any"])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, None])
@pytest.mark.parametrize("leaves", ["nothing", "a gradient"])
def test_the_new_one_finds_the_grad_dtype_that_the_user_had_set(buffer_dtype, asked, leaves):
    """Not None, which the old one has made of it; and the buffer follows it."""
    seen = []
    for times in (1, 3):
        p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        if asked is not None:
            p.grad_dtype = None if asked == "any" else asked
        for number in range(times):
            opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2, buffer_dtype=buffer_dtype)
            if leaves == "a gradient" and number < times - 1:
                for _ in range(2):
                    p.sum().backward()
                    opt.step()
        p.data.zero_()
        for value in (256.0, 1.0):
            (p * value).sum().backward()
            opt.step()
        seen.append((opt._sums.buffers.slots[0].dtype, p.tolist()))
        del opt
        p.grad = None
        seen[-1] += (p.grad_dtype,)
    assert seen[0] == seen[1]
