"""Running statistics of a window, against torch's own BatchNorm on the window's samples in one batch."""

import copy
import gc
import io
import pickle
import warnings

import fusedaccum as fa
import fusedaccum.batch_statistics as batch_statistics
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def statistics(model):
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def assert_same_statistics(model, oracle, tolerance=1e-6):
    ours, theirs = statistics(model), statistics(oracle)
    assert ours.keys() == theirs.keys() and ours
    for name, buffer in theirs.items():
        if name.endswith("num_batches_tracked"):
            assert ours[name] == buffer, name
        else:
            scale = buffer.abs().max()
            assert ours[name].dtype == buffer.dtype
            assert (ours[name].double() - buffer.double()).abs().max() <= tolerance * scale, name


def wrapped(model, accum_steps=None, **settings):
    return fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), accum_steps, **settings)


def backward(model, x):
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).mean().backward()


def train(model, opt, windows):
    for window in windows:
        for x in window:
            backward(model, x)
            opt.step()
            opt.zero_grad()


def big_batches(model, windows):
    """What the layers would see at once; the statistics of the first depend on nothing that is trained."""
    for window in windows:
        model(torch.cat(window))


def micro_batches(shape, sizes=(5, 2, 8, 3), windows=3, dtype=torch.float32, offset=0.5):
    return [[torch.randn(n, *shape).mul(1.7).add(offset).to(dtype) for n in sizes] for _ in range(windows)]


def pair(layer):
    """A layer to be pooled, and the oracle."""
    oracle = copy.deepcopy(layer)
    return fa.accumulate_batchnorm(layer), oracle


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


# -- forwards that count, and forwards that do not ---------------------------------------------------------------------------


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
    with torch.no_grad():  # torch.optim.swa_utils.update_bn, and no wrapper anywhere
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


def test_statistics_that_are_not_finite_are_not_written():
    layer, oracle = pair(nn.BatchNorm1d(3, momentum=None))
    opt = wrapped(layer, 2, nonfinite="skip_window")
    windows = micro_batches((3,), sizes=(4, 7))
    bad = [windows[0][0], torch.full((4, 3), float("inf"))]
    train(layer, opt, [windows[0], bad, windows[1], windows[2]])
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle)


def test_two_wrappers_two_rhythms():
    """A GAN's halves: every layer follows the wrapper of its own parameters, one without any that of its neighbours."""
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
    seldom = wrapped(inner[0], 2)  # the first parameter of every module round the layers, but for inner[1]
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


# -- the swap ----------------------------------------------------------------------------------------------------------------


class Own(nn.BatchNorm2d):
    """A subclass with a forward of its own."""

    def forward(self, input):
        return super().forward(input).relu()


def test_undo_leaves_everything_as_it_was():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(Own(3)), nn.InstanceNorm1d(3))
    before = [(type(m), set(vars(m)), repr(m)) for m in net.modules()]
    assert fa.accumulate_batchnorm(net) is net
    assert fa.accumulate_batchnorm(net) is net  # twice is once
    assert isinstance(net[0], nn.BatchNorm1d) and isinstance(net[1][0], Own) and type(net[2]) is nn.InstanceNorm1d
    assert type(net[0]) is not nn.BatchNorm1d
    assert repr(net) == before[0][2] and list(net.state_dict()) == list(nn.Sequential(*net).state_dict())
    assert fa.restore_batchnorm(net) is net
    assert [(type(m), set(vars(m)), repr(m)) for m in net.modules()] == before
    x = torch.randn(4, 3)
    plain = nn.BatchNorm1d(3)
    net[0](x), plain(x)
    assert_same_statistics(net[0], plain, 0)


def test_a_subclass_keeps_its_forward():
    layer, oracle = pair(Own(3))
    windows = micro_batches((3, 4, 4))
    opt = wrapped(layer, 4)
    assert layer(windows[0][0]).ge(0).all()
    opt.reset()
    train(layer, opt, windows)
    big_batches(oracle, windows)
    assert_same_statistics(layer, oracle)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_model_have_statistics_of_their_own(copied):
    net = fa.accumulate_batchnorm(nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), Own1d(3)))
    opt = wrapped(net, 4)
    windows = micro_batches((3,))
    train(net, opt, windows[:1])
    backward(net, windows[1][0])
    opt.step()
    twin = copied(net)
    assert [type(m) for m in twin.modules()] == [type(m) for m in net.modules()]
    assert_same_statistics(twin, net, 0)
    with pytest.raises(RuntimeError, match="no AccumulatingOptimizer"):
        twin(windows[0][0])
    before = statistics(net)
    train(twin, wrapped(twin, 4), windows)
    assert twin[0].num_batches_tracked == 4
    assert all(torch.equal(before[name], now) for name, now in statistics(net).items())


class Own1d(nn.BatchNorm1d):
    pass


def test_model_and_optimizer_copied_together_inside_a_window():
    net = fa.accumulate_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    opt = wrapped(net, 4)
    (window,) = micro_batches((3,), windows=1)
    for x in window[:2]:
        backward(net, x)
        opt.step()
    twin, its = copy.deepcopy((net, opt))
    train(net, opt, [window[2:]])
    train(twin, its, [window[2:]])
    assert twin[0].num_batches_tracked == 1
    assert_same_statistics(twin, net, 0)


