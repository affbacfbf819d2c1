"""The package as users get it: sdist, wheels with and without extensions, in clean environments."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

USE = """
import torch, fusedaccum as fa
assert fa.__file__.startswith({prefix!r}), fa.__file__
import fusedaccum.triton_kernels
buffers, grads = [torch.full((3,), 256.0)], [torch.ones(3, dtype=torch.bfloat16)]
fa.ops.accumulate_(buffers, grads, 1.0, backend={backend!r})
assert buffers[0].tolist() == [257.0] * 3
layer = torch.nn.Linear(2, 1)
opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), accum_steps=2)
for _ in range(2):
    layer(torch.ones(1, 2)).sum().backward()
    opt.step()
assert opt.updated
"""


COMPILE = """
from fusedaccum import _cuda, nvrtc
symbol, code = nvrtc.compiled("add_up_kernel", 90)
assert code.startswith(b"\\x7fELF")
assert callable(_cuda.accumulate_)
"""


def run(*command, cwd, **environment):
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def build(what, source, out, hide_torch=False, **environment):
    """Run the build backend as pip does; returns the file that it made."""
    hide = "import sys; sys.modules['torch'] = None; " if hide_torch else ""
    code = f"{hide}from setuptools import build_meta; build_meta.build_{what}({str(out)!r})"
    said = run(sys.executable, "-c", code, cwd=source, **environment)
    assert not hide_torch or "\nfusedaccum: built pure Python; python -m fusedaccum build adds the CPU kernels" in said
    (made,) = out.iterdir()
    return made


def clean_environment(folder, wheel):
    """The Python of an environment with nothing but the wheel and, from this environment, torch."""
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    torch = importlib.util.find_spec("torch").origin
    Path(site, "torch.pth").write_text(f"{Path(torch).parents[1]}\n")  # no .pth file there is run: no editable install
    return python


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    source = tmp_path_factory.mktemp("source") / "fusedaccum"
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "*.so", "*.egg-info", "_build.json", "__pycache__", "results"
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture
def unpacked(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        careful = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # missing in Python 3.11.2, for one
        archive.extractall(tmp_path / "unpacked", **careful)
    (folder,) = (tmp_path / "unpacked").iterdir()
    return folder


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_sdist_holds_all_sources(unpacked):
    for folder in ("csrc", "python", "triton_kernels"):
        ours = [
            p.relative_to(ROOT)
            for p in (ROOT / folder).rglob("*")
            if p.suffix in (".py", ".h", ".cpp", ".cu", ".typed")
        ]
        assert ours
        assert [path for path in ours if not (unpacked / path).exists()] == []
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        assert (unpacked / name).exists()


def test_wheel_from_sdist_runs_its_extension(unpacked, out, tmp_path):
    cuda = "0" if torch.version.cuda is None else "nvrtc"
    wheel = build("wheel", unpacked, out, FUSEDACCUM_CUDA=cuda, PATH="/usr/bin:/bin", CUDA_HOME="/nowhere")
    with zipfile.ZipFile(wheel) as archive:
        assert {"fusedaccum/triton_kernels/__init__.py", "fusedaccum/_build.json"} <= set(archive.namelist())
    python = clean_environment(tmp_path / "venv", wheel)
    run(python, "-W", "error", "-c", USE.format(prefix=str(tmp_path), backend="cpu"), cwd=tmp_path)
    report = run(python, "-m", "fusedaccum", "-v", cwd=tmp_path)
    assert "cpu        ready" in report
    if cuda == "0":
        assert "not built: FUSEDACCUM_CUDA=0" in report
    else:
        assert "nvrtc: compiles each kernel when it is first used; not yet run on a GPU" in report
        run(python, "-c", COMPILE, cwd=tmp_path, FUSEDACCUM_CACHE=str(tmp_path / "cache"))


def test_wheel_built_without_torch_works_and_brings_what_the_rest_is_built_from(unpacked, out, tmp_path):
    wheel = build("wheel", unpacked, out, hide_torch=True, FUSEDACCUM_CUDA="auto")
    assert wheel.name.endswith("-py3-none-any.whl")
    python = clean_environment(tmp_path / "venv", wheel)
    run(python, "-W", "error", "-c", USE.format(prefix=str(tmp_path), backend="auto"), cwd=tmp_path)
    report = run(python, "-m", "fusedaccum", cwd=tmp_path)
    assert "cpu        missing: not compiled yet: python -m fusedaccum build" in report
    assert "reference  ready" in report
    shutil.rmtree(unpacked)
    built = run(python, "-m", "fusedaccum", "build", cwd=tmp_path, FUSEDACCUM_CUDA="0", XDG_CACHE_HOME=str(tmp_path))
    assert f"\n_cpu and _intake are in {tmp_path / 'venv'}" in built
    run(python, "-W", "error", "-c", USE.format(prefix=str(tmp_path), backend="cpu"), cwd=tmp_path)
    report = run(python, "-W", "error", "-m", "fusedaccum", "-v", cwd=tmp_path)
    assert report.startswith("Ready: CPU kernels") and "Hooks: in C++" in report
