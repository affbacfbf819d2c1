"""state_dict() is PyTorch's plus one key; training resumes bit for bit, also inside a window."""

import copy
import gc
import io
import math
import os
import subprocess
import sys
import textwrap
import warnings

import fusedaccum as fa
import pytest
import torch
from training import (
    assert_same_parameters,
    big_batch_step,
    data,
    grads,
    mean_loss,
    model,
    parts,
    sgd,
    twin,
    wrapped,
    wrapper_of,
    zeros,
)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def adamw(ps):
    return torch.optim.AdamW(ps, lr=1e-2, eps=1e-3)


def train(net, opt, batches, scaler=None):
    for xs, ys in batches:
        loss = mean_loss(net, xs, ys)
        opt.backward(loss if scaler is None else scaler.scale(loss), weight=len(xs))
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
        opt.zero_grad()


SETUPS = {
    "fp32": (torch.float32, {}),
    "fp64 clipped": (torch.float64, {"max_grad_norm": 0.05}),
    "bf16": (torch.bfloat16, {}),
    "bf16 masters": (torch.bfloat16, {"master_weights": True}),
    "bf16 buffers": (torch.bfloat16, {"buffer_dtype": None}),
    "bf16 compensated": (torch.bfloat16, {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}),
    "bf16 stochastic": (torch.bfloat16, {"buffer_dtype": torch.bfloat16, "rounding": "stochastic"}),
    "skip_window": (torch.float32, {"nonfinite": "skip_window"}),
    "skip_micro_batch": (torch.float32, {"nonfinite": "skip_micro_batch"}),
    "weighed": (torch.float32, {"accum_steps": None, "window_weight": 20}),
    "callable": (torch.float32, {"accum_steps": lambda index: 3 + index}),
}


@pytest.mark.parametrize("optimizer_first", [True, False], ids=["optimizer first", "model first"])
@pytest.mark.parametrize("at", [2, 3, 4, 5])
@pytest.mark.parametrize("setup", SETUPS)
def test_resuming_inside_a_window_is_bit_identical(setup, at, optimizer_first):
    dtype, kwargs = SETUPS[setup]
    kwargs = {"accum_steps": 4, "make": adamw, **kwargs}
    x, y = data(48, dtype=dtype)
    batches = parts(x, y, (1, 11, 4, 8, 6, 6, 10, 2))
    torch.manual_seed(5)
    net = model(dtype)
    opt = wrapped(net, **kwargs)
    train(net, opt, batches[:at])
    saved = through_a_file({"model": net.state_dict(), "opt": opt.state_dict()})
    train(net, opt, batches[at:])

    torch.manual_seed(6)
    net2 = model(dtype, seed=9)
    opt2 = wrapped(net2, **kwargs)
    loads = [lambda: opt2.load_state_dict(saved["opt"]), lambda: net2.load_state_dict(saved["model"])]
    for load in loads if optimizer_first else reversed(loads):
        load()
    train(net2, opt2, batches[at:])
    assert opt2.updated == opt.updated
    assert_same_parameters(net2, net, 0)
    for a, b in zip(grads(net), grads(net2), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_resuming_between_backward_and_step():
    x, y = data()
    batches = parts(x, y, (4, 8, 12))
    net, net2 = model(), model()
    opt, opt2 = wrapped(net, 3), wrapped(net2, 3)
    opt.backward(mean_loss(net, *batches[0]), weight=4)
    opt2.load_state_dict(through_a_file(opt.state_dict()))
    for n, o in ((net, opt), (net2, opt2)):
        o.step()
        train(n, o, batches[1:])
        assert o.updated
    assert_same_parameters(net2, net, 0)


def test_resuming_with_a_scaler_whose_scale_has_changed_in_the_window():
    x, y = data(48, dtype=torch.float32)
    batches = parts(x, y, (1, 11, 4, 8, 6, 6, 10, 2))
    net, net2 = model(torch.float32), model(torch.float32, seed=9)
    opt, opt2 = wrapped(net, 4), wrapped(net2, 4)
    scaler, scaler2 = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2))
    train(net, opt, batches[:3], scaler)
    net2.load_state_dict(net.state_dict())
    opt2.load_state_dict(through_a_file(opt.state_dict()))
    scaler2.load_state_dict(through_a_file(scaler.state_dict()))
    for n, o, s in ((net, opt, scaler), (net2, opt2, scaler2)):
        train(n, o, batches[3:], s)
    assert_same_parameters(net2, net, 0)


