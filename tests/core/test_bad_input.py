"""Wrong arguments change nothing; the error names the argument, the value and the fix."""

import math
from pathlib import Path

import fusedaccum as fa
import numpy as np
import pytest
import torch
from torch import nn
from training import data, grads, mean_loss, model, sgd, wrapped


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"accum_steps": 0}, ValueError, "accum_steps must be at least 1, got 0"),
        ({"accum_steps": -3}, ValueError, "accum_steps must be at least 1, got -3"),
        (
            {"accum_steps": 2.0},
            ValueError,
            "accum_steps must be an int, got the float 2.0; write 2; .*desired // tolerable",
        ),
        ({"accum_steps": 100 / 48}, ValueError, "round it"),
        ({"accum_steps": "8"}, TypeError, "accum_steps must be an int.*'8'"),
        ({"accum_steps": True}, TypeError, "accum_steps must be an int.*True"),
        ({"accum_steps": 4, "window_weight": 100}, ValueError, "accum_steps=4 and window_weight=100"),
        ({"window_weight": 0}, ValueError, "window_weight must be greater than 0"),
        ({"window_weight": -1}, ValueError, "window_weight must be finite and not negative, got -1"),
        ({"window_weight": math.nan}, ValueError, "window_weight must be finite"),
        ({"window_weight": "many"}, TypeError, "window_weight must be a number.*'many'"),
        ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
        ({"buffer_dtype": torch.int32}, ValueError, "buffer_dtype must be one of .*torch.int32"),
        ({"buffer_dtype": "fp32"}, ValueError, "buffer_dtype must be one of .*'fp32'"),
        ({"buffer_device": "cuda"}, ValueError, "buffer_device must be 'cpu', or None .*got 'cuda'"),
        ({"buffer_device": "cpu:1"}, ValueError, "buffer_device must be 'cpu', or None .*got 'cpu:1'"),
        ({"buffer_device": 0}, ValueError, "buffer_device must be 'cpu', or None .*got 0"),
        ({"rounding": "up"}, ValueError, "rounding must be one of .*'up'"),
        ({"rounding": "stochastic"}, ValueError, "rounding='stochastic' is for 16-bit buffers"),
        ({"master_weights": "yes"}, ValueError, "master_weights must be one of True, False, 'split', got 'yes'"),
        ({"master_weights": 1}, ValueError, "master_weights must be one of True, False, 'split', got 1"),
        ({"master_weights": np.True_}, ValueError, "master_weights must be one of .*True"),
        ({"shard": 0}, ValueError, "shard must be one of True, False, got 0"),
        ({"master_weights": True, "buffer_dtype": torch.bfloat16}, ValueError, "use buffer_dtype=torch.float32"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be greater than 0, got 0"),
        ({"max_grad_norm": math.nan}, ValueError, "max_grad_norm must be greater than 0, got nan"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a number or None, got '1'"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite must be one of .*'ignore'"),
        ({"backend": "tpu"}, ValueError, "backend.*'tpu'"),
        ({"backend": "triton"}, RuntimeError, "triton.*not available"),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, dict) else "",
)
def test_constructor_arguments(kwargs, error, message):
    if kwargs.get("backend") == "triton" and torch.cuda.is_available():
        pytest.skip("a GPU is here, so triton may be available")
    net, (x, y) = model(), data()
    with pytest.raises(error, match=message):
        wrapped(net, **kwargs)
    mean_loss(net, x, y).backward()  # and the model is not hooked
    assert all(p.grad is not None for p in net.parameters())


def test_environment_names_a_backend_that_is_not_there(monkeypatch):
    monkeypatch.setenv("FUSEDACCUM_BACKEND", "tpu")
    with pytest.raises(ValueError, match=r"FUSEDACCUM_BACKEND.*'tpu'"):
        wrapped(model())


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_gpus_backend_cannot_add_in_cpu_memory(monkeypatch, how):
    monkeypatch.setattr("fusedaccum.ops.backends.why_missing", lambda name: None)
    if how == "environment":
        monkeypatch.setenv("FUSEDACCUM_BACKEND", "cuda")
    named = "^backend" if how == "argument" else "FUSEDACCUM_BACKEND"
    with pytest.raises(ValueError, match=named + "='cuda' adds on a GPU.*buffer_device='cpu'.*use 'auto'"):
        wrapped(model(), buffer_device="cpu", backend="cuda" if how == "argument" else "auto")


