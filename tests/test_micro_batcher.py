"""MicroBatcher: the desired batch's gradient, however it is split and wherever memory ends."""

import collections
import copy
import dataclasses
import itertools
import json
import math
import random
import warnings
import weakref

import fusedaccum as fa
import fusedaccum.intake
import fusedaccum.ops
import fusedaccum.recipes.micro_batcher
import numpy as np
import pytest
import torch
from out_of_memory import Net, Points, assert_close, batch, function, made, oracle, sgd, weight
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """A bucket holds one gradient or a few, so that backward adds as it goes."""
    monkeypatch.setattr(fusedaccum.intake, "BUCKET_BYTES", 100)


def ran(monkeypatch, fail=(), first=4, dtype=torch.float64, windows=1, net=Net, reduction="mean", **settings):
    """Windows that begin in micro-batches of ``first``, of which the points ``fail`` lack memory: model, points, losses, optimizer."""
    with monkeypatch.context() as patched:
        model, opt = made(dtype, reduction=reduction, net=net, **settings)
        points = Points(patched, model, fail)
        loss = function(model, reduction, total=float(weight(batch())))
        batcher = fa.MicroBatcher(loss, opt, weight=weight)
        batcher._sizes.of(batch(dtype=dtype)).limit = first
        losses = [batcher.step(batch(dtype=dtype, seed=3 + window)) for window in range(windows)]
    return model, points, losses, opt


# -- the same, wherever memory ends --------------------------------------------------------------------------------------


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
    """Within 1e-6 of the big batch in FP64, over several windows."""
    make = sgd if "max_grad_norm" not in settings else lambda params: torch.optim.SGD(params, lr=5.0)
    _, points, _, _ = ran(monkeypatch, dtype=torch.float32, windows=3, make=make, **settings)
    expected, (model, *_) = (
        oracle_of(make, settings),
        ran(monkeypatch, windows=3, make=make, dtype=torch.float32, **settings),
    )
    assert_close(model, expected, 1e-6)
    monkeypatch.setattr(fusedaccum.intake, "BUCKET_BYTES", 1)
    chance, depth, lost = random.Random(0), 0, 0
    for _ in range(30):
        first = chance.randint(12, 30)
        fail = [first, first + chance.randint(14, 30), points.met + chance.randint(-60, 0)]
        model, broken, _, opt = ran(monkeypatch, fail, 11, dtype=torch.float32, windows=3, make=make, **settings)
        assert_close(model, expected, 1e-6)
        assert opt.last_window.weight == weight(batch())
        depth += any(attempt.done and attempt.taken for attempt in broken.broken)
        lost += any(attempt.lost for attempt in broken.broken)
    # What is judged as a whole cannot be added in parts.
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
    """A part counted twice, or left out, or a mean over the wrong weight, is a tenth or more."""
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
    """Nobody can tell what such a call has written."""
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
    """Re-entrant checkpoints bring a tied weight several gradients a pass."""

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


def test_fused_layers(monkeypatch):
    """Which add by themselves with a number of samples, and go the plain way where they may have to be left out."""
    fused = lambda dtype: fa.fuse_linear(Net(dtype))  # noqa: E731
    expected = oracle([batch()])[0]
    model, opt = made(net=fused)
    calls = []
    add_by = opt._gathering.accumulator.add_by
    monkeypatch.setattr(opt._gathering.accumulator, "add_by", lambda *args: calls.append(args) or add_by(*args))
    fa.MicroBatcher(function(model), opt, 4, weight=lambda part: float(weight(part))).step(batch())
    assert_close(model, expected, 1e-12)
    assert calls
    _, points, _, _ = ran(monkeypatch, net=fused)
    for point in range(1, points.met + 1, 3):
        assert_close(ran(monkeypatch, [point], net=fused)[0], expected, 1e-12)


@pytest.mark.parametrize("nonfinite", ["skip_window", "skip_micro_batch"])
def test_what_is_not_finite_is_seen_also_where_it_broke_off(monkeypatch, nonfinite):
    """Also a NaN that only one parameter has met, which is left out when the samples come again."""
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
        elif opt.last_window.weight == weight(kept):  # the second micro-batch of four, as without an error
            assert_close(model, oracle([kept])[0], 1e-12)
        else:
            assert opt.last_window.applied and not any(p.isnan().any() for p in model.parameters())