@pytest.mark.parametrize("overflow", [None, 1], ids=["clean", "overflow"])
def test_resuming_with_a_scaler_whose_scale_changes_before_it_is_seen_plainly(overflow):
    """With unscale_() at every window's end (clipping by hand), the wrapper sees no scale there."""
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    for window in range(4):
        for i, (xs, ys) in enumerate(parts(x, y, (12, 12))):
            factor = float("inf") if window == overflow and i == 0 else 1
            (scaler.scale(mean_loss(net, xs, ys)) * factor).backward()
            if i == 1:
                opt.load_state_dict(opt.state_dict())
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        assert opt.updated == (window != overflow)
        if opt.updated:
            big_batch_step(big, plain, x, y)
        assert_same_parameters(net, big, 1e-6)


def test_a_scale_that_is_shown_after_resuming_is_known_when_unscale_hides_it_inside_a_window():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for window in range(2):
        for i, (xs, ys) in enumerate(parts(x, y, (8, 8, 8))):
            if (window, i) == (0, 1):
                opt.load_state_dict(through_a_file(opt.state_dict()))
            scaler.scale(mean_loss(net, xs, ys)).backward()
            if (window, i) == (1, 0):
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        big_batch_step(big, plain, x, y)
        assert_same_parameters(net, big, 1e-6)


def test_a_state_with_masters_loads_into_a_wrapper_without():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    with_masters = wrapped(net, 1, master_weights=True)
    train(net, with_masters, [(x, y)])
    before, state = twin(net), with_masters.state_dict()
    del with_masters
    opt = wrapped(net, 1)
    opt.load_state_dict(state)
    assert_same_parameters(net, before, 0)
    train(net, opt, [(x, y)])
    assert opt.updated


def test_layout_is_pytorchs_plus_one_key_of_tensors_and_plain_values():
    net, (x, y) = model(), data()
    opt = wrapped(net, 3, make=adamw)
    train(net, opt, parts(x, y, (4, 4, 4, 12)))
    state = opt.state_dict()
    plain = opt.optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "fusedaccum"}
    assert state["param_groups"] == plain["param_groups"] and state["state"].keys() == plain["state"].keys()

    def check(value):
        if isinstance(value, dict):
            for v in value.values():
                check(v)
        elif isinstance(value, (list, tuple)):
            for v in value:
                check(v)
        else:
            assert value is None or isinstance(value, (torch.Tensor, int, float, str, bool)), type(value)

    check(state["fusedaccum"])


def test_plain_state_loads_into_the_wrapper_and_the_wrappers_into_a_plain_optimizer():
    x, y = data()
    net, net2 = model(), model()
    plain, opt = adamw(net.parameters()), wrapped(net2, 2, make=adamw)
    mean_loss(net, x, y).backward()
    plain.step()
    net2.load_state_dict(net.state_dict())
    mean_loss(net2, x, y).backward()
    opt.step()
    opt.load_state_dict(through_a_file(plain.state_dict()))  # torch would share the tensors
    train(net2, opt, parts(x, y, (12, 12)))
    plain.zero_grad()
    mean_loss(net, x, y).backward()
    plain.step()
    assert_same_parameters(net2, net, 1e-12)
    plain.load_state_dict(through_a_file(opt.state_dict()))
    assert {int(s["step"]) for s in plain.state.values()} == {2}


def test_the_inner_optimizer_is_given_its_own_state_alone():
    net, (x, y) = model(), data()
    opt, seen = wrapped(net, 2, make=adamw), []
    train(net, opt, parts(x, y, (12, 8, 4)))
    opt.optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(set(state)))
    opt.load_state_dict(opt.state_dict())
    assert seen == [{"state", "param_groups"}]


