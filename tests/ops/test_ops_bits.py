"""Every op on every backend gives the reference's bits: dtypes, sizes, scales, overwrite, decay."""

import itertools
import math

import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops.backends import INTERPRETED
from ops_cases import (
    DTYPES,
    LONG,
    NATIVE,
    PAIR_IDS,
    PAIRS,
    RAGGED,
    SCALES,
    assert_same_bits,
    assert_same_stats,
    copies,
    running,
    values,
    with_nonfinite,
)

pytestmark = [
    pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built"),
    pytest.mark.usefixtures("one_thread"),  # threads are test_ops_threads.py's subject
]


def compare(call, outs, backends=NATIVE, measured=(True, False)):
    """Check that ``call(outs, stats, backend)`` has the reference's bits on all native backends.

    Also the same stats, where ``measured`` says so.
    """
    expected, expected_stats = copies(outs), ops.Stats.empty()
    call(expected, expected_stats, "reference")
    for backend in backends:
        for measure in measured:
            got, stats = copies(outs), ops.Stats.empty() if measure else None
            with running(backend) as name:
                call(got, stats, name)
            for k, (a, b) in enumerate(zip(got, expected, strict=True)):
                assert_same_bits(a, b, f"{backend}, tensor {k} of {b.numel()}")
            if stats is not None:
                assert_same_stats(stats, expected_stats)


def with_and_without(turn):
    """With and without statistics; in Triton's interpreter, which is slow, one of them by turns."""
    return (turn % 2 == 0,) if INTERPRETED else (True, False)


def lists(buffer, grad, sizes, nonfinite=False):
    outs = [values(n, DTYPES[buffer], seed=1) for n in sizes]
    ins = [values(n, DTYPES[grad], seed=2) for n in sizes]
    return outs, [with_nonfinite(x) for x in ins] if nonfinite else ins


@pytest.mark.parametrize(("buffer", "grad"), PAIRS, ids=PAIR_IDS)
def test_accumulate_equals_reference(buffer, grad):
    outs, ins = lists(buffer, grad, RAGGED)
    for overwrite, decay in itertools.product((False, True), (1.0, 0.75)):
        # Triton's interpreter is slow. There we run each scale in two of these four combinations,
        # so that it both adds and overwrites, and runs both with and without decay, and with and
        # without statistics.
        for turn, scale in enumerate(SCALES[overwrite ^ (decay == 1) :: 2] if INTERPRETED else SCALES, start=overwrite):
            compare(
                lambda out, stats, backend, s=scale, o=overwrite, d=decay: ops.accumulate_(
                    out, ins, s, overwrite=o, decay=d, stats=stats, backend=backend
                ),
                outs,
                measured=with_and_without(turn),
            )


@pytest.mark.parametrize(("buffer", "grad"), PAIRS, ids=PAIR_IDS)
def test_accumulate_equals_reference_over_chunks_and_nonfinite_values(buffer, grad):
    outs, ins = lists(buffer, grad, [*LONG, 17], nonfinite=True)
    with_nonfinite(outs[2])
    for scale, overwrite in itertools.product((0.37, 0.0), (False, True)):
        compare(
            lambda out, stats, backend, s=scale, o=overwrite: ops.accumulate_(
                out, ins, s, overwrite=o, stats=stats, backend=backend
            ),
            outs,
        )


@pytest.mark.parametrize("scale", [0.0, -0.0, torch.tensor(0.0)], ids=["0", "-0", "tensor"])
def test_accumulate_zero_scale_adds_nothing_whatever_the_gradient_holds(scale):
    for backend in ("reference", *NATIVE):
        buffer, before = values(5000, torch.float32), values(5000, torch.float32)
        poison = torch.full((5000,), float("nan"))
        with running(backend) as name:
            ops.accumulate_([buffer], [poison], scale, stats=(stats := ops.Stats.empty()), backend=name)
            torch.testing.assert_close(buffer, before, rtol=0, atol=0)
            assert stats.nonfinite == 0
            ops.accumulate_([buffer], [poison], scale, overwrite=True, backend=name)
        assert not buffer.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by NumPy, in Triton's interpreter
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("scale", [1e-50, -1e-300, 5e-324], ids=str)
def test_a_scale_that_only_fp32_takes_for_zero_is_none(scale, overwrite):
    """Arithmetic of FP32 tensors is FP32, where it is 0: NaN or an infinity times that is NaN.

    A scale of 0 would hide them.
    """
    made = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -1.0, 3e38])
    for given, (buffer, grad) in itertools.product(
        (scale, torch.tensor(scale, dtype=torch.float64)), itertools.product(("f32", "bf16", "f16"), repeat=2)
    ):
        for backend in ("reference", *NATIVE):
            out, stats = torch.ones(6, dtype=DTYPES[buffer]), ops.Stats.empty()
            with running(backend) as name:
                ops.accumulate_([out], [made.to(DTYPES[grad])], given, overwrite=overwrite, stats=stats, backend=name)
            expected = made.to(DTYPES[grad]).float() * torch.tensor(scale).float() + (0.0 if overwrite else 1.0)
            assert torch.equal(out.isnan(), expected.isnan()) and out.isnan().any(), (backend, buffer, grad)
            assert torch.equal(out[~out.isnan()].float(), expected[~expected.isnan()])
            assert stats.nonfinite == expected.isnan().sum()


