"""The CUDA backend compiled against stand-ins for CUDA, for CPU tensors, and pytest run on it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from ops_cases import child_environment
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parents[1]
SHIM = ROOT / "tests/gpu/cuda_shim"
DRIVER = ROOT / "tests/gpu/driver"
FLAGS = "-std=c++20 -O1 -ffp-contract=off -fno-strict-aliasing -w -shared -fPIC"


def compile_runtime(folder, bindings=ROOT / "csrc/bindings_cuda.cpp"):
    """The backend whose kernels CUDA's runtime launches, from this source of its bindings."""
    compile_module(folder, SHIM / "bindings.cpp", f"-I{SHIM}", f'-DBINDINGS="{bindings}"')


def compile_driver(folder):
    """The backend whose kernels NVRTC compiles and CUDA's driver launches, and a libcuda.so.1."""
    compile_module(folder, DRIVER / "bindings.cpp")
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["g++", *FLAGS.split(), "-Wl,-soname,libcuda.so.1", DRIVER / "libcuda.cpp", "-o", library], check=True
    )


def compile_module(folder, source, *flags):
    includes = (ROOT / "csrc", *include_paths(), sysconfig.get_path("include"))
    subprocess.run(
        [
            "g++", *FLAGS.split(), "-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=cuda_shim", *flags,
            *(f"-I{path}" for path in includes), source, "-o", folder / "cuda_shim.so",
            *(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        ],
        check=True,
    )  # fmt: skip


def run_tests(folder, *arguments):
    """Run pytest on the backend in the folder; returns its exit code and output."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "plugin", "-p", "no:cacheprovider",
            "-W", "ignore:CUDA initialization",  # PyTorch cannot use the libcuda.so.1
            *arguments,
        ],
        cwd=ROOT, capture_output=True, text=True,
        env=child_environment(
            CUDA_SHIM=str(folder), LD_LIBRARY_PATH=str(folder), FUSEDACCUM_CACHE=str(folder / "cache"),
            PYTHONPATH=os.pathsep.join((str(SHIM), str(ROOT / "tests"))),
        ),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr
