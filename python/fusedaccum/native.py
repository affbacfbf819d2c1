"""The native extensions of this installation: what its build left behind, and whether that fits the installed torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import nvrtc
from ._sources import digest

ADVICE = "build it again: pip install --no-build-isolation --no-deps --force-reinstall <fusedaccum's source folder>"


@dataclass(frozen=True)
class Build:
    """The record that setup.py leaves in the package.

    Attributes:
        torch: version that the extensions were built against; None if there was none.
        built: extension -> how it was built, for people.
        missing: extension -> why it was not built, and what to do about it.
        cuda_archs: GPUs that the CUDA extension was compiled for, as TORCH_CUDA_ARCH_LIST has them, or "nvrtc".
        sources: digest of the sources that they were built from; None if that was not noted.
    """

    torch: str | None = None
    built: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cuda_archs: str = ""
    sources: str | None = None


def build() -> Build:
    """The record; an empty one in a source tree that was never installed."""
    path = Path(__file__).with_name("_build.json")
    return Build(**json.loads(path.read_text())) if path.exists() else Build()


@functools.cache
def sources() -> str | None:
    """The digest of the sources beside the package, in a source tree that is installed as editable; None elsewhere."""
    folder = Path(__file__).resolve().parents[2] / "csrc"
    return digest(folder) if folder.is_dir() else None


def why_missing(extension: str) -> str | None:
    """None if ``fusedaccum.<extension>`` can be imported, else the reason and the remedy.

    PyTorch keeps its C++ interface stable within a minor version only. An extension built for another one may load and then crash, so
    it is not even tried; nor is one of other sources than those beside the package, which may have changed with it (by git pull).
    """
    record = build()
    if extension in record.missing:
        return record.missing[extension]
    if importlib.util.find_spec(f"fusedaccum.{extension}") is None:
        return f"fusedaccum.{extension} was not built for this Python; {ADVICE}"
    if record.torch is not None and _minor(record.torch) != _minor(torch.__version__):
        return f"it was built against torch {record.torch}, but this is torch {torch.__version__}; {ADVICE}"
    if None not in (record.sources, sources()) and record.sources != sources():
        return f"the sources in csrc have changed since it was built; {ADVICE}"
    try:
        importlib.import_module(f"fusedaccum.{extension}")
    except ImportError as error:
        return f"fusedaccum.{extension} cannot be loaded ({error}); {ADVICE}"
    return None


def why_not_on(capabilities: Iterable[tuple[int, int]]) -> str | None:
    """None if the CUDA extension runs on GPUs of all these compute capabilities, else the reason and the remedy.

    Machine code runs on GPUs of its major version, from its minor version on; PTX on all later ones.
    (CUDA C++ Programming Guide, "Compilation with NVCC".)
    """
    archs = build().cuda_archs
    if archs == "nvrtc":
        return nvrtc.why_not_on(capabilities)

    def runs(arch: str, device: tuple[int, int]) -> bool:
        parts = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if parts is None:  # a GPU by its name, or no record
            return True
        since = int(parts[1]), int(parts[2])
        if parts[3] == "a":
            return device == since
        return device >= since and (device[0] == since[0] or parts[4] is not None)

    for device in capabilities:
        if not any(runs(arch, device) for arch in re.split(r"[;\s]+", archs)):
            name = f"{device[0]}.{device[1]}"
            return (
                f"it was compiled for GPUs of compute capability {archs}, and one here is of {name}; "
                f"with TORCH_CUDA_ARCH_LIST={name}, {ADVICE}"
            )
    return None


def why_not_with_driver() -> str | None:
    """None if the driver launches the CUDA extension's kernels, else the reason and the remedy.

    A toolkit works with older drivers of its major version, but not for kernels with more than 4,096 bytes of arguments.
    """
    extension = importlib.import_module("fusedaccum._cuda")
    needed, there = extension.NEEDS_DRIVER, extension.driver()
    if there >= needed:
        return None
    return f"it needs a driver for CUDA {_cuda_version(needed)} or newer, and this one is for {_cuda_version(there)}; update the driver"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def why_no_hooks() -> str | None:
    """None if the hooks and the queue of gradients run in C++, else why not. The environment variable FUSEDACCUM_INTAKE may ask for either.

    Raises ValueError for any other value of it, RuntimeError if it is "native" and the extension is missing.
    """
    asked = os.environ.get("FUSEDACCUM_INTAKE") or "auto"
    if asked not in ("auto", "native", "python"):
        raise ValueError(f"the environment variable FUSEDACCUM_INTAKE is {asked!r}; it must be auto, native or python")
    reason = "FUSEDACCUM_INTAKE=python" if asked == "python" else why_missing("_intake")
    if reason and asked == "native":
        raise RuntimeError(f"FUSEDACCUM_INTAKE=native is not available: {reason}; or use auto")
    return reason


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
