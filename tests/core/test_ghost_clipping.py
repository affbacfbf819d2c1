"""Clipping each sample's gradient in two passes, with a `zero_grad()` between them.

Opacus' ghost clipping does so (1.6.0).
"""

import copy

import fusedaccum as fa
import pytest
import torch
from torch import nn

LIMIT, SAMPLES, MICRO_BATCHES = 0.1, 4, 3


class GhostClipping(torch.optim.Optimizer):
    """Adds up the micro-batches' clipped gradients, and steps the optimizer once all are there.

    The calls and their order are those of Opacus' DPOptimizerFastGradientClipping, without noise.
    It runs no `Optimizer.__init__` either.
    """

    def __init__(self, optimizer, samples):
        self.original_optimizer, self.samples = optimizer, samples
        self._skips, self._skipped, self._summed = [], False, {}

    param_groups = property(lambda self: self.original_optimizer.param_groups)
    state = property(lambda self: self.original_optimizer.state)
    defaults = property(lambda self: self.original_optimizer.defaults)

    def signal_skip_step(self, do_skip=True):
        self._skips.append(do_skip)

    def zero_grad(self, set_to_none=False):
        if not self._skipped:
            self._summed.clear()
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in enumerate(params):
            self._summed[i] = self._summed[i] + p.grad.data if i in self._summed else copy.deepcopy(p.grad.data)
        self._skipped = bool(self._skips) and self._skips.pop(0)
        if not self._skipped:
            for i, p in enumerate(params):
                p.grad = self._summed[i].clone()
                p.grad /= self.samples
            self.original_optimizer.step()


def ghost_backward(losses, params, optimizer):
    """What `loss.backward()` of Opacus' DPLossFastGradientClipping calls.

    (It takes the norms by hooks in the first pass.)
    """
    each = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    losses.mean().backward(retain_graph=True)
    optimizer.zero_grad()
    (torch.stack([clipping(grads) for grads in each]) * losses).sum().backward()


def clipping(grads):
    return (LIMIT / (torch.cat([grad.flatten() for grad in grads]).norm() + 1e-6)).clamp(max=1.0)


def network(dtype=torch.float64):
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def losses_of(net, x, y):
    return (net(x) - y).square().mean(1)


def batches(dtype=torch.float64):
    return [(torch.randn(SAMPLES, 5, dtype=dtype), torch.randn(SAMPLES, 2, dtype=dtype)) for _ in range(MICRO_BATCHES)]


def clipped_by_hand(net, micro_batches):
    """Every sample's gradient, alone, clipped, and the mean of all."""
    params, total = list(net.parameters()), [torch.zeros_like(p) for p in net.parameters()]
    for x, y in micro_batches:
        for i in range(SAMPLES):
            grads = torch.autograd.grad(losses_of(net, x[i : i + 1], y[i : i + 1]).sum(), params)
            total = [sum_ + clipping(grads) * grad for sum_, grad in zip(total, grads)]
    return [sum_ / (SAMPLES * MICRO_BATCHES) for sum_ in total]


@pytest.mark.parametrize("wrapper", ["outside", "inside"])
@pytest.mark.parametrize("loss_has", ["ghost", "outermost"])
@pytest.mark.parametrize("zeroed", ["before", "after"])
def test_a_drop_in_around_or_within_ghost_clipping_steps_on_what_it_has_added_up(wrapper, loss_has, zeroed):
    """`signal_skip_step` tells it where the batch ends, and `reduction="none"` lets it divide."""
    torch.manual_seed(0)
    net = network()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    if wrapper == "outside":
        ghost = GhostClipping(inner, SAMPLES * MICRO_BATCHES)
        opt = fa.AccumulatingOptimizer(ghost, reduction="none")
    else:
        opt = ghost = GhostClipping(fa.AccumulatingOptimizer(inner, reduction="none"), SAMPLES * MICRO_BATCHES)
    for _ in range(2):
        before, micro_batches = [p.detach().clone() for p in net.parameters()], batches()
        expected = clipped_by_hand(net, micro_batches)
        for i, (x, y) in enumerate(micro_batches):
            ghost.signal_skip_step(i < MICRO_BATCHES - 1)
            if zeroed == "before":
                opt.zero_grad()
            ghost_backward(losses_of(net, x, y), list(net.parameters()), ghost if loss_has == "ghost" else opt)
            opt.step()
            if zeroed == "after":
                opt.zero_grad()
        for was, p, gradient in zip(before, net.parameters(), expected):
            torch.testing.assert_close(was - p, gradient, rtol=1e-9, atol=1e-12)