# -- batches and splits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 10, 11, 12, 100, np.int64(3)])
def test_any_number_of_samples(size):
    expected, loss = oracle([batch()])
    model, opt = made()
    batcher = fa.MicroBatcher(function(model), opt, size, weight=weight)
    got = batcher.step(batch())
    assert_close(model, expected, 1e-12)
    torch.testing.assert_close(got, loss, rtol=1e-12, atol=0)
    assert not got.requires_grad and got.shape == () and batcher.micro_batch_size == size
    assert opt.last_window.micro_batches == -(-11 // int(size))


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize("returns", ["loss", "attribute", "item"])
@pytest.mark.parametrize("container", ["dict", "tuple", "named", "list", "record", "tensor"])
def test_modules_and_containers(container, returns):
    whole = batch()
    x, y = whole["x"], whole["y"]
    given = {"dict": {"x": x, "y": y}, "tuple": (x, y), "named": Pair(x, y), "list": [x, y], "record": Record(x, y)}
    given["tensor"] = torch.cat([x, y], 1)

    class WithLoss(Net):
        def forward(self, x, y=None):
            if isinstance(x, Record):
                x, y = x.x, x.y
            elif y is None:
                x, y = x.split([6, 3], 1)
            loss = (super().forward(x) - y).square().mean()
            return {"loss": loss, "attribute": collections.namedtuple("Out", "loss")(loss), "item": {"loss": loss}}[
                returns
            ]

    model, opt = made(net=WithLoss)
    fa.MicroBatcher(model, opt, 4).step(given[container])
    twin = made()[0]
    optimizer = sgd(twin.parameters())
    (twin(x) - y).square().mean().backward()
    optimizer.step()
    assert_close(model, twin, 1e-12)


@pytest.mark.parametrize("size", [3, "auto"])
def test_an_epoch_of_a_loader(size):
    whole = batch(22)
    loader = DataLoader(TensorDataset(whole["x"], whole["y"]), batch_size=8)
    model, opt = made()
    losses = list(
        fa.MicroBatcher(lambda part: (model(part[0]) - part[1]).square().mean(), opt, size, device="cpu").epoch(loader)
    )
    twin = made()[0]
    optimizer = sgd(twin.parameters())
    for (x, y), ours in zip(loader, losses, strict=True):
        optimizer.zero_grad()
        loss = (twin(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=0)
    assert_close(model, twin, 1e-12)


def test_micro_batches_are_moved_one_by_one(monkeypatch):
    model, opt = made()
    moved = []
    plain = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, **kwargs: moved.append((x.shape, args)) or plain(x, *args, **kwargs)
    )
    fa.MicroBatcher(function(model), opt, 4, weight=lambda part: float(weight(part)), device="cpu").step(batch())
    to_device = [shape[0] for shape, args in moved if args == (torch.device("cpu"),)]
    assert to_device == [4] * 6 + [3] * 3


# -- sizes ---------------------------------------------------------------------------------------------------------------


class Memory:
    """A loss that fits ``room`` elements."""

    def __init__(self, room):
        self.room, self.errors, self.sizes = room, 0, []
        self.net = nn.Linear(1, 1)
        self.opt = fa.AccumulatingOptimizer(torch.optim.SGD(self.net.parameters(), lr=0.01))

    def __call__(self, x):
        self.sizes.append(len(x))
        if x.numel() > self.room:
            self.errors += 1
            raise torch.OutOfMemoryError("injected")
        return self.net(x.unsqueeze(-1)).square().mean()


def test_sizes_are_halved_remembered_and_tried_again_ever_more_rarely():
    memory = Memory(7)
    batcher = fa.MicroBatcher(memory, memory.opt)
    assert batcher.micro_batch_size is None
    batcher.step(torch.randn(20, 1))
    assert memory.sizes == [20, 10, 5, 5, 5, 5] and batcher.micro_batch_size == 5
    for _ in range(15):
        batcher.step(torch.randn(20, 1))
    assert memory.errors == 2
    errors = []
    for window in range(160):
        before = memory.errors
        batcher.step(torch.randn(20, 1))
        if memory.errors > before:
            errors.append(window)
    assert 2 <= len(errors) <= 4
    assert all(
        later - earlier > 1.9 * (earlier - first)
        for first, earlier, later in zip(errors, errors[1:], errors[2:], strict=False)
    )


def test_a_size_grows_when_memory_has():
    memory = Memory(7)
    batcher = fa.MicroBatcher(memory, memory.opt)
    batcher.step(torch.randn(20, 1))
    memory.room = 100
    for _ in range(34):
        batcher.step(torch.randn(20, 1))
    assert memory.errors == 2 and batcher.micro_batch_size == 20


def test_what_fits_is_remembered_by_shape_and_guessed_for_new_ones():
    memory = Memory(40)
    batcher = fa.MicroBatcher(memory, memory.opt)
    batcher.step(torch.randn(16, 8))
    assert batcher.micro_batch_size == 4
    batcher.step(torch.randn(16, 1))  # as many elements as have fitted
    assert batcher.micro_batch_size == 16
    batcher.step(torch.randn(16, 16))
    assert batcher.micro_batch_size == 2 and memory.errors == 2
    batcher.step(torch.randn(16, 8))
    assert batcher.micro_batch_size == 4 and memory.errors == 2


def test_what_was_found_goes_into_a_checkpoint():
    memory = Memory(40)
    batcher = fa.MicroBatcher(memory, memory.opt)
    batcher.step(torch.randn(16, 8))
    state = json.loads(json.dumps(batcher.state_dict()))
    other = fa.MicroBatcher(memory, memory.opt)
    other.load_state_dict(state)
    other.step(torch.randn(16, 8))
    assert memory.errors == 2 and other.micro_batch_size == 4 and "float32[8]" in state["sizes"]


# -- errors --------------------------------------------------------------------------------------------------------------


def test_one_sample_that_does_not_fit():
    memory = Memory(7)
    before = memory.net.weight.detach().clone()
    batcher = fa.MicroBatcher(memory, memory.opt)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"one sample does not fit.*checkpointing.*The window was dropped.*injected"
    ):
        batcher.step(torch.randn(4, 9))
    assert memory.sizes == [4, 2, 1] and (memory.net.weight == before).all() and memory.net.weight.grad is None
    memory.room = 9
    batcher.step(torch.randn(4, 9))
    assert memory.opt.updated and memory.opt.last_window.micro_batches == 4


