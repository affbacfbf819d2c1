"""What FSDP2 or tensor parallelism adds up for an FP32 buffer is added in FP32 all the way.

It is divided as FSDP2 is told now.
"""

import gc
import re
import warnings

import fusedaccum as fa
import pytest
import torch
from parts import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

FP32_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.float32)
MESHES = {"FSDP": None, "HSDP 2x1": (2, 1), "HSDP 1x2": (1, 2)}
HOLDS = {
    "every micro-batch": lambda module, last: None,
    "once a window": lambda module, last: module.set_requires_gradient_sync(last),
    "replicas once a window": lambda module, last: module.set_requires_all_reduce(last),
}
EXACT = torch.tensor(
    [[[256.0] * 3, [1.0] * 3], [[258.0] * 3, [3.0] * 3]]
)  # two ranks, two micro-batches, three weights


def sharded(mesh, dtype=torch.bfloat16, policy=FP32_SUMS):
    shape = MESHES[mesh]
    mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return fully_shard(nn.Linear(3, 2, bias=False).to(dtype), mesh=mesh, mp_policy=policy)


def window(model, opt, gradients, hold="every micro-batch"):
    """The window's gradient of each of the weights, if these micro-batches have ``gradients``."""
    dtypes = set()
    for number, row in enumerate(gradients):
        HOLDS[hold](model, number == len(gradients) - 1)
        model(row[None].to(model.weight.dtype)).float().sum().backward()
        if number < len(gradients) - 1:
            dtypes.add(None if model.weight.grad is None else model.weight.grad.dtype)
            opt.step()
    opt.normalize_()
    found = full(model.weight.grad)
    opt.step()
    opt.zero_grad()
    return found, dtypes


def averaged(rank, mesh, hold, sets, dtype=torch.bfloat16):
    found = []
    for gradients in sets:
        model = sharded(mesh, dtype)
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), len(gradients[rank]))
        found.append(window(model, opt, gradients[rank], hold))
    return found


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("mesh, dtype", [(mesh, torch.bfloat16) for mesh in MESHES] + [("FSDP", torch.float16)])
def test_what_fsdp2_adds_up_for_fp32_buffers_of_a_16_bit_model_is_not_rounded(worlds, dtype, mesh, hold):
    random = torch.randn(2, 4, 3) * torch.tensor([100.0, 1.0, 0.1, 10.0])[:, None]
    sets = [EXACT, random.to(dtype).float()]
    for results in worlds(2).run(averaged, mesh=mesh, hold=hold, sets=sets, dtype=dtype):
        for gradients, (ours, dtypes) in zip(sets, results, strict=True):
            assert dtypes <= {torch.float32, None}
            torch.testing.assert_close(
                ours.double(), gradients.double().mean((0, 1)).expand(2, 3), rtol=1e-6, atol=1e-6
            )


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BOTH = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
ROUNDED = r"adds up the gradient of parameter .* in torch\.bfloat16.*reduce_dtype=torch\.float32"


def told(rank, dtype, policy, settings):
    model = sharded("FSDP", dtype, policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2, **settings)
        window(model, opt, EXACT[rank])
    return [(str(warning.message), warning.filename) for warning in caught]


@pytest.mark.parametrize(
    "dtype, policy, settings, expected",
    [
        (torch.bfloat16, MixedPrecisionPolicy(), {}, 1),
        (torch.float32, BF16, {}, 1),
        (torch.float32, BOTH, {"reduction": "none"}, 1),
        (torch.bfloat16, BF16, {"master_weights": True}, 1),
        (torch.bfloat16, MixedPrecisionPolicy(), {"buffer_dtype": None}, 0),
        (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), {}, 0),
        (torch.bfloat16, MixedPrecisionPolicy(param_dtype=torch.float32), {}, 0),
        (torch.float64, MixedPrecisionPolicy(), {}, 0),
    ],
)
def test_a_sum_that_fsdp2_adds_in_16_bits_is_told_once_at_the_users_line(worlds, dtype, policy, settings, expected):
    for warned in worlds(2).run(told, dtype=dtype, policy=policy, settings=settings):
        assert len(warned) == expected
        for message, filename in warned:
            assert re.search(ROUNDED, message) and filename == __file__


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.ours, self.theirs = (nn.Linear(3, 2, bias=False).bfloat16() for _ in range(2))
        for layer in (self.ours, self.theirs):
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        return self.ours(x) + self.theirs(x)


