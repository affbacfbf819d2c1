"""csrc/cuda/kernels.cu itself, run on the CPU under sanitizers.

Block after block, a block's threads in a different order each time. The undefined-behaviour
sanitizer is always on. A slow test at the end runs this file again with the address sanitizer, on a
library that it has compiled for this (``SHIM_LIBRARY``), with libasan preloaded.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusedaccum.ops import Stats, StochasticRounding, reference
from ops_cases import assert_same_bits, assert_same_stats, child_environment, values, with_nonfinite

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests/gpu/cuda_shim"
WITH_ADDRESSES = os.environ.get("SHIM_LIBRARY")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # in the order of csrc/cuda/kernels.h
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ACCUMULATE, CAST, STATS = range(3)
SIZES = (0, 1, 7, 8, 9, 1023, 2049, 4096, 8191, 8192, 8193, 50_001)
SENTINEL = 77.0

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


class Pair(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("in", ctypes.c_void_p),
        ("elements", ctypes.c_int64),
        ("counter", ctypes.c_uint64),
    )


def compiled(target, *flags, sanitizers="undefined"):
    common = "-std=c++17 -O1 -g1 -ffp-contract=off -fno-strict-aliasing -fno-sanitize-recover=all -Wno-unknown-pragmas"
    command = ["g++", *common.split(), f"-fsanitize={sanitizers}", *flags, "-shared", "-fPIC", f"-I{SHIM}"]
    subprocess.run([*command, "-o", target, SHIM / "kernels.cpp"], check=True)
    return str(target)


def loaded(library):
    """C function of tests/gpu/cuda_shim/kernels.cpp: run(op, pairs, …) -> number of launches."""
    run = ctypes.CDLL(library).run
    number, flag = ctypes.c_double, ctypes.c_bool
    run.argtypes = (
        ctypes.c_int, ctypes.POINTER(Pair), ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.POINTER(number), flag, number, flag,
        flag, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p,
    )  # fmt: skip
    return run


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return WITH_ADDRESSES or compiled(tmp_path_factory.mktemp("shim") / "kernels.so")


@pytest.fixture(scope="module")
def kernels(library):
    return loaded(library)


def call(
    kernels, op, outs, ins, scale=1.0, *, on_device=False, overwrite=False, decay=1.0, rounding=None, stats=None, more=0
):
    """Run the kernels on lists of one dtype each; returns the number of launches.

    ``more`` plants a fault: that many elements too many.
    """
    counters = rounding.counters if rounding else [0] * len(outs)
    table = (Pair * len(outs))(
        *(Pair(o.data_ptr(), x.data_ptr(), o.numel() + more, c) for o, x, c in zip(outs, ins, counters, strict=True))
    )
    into = (None, None) if stats is None else (stats.sq_norm.data_ptr(), stats.nonfinite.data_ptr())
    return kernels(
        op, table, len(outs), DTYPES.index(outs[0].dtype), DTYPES.index(ins[0].dtype), ctypes.c_double(scale), on_device, decay,
        overwrite, rounding is not None, rounding.seed if rounding else 0, *into,
    )  # fmt: skip


def tensors(sizes, dtype, offset, seed):
    """Views of given sizes between sentinels, each ``offset`` elements past an aligned address."""
    views = []
    for k, size in enumerate(sizes):
        whole = torch.full((size + 32,), SENTINEL, dtype=dtype)
        start = 16 - whole.data_ptr() // whole.itemsize % 16 + offset
        views.append(whole[start : start + size].copy_(values(size, dtype, seed + k)))
    return views


def check(kernels, outs, ins, scale=0.37, *, stats=False, **options):
    """Accumulate, and compare with the reference on copies; returns the number of launches."""
    expected = [x.clone() for x in outs]
    measured, right = (Stats.empty() if stats else None for _ in range(2))
    overwrite, decay, rounding = (
        options.get(k, v) for k, v in (("overwrite", False), ("decay", 1.0), ("rounding", None))
    )
    reference.accumulate_(expected, ins, scale, overwrite, decay, rounding, right)
    launches = call(kernels, ACCUMULATE, outs, ins, scale, stats=measured, **options)
    same(outs, expected)
    if stats:
        assert_same_stats(measured, right)
    return launches


def same(outs, expected):
    for out, right in zip(outs, expected, strict=True):
        assert_same_bits(out, right)
        outside = out.untyped_storage().nbytes() // out.itemsize - out.numel()
        whole = out.as_strided((out.numel() + outside,), (1,), 0)
        assert (whole == SENTINEL).sum() >= outside, "wrote outside its tensor"


PAIRS = [pytest.param(o, x, id=f"out={NAMES[o]}-in={NAMES[x]}") for o, x in itertools.product(DTYPES, DTYPES)]
every_pair = pytest.mark.parametrize(("out", "x"), PAIRS)
every_offset = pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (0, 3), (5, 0)], ids="offsets={}".format)


@every_offset
@every_pair
def test_accumulate_equals_reference(kernels, out, x, offsets):
    outs, ins = tensors(SIZES, out, offsets[0], 1), tensors(SIZES, x, offsets[1], 2)
    check(kernels, outs, ins)
    check(kernels, outs, ins, scale=-3.0, decay=0.75, on_device=True)
    check(kernels, outs, ins, scale=1e-3, overwrite=True)


@every_pair
def test_accumulate_measures_as_reference(kernels, out, x):
    outs, ins = tensors(SIZES, out, 0, 1), tensors(SIZES, x, 0, 2)
    for both in (*outs, *ins):
        both.copy_(torch.randn(both.shape))
    check(kernels, outs, ins, stats=True)
    check(kernels, outs, ins, scale=2.0, overwrite=True, stats=True)
    with_nonfinite(ins[5])
    with_nonfinite(outs[8])
    check(kernels, outs, ins, stats=True)
    with_nonfinite(ins[8])  # the output is not finite at the same places anyway, and is checked
    check(kernels, outs, ins, scale=0.0, stats=True)


@every_pair
def test_cast_equals_reference(kernels, out, x):
    for scale in (1.0, 0.3, 0.0, 1e30):
        outs, ins = tensors(SIZES, out, 0, 1), tensors(SIZES, x, 3, 2)
        with_nonfinite(ins[6])
        expected = [o.clone() for o in outs]
        measured, right = Stats.empty(), Stats.empty()
        reference.cast_(expected, ins, scale, right)
        call(kernels, CAST, outs, ins, scale, stats=measured)
        same(outs, expected)
        assert_same_stats(measured, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_scaling_in_place_equals_reference(kernels, dtype):
    outs = tensors(SIZES, dtype, 0, 1)
    expected = [o.clone() for o in outs]
    reference.scale_(expected, -1.7, None)
    call(kernels, CAST, outs, outs, -1.7)
    same(outs, expected)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_stats_equal_reference(kernels, dtype, offset):
    ins = tensors(SIZES, dtype, offset, 1)
    for x in ins:
        x.copy_(torch.randn(x.shape))  # numbers whose squares are finite in FP16 too
    for finite in (True, False):
        measured, right = Stats.empty(), Stats.empty()
        reference.stats(ins, right)
        call(kernels, STATS, ins, ins, stats=measured)
        assert_same_stats(measured, right)
        assert measured.sq_norm.isfinite() == finite
        with_nonfinite(ins[7])


def test_statistics_are_the_same_bits_in_every_order_of_threads(kernels):
    ins = tensors(SIZES, torch.float32, 0, 1)
    sums = set()
    for _ in range(5):
        measured = Stats.empty()
        call(kernels, STATS, ins, ins, stats=measured)
        sums.add(measured.sq_norm.item())
    assert len(sums) == 1


@every_pair
def test_special_values_come_out_as_from_reference(kernels, out, x):
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65519.9, 65520.0, 3e38, 1e-40, 6e-8, 2.0**-14, 1e300],
        dtype=torch.float64,
    )
    outs, ins = [special.to(out).repeat_interleave(12)], [special.to(x).repeat(12)]
    for scale in (1.0, 0.0, -0.0, 1e-30, float("inf"), float("nan")):
        both = [outs[0].clone()]
        check(kernels, both, ins, scale)
        check(kernels, both, ins, scale, overwrite=True)


@pytest.mark.parametrize("op", [ACCUMULATE, CAST])
def test_lanes_beyond_a_tensors_end_are_not_measured(kernels, op):
    """They hold 0: NaN with an infinite scale, which would make an infinite squared norm NaN."""
    ins = [torch.ones(n, dtype=torch.bfloat16) for n in SIZES]
    outs, measured = [torch.ones(n) for n in SIZES], Stats.empty()
    call(kernels, op, outs, ins, float("inf"), stats=measured)
    assert (measured.sq_norm, measured.nonfinite) == (float("inf"), sum(SIZES))


@pytest.mark.parametrize("counter", [0, 2, 4, 7, 2**64 - 5, 2**64 - 4096])
@pytest.mark.parametrize(("out", "x"), [p for p in PAIRS if p.values[0].itemsize == 2])
def test_stochastic_rounding_equals_reference(kernels, out, x, counter):
    """By the counters, packs begin at a block of 8 draws, a half or quarter of it, or anywhere."""
    outs, ins = tensors(SIZES, out, 0, 1), tensors(SIZES, x, 0, 2)
    rounding = StochasticRounding(2**63 + 12345, [counter] * len(SIZES))
    check(kernels, outs, ins, rounding=rounding, stats=counter in (4, 7))


def test_thousands_of_tensors_take_few_launches(kernels):
    sizes = [64] * 2_000
    launches = check(kernels, tensors(sizes, torch.float32, 0, 1), tensors(sizes, torch.bfloat16, 0, 2), stats=True)
    assert launches == 3


# -- numbers in two parts --------------------------------------------------------------------------

SCALE = 3
LOWS = (torch.int8, torch.int16)  # in the order of csrc/types.h
OFFSETS = [(low, other, offset) for low in LOWS for other in (torch.bfloat16, torch.float32) for offset in (0, 1, 8)]
if WITH_ADDRESSES is not None:  # under AddressSanitizer each takes a minute
    OFFSETS = [(torch.int8, torch.bfloat16, 1), (torch.int16, torch.float32, 1)]


def low_of(library, low, measured, op, outs, ins, parts, scale, decay=1.0, overwrite=False):
    run = ctypes.CDLL(library).run_parts
    run.argtypes = (ctypes.c_int, *loaded(library).argtypes)
    table = (Pair * len(outs))(
        *(Pair(o.data_ptr(), x.data_ptr(), o.numel(), p.data_ptr()) for o, x, p in zip(outs, ins, parts, strict=True))
    )
    run(
        LOWS.index(low), op, table, len(outs), DTYPES.index(outs[0].dtype), DTYPES.index(ins[0].dtype), ctypes.c_double(scale),
        True, decay, overwrite, False, 0, measured.sq_norm.data_ptr(), measured.nonfinite.data_ptr(),
    )  # fmt: skip


def low_parts(dtype, offset):
    """Low parts for SIZES between sentinels, each ``offset`` elements past an aligned address."""
    views = []
    for k, size in enumerate(SIZES):
        whole = torch.full((size + 64,), int(SENTINEL), dtype=dtype)
        start = (-whole.data_ptr() // whole.itemsize) % 16 + offset
        bound = 1 << (8 * whole.itemsize - 1)
        random = torch.randint(-bound, bound, (size,), dtype=dtype, generator=torch.Generator().manual_seed(k))
        views.append(whole[start : start + size].copy_(random))
    return views


@pytest.mark.parametrize(("low", "other", "offset"), OFFSETS, ids=str)
def test_ops_on_numbers_in_two_parts_equal_reference(library, low, other, offset):
    for op, scale, overwrite in (
        (ACCUMULATE, 0.37, False), (ACCUMULATE, -3.0, True), (ACCUMULATE, 0.0, False), (CAST, 0.3, False), (SCALE, 1e30, False),
        (STATS, 1.0, False),
    ):  # fmt: skip
        for nonfinite in (False, True) if WITH_ADDRESSES is None else (True,):
            hs, parts, others = (
                tensors(SIZES, torch.bfloat16, offset % 8, 1),
                low_parts(low, offset),
                tensors(SIZES, other, 0, 2),
            )
            if nonfinite:
                with_nonfinite(hs[8])
                with_nonfinite(others[6])
                hs[9][5:7], parts[9][5:7] = torch.tensor([0.0, -float("inf")]), -3  # left there by other code
            outs, ins = {ACCUMULATE: (hs, others), CAST: (others, hs), SCALE: (hs, hs), STATS: (hs, hs)}[op]
            expected, right_parts, right, measured = (
                [x.clone() for x in outs],
                [x.clone() for x in parts],
                *(Stats.empty(), Stats.empty()),
            )
            if op == ACCUMULATE:
                reference.accumulate_(expected, ins, scale, overwrite, 0.75, None, right, right_parts)
            elif op == CAST:
                reference.cast_(expected, ins, scale, right, right_parts)
            elif op == SCALE:
                reference.scale_(expected, scale, right, right_parts)
            else:
                reference.stats(expected, right, right_parts)
            low_of(library, low, measured, op, outs, ins, parts, scale, 0.75, overwrite)
            same(outs, expected)
            for part, right_part in zip(parts, right_parts, strict=True):
                assert torch.equal(part, right_part)
                whole = part.as_strided((part.untyped_storage().nbytes() // part.itemsize,), (1,), 0)
                assert (whole == int(SENTINEL)).sum() >= 64, "wrote outside its tensor"
            assert_same_stats(measured, right)


# -- that these tests can fail ---------------------------------------------------------------------


def test_a_missing_barrier_shows(tmp_path):
    broken = loaded(compiled(tmp_path / "broken.so", "-DSHIM_WITHOUT_BARRIERS"))
    ins = tensors((50_001,), torch.float32, 0, 1)
    right, sums = Stats.empty(), set()
    reference.stats(ins, right)
    for _ in range(5):
        measured = Stats.empty()
        call(broken, STATS, ins, ins, stats=measured)
        sums.add(measured.sq_norm.item())
    assert any(abs(s - right.sq_norm.item()) > 1e-6 * right.sq_norm.item() for s in sums)


@pytest.fixture(scope="module")
def library_with_addresses(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("shim") / "kernels.so", sanitizers="address,undefined")


@pytest.mark.skipif(WITH_ADDRESSES is not None, reason="this run is the one under AddressSanitizer")
@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True], ids=["sound", "overrun"])
def test_no_access_leaves_its_tensor(fault, library_with_addresses):
    """Runs this file again, under AddressSanitizer."""
    libasan = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    which = "planted" if fault else "not (planted or barrier or thousands or leaves)"
    environment = child_environment(
        LD_PRELOAD=libasan,
        ASAN_OPTIONS="detect_leaks=0",
        SHIM_LIBRARY=library_with_addresses,
        PYTHONPATH=str(ROOT / "tests"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", __file__, "-k", which],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if fault:
        assert "AddressSanitizer: heap-buffer-overflow" in done.stdout + done.stderr
    else:
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert " passed" in done.stdout


@pytest.mark.skipif(WITH_ADDRESSES is None, reason="a fault for the test above to find")
def test_planted_overrun(kernels):
    outs, ins = [torch.zeros(4096)], [torch.zeros(4096)]
    call(kernels, ACCUMULATE, outs, ins, more=9)
