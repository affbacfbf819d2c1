"""Layers that add their gradients to main_grad train as layers that do not."""

import copy
import io
import pickle

import fusedaccum as fa
import pytest
import torch
from adding import Adding, Net, Product, lone, marked, train, wrapped
from torch import nn
from torch.nn import functional
from training import assert_same_parameters, data, mean_loss, parts, sgd, sum_loss

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("each_intake")]
RTOL = 1e-12


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


@pytest.mark.parametrize("nothing_at", [0, 1])
def test_a_micro_batch_without_items_leaves_the_sums_alone(nothing_at):
    plain, net = Net(), marked(Net())
    for model in (plain, net):
        opt = wrapped(model, 2, reduction="sum")
        for i in range(2):
            items = 0 if i == nothing_at else 24
            opt.backward(items * mean_loss(model, *data()), weight=items)
            opt.step()
    assert_same_parameters(net, plain, RTOL)


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


def test_a_copy_of_model_and_wrapper_must_be_marked_anew():
    """Copied parameters lose attributes, so copied layers are plain: they accumulate the same."""
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


def test_a_layer_left_out_of_a_window_finds_zeros_in_the_next():
    """The bf16 gradient is written over the block's FP32 sums, also those of unused layers."""
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
    """A head that adds its gradient itself, and an embedding with the same weight."""

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
    """With zero_out_wgrad, autograd adds the embedding's gradient to the layer's zeros.

    A fused embedding returns no gradient.
    """
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


class Remembering(torch.optim.Optimizer):
    """Keeps p.grad itself, not a copy, for the next step."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            before = self.state[p].get("before", 0)
            self.state[p]["before"] = p.grad
            p.sub_(p.grad + before, alpha=0.1)


def test_a_gradient_that_the_optimizer_keeps_is_not_zeroed_with_the_buffer():
    plain, net = Net(None), marked(Net(None))
    for model in (plain, net):
        train(model, fa.AccumulatingOptimizer(Remembering(model.parameters()), 1))
    assert_same_parameters(net, plain, RTOL)


@pytest.mark.parametrize("versioned", [False, True])
def test_the_noise_scale_is_that_of_the_unfused_model(versioned, monkeypatch):
    """Also if layers write with PyTorch's operators, as other code does that writes to p.grad."""
    if versioned:
        monkeypatch.setattr(Product, "written", staticmethod(lambda main_grad: main_grad))
    measured = []
    for model in (Net(None), marked(Net(None))):
        opt = wrapped(model, 3, noise_scale=0.5)
        train(model, opt)
        measured.append(float(opt.last_window.noise_scale))
    assert measured[1] == pytest.approx(measured[0], rel=1e-9)


def test_a_gradient_added_between_a_layers_add_and_its_hook():
    """As happens when a bucket is full at that moment."""
    weight = lone(3, 4)
    opt = fa.AccumulatingOptimizer(sgd([weight]), 2)
    slot = opt._sums.buffers.of[weight]
    with opt.micro_batch():
        weight.main_grad.add_(1)
        weight.grad_added_to_main_grad = True
        opt._accumulation.passes.add([slot], [torch.full_like(weight, 2.0)])
        assert (weight.grad == 3).all()
        Product.apply(torch.ones(4, 4, dtype=torch.float64), weight).sum().backward()
    opt.step()  # which does not take the layer's write, though it has raised the version, for the user's
    assert (weight.grad == 7).all()
