"""On a GPU: fused layers, which add their gradients themselves, on side streams and in 16 bits."""

import fusedaccum as fa
import pytest
import torch
from fusedaccum.recipes import fuse
from gpu_cases import DEVICE, needs_gpu
from torch import nn

# -- side streams ----------------------------------------------------------------------------------


class Late(torch.autograd.Function):
    """The identity; its backward keeps the stream that it was used on busy for about 0.2 s."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(400_000_000)
        return grad


def embedding(fused, rows=1000):
    layer = nn.Embedding(rows, 256, device=DEVICE)
    nn.init.zeros_(layer.weight)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), 1)
    return fa.fuse_embedding(layer) if fused else layer, opt, torch.arange(rows, device=DEVICE)


def stepped(layer, opt, loss):
    """The weights after one step from zero, as the caller of backward sees them."""
    loss().backward()  # creates the buffer, which waits
    opt.step()
    opt.zero_grad()
    nn.init.zeros_(layer.weight)
    torch.cuda.synchronize()
    loss().backward()
    opt.step()
    return layer.weight.detach().clone()


@needs_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the subject of this test
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_who_calls_backward_comes_after_a_layer_on_a_side_stream(fused):
    layer, opt, tokens = embedding(fused)
    side = torch.cuda.Stream()

    def loss():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            value = Late.apply(layer(tokens)).sum()
        torch.cuda.current_stream().wait_stream(side)
        return value

    assert (stepped(layer, opt, loss) == -1).all()


@needs_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_layer_that_is_used_on_two_streams_gets_both_gradients(fused):
    layer, opt, tokens = embedding(fused)
    side = torch.cuda.Stream()

    def loss():
        early = layer(tokens).sum()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late = Late.apply(layer(tokens)).sum()  # used last, so its gradient comes first and overwrites the buffer
        torch.cuda.current_stream().wait_stream(side)
        return early + late

    assert (stepped(layer, opt, loss) == -2).all()


# -- what the layers add ---------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_adds_products_of_16_bits_into_fp32(dtype):
    assert fuse.has_product(dtype, torch.float32, DEVICE.type)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_linear_layers_of_16_bits_gather_what_plain_ones_do(dtype, monkeypatch):
    added, plain = [], fuse.add_product
    monkeypatch.setattr(fuse, "add_product", lambda *args: (added.append(args[0].dtype), plain(*args)))
    micro_batches = torch.randn(3, 40, 64).to(DEVICE, dtype)
    sums = []
    for fused in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32, bias=False)).to(DEVICE, dtype)
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 4, reduction="none")
        for x in micro_batches:
            (fa.fuse_linear(net) if fused else net)(x).float().square().mean().mul(100.0).backward()
            opt.step()
        sums.append([p.grad for p in net.parameters()])
    if fuse.has_product(dtype, torch.float32, DEVICE.type):
        assert added.count(torch.float32) >= 2 * len(micro_batches)
    # The plain way rounds each gradient to 16 bits (by half a unit in the last place) before it is
    # added; a GPU that splits up the product may round once more.
    tolerance = 2 * torch.finfo(dtype).eps
    for theirs, ours in zip(*sums):
        assert ours.dtype == theirs.dtype == torch.float32
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_of_an_embedding_are_added_in_one_order(padding):
    tokens, rows = torch.randint(0, 20, (8, 512)), torch.randn(8, 512, 16)
    found = []
    for _ in range(4):
        layer = fa.fuse_embedding(nn.Embedding(20, 16, padding_idx=padding, device=DEVICE))
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), 4, reduction="none")
        for _ in range(2):  # the first micro-batch overwrites, the second adds
            (layer(tokens.to(DEVICE)) * rows.to(DEVICE)).sum().backward()
            opt.step()
        found.append(layer.weight.grad.cpu())
    assert all(torch.equal(again, found[0]) for again in found)
    flat, wide = tokens.flatten(), rows.flatten(0, 1).double()
    if padding is not None:
        wide = wide * (flat != padding).unsqueeze(1)
    exact, sizes = (torch.zeros(20, 16, dtype=torch.float64).index_add_(0, flat, x) * 2 for x in (wide, wide.abs()))
    most = 2 * int(flat.bincount().max())  # number of additions, each rounded to FP32
    assert ((found[0] - exact).abs() <= most * 2.0**-24 * sizes).all()