def beside(rank, other):
    """Two weights that FSDP2 sends together, of two optimizers.

    The first accumulates in FP32, and the ``other`` need not.
    """
    model = fully_shard(Two(), mp_policy=FP32_SUMS)
    inner = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (model.ours, model.theirs)]
    opts = [fa.AccumulatingOptimizer(inner[0], 2)]
    opts.append(inner[1] if other == "plain" else fa.AccumulatingOptimizer(inner[1], 2, buffer_dtype=other))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row in EXACT[rank]:
            model(row[None].bfloat16()).float().sum().backward()
            opts[0].step()
            if other != "plain":
                opts[1].step()
    dtypes = [layer.weight.grad.dtype for layer in (model.ours, model.theirs)]
    if other == "plain":
        inner[1].step()
    return [full(p) for p in model.parameters()], dtypes, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("other", ["plain", None, torch.float32])
def test_a_weight_that_fsdp2_sends_together_with_another_optimizers(worlds, other):
    """Plain PyTorch's comes as without the wrapper, in the parameter's dtype.

    Ours is then rounded with it, which is told.
    """
    exact = EXACT.mean((0, 1)).expand(2, 3)
    sums = [EXACT[:, number].mean(0).bfloat16() for number in range(2)]  # of the ranks, rounded by FSDP2
    for (ours, theirs), dtypes, warned in worlds(2).run(beside, other=other):
        assert dtypes[1] == torch.bfloat16
        if other == torch.float32:
            assert not warned
            assert torch.equal(ours, -exact.bfloat16()) and torch.equal(theirs, -exact.bfloat16())
            continue
        assert len(warned) == 1 and re.search(r"rounds the gradient of parameter .* together with", warned[0])
        if other == "plain":
            assert torch.equal(theirs, -(sums[0] + sums[1]).expand(2, 3))


def left(rank):
    """FSDP2 without its wrapper, and its gradient."""
    model = sharded("FSDP")
    group = model._get_fsdp_state()._fsdp_param_group
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2)
    window(model, opt, EXACT[rank])
    assert "post_backward" in vars(group) and group._orig_dtype == torch.bfloat16
    del opt
    gc.collect()
    assert "post_backward" not in vars(group)
    model.weight.grad_dtype = torch.bfloat16
    model(EXACT[rank, :1].bfloat16()).float().sum().backward()
    return full(model.weight.grad)


def test_fsdp2_is_as_it_was_when_the_wrapper_is_gone(worlds):
    for ours in worlds(2).run(left):
        assert torch.equal(ours, EXACT[:, 0].mean(0).expand(2, 3).bfloat16())


# -- what FSDP2 divides by -------------------------------------------------------------------------

FACTORS = [None, 1.0, 3.0, None]


def divided(rank, reduction, hold, mesh, wrapped):
    """The windows' gradients, if FSDP2 is told to divide by something else along the way.

    It is told before micro-batches and between windows.
    """
    model = sharded(mesh, torch.float32)
    model.set_force_sum_reduction_for_comms(mesh == "FSDP")  # as Gloo has no reduce-scatter that multiplies
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    if wrapped:
        opt = fa.AccumulatingOptimizer(opt, None if reduction == "none" else 2, reduction=reduction)
    found = []
    for factors in ([None, None], FACTORS[:2] if hold != "replicas once a window" else [3.0, 3.0], FACTORS[2:3] * 2):
        for number, (row, factor) in enumerate(zip(EXACT[rank], factors, strict=True)):
            model.set_gradient_divide_factor(factor)
            model.set_all_reduce_hook(lambda shards: shards.mul_(2.0)) if mesh == "FSDP" else None
            HOLDS[hold](model, number == 1)
            if reduction == "none":
                model(row[None]).sum().backward()
            else:
                opt.backward(model(row[None]).sum() * (1 if reduction == "mean" else 5), weight=5)
            if number == 1:
                opt.normalize_() if wrapped else None
                found.append(full(model.weight.grad))
            if number == 1 or reduction != "none":
                opt.step()
        opt.zero_grad()
    return found


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("mesh", ["FSDP", "HSDP 2x1"])
def test_a_divide_factor_that_is_set_after_wrapping_counts_from_then_on(worlds, mesh, hold):
    """The mean over ranks and micro-batches is the same, whatever FSDP2 divides by.

    A sum that is taken as it comes is plain FSDP2's.
    """
    twice = 2.0 if mesh == "FSDP" else 1.0  # by the hook
    for reduction in ("mean", "sum"):
        for found in worlds(2).run(divided, reduction=reduction, hold=hold, mesh=mesh, wrapped=True):
            for ours in found:
                torch.testing.assert_close(ours, twice * EXACT.mean((0, 1)).expand(2, 3))
    arguments = {"reduction": "none", "hold": hold, "mesh": mesh}
    for ours, theirs in zip(*(worlds(2).run(divided, wrapped=wrapped, **arguments) for wrapped in (True, False))):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def changed_while_held(rank, change):
    model = sharded("HSDP 2x1", torch.float32)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), 2)
    model.set_requires_all_reduce(False)
    opt.backward(model(EXACT[rank, :1]).sum())
    opt.step()
    change(model)
    model.set_requires_all_reduce(True)
    with pytest.raises(RuntimeError, match=r"set_gradient_divide_factor\(\).*kept from the replicas.*opt\.reset\(\)"):
        opt.backward(model(EXACT[rank, 1:]).sum())
    opt.reset()
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
    return window(model, opt, EXACT[rank])[0]


