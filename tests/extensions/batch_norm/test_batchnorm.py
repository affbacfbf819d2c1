"""A window's running statistics are those of torch's BatchNorm on its samples in one batch."""

import copy
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from pooling import assert_same_statistics, backward, big_batches, micro_batches, pair, statistics, train, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


LAYERS = {
    "1d": (lambda **k: nn.BatchNorm1d(3, **k), (3,)),
    "1d with length": (lambda **k: nn.BatchNorm1d(3, **k), (3, 5)),
    "2d": (lambda **k: nn.BatchNorm2d(3, **k), (3, 4, 5)),
    "3d": (lambda **k: nn.BatchNorm3d(3, **k), (3, 2, 3, 2)),
    "sync": (lambda **k: nn.SyncBatchNorm(3, **k), (3, 4)),  # without a process group
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_statistics_are_the_big_batchs(kind, momentum):
    make, shape = LAYERS[kind]
    layer, oracle = pair(make(momentum=momentum))
    windows = micro_batches(shape)
    train(layer, wrapped(layer, 4), windows)
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle)


@pytest.mark.parametrize(
    ("dtype", "layer_dtype", "offset", "tolerance"),
    [
        (torch.float64, torch.float64, 0.5, 1e-14),
        (torch.float64, torch.float64, 1e6, 1e-9),  # squares of 1e12 and more would leave 1e-4 of the variance
        (torch.float32, torch.float32, 1e4, 3e-4),  # the input's own rounding, 1e-3 of the deviation
        (torch.bfloat16, torch.float32, 0.5, 1e-6),
        (torch.bfloat16, torch.bfloat16, 0.5, 2e-2),
    ],
)
def test_dtypes_and_large_means(dtype, layer_dtype, offset, tolerance):
    layer, oracle = pair(nn.BatchNorm2d(3, momentum=1.0).to(layer_dtype))
    windows = micro_batches((3, 8, 8), dtype=dtype, offset=offset)
    train(layer, wrapped(layer, 4), windows)
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle, tolerance)


def test_forward_and_gradients_are_those_of_the_plain_layer():
    layer, plain = pair(nn.BatchNorm2d(3))
    opt = wrapped(layer, 1, reduction="none")
    addresses = [buffer.data_ptr() for buffer in layer.buffers()]
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(layer(x), plain(x))
    opt.reset()
    backward(layer, x)
    backward(plain, x)
    for ours, theirs in zip(layer.parameters(), plain.parameters()):
        assert torch.equal(ours.grad, theirs.grad)
    opt.step()
    assert [buffer.data_ptr() for buffer in layer.buffers()] == addresses
    layer.eval(), plain.eval()
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer(x), plain(x))


def test_nothing_moves_before_the_window_closes():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 4)
    before = statistics(layer)
    (window,) = micro_batches((3,), windows=1)
    for x in window[:3]:
        backward(layer, x)
        opt.step()
        assert all(torch.equal(before[name], now) for name, now in statistics(layer).items())
    opt.flush()
    big_batches(oracle, [window[:3]])
    assert_same_statistics(layer, oracle)


@pytest.mark.parametrize("affine", [True, False])
def test_models_that_share_a_trunk_pool_apart(affine):
    """Each model is swapped by a call of its own, and their layers follow the same parameter."""
    trunk, norms = nn.Linear(3, 3), [nn.BatchNorm1d(3, affine=affine) for _ in range(2)]
    if affine:
        norms[1].weight, norms[1].bias = norms[0].weight, norms[0].bias
    oracles = [nn.BatchNorm1d(3, affine=False) for _ in range(2)]
    models = [fa.accumulate_batchnorm(nn.Sequential(trunk, norm)) for norm in norms]
    opt = wrapped(nn.ModuleList(models), 2)
    samples = [torch.randn(8, 3), 3 * torch.randn(8, 3) + 5]
    with torch.no_grad():
        for oracle, x in zip(oracles, samples):
            oracle(trunk(x))
    for parts in zip(*(x.split(4) for x in samples)):
        for net, x in zip(models, parts):
            net(x).square().mean().backward()
        opt.step()
    for norm, oracle in zip(norms, oracles):
        assert_same_statistics(norm, oracle)


def test_every_layer_pools_its_own_inputs():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    fa.accumulate_batchnorm(net)
    oracles, seen = [nn.BatchNorm2d(4), nn.BatchNorm2d(4)], [[], []]
    for layer, inputs in zip((net[1], net[4]), seen):
        layer.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].detach()))
    opt = wrapped(net, 4)
    for window in micro_batches((1, 8, 8)):
        train(net, opt, [window])
        for layer, oracle, inputs in zip((net[1], net[4]), oracles, seen):
            oracle(torch.cat(inputs))
            inputs.clear()
            assert_same_statistics(layer, oracle)


@pytest.mark.parametrize("settings", [{"window_weight": 18}, {}], ids=["by weight", "caller-owned"])
def test_other_ways_to_end_a_window(settings):
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, reduction="sum", **settings)
    windows = micro_batches((3,))
    for window in windows:
        for x in window:
            layer(x).square().sum().backward()
            if settings:
                opt.step(weight=len(x))
        if not settings:
            opt.step(weight=18)
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle)


# -- forwards that count, and forwards that do not -------------------------------------------------


def test_wrapping_before_or_after_and_again():
    first, second, oracle = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    windows = micro_batches((3,))
    opt = wrapped(first, 4)
    train(fa.accumulate_batchnorm(first), opt, windows)
    fa.accumulate_batchnorm(second)
    opt = wrapped(second, 4)
    train(second, opt, windows[:1])
    del opt
    with pytest.raises(RuntimeError, match=r"wrap the model's optimizer, or call fa.restore_batchnorm"):
        second(windows[0][0])
    train(fa.accumulate_batchnorm(second), wrapped(second, 4), windows[1:])
    big_batches(oracle, windows)
    for layer in (first, second):
        assert_same_statistics(layer, oracle)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_count_once(reentrant):
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 2)
    windows = micro_batches((3,), sizes=(4, 7))
    for x in windows[0] + windows[1] + windows[2]:
        y = checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant)
        y.square().mean().backward()
        opt.step()
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle)


def test_forwards_without_gradients_are_as_before():
    layer, plain = pair(nn.BatchNorm1d(3))
    x = torch.randn(6, 3)
    with torch.no_grad():  # as torch.optim.swa_utils.update_bn does, without any wrapper
        layer(x), plain(x)
    assert_same_statistics(layer, plain, 0)
    layer.eval(), plain.eval()
    assert torch.equal(layer(x), plain(x))
    assert_same_statistics(layer, plain, 0)
    untracked = fa.accumulate_batchnorm(nn.BatchNorm1d(3, track_running_stats=False))
    assert untracked(x).shape == x.shape


def test_a_frozen_layer_stays_as_it_is():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    fa.accumulate_batchnorm(net)
    net[0].eval()
    train(net, wrapped(net, 4), micro_batches((3,)))
    assert net[0].num_batches_tracked == 0 and net[0].running_mean.eq(0).all()
    assert net[2].num_batches_tracked == 3 and net[2].running_mean.ne(0).all()


def test_a_layer_called_twice_moves_twice():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 3)
    left, right = micro_batches((3,), sizes=(4, 2, 5)), micro_batches((3,), sizes=(3, 6, 2), offset=9)
    for a, b in zip(left, right):
        for x, y in zip(a, b):
            (layer(x).square().mean() + layer(y).mean()).backward()
            opt.step()
        oracle(torch.cat(a)), oracle(torch.cat(b))
    assert_same_statistics(layer, oracle)


