"""What the tests of a GPU share: the device, its kernels, and tensors there.

Without a GPU the same tests run on CPU tensors (with the CPU kernels, or Triton's under
TRITON_INTERPRET=1), so that the tests themselves are known to work before they meet one; what needs
CUDA itself is skipped.
"""

import pytest
import torch
from fusedaccum.ops import backends
from ops_cases import values
from training import parts

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
KERNELS = [r.name for r in backends.TABLE if DEVICE.type in r.devices and backends.why_missing(r.name) is None]
SIZES = [0, 1, 7, 8, 9, 31, 1023, 2049, 4095, 4096, 4097, 16383, 16384, 16385, 50_001]

every_kernel = pytest.mark.parametrize(
    "backend", KERNELS or [pytest.param("", marks=pytest.mark.skip("no kernels here"))]
)
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


def there(tensors, offset=0):
    """Copies on the device, ``offset`` elements into memory of their own, between sentinels."""
    placed = []
    for x in tensors:
        whole = torch.full((x.numel() + 32,), 77.0, dtype=x.dtype, device=DEVICE)
        placed.append(whole[16 + offset : 16 + offset + x.numel()].copy_(x))
    return placed


def made(dtype, seed, sizes=SIZES):
    return [values(n, dtype, seed + k) for k, n in enumerate(sizes)]


def batches(dtype, sizes):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(sum(sizes), n, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for n in (6, 3))
    return x, y, parts(x, y, sizes)