@pytest.mark.parametrize(("samples", "sizes"), [(9, [5, 4]), (16, [8, 8]), (17, [6, 6, 5]), (7, [7])])
def test_parts_are_as_few_and_as_equal_as_can_be(samples, sizes):
    """So no last one is left with a single sample, which BatchNorm would refuse."""
    for size in (8, "auto"):
        memory = Memory(8)
        batcher = fa.MicroBatcher(memory, memory.opt, size)
        batch = torch.randn(samples, 1)
        batcher._sizes.of(batch).limit = 8
        batcher.step(batch)
        assert memory.sizes == sizes


def test_a_number_of_samples_that_does_not_fit():
    memory = Memory(7)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"micro_batch_size=8 does not fit; give less, or 'auto'.*injected"
    ):
        fa.MicroBatcher(memory, memory.opt, 8).step(torch.randn(16, 1))


@pytest.mark.parametrize("size", ["auto", 4])
def test_another_error_drops_the_window_and_the_batch_can_come_again(monkeypatch, size):
    expected = oracle([batch()])[0]
    for point in (1, 5, 12, 20, 30, 33, 40, 50):
        with monkeypatch.context() as patched:
            model, opt = made()
            Points(patched, model, [point], error=ValueError)
            batcher = fa.MicroBatcher(function(model), opt, size, weight=weight)
            batcher._sizes.of(batch()).limit = 4
            with warnings.catch_warnings(), pytest.raises(ValueError, match="injected"):
                warnings.simplefilter(
                    "ignore"
                )  # that the window was dropped, where a part of a micro-batch had been added
                batcher.step(batch())
            assert all(p.grad is None for p in model.parameters()) and opt.last_window is None
            batcher.step(batch())
        assert_close(model, expected, 1e-12)


def test_an_error_of_the_optimizer_drops_the_window(monkeypatch):
    expected = oracle([batch()])[0]
    model, opt = made()
    batcher = fa.MicroBatcher(function(model), opt, weight=weight)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr(opt.optimizer, "step", lambda: 1 / 0)
        batcher.step(batch())
    batcher.step(batch())
    assert_close(model, expected, 1e-12)


def test_an_open_window_is_not_joined():
    model, opt = made()
    model(batch()["x"]).sum().backward()
    with pytest.raises(RuntimeError, match=r"opt holds an open window.*opt.reset\(\)"):
        fa.MicroBatcher(function(model), opt).step(batch())
    opt.step()
    fa.MicroBatcher(function(model), opt).step(batch())