def test_lanes_beyond_a_tensors_end_are_not_measured():
    """They hold 0: NaN with an infinite scale, which would make an infinite squared norm NaN."""
    for n in RAGGED[1:]:
        ones = [torch.ones(n)]
        for backend in ("reference", *NATIVE):
            with running(backend) as name:
                for overwrite in (False, True):
                    ops.accumulate_(
                        copies(ones),
                        ones,
                        math.inf,
                        overwrite=overwrite,
                        stats=(stats := ops.Stats.empty()),
                        backend=name,
                    )
                    assert (stats.sq_norm, stats.nonfinite) == (math.inf, n)
                ops.scale_(copies(ones), math.inf, stats=(stats := ops.Stats.empty()), backend=name)
                assert (stats.sq_norm, stats.nonfinite) == (math.inf, n)


@pytest.mark.parametrize(("out", "in_"), PAIRS, ids=[f"out={out}-in={in_}" for out, in_ in PAIRS])
def test_cast_equals_reference(out, in_):
    outs, ins = lists(out, in_, RAGGED + LONG[:3], nonfinite=True)
    for turn, scale in enumerate(SCALES):
        compare(
            lambda o, stats, backend, s=scale: ops.cast_(o, ins, s, stats=stats, backend=backend),
            outs,
            measured=with_and_without(turn),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_stats_equal_reference(dtype):
    tensors = [with_nonfinite(values(n, DTYPES[dtype])) for n in RAGGED + LONG]
    for turn, scale in enumerate(SCALES):
        compare(
            lambda x, stats, backend, s=scale: ops.scale_(x, s, stats=stats, backend=backend),
            tensors,
            measured=with_and_without(turn),
        )
    for finite in (True, False):
        measured = [values(n, DTYPES[dtype]) for n in RAGGED] if finite else tensors
        for backend in NATIVE:
            with running(backend) as name:
                assert_same_stats(ops.stats(measured, backend=name), ops.stats(measured, backend="reference"))


def test_accumulate_mixes_dtypes_in_one_call():
    outs = [values(n, DTYPES[buffer]) for n, (buffer, _) in enumerate(PAIRS, start=100)]
    ins = [values(n, DTYPES[grad], seed=5) for n, (_, grad) in enumerate(PAIRS, start=100)]
    compare(lambda o, stats, backend: ops.accumulate_(o, ins, 0.3, stats=stats, backend=backend), outs)


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@pytest.mark.parametrize("buffer", ["bf16", "f16"])
@pytest.mark.parametrize("grad", DTYPES)
def test_accumulate_stochastic_equals_reference(buffer, grad, overwrite):
    sizes = [0, 1, 31, 32, 33, 255, 257, 300, 1000, 4097, 40000, 5000, 5000]
    outs, ins = lists(buffer, grad, sizes, nonfinite=True)
    # Kernels draw in other ways from the start of a block of 8, half or a quarter of one, or not.
    counters = [0, 1, 5, 7, 8, 2**35 - 3, 2**63, 2**64 - 40, 12345, 3, 2**64 - 4096, 12, 2]
    rounding = ops.StochasticRounding(2**63 + 987654321, counters)
    for scale, decay in ((1.0, 1.0), (1e-3, 0.5), (0.0, 0.9)):
        compare(
            lambda out, stats, backend, s=scale, d=decay: ops.accumulate_(
                out, ins, s, overwrite=overwrite, decay=d, rounding=rounding, stats=stats, backend=backend
            ),
            outs,
        )


@pytest.mark.parametrize(("buffer", "grad"), [("f32", "bf16"), ("bf16", "f32"), ("f64", "f32")])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_accumulate_streamed_overwrite_equals_reference(buffer, grad, offset):
    """Large overwrites bypass the caches if the output is aligned."""
    n = (1 << 15 if INTERPRETED else 2 << 20) + 13  # the interpreter is slow, and Triton treats all sizes alike
    memory, x = torch.full((n + 64,), 7.0, dtype=DTYPES[buffer]), values(n, DTYPES[grad])
    expected = [torch.empty(n, dtype=DTYPES[buffer])]
    ops.accumulate_(
        expected, [x], 0.3, overwrite=True, stats=(expected_stats := ops.Stats.empty()), backend="reference"
    )
    for backend in NATIVE:
        for stats in (ops.Stats.empty(), None):
            memory.fill_(7.0)
            with running(backend) as name:
                ops.accumulate_([memory[offset : offset + n]], [x], 0.3, overwrite=True, stats=stats, backend=name)
            assert_same_bits(memory[offset : offset + n], expected[0], backend)
            assert (memory[:offset] == 7).all()
            assert (memory[offset + n :] == 7).all()
            if stats is not None:
                assert_same_stats(stats, expected_stats)


@pytest.mark.slow
def test_accumulate_reaches_past_two_to_the_31_elements():
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    if available < 12 << 20:
        pytest.skip("needs 12 GB of free memory")
    n = 2**31 + 37
    buffer, grad = torch.zeros(n, dtype=torch.bfloat16), torch.ones(n, dtype=torch.bfloat16)
    grad[-1] = 3
    ops.accumulate_([buffer], [grad], 2.0, stats=(stats := ops.Stats.empty()), backend="cpu")
    assert buffer[0] == 2
    assert buffer[2**31] == 2
    assert buffer[-1] == 6
    assert stats.sq_norm == 4.0 * (n - 1) + 36
