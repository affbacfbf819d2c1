"""Layers that add gradients to main_grad, by the protocol of Megatron-LM and TransformerEngine.

Their backward does what that of Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication and
TransformerEngine's Linear (with fuse_wgrad_accumulation) does, without their GEMMs, which need a
GPU. The placeholder gradients that they return are NaN.
"""

import fusedaccum as fa
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import data, mean_loss, parts, sgd


class Product(torch.autograd.Function):
    """``x @ weight.T``, whose backward adds the weight's gradient to main_grad."""

    @staticmethod
    def written(main_grad):
        """Like a kernel that writes by raw pointer: the tensor's version does not change."""
        return main_grad.data

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
        Product.written(weight.main_grad).add_((grad.t() @ x).to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        empty = torch.zeros if getattr(weight, "zero_out_wgrad", False) else nan
        return for_x, empty(weight.main_grad.shape, dtype=x.dtype, device=x.device)


def nan(shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


class Adding(nn.Linear):
    """A Linear that adds its gradient itself while its weight is marked."""

    def forward(self, x):
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return super().forward(x)
        product = Product.apply(x, self.weight)
        return product if self.bias is None else product + self.bias


class Net(nn.Module):
    """Two layers that add their gradients themselves, one of them used twice, and a plain one."""

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
    """The model, with its layers told to add their gradients themselves, as a user does it."""
    for module in net.modules():
        if isinstance(module, Adding):
            module.weight.grad_added_to_main_grad = False
    return net


def wrapped(net, *args, **kwargs):
    return fa.AccumulatingOptimizer(sgd(net.parameters()), *args, **kwargs)


def train(net, opt, windows=3, sizes=(10, 6, 8), loss=mean_loss, weigh=False):
    """Train for some windows, each on data of its own; every call uses the same data."""
    for w in range(windows):
        for x, y in parts(*data(seed=w), list(sizes)):
            opt.backward(loss(net, x, y), weight=len(x) if weigh else None)
            opt.step()
            opt.zero_grad()


def lone(*shape, dtype=torch.float64):
    """A weight marked as one whose layer adds its gradient."""
    weight = nn.Parameter(torch.ones(shape, dtype=dtype))
    weight.grad_added_to_main_grad = False
    return weight
