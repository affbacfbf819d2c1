"""A window recorded once and replayed: by CUDA graphs, or on the CPU by tests/graphs.py.

See docs/frameworks/compile-and-graphs.md.
"""

import contextlib
import importlib.util

import fusedaccum as fa
import pytest
import torch
from graphs import Recording, recorded
from ops_cases import assert_same_bits
from training import mean_loss, model, twin

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
N, WINDOWS = 3, 5

pytestmark = pytest.mark.filterwarnings(
    "ignore:This instance was constructed with capturable"
)  # the warm-up is not captured


@pytest.fixture(autouse=True)
def one_stream():
    """One stream for hooks, warm-up, capture and replay: the default stream cannot be captured."""
    with torch.cuda.stream(torch.cuda.Stream()) if GPU else contextlib.nullcontext():
        yield


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, fused=True, capturable=GPU)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def windows(dtype):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(WINDOWS, N, 8, n, generator=generator).to(DEVICE, dtype) for n in (6, 3))
    return [list(zip(*batches, strict=True)) for batches in zip(x, y, strict=True)]


class Training:
    """A model, its wrapper, and the micro-step on inputs whose addresses stay the same."""

    def __init__(self, net, make, settings):
        self.net, self.opt = net, fa.AccumulatingOptimizer(make(net.parameters()), N, **settings)
        dtype = net[0].weight.dtype
        self.static = torch.zeros(8, 6, dtype=dtype, device=DEVICE), torch.zeros(8, 3, dtype=dtype, device=DEVICE)
        self.recordings = []

    def loaded(self, window):
        for batch in window:
            for there, value in zip(self.static, batch, strict=True):
                there.copy_(value)
            yield

    def micro_step(self):
        mean_loss(self.net, *self.static).backward()
        self.opt.step()

    def run(self, window):
        for _ in self.loaded(window):
            self.micro_step()

    def record(self, window):
        pool = torch.cuda.graph_pool_handle() if GPU else None
        self.recordings = [recorded(self.micro_step, pool) for _ in self.loaded(window)]

    def replay(self, window):
        for recording, _ in zip(self.recordings, self.loaded(window), strict=True):
            recording.replay()

    def state(self):
        numbers = [self.opt.last_window.grad_norm, self.opt.last_window.noise_scale]
        grads = [p.grad for p in self.net.parameters()]
        return [*self.net.parameters(), *grads, *(x for x in numbers if x is not None)]


# With "skip_window", a fused optimizer skips on the device if it takes the buffers as they are:
# with FP32 parameters here.
FP32_ONLY = [({"nonfinite": "skip_window"}, torch.float32, adamw)]
SETTINGS = [{}, {"max_grad_norm": 0.05}, {"master_weights": True}, {"reduction": "none"}, {"noise_scale": 0.5}]
LOW = {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}
CASES = [*FP32_ONLY, (LOW, torch.bfloat16, sgd)]
CASES += [(s, dtype, make) for s in SETTINGS for dtype in (torch.float32, torch.bfloat16) for make in (adamw, sgd)]


@pytest.mark.parametrize(
    ("settings", "dtype", "make"), CASES, ids=[f"{settings}-{dtype}-{make.__name__}" for settings, dtype, make in CASES]
)
def test_a_window_recorded_and_replayed_is_every_window(settings, dtype, make):
    """Parameters, gradients and norms have the same bits.

    No gradient is stolen or added twice, and nothing waits.
    """
    net = model(dtype).to(DEVICE)
    graphed, plain = Training(net, make, settings), Training(twin(net), make, settings)
    warm_up, first, *rest = windows(dtype)
    graphed.run(warm_up)  # creates buffers and the optimizer's state
    plain.run(warm_up)
    graphed.record(first)
    # A recording holds gradients, so they are added one by one. On the CPU we record the twin too,
    # so that the norm's bits are equal.
    unreplayed = plain.run if GPU else plain.record
    unreplayed(first)
    for window in rest:
        graphed.replay(window)
        unreplayed(window)
        for a, b in zip(graphed.state(), plain.state(), strict=True):
            assert_same_bits(a.detach().cpu(), b.detach().cpu())
    # Training can go on without graphs, with a new window.
    graphed.run(warm_up)
    unreplayed(warm_up)
    for a, b in zip(graphed.net.parameters(), plain.net.parameters(), strict=True):
        assert_same_bits(a.detach().cpu(), b.detach().cpu())


@pytest.mark.skipif(GPU, reason="looks into recordings, which CUDA graphs do not allow")
@pytest.mark.parametrize("settings", [*SETTINGS, LOW, FP32_ONLY[0][0]], ids=str)
def test_every_window_does_the_same_at_the_same_addresses(settings):
    """So any window can be recorded: the same adds overwrite, with the same factors.

    Buffers and gradients keep their addresses.
    """
    training = Training(model(torch.float32), adamw, settings)
    seen = []
    warm_up, *rest = windows(torch.float32)
    training.run(warm_up)
    for window in rest:
        training.record(window)
        shown = [p.grad.data_ptr() for p in training.net.parameters()]
        seen.append((shown, [recording.ours() for recording in training.recordings]))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    overwrites = [{given[0] for name, _, given in calls if name == "fusedaccum::accumulate_"} for calls in seen[0][1]]
    assert overwrites == [{True}, *[{False}] * (N - 1)]


def test_a_window_with_a_nan_is_skipped_in_replay_too():
    training = Training(model(torch.float32).to(DEVICE), adamw, {"nonfinite": "skip_window"})
    warm_up, first, bad, good, _ = windows(torch.float32)
    training.run(warm_up)
    training.record(first)
    bad[1][0][3] = float("nan")
    before = [p.detach().clone() for p in training.net.parameters()]
    training.replay(bad)
    assert not training.opt.updated and training.opt.last_window.nonfinite == 1
    assert all(torch.equal(p, q) for p, q in zip(training.net.parameters(), before, strict=True))
    training.replay(good)
    assert training.opt.updated and training.opt.last_window.nonfinite == 0
    assert not any(torch.equal(p, q) for p, q in zip(training.net.parameters(), before, strict=True))


@pytest.mark.skipif(GPU, reason="a failed capture leaves CUDA's own error")
@pytest.mark.parametrize(
    ("settings", "weight"),
    [({}, torch.tensor(8.0)), ({"nonfinite": "skip_micro_batch"}, None), ({"nonfinite": "raise"}, None)],
    ids=["tensor-weight", "skip_micro_batch", "raise"],
)
def test_what_waits_cannot_be_recorded(settings, weight):
    training = Training(model(torch.float32), adamw, settings)
    with pytest.raises(RuntimeError, match="waits for the device"), Recording():
        for _ in training.loaded(windows(torch.float32)[0]):
            training.opt.backward(mean_loss(training.net, *training.static), weight=weight)
            training.opt.step()


def test_random_numbers_drawn_on_the_host_cannot_be_recorded(monkeypatch):
    monkeypatch.setattr("fusedaccum.extensions.low_precision.capturing", lambda device: True)
    settings = {"buffer_dtype": None, "rounding": "stochastic"}
    training = Training(model(torch.bfloat16).to(DEVICE), sgd, settings)
    with pytest.raises(RuntimeError, match=r"rounding='stochastic' cannot be captured.*would draw the same numbers"):
        training.run(windows(torch.bfloat16)[0])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_tables_that_are_new_in_every_call_cannot_be_recorded(monkeypatch):
    from fusedaccum.triton_kernels import backend

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot be captured in a CUDA graph.*use backend='cuda'"):
        backend._Table(bytes(5 * 8), (1.0, 1.0), 0, torch.device("cuda"))
