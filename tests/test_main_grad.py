"""Layers that add their weights' gradients into main_grad themselves, by the protocol of Megatron-LM and TransformerEngine.

The layer here keeps to what Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication and TransformerEngine's Linear (with
fuse_wgrad_accumulation) do in backward, without their GEMMs, which need a GPU; its meaningless gradients are NaN.
"""

import copy
import gc
import io
import pickle
from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, data, mean_loss, parts, sgd, sum_loss

pytestmark = pytest.mark.usefixtures("each_intake")
RTOL = 1e-12


class Product(torch.autograd.Function):
    """``x @ weight.T``, the weight's gradient added to main_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        for_x = grad @ weight
        if not weight.requires_grad:
            return for_x, None
        # By raw pointer, as a kernel writes: no version is raised.
        weight.main_grad.data.add_((grad.t() @ x).to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        empty = torch.zeros if getattr(weight, "zero_out_wgrad", False) else nan
        return for_x, empty(weight.main_grad.shape, dtype=x.dtype)


def nan(shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


class Adding(nn.Linear):
    """A Linear that adds by itself, as long as its weight is marked."""

    def forward(self, x):
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return super().forward(x)
        product = Product.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


class Net(nn.Module):
    """Two layers that add by themselves, one of them used twice, and plain ones."""

    def __init__(self, checkpointed=None):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.twice, self.last = Adding(6, 8), Adding(8, 8), nn.Linear(8, 3)
        self.checkpointed = checkpointed
        self.double()

    def middle(self, x):
        return torch.tanh(self.twice(torch.tanh(self.twice(x))))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        again = self.checkpointed is not None
        return self.last(checkpoint(self.middle, x, use_reentrant=self.checkpointed) if again else self.middle(x))


def marked(net):
    """The model, its layers made to add by themselves: what a user writes."""
    for module in net.modules():
        if isinstance(module, Adding):
            module.weight.grad_added_to_main_grad = False
    return net


def wrapped(net, *args, **kwargs):
    return fa.AccumulatingOptimizer(sgd(net.parameters()), *args, **kwargs)


def train(net, opt, windows=3, sizes=(10, 6, 8), loss=mean_loss, weigh=False):
    """Windows of other data each; the same data for the same call."""
    for w in range(windows):
        for x, y in parts(*data(seed=w), list(sizes)):
            opt.backward(loss(net, x, y), weight=len(x) if weigh else None)
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_trains_as_the_unfused_model(checkpointed):
    plain, net = Net(checkpointed), marked(Net(checkpointed))
    for model in (plain, net):
        opt = wrapped(model, 3)
        train(model, opt)
        assert opt.updated
    assert_same_parameters(net, plain, RTOL)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.01}, {"nonfinite": "skip_window"}, {"reduction": "none"}, {}])
def test_settings_keep_their_meaning(settings):
    plain, net = Net(), marked(Net())
    last = []
    for model in (plain, net):
        opt = wrapped(model, 3, **settings)
        train(model, opt)
        last.append(opt.last_window)
    assert_same_parameters(net, plain, RTOL)
    assert last[0].applied and last[1].applied
    if last[0].grad_norm is not None:
        torch.testing.assert_close(last[1].grad_norm, last[0].grad_norm, rtol=RTOL, atol=0)


def test_equals_the_big_batch_with_unequal_micro_batches_as_sums():
    net, big = marked(Net()), Net()
    train(net, wrapped(net, 3, reduction="sum"), loss=sum_loss, weigh=True)
    optimizer = sgd(big.parameters())
    for w in range(3):
        optimizer.zero_grad()
        mean_loss(big, *data(seed=w)).backward()
        optimizer.step()
    assert_same_parameters(net, big, RTOL)


def test_windows_of_the_caller_and_grouped_passes():
    plain, net = Net(), marked(Net())
    for model in (plain, net):
        opt = wrapped(model)
        for w in range(3):
            (a, b, c) = parts(*data(seed=w), [10, 6, 8])
            mean_loss(model, *a).backward()
            with opt.micro_batch():
                mean_loss(model, *b).backward()
                mean_loss(model, *c).backward()
            opt.step()
    assert_same_parameters(net, plain, RTOL)


def test_bf16_weights_gather_in_fp32():
    net = marked(Net().bfloat16())
    opt = wrapped(net, 300)
    x, y = (t.bfloat16() for t in data())
    mean_loss(net, x, y).backward()
    once = net.first.weight.grad.clone()
    assert once.dtype == net.first.weight.main_grad.dtype == torch.float32
    opt.step()
    for _ in range(299):
        mean_loss(net, x, y).backward()
        sums = net.first.weight.grad.clone()
        opt.step()
    torch.testing.assert_close(sums, 300 * once, rtol=1e-5, atol=0)
    assert opt.updated


def test_p_grad_is_main_grad_inside_a_window_and_gone_after_it():
    net = marked(Net())
    opt = wrapped(net, 2)
    x, y = data()
    for _ in range(2):
        assert net.first.weight.grad is None and not net.first.weight.main_grad.any()
        for _ in range(2):
            mean_loss(net, x, y).backward()
            assert net.first.weight.grad is net.first.weight.main_grad
            assert net.first.weight.grad_added_to_main_grad is False
            opt.step()
    assert net.first.weight.grad is None and net.last.weight.grad is not None


def test_a_layer_whose_fusion_is_off_for_some_micro_batches():
    plain, net = Net(), marked(Net())
    for model in (plain, net):
        opt = wrapped(model, 4)
        x, y = data()
        for i in range(8):
            off = model is net and i % 2 == 0  # also at the first touch
            loss = functional.mse_loss(plain_forward(net, x) if off else model(x), y)
            loss.backward()
            opt.step()
    assert_same_parameters(net, plain, RTOL)


def plain_forward(net, x):
    for layer in (net.first, net.twice, net.twice):
        x = torch.tanh(functional.linear(x, layer.weight, layer.bias))
    return net.last(x)


def test_a_checkpoint_inside_a_window():
    net, never_stopped = marked(Net()), marked(Net())
    x, y = data()
    saved = io.BytesIO()
    for model in (net, never_stopped):
        opt = wrapped(model, 3, max_grad_norm=0.1)
        for i in range(6):
            if model is net and i == 4:
                torch.save((net.state_dict(), opt.state_dict()), saved)
                break
            mean_loss(model, x * (i + 1), y).backward()
            opt.step()
    resumed = marked(Net())
    opt = wrapped(resumed, 3, max_grad_norm=0.1)
    saved.seek(0)
    weights, state = torch.load(saved, weights_only=True)
    resumed.load_state_dict(weights)
    opt.load_state_dict(state)
    assert resumed.first.weight.grad is resumed.first.weight.main_grad
    for i in (4, 5):
        mean_loss(resumed, x * (i + 1), y).backward()
        opt.step()
    for p, q in zip(resumed.parameters(), never_stopped.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("drop", ["reset", "zero_grad", "load"])
def test_dropped_windows_leave_nothing(drop):
    net, fresh = marked(Net()), marked(Net())
    opt = wrapped(net, None if drop == "zero_grad" else 3)
    start = copy.deepcopy(opt.state_dict())
    mean_loss(net, *data(seed=9)).backward()
    {"reset": opt.reset, "zero_grad": opt.zero_grad, "load": lambda: opt.load_state_dict(start)}[drop]()
    assert not net.first.weight.main_grad.any()
    train(net, opt)
    train(fresh, wrapped(fresh, None if drop == "zero_grad" else 3))
    assert_same_parameters(net, fresh, 0)


def test_a_window_that_is_skipped_leaves_nothing():
    net, fresh = marked(Net()), marked(Net())
    opt = wrapped(net, 3, nonfinite="skip_window")
    x, y = data(seed=9)
    for factor in (1.0, float("inf"), 1.0):
        mean_loss(net, x * factor, y).backward()
        opt.step()
    assert not opt.updated and opt.last_window.nonfinite > 0
    assert not net.first.weight.main_grad.any()
    train(net, opt)
    train(fresh, wrapped(fresh, 3, nonfinite="skip_window"))
    assert_same_parameters(net, fresh, 0)


def test_a_bad_gradient_of_such_a_layer_alone_skips_the_window():
    weight = marked(Adding(6, 2, bias=False)).weight
    opt = fa.AccumulatingOptimizer(sgd([weight]), 3, nonfinite="skip_window")
    for factor, applied in (((1.0, float("nan"), 1.0), False), ((1.0, 1.0, 1.0), True)):
        for f in factor:
            Product.apply(f * torch.ones(4, 6), weight).sum().backward()
            opt.step()
        assert opt.updated is applied and bool(opt.last_window.nonfinite > 0) is not applied


@pytest.mark.parametrize("first", [True, False])
def test_a_pass_that_breaks_off_before_any_hook_drops_the_window(first):
    weight = marked(Adding(6, 2, bias=False)).weight
    opt = fa.AccumulatingOptimizer(sgd([weight]), 3)
    if not first:
        Product.apply(torch.ones(4, 6), weight).sum().backward()
        opt.step()

    def fail(grad):
        raise ValueError("on purpose")

    handle = weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        Product.apply(torch.ones(4, 6), weight).sum().backward()
    handle.remove()
    assert weight.main_grad.any()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.zero_grad()
    assert not weight.main_grad.any() and weight.grad is None


@pytest.mark.parametrize("where", ["between two", "in a hook"])
@pytest.mark.parametrize("through", ["backward", "opt.backward"])
def test_a_pass_that_breaks_off_drops_the_window(where, through):
    """Whatever a layer has added can be told from nothing by its mark, and cannot be taken out again."""
    net, fresh = marked(Net()), marked(Net())
    opt = wrapped(net, 3)
    x, y = data(seed=9)
    mean_loss(net, x, y).backward()
    opt.step()

    def fail(grad):
        raise ValueError("on purpose")

    h = torch.tanh(net.first(x))
    middle = net.middle(h)
    loss = functional.mse_loss(net.last(middle), y)
    if where == "in a hook":
        handle = net.twice.weight.register_hook(fail)
    else:
        h.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"), pytest.warns(RuntimeWarning, match="dropped") as caught:
        if through == "backward":
            try:
                loss.backward()
            finally:
                opt.zero_grad()  # any call of the wrapper's notices
        else:
            opt.backward(loss)
    assert len([w for w in caught if "dropped" in str(w.message)]) == 1
    if where == "in a hook":
        handle.remove()
    assert not net.first.weight.main_grad.any() and not net.twice.weight.main_grad.any()
    train(net, opt)
    train(fresh, wrapped(fresh, 3))
    assert_same_parameters(net, fresh, 0)


def test_an_inner_step_that_raises_is_repeated():
    net, plain = marked(Net()), Net()
    opt = wrapped(net, 1)
    broken = iter([True])

    def fail(*_):
        if next(broken, False):
            raise ValueError("on purpose")

    opt.optimizer.register_step_pre_hook(fail)
    mean_loss(net, *data()).backward()
    with pytest.raises(ValueError, match="on purpose"):
        opt.step()
    opt.step()
    assert opt.updated
    optimizer = sgd(plain.parameters())
    mean_loss(plain, *data()).backward()
    optimizer.step()
    assert_same_parameters(net, plain, RTOL)


def test_a_pass_into_a_window_that_could_not_be_applied_is_refused():
    net = marked(Net())
    opt = wrapped(net, 1)

    def fail(*_):
        raise ValueError("on purpose")

    handle = opt.optimizer.register_step_pre_hook(fail)
    mean_loss(net, *data()).backward()
    with pytest.raises(ValueError, match="on purpose"):
        opt.step()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"main_grad, which .* does not show"):
        mean_loss(net, *data()).backward()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.reset()
    fresh = marked(Net())
    train(net, opt)
    train(fresh, wrapped(fresh, 1))
    assert_same_parameters(net, fresh, 0)


def test_a_gradient_set_by_hand_is_refused():
    net = marked(Net())
    opt = wrapped(net, 2)
    net.first.weight.grad = torch.ones_like(net.first.weight)
    with pytest.raises(RuntimeError, match=r"does not show: that was set by hand.* opt.reset\(\)"):
        mean_loss(net, *data()).backward()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.reset()
    mean_loss(net, *data()).backward()
    assert net.first.weight.grad is net.first.weight.main_grad


@pytest.mark.parametrize("weight", [2.0, torch.tensor(1.0)])
def test_weights_under_mean_are_refused_before_backward(weight):
    net = marked(Net())
    opt = wrapped(net, 2)
    loss = mean_loss(net, *data())
    with pytest.raises(ValueError, match=r"weight is .*reduction='mean'.*use reduction='sum'"):
        opt.backward(loss, weight=weight)
    assert not net.first.weight.main_grad.any() and net.last.weight.grad is None
    opt.backward(loss, weight=1)


def test_a_loss_scale_that_changes_within_a_window_is_refused():
    net = marked(Net())
    opt = wrapped(net, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for i in range(3):
        loss = scaler.scale(mean_loss(net, *data()))
        if i == 2:
            with pytest.raises(RuntimeError, match=r"needs 0.5 times it: .* or a GradScaler has changed its scale"):
                loss.backward()
            break
        loss.backward()
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nonfinite": "raise"}, "nonfinite='raise' must see them before"),
        ({"nonfinite": "skip_micro_batch"}, "nonfinite='skip_micro_batch' must see them before"),
        ({"buffer_dtype": torch.bfloat16}, "use buffer_dtype=torch.float32"),
        ({"buffer_dtype": None}, "use buffer_dtype=torch.float32"),
    ],
)
def test_what_cannot_be_is_refused_at_wrapping(settings, message):
    net = marked(Net().bfloat16())
    with pytest.raises(ValueError, match=f"weight has the attribute.*{message}|param_groups.*{message}"):
        wrapped(net, 2, **settings)
    assert not hasattr(net.first.weight, "main_grad")
    wrapped(net, 2)


def test_somebody_elses_main_grad_is_refused():
    net = marked(Net())
    net.twice.weight.main_grad = torch.zeros(8, 8)
    with pytest.raises(ValueError, match="somebody else's main_grad"):
        wrapped(net, 2)


def test_without_the_wrapper_the_layer_fails_instead_of_training_on_nothing():
    net = marked(Net())
    opt = wrapped(net, 2)
    mean_loss(net, *data()).backward()
    del opt
    gc.collect()
    with pytest.raises(AttributeError, match="main_grad"):
        mean_loss(net, *data()).backward()
    net.zero_grad()
    train(net, wrapped(net, 3))


def test_a_copy_of_model_and_wrapper_must_be_marked_anew():
    """PyTorch's copies of parameters lose their attributes: the copied layers are plain, and gather what the original has."""
    net, plain = marked(Net()), Net()
    opt, plain_opt = wrapped(net, 2), wrapped(plain, 2)
    for model in (net, plain):
        mean_loss(model, *data()).backward()
    copied, copied_opt = copy.deepcopy((net, opt))
    for o in (opt, copied_opt, plain_opt):
        o.step()
    for model in (net, copied, plain):
        mean_loss(model, *data()).backward()
    for o in (opt, copied_opt, plain_opt):
        o.step()
    assert_same_parameters(net, plain, RTOL)
    assert_same_parameters(copied, plain, RTOL)