def test_unequal_numbers_of_calls():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 3)
    (window,) = micro_batches((3,), sizes=(4, 2, 5, 3, 6, 4), windows=1)
    for calls in ([0], [1, 2, 3], [4, 5]):
        for i in calls:
            layer(window[i]).square().mean().backward()
        opt.step()
    for population in ([0, 1, 4], [2, 5], [3]):
        oracle(torch.cat([window[i] for i in population]))
    assert_same_statistics(layer, oracle)


def test_zero_grad_between_forward_and_backward_loses_nothing():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 2)
    windows = micro_batches((3,), sizes=(4, 7))
    for x in windows[0] + windows[1] + windows[2]:
        loss = layer(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle)


def test_reset_drops_what_was_seen():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 2)
    lost, (window,) = torch.randn(4, 3) + 50, micro_batches((3,), sizes=(4, 7), windows=1)
    backward(layer, lost)
    opt.step()
    layer(lost)  # a forward that ran out of memory, say
    opt.reset()
    train(layer, opt, [window])
    big_batches(oracle, [window])
    assert_same_statistics(layer, oracle)


@pytest.mark.parametrize("counted", [True, False], ids=["accum_steps", "caller-owned"])
def test_a_dropped_micro_batch_counts_for_nothing(counted):
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, *[3] * counted, nonfinite="skip_micro_batch")
    (window,) = micro_batches((3,), sizes=(4, 2, 5), windows=1)
    for x in (*window[:2], torch.randn(3, 3), window[2]):
        bad = len(x) == 3
        (layer(x).square().mean() * (float("nan") if bad else 1.0)).backward()
        if counted:
            opt.step()
    if not counted:
        opt.step()
    assert opt.last_window.micro_batches == 3
    big_batches(oracle, [window])
    assert_same_statistics(layer, oracle)


def test_a_backward_that_raises_counts_for_nothing():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 2)
    (window,) = micro_batches((3,), sizes=(4, 7), windows=1)
    backward(layer, window[0])
    opt.step()
    with pytest.raises(ZeroDivisionError), opt.micro_batch():
        layer(torch.randn(4, 3) + 50)
        raise ZeroDivisionError
    backward(layer, window[1])
    opt.step()
    big_batches(oracle, [window])
    assert_same_statistics(layer, oracle)


@pytest.mark.parametrize("block", [True, False], ids=["then a block", "then a backward"])
@pytest.mark.parametrize("counted", [True, False], ids=["accum_steps", "caller-owned"])
def test_a_block_that_is_left_without_a_backward_counts_for_nothing(counted, block):
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, *[3] * counted)
    (window,) = micro_batches((3,), sizes=(4, 2, 7), windows=1)
    for x in (window[0], torch.randn(4, 3) + 50, *window[1:]):
        with opt.micro_batch() if block or x.mean() > 20 else nullcontext():
            loss = layer(x).square().mean()
            if x.mean() > 20:
                continue
            loss.backward()
        if counted:
            opt.step()
    if not counted:
        opt.step()
    big_batches(oracle, [window])
    assert_same_statistics(layer, oracle)


def test_statistics_that_are_not_finite_are_not_written():
    layer, oracle = pair(nn.BatchNorm1d(3, momentum=None))
    opt = wrapped(layer, 2, nonfinite="skip_window")
    windows = micro_batches((3,), sizes=(4, 7))
    bad = [windows[0][0], torch.full((4, 3), float("inf"))]
    train(layer, opt, [windows[0], bad, windows[1], windows[2]])
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle)


