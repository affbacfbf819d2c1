"""MicroBatcher: batches of every kind and size, and the micro-batch sizes that it finds."""

import collections
import copy
import dataclasses
import json
import math

import fusedaccum as fa
import fusedaccum.autograd.collector
import fusedaccum.ops
import fusedaccum.recipes.micro_batcher
import numpy as np
import pytest
import torch
from fusedaccum.recipes.sizes import Size
from out_of_memory import Memory, Net, assert_close, batch, function, made, oracle, sgd, weight
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("small_buckets")]


# -- batches and splits ----------------------------------------------------------------------------


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
    batcher.step(torch.randn(16, 1))  # no more elements in all than have fitted
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


@pytest.mark.parametrize(
    ("samples", "most", "sizes"),
    [(9, 8, [5, 4]), (16, 8, [8, 8]), (17, 8, [6, 6, 5]), (7, 8, [7]), (10, 4, [4, 3, 3]), (21, 5, [5, 4, 4, 4, 4])],
)
def test_parts_are_as_few_and_as_equal_as_can_be(samples, most, sizes):
    """So the last part is not a single leftover sample, which BatchNorm would refuse."""
    for size in (most, "auto"):
        memory = Memory(most)
        batcher = fa.MicroBatcher(memory, memory.opt, size)
        batch = torch.randn(samples, 1)
        batcher._sizes.of(batch).limit = most
        batcher.step(batch)
        assert memory.sizes == sizes


@pytest.mark.parametrize("size", ["auto", 3])
def test_a_grad_scaler_scales_steps_and_is_updated_once_a_window(size):
    """As with the whole batch; an overflow skips the window, and the scale backs off once."""
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


def test_sizes_grow_after_windows_without_an_error_only():
    memory = Memory(7)
    batcher = fa.MicroBatcher(memory, memory.opt)
    for window in range(18):  # the first has errors, 16 have none
        assert memory.errors == (2 if window else 0)
        batcher.step(torch.randn(20, 1))
    assert memory.errors == 3


def test_windows_that_tell_nothing_of_a_size_do_not_count():
    size = Size(1, limit=4)
    for samples in (4, 3):
        size.fitted(samples)
    assert size.clean == 0


def test_a_size_that_has_fitted_is_no_trial_any_more():
    size = Size(1, limit=4)
    for _ in range(16):
        size.fitted(20)
    assert size.limit == 8 and size.trial
    for _ in range(15):  # not less than before the first doubling
        size.fitted(20)
    assert size.limit == 8 and not size.trial
    assert size.failed(8) == 4 and size.patience == 16
    for _ in range(15):
        size.fitted(20)
    assert size.limit == 4
    size.fitted(20)
    assert size.limit == 8


@pytest.mark.parametrize(("samples", "then"), [(8, 4), (5, 4), (4, 2), (3, 2)])
def test_after_a_trial_the_size_that_had_fitted_is_next_unless_it_fails_too(samples, then):
    """Parts are as equal as they can be, so those of a limit of 8 may hold 5 samples.

    Half of that is less than the 4 that fitted.
    """
    assert Size(1, limit=8, trial=True).failed(samples) == then


def test_a_new_shape_begins_with_the_nearest_ones_size_and_one_sample_at_least():
    memory = Memory(40)
    batcher = fa.MicroBatcher(memory, memory.opt)
    batcher.step(torch.randn(16, 8))
    assert batcher.micro_batch_size == 4
    memory.room = 100
    batcher.step(torch.randn(4, 64))
    assert batcher.micro_batch_size == 1
    batcher._sizes.of(torch.randn(1, 64)).limit = 3
    assert batcher._sizes.of(torch.randn(1, 32)).limit == 6 and batcher._sizes.of(torch.randn(1, 4)).limit == 8


@pytest.mark.parametrize("size", [4, "auto"])
def test_a_micro_batch_that_is_not_finite_is_left_out(size):
    whole = batch(12)
    good = {name: x[4:] for name, x in whole.items()}
    whole["x"][1] = math.nan
    model, opt = made(nonfinite="skip_micro_batch")
    batcher = fa.MicroBatcher(function(model), opt, size, weight=weight)
    batcher._sizes.of(whole).limit = 4
    loss = batcher.step(whole)
    twin, its = made()
    theirs = fa.MicroBatcher(function(twin), its, 8, weight=weight).step(good)
    assert opt.last_window.nonfinite == 1 and opt.last_window.micro_batches == 2
    torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
