"""The whole CUDA backend, bindings and kernels, passes the tests of a GPU on the CPU, compiled against a stand-in for CUDA."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from ops_cases import child_environment
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests/gpu/cuda_shim"
# Every pair of dtypes in the test of thousands of tensors, and in the others what takes seconds.
WHICH = (
    "cuda and (thousands or stochastic or scale_and_stats or read_before or window or finite or scaler or (f32 and bf16) "
    "or (two_parts and int8 and bf16))"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


def run_tests(folder, bindings, which):
    """Compile the backend with this source of its bindings, and run ``which`` tests; returns pytest's exit code and output."""
    includes = (SHIM, ROOT / "csrc", *include_paths(), sysconfig.get_path("include"))
    flags = "-std=c++20 -O1 -ffp-contract=off -fno-strict-aliasing -fvisibility=hidden -w -shared -fPIC"
    subprocess.run(
        [
            "g++", *flags.split(), "-DTORCH_EXTENSION_NAME=cuda_shim", f'-DBINDINGS="{bindings}"', *(f"-I{path}" for path in includes),
            SHIM / "bindings.cpp", "-o", folder / "cuda_shim.so",
            *(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        ],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "plugin", "-p", "no:cacheprovider", "-k", which,
            "tests/gpu/test_gpu_ops.py", "tests/gpu/test_gpu_windows.py", "tests/gpu/test_gpu_parts.py",
        ],
        cwd=ROOT, capture_output=True, text=True,
        env=child_environment(CUDA_SHIM=str(folder), PYTHONPATH=os.pathsep.join((str(SHIM), str(ROOT / "tests")))),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_cuda_backend_passes_the_tests_of_a_gpu(tmp_path):
    code, output = run_tests(tmp_path, ROOT / "csrc/bindings_cuda.cpp", WHICH)
    assert code == 0, output[-4000:]
    assert " passed" in output


def test_a_fault_in_the_bindings_would_show(tmp_path):
    """All groups of dtypes write their statistics to the same place."""
    source = (ROOT / "csrc/bindings_cuda.cpp").read_text()
    right = "call.partials += "
    assert source.count(right) == 1
    broken = tmp_path / "broken.cpp"
    broken.write_text(source.replace(right, "call.partials += 0 * "))
    code, output = run_tests(tmp_path, broken, "cuda and thousands")
    assert code == 1, output[-4000:]
    assert "assert_same_stats" in output