def test_two_wrappers_two_rhythms():
    """As in a GAN: a layer follows its parameters' wrapper or, without any, its neighbours'."""
    one = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)))
    two = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    both = fa.accumulate_batchnorm(nn.Sequential(one, two))
    first, second = wrapped(one, 2), wrapped(two, 4)
    oracle = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    (window,) = micro_batches((3,), windows=1)
    for i, x in enumerate(window):
        (one(x).square().mean() + two(x).square().mean()).backward()
        first.step(), second.step()
        moves = (i + 1) // 2
        assert one[0].num_batches_tracked == one[1][1].num_batches_tracked == moves
        assert two[0].num_batches_tracked == moves // 2
    big_batches(oracle[0], [window[:2], window[2:]])
    big_batches(oracle[1], [window])
    assert_same_statistics(both[0][0], oracle[0])
    assert_same_statistics(both[1][0], oracle[1])


def test_layers_whose_parameters_nobody_gathers_follow_the_nearest():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    fa.accumulate_batchnorm(net)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net[1].parameters(), lr=0.1), 4)
    train(net, opt, micro_batches((3,)))
    assert net[0].num_batches_tracked == net[2][0].num_batches_tracked == 3


def test_own_parameters_come_before_the_nearest_and_these_before_others():
    inner = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), nn.BatchNorm1d(3)
    )
    net = fa.accumulate_batchnorm(nn.Sequential(inner))
    often = wrapped(nn.ModuleList([inner[1], inner[2]]), 1)
    seldom = wrapped(inner[0], 2)  # the first parameter of every module around the layers, except inner[1]
    backward(net, torch.randn(4, 3))
    often.step(), seldom.step()
    assert inner[1][1].num_batches_tracked == inner[2].num_batches_tracked == 1


def test_lbfgs_counts_its_last_evaluation():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = fa.AccumulatingOptimizer(torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=3))
    (window,) = micro_batches((3,), windows=1)

    def closure():
        opt.zero_grad()
        losses = [layer(x).square().mean() for x in window]
        for loss in losses:
            loss.backward()
        return sum(losses)

    opt.step(closure)
    big_batches(
        oracle, [[x] for x in window]
    )  # one micro-batch of four calls: their forwards all come before the first backward
    assert_same_statistics(layer, oracle)


def test_a_checkpoint_within_a_reentrant_one_counts_once():
    layer, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(layer, 2)
    windows = micro_batches((3,), sizes=(4, 7))
    for x in windows[0] + windows[1]:
        inner = lambda x: layer(x).square()  # noqa: E731 - the second forward ends at the last operation that saves something
        y = checkpoint(
            lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False), x.requires_grad_(), use_reentrant=True
        )
        y.mean().backward()
        opt.step()
    big_batches(oracle, windows[:2])
    assert_same_statistics(layer, oracle)


@pytest.mark.parametrize("where", ["inside", "before"])
def test_passes_that_only_a_reentrant_checkpoint_brings_gradients_do_not_run_together(where):
    """Nothing signals its end: the next forward must not count as its micro-batch's second."""
    net = nn.Sequential(nn.BatchNorm1d(3, affine=where == "inside"), nn.Linear(3, 1))
    oracle = copy.deepcopy(net[0])
    opt = wrapped(fa.accumulate_batchnorm(net))
    windows = micro_batches((3,))
    for window in windows:
        for x in window:
            x.requires_grad_()
            y = (
                checkpoint(net, x, use_reentrant=True)
                if where == "inside"
                else checkpoint(net[1], net[0](x), use_reentrant=True)
            )
            y.mean().backward()
        opt.step()
        opt.zero_grad()
    big_batches(oracle, windows)
    assert_same_statistics(net[0], oracle)


@pytest.mark.parametrize("before", [True, False])
def test_running_statistics_that_are_taken_away(before):
    """As plain BatchNorm, a layer goes on without them; the others' move."""
    net = fa.accumulate_batchnorm(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(6)), nn.Linear(3, 2)))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), accum_steps=2)
    for micro_batch in range(2):
        if before or micro_batch == 1:
            net[2].running_mean = net[2].running_var = None
        net(torch.randn(4, 3)).square().mean().backward()
        opt.step()
    assert opt.updated and [int(layer.num_batches_tracked) for layer in net[:6] if layer is not net[2]] == [1] * 5
