"""The table of backends: which there are, why the others are missing, and which one a call gets.

A backend is a module with ``accumulate_``, ``scale_``, ``cast_`` and ``stats`` as
:mod:`fusedaccum.ops.reference` has them, or with some of them (under ``"auto"``, the next backend
runs an op that this one lacks). Adding one is one file and one row here.

Its arguments have been checked. A backend that sets ``CHECKS_LISTS`` checks its lists of tensors
itself, in the same pass over them (csrc/predicate.h): its ops return their
:class:`~fusedaccum.ops.arguments.Layout`, and have run only if that is ``FLAT``. One that sets
``TAKES_LOW`` has a last argument for low parts; for others, the reference runs such calls.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .. import native, nvrtc
from ..warn import warn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run in Python, on CPU tensors


@dataclass(frozen=True)
class Backend:
    """One row; ``why_missing()``: None if the module is usable, else the reason and the remedy."""

    name: str
    module: str
    devices: tuple[str, ...]  # device types, empty for all
    why_missing: Callable[[], str | None]


def _cuda_missing() -> str | None:
    missing = native.why_missing("_cuda")
    if missing or not torch.cuda.is_available():
        return missing or "torch finds no CUDA device on this machine"
    why_not_on = nvrtc.why_not_on if native.build().cuda_archs == "nvrtc" else native.why_not_on
    return why_not_on(_capabilities()) or native.why_not_with_driver()


def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch finds no GPU on this machine"
    oldest = min(_capabilities())
    if torch.version.hip is None and oldest < (7, 0):  # as torch.compile has it
        name = ".".join(map(str, oldest))
        return f"triton compiles for GPUs of compute capability 7.0 and newer, and one here is of {name}"
    # Triton compiles C at run time, to reach the GPU's driver: images that only run programs often
    # have no compiler.
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # of many types: no compiler, no header of Python's, no library of the driver's
        return (
            f"triton cannot reach the GPU ({error}); it needs a C compiler (such as gcc) and Python's headers at run "
            "time"
        )
    return None


def _capabilities() -> list[tuple[int, int]]:
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


# In the order in which "auto" prefers them.
TABLE = (
    Backend("cuda", "fusedaccum._cuda", ("cuda",), _cuda_missing),
    Backend("cpu", "fusedaccum._cpu", ("cpu",), lambda: native.why_missing("_cpu")),
    Backend(
        "triton", "fusedaccum.triton_kernels.backend", ("cuda", *(("cpu",) if INTERPRETED else ())), _triton_missing
    ),
    Backend("reference", "fusedaccum.ops.reference", (), lambda: None),
)


@functools.cache
def why_missing(name: str) -> str | None:
    """None if the backend is available, else why not; probed once per process."""
    return _row(name).why_missing()


def _row(name: str) -> Backend:
    return next(row for row in TABLE if row.name == name)


def check(name: Any) -> str:
    """The name, with None and "auto" replaced by what the variable FUSEDACCUM_BACKEND says.

    Raises TypeError or ValueError for anything but a backend's name, RuntimeError if the backend is
    missing.
    """
    argument = "backend"
    if name is None or name == "auto":
        name = os.environ.get("FUSEDACCUM_BACKEND") or "auto"
        argument = "the environment variable FUSEDACCUM_BACKEND"
    if name == "auto":  # nearly always
        return name
    names = ("auto", *(row.name for row in TABLE))
    if not isinstance(name, str):
        raise TypeError(
            f"{argument} must be one of {', '.join(map(repr, names))}, not {type(name).__name__} ({name!r})"
        )
    if name not in names:
        raise ValueError(f"{argument} is {name!r}; it must be one of {', '.join(map(repr, names))}")
    if (reason := why_missing(name)) is not None:
        raise RuntimeError(f"{argument}={name!r} is not available: {reason}; or use 'auto'")
    return name


def select(name: str | None, device: torch.device | None, op: str, low: bool = False) -> ModuleType:
    """The backend of a call: the one asked for, or the first that has the op and suits the device.

    ``device``: None if there are no tensors.

    Raises RuntimeError if the one asked for is missing, has no such op, or cannot work on this
    device.
    """
    name = check(name)
    if device is not None:
        module = _automatic(device.type, op) if name == "auto" else _requested(name, device, op)
        if not low or getattr(module, "TAKES_LOW", False):
            return module
    return importlib.import_module("fusedaccum.ops.reference")


@functools.cache
def _requested(name: str, device: torch.device, op: str) -> ModuleType:
    row = _row(name)
    if row.devices and device.type not in row.devices:
        raise RuntimeError(
            f"backend={name!r} works on {', '.join(row.devices)} tensors, but these are on {device}; move them, or use "
            "'auto'"
        )
    module = importlib.import_module(row.module)
    if not hasattr(module, op):
        raise RuntimeError(f"backend={name!r} has no {op} yet; use 'auto' or 'reference'")
    return module


@functools.cache
def _automatic(device_type: str, op: str) -> ModuleType:
    for row in TABLE:
        usable = not row.devices or device_type in row.devices
        if usable and why_missing(row.name) is None and hasattr(importlib.import_module(row.module), op):
            if row.name == "reference":
                _warn_no_kernels(device_type)
            return importlib.import_module(row.module)
    raise AssertionError("the reference works everywhere")


@functools.cache
def _warn_no_kernels(device_type: str) -> None:
    """Warn, once per process and device type, that kernels exist, and why they cannot be used."""
    reasons = [f"{row.name}: {why_missing(row.name)}" for row in TABLE if device_type in row.devices]
    if device_type != "cpu" and reasons:
        warn(f"no kernels for {device_type} tensors here, so plain PyTorch accumulates them ({'; '.join(reasons)})")
