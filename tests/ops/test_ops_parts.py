"""Numbers in two parts: a BF16 tensor, and low parts beside it.

What they mean, by oracles in NumPy, and the same bits on every backend.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops.backends import INTERPRETED
from ops_cases import (
    BACKENDS,
    DTYPES,
    LONG,
    NATIVE,
    RAGGED,
    SCALES,
    assert_same_bits,
    assert_same_stats,
    bits,
    copies,
    running,
    values,
    with_nonfinite,
)
from parts_cases import LOWS, boundary_words, number_of, parts_of, split

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNKS = [2047, 2048, 4097] if INTERPRETED else LONG  # of which a kernel needs several
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
every_low = pytest.mark.parametrize("low", LOWS.values(), ids=[f"low={name}" for name in LOWS])
beside = pytest.mark.parametrize("other", ["bf16", "f32"], ids=["other=bf16", "other=f32"])


def all_parts(dtype):
    """Every h, with every 8-bit low part, or with 16-bit ones around every boundary."""
    some = torch.tensor([-(2**15), 1 - 2**15, -257, -256, -129, -128, -1, 0, 1, 127, 128, 255, 256, 2**15 - 1])
    low = torch.arange(-128, 128) if dtype == torch.int8 else some
    low = low[:: 37 if INTERPRETED else 1].to(dtype)
    h = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return h.repeat_interleave(len(low)), low.repeat(1 << 16)


def assert_parts(h, low, x, what=""):
    """These are the parts of FP32 numbers; of NaNs, one h and the low part 0."""
    expected_h, expected_low = parts_of(x, low.dtype)
    nan = x.isnan()
    expected_h[nan] = 0x7FC0
    wrong = (bits(h) != expected_h) | (low != expected_low)
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()}, first {x[wrong][0]!r} as {h[wrong][0]!r} {low[wrong][0]}"
        f" instead of {expected_h[wrong][0]} {expected_low[wrong][0]}"
    )


# -- what the parts mean ---------------------------------------------------------------------------


@every_backend
@every_low
def test_every_pair_of_parts_is_the_number_that_integers_say(backend, low):
    h, part = all_parts(low)
    out = torch.empty(h.shape)
    with running(backend) as name:
        ops.cast_([out], [h], 1.0, low=[part], backend=name)
    assert_same_bits(out, number_of(h, part))


@every_backend
@every_low
def test_to_write_a_number_again_leaves_it(backend, low):
    h, part = all_parts(low)
    before = number_of(h, part)
    with running(backend) as name:
        ops.scale_([h], 1.0, low=[part], backend=name)
    assert_parts(h, part, before)
    assert_same_bits(number_of(h, part), before)


@every_backend
@every_low
def test_numbers_are_rounded_once_and_h_is_the_nearest(backend, low):
    x = boundary_words()[:: 11 if INTERPRETED else 1]
    with running(backend) as name:
        h, part = split(x, low, name)
        assert_parts(h, part, x)
        back = torch.empty_like(x)
        ops.cast_([back], [h], 1.0, low=[part], backend=name)
    if low == torch.int16:
        assert_same_bits(back, x)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="2**32 numbers, in Triton's interpreter")
@pytest.mark.parametrize("backend", NATIVE[-1:], ids=[f"backend={name}" for name in NATIVE[-1:]])  # 35 s each
def test_every_fp32_word_comes_back_from_parts_of_16_bits(backend):
    low, back = torch.empty(1 << 24, dtype=torch.int16), torch.empty(1 << 24)
    h = torch.empty(1 << 24, dtype=torch.bfloat16)
    words = torch.arange(1 << 24, dtype=torch.int32)
    with running(backend) as name:
        for upper in range(256):
            x = (words + ((upper - 256 if upper > 127 else upper) << 24)).view(torch.float32)
            ops.accumulate_([h], [x], 1.0, overwrite=True, low=[low], backend=name)
            ops.cast_([back], [h], 1.0, low=[low], backend=name)
            assert_same_bits(back, x, f"words from {upper << 24:#x}")


@every_backend
def test_what_other_code_writes_to_h_stays_what_it_is(backend):
    """Where low parts are stale, neither zero nor infinity becomes a NaN, or a number."""
    low8 = torch.arange(-128, 1, dtype=torch.int8)
    low16 = torch.arange(-(2**15), 1, 7, dtype=torch.int16)
    for value, low in itertools.product((0.0, -0.0, math.inf, -math.inf), (low8, low16)):
        if math.isinf(value) and low is low16:
            continue  # FP32 has numbers there
        h, out = torch.full(low.shape, value, dtype=torch.bfloat16), torch.empty(low.shape)
        with running(backend) as name:
            ops.cast_([out], [h], 1.0, low=[low], backend=name)
            assert_same_bits(out, torch.full(low.shape, value))
            stats = ops.stats([h], low=[low], backend=name)
            assert stats.nonfinite == (low.numel() if math.isinf(value) else 0)
            parts = [low.clone()]
            ops.scale_([h], 1.0, low=parts, stats=(stats := ops.Stats.empty()), backend=name)
            assert_same_bits(h, torch.full(low.shape, value, dtype=torch.bfloat16))
            assert not parts[0].any()
            assert stats.sq_norm == value * value * low.numel()
            h.fill_(value)
            parts = [low.clone()]
            ops.accumulate_([h], [torch.ones(low.shape)], 2.0, low=parts, backend=name)
            assert (number_of(h, parts[0]) == value + 2.0).all()


@every_backend
def test_what_is_too_large_for_h_is_infinite_beside_8_bits_alone(backend):
    words = torch.tensor([0x7F7F7F7F, 0x7F7F7F80, 0x7F7F8000, 0x7F7FFFFF], dtype=torch.int32)
    x = torch.cat([words.view(torch.float32), -words.view(torch.float32)])
    with running(backend) as name:
        h, low = split(x, torch.int8, name)
        assert h.isinf().tolist() == [False, True, True, True] * 2
        assert low[h.isinf()].tolist() == [0] * 6
        h, low = split(x, torch.int16, name)
        assert_same_bits(number_of(h, low), x)


# -- the ops ---------------------------------------------------------------------------------------


@every_backend
@every_low
@beside
def test_accumulate_computes_in_fp32(backend, low, other):
    """The oracle is NumPy's FP32 arithmetic between the oracles of joining and of splitting."""
    x, grad = values(5000, torch.float32, seed=1), values(5000, DTYPES[other], seed=2)
    for scale, decay, overwrite in ((0.37, 1.0, False), (-2.5, 0.75, False), (0.37, 1.0, True), (0.0, 0.5, False)):
        h, part = split(x, low)
        t = grad.float().numpy() * np.float32(scale) if scale else np.zeros(5000, dtype=np.float32)
        new = t if overwrite else number_of(h, part).numpy() * np.float32(decay) + t
        with running(backend) as name:
            ops.accumulate_(
                [h],
                [grad],
                scale,
                overwrite=overwrite,
                decay=decay,
                low=[part],
                stats=(s := ops.Stats.empty()),
                backend=name,
            )
        assert_parts(h, part, torch.from_numpy(new), f"scale {scale}")
        assert s.nonfinite == 0
        norm = number_of(h, part).double().square().sum()
        torch.testing.assert_close(s.sq_norm, norm, rtol=1e-13, atol=0)


