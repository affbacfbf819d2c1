"""PyTorch's other ways over ranks than those that the guide shows: taken as they are meant, or refused with what to do."""

import warnings

import pytest
import torch
from parts import made, mean_loss, share, wrapped
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def fsdp1(rank, strategy, original, first):
    model = made()
    model.frozen.requires_grad_(True)  # a flat parameter is, or is not, as a whole
    opt = None if first else wrapped(model, accum_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls some of it old
        module = FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy[strategy], use_orig_params=original, device_id=torch.device("cpu")
        )
    if opt is None:
        with pytest.raises(ValueError, match=r"parameter param_groups\[0\]\['params'\]\[0\] is in .*FSDP1.*use FSDP2"):
            wrapped(module, accum_steps=2)
        opt = wrapped(nn.Linear(2, 1))
        with pytest.raises(ValueError, match="FSDP1"):
            opt.add_param_group({"params": list(module.parameters())})
    else:
        x, y, _, _ = share(0, 1, 0, 1)[0]
        with pytest.raises(RuntimeError, match=r"FSDP1.*use FSDP2"):
            mean_loss(module, x, y, False).backward()
            opt.step()


# It went on: weights divided what they had not multiplied, and replicas came apart.
@pytest.mark.parametrize(
    "strategy, original, first", [("FULL_SHARD", True, True), ("NO_SHARD", False, True), ("NO_SHARD", True, False)]
)
def test_fsdp1_is_refused(worlds, strategy, original, first):
    worlds(2).run(fsdp1, strategy=strategy, original=original, first=first)
