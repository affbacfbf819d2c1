"""Training in a mode that sees or changes PyTorch's calls (profilers) gives the same numbers."""

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from training import assert_same_parameters, data, mean_loss, model, parts, sgd, twin

pytestmark = pytest.mark.usefixtures("each_intake")


class Watching(TorchDispatchMode):
    """Looks at the schema of every call, its arguments, and what it writes, as a profiler does.

    Attributes:
        written: names of the ops that have written to an argument.
    """

    def __init__(self):
        super().__init__()
        self.written = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors = value if isinstance(value, list) else [value]
                assert all(isinstance(x, torch.Tensor) for x in tensors), func
                self.written.add(func.name())
        return func(*args, **kwargs)


MODES = {
    "allow_mutation_on_saved_tensors": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "a mode that looks at what is written": Watching,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "default device": lambda: torch.device("cpu"),
}
SETTINGS = [
    {"accum_steps": 3},
    {"reduction": "none"},
    {"accum_steps": 3, "nonfinite": "skip_window", "max_grad_norm": 1e3},
    {"accum_steps": 3, "nonfinite": "skip_micro_batch"},
    {"accum_steps": 3, "noise_scale": 0.9},
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_training_inside_a_mode_gives_the_plain_numbers(settings, mode):
    net, (x, y) = model(), data()
    plain_net = twin(net)
    opt, plain = fa.AccumulatingOptimizer(sgd(net.parameters()), **settings), sgd(plain_net.parameters())
    owned, divide = "accum_steps" not in settings, 3
    with mode():
        for _ in range(3):
            for batch in parts(x, y, (8, 8, 8)):
                loss = mean_loss(net, *batch)
                (loss / divide if owned else loss).backward()
                if not owned:
                    opt.step()
            if owned:
                opt.step()
            assert opt.updated
            opt.zero_grad()
    for _ in range(3):
        for batch in parts(x, y, (8, 8, 8)):
            (mean_loss(plain_net, *batch) / divide).backward()
        plain.step()
        plain.zero_grad()
    assert_same_parameters(net, plain_net, 1e-12)


@pytest.mark.parametrize(
    "settings", [{"buffer_dtype": torch.bfloat16, "rounding": "stochastic"}, {"master_weights": True}]
)
@pytest.mark.parametrize("mode", [MODES["allow_mutation_on_saved_tensors"], Watching])
def test_a_mode_changes_no_bit_of_16_bit_training(mode, settings):
    nets, (x, y) = [], data(dtype=torch.bfloat16)
    for wanted in (None, mode):
        torch.manual_seed(3)
        nets.append(net := model(torch.bfloat16))
        opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 3, **settings)
        for batch in 2 * parts(x, y, (8, 8, 8)):
            if wanted is None:
                mean_loss(net, *batch).backward()
                opt.step()
                continue
            with wanted():
                mean_loss(net, *batch).backward()
                opt.step()
    assert_same_parameters(*nets, 0)


def test_a_saved_tensor_that_is_overwritten_before_backward_is_allowed_in_a_window():
    """What allow_mutation_on_saved_tensors() is for; the first op's input is needed as it was."""
    plain, ours = (nn.Parameter(torch.arange(1.0, 4.0)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([ours], lr=1.0), 2, reduction="none", max_grad_norm=1e3)
    for p, step in ((plain, None), (ours, opt.step)):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            for _ in range(2):
                a = p * 2
                b = a.square()
                a.zero_()
                (b + a).sum().backward()
                if step is not None:
                    step()
    assert torch.equal(ours.grad, plain.grad) and plain.grad.any()
    assert torch.equal(ours, torch.arange(1.0, 4.0) - plain.grad)


def test_a_mode_is_told_of_what_the_ops_write():
    net, (x, y) = model(), data()
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 2, max_grad_norm=1e-3)
    with Watching() as watching:
        for _ in range(2):
            mean_loss(net, x, y).backward()
            opt.step()
    assert {"fusedaccum::accumulate_", "fusedaccum::scale_"} <= watching.written


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("settings", [{"accum_steps": 2}, {}, {"accum_steps": 2, "master_weights": True}], ids=str)
def test_a_run_that_only_has_shapes(settings):
    """As tools do that predict the memory of a run.

    (What reads a value, such as ``nonfinite="skip_window"``, cannot run there.)
    """
    with FakeTensorMode():
        net = nn.Sequential(nn.Linear(6, 4, dtype=torch.bfloat16), nn.Linear(4, 3, dtype=torch.bfloat16))
        opt = fa.AccumulatingOptimizer(sgd(net.parameters()), **settings)
        for _ in range(4):
            net(torch.randn(5, 6, dtype=torch.bfloat16)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        assert opt.last_window is not None
