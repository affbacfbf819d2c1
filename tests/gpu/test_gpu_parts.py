"""Ops on numbers in two parts give the CPU reference's bits on a GPU, with every kernel backend."""

import itertools

import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import Stats, reference
from gpu_cases import DEVICE, SIZES, every_kernel, made, there
from ops_cases import assert_same_bits, assert_same_stats, copies, with_nonfinite
from parts_cases import LOWS, split


def check(call, expected_call, tensors, low, offset):
    """Check that ``call(tensors, low, stats)`` on the device equals ``expected_call`` on the CPU.

    And that autograd notices what it writes.
    """
    ours, parts = there(tensors, offset), there(low, 3 * offset)
    expected, right_parts = copies(tensors), copies(low)
    got, right = Stats.empty(DEVICE), Stats.empty()
    before = [x._version for x in ours]
    call(ours, parts, got)
    expected_call(expected, right_parts, right)
    assert all(x._version > version for x, version in zip(ours, before, strict=True)), "autograd would not notice"
    for a, b in zip((*ours, *parts), (*expected, *right_parts), strict=True):
        if a.is_floating_point():
            assert_same_bits(a.cpu(), b)
        else:
            assert torch.equal(a.cpu(), b)
        whole = a.as_strided((a.untyped_storage().nbytes() // a.itemsize,), (1,), 0)
        assert (whole == 77).sum() >= whole.numel() - a.numel()
    assert_same_stats(Stats(got.sq_norm.cpu(), got.nonfinite.cpu()), right)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("low", LOWS.values(), ids=LOWS)
@every_kernel
def test_two_parts(backend, low, other, offset):
    hs, parts = (list(x) for x in zip(*(split(with_nonfinite(x), low) for x in made(torch.float32, 1)), strict=True))
    grads, outs = [with_nonfinite(x) for x in made(other, 50)], [torch.zeros(n, dtype=other) for n in SIZES]
    hs[8][:40], parts[8][:40] = 0.0, -5  # as other code leaves them
    grads_there, hs_there = there(grads), there(hs, offset)
    for (scale, decay, overwrite), wrap in itertools.product(
        ((-2.5, 0.75, False), (0.0, 1.0, False), (3.0, 1.0, True)), (float, lambda s: torch.tensor(s, device=DEVICE))
    ):
        factor = wrap(scale)
        check(
            lambda o, p, s, x=factor, d=decay, w=overwrite: ops.accumulate_(
                o, grads_there, x, overwrite=w, decay=d, low=p, stats=s, backend=backend
            ),
            lambda o, p, s, x=scale, d=decay, w=overwrite: reference.accumulate_(o, grads, x, w, d, None, s, p),
            hs, parts, offset,
        )  # fmt: skip
    check(
        lambda o, p, s: ops.scale_(o, -1.75, low=p, stats=s, backend=backend),
        lambda o, p, s: reference.scale_(o, -1.75, s, p),
        hs, parts, offset,
    )  # fmt: skip
    check(
        lambda o, p, s: ops.cast_(o, hs_there, 0.75, low=p, stats=s, backend=backend),
        lambda o, p, s: reference.cast_(o, hs, 0.75, s, p),
        outs, parts, offset,
    )  # fmt: skip
    right = Stats.empty()
    reference.stats(hs, right, parts)
    got = ops.stats(hs_there, low=there(parts), backend=backend)
    assert_same_stats(Stats(got.sq_norm.cpu(), got.nonfinite.cpu()), right)
    ops.cast_(hs_there, hs_there, 0.75, low=there(parts), backend=backend)
    reference.cast_(expected := [torch.empty_like(x) for x in hs], hs, 0.75, None, parts)
    for a, b in zip(hs_there, expected, strict=True):
        assert_same_bits(a.cpu(), b)
