"""csrc/cuda/accumulate.cu, the source itself, run on the CPU: one block after the other, under the undefined-behaviour sanitizer."""

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from fusedaccum import reference
from fusedaccum.ops import StochasticRounding

ROOT = Path(__file__).parents[1]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # in the order of csrc/cuda/accumulate.h
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZES = (0, 1, 7, 8, 9, 1023, 2049, 16383, 16384, 16385, 50_001)
SENTINEL = 77.0


class Pair(ctypes.Structure):
    _fields_ = (
        ("buffer", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("elements", ctypes.c_int64),
        ("counter", ctypes.c_uint64),
    )


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The C function of tests/cuda_shim: accumulate(pairs, …) -> number of launches."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("shim") / "accumulate.so"
    flags = "-std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -fsanitize=undefined -fno-sanitize-recover=all -Wno-unknown-pragmas"
    shim = ROOT / "tests/cuda_shim"
    subprocess.run(
        ["g++", *flags.split(), "-shared", "-fPIC", f"-I{shim}", "-o", library, shim / "accumulate.cpp"], check=True
    )
    run = ctypes.CDLL(str(library)).accumulate
    number, flag = ctypes.c_double, ctypes.c_bool
    run.argtypes = (
        ctypes.POINTER(Pair), ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
        ctypes.POINTER(number), flag, number, flag, flag, ctypes.c_uint64,
    )  # fmt: skip
    return run


def tensors(sizes, dtype, offset, seed):
    """Views of the sizes, ``offset`` elements into memory of their own that ends and begins with a sentinel."""
    generator = torch.Generator().manual_seed(seed)
    views = []
    for size in sizes:
        whole = torch.full((size + 32,), SENTINEL, dtype=dtype)
        start = 16 - whole.data_ptr() // whole.itemsize % 16 + offset
        views.append(whole[start : start + size].copy_(torch.randn(size, generator=generator, dtype=torch.float64)))
    return views


def run_both(kernel, buffers, grads, scale=0.37, *, on_device=False, overwrite=False, decay=1.0, rounding=None):
    """Run the kernel on the buffers and the reference on copies of them, and hold them against each other; the number of launches."""
    expected = [x.clone() for x in buffers]
    reference.accumulate_(expected, grads, scale, overwrite, decay, rounding, None)
    counters = rounding.counters if rounding else [0] * len(buffers)
    table = (Pair * len(buffers))(
        *(Pair(b.data_ptr(), g.data_ptr(), b.numel(), c) for b, g, c in zip(buffers, grads, counters, strict=True))
    )
    launches = kernel(
        table, len(buffers), DTYPES.index(buffers[0].dtype), DTYPES.index(grads[0].dtype), ctypes.c_double(scale), on_device,
        decay, overwrite, rounding is not None, rounding.seed if rounding else 0,
    )  # fmt: skip
    for buffer, right in zip(buffers, expected, strict=True):
        assert torch.equal(buffer.isnan(), right.isnan())
        as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[buffer.itemsize]
        assert torch.equal(buffer.nan_to_num(0.0).view(as_integers), right.nan_to_num(0.0).view(as_integers))
        outside = buffer.untyped_storage().nbytes() // buffer.itemsize - buffer.numel()
        whole = buffer.as_strided((buffer.numel() + outside,), (1,), 0)
        assert (whole == SENTINEL).sum() >= outside, "wrote outside of its tensor"
    return launches


PAIRS = [pytest.param(b, g, id=f"buffer={NAMES[b]}-grad={NAMES[g]}") for b, g in itertools.product(DTYPES, DTYPES)]


@pytest.mark.parametrize(
    "offsets", [(0, 0), (1, 1), (0, 3), (5, 0)], ids=lambda offsets: "offsets={}+{}".format(*offsets)
)
@pytest.mark.parametrize(("buffer", "grad"), PAIRS)
def test_cuda_source_equals_reference(kernel, buffer, grad, offsets):
    buffers, grads = tensors(SIZES, buffer, offsets[0], 1), tensors(SIZES, grad, offsets[1], 2)
    run_both(kernel, buffers, grads)
    run_both(kernel, buffers, grads, scale=-3.0, decay=0.75, on_device=True)
    run_both(kernel, buffers, grads, scale=1e-3, overwrite=True)


@pytest.mark.parametrize(("buffer", "grad"), PAIRS)
def test_cuda_source_treats_special_values_as_reference(kernel, buffer, grad):
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65519.9, 65520.0, 3e38, 1e-40, 6e-8, 2.0**-14, 1e300]
    )
    buffers, grads = [special.to(buffer).repeat_interleave(12)], [special.to(grad).repeat(12)]
    for scale in (1.0, 0.0, 1e-30, float("inf")):
        both = [buffers[0].clone()]
        run_both(kernel, both, grads, scale)
        run_both(kernel, both, grads, scale, overwrite=True)


@pytest.mark.parametrize("counter", [0, 3, 4, 7, 2**64 - 5])
@pytest.mark.parametrize(("buffer", "grad"), [p for p in PAIRS if p.values[0].itemsize == 2])
def test_cuda_source_rounds_stochastically_as_reference(kernel, buffer, grad, counter):
    buffers, grads = tensors(SIZES, buffer, 0, 1), tensors(SIZES, grad, 0, 2)
    run_both(kernel, buffers, grads, rounding=StochasticRounding(2**63 + 12345, [counter] * len(SIZES)))


def test_cuda_source_takes_thousands_of_tensors_in_few_launches(kernel):
    sizes = [64] * 2_000
    launches = run_both(kernel, tensors(sizes, torch.float32, 0, 1), tensors(sizes, torch.bfloat16, 0, 2))
    assert launches == 3
