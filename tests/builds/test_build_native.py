"""Without an extension, or with one that does not fit, the package says why and works without."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fusedaccum import __main__, _sources, native
from fusedaccum.ops import backends

pytestmark = pytest.mark.long


def test_report_names_every_backend_and_what_was_built():
    text, verbose = (
        subprocess.run([sys.executable, "-m", "fusedaccum", *v], check=True, capture_output=True, text=True).stdout
        for v in ([], ["-v"])
    )
    assert verbose.startswith(text.rstrip("\n"))
    assert f"torch {torch.__version__}" in text
    for row in backends.TABLE:
        assert f"  {row.name:<10} {'missing: ' + why if (why := backends.why_missing(row.name)) else 'ready'}" in text
    for name in native.build().built:
        assert f"  {name} " in verbose and f"  {name} " not in text


def test_the_report_begins_with_what_runs_here(monkeypatch):
    here = "CPU kernels, " if native.why_missing("_cpu") is None else "plain PyTorch on the CPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert __main__.summary().startswith(f"Ready: {here}") and "; no GPU that torch can use.\n" in __main__.summary()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for missing, said in (((), "CUDA kernels"), (("cuda",), "Triton kernels"), (("cuda", "triton"), "plain PyTorch")):
        monkeypatch.setattr(
            backends, "why_missing", lambda name, missing=missing: "" if name not in missing else "not here"
        )
        assert __main__.summary().startswith(f"Ready: {said} on a GPU; {here}")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FUSEDACCUM_BACKEND", "none", "Not ready: the environment variable FUSEDACCUM_BACKEND is 'none'"),
        ("FUSEDACCUM_INTAKE", "none", "Not ready: the environment variable FUSEDACCUM_INTAKE is 'none'"),
        ("FUSEDACCUM_CPU_CAPABILITY", "none", "Not ready: FUSEDACCUM_CPU_CAPABILITY is 'none'"),
        ("FUSEDACCUM_BACKEND", "reference", "Ready: backend 'reference', as FUSEDACCUM_BACKEND asks for.\n"),
    ],
)
def test_the_report_is_not_ready_where_the_environment_asks_for_what_is_not_there(name, value, said):
    report = [sys.executable, "-m", "fusedaccum"]
    done = subprocess.run(report, env={**os.environ, name: value}, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(said)


def test_the_report_may_be_cut_off():
    command = f"{sys.executable} -m fusedaccum -v | head -n 1"
    done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("Ready: ") and not done.stderr


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("auto", "in C++"),
        ("python", "in Python: FUSEDACCUM_INTAKE=python"),
        ("c++", "the environment variable FUSEDACCUM_INTAKE is 'c++'"),
    ],
)
def test_report_says_in_which_language_the_hooks_are(monkeypatch, asked, said):
    monkeypatch.setenv("FUSEDACCUM_INTAKE", asked)
    assert f"Hooks: {said}" in __main__.report()


def test_a_build_record_was_left():
    record = native.build()
    assert record.torch == torch.__version__ and record.sources == (native.sources() or record.sources)
    assert "_cpu" in record.built
    assert record.cuda_archs in record.built.get("_cuda", "")
    assert bool(record.cuda_archs) == ("_cuda" in record.built)
    assert native.why_missing("_cpu") is None


def test_extension_built_against_another_torch_is_not_loaded(monkeypatch):
    monkeypatch.setattr(native, "build", lambda: native.Build("2.1.2+cu118", {"_cpu": "-O3"}))
    reason = native.why_missing("_cpu")
    assert f"built against torch 2.1.2+cu118, but this is torch {torch.__version__}" in reason
    assert native.ADVICE in reason
    assert "built against torch 2.1.2+cu118" in __main__.report()


def test_patch_versions_of_torch_share_an_extension(monkeypatch):
    other_patch = ".".join(torch.__version__.split(".")[:2]) + ".99"
    monkeypatch.setattr(native, "build", lambda: native.Build(other_patch, {"_cpu": "-O3"}))
    assert native.why_missing("_cpu") is None


@pytest.mark.parametrize("sources", [native.sources(), "of before", None])
def test_an_extension_of_other_sources_than_those_beside_the_package_is_not_tried(sources, monkeypatch):
    """As after `git pull`, where the package is installed as editable."""
    monkeypatch.setattr(native, "build", lambda: native.Build(torch.__version__, {"_cpu": "-O3"}, sources=sources))
    if sources != "of before" or native.sources() is None:  # None: not noted, or no sources here
        assert native.why_missing("_cpu") is None
        return
    for source, changed in ((native.BROUGHT, "this package"), (native.PACKAGE, "csrc or setup.py")):
        monkeypatch.setattr(native, "SOURCE", source)
        assert native.why_missing("_cpu") == f"{changed} has changed since it was built; {native.ADVICE}"


def test_a_digest_is_of_names_and_contents(tmp_path):
    digests = set()
    for name, text, flags in (
        ("a.h", "1", ""),
        ("a.h", "2", ""),
        ("b.h", "2", ""),
        ("in/b.h", "2", ""),
        ("a.h", "1", "-O0"),
    ):
        root = tmp_path / f"{len(digests)}"
        (root / "csrc" / name).parent.mkdir(parents=True)
        (root / "csrc" / name).write_text(text)
        (root / "setup.py").write_text(flags)
        digests.add(_sources.digest(root))
    assert len(digests) == 5


def test_reason_of_the_build_is_passed_on(monkeypatch):
    monkeypatch.setattr(native, "build", lambda: native.Build(None, {}, {"_cpu": "no torch to build against"}))
    assert native.why_missing("_cpu") == "not compiled yet: python -m fusedaccum build"
    assert "_cpu       not built: no torch to build against" in __main__.report()
    assert "CPU kernels in use: none" in __main__.report()


@pytest.mark.parametrize(
    ("archs", "runs", "not_on"),
    [
        ("7.5;8.0;9.0+PTX", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)], [(7, 0), (7, 2)]),
        ("8.6 9.0", [(8, 6), (8, 9), (9, 0)], [(8, 0), (10, 0)]),
        ("9.0a", [(9, 0)], [(8, 9), (10, 0)]),
        ("10.0f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("Hopper", [(9, 0), (8, 0)], []),
        ("", [(9, 0)], []),
    ],
)
def test_gpus_that_the_cuda_extension_was_not_compiled_for(monkeypatch, archs, runs, not_on):
    monkeypatch.setattr(native, "build", lambda: native.Build(cuda_archs=archs))
    assert native.why_not_on(runs) is None
    for device in not_on:
        with monkeypatch.context() as patch:
            patch.setattr(native, "why_missing", lambda extension: None)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "device_count", lambda: 2)
            patch.setattr(torch.cuda, "get_device_capability", lambda i, device=device: (runs[0], device)[i])
            reason = backends._cuda_missing()
        name = ".".join(map(str, device))
        assert f"compute capability {archs}, and one here is of {name}; with TORCH_CUDA_ARCH_LIST={name}" in reason


@pytest.mark.parametrize(("driver", "runs"), [(12000, False), (11080, False), (12010, True), (13010, True)])
def test_a_driver_that_is_too_old_for_the_cuda_extension(monkeypatch, driver, runs):
    monkeypatch.setitem(sys.modules, "fusedaccum._cuda", SimpleNamespace(NEEDS_DRIVER=12010, driver=lambda: driver))
    monkeypatch.setattr(native, "build", lambda: native.Build(cuda_archs="8.0"))
    monkeypatch.setattr(native, "why_missing", lambda extension: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (8, 0))
    reason = backends._cuda_missing()
    assert (reason is None) == runs
    there = f"{driver // 1000}.{driver % 1000 // 10}"
    assert runs or f"a driver for CUDA 12.1 or newer, and this one is for {there}; update the driver" in reason


@pytest.mark.parametrize("extension", ["_cpu", "_nonesuch"])
def test_extension_that_cannot_be_imported_is_a_reason_and_no_crash(monkeypatch, extension):
    monkeypatch.setattr(native, "build", native.Build)
    monkeypatch.setattr(
        native.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("undefined symbol: x"))
    )
    reason = native.why_missing(extension)
    assert ("undefined symbol: x" if extension == "_cpu" else "was not built for this Python") in reason