def test_groups_added_later_keep_the_window():
    net, plain = Net(), Net()
    net.first.weight.grad_added_to_main_grad = False
    for model in (plain, net):
        opt = fa.AccumulatingOptimizer(sgd(model.first.parameters()), 2)
        mean_loss(model, *data()).backward()
        opt.step()
        later = [*model.twice.parameters(), *model.last.parameters()]
        for p in later:
            p.grad = None
        if model is net:
            marked(net.twice)
        opt.add_param_group({"params": later})
        mean_loss(model, *data()).backward()
        opt.step()
        assert opt.updated
    assert net.twice.weight.main_grad is not None
    assert_same_parameters(net, plain, RTOL)


def lone(*shape, dtype=torch.float64):
    """A weight that its layer adds to."""
    weight = nn.Parameter(torch.ones(shape, dtype=dtype))
    weight.grad_added_to_main_grad = False
    return weight


def test_a_layer_left_out_of_a_window_finds_zeros_in_the_next():
    """The window's bf16 gradient takes the place of the FP32 sums, of the whole block."""
    a, b = lone(3, 64, dtype=torch.bfloat16), lone(3, 64, dtype=torch.bfloat16)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, b], lr=0.0), 1)
    for weight in (b, a):
        Product.apply(torch.full((4, 64), 3.0, dtype=torch.bfloat16), weight).sum().backward()
        assert (weight.grad == 12).all()
        opt.step()
        assert not a.main_grad.any() and not b.main_grad.any()


