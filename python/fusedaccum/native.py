"""The native extensions: where a build left them, and whether they fit the installed torch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from ._sources import digest

EXTENSIONS = {"_cpu": "CPU kernels", "_intake": "hooks in C++", "_cuda": "CUDA kernels"}
COMMAND = "python -m fusedaccum build"
ADVICE = f"build it again: {COMMAND}"
PACKAGE = Path(__file__).resolve().parent
BROUGHT = PACKAGE / "_native/source"  # by a wheel; where an editable install is, its checkout has setup.py and csrc
SOURCE = BROUGHT if BROUGHT.is_dir() else PACKAGE.parents[1]
THIS_PYTHON = EXTENSION_SUFFIXES[0].removesuffix("so")


@dataclass(frozen=True)
class Build:
    """The record that a build leaves beside its extensions.

    Attributes:
        torch: version that the extensions were built against; None if there was none.
        built: extension -> how it was built, for people.
        missing: extension -> why it was not built, and what to do about it.
        cuda_archs: GPUs that the CUDA extension is for, as in TORCH_CUDA_ARCH_LIST, or "nvrtc".
        sources: digest of the sources that they were built from; None if that was not noted.
        folder: where they are.
    """

    torch: str | None = None
    built: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cuda_archs: str = ""
    sources: str | None = None
    folder: str = str(PACKAGE)


def read(folder: Path) -> Build | None:
    """The record in a folder; None if it is not there, or not shown yet (network file systems)."""
    try:
        return Build(**json.loads((folder / "_build.json").read_text()), folder=str(folder))
    except (OSError, ValueError, TypeError):  # TypeError: of another version of this package
        return None


@functools.cache
def build() -> Build:
    """The build that fits and has most; if none does, one of other sources, or for another torch.

    An empty record in a source tree that was never installed.
    """
    found = []
    for place in places():
        with contextlib.suppress(OSError):  # nothing was built there
            found += [read(place / name) for name in os.listdir(place) if THIS_PYTHON in name]
    known = filter(None, [*found, read(PACKAGE)])
    return max(known, key=lambda of: (of.torch is not None, _why_unfit(of) is None, len(of.built)), default=Build())


def places() -> list[Path]:
    """Where the command builds: in the package, or if that is read-only, in the user's cache."""
    ours = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fusedaccum")
    cache = os.path.expanduser(os.environ.get("FUSEDACCUM_CACHE") or ours)
    homeless = cache.startswith("~")  # a user without a home, as in some containers
    return [PACKAGE / "_native", *([] if homeless else [Path(os.path.abspath(cache))])]


def key() -> str:
    """The folder's name for what is built of these sources and flags, for this Python and torch."""
    there = f"torch-{'.'.join(_minor(torch.__version__))}-cuda-{torch.version.cuda}"
    return f"{(sources() or '')[:12]}{THIS_PYTHON}{there}"


@functools.cache
def sources() -> str | None:
    """The digest of an editable install's sources, or of those that the package brought.

    None if it brought none.
    """
    if SOURCE != BROUGHT and (SOURCE / "csrc").is_dir():
        return digest(SOURCE)
    installed = read(PACKAGE)
    return installed.sources if installed else None


def _why_unfit(record: Build) -> str | None:
    if None not in (record.sources, sources()) and record.sources != sources():
        changed = "this package" if SOURCE == BROUGHT else "csrc or setup.py"
        return f"{changed} has changed since it was built; {ADVICE}"
    elsewhere = record.folder != str(PACKAGE) and Path(record.folder).name != key()
    if record.torch is not None and (elsewhere or _minor(record.torch) != _minor(torch.__version__)):
        return f"it was built against torch {record.torch}, but this is torch {torch.__version__}; {ADVICE}"
    return None


def why_missing(extension: str) -> str | None:
    """None if ``fusedaccum.<extension>`` can be imported, else the reason and the remedy.

    PyTorch keeps its C++ interface stable within a minor version only. An extension built for
    another one may load and then crash, so it is not even tried; nor is one of other sources than
    those beside the package, which may have changed with it (by git pull).
    """
    record = build()
    if extension in record.missing:
        return record.missing[extension] if record.torch else f"not compiled yet: {COMMAND}"
    if (reason := _why_unfit(record)) is not None:
        return reason
    if importlib.util.find_spec(f"fusedaccum.{extension}") is None:
        return f"fusedaccum.{extension} was not built for this Python; {ADVICE}"
    try:
        importlib.import_module(f"fusedaccum.{extension}")
    except ImportError as error:
        return f"fusedaccum.{extension} cannot be loaded ({error}); {ADVICE}"
    return None


def warn_of_upgrade() -> None:
    """Say, once on a node, that an upgrade of torch or fusedaccum has made extensions useless.

    The command says it by itself.
    """
    ranks = map(os.environ.get, ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"))
    first = next(filter(None, ranks), "0") == "0" and multiprocessing.parent_process() is None
    why = _why_unfit(build())
    if why and first and "fusedaccum" not in sys.orig_argv:
        warnings.warn(f"fusedaccum's extension is not used: {why}", RuntimeWarning, stacklevel=3)


def why_not_on(capabilities: Iterable[tuple[int, int]]) -> str | None:
    """None if the CUDA extension runs on all these compute capabilities, else reason and remedy.

    Machine code runs on GPUs of its major version, from its minor version on; PTX on all later
    ones. (CUDA C++ Programming Guide, "Compilation with NVCC".)
    """
    archs = build().cuda_archs

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

    A toolkit works with older drivers of its major version, but not for kernels with more than
    4,096 bytes of arguments.
    """
    extension = importlib.import_module("fusedaccum._cuda")
    needed, there = extension.NEEDS_DRIVER, extension.driver()
    if there >= needed:
        return None
    return (
        f"it needs a driver for CUDA {_cuda_version(needed)} or newer, and this one is for {_cuda_version(there)}; "
        "update the driver"
    )


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def why_no_hooks() -> str | None:
    """None if the hooks and the queue of gradients run in C++, else why not.

    The environment variable FUSEDACCUM_INTAKE may ask for either. Raises ValueError for any other
    value of it, RuntimeError if it is "native" and the extension is missing.
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


if build().folder != str(PACKAGE):
    sys.modules["fusedaccum"].__path__.insert(0, build().folder)
