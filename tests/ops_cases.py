"""What tests of ops share: dtypes, sizes around every boundary, awkward values, equal bits."""

import contextlib
import importlib
import importlib.util
import os

import torch
from fusedaccum.ops import backends

OPS = ("accumulate_", "scale_", "cast_", "stats")
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PAIRS = [(buffer, grad) for buffer in DTYPES for grad in DTYPES]
PAIR_IDS = [f"buffer={buffer}-grad={grad}" for buffer, grad in PAIRS]

# CPU kernels work in steps of 32 elements, draw random numbers 256 at a time, and use chunks of
# 16,384 and blocks of zeros of 4,096.
RAGGED = [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 1000, 4095, 4096, 4097]
LONG = [16383, 16384, 16385, 32767, 32769, 50001]
SCALES = [1.0, 0.37, -2.5, 0.0, -0.0, 1e-30, float("inf"), float("nan")]


def capabilities():
    """The ``cpu`` backend's instruction sets on this machine; none if it was not built."""
    if importlib.util.find_spec("fusedaccum._cpu") is None:
        return []
    return importlib.import_module("fusedaccum._cpu").capabilities()


# Kernels for CPU tensors: each instruction set's or, with TRITON_INTERPRET=1, only Triton's.
NATIVE = ["triton"] if backends.INTERPRETED else [f"cpu-{name}" for name in capabilities()]
BACKENDS = ["reference", *NATIVE]


@contextlib.contextmanager
def running(backend):
    """Yields the name for ``backend=``; inside, the CPU backend has the wanted instruction set."""
    name, _, capability = backend.partition("-")
    if not capability:
        yield name
        return
    cpu = importlib.import_module("fusedaccum._cpu")
    before = cpu.capability()
    cpu.set_capability(capability)
    try:
        yield name
    finally:
        cpu.set_capability(before)


def values(n, dtype, seed=0):
    """Normal and subnormal numbers, both zeros, numbers at FP16's limits; all finite in FP64."""
    g = torch.Generator().manual_seed(seed + n)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    x *= torch.pow(10.0, torch.randint(-9, 6, (n,), generator=g, dtype=torch.float64))
    edges = [
        -0.0,
        0.0,
        65504.0,
        65519.99,
        65520.0,
        2.0**-14,
        2.0**-15,
        2.0**-24,
        2.0**-25,
        1.5 * 2.0**-25,
        3e-40,
        1.00390625,
        1.01171875,
    ]
    for k, edge in enumerate(edges):
        if n > 2 * k:
            x[(k * 7 + 2) % n] = edge
    return x.to(dtype)


def with_nonfinite(x):
    """``x`` with some elements replaced by infinities and NaNs, among them its last ones."""
    for at, value in (
        (1, float("nan")),
        (5, float("inf")),
        (x.numel() - 1, float("-inf")),
        (x.numel() // 2, float("nan")),
    ):
        if 0 <= at < x.numel():
            x[at] = value
    return x


def bits(x):
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def assert_same_bits(got, expected, what=""):
    """Equal bits, except where both are NaN: no backend promises a NaN's payload."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    wrong = (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan()).contiguous()
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.flatten().nonzero()[0].item()}: "
        f"{got[wrong][:4].tolist()} instead of {expected[wrong][:4].tolist()}"
    )


def assert_same_stats(got, expected):
    assert got.nonfinite.item() == expected.nonfinite.item()
    torch.testing.assert_close(got.sq_norm, expected.sq_norm, rtol=1e-13, atol=0, equal_nan=True)


def copies(tensors):
    return [x.clone() for x in tensors]


def child_environment(**variables):
    """This process's environment, with the given variables and without the package's own."""
    return {k: v for k, v in os.environ.items() if not k.startswith("FUSEDACCUM_")} | variables
