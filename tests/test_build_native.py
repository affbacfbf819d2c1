"""What is said of an extension that is missing or does not fit, and that the package works without it."""

import subprocess
import sys

import pytest
import torch
from fusedaccum import __main__, native
from fusedaccum.ops import backends


def test_report_names_every_backend_and_what_was_built():
    text = subprocess.run([sys.executable, "-m", "fusedaccum"], check=True, capture_output=True, text=True).stdout
    assert f"torch {torch.__version__}" in text
    for row in backends.TABLE:
        assert f"  {row.name:<10} {'missing: ' + why if (why := backends.why_missing(row.name)) else 'ready'}" in text
    for name in native.build().built:
        assert f"  {name} " in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("auto", "in C++"),
        ("python", "in Python: FUSEDACCUM_INTAKE=python"),
        ("c++", "the environment's FUSEDACCUM_INTAKE is 'c++'"),
    ],
)
def test_report_says_in_which_language_the_hooks_are(monkeypatch, asked, said):
    monkeypatch.setenv("FUSEDACCUM_INTAKE", asked)
    assert f"Hooks: {said}" in __main__.report()


def test_a_build_record_was_left():
    record = native.build()
    assert record.torch == torch.__version__
    assert "_cpu" in record.built
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


def test_reason_of_the_build_is_passed_on(monkeypatch):
    monkeypatch.setattr(native, "build", lambda: native.Build(None, {}, {"_cpu": "no torch to build against"}))
    assert native.why_missing("_cpu") == "no torch to build against"
    assert "_cpu       not built: no torch to build against" in __main__.report()
    assert "CPU kernels in use: none" in __main__.report()


@pytest.mark.parametrize("extension", ["_cpu", "_nonesuch"])
def test_extension_that_cannot_be_imported_is_a_reason_and_no_crash(monkeypatch, extension):
    monkeypatch.setattr(native, "build", native.Build)
    monkeypatch.setattr(
        native.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("undefined symbol: x"))
    )
    reason = native.why_missing(extension)
    assert ("undefined symbol: x" if extension == "_cpu" else "was not built for this Python") in reason
