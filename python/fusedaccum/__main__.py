"""``python -m fusedaccum``: what was built, what is available, and why anything is missing."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from . import native
from ._version import __version__
from .ops import backends


def summary() -> str:
    """What runs here, and why anything is missing; the first line says it all."""
    return "\n".join(
        [
            f"{_verdict()}.",
            *_extensions(),
            "",
            f"fusedaccum {__version__} in {Path(__file__).parent}",
            f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}",
            "",
            'Backends, in the order in which "auto" tries them:',
            *(
                f"  {row.name:<10} {'missing: ' + why if (why := backends.why_missing(row.name)) else 'ready'}"
                for row in backends.TABLE
            ),
        ]
    )


def report() -> str:
    """The summary, how everything was built, and what the environment asks for."""
    record = native.build()
    lines = [
        summary(),
        "",
        "Extensions:",
        *(f"  {name:<10} {how}" for name, how in record.built.items()),
        *(f"  {name:<10} not built: {why}" for name, why in record.missing.items()),
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


def _verdict() -> str:
    try:
        asked = backends.check(None)
        native.why_no_hooks()
        capability = None if native.why_missing("_cpu") else importlib.import_module("fusedaccum._cpu").capability()
    except (ValueError, RuntimeError) as error:  # what the environment asks for is not there
        return f"Not ready: {error}"
    if asked != "auto":
        return f"Ready: backend {asked!r}, as FUSEDACCUM_BACKEND asks for"
    on_cpu = f"CPU kernels, {capability}" if capability else "plain PyTorch on the CPU"
    if not torch.cuda.is_available():
        return f"Ready: {on_cpu}; no GPU that torch can use"
    first = next(row.name for row in backends.TABLE if row.name != "cpu" and not backends.why_missing(row.name))
    names = {"cuda": "CUDA kernels", "triton": "Triton kernels", "reference": "plain PyTorch"}
    return f"Ready: {names[first]} on {torch.cuda.get_device_name()}; {on_cpu}"


def _extensions() -> Iterator[str]:
    """What is built, for which torch, and where; what is missing though it could be built."""
    record = native.build()
    left_out = record.missing if record.torch else {}
    missing = [name for name in native.EXTENSIONS if name not in left_out and native.why_missing(name)]
    if record.built:
        yield f"Built: {_words(record.built)}, for torch {record.torch}, in {record.folder}."
    if missing:
        yield f"Missing: {_words(missing)}. To compile what this machine can: {native.COMMAND}"


def _words(extensions: Iterable[str]) -> str:
    return ", ".join(native.EXTENSIONS[name] for name in extensions)


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
        f"{torch.cuda.get_device_name(i)} (compute capability "
        f"{'.'.join(map(str, torch.cuda.get_device_capability(i)))})"
        for i in range(torch.cuda.device_count())
    ]
    return ", ".join(names)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fusedaccum", description="What runs here, and why anything is missing."
    )
    parser.add_argument("command", nargs="?", choices=["build"], help="compile what this machine can, for this torch")
    parser.add_argument("-v", "--verbose", action="store_true", help="also how everything was built, or is being built")
    asked = parser.parse_args()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a traceback
    if asked.command == "build":
        from . import builder

        try:
            print(builder.build(asked.verbose))
        except KeyboardInterrupt:
            sys.exit(f"\nStopped. Another try: {native.COMMAND}")
    else:
        print(report() if asked.verbose else summary())


if __name__ == "__main__":
    main()
