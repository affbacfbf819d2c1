"""Modules that pool batch statistics: swapped in, copied, saved, compiled; the note on others."""

import copy
import gc
import io
import pickle
import warnings

import fusedaccum as fa
import fusedaccum.extensions.batch_norm as batch_norm
import pytest
import torch
from pooling import assert_same_statistics, backward, big_batches, micro_batches, pair, statistics, train, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


# -- the swap --------------------------------------------------------------------------------------


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


# -- checkpoints -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("carried", ["loaded", "copied"])
def test_a_checkpoint_between_two_forwards_of_a_micro_batch_knows_which_is_next(carried):
    windows = micro_batches((3,), windows=2)
    net, oracle = pair(nn.BatchNorm1d(3))
    opt = wrapped(net, len(windows[0]))
    for first, second in zip(*windows):
        backward(net, first)
        if carried == "loaded":
            opt.load_state_dict(opt.state_dict())
        else:
            net, opt = copy.deepcopy((net, opt))
        backward(net, second)
        opt.step()
    big_batches(oracle, windows)
    assert_same_statistics(net, oracle)


@pytest.mark.parametrize("inside", ["a window", "a micro-batch"])
def test_a_window_with_statistics_does_not_load_where_nobody_takes_them(inside):
    net = fa.accumulate_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    opt = wrapped(net, 2)
    backward(net, torch.randn(4, 3))
    if inside == "a window":
        opt.step()
    saved = opt.state_dict()
    fa.restore_batchnorm(net)
    with pytest.raises(ValueError, match=r"of 1 BatchNorm layers .* call fa.accumulate_batchnorm\(model\) before"):
        opt.load_state_dict(saved)
    opt.load_state_dict(opt.state_dict())  # without what was pooled, which is left out


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


# -- the note --------------------------------------------------------------------------------------


@pytest.fixture
def not_yet_noted(monkeypatch):
    monkeypatch.setattr(batch_norm, "_noted", False)


def run_plain(net, accum_steps, windows=1):
    opt = wrapped(net, accum_steps)
    for _ in range(windows * accum_steps):
        backward(net, torch.randn(4, 3))
        opt.step()


@pytest.mark.parametrize("bias", [False, True])  # without, the layer's own are the only two vectors of a size
def test_batch_norm_that_is_not_pooled_is_noted_once(not_yet_noted, bias):
    net = nn.Sequential(nn.Linear(3, 3, bias), nn.BatchNorm1d(3))
    with pytest.warns(
        UserWarning, match=r"1 BatchNorm layer\(s\), the first being 1 \(BatchNorm1d\).*accumulate_batchnorm"
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


def test_a_layer_that_is_not_complete_is_not_looked_at(not_yet_noted):
    begun = nn.BatchNorm1d.__new__(nn.BatchNorm1d)  # as a copy that failed leaves it
    run_plain(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), 2)
    del begun


def test_a_layer_that_was_dropped_is_not_noted(not_yet_noted):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    opt = wrapped(net, 2)
    gc.disable()
    try:
        net[0].itself = [net[0]]  # a cycle: it lives until the garbage collector runs
        net[0] = nn.Identity()
        for _ in range(2):
            backward(net, torch.randn(4, 3))
            opt.step()  # warnings are errors
    finally:
        gc.enable()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_dropped_in_a_reference_cycle_changes_no_number(frozen, freeze):
    """By it ranks tell layers apart; on one, the garbage collector may have run already."""
    trunk = nn.Linear(3, 3)

    def pooled():
        return fa.accumulate_batchnorm(nn.Sequential(trunk, nn.BatchNorm1d(3)))[1]

    gc.disable()
    try:
        layer = pooled()
        layer.itself, (number, _) = [layer], layer._place
        if frozen:
            freeze()
        del layer
        assert pooled()._place[0] == number
    finally:
        gc.enable()


# -- torch.compile ---------------------------------------------------------------------------------


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


class Halved(nn.BatchNorm1d):
    """Its momentum is computed."""

    @property
    def momentum(self):
        return self._doubled / 2

    @momentum.setter
    def momentum(self, value):
        self._doubled = 2 * value


def test_a_momentum_that_a_subclass_computes():
    layer, oracle = pair(Halved(3))
    windows = micro_batches((3,))
    train(layer, wrapped(layer, 4), windows)
    big_batches(oracle, windows)
    assert layer.momentum == 0.1
    assert_same_statistics(layer, oracle)


def test_layers_that_share_their_buffers():
    """Each moves them in turn, as forwards of the big batch do."""
    net, oracle = (nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)) for _ in range(2))
    for model in (net, oracle):
        for name, buffer in model[0].named_buffers():
            setattr(model[1], name, buffer)
    fa.accumulate_batchnorm(net)
    opt, x = wrapped(net, 1), torch.randn(8, 3)
    net(x).sum().backward()
    opt.step()
    oracle(x)
    assert int(net[0].num_batches_tracked) == 2
    assert_same_statistics(net[0], oracle[0])