def test_gradients_of_other_layers_stay_readable_after_the_window():
    plain, net = Net().bfloat16(), marked(Net().bfloat16())
    x, y = (t.bfloat16() for t in data())
    for model in (plain, net):
        opt = wrapped(model, 1)
        mean_loss(model, x, y).backward()
        opt.step()
    for name in ("first.bias", "twice.bias", "last.weight", "last.bias"):
        assert net.get_parameter(name).grad.any()
        torch.testing.assert_close(net.get_parameter(name).grad, plain.get_parameter(name).grad, rtol=0.05, atol=1e-3)


class Tied(nn.Module):
    """A head that adds by itself, and an embedding of the same weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(11, 6), Adding(6, 11)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_that_is_tied_to_an_embedding(fused):
    """zero_out_wgrad: autograd has added the embedding's gradient to the layer's zeros. A fused embedding sends none."""
    plain, net = Tied(), marked(Tied())
    if fused:
        fa.fuse_embedding(net)
    else:
        net.head.weight.zero_out_wgrad = True
    tokens = torch.randint(0, 11, (12, 5)).split([4, 2, 6])
    for model in (plain, net):
        opt = wrapped(model, 3, max_grad_norm=0.1)
        for _ in range(2):
            for part in tokens:
                functional.cross_entropy(model(part.flatten()), part.flatten().roll(1)).backward()
                opt.step()
    assert_same_parameters(net, plain, RTOL)


def test_a_pass_right_after_one_that_broke_off_is_refused_where_the_two_mix():
    torch.manual_seed(2)
    net = marked(nn.Sequential(nn.Linear(6, 5), Adding(5, 3, bias=False)).double())
    fresh = copy.deepcopy(net)
    marked(fresh)
    opt = wrapped(net, 2)
    x, y = data()

    def fail(grad):
        raise ValueError("on purpose")

    h = net[0](x)
    h.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        functional.mse_loss(net[1](h), y).backward()
    with (
        pytest.raises(RuntimeError, match=r"broken off.*this pass is refused: call opt.reset\(\)"),
        pytest.warns(RuntimeWarning, match="dropped"),
    ):
        mean_loss(net, x, y).backward()
    opt.reset()
    for model, o in ((net, opt), (fresh, wrapped(fresh, 2))):
        train(model, o)
    assert_same_parameters(net, fresh, 0)


def test_backward_after_normalize_is_refused():
    net = marked(Net())
    opt = wrapped(net)
    for _ in range(2):
        mean_loss(net, *data()).backward()
    opt.normalize_()
    with pytest.raises(RuntimeError, match=r"after opt.normalize_\(\), where that holds a mean"):
        mean_loss(net, *data()).backward()


def test_a_main_grad_that_was_replaced_is_refused():
    net = marked(Net())
    opt = wrapped(net, 2)
    net.first.weight.main_grad = torch.zeros_like(net.first.weight)
    with pytest.raises(RuntimeError, match="which somebody has replaced"):
        mean_loss(net, *data()).backward()
    with pytest.warns(RuntimeWarning, match="dropped"):
        opt.reset()
    mean_loss(net, *data()).backward()
    assert net.first.weight.grad is net.first.weight.main_grad


def test_overflows_back_a_scaler_off_once_a_window():
    scales = []
    for net in (Net(), marked(Net())):
        opt, scaler = wrapped(net, 6), torch.amp.GradScaler("cpu", init_scale=64.0)
        x, y = data()
        for i in range(12):
            scaler.scale(mean_loss(net, x * (float("inf") if i in (1, 2) else 1.0), y)).backward()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        assert opt.updated
    assert scales[:12] == scales[12:] and scales[-1] == 32.0


@pytest.mark.parametrize("mark", [True, False])
def test_an_unapplied_window_is_forgotten_when_another_has_begun(mark):
    net = marked(Net()) if mark else Net()
    opt = wrapped(net, 2)

    def fail(*_):
        raise ValueError("on purpose")

    handle = opt.optimizer.register_step_pre_hook(fail)
    mean_loss(net, *data()).backward()
    opt.step()
    mean_loss(net, *data()).backward()
    with pytest.raises(ValueError, match="on purpose"):
        opt.step()
    handle.remove()
    handle = net.first.bias.register_hook(fail)
    with pytest.raises((RuntimeError, ValueError), match="main_grad" if mark else "on purpose"):
        mean_loss(net, *data()).backward()
    handle.remove()
    with pytest.warns(RuntimeWarning, match="dropped") if mark else nullcontext():
        opt.step()
    assert not opt.updated and opt.last_window is None


def test_pickled_with_the_wrapper():
    net = marked(Net())
    opt = wrapped(net, 2)
    mean_loss(net, *data()).backward()
    loaded, loaded_opt = pickle.loads(pickle.dumps((net, opt)))
    assert loaded.first.weight.main_grad is loaded.first.weight.grad is not net.first.weight.grad
    for model, o in ((net, opt), (loaded, loaded_opt)):
        o.step()
        train(model, o)
    assert_same_parameters(loaded, net, 0)


def test_the_norm_knows_of_a_gradient_that_was_edited():
    q, w = lone(3, 4), lone(2, 4)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([q, w], lr=0.0), 2, nonfinite="skip_window", reduction="none")
    x = torch.randn(5, 4, dtype=torch.float64)
    (Product.apply(x, q).sum() + Product.apply(x, w).sum()).backward()
    opt.step()
    q.grad.mul_(10)
    Product.apply(x, w).sum().backward()
    expected = torch.cat([q.grad.flatten(), w.grad.flatten()]).norm()
    opt.step()
    torch.testing.assert_close(opt.last_window.grad_norm, expected, rtol=1e-12, atol=0)


def test_a_gradient_added_between_a_layers_add_and_its_hook():
    """As when a bucket is full just then."""
    weight = lone(3, 4)
    opt = fa.AccumulatingOptimizer(sgd([weight]), 2)
    slot = opt._sums.buffers.of[weight]
    with opt.micro_batch():
        weight.main_grad.add_(1)
        weight.grad_added_to_main_grad = True
        opt._gathering.add([slot], [torch.full_like(weight, 2.0)])
        assert (weight.grad == 3).all()
        Product.apply(torch.ones(4, 4, dtype=torch.float64), weight).sum().backward()
    assert (weight.grad == 7).all()
