"""Ops against other oracles than our reference: plain PyTorch, FP64 arithmetic, exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from fusedaccum import ops
from ops_cases import BACKENDS, DTYPES, PAIR_IDS, PAIRS, assert_same_bits, running, values

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
FORMATS = {torch.float32: (24, -126, 127), torch.bfloat16: (8, -126, 127), torch.float16: (11, -14, 15)}


def nearest(x, dtype):
    """The format's number nearest to ``x``, a Fraction, ties to even, by its definition."""
    digits, lowest, highest = FORMATS[dtype]
    if x == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(x))), lowest)
    exponent += (
        1
        if abs(x) >= Fraction(2) ** (exponent + 1)
        else -1
        if abs(x) < Fraction(2) ** exponent > Fraction(2) ** lowest
        else 0
    )
    unit = Fraction(2) ** (exponent - digits + 1)
    result = round(x / unit) * unit  # Python rounds ties to even
    return math.copysign(math.inf, x) if abs(result) >= Fraction(2) ** (highest + 1) else float(result)


@every_backend
@pytest.mark.parametrize("grad", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("buffer", ["bf16", "f16", "f32"])
def test_accumulate_rounds_product_and_sum_and_result_once_each(backend, buffer, grad):
    """The oracle: fractions, rounded to FP32 after product and sum, then to the buffer's format."""
    b, g = values(120, DTYPES[buffer], seed=3), values(120, DTYPES[grad], seed=4)
    b, g = b.where(b.isfinite(), 1), g.where(g.isfinite(), 1)
    scale = Fraction(float(np.float32(0.37)))
    with running(backend) as name:
        got = b.clone()
        ops.accumulate_([got], [g], float(scale), backend=name)
    for before, x, after in zip(b.tolist(), g.tolist(), got.tolist(), strict=True):
        t = nearest(Fraction(x) * scale, torch.float32)
        new = nearest(Fraction(before) + Fraction(t), torch.float32)
        assert after == nearest(Fraction(new), DTYPES[buffer])


@every_backend
@pytest.mark.parametrize(("buffer", "grad"), PAIRS, ids=PAIR_IDS)
def test_accumulate_is_the_pytorch_expression(backend, buffer, grad):
    b, g = values(777, DTYPES[buffer], seed=5), values(777, DTYPES[grad], seed=6)
    wide = torch.float64 if "f64" in (buffer, grad) else torch.float32
    scale, decay = torch.tensor(0.7, dtype=torch.float64).to(wide), torch.tensor(0.9, dtype=torch.float64).to(wide)
    added = (b.to(wide) * decay + g.to(wide) * scale).to(DTYPES[buffer])
    written = (g.to(wide) * scale).to(DTYPES[buffer])
    with running(backend) as name:
        for overwrite, expected in ((False, added), (True, written)):
            got = b.clone()
            ops.accumulate_([got], [g], 0.7, overwrite=overwrite, decay=0.9, backend=name)
            assert_same_bits(got, expected)


@every_backend
@pytest.mark.parametrize(("out", "in_"), PAIRS, ids=[f"out={out}-in={in_}" for out, in_ in PAIRS])
def test_cast_is_pytorchs_to(backend, out, in_):
    x = values(3000, DTYPES[in_])
    x[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    got = torch.empty(3000, dtype=DTYPES[out])
    with running(backend) as name:
        ops.cast_([got], [x], backend=name)
    assert_same_bits(got, x.to(DTYPES[out]))


@every_backend
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_cast_of_every_16_bit_number_comes_back(backend, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    wide, back = torch.empty(2**16), torch.empty(2**16, dtype=DTYPES[dtype])
    with running(backend) as name:
        ops.cast_([wide], [x], backend=name)
        ops.cast_([back], [wide], backend=name)
    assert_same_bits(wide, x.float())
    assert_same_bits(back, x)


@every_backend
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_cast_rounds_midpoints_to_even(backend, dtype):
    """For the midpoint between each number and the next, and for its neighbours in FP32."""
    x = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    x = x[x.isfinite()]
    middle = (x[:-1].double() + x[1:].double()).div(2).float()
    cases = torch.cat([middle, middle.nextafter(torch.tensor(math.inf)), middle.nextafter(torch.tensor(-math.inf))])
    cases = torch.cat([cases, -cases])
    got = torch.empty(cases.shape, dtype=DTYPES[dtype])
    with running(backend) as name:
        ops.cast_([got], [cases], backend=name)
    assert_same_bits(got, cases.to(DTYPES[dtype]))
    if dtype == "f16":  # and against numpy's conversion
        assert (got.numpy().view(np.uint16) == cases.numpy().astype(np.float16).view(np.uint16)).all()


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_is_literal(backend, dtype):
    x = torch.tensor([1.0, -2.0, 0.0, float("inf"), float("nan")], dtype=DTYPES[dtype])
    with running(backend) as name:
        ops.scale_([y := x.clone()], 0.0, backend=name)
        ops.scale_([z := x.clone()], 3, backend=name)
    assert_same_bits(y, x * 0)
    assert_same_bits(z, x * 3)


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_stats_against_exact_sums(backend, dtype):
    x = values(5000, DTYPES[dtype])
    x = x.where(x.isfinite(), 1)
    with running(backend) as name:
        stats = ops.stats([x[:1234], x[1234:]], backend=name)
    exact = sum(Fraction(v) ** 2 for v in x.tolist())
    assert abs(Fraction(stats.sq_norm.item()) / exact - 1) < 1e-13
    assert stats.nonfinite == 0


@every_backend
def test_accumulate_stats_are_of_the_stored_buffer_and_of_the_contribution(backend):
    buffer = torch.tensor([float("inf"), 1.0, 60000.0], dtype=torch.float16)
    with running(backend) as name:
        stats = ops.Stats(torch.tensor(5.0, dtype=torch.float64), torch.tensor(9))
        ops.accumulate_([buffer], [torch.tensor([1.0, 2.0, 60000.0])], 1.0, stats=stats, backend=name)
        assert stats.nonfinite == 0  # counts the gradient, not the buffer (inf) or the sums (the third overflows)
        assert stats.sq_norm == float("inf")
        ops.accumulate_(
            [torch.zeros(3)], [torch.tensor([1.0, float("nan"), float("-inf")])], 0.5, stats=stats, backend=name
        )
        assert stats.nonfinite == 2
        ops.accumulate_([torch.zeros(3)], [torch.tensor([1.0, 2.0, 3.0])], 2.0, stats=stats, backend=name)
        assert (stats.sq_norm, stats.nonfinite) == (56, 0)
        ops.cast_([torch.zeros(3, dtype=torch.float16)], [torch.tensor([1.0, 1e6, 3.0])], stats=stats, backend=name)
        assert stats.nonfinite == 1  # counted in the output


@every_backend
def test_stats_of_huge_doubles_overflow_without_counting_them(backend):
    with running(backend) as name:
        stats = ops.stats([torch.full((100,), 1e200, dtype=torch.float64)], backend=name)
    assert (stats.sq_norm, stats.nonfinite) == (float("inf"), 0)


@every_backend
def test_accumulate_gathers_256_and_1_to_257(backend):
    buffer = torch.empty(40)
    with running(backend) as name:
        ops.accumulate_([buffer], [torch.full((40,), 256.0, dtype=torch.bfloat16)], 1.0, overwrite=True, backend=name)
        ops.accumulate_([buffer], [torch.ones(40, dtype=torch.bfloat16)], 1.0, backend=name)
    assert (buffer == 257).all()