@pytest.mark.parametrize("wrong", [3, [nn.BatchNorm1d(3)]])
def test_what_is_no_module_is_refused(wrong):
    for function in (fa.accumulate_batchnorm, fa.restore_batchnorm):
        with pytest.raises(TypeError, match="must be a torch"):
            function(wrong)


def test_a_lazy_layer_is_refused_before_anything_is_swapped():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="1 is a LazyBatchNorm1d that has seen no input yet; run one forward"):
        fa.accumulate_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm1d
    net(torch.randn(4, 3))
    assert type(fa.accumulate_batchnorm(net)[1]) is not nn.BatchNorm1d


# -- checkpoints -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [True, False], ids=["between micro-batches", "before step()"])
def test_resumed_inside_a_window_bit_by_bit(between):
    def made():
        torch.manual_seed(5)
        net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
        fa.accumulate_batchnorm(net)
        return net, wrapped(net, 4)

    net, opt = made()
    windows = micro_batches((3,))
    train(net, opt, windows[:1])
    for x in windows[1][:2]:
        backward(net, x)
        opt.step()
    backward(net, windows[1][2])
    if between:
        opt.step()
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
    resumed, its = made()
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed.load_state_dict(saved["net"]), its.load_state_dict(saved["opt"])
    for model, wrapper in ((net, opt), (resumed, its)):
        if not between:
            wrapper.step()
        train(model, wrapper, [windows[1][3:], windows[2]])
    assert net[0].num_batches_tracked == 3
    for ours, theirs in zip(resumed.state_dict().values(), net.state_dict().values()):
        assert torch.equal(ours, theirs)


def test_a_window_with_statistics_does_not_load_where_nobody_takes_them():
    net = fa.accumulate_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    opt = wrapped(net, 2)
    backward(net, torch.randn(4, 3))
    opt.step()
    saved = opt.state_dict()
    fa.restore_batchnorm(net)
    with pytest.raises(ValueError, match=r"of 1 BatchNorm layers .* call fa.accumulate_batchnorm\(model\) before"):
        opt.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_update_bn_of_a_checkpointed_model_is_as_before(reentrant):
    def made(pooled):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3)
        return fa.accumulate_batchnorm(norm) if pooled else norm

    batches = [torch.randn(6, 3) + i for i in range(3)]
    plain, pooled = made(False), made(True)
    opt = wrapped(pooled, 1)
    for norm in (plain, pooled):
        through = lambda x, norm=norm: checkpoint(norm, x, use_reentrant=reentrant)  # noqa: E731
        with torch.no_grad():
            for x in batches:
                through(x)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(getattr(pooled, name), buffer)
    backward(pooled, torch.randn(4, 3))
    opt.step()
    assert pooled.num_batches_tracked == 4


# -- the note ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def not_yet_noted(monkeypatch):
    monkeypatch.setattr(batch_statistics, "_noted", False)


def run_plain(net, accum_steps, windows=1):
    opt = wrapped(net, accum_steps)
    for _ in range(windows * accum_steps):
        backward(net, torch.randn(4, 3))
        opt.step()


def test_batch_norm_that_is_not_pooled_is_noted_once(not_yet_noted):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.warns(
        UserWarning, match=r"1 BatchNorm layer\(s\), the first the BatchNorm1d .*\[2\].*accumulate_batchnorm"
    ) as noted:
        run_plain(net, 2)
    assert noted[0].filename == __file__
    run_plain(copy.deepcopy(net), 2)  # warnings are errors


def test_the_note_can_be_silenced(not_yet_noted):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*BatchNorm layer")
        run_plain(nn.BatchNorm1d(3), 2)


@pytest.mark.parametrize("case", ["pooled", "frozen", "one micro-batch", "none", "somebody else's"])
def test_no_note(not_yet_noted, case):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    if case == "pooled":
        fa.accumulate_batchnorm(net)
    elif case == "frozen":
        net[0].eval()
    elif case in ("none", "somebody else's"):
        other, net = net, nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3))
        assert other.training
    run_plain(net, 1 if case == "one micro-batch" else 2, windows=2)


def test_a_layer_that_was_dropped_is_not_noted(not_yet_noted):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    opt = wrapped(net, 2)
    gc.disable()
    try:
        net[0].itself = [net[0]]  # so that it stays until the garbage collector comes by
        net[0] = nn.Identity()
        for _ in range(2):
            backward(net, torch.randn(4, 3))
            opt.step()  # warnings are errors
    finally:
        gc.enable()


# -- torch.compile -----------------------------------------------------------------------------------------------------------


def test_a_compiled_model_pools_too(compiled_anew):
    net = fa.accumulate_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()))
    oracle = nn.BatchNorm1d(3)
    opt = wrapped(net, 4)
    windows = micro_batches((3,))
    train(torch.compile(net, backend="aot_eager"), opt, windows)
    big_batches(oracle, windows)
    assert_same_statistics(net[0], oracle)
    net.eval()
    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), net(x))
