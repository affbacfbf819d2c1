"""Builds the native extensions if there is a torch to build them against.

Everything else is in pyproject.toml. What the environment may say:

FUSEDACCUM_CUDA=auto|0|1: build the CUDA extension if possible; never; always, or fail. nvrtc: the
one that needs no nvcc, or fail.

TORCH_CUDA_ARCH_LIST: the GPUs to compile for, as in PyTorch.

CUDA_HOME: the toolkit, if it is not that of the nvcc on PATH.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from platform import machine
from sysconfig import get_config_var

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    import torch
except ImportError:  # an isolated build: the package works without its extensions, and says how to get them
    torch = None

# No fast-math, no -march: the same bits everywhere.
CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden"]
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []  # to compile, not to link: PyTorch's own thread pool is used
NVCC_FLAGS = ["-O3", "-fmad=false", "--threads=0"]  # 0: as many as there are processors
CPU_ISA_FLAGS = {  # csrc/cpu/kernels_<isa>.cpp; the machine that runs them chooses one
    "default": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
}
# Compiled for those that nvcc knows, and as PTX of the last for later GPUs.
CUDA_ARCHS = ("7.0", "7.5", "8.0", "9.0", "10.0", "12.0")
NVRTC = os.environ.get("FUSEDACCUM_CUDA") == "nvrtc"
COMMAND = "python -m fusedaccum build"
NO_TORCH = f"no torch to build against; with torch installed: {COMMAND}"


def cuda_root() -> Path | None:
    """The toolkit's root, asked of nvcc: the nvcc on PATH may be a wrapper script elsewhere."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(nvcc, os.X_OK):
        return None
    dryrun = subprocess.run([nvcc, "-v", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"\bTOP=(\S+)", dryrun)
    return Path(top[1]).resolve() if top else None


def why_no_cuda(root: Path | None) -> str | None:
    """None if the CUDA extension can be built, else why not. Building needs no GPU."""
    if torch is None:
        return NO_TORCH
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is for AMD's GPUs, for which there are Triton's kernels instead"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, then {COMMAND}"
    if NVRTC:
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if root is None and home:
        return f"CUDA_HOME is {home}, which has no bin/nvcc: set it to a CUDA toolkit, then {COMMAND}"
    if root is None:
        return f"no nvcc found: install the CUDA toolkit, put nvcc on PATH or set CUDA_HOME, then {COMMAND}"
    release = re.search(r"release ([\d.]+)", subprocess.check_output([root / "bin/nvcc", "--version"], text=True))[1]
    if release.split(".")[0] != torch.version.cuda.split(".")[0]:
        return f"nvcc has CUDA {release}, torch has {torch.version.cuda}: the major versions must match"
    if release == "12.0":  # csrc/cuda/kernels.h, kDriver
        return "nvcc has CUDA 12.0, and the kernels need 12.1 or newer: install a newer toolkit"
    return None


def decide(root: Path | None) -> str | None:
    """Why the CUDA extension is not built, or None; exits if FUSEDACCUM_CUDA insists on it."""
    wanted = os.environ.get("FUSEDACCUM_CUDA", "auto")
    if wanted not in ("auto", "0", "1", "nvrtc"):
        sys.exit(f"FUSEDACCUM_CUDA is {wanted!r}; it must be auto, 0, 1 or nvrtc")
    unwanted = f"FUSEDACCUM_CUDA=0 was set when it was built; without it: {COMMAND}"
    reason = unwanted if wanted == "0" else why_no_cuda(root)
    if wanted in ("1", "nvrtc") and reason:
        sys.exit(f"FUSEDACCUM_CUDA={wanted}, but {reason}")
    return reason


def arch_list(root: Path) -> str:
    known = subprocess.check_output([root / "bin/nvcc", "--list-gpu-arch"], text=True).split()
    chosen = [arch for arch in CUDA_ARCHS if f"compute_{arch.replace('.', '')}" in known]
    return os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(chosen) + "+PTX"


def native(with_cuda: bool) -> tuple[list, type]:
    """The extensions, and the command that builds them."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    class BuildNative(BuildExtension):
        def initialize_options(self):
            super().initialize_options()
            # Kept, so that ninja rebuilds what changed. Without force, setuptools would even keep
            # an extension of another torch.
            self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{torch.__version__}"
            self.force = True

        def run(self):
            super().run()
            for ext in self.extensions:  # a compiler may fail without saying so, and a library be missing
                spec = spec_from_file_location(ext.name, self.get_ext_fullpath(ext.name))
                module_from_spec(spec)

        def build_extension(self, ext):
            if ext.name == "fusedaccum._cpu":
                with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or 0) or None) as pool:
                    ext.extra_objects = list(pool.map(self.compile_kernels, CPU_ISA_FLAGS))
            super().build_extension(ext)

        def compile_kernels(self, isa):
            flags = CXX_FLAGS + (CPU_ISA_FLAGS[isa] if machine() in ("x86_64", "AMD64") else [])
            source, folder = f"csrc/cpu/kernels_{isa}.cpp", f"{self.build_temp}/{isa}"
            return self.compiler.compile([source], folder, extra_postargs={"cxx": flags})[0]

    launchers = [str(path) for path in sorted(Path("csrc/cpu").glob("*.cpp")) if not path.name.startswith("kernels_")]
    flags = {"cxx": CXX_FLAGS + OPENMP, "nvcc": NVCC_FLAGS}
    modules = [
        CppExtension("fusedaccum._cpu", ["csrc/bindings_cpu.cpp", *launchers], extra_compile_args=flags),
        CppExtension("fusedaccum._intake", ["csrc/bindings_autograd.cpp"], extra_compile_args=flags),
    ]
    if with_cuda and NVRTC:
        sources, libraries = ["csrc/bindings_nvrtc.cpp"], ["torch_cuda"]
        modules.append(CppExtension("fusedaccum._cuda", sources, libraries=libraries, extra_compile_args=flags))
    elif with_cuda:
        sources = ["csrc/bindings_cuda.cpp", "csrc/cuda/kernels.cu"]
        modules.append(CUDAExtension("fusedaccum._cuda", sources, extra_compile_args=flags))
    return modules, BuildNative


def plan() -> tuple[list, dict, dict]:
    """The extensions to build, the command, and the record that ``python -m fusedaccum`` shows."""
    root = cuda_root()
    why_not = decide(root)
    if torch is None:
        missing = {"_cpu": NO_TORCH, "_intake": NO_TORCH, "_cuda": why_not}
        return [], {}, {"torch": None, "built": {}, "missing": missing}
    cxx = " ".join(CXX_FLAGS)
    built = {"_cpu": f"{cxx}; {', '.join(CPU_ISA_FLAGS)}", "_intake": cxx}
    if NVRTC:
        built["_cuda"] = f"{cxx}; nvrtc: compiles each kernel when it is first used; not yet run on a GPU"
    elif not why_not:
        os.environ |= {"CUDA_HOME": str(root), "TORCH_CUDA_ARCH_LIST": arch_list(root)}  # for torch.utils.cpp_extension
        built["_cuda"] = f"{' '.join(NVCC_FLAGS)}; CUDA {torch.version.cuda}; {os.environ['TORCH_CUDA_ARCH_LIST']}"
    modules, command = native(with_cuda=not why_not)
    record = {"torch": torch.__version__, "built": built, "missing": {"_cuda": why_not} if why_not else {}}
    if not why_not:
        record["cuda_archs"] = "nvrtc" if NVRTC else os.environ["TORCH_CUDA_ARCH_LIST"]
    return modules, {"build_ext": command}, record


class BuildPackage(build_py):
    def run(self):
        if not self.editable_mode:  # what an earlier build left there would be installed again
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        folder = Path("python" if self.editable_mode else self.build_lib, "fusedaccum")
        if not self.editable_mode:  # for `python -m fusedaccum build`, which runs this file there
            shutil.copytree("csrc", folder / "_native/source/csrc")
            shutil.copy("setup.py", folder / "_native/source")
        for name in RECORD["missing"]:
            (folder / f"{name}{get_config_var('EXT_SUFFIX')}").unlink(missing_ok=True)
        sources = runpy.run_path("python/fusedaccum/_sources.py")["digest"](Path())
        (folder / "_build.json").write_text(json.dumps(RECORD | {"sources": sources}, indent=1) + "\n")
        reasons = "".join(f"; no {name}: {reason}" for name, reason in RECORD["missing"].items())
        later = f"pure Python; {COMMAND} adds the CPU kernels, the hooks and, where nvcc is, the CUDA kernels"
        print(f"fusedaccum: built {later if torch is None else ' and '.join(RECORD['built']) + reasons}")


if __name__ == "__main__":
    MODULES, COMMANDS, RECORD = plan()
    setup(ext_modules=MODULES, cmdclass={"build_py": BuildPackage, **COMMANDS})