@pytest.mark.parametrize("name", ["accum_steps", "max_grad_norm", "nonfinite", "shard"])
def test_arguments_set_later_are_refused_for_they_would_change_nothing(name):
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), accum_steps=2)
    with pytest.raises(AttributeError, match=rf"{name} was fixed when the optimizer was wrapped.*new wrapper"):
        setattr(opt, name, 4)
    opt.note = 4  # other attributes may be set
    assert opt.note == 4


def test_arguments_can_be_read():
    asked = {"accum_steps": 2, "reduction": "sum", "max_grad_norm": 1.0, "noise_scale": 0.5, "shard": False}
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), **asked)
    assert {name: getattr(opt, name) for name in asked} == asked
    assert opt.window_weight is None and opt.process_group is None and opt.buffer_dtype is torch.float32
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'accum_step'"):
        opt.accum_step  # noqa: B018


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_there_is_one_cpu(device):
    assert wrapped(model(), 2, buffer_device=device).buffer_device == torch.device("cpu")


def test_numbers_may_be_numpys():
    net, (x, y) = model(), data()
    opt = wrapped(net, window_weight=np.float32(24), max_grad_norm=np.float32(1), noise_scale=np.float32(0.5))
    with opt.micro_batch(weight=np.int64(24)):
        mean_loss(net, x, y).backward()
    opt.record_loss(np.float32(2))
    opt.step()
    assert opt.last_window.weight == 24 and opt.last_window.loss == 2


def test_callable_length_is_checked_by_name():
    net, (x, y) = model(), data()
    for length, error in ((0, ValueError), (2.0, ValueError), (None, TypeError)):
        opt = wrapped(model(), lambda index, length=length: length)
        with pytest.raises(error, match=r"accum_steps\(0\)"):
            opt.step()
    del net, x, y


def test_an_optimizer_whose_step_insists_on_an_argument():
    """Refused where windows close by themselves; who closes them may call other methods instead."""

    class Insisting(torch.optim.SGD):
        def step(self, batch):
            raise AssertionError

    net = model()
    inner = Insisting(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)  # patches step()
    with pytest.raises(TypeError, match=r"Insisting, whose step\(\) cannot do without its batch.*first_step"):
        fa.AccumulatingOptimizer(inner, 4)
    assert fa.AccumulatingOptimizer(inner).optimizer is scheduler.optimizer

    class SAM(torch.optim.SGD):
        first_step = second_step = (
            torch.optim.SGD.step
        )  # its step() takes a closure, which is None by default, and must not be

    with pytest.raises(TypeError, match=r"SAM, whose step\(\) cannot do without its closure"):
        fa.AccumulatingOptimizer(SAM(net.parameters(), lr=0.1), window_weight=8)


def test_what_can_be_wrapped():
    net = model()
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got .*\.Sequential"):
        fa.AccumulatingOptimizer(net)
    with pytest.raises(TypeError, match="sparse=False"):
        fa.AccumulatingOptimizer(torch.optim.SparseAdam(list(net.parameters())))
    with pytest.raises(ValueError, match=r"LBFGS.*leave out accum_steps"):
        fa.AccumulatingOptimizer(torch.optim.LBFGS(net.parameters()), 4)
    with pytest.raises(ValueError, match="LBFGS"):
        fa.AccumulatingOptimizer(torch.optim.LBFGS(net.parameters()), master_weights=True)
    with pytest.raises(ValueError, match=r"buffer_device='cpu' does not work with LBFGS.*leave it out"):
        fa.AccumulatingOptimizer(torch.optim.LBFGS(net.parameters()), buffer_device="cpu")
    opt = wrapped(net)
    with pytest.raises(TypeError, match="wrapped already"):
        fa.AccumulatingOptimizer(opt)
    with pytest.raises(ValueError, match="complex64"):
        fa.AccumulatingOptimizer(sgd([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]))
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"has a gradient already.*call optimizer\.zero_grad\(\) before you wrap it"):
        fa.AccumulatingOptimizer(sgd([p]))


def in_inference_mode():
    with torch.inference_mode():
        return nn.Parameter(torch.ones(4), requires_grad=False)


