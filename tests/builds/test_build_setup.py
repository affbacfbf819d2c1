"""setup.py's decisions: what it builds and from what, and what it says when it cannot."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup_py(monkeypatch):
    """setup.py as a module, with no environment variables about CUDA."""
    for name in ("CUDA_HOME", "CUDA_PATH", "FUSEDACCUM_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("fusedaccum_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A CUDA 13.0 toolkit's root; first on PATH is a wrapper script for its nvcc, elsewhere."""
    nvcc = tmp_path / "toolkit/bin/nvcc"
    wrapper = tmp_path / "wrapper/bin/nvcc"
    script = f"""#!/bin/sh
case "$1" in
  -v) echo '#$ TOP={nvcc.parent}/..' >&2 ;;
  --version) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
  --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\n' ;;
esac
"""
    for path, text in ((nvcc, script), (wrapper, f'#!/bin/sh\nexec {nvcc} "$@"\n')):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    return nvcc.parents[1]


def torch_with(cuda, hip=None):
    return SimpleNamespace(__version__="2.14.1", version=SimpleNamespace(cuda=cuda, hip=hip))


def test_cuda_root_is_found_behind_a_wrapper_script(setup_py, toolkit):
    assert setup_py.cuda_root() == toolkit


def test_cuda_home_decides_where_it_is_set(setup_py, toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert setup_py.cuda_root() is None


@pytest.mark.parametrize(
    ("torch", "found", "says"),
    [
        pytest.param(None, True, "no torch to build against", id="no-torch"),
        pytest.param(torch_with(None), True, "built without CUDA", id="cpu-torch"),
        pytest.param(torch_with(None, "7.2"), False, "for AMD's GPUs, for which there are Triton's", id="amd"),
        pytest.param(torch_with("13.0"), False, "no nvcc found", id="no-nvcc"),
        pytest.param(torch_with("12.8"), True, "major versions must match", id="other-major"),
        pytest.param(torch_with("13.2"), True, None, id="other-minor"),
    ],
)
def test_cuda_extension_is_left_out_for_a_stated_reason(setup_py, toolkit, monkeypatch, torch, found, says):
    monkeypatch.setattr(setup_py, "torch", torch)
    reason = setup_py.why_no_cuda(toolkit if found else None)
    assert (reason is None) if says is None else (says in reason)


def test_nvrtc_needs_no_nvcc(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "NVRTC", True)
    for torch, says in ((torch_with("13.0"), None), (torch_with(None), "without CUDA"), (None, "no torch")):
        monkeypatch.setattr(setup_py, "torch", torch)
        reason = setup_py.why_no_cuda(None)
        assert (reason is None) if says is None else (says in reason)


def test_a_toolkit_without_room_for_the_kernels_arguments(setup_py, toolkit, monkeypatch):
    monkeypatch.setattr(setup_py, "torch", torch_with("12.8"))
    for release, says in (("12.0", "need 12.1 or newer"), ("12.1", None)):
        nvcc = toolkit / "bin/nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        reason = setup_py.why_no_cuda(toolkit)
        assert (reason is None) if says is None else (says in reason)


def test_archs_default_to_what_nvcc_knows(setup_py, toolkit):
    assert setup_py.arch_list(toolkit) == "7.5;8.0;9.0+PTX"


def test_archs_of_the_environment_are_honoured(setup_py, toolkit, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert setup_py.arch_list(toolkit) == "8.6"


@pytest.mark.parametrize(
    ("wanted", "says"),
    [("1", "FUSEDACCUM_CUDA=1, but "), ("yes", "FUSEDACCUM_CUDA is 'yes'; it must be auto, 0, 1 or nvrtc")],
)
def test_what_cannot_be_done_is_an_error(tmp_path, wanted, says):
    environment = {**os.environ, "FUSEDACCUM_CUDA": wanted, "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert says in done.stderr