def set_factor(module):
    module.set_gradient_divide_factor(4.0)


def set_sums(module):
    module.set_force_sum_reduction_for_comms(True)


@pytest.mark.parametrize("change", [set_factor, set_sums])
def test_a_divisor_that_changes_while_fsdp2_keeps_sums_from_the_replicas_is_an_error(worlds, change):
    for ours in worlds(2).run(changed_while_held, change=change):
        torch.testing.assert_close(ours, EXACT.mean((0, 1)).expand(2, 3))


# -- tensor parallelism ----------------------------------------------------------------------------


def parts_of_a_sum(rank, placement, dtype, pairs, **settings):
    """A window's gradient of a parameter of which tensor parallelism's ranks hold partial sums."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.zeros(4, dtype=dtype), mesh, [placement]))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.0), len(pairs), reduction="none", **settings)
    for number, pair in enumerate(pairs):
        torch.autograd.backward(p, DTensor.from_local(torch.full((4,), pair[rank], dtype=dtype), mesh, [Partial()]))
        if number < len(pairs) - 1:
            opt.step()
    opt.normalize_()
    found = full(p.grad)
    opt.step()
    return found, float(opt.last_window.nonfinite or 0)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize(
    "dtype, pairs", [(torch.bfloat16, [(256.0, 1.0), (1.0, 512.0)]), (torch.float16, [(6e4, 4e4), (3.0, 2048.0)])]
)
def test_parts_of_a_sum_over_tensor_parallelism_are_added_in_fp32(worlds, dtype, pairs, placement, nonfinite):
    exact = torch.tensor(pairs, dtype=dtype).double().sum().expand(4)  # of FP16: more than its largest number
    arguments = {"placement": placement, "dtype": dtype, "pairs": pairs, "nonfinite": nonfinite}
    for found, bad in worlds(2).run(parts_of_a_sum, **arguments):
        assert bad == 0 and torch.equal(found.double(), exact)


class Parted(nn.Module):
    """Each rank of tensor parallelism has a part of the batch, and so a part of the gradient."""

    def __init__(self, mesh):
        super().__init__()
        weight = torch.zeros(2, 3, dtype=torch.bfloat16)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
        self.beside = nn.Parameter(
            distribute_tensor(weight[0], mesh, [Replicate()])
        )  # whose gradient each rank has whole
        self.mesh = mesh

    def forward(self, x):
        y = (DTensor.from_local(x, self.mesh, [Shard(0)]) @ self.weight.T).redistribute(placements=[Replicate()])
        return (y + self.beside[0]).to_local() + 0


def two_dimensions(rank, hold, gradients):
    """FSDP2 over one dimension of the mesh, and tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Parted(mesh["tensor"])
    fully_shard(model, mesh=mesh["data"], mp_policy=FP32_SUMS)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), len(gradients[0]))
    return window(model, opt, gradients[rank], hold)[0]


@pytest.mark.parametrize("hold", ["every micro-batch", "once a window"])
def test_parts_of_a_sum_over_tensor_parallelism_under_fsdp2_are_added_in_fp32(worlds, hold):
    gradients = torch.tensor([[256.0, 3.0], [1.0, 258.0], [512.0, 1.0], [1.0, 1024.0]])[..., None].expand(4, 2, 3)
    exact = gradients.double().sum((0, 1)) / 4  # the mean over two micro-batches of two data-parallel ranks
    for ours in worlds(4).run(two_dimensions, hold=hold, gradients=gradients):
        torch.testing.assert_close(ours.double(), exact.expand(2, 3), rtol=1e-6, atol=1e-6)
