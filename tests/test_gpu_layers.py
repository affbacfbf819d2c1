"""On a GPU: layers that add by themselves, on side streams and in 16 bits. Without one they run on the CPU, as tests/test_gpu.py does."""

import fusedaccum as fa
import pytest
import torch
from torch import nn

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


# -- side streams ----------------------------------------------------------------------------------------------


class Late(torch.autograd.Function):
    """The identity, whose gradient takes the stream that it was used on some 0.2 s."""

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
    """The weights, as whoever called backward sees them, after a step from zero."""
    loss().backward()  # makes the buffer, with a wait
    opt.step()
    opt.zero_grad()
    nn.init.zeros_(layer.weight)
    torch.cuda.synchronize()
    loss().backward()
    opt.step()
    return layer.weight.detach().clone()


@needs_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # which is what this is about
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
            late = Late.apply(layer(tokens)).sum()  # used last, its gradient comes first, and overwrites the buffer
        torch.cuda.current_stream().wait_stream(side)
        return early + late

    assert (stepped(layer, opt, loss) == -2).all()