def test_saved_state_is_a_copy_of_the_window():
    net, (x, y) = model(), data()
    opt = wrapped(net, 3)
    train(net, opt, [(x, y)])
    state = opt.state_dict()
    before = {k: v["sum"].clone() for k, v in state["fusedaccum"]["buffers"].items()}
    train(net, opt, [(x, y)])
    assert all(torch.equal(v["sum"], before[k]) for k, v in state["fusedaccum"]["buffers"].items())
    opt.load_state_dict(state)  # back to an earlier state
    for p, k in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.grad, before[k])


def test_saved_loss_scale_is_a_copy_of_the_scalers():
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    opt = wrapped(net, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    train(net, opt, [(x, y)], scaler)
    saved = opt.state_dict()["fusedaccum"]["loss_scale"]["scale"]
    before = saved.clone()
    train(net, opt, [(x, y)] * 2, scaler)
    assert scaler.get_scale() > 64 and torch.equal(saved, before)


@pytest.mark.filterwarnings("ignore:every p.grad was set to None")
@pytest.mark.parametrize("how", ["saved", "loaded", "copied"])
def test_a_window_that_its_caller_has_dropped_stays_dropped(how):
    """By model.zero_grad(). Its micro-batch used to come back, without its gradient."""
    net, (x, y) = model(), data()
    opt = wrapped(net)
    mean_loss(net, x, y * 5).backward()
    net.zero_grad()
    if how == "copied":
        net, opt = copy.deepcopy((net, opt))
    else:
        state = opt.state_dict()
        if how == "loaded":
            net = model()
            opt = wrapped(net)
            opt.load_state_dict(state)
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.last_window.micro_batches == 1
    big = model()
    big_batch_step(big, sgd(big.parameters()), x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize(
    "settings", [{"nonfinite": "skip_window"}, {"nonfinite": "skip_window", "max_grad_norm": 1.0}], ids=str
)
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1), (2,), ()], ids=str)
def test_what_was_not_finite_before_a_checkpoint_inside_a_micro_batch_is_counted_after_it(settings, bad):
    """Two of a micro-batch's three passes are in the checkpoint. The saved run goes on, too."""
    net, (x, y) = model(), data()
    opt = wrapped(net, 2, **settings)
    for i in range(3):
        if i == 2:
            resumed_net = twin(net)
            resumed = wrapped(resumed_net, 2, **settings)
            resumed.load_state_dict(through_a_file(opt.state_dict()))
        for each in (net, resumed_net) if i == 2 else (net,):
            (mean_loss(each, x, y) * (float("nan") if i in bad else 1.0)).backward()
    for each, its in ((net, opt), (resumed_net, resumed)):
        its.step()
        mean_loss(each, x, y).backward()
        its.step()
        assert its.last_window.micro_batches == 2 and int(its.last_window.nonfinite) == bool(bad)
        assert bool(its.updated) == (not bad)