LEAF = nn.Parameter(torch.ones(4))
UNFIT = {
    "computed": (
        lambda: LEAF * 2,
        r"is not a leaf.*\(MulBackward0; .*torch\.nn\.Parameter\(parameter\.detach",
    ),
    "a view of a flat leaf": (lambda: LEAF[:2].view(1, 2), r"is not a leaf.*ViewBackward0; a view of one counts"),
    "an inference tensor": (in_inference_mode, r"was made in torch\.inference_mode\(\).*outside of it"),
    "nested": (
        lambda: nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "is a nested tensor; only dense",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make, message", UNFIT.values(), ids=UNFIT)
def test_parameters_in_which_no_gradient_accumulates_are_named(make, message):
    """At the constructor, in add_param_group() and in an assignment.

    (``differentiable=True`` lets an optimizer hold them.)
    """
    whole = r"parameter param_groups\[{}\]\['params'\]\[{}\] " + message
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2)), make()], lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match=whole.format(0, 1)):
        fa.AccumulatingOptimizer(inner)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([LEAF], lr=0.1, differentiable=True))
    with pytest.raises(ValueError, match=whole.format(1, 0)):
        opt.add_param_group({"params": [make()]})
    with pytest.raises(ValueError, match=whole.format(0, 1)):
        opt.param_groups = [{**opt.param_groups[0], "params": [LEAF, make()]}]
    assert [group["params"] for group in opt.param_groups] == [[LEAF]]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=lambda f: f.__name__)
def test_a_tensor_that_a_transform_has_wrapped_is_named(transform):
    def wrap(p):
        fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.1))
        return p.sum()

    with pytest.raises(ValueError, match=r"\['params'\]\[0\] belongs to a function that torch\.func transforms"):
        transform(wrap)(torch.ones(2, 3))


def test_a_parameter_without_memory_is_named_before_anything_is_added():
    net, (x, y) = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3, device="meta")]), data(dtype=torch.float32)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.named_parameters(), lr=0.1), accum_steps=2)
    with pytest.raises(
        RuntimeError, match=r"parameter 1\.weight is on the meta device.*model\.to_empty\(device=\.\.\.\)"
    ):
        mean_loss(net[0], x, y).backward()
    assert grads(net) == [None] * 4
    opt.reset()


