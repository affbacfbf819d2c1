"""``python -m fusedaccum build``: setup.py compiles the extensions for the installed torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import native

STAGE = f"building-{platform.node()}-"  # begins the names of folders in which this machine builds
ERRORS = r"\berror\s*:|: not found|undefined reference|multiple definition|cannot find -l"
COMPILERS = (
    "Debian, Ubuntu: apt install g++; Fedora, RHEL: dnf install gcc-c++; conda: conda install gxx -c conda-forge"
)


def build(verbose: bool) -> str:
    """Compile what this machine can, unless that is there already; says what is there then.

    Exits with what to do if it cannot be done.
    """
    places = native.places()  # before the folder changes, to which they may be relative
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"  # which has ninja
    os.chdir(native.SOURCE)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # which warns that there is no GPU
    try:
        record = runpy.run_path("setup.py")["plan"]()[2] | {"sources": native.sources()}
    except ImportError as error:
        sys.exit(f"Nothing can be built without setuptools ({error}): pip install setuptools, then {native.COMMAND}")
    names = " and ".join(record["built"])
    reasons = "".join(f"; no {name}: {reason}" for name, reason in record["missing"].items())
    here = native.build()
    if _is_enough(here, record) and not any(map(native.why_missing, record["built"])):
        enough = " and ".join(here.built)
        without = "" if "_cuda" in here.built else reasons
        return f"Nothing to do: {enough} for torch {here.torch} are in {here.folder}{without}"
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        sys.exit(f"No C++ compiler: {compiler} is not there. {COMPILERS}. Or set CXX to one. Then {native.COMMAND}")
    print(f"Building {names} for torch {torch.__version__}: minutes, or until another process has done it", flush=True)
    with _alone(places) as (place, lock), tempfile.TemporaryDirectory(prefix=STAGE, dir=place) as stage:
        target = place / native.key()
        there = native.read(target)
        if there is None or there == here or not _is_enough(there, record):  # else it was made while this one waited
            _compile(Path(stage), lock, verbose)
            made = Path(stage, "fusedaccum")
            (made / "_build.json").write_text(json.dumps(record, indent=1) + "\n")
            _put(made, target, there)
    return f"\n{names} are in {target}{reasons}"


def _is_enough(there: native.Build, record: dict[str, Any]) -> bool:
    """True if all that can be built is there.

    What an nvcc has made stays where there is none now, unless it is not wanted.
    """
    if os.environ.get("FUSEDACCUM_CUDA") == "0":
        return there.built == record["built"]
    return record["built"].items() <= there.built.items()


@contextlib.contextmanager
def _alone(places: list[Path]) -> Iterator[tuple[Path, int]]:
    """The first folder that can be written, and a lock that keeps others out.

    The folder is swept of what killed builders left there. Where a file system has no locks,
    builders work beside each other.
    """
    refused = []
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            lock = os.open(place / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
            break
        except OSError as error:
            refused.append(f"{place} ({error.strerror})")
    else:
        sys.exit(f"\nNo folder to build in: {', '.join(refused)}. Set FUSEDACCUM_CACHE, then {native.COMMAND}")
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in place.glob(f"{STAGE}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield place, lock
    finally:
        os.close(lock)


def _compile(stage: Path, lock: int, verbose: bool) -> None:
    """Run setup.py, which holds the lock too, so that its folder is safe if only we are killed."""
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={stage}", f"--build-temp={stage / 'temp'}"]
    lines = []
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # ninja would look for make's pipe
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[lock], text=True, errors="replace", env=env
    ) as child:
        for line in child.stdout or ():
            lines.append(line[:300].rstrip())
            print(line if verbose else ".", end="", flush=True)
    if child.returncode:
        end = next((n for n, line in enumerate(lines) if n and line.startswith("Traceback")), None)  # setup.py's own
        of_errors = (n for n, line in enumerate(lines[:end]) if re.search(ERRORS, line))
        first = next(of_errors, max(0, len(lines) - 8))
        shown = "\n".join(lines[first : first + 8])
        sys.exit(f"\nIt does not compile:\n{shown}\nAll that was said, and another try: {native.COMMAND} -v")


def _put(made: Path, target: Path, before: native.Build | None) -> None:
    """Put what was made in place of what was there before, unless another process was faster."""
    if native.read(target) == before:
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, made.with_name("before"))
    try:
        os.rename(made, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