def test_what_was_not_finite_but_has_been_replaced_is_still_counted_after_a_checkpoint():
    """The sums are finite again, so that the count alone tells of it."""
    net, (x, y) = model(), data()
    opt, resumed = wrapped(net, 1, nonfinite="skip_window"), wrapped(model(), 1, nonfinite="skip_window")
    (mean_loss(net, x, y) * float("inf")).backward()
    for p in net.parameters():
        p.grad.zero_()
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    for its in (opt, resumed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what was written to p.grad
            its.step()
        assert int(its.last_window.nonfinite) == 1 and not its.updated


@pytest.mark.filterwarnings("ignore:.*grad was set to None")
def test_what_a_counted_window_has_lost_has_no_norm_either():
    (x, y), net = data(), model()
    opt = wrapped(net, 2, nonfinite="skip_window")
    mean_loss(net, x, y).backward()
    opt.step()
    net[0].weight.grad = None
    resumed = wrapped(model(), 2, nonfinite="skip_window")
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    assert resumed.state_dict()["fusedaccum"]["norms"] == opt.state_dict()["fusedaccum"]["norms"] == []


@pytest.mark.parametrize(
    ("settings", "factor", "weight"), [({"nonfinite": "skip_window"}, float("nan"), 12), ({}, 1.0, 0)]
)
def test_saved_again_after_a_window_that_was_not_applied(settings, factor, weight):
    (x, y), resumed = data(), wrapped(model(), 1, max_grad_norm=1.0, **settings)
    net = model()
    opt = wrapped(net, 1, max_grad_norm=1.0, **settings)
    opt.backward(mean_loss(net, x, y) * factor, weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it warns that the window has weight 0
        opt.step()
    resumed.load_state_dict(through_a_file(opt.state_dict()))
    assert resumed.state_dict()["fusedaccum"]["index"] == 1


@pytest.mark.parametrize(
    "saved, loaded, named",
    [
        ({"accum_steps": 3}, {"accum_steps": 4}, "accum_steps=3"),
        ({"accum_steps": 3}, {"window_weight": 100}, "accum_steps=3"),
        ({"accum_steps": 3}, {"accum_steps": 3, "reduction": "sum"}, "reduction=mean"),
        ({"accum_steps": 3}, {"accum_steps": 3, "buffer_dtype": None}, "buffer_dtype=torch.float32"),
    ],
    ids=["length", "kind", "reduction", "buffer_dtype"],
)
def test_open_window_of_other_settings_is_refused_and_nothing_is_loaded(saved, loaded, named):
    net, net2, (x, y) = model(), model(), data()
    opt, other = wrapped(net, make=adamw, **saved), wrapped(net2, make=adamw, **loaded)
    train(net, opt, [(x, y)])
    mean_loss(net2, x, y).backward()
    held = grads(net2)
    with pytest.raises(ValueError, match=named):
        other.load_state_dict(opt.state_dict())
    for p, g in zip(net2.parameters(), held, strict=True):
        assert torch.equal(p.grad, g)


@pytest.mark.parametrize("adapts", [False, True])
def test_accum_steps_may_differ_when_the_window_is_empty(adapts):
    net, net2, (x, y) = model(), model(), data()
    settings = adapting(2) if adapts else {"accum_steps": 2}
    opt, other = wrapped(net, make=adamw, **settings), wrapped(net2, 3, make=adamw)
    train(net, opt, parts(x, y, (12, 12)))
    other.load_state_dict(opt.state_dict())
    assert {int(s["step"]) for s in other.state.values()} == {1}


def adapting(start):
    return {"accum_steps": fa.schedules.noise_scale(start=start, at_most=8), "noise_scale": 0.9}


def test_an_open_window_keeps_the_length_that_its_schedule_has_found():
    net, net2, (x, y) = model(), model(), data()
    opt, other = wrapped(net, **adapting(3)), wrapped(net2, **adapting(2))
    train(net, opt, [(x, y)])
    other.load_state_dict(opt.state_dict())
    assert other.progress["micro_batch"] == opt.progress["micro_batch"] == "1/3"


@pytest.mark.parametrize("settings", [{"accum_steps": 3}, {"window_weight": 3 * 24}], ids=str)
def test_accum_steps_may_differ_when_every_micro_batch_of_the_window_was_dropped(settings):
    net, net2, (x, y) = model(), model(), data()
    opt = wrapped(net, 8, nonfinite="skip_micro_batch")
    other = wrapped(net2, nonfinite="skip_micro_batch", **settings)
    train(net, opt, [(x * math.nan, y)])
    other.load_state_dict(opt.state_dict())
    assert other.progress["micro_batch"] in ("0/3", 0)
    for _ in range(3):
        assert not other.updated
        train(net2, other, [(x, y)])
    assert other.updated and other.last_window.nonfinite == 1


def test_a_window_that_holds_nothing_is_as_long_as_the_schedule_that_was_saved_says():
    net, net2, (x, y) = model(), model(), data()
    opt, other = (wrapped(n, nonfinite="skip_micro_batch", **adapting(2)) for n in (net, net2))
    opt.settings.schedule.adaptive.steps = 5  # grown
    train(net, opt, [(x * math.nan, y)])
    assert opt.progress["micro_batch"] == "0/5"
    other.load_state_dict(opt.state_dict())
    assert other.progress["micro_batch"] == "0/5"


def test_stochastic_rounding_goes_on_from_a_checkpoint_that_rounded_to_nearest():
    p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    settings = {"accum_steps": 4, "buffer_dtype": torch.bfloat16}
    state = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), **settings).state_dict()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), rounding="stochastic", **settings)
    opt.load_state_dict(state)
    for factor in (0.7, 1.1, 0.9):
        (p * factor).sum().backward()
        opt.step()
    assert len(p.grad.unique()) > 1