def test_bad_arguments():
    model, opt = made()
    for size in ("big", None, True):
        with pytest.raises(TypeError, match=r"micro_batch_size must be an int, got .*; 'auto' finds what fits"):
            fa.MicroBatcher(model, opt, size)
    with pytest.raises(ValueError, match=r"micro_batch_size must be an int, got the float 2.0; write 2 "):
        fa.MicroBatcher(model, opt, 2.0)
    with pytest.raises(ValueError, match=r"micro_batch_size must be at least 1, got 0"):
        fa.MicroBatcher(model, opt, 0)
    with pytest.raises(TypeError, match=r"opt must be an AccumulatingOptimizer, got a SGD; wrap it"):
        fa.MicroBatcher(model, opt.optimizer)
    with pytest.raises(TypeError, match=r"model_or_fn must be a module or a function.*got a int"):
        fa.MicroBatcher(3, opt)
    with pytest.raises(TypeError, match=r"weight must be a function.*got 3"):
        fa.MicroBatcher(model, opt, weight=3)
    del opt
    for how in ({"accum_steps": 2}, {"window_weight": 2.0}):
        with pytest.raises(ValueError, match=r"opt closes windows itself.*leave accum_steps and window_weight out"):
            fa.MicroBatcher(model, made(**how)[1])
    with pytest.raises(ValueError, match=r"opt is LBFGS.*in a closure"):
        fa.MicroBatcher(model, made(make=torch.optim.LBFGS)[1])


