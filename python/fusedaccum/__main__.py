"""``python -m fusedaccum``: what was built, what is available, and why anything is missing."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path

import torch

from . import native
from ._version import __version__
from .ops import backends


def report() -> str:
    """The report, one fact per line."""
    record = native.build()
    lines = [
        f"fusedaccum {__version__} in {Path(__file__).parent}",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}",
        "",
        f"Extensions, built against torch {record.torch}:" if record.torch else "Extensions:",
        *(f"  {name:<10} {how}" for name, how in record.built.items()),
        *(f"  {name:<10} not built: {why}" for name, why in record.missing.items()),
        "",
        'Backends, in the order in which "auto" tries them:',
        *(
            f"  {row.name:<10} {'missing: ' + why if (why := backends.why_missing(row.name)) else 'ready'}"
            for row in backends.TABLE
        ),
        "",
        f"Hooks: {_hooks()}",
        f"CPU kernels in use: {_cpu_capability()}",
        f"CUDA devices: {_cuda_devices()}",
    ]
    lines += [
        f"{name}={os.environ[name]}"
        for name in ("FUSEDACCUM_BACKEND", "FUSEDACCUM_INTAKE", "FUSEDACCUM_CPU_CAPABILITY")
        if name in os.environ
    ]
    return "\n".join(lines)


def _hooks() -> str:
    try:
        why = native.why_no_hooks()
    except (ValueError, RuntimeError) as error:  # FUSEDACCUM_INTAKE names an unknown implementation, or a missing one
        return str(error)
    return f"in Python: {why}" if why else "in C++"


def _cpu_capability() -> str:
    if native.why_missing("_cpu") is not None:
        return "none; plain PyTorch is used"
    cpu = importlib.import_module("fusedaccum._cpu")
    try:
        return f"{cpu.capability()} (this machine runs: {', '.join(cpu.capabilities())})"
    except ValueError as error:  # FUSEDACCUM_CPU_CAPABILITY names none of them
        return str(error)


def _cuda_devices() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    names = [
        f"{torch.cuda.get_device_name(i)} (compute capability {'.'.join(map(str, torch.cuda.get_device_capability(i)))})"
        for i in range(torch.cuda.device_count())
    ]
    return ", ".join(names)


if __name__ == "__main__":
    print(report())
