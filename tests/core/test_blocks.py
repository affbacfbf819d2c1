"""Blocks of ``with opt.micro_batch():`` that hold no backward, or one that no hook tells of."""

import contextlib
import copy
import threading

import pytest
import torch
from fusedaccum.autograd.passes import saw_pass
from training import assert_same_parameters, big_batch_step, data, gradient, mean_loss, model, parts, sgd, twin, wrapped


@pytest.mark.parametrize("block", [True, False], ids=["then a block", "then a backward"])
@pytest.mark.parametrize("skipped", [0, 2, 4])
@pytest.mark.parametrize(
    "settings", [{}, {"accum_steps": 3}, {"window_weight": 12}], ids=["caller-owned", "counted", "weighed"]
)
@pytest.mark.parametrize("weighed", [False, True])
def test_a_block_that_is_left_without_a_backward_counts_for_nothing(weighed, settings, skipped, block):
    """A loop that skips a micro-batch with a NaN loss by ``continue``: no weight stays behind."""
    (x, y), runs = data(), []
    for sizes in ([4, 5, 7, 3, 5], [size for i, size in enumerate([4, 5, 7, 3, 5]) if i != skipped]):
        net = model()
        opt = wrapped(net, **settings)
        for i, size in enumerate(sizes):
            weight = float(size) if weighed else (1.0 if "window_weight" in settings else None)
            if len(sizes) == 5 and i == skipped:
                with opt.micro_batch(weight=weight):
                    continue
            loss = mean_loss(net, x[:size], y[:size])
            if block:
                with opt.micro_batch(weight=weight):
                    loss.backward()
            else:
                opt.backward(loss, weight=weight)
            if settings:
                opt.step()
        opt.flush()
        runs.append((list(net.parameters()), opt.last_window.as_dict()))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))


def test_a_block_without_a_backward_of_which_step_is_told_counts():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    opt.backward(mean_loss(net, x[:4], y[:4]), weight=4)
    opt.step()
    with opt.micro_batch(weight=12):
        pass
    opt.step()
    assert opt.updated and (opt.last_window.micro_batches, opt.last_window.weight) == (2, 16)


@pytest.mark.parametrize("carried", ["loaded", "copied"])
def test_a_checkpoint_leaves_out_a_block_without_a_backward(carried):
    net, big, (x, y) = model(), model(), data()
    opt = wrapped(net, 2)
    opt.backward(mean_loss(net, x[:4], y[:4]), weight=4)
    opt.step()
    with opt.micro_batch(weight=12):
        pass
    if carried == "loaded":
        opt.load_state_dict(opt.state_dict())
    else:
        net, opt = copy.deepcopy((net, opt))
    opt.backward(mean_loss(net, x[4:10], y[4:10]), weight=6)
    opt.step()
    big_batch_step(big, sgd(big.parameters()), x[:10], y[:10])
    assert_same_parameters(net, big, 1e-12)
    assert (opt.last_window.micro_batches, opt.last_window.weight) == (2, 10)


@pytest.mark.parametrize("then", ["flush", "copy", "late weight"])
@pytest.mark.parametrize("block", [True, False], ids=["a block", "a backward"])
def test_what_follows_a_block_without_weight_or_backward_is_kept(block, then):
    net, big, (x, y) = model(), model(), data()
    opt = wrapped(net, 2)
    with opt.micro_batch():
        pass
    with opt.micro_batch() if block else contextlib.nullcontext():
        mean_loss(net, x, y).backward()
    if then == "copy":
        net, opt = copy.deepcopy((net, opt))
    if then == "late weight":
        with pytest.raises(ValueError, match="weight 2 comes too late"):
            opt.backward(mean_loss(net, x, y), weight=2)
    opt.flush()
    big_batch_step(big, sgd(big.parameters()), x, y)
    assert_same_parameters(net, big, 1e-12)
    assert (opt.last_window.micro_batches, opt.last_window.weight) == (1, 1)


@pytest.mark.parametrize("told", ["block", "backward"])
@pytest.mark.parametrize("accum_steps", [None, 2])
def test_a_loss_that_does_not_reach_the_parameters_counts(accum_steps, told):
    net, other, (x, y) = model(), model(seed=1), data()
    opt = wrapped(net, accum_steps, reduction="sum")
    if told == "block":
        others = wrapped(other, accum_steps, reduction="sum")
        with opt.micro_batch(weight=3):
            others.backward(mean_loss(other, x, y), weight=3)
    else:
        opt.backward(mean_loss(other, x, y), weight=3)
    if accum_steps:
        opt.step()
    with opt.micro_batch(weight=4):
        mean_loss(net, x, y).backward()
    opt.step()
    assert opt.last_window.weight == 7


def test_an_empty_block_after_a_part_of_a_micro_batch_leaves_that_alone():
    net, (x, y) = model(), data()
    whole, opt, loss = twin(net), wrapped(net, 1), mean_loss(net, x, y).item()
    for part in (0.25, None, 0.75):
        with opt.micro_batch(weight=24):
            if part is not None:
                (part * mean_loss(net, x, y)).backward()
                opt.record_loss(part * loss)
    opt.step()
    assert opt.last_window.loss.item() == pytest.approx(loss)
    big_batch_step(whole, sgd(whole.parameters()), x, y)
    assert_same_parameters(net, whole, 1e-12)


def test_a_backward_after_its_block_joins_it_with_a_warning():
    net, (x, y) = model(), data()
    whole, opt = twin(net), wrapped(net, 2)
    for xs, ys in parts(x, y, (6, 18)):
        with opt.micro_batch(weight=len(xs)):
            loss = mean_loss(net, xs, ys)
        with pytest.warns(RuntimeWarning, match="joins the micro-batch of a block.* put the backward into its block"):
            loss.backward()
        opt.step()
    big_batch_step(whole, sgd(whole.parameters()), x, y)
    assert_same_parameters(net, whole, 1e-12)


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_a_block_in_which_gradients_are_set_by_hand_counts(owned):
    net, (x, y) = model(), data()
    whole, opt = twin(net), wrapped(net, None if owned else 8)
    with opt.micro_batch(weight=24):
        for p, g in zip(net.parameters(), gradient(net, x, y), strict=True):
            p.grad = 24 * g  # p.grad is the sum of weighted gradients
    opt.flush()
    assert opt.last_window.weight == 24
    big_batch_step(whole, sgd(whole.parameters()), x, y)
    assert_same_parameters(net, whole, 1e-12)


@pytest.mark.parametrize("there", ["hooks", "opt.backward"])
def test_a_block_without_a_backward_counts_for_nothing_while_another_thread_trains_another_model(there):
    nets, (x, y) = [model(seed=seed) for seed in range(2)], data()
    opts = [wrapped(net) for net in nets]
    plain = twin(nets[0])

    def other():
        loss = mean_loss(nets[1], x, y)
        loss.backward() if there == "hooks" else opts[1].backward(loss)

    mean_loss(nets[0], x, y).backward()
    with opts[0].micro_batch():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    opts[0].step()
    assert opts[0].last_window.micro_batches == 1
    big_batch_step(plain, sgd(plain.parameters()), x, y)
    assert_same_parameters(nets[0], plain, 1e-12)


def test_a_backward_of_a_thread_that_is_not_known_may_be_the_blocks():
    """Where two threads call backward at once, nothing tells for which of them a hook runs."""
    net, (x, y) = model(), data()
    opt = wrapped(net)
    mean_loss(net, x, y).backward()
    with opt.micro_batch():
        saw_pass(None)
    opt.step()
    assert opt.last_window.micro_batches == 2