@pytest.mark.parametrize("settings", [{}, {"master_weights": True}, {"optimizer_device": "cpu"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_stay_out_of_the_optimizer(dtype, settings):
    """As in QLoRA, whose frozen weights plain PyTorch takes with the rest of model.parameters()."""
    frozen = nn.Parameter(torch.zeros(4).to(dtype), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"\['params'\]\[1\] is torch\..*8.*Leave .* out of the optimizer: .* if p\.requires_grad"
    ):
        fa.AccumulatingOptimizer(sgd([nn.Parameter(torch.zeros(2)), frozen]), **settings)


def test_a_lazy_module_is_wrapped_once_it_has_seen_an_input():
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    inner = torch.optim.SGD(net.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0\.weight has no shape yet.*run one forward"):
        fa.AccumulatingOptimizer(inner)
    net(torch.randn(2, 6))
    opt = fa.AccumulatingOptimizer(inner)
    with pytest.raises(ValueError, match="parameter more has no shape yet"):
        opt.add_param_group({"params": [("more", nn.LazyLinear(4).weight)]})
    assert len(opt.param_groups) == 1


def test_parameters_are_named_as_the_model_names_them():
    net = model()
    net[2].weight.grad = torch.zeros_like(net[2].weight)
    with pytest.raises(ValueError, match=r"parameter 2\.weight"):
        fa.AccumulatingOptimizer(torch.optim.SGD(net.named_parameters(), lr=0.1))


def test_refused_group_is_not_left_behind():
    net = model()
    opt = wrapped(net)
    with pytest.raises(ValueError, match="complex64"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="complex64"):
        opt.param_groups = [{"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}]
    assert [len(group["params"]) for group in opt.param_groups] == [6]


@pytest.mark.parametrize(
    "weight, error, message",
    [
        (-1, ValueError, "weight must be finite and not negative, got -1"),
        (math.nan, ValueError, "weight must be finite"),
        (math.inf, ValueError, "weight must be finite"),
        ("7", TypeError, "weight must be a number or a 0-d tensor.*'7'"),
        (True, TypeError, "weight must be a number"),
        (np.ones(2), TypeError, "weight must be a number"),
        (torch.tensor(-1.0), ValueError, "weight must be finite and not negative, got -1"),
        (torch.tensor(math.nan), ValueError, "weight must be finite"),
        (torch.ones(2), ValueError, r"one real number.*\(2,\)"),
        (torch.tensor(1j), ValueError, "one real number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["backward", "micro_batch", "step"])
def test_weights(weight, error, message, where):
    net, (x, y) = model(), data()
    opt = wrapped(net, 2, reduction="sum")
    loss = mean_loss(net, x, y)
    if where == "step":
        loss.backward()
    held = grads(net)
    with pytest.raises(error, match=message):
        if where == "backward":
            opt.backward(loss, weight=weight)
        elif where == "micro_batch":
            with opt.micro_batch(weight=weight):
                loss.backward()
        else:
            opt.step(weight=weight)
    assert all((g is None) == (p.grad is None) for g, p in zip(held, net.parameters(), strict=True))
    if where == "step":
        opt.step(weight=2)
    else:
        opt.backward(loss, weight=2)
        opt.step()
    opt.flush()
    assert opt.last_window.weight == 2 and opt.last_window.micro_batches == 1


def test_weight_at_step_comes_too_late_for_a_mean():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    with pytest.raises(ValueError, match=r"step\(weight=\) comes too late.*opt\.backward\(loss, weight=\.\.\.\)"):
        opt.step(weight=4)
    opt.step()
    opt.flush()
    assert opt.last_window.micro_batches == 1


def test_missing_weight_under_sum():
    net, (x, y) = model(), data()
    counted, owned = wrapped(net, 2, reduction="sum"), wrapped(model(), reduction="sum")
    mean_loss(net, x, y).backward()
    for opt, n in ((counted, net),):
        with pytest.raises(ValueError, match=r"reduction='sum'.*opt\.step\(weight=n\)"):
            opt.step()
        assert n[0].weight.grad is not None
        opt.step(weight=4)
        mean_loss(n, x, y).backward()
        with pytest.raises(ValueError, match="reduction='sum'"):
            opt.flush()
    other = owned.param_groups[0]["params"][0]
    other.sum().backward()
    with pytest.raises(ValueError, match="reduction='sum'"):
        owned.step()
    owned.step(weight=3)
    assert owned.updated and owned.last_window.weight == 3


def test_weights_that_differ_within_one_micro_batch():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    opt.backward(mean_loss(net, x, y), weight=4)
    opt.backward(mean_loss(net, x, y), weight=4)
    page = Path(__file__).parents[2] / "docs/questions/different-denominators.md"
    for_terms = (
        rf"reduction='none', each divided by the window's count .*'{page.read_text().partition(chr(10))[0][2:]}'"
    )
    with pytest.raises(ValueError, match="weight 5 differs from 4.*" + for_terms):
        opt.backward(mean_loss(net, x, y), weight=5)
    opt.step()
    mean_loss(net, x, y).backward()
    with pytest.raises(ValueError, match="weight 5 comes too late.*" + for_terms):
        opt.backward(mean_loss(net, x, y), weight=5)
    with pytest.warns(
        RuntimeWarning, match="some micro-batches of this window were given a weight and others were not"
    ):
        opt.step()
    assert opt.last_window.weight == 5


def test_an_optimizer_that_has_lost_its_parameters():
    inner = sgd(model().parameters())
    inner.param_groups = []
    with pytest.raises(ValueError, match=r"optimizer has no parameters.*from model\.parameters\(\)"):
        fa.AccumulatingOptimizer(inner, 2)


@pytest.mark.parametrize("call", ["step", "flush", "state_dict", "backward", "micro_batch"])
def test_calls_that_do_not_belong_inside_micro_batch(call):
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    loss = mean_loss(net, x, y)
    with pytest.raises(RuntimeError, match=r"micro_batch\(\)"), opt.micro_batch():
        if call == "backward":
            opt.backward(loss)
        elif call == "micro_batch":
            with opt.micro_batch():
                pass
        else:
            getattr(opt, call)()
