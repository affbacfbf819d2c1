"""FSDP2's CPUOffloadPolicy hands over a shard's gradient while it is still being copied.

We simulate that copy from the GPU.
"""

from unittest import mock

import pytest
import torch
from parts import assert_close, wrapped
from sizes import limits
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class UnderWay:
    """The event of a copy, which is made only when the event is waited for."""

    def __init__(self, there, values):
        self._there, self._values = there, values

    def synchronize(self):
        self._there.copy_(self._values)


def late(plain, copies):
    """A ``FSDPParam.to_sharded_dtensor`` that, in backward, returns memory still being filled."""

    def to_sharded_dtensor(self, gradient):
        if torch._C._current_graph_task_id() == -1:
            return plain(self, gradient)
        there = torch.full_like(gradient, float("nan"))
        self.grad_offload_event = UnderWay(there, gradient.clone())
        copies.append(self)
        return plain(self, there)

    return to_sharded_dtensor


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))


def micro_batches(rank):
    torch.manual_seed(2 + rank)
    return [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(2)]


def offloaded(rank, nonfinite, bucket, roots):
    model, copies = net(), []
    for layer in (model[0], model[2]):
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if not roots:
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    plain = FSDPParam.to_sharded_dtensor
    with (
        limits(bucket=bucket),
        mock.patch.object(FSDPParam, "to_sharded_dtensor", late(plain, copies)),
    ):
        opt = wrapped(model, lambda params: torch.optim.SGD(params, lr=1.0), accum_steps=2, nonfinite=nonfinite)
        for x, y in micro_batches(rank):
            loss = nn.functional.mse_loss(model(x.requires_grad_()), y)
            loss.backward()  # with two roots, FSDP2 waits for the second's copies only after the pass has ended for us
            opt.step()
    assert opt.updated
    assert len(copies) == 2 * len(list(model.parameters()))
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
@pytest.mark.parametrize("bucket", [100, 32 << 20], ids=["small", "whole"])
@pytest.mark.parametrize("roots", [False, True], ids=["one root", "two roots"])
def test_gradients_that_are_copied_still_are_waited_for(worlds, nonfinite, bucket, roots):
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    parts = [part for rank in range(2) for part in micro_batches(rank)]
    (sum(nn.functional.mse_loss(model(x), y) for x, y in parts) / len(parts)).backward()
    sgd.step()
    for ours in worlds(2).run(offloaded, nonfinite=nonfinite, bucket=bucket, roots=roots):
        assert_close(ours, list(model.parameters()))