def test_layers_that_add_by_themselves_take_a_number():
    p = nn.Parameter(torch.ones(3))
    p.grad_added_to_main_grad = False
    opt = fa.AccumulatingOptimizer(sgd([p]), reduction="sum")
    with pytest.raises(ValueError, match=r"micro_batch_size='auto'.*main_grad.*give a number"):
        fa.MicroBatcher(print, opt)
    fa.MicroBatcher(lambda x: (x * p).sum(), opt, 2).step(torch.ones(5, 3))
    assert (p == 0.5).all()


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda x: x, r"a loss of shape \(2, 1\)"),
        (lambda x: None, "a NoneType"),
        (lambda x: {}, "a dict"),
        (lambda x: 1.0, "a float"),
    ],
)
def test_what_is_no_loss(loss, got):
    memory = Memory(7)
    with pytest.raises(
        TypeError, match=rf"model_or_fn must return the micro-batch's loss.*got {got}.*MicroBatcher\(lambda"
    ):
        fa.MicroBatcher(loss, memory.opt).step(torch.randn(2, 1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_bad_batches_and_weights(reduction):
    model, opt = made(reduction=reduction)
    for given, message in (
        ({}, "holds no tensors"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, "holds 3"),
        (torch.ones(0, 6), "no samples"),
    ):
        with pytest.raises(ValueError, match=message):
            fa.MicroBatcher(model, opt).step(given)
    with pytest.raises(ValueError, match=r"weight must be finite and not negative, got -1"):
        fa.MicroBatcher(function(model), opt, weight=lambda part: -1).step(batch())


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
            ),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_is_an_out_of_memory_error(error, is_one):
    assert fusedaccum.recipes.micro_batcher.is_out_of_memory(error) is is_one


def test_the_error_that_pytorch_raises_here():
    memory = Memory(100)

    def loss(x):
        if len(x) > 2:
            torch.empty(1 << 50, device="cuda" if torch.cuda.is_available() else "cpu")
        return memory(x)

    fa.MicroBatcher(loss, memory.opt).step(torch.randn(5, 1))
    assert memory.sizes == [2, 1, 2]


# -- memory, chance, followers -------------------------------------------------------------------------------------------


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
    _, points, _, _ = ran(monkeypatch, first=6, net=net)  # and in halves of 3: one sample has no statistics
    for point in range(1, points.met + 1, 7):
        norm = ran(monkeypatch, [point], 6, net=net)[0].norm
        torch.testing.assert_close((norm.running_mean, norm.running_var), (plain.running_mean, plain.running_var))


def test_the_noise_scale_is_not_measured_of_a_mixture(monkeypatch):
    """The window's first micro-batch is the small sample, unless some parameters hold more than it."""
    *_, opt = ran(monkeypatch, noise_scale=0.9)
    assert opt.last_window.noise_scale is not None
    _, points, _, opt = ran(monkeypatch, [22], noise_scale=0.9)
    assert points.partial == 1 and opt.last_window.noise_scale is None


def test_an_error_after_it_was_counted_begins_the_window_anew():
    class Follower:
        calls = 0

        def micro_batch_counted(self):
            self.calls += 1
            if self.calls == 2:
                raise MemoryError

        def __getattr__(self, name):
            return lambda: None

    model, opt = made()
    follower = Follower()
    opt._ledger.tell(follower)
    batcher = fa.MicroBatcher(function(model), opt, weight=weight)
    batcher._sizes.of(batch()).limit = 6
    batcher.step(batch())
    assert_close(model, oracle([batch()])[0], 1e-12)
    assert opt.last_window.weight == weight(batch())


def test_followers_are_told_what_counts(monkeypatch):
    class Follower:
        def __init__(self):
            self.told = []

        def __getattr__(self, name):
            return lambda: self.told.append(name)

    with monkeypatch.context() as patched:
        model, opt = made()
        follower = Follower()
        opt._ledger.tell(follower)
        Points(patched, model, [12])
        batcher = fa.MicroBatcher(function(model), opt, weight=weight)
        batcher.step(batch())
    counted, dropped, closed = "micro_batch_counted", "micro_batch_dropped", "window_closed"
    assert follower.told == [dropped, counted, counted, closed]


@pytest.mark.parametrize("size", ["auto", 3])
def test_a_grad_scaler_scales_steps_and_is_updated_once_a_window(size):
    """As its own loop does with the whole batch; an overflow skips the window and backs off once."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 2), torch.randn(8, 4), torch.randn(8, 2)
    twin = copy.deepcopy(net)
    factors = (1.0, 1.0, math.inf, 1.0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for factor in factors:

        def loss_of(part, factor=factor):
            return nn.functional.mse_loss(net(part[0]), part[1]) * factor

        loss = fa.MicroBatcher(loss_of, opt, size, scaler=scalers[0]).step([x, y])
        theirs.zero_grad()
        big = nn.functional.mse_loss(twin(x), y) * factor
        scalers[1].scale(big).backward()
        scalers[1].step(theirs)
        scalers[1].update()
        assert loss.dtype == torch.float64 and loss.item() == pytest.approx(big.item(), rel=1e-6)
        assert scalers[0].get_scale() == scalers[1].get_scale() and bool(opt.last_window.applied) is (factor == 1.0)
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_what_is_no_loss_and_no_batch_is_refused():
    net, x = nn.Linear(3, 1), torch.randn(6, 3)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="has no graph"):
        fa.MicroBatcher(lambda part: net(part).mean().detach(), opt).step(x)
    with pytest.raises(TypeError, match=r"got a DataLoader; use `for loss in batcher.epoch\(loader\)"):
        fa.MicroBatcher(lambda part: net(part).mean(), opt).step(torch.utils.data.DataLoader(x))
    assert not opt._ledger.is_open


def test_a_function_that_runs_a_backward_of_its_own(monkeypatch):
    """An attempt that breaks off cannot tell then which pass a parameter has taken, and the window begins anew."""
    lost = 0
    for point in range(5, 200, 12):
        with monkeypatch.context() as patched:
            patched.setattr(fusedaccum.intake, "BUCKET_BYTES", 1)
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


def test_two_wrappers_cannot_share_a_batcher():
    a, b = nn.Linear(3, 3), nn.Linear(3, 1)
    opt, other = (fa.AccumulatingOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (a, b))
    with pytest.raises(ValueError, match=r"a parameter of shape .* belongs to another Acc"):
        fa.MicroBatcher(lambda part: b(a(part)).mean(), opt).step(torch.randn(4, 3))
    assert not opt._ledger.is_open and not other._ledger.is_open


@pytest.mark.parametrize("call", ["zero_grad", "reset"])
def test_a_function_that_drops_the_window_is_found_out(call):
    net, x = nn.Linear(3, 1), torch.randn(8, 3)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def whole_script(part):
        getattr(opt, call)()
        return net(part).mean()

    before = net.weight.clone()
    with pytest.raises(RuntimeError, match=r"leaves opt\.step"):
        fa.MicroBatcher(whole_script, opt, 4).step(x)
    assert torch.equal(net.weight, before)
