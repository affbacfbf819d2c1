"""One fused layer: inputs, options and weights of every kind."""

import copy

import fusedaccum as fa
import pytest
import torch
from fusedaccum.recipes import fuse
from torch import nn
from training import assert_same_parameters, twin

pytestmark = pytest.mark.long


def fused(net):
    return fa.fuse_embedding(fa.fuse_linear(net))


def wrapped(net, accum_steps=1, **kwargs):
    return fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), accum_steps, **kwargs)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_parametrized_weight_is_computed_once_a_forward(kind):
    class Drawn(nn.Module):
        def forward(self, weight):
            return nn.functional.dropout(weight, 0.5)

    torch.manual_seed(1)
    net = nn.Linear(4, 3) if kind == "linear" else nn.Embedding(4, 3)
    plain, x = copy.deepcopy(net), torch.ones(2, 4) if kind == "linear" else torch.tensor([1, 3])
    fa.fuse_linear(net), fa.fuse_embedding(net)
    for layer in (net, plain):
        nn.utils.parametrize.register_parametrization(layer, "weight", Drawn())
    opt = wrapped(net)
    outputs = []
    for layer in (net, plain):
        torch.manual_seed(2)
        outputs.append(layer(x))
        outputs[-1].sum().backward()
    assert torch.equal(*outputs) and opt._accumulation.ledger.is_open
    for p, q in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_every_shape_and_outputs_written_in_place(shape, bias):
    net = fa.fuse_linear(nn.Sequential(nn.Linear(4, 3, bias=bias), nn.ReLU(inplace=True)))
    plain, x = fa.unfuse(twin(net)), torch.randn(shape)
    for each in (net, plain):
        wrapped(each)
        each(x).square().sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Linear(0, 3), torch.ones(2, 0)),
        (lambda: nn.Linear(3, 0), torch.ones(2, 3)),
        (lambda: nn.Embedding(4, 0), torch.tensor([1, 2])),
    ],
    ids=["no input", "no output", "embedding"],
)
def test_layers_without_width(make, x):
    net = fused(nn.Sequential(make()))
    opt = wrapped(net)
    net(x).sum().backward()
    opt.step()
    assert net[0].weight.grad.shape == net[0].weight.shape


class Stop(torch.autograd.Function):
    """The identity, whose backward returns no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


def test_no_gradient_is_not_zeros():
    net = fused(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)))
    wrapped(net)
    other = nn.Parameter(torch.ones(()))
    (Stop.apply(net(torch.tensor([1]))).sum() * other).backward()
    assert all(p.grad is None for p in net.parameters())
    embedded = Stop.apply(net[0](torch.tensor([1])))
    net[1](embedded).sum().backward()
    assert net[0].weight.grad is None and net[1].weight.grad is not None


def test_a_weight_that_backward_does_not_read_may_change_before_it():
    net = fa.fuse_linear(nn.Sequential(nn.Linear(4, 4)))
    opt = wrapped(net)
    first, second = net(torch.ones(2, 4)).sum(), net(torch.ones(2, 4)).sum()
    for loss in (first, second):
        loss.backward()
        opt.step()
        opt.zero_grad()
        assert opt.updated


def test_nested_and_sparse_inputs_take_the_plain_way():
    jagged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    net = fa.fuse_linear(nn.Sequential(nn.Linear(4, 4)))
    plain = fa.unfuse(twin(net))
    for each in (net, plain):
        wrapped(each)
        each(jagged).values().sum().backward()
    torch.testing.assert_close(net[0].weight.grad, plain[0].weight.grad)


def test_a_negative_padding_index_set_by_hand():
    net = fa.fuse_embedding(nn.Sequential(nn.Embedding(5, 3)))
    net[0].padding_idx = -1
    wrapped(net)
    net(torch.tensor([4, 1])).sum().backward()
    assert net[0].weight.grad[4].eq(0).all() and net[0].weight.grad[1].eq(1).all()


@pytest.mark.parametrize("options", [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}], ids=str)
def test_embeddings_with_options_take_the_plain_way(options):
    net = fa.fuse_embedding(nn.Sequential(nn.Embedding(9, 3, **options)))
    plain = fa.unfuse(twin(net))
    tokens = torch.tensor([1, 1, 4])
    for each in (net, plain):
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(each.parameters(), lr=0.5), 1)
        if "sparse" in options:
            with pytest.raises(RuntimeError, match="sparse=False"):
                each(tokens).square().sum().backward()
            return
        each(tokens).square().sum().backward()
        opt.step()
    assert_same_parameters(net, plain, 1e-6)


def test_16_bit_gemms_into_32_bit_buffers(monkeypatch):
    """With a stand-in for the GEMM of GPUs (16-bit inputs, FP32 sums): its arguments are right."""
    addmm, calls = torch.addmm, []

    def with_out_dtype(buffer, a, b, *, out_dtype=None, beta, alpha, out):
        calls.append((a.dtype, out_dtype, out is buffer))
        return addmm(buffer, a.to(buffer.dtype), b.to(buffer.dtype), beta=beta, alpha=alpha, out=out)

    monkeypatch.setattr(torch, "addmm", with_out_dtype)
    fuse.has_product.cache_clear()
    try:
        layer = fa.fuse_linear(nn.Linear(9, 6, bias=False, dtype=torch.bfloat16))
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=0.5), 9)
        expected = torch.zeros(6, 9, dtype=torch.float64)
        for weight in (1.0, 3.0):
            x, g = torch.randn(11, 9).bfloat16(), torch.randn(11, 6).bfloat16()
            opt.backward((layer(x) * g).sum(), weight=weight)
            opt.step()
            expected += weight * g.double().t() @ x.double()
    finally:
        fuse.has_product.cache_clear()
    assert calls[-2:] == [(torch.bfloat16, torch.float32, True)] * 2
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_ctrl_c_after_a_product_was_written_does_not_leave_it_in_the_window(monkeypatch):
    """It comes when the product is done, whose micro-batch the loop repeats."""
    layer = fa.fuse_linear(nn.Linear(2, 1, bias=False))
    nn.init.zeros_(layer.weight)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), 2)
    product, x = fuse.add_product, torch.ones(1, 2)

    def interrupted(*arguments):
        product(*arguments)
        raise KeyboardInterrupt

    layer(x).sum().backward()
    opt.step()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fuse, "add_product", interrupted)
        layer(x).sum().backward()
    with pytest.warns(RuntimeWarning, match="window was dropped"):
        layer(x).sum().backward()
    for _ in range(2):
        opt.step()
        if not opt.updated:
            layer(x).sum().backward()
    assert opt.last_window.micro_batches == 2 and layer.weight.tolist() == [[-1.0, -1.0]]
