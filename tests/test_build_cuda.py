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

ROOT = Path(__file__).parents[1]

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


def test_every_kernel_was_compiled_for_every_arch():
    archs = {arch for arch, _ in kernels()}
    _, *asked = re.findall(r"\d+\.\d+[af]?", native.build().built["_cuda"])  # CUDA's version, and for which GPUs
    assert archs == {f"sm_{number.replace('.', '')}" for number in asked}
    for arch in archs:
        names = [name for found, name in kernels() if found == arch]
        # 16 pairs and, for stochastic rounding, those into 8 16-bit outputs once more; each with statistics and without.
        assert len([name for name in names if "write_kernel" in name]) == 2 * (16 + 8)
        assert len([name for name in names if "stats_kernel" in name]) == 4
        assert len([name for name in names if "add_up_kernel" in name]) == 1


def test_cuda_kernels_move_16_bytes_at_a_time():
    for key, code in kernels().items():
        if "add_up" in key[1]:
            continue
        assert re.search(r"\bLDG\.E\.128", code), key
        assert "stats" in key[1] or re.search(r"\bSTG\.E\.128", code), key


def test_cuda_kernels_use_no_local_memory():
    for key, code in kernels().items():
        assert not re.search(r"\b(LDL|STL)\b", code), key


def test_cuda_kernels_never_contract_a_product_and_a_sum():
    for key, code in kernels().items():
        assert not re.search(r"\b[FD]FMA\b", code), key


# -- that these checks can fail, and what the build leaves out -----------------------------------------------------


def compiled(tmp_path, arch, *flags, source=None):
    nvcc = shutil.which("nvcc")
    if nvcc is None or cuobjdump() is None:
        pytest.skip("needs nvcc and cuobjdump")
    cubin = tmp_path / "kernels.cubin"
    command = [nvcc, "-cubin", f"-arch={arch}", "-O3", *flags, "-o", cubin, source or ROOT / "csrc/cuda/kernels.cu"]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([cuobjdump(), "-sass", cubin], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_89"])
def test_cuda_kernels_compile_for(arch, tmp_path):
    assert "write_kernel" in compiled(tmp_path, arch, "-fmad=false")


@pytest.mark.parametrize(
    ("fault", "trace"),
    [("x[0] * 3.0f + x[1]", r"\bFFMA\b"), ("array[threadIdx.x]", r"\b(LDL|STL)\b"), ("x[0]", r"^(?!.*\.128)")],
    ids=["contraction", "local memory", "narrow accesses"],
)
def test_planted_faults_show_in_the_machine_code(fault, trace, tmp_path):
    source = tmp_path / "fault.cu"
    source.write_text(
        "__global__ void kernel(float* x) { float array[64]; for (int i = 0; i < 64; ++i) array[int(x[i]) % 64] = i; "
        f"x[blockIdx.x] = {fault}; }}"
    )
    assert re.search(trace, compiled(tmp_path, "sm_90", source=source), re.DOTALL)
