"""Properties of the ops over random shapes, dtypes, strides, offsets and scales."""

import pytest
import torch
from fusedaccum import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import BACKENDS, DTYPES, NATIVE, assert_same_bits, assert_same_stats, running

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
many = settings(deadline=None, max_examples=60, derandomize=True)
native_only = pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built")
dtypes = st.sampled_from(list(DTYPES.values()))
scales = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.125, float("inf")]), st.floats(width=32, allow_nan=False))


@st.composite
def view_of(draw, shape, dtype):
    """Random numbers of this shape, with any order of strides, gaps, and offset into memory."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(1, 2)) for _ in shape]
    offset = draw(st.integers(0, 5))
    memory = torch.randn(
        [shape[d] * gaps[d] for d in order], generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    memory = torch.cat([torch.zeros(offset), memory.flatten() * 10 ** draw(st.integers(-6, 4))]).to(dtype)
    strides, stride = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = stride * gaps[d]
        stride *= shape[d] * gaps[d]
    return memory.as_strided(shape, strides, offset)


@st.composite
def pairs(draw):
    """Lists of buffers and of gradients, every tensor in memory of its own."""
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=4))
    return [[draw(view_of(shape, draw(dtypes))) for shape in shapes] for _ in range(2)]


def clones(tensors):
    """Copies with the same strides and offsets, gaps included."""
    return [
        torch.as_strided(x._base.clone() if x._base is not None else x.clone(), x.shape, x.stride(), x.storage_offset())
        for x in tensors
    ]


@native_only
@many
@given(
    pairs(),
    scales,
    st.booleans(),
    st.sampled_from([1.0, 0.5, 0.0]),
    st.sampled_from([None, 5]),
    st.sampled_from(NATIVE or [""]),
)
def test_accumulate_equals_reference_and_touches_nothing_else(lists, scale, overwrite, decay, seed, backend):
    buffers, grads = lists
    rounding = None if seed is None else ops.StochasticRounding(seed, range(0, 7 * len(buffers), 7))
    results = []
    for which in ("reference", backend):
        outs, stats = clones(buffers), ops.Stats.empty()
        with running(which) as name:
            ops.accumulate_(
                outs, grads, scale, overwrite=overwrite, decay=decay, rounding=rounding, stats=stats, backend=name
            )
        results.append((outs, stats))
    (expected, expected_stats), (got, stats) = results
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(whole(a), whole(b))  # gaps and neighbours
    assert_same_stats(stats, expected_stats)


def whole(x):
    return x._base if x._base is not None else x


@native_only
@many
@given(pairs(), scales, st.sampled_from(NATIVE or [""]))
def test_cast_scale_and_stats_equal_reference(lists, scale, backend):
    outs, ins = lists
    results = []
    for which in ("reference", backend):
        written, stats = clones(outs), [ops.Stats.empty(), ops.Stats.empty()]
        with running(which) as name:
            ops.cast_(written, ins, scale, stats=stats[0], backend=name)
            ops.scale_(written, scale, stats=stats[1], backend=name)
            results.append((written, [*stats, ops.stats(written, backend=name)]))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert_same_bits(whole(b), whole(a))
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert_same_stats(b, a)


@every_backend
@many
@given(pairs(), st.randoms(use_true_random=False))
def test_order_and_bucketing_change_nothing(backend, lists, random):
    buffers, grads = lists
    together, apart = clones(buffers), clones(buffers)
    order = list(range(len(buffers)))
    random.shuffle(order)
    with running(backend) as name:
        ops.accumulate_(together, grads, 0.3, backend=name)
        for k in order:
            ops.accumulate_([apart[k]], [grads[k]], 0.3, backend=name)
    for a, b in zip(together, apart, strict=True):
        assert_same_bits(a, b)


@every_backend
@many
@given(pairs(), scales)
def test_overwrite_is_adding_to_nothing(backend, lists, scale):
    buffers, grads = lists
    zeros, poison = clones(buffers), clones(buffers)
    with running(backend) as name:
        for x, y in zip(zeros, poison, strict=True):
            x.zero_()
            y.fill_(float("nan"))
        ops.accumulate_(zeros, grads, scale, backend=name)
        ops.accumulate_(poison, grads, scale, overwrite=True, backend=name)
    for a, b in zip(zeros, poison, strict=True):
        assert_same_bits(b + 0, a + 0)  # 0 + -0 is 0


@every_backend
@many
@given(
    st.integers(0, 400),
    st.integers(0, 70),
    st.integers(0, 70),
    st.sampled_from(["bf16", "f16"]),
    st.integers(0, 2**64 - 1),
)
def test_stochastic_rounding_of_a_view_is_that_of_its_copy(backend, n, offset, counter, dtype, seed):
    x = torch.randn(n + offset, generator=torch.Generator().manual_seed(n))
    view = torch.zeros(n + offset + 8, dtype=DTYPES[dtype])[offset : offset + n]
    rounding = ops.StochasticRounding(seed, [counter])
    with running(backend) as name:
        ops.accumulate_([view], [x[offset:]], 0.7, rounding=rounding, backend=name)
        ops.accumulate_(
            [copy := torch.zeros(n, dtype=DTYPES[dtype])], [x[offset:].clone()], 0.7, rounding=rounding, backend=name
        )
    assert_same_bits(view, copy)