@every_backend
@every_low
@beside
def test_cast_rounds_the_number_and_not_h(backend, low, other):
    h, part = split(values(5000, torch.float32), low)
    x = number_of(h, part)
    for scale in (1.0, 0.37, -3.0):
        out = torch.full((5000,), math.nan, dtype=DTYPES[other])
        with running(backend) as name:
            ops.cast_([out], [h], scale, low=[part], stats=(stats := ops.Stats.empty()), backend=name)
        assert_same_bits(out, torch.from_numpy(x.numpy() * np.float32(scale)).to(DTYPES[other]))
        torch.testing.assert_close(stats.sq_norm, out.double().square().sum(), rtol=1e-13, atol=0)


@every_backend
@every_low
def test_cast_may_write_its_own_inputs(backend, low):
    for layout in (lambda x: x, lambda x: x.view(-1, 5).t(), lambda x: x.view(-1, 5)[:, ::2]):
        h, part = split(with_nonfinite(values(5005, torch.float32)), low)
        out, before = layout(h.clone()), part.clone()
        with running(backend) as name:
            ops.cast_([expected := torch.empty_like(h)], [h], 0.37, low=[part], backend=name)
            ops.cast_([out], [out], 0.37, low=[layout(part)], backend=name)
        assert_same_bits(out, layout(expected))
        assert torch.equal(part, before)


@every_backend
def test_a_window_of_8_is_fp32s_to_bf16(backend):
    """The sums' error is at most 2**-17 of the largest partial sum for every add.

    The finished gradients are nearly all FP32's.
    """
    n = 20_000 if INTERPRETED else 400_000
    g = torch.Generator().manual_seed(1)
    signal = torch.randn(n, generator=g) * 0.1
    h, low = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8)
    sums, exact, largest = torch.empty(n), torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    with running(backend) as name:
        for k in range(8):
            grad = (signal + torch.randn(n, generator=g)).bfloat16()
            ops.accumulate_([h], [grad], 1.0, overwrite=k == 0, low=[low], backend=name)
            ops.accumulate_([sums], [grad], 1.0, overwrite=k == 0)
            exact += grad.double()
            largest = largest.maximum(exact.abs())
        assert ((number_of(h, low).double() - exact).abs() <= 8 * 2.0**-17 * largest).all()
        ops.cast_([h], [h], 0.125, low=[low], backend=name)
    assert (h == (sums * 0.125).bfloat16()).double().mean() >= 0.999


# -- bits ------------------------------------------------------------------------------------------


