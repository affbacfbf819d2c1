"""fa.explain against the peaks of whole windows with AdamW, byte by byte.

FP32 masters, smaller states, groups with a buffer dtype.
"""

import fusedaccum as fa
import pytest
import torch
from sizes import limits
from torch import nn

pytest.importorskip("tqdm")

from benchmarks import memory
from benchmarks.bf16_moments import AdamWInBF16

pytestmark = pytest.mark.long

BF16, FP32 = torch.bfloat16, torch.float32
COMPENSATED = {"buffer_dtype": BF16, "rounding": "compensated"}
SETTINGS = {
    "FP32 buffers": {},
    "24-bit sums": COMPENSATED,
    "16-bit buffers": {"buffer_dtype": None, "rounding": "stochastic"},
    "master weights": {"master_weights": True},
    "split masters": {"master_weights": "split"},
    "24-bit sums, split masters": {**COMPENSATED, "master_weights": "split"},
    "skip_micro_batch": {"nonfinite": "skip_micro_batch"},
}


class Gradient(torch.autograd.Function):
    """Whose backward makes a gradient of ``p``, and nothing else."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(p)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full_like(ctx.saved_tensors[0], 0.5)


class Chain(nn.Module):
    """Its backward brings gradients last to first, and allocates nothing else that counts."""

    def __init__(self, dtype, sizes=(1 << 16,) * 24):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=dtype)) for n in sizes)

    def backward(self):
        x = torch.ones((), requires_grad=True)
        for p in self.weights:
            x = Gradient.apply(x, p)
        x.backward()


def groups_of(model, asked):
    """The parameters in as many groups as dtypes; "nothing" for one that asks for none."""
    ps = list(model.parameters())
    parts = [ps[i :: len(asked)] for i in range(len(asked))]
    return [
        {"params": part, **({} if dtype == "nothing" else {"buffer_dtype": dtype})} for part, dtype in zip(parts, asked)
    ]


def said_and_measured(name, dtype, make, asked=("nothing",), micro_batches=4):
    """fa.explain's mode, and what its second window allocates at most; None if not offered."""
    model = Chain(dtype)
    inner = make(groups_of(model, asked))
    found = fa.explain(model, desired_batch=micro_batches, micro_batch=1, optimizer=inner)
    mode = {mode.name: mode for mode in found.modes}.get(name)
    if mode is None:
        return None, None
    with memory.recorded("cpu") as timeline:
        model = Chain(dtype)
        opt = fa.AccumulatingOptimizer(make(groups_of(model, asked)), micro_batches, **SETTINGS[name])
        for _ in range(2):
            with memory.mark("window"):
                for _ in range(micro_batches):
                    model.backward()
                    opt.step()
    return mode, timeline.peak_of("window")


def adamw(params):
    return torch.optim.AdamW(params, fused=True)


def in_bf16(params):
    return AdamWInBF16(params, fused=True)


def hooked(params):
    opt = adamw(params)
    opt.register_step_post_hook(lambda *_: None)  # it may count the steps, so these are not made in parts
    return opt


PEAKS = {
    18: ("master weights", adamw),
    16: ("split masters", adamw),
    15: ("24-bit sums, split masters", adamw),
    11: ("24-bit sums, split masters", in_bf16),
    23: ("24-bit sums, split masters", hooked),  # all masters at once, and gradients in FP32
}
# A gradient is a bucket, and a part of the step has one parameter.
small = limits(bucket=1 << 12, STEPPED_CPU=1 << 18)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("each", PEAKS)
@small
def test_bytes_a_parameter_at_the_peak_of_a_bf16_model_with_adamw(each):
    name, make = PEAKS[each]
    mode, measured = said_and_measured(name, BF16, make)
    assert measured / mode.elements == pytest.approx(each, rel=0.1)
    assert mode.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("asked", [("nothing",), (BF16, "nothing"), (FP32, "nothing"), (None, FP32, torch.float64)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", SETTINGS)
@small
def test_groups_that_ask_for_a_buffer_dtype_have_it(name, dtype, asked):
    mode, measured = said_and_measured(name, dtype, adamw, asked)
    if mode is not None:
        assert mode.peak == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("asked", [(BF16, "nothing"), (FP32, "nothing"), (None,)])
def test_a_mode_is_offered_if_it_works_with_the_dtypes_that_groups_ask_for(name, asked):
    model = Chain(BF16, (8,) * 4)
    inner = adamw(groups_of(model, asked))
    found = fa.explain(model, desired_batch=4, micro_batch=1, optimizer=inner)
    if name in {mode.name for mode in found.modes}:
        fa.AccumulatingOptimizer(inner, 4, **SETTINGS[name])
    else:
        with pytest.raises(ValueError, match="needs FP32 gradients"):
            fa.AccumulatingOptimizer(inner, 4, **SETTINGS[name])


def test_layers_whose_group_asks_for_16_bits_are_not_fused():
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4)).to(BF16)
    inner = adamw([{"params": model.parameters(), "buffer_dtype": BF16}])
    found = fa.explain(model, desired_batch=4, micro_batch=1, optimizer=inner)
    assert "fused layers" not in {mode.name for mode in found.modes}
    fa.fuse_embedding(fa.fuse_linear(model))
    opt = fa.AccumulatingOptimizer(inner, 4)
    arrived = []
    model[1].weight.register_hook(arrived.append)
    model[0].weight.register_hook(arrived.append)
    opt.backward(model(torch.arange(4)).sum())
    assert len(arrived) == 2
