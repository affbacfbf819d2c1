"""The CUDA extension as it was compiled, where it was: it imports without a GPU, and its machine code is what was meant."""

import functools
import importlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from fusedaccum import native

pytestmark = pytest.mark.skipif("_cuda" not in native.build().built, reason="the CUDA extension was not built here")


def cuobjdump():
    """The toolkit's, or the one that comes with Triton."""
    folders = [Path(shutil.which("nvcc") or "nvcc").parent]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return shutil.which("cuobjdump") or next(
        (str(f / "cuobjdump") for f in folders if (f / "cuobjdump").exists()), None
    )


@functools.cache
def kernels():
    """(arch, kernel) -> machine code."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump")
    library = importlib.import_module("fusedaccum._cuda").__file__
    text = subprocess.run([tool, "-sass", library], check=True, capture_output=True, text=True).stdout
    found = {}
    for part in re.split(r"^arch = ", text, flags=re.MULTILINE)[1:]:
        for function in part.split("Function : ")[1:]:
            found[part.split()[0], function.split()[0]] = function
    return found


def test_cuda_extension_imports_without_a_gpu():
    assert native.why_missing("_cuda") is None
    assert callable(importlib.import_module("fusedaccum._cuda").accumulate_)


def test_cuda_backend_without_a_gpu_says_so():
    from fusedaccum import backends

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="backend='cuda' is not available: torch finds no CUDA device"):
        backends.check("cuda")


def test_every_dtype_pair_was_compiled_for_every_arch():
    archs = {arch for arch, _ in kernels()}
    assert archs
    for arch in archs:  # 16 pairs; those into 8 16-bit buffers twice, for stochastic rounding
        assert len([name for found, name in kernels() if found == arch]) == 24


def test_cuda_kernels_move_16_bytes_at_a_time():
    for key, code in kernels().items():
        assert re.search(r"\bLDG\.E\.128", code), key
        assert re.search(r"\bSTG\.E\.128", code), key


def test_cuda_kernels_use_no_local_memory():
    for key, code in kernels().items():
        assert not re.search(r"\b(LDL|STL)\b", code), key


def test_cuda_kernels_never_contract_a_product_and_a_sum():
    for key, code in kernels().items():
        assert not re.search(r"\b[FD]FMA\b", code), key