def compare(call, tensors, low, measured=(True, False)):
    """Compare bits and stats of ``call(tensors, low, stats, backend)`` with the reference's."""
    expected, parts, expected_stats = copies(tensors), copies(low), ops.Stats.empty()
    call(expected, parts, expected_stats, "reference")
    for backend, measure in itertools.product(NATIVE, measured):
        got, got_parts, stats = copies(tensors), copies(low), ops.Stats.empty() if measure else None
        with running(backend) as name:
            call(got, got_parts, stats, name)
        for a, b, part, expected_part in zip(got, expected, got_parts, parts, strict=True):
            assert_same_bits(a, b, f"{backend}, {b.numel()} elements")
            assert torch.equal(part, expected_part), backend
        if stats is not None:
            assert_same_stats(stats, expected_stats)


def lists(sizes, low, nonfinite=False):
    x = [values(n, torch.float32, seed=1) for n in sizes]
    hs, parts = zip(*(split(with_nonfinite(y) if nonfinite else y, low) for y in x), strict=True)
    return list(hs), list(parts)


def grads_of(sizes, other, nonfinite=False):
    grads = [values(n, DTYPES[other], seed=2) for n in sizes]
    return [with_nonfinite(x) for x in grads] if nonfinite else grads


@every_low
@beside
def test_accumulate_equals_reference(low, other):
    hs, parts = lists(RAGGED, low)
    grads = grads_of(RAGGED, other)
    for turn, (overwrite, decay) in enumerate(itertools.product((False, True), (1.0, 0.75))):
        for scale in SCALES[turn % 4 :: 4] if INTERPRETED else SCALES:
            compare(
                lambda out, low, stats, backend, s=scale, o=overwrite, d=decay: ops.accumulate_(
                    out, grads, s, overwrite=o, decay=d, low=low, stats=stats, backend=backend
                ),
                hs,
                parts,
            )


@every_low
@beside
def test_accumulate_equals_reference_over_chunks_and_nonfinite_values(low, other):
    sizes = [*CHUNKS, 17]
    hs, parts = lists(sizes, low, nonfinite=True)
    for scale, overwrite, nonfinite in itertools.product((0.37, 0.0), (False, True), (False, True)):
        grads = grads_of(sizes, other, nonfinite)
        compare(
            lambda out, low, stats, backend, s=scale, o=overwrite, g=grads: ops.accumulate_(
                out, g, s, overwrite=o, low=low, stats=stats, backend=backend
            ),
            hs,
            parts,
        )


@every_low
def test_scale_and_stats_equal_reference(low):
    for sizes, nonfinite in ((RAGGED, False), (CHUNKS, True)):
        hs, parts = lists(sizes, low, nonfinite)
        for scale in (0.37, 0.0, -1e30, math.inf):
            compare(
                lambda out, low, stats, backend, s=scale: ops.scale_(out, s, low=low, stats=stats, backend=backend),
                hs,
                parts,
            )
        expected = ops.stats(hs, low=parts, backend="reference")
        for backend in NATIVE:
            with running(backend) as name:
                assert_same_stats(ops.stats(hs, low=parts, backend=name), expected)


@every_low
@beside
def test_cast_equals_reference(low, other):
    for sizes, nonfinite in ((RAGGED, False), (CHUNKS, True)):
        hs, parts = lists(sizes, low, nonfinite)
        outs = [torch.full(x.shape, math.nan, dtype=DTYPES[other]) for x in hs]
        for scale in (1.0, 0.37, 0.0, 1e30):
            compare(
                lambda out, low, stats, backend, s=scale, hs=hs: ops.cast_(
                    out, hs, s, low=low, stats=stats, backend=backend
                ),
                outs,
                parts,
            )


@every_low
def test_large_outputs_that_pass_the_caches_are_the_same(low):
    """As CPU kernels store from 4 MiB on, joined masters from 32 MiB on, aligned for it or not."""
    n = (3 << 20) + 77 if not INTERPRETED else 3000
    masters = (8 << 20) + 77 if not INTERPRETED else 3000
    grad = torch.randn(n).bfloat16()
    for offset in (0, 1, 32):
        for measure in (False, True):
            compare(
                lambda out, low, stats, backend, o=offset: ops.accumulate_(
                    [x[o:] for x in out],
                    [grad[o:]],
                    0.5,
                    overwrite=True,
                    low=[x[o:] for x in low],
                    stats=stats,
                    backend=backend,
                ),
                [torch.zeros(n, dtype=torch.bfloat16)],
                [torch.zeros(n, dtype=low)],
                measured=(measure,),
            )
        for dtype in (torch.bfloat16, torch.float32):
            elements = masters if (low, dtype) == (torch.int16, torch.float32) else n
            h, part = split(torch.randn(elements), low)
            compare(
                lambda out, low, stats, backend, o=offset, h=h: ops.cast_(
                    [x[o:] for x in out], [h[o:]], 0.5, low=[x[o:] for x in low], stats=stats, backend=backend
                ),
                [torch.zeros(elements, dtype=dtype)],
                [part],
            )
