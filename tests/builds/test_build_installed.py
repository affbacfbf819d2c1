"""``pip install .``, then ``python -m fusedaccum build``, with and without (stand-in) compilers."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from fusedaccum import _sources, native

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(native.why_missing("_cpu")), reason="the extensions were not built here"),
]

# Makes what -o names: a copy of the real extension, an empty one for CUDA's, or an empty file.
COMPILER = """#!/bin/sh
[ "$1" = -dumpfullversion ] && echo 12.2.0
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
case "$out" in
  */_cpu.*|*/_intake.*) [ -n "$BROKEN" ] || cp "$REAL/${out##*/}" "$out" ;;
  */_cuda.*) cp "$EMPTY" "$out" ;;
esac
[ -z "$out" ] || [ -e "$out" ] || : > "$out"
"""
EMPTY = """#include <Python.h>
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "_cuda"};
PyMODINIT_FUNC PyInit__cuda(void) { return PyModule_Create(&def); }
"""
NVCC = """#!/bin/sh
case "$1" in
  -v) echo "#$ TOP=${0%/bin/nvcc}" >&2 ;;
  --version) echo "Cuda compilation tools, release CUDA, VCUDA.88" ;;
  --list-gpu-arch) echo compute_90 ;;
  *) exec c++ "$@" ;;
esac
""".replace("CUDA", str(torch.version.cuda))


@pytest.fixture
def site(tmp_path):
    """The package as a plain `pip install .` leaves it."""
    without = shutil.ignore_patterns("*.so", "_build.json", "_native", "__pycache__")
    package = tmp_path / "site/fusedaccum"
    shutil.copytree(ROOT / "python/fusedaccum", package, ignore=without)
    shutil.copytree(ROOT / "triton_kernels", package / "triton_kernels", ignore=without)
    shutil.copytree(ROOT / "csrc", package / "_native/source/csrc")
    shutil.copy(ROOT / "setup.py", package / "_native/source")
    why = "no torch to build against; with torch installed: python -m fusedaccum build"
    record = {"torch": None, "missing": dict.fromkeys(native.EXTENSIONS, why), "sources": _sources.digest(ROOT)}
    (package / "_build.json").write_text(json.dumps(record))
    return package.parent


@pytest.fixture
def run(site, tmp_path):
    """Runs Python with that package, where there are these compilers."""
    for path, text in {"g++/bin/c++": COMPILER, "nvcc/bin/nvcc": NVCC}.items():  # PyTorch looks for g++ in the path
        tool = tmp_path / path
        tool.parent.mkdir(parents=True)
        tool.write_text(text)
        tool.chmod(0o755)
    (tmp_path / "empty.c").write_text(EMPTY)
    command = ["gcc", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", "empty.c", "-o", "empty.so"]
    subprocess.run(command, check=True, cwd=tmp_path)
    (tmp_path / "sh").mkdir()
    for name in ("sh", "cp", "which"):
        (tmp_path / "sh" / name).symlink_to(shutil.which(name))

    def start(*command, compilers=(), **environment):
        known = {name: value for name, value in os.environ.items() if name != "FUSEDACCUM_CACHE"}
        known |= {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path), "FUSEDACCUM_CUDA": "auto", "CXX": "c++"}
        known |= {"CUDA_HOME": str(tmp_path / ("nvcc" if "nvcc" in compilers else "none")), "CUDA_PATH": ""}
        known |= {"PATH": f"{tmp_path / ('g++' if 'c++' in compilers else 'none')}/bin:{tmp_path / 'sh'}"}
        known |= {
            "REAL": native.build().folder,
            "EMPTY": str(tmp_path / "empty.so"),
            "TORCH_CUDA_ARCH_LIST": "9.0",
            **environment,
        }
        command = [sys.executable, *command]
        return subprocess.run(command, env=known, cwd=tmp_path, capture_output=True, text=True)

    return start


def test_without_a_compiler_then_with_one_then_with_another_torch(run, site, tmp_path):
    (tmp_path / "csrc").mkdir()  # of somebody else's project, which has this package in a folder of its own
    first = run("-m", "fusedaccum").stdout
    assert first.startswith("Ready: plain PyTorch on the CPU; ")
    assert (
        "\nMissing: CPU kernels, hooks in C++, CUDA kernels. To compile what this machine can: python -m fusedaccum "
        "build\n" in first
    )
    refused = run("-m", "fusedaccum", "build")
    assert refused.returncode == 1 and refused.stderr.endswith("Or set CXX to one. Then python -m fusedaccum build\n")

    target = site / "fusedaccum/_native" / native.key()
    built = run("-m", "fusedaccum", "build", compilers=["c++"])
    assert f"\n_cpu and _intake are in {target}; no _cuda: " in built.stdout, built.stdout + built.stderr
    then = run("-W", "error", "-m", "fusedaccum").stdout
    assert then.startswith("Ready: CPU kernels, ") and "Missing" not in then
    assert f"\nBuilt: CPU kernels, hooks in C++, for torch {torch.__version__}, in {target}.\n" in then
    code = "import importlib, fusedaccum; print(*(importlib.import_module(f'fusedaccum.{n}').__file__ for n in ('_cpu', '_intake')))"
    assert [Path(path).parent for path in run("-W", "error", "-c", code).stdout.split()] == [target, target]

    (tmp_path / "train.py").write_text("import torch\ntorch.__version__ = '2.99.0'\nimport fusedaccum\n")
    upgraded = run("train.py")
    said = f"was built against torch {torch.__version__}, but this is torch 2.99.0; {native.ADVICE}"
    assert upgraded.returncode == 0 and upgraded.stderr.count(said) == 1
    assert f"{tmp_path / 'train.py'}:3: RuntimeWarning" in upgraded.stderr


def test_what_cannot_be_loaded_is_not_kept(run, site):
    within_make = " -j2 --jobserver-auth=98,99"
    broken = run("-m", "fusedaccum", "build", compilers=["c++"], BROKEN="1", MAKEFLAGS=within_make)
    assert broken.returncode == 1 and "\nIt does not compile:\n" in broken.stderr and "ImportError: " in broken.stderr
    assert not native.read(site / "fusedaccum/_native" / native.key())


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_with_nvcc(run, site):
    built = run("-m", "fusedaccum", "build", compilers=["c++", "nvcc"])
    target = site / "fusedaccum/_native" / native.key()
    assert f"\n_cpu and _intake and _cuda are in {target}\n" in built.stdout, built.stdout + built.stderr
    record = native.read(target)
    assert record.cuda_archs == "9.0" and not record.missing
    without = run("-m", "fusedaccum", "build", compilers=["c++"]).stdout  # on another node of a cluster
    assert without.startswith("Nothing to do: _cpu and _intake and _cuda for torch ")
    left_out = run("-m", "fusedaccum", "build", compilers=["c++", "nvcc"], FUSEDACCUM_CUDA="0").stdout
    assert f"\n_cpu and _intake are in {target}; no _cuda: FUSEDACCUM_CUDA=0" in left_out
    refused = run("-m", "fusedaccum", "build", compilers=["c++"], FUSEDACCUM_CUDA="1")
    assert refused.stderr.startswith("FUSEDACCUM_CUDA=1, but CUDA_HOME is ") and refused.returncode == 1