def test_checkpoint_of_another_model_is_refused_by_name():
    net = model()
    other = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 5)).double()
    longer = torch.nn.Linear(6, 7).double()
    opt = wrapped(net, 2)
    with pytest.raises(ValueError, match="4 parameters and the optimizer has 6"):
        opt.load_state_dict(wrapped(other, 2).state_dict())
    wrong = wrapped(longer, 2).state_dict()
    with pytest.raises(ValueError, match=r"shape \(7, 6\) for parameter .*\[0\].* \(10, 6\)"):
        wrapped(torch.nn.Linear(6, 10).double(), 2).load_state_dict(wrong)


RUN = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
from training import data, mean_loss, model, parts, wrapped
path, kill_at, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
x, y = data(240, dtype=torch.bfloat16)
batches = parts(x, y, [8] * 30)
net = model(torch.bfloat16)
opt = wrapped(net, 4, make=lambda ps: torch.optim.AdamW(ps, lr=1e-2), master_weights=True, max_grad_norm=0.5)
start = 0
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    net.load_state_dict(saved["model"]); opt.load_state_dict(saved["opt"]); start = saved["at"]
for i in range(start, len(batches)):
    mean_loss(net, *batches[i]).backward()
    opt.step(); opt.zero_grad()
    if i + 1 == kill_at:
        torch.save({{"model": net.state_dict(), "opt": opt.state_dict(), "at": i + 1}}, path)
        os.kill(os.getpid(), signal.SIGKILL)
opt.flush()
torch.save(net.state_dict(), out)
"""


def test_run_killed_inside_a_window_and_resumed_ends_bit_identical(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN.format(tests=os.path.dirname(os.path.dirname(__file__)))))

    def run(checkpoint, kill_at, out):
        command = [sys.executable, str(script), str(tmp_path / checkpoint), str(kill_at), str(tmp_path / out)]
        return subprocess.run(command, check=False).returncode

    assert run("none", 0, "whole.pt") == 0
    assert run("checkpoint", 18, "killed.pt") == -9
    assert run("checkpoint", 0, "resumed.pt") == 0
    whole, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "resumed.pt"))
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)


MOVES = {
    "whole": (lambda net: net.double(), {}),
    "in part": (lambda net: net[2].double(), {}),
    "there and back": (lambda net: net.double().float(), {}),
    "masters": (lambda net: net.bfloat16(), {"master_weights": True}),
    "16-bit buffers": (lambda net: net.bfloat16(), {"buffer_dtype": None}),
}


@pytest.mark.usefixtures("each_intake")
@pytest.mark.parametrize("case", MOVES)
def test_loading_takes_a_model_that_was_moved_after_it_was_wrapped(case):
    """As Accelerate's `prepare` and Hugging Face's Trainer do.

    (A move to another dtype loses the hooks, as one to a GPU does.)
    """
    move, kwargs = MOVES[case]
    nets = [model(torch.float32), model(torch.float32)]
    move(nets[1])
    opts = [wrapped(net, 2, **kwargs) for net in nets]
    move(nets[0])
    opts[0].load_state_dict(opts[0].state_dict())
    x, y = data(dtype=torch.float32)

    class Casts(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            for layer in self.net:
                x = layer(x.to(next(layer.parameters(), x).dtype))
            return x.to(y.dtype)

    for net, opt in zip(nets, opts, strict=True):
        train(Casts(net), opt, parts(x, y, (6, 6, 6, 6)))
        assert opt.updated and opt.last_window.micro_batches == 2
    assert_same_parameters(*nets, 0)


def test_loading_lends_main_grad_anew_to_a_model_that_was_moved():
    net = model(torch.float32)
    net[0].weight.grad_added_to_main_grad = False
    opt = wrapped(net, 2)
    net.double()
    opt.load_state_dict(opt.state_dict())
    gc.collect()  # or what was built before the move might still take main_grad back
    assert net[0].weight.main_grad.dtype == torch.float64


@pytest.mark.parametrize("settings", [{"accum_steps": 2}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("loads", ["its own", "a plain one's"])
def test_loading_between_windows_leaves_p_grad_as_it_is(loads, settings):
    """As plain PyTorch does: after it, a drop-in steps again on the same gradient."""
    net, (x, y) = model(), data()
    opt = wrapped(net, make=torch.optim.AdamW, **settings)
    for batch in parts(x, y, (12, 12)):
        mean_loss(net, *batch).backward()
        if settings == {"accum_steps": 2}:
            opt.step()
    if settings != {"accum_steps": 2}:
        opt.step()
    big = twin(net)
    held = [p.grad for p in net.parameters()]
    opt.load_state_dict(opt.state_dict() if loads == "its own" else copy.deepcopy(opt.optimizer.state_dict()))
    assert all(p.grad is g for p, g in zip(net.parameters(), held, strict=True))
    if settings == {"reduction": "none"}:
        plain = torch.optim.AdamW(big.parameters())
        plain.load_state_dict(copy.deepcopy(opt.optimizer.state_dict()))
        for p, g in zip(big.parameters(), held, strict=True):
            p.grad = g.clone()
        plain.step()
        opt.step()
        assert_same_parameters(net, big, 0)


def test_loading_a_window_leaves_nothing_of_the_last_windows_gradient():
    def made():
        a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        return a, b, fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=1.0), 2)

    a, b, opt = made()
    for _ in range(2):
        (a + 8 * b).sum().backward()
        opt.step()
    theirs, _, other = made()
    theirs.sum().backward()
    other.step()
    opt.load_state_dict(other.state_dict())
    assert b.grad is None and opt.progress["micro_batch"] == "1/2"
    (3 * a).sum().backward()
    opt.step()
    assert a.tolist() == [-1 - 2] * 2 and b.tolist() == [-8] * 2


@pytest.mark.parametrize("loads", ["a window", "no window"])
def test_loading_into_an_open_window_drops_it(loads):
    net, (x, y) = model(), data()
    opt = wrapped(net, 3)
    if loads == "a window":
        mean_loss(net, x, y).backward()
        opt.step()
    saved = copy.deepcopy(opt.state_dict())
    held = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    mean_loss(net, 5 * x, y).backward()
    opt.load_state_dict(saved)
    assert opt.progress["micro_batch"] == ("1/3" if loads == "a window" else "0/3")
    for p, g in zip(net.parameters(), held, strict=True):
        assert (p.grad is None) == (g is None) and (g is None or torch.equal(p.grad, g))


def test_loading_drops_a_window_whose_step_was_broken_off():
    p, fail = torch.nn.Parameter(torch.zeros(1)), [True]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1)
    opt.register_step_pre_hook(lambda *_: 1 / 0 if fail.pop() else None)
    saved = copy.deepcopy(opt.state_dict())
    p.sum().backward()
    with pytest.raises(ZeroDivisionError):
        opt.step()
    opt.load_state_dict(saved)
    fail.append(False)
    opt.step()
    assert p.item() == 0


def test_state_that_the_inner_optimizer_refuses_leaves_the_open_window():
    p = zeros()
    opt = wrapper_of([p], 2)
    p.sum().backward()
    opt.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    p.sum().backward()
    opt.step()
    assert opt.updated and p.item() == -1


def test_deepcopy_with_plain_tensors_as_parameters():
    p = torch.zeros(2, requires_grad=True)
    opt = wrapper_of([p], 2)
    p.sum().backward()
    opt.step()
    other = copy.deepcopy(opt)
    q = other.param_groups[0]["params"][0]
    q.sum().backward()
    other.step()
    assert q.tolist() == [-1, -1] and p.tolist() == [0, 0]


def test_restored_buffers_share_their_storage():
    net = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
    opt = wrapper_of(list(net.parameters()), 3)
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    opt.load_state_dict(opt.state_dict())
    assert len({p.grad.untyped_storage().data_ptr() for p in net.parameters()}) == 1
