"""``python -m fusedaccum build``: the package's own setup.py compiles the extensions for the torch that is installed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from . import native

STAGE = "building-"  # begins the names of folders in which something is built
COMPILERS = (
    "Debian, Ubuntu: apt install g++; Fedora, RHEL: dnf install gcc-c++; conda: conda install -c conda-forge gxx"
)


def build(verbose: bool) -> str:
    """Compile what this machine can, unless that is there already; says what is there then. Exits with what to do if it cannot be done."""
    places = native.places()  # one may be relative to this folder
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"  # which has ninja
    os.chdir(native.CHECKOUT if (native.CHECKOUT / "csrc").is_dir() else native.PACKAGE / "_native/source")
    try:
        record = runpy.run_path("setup.py")["plan"]()[2]
    except ImportError as error:
        sys.exit(f"To build, setuptools is needed ({error}): pip install setuptools, then {native.COMMAND}")
    names = " and ".join(record["built"])
    reasons = "".join(f"; no {name}: {reason}" for name, reason in record["missing"].items())
    here = native.build()
    if here.built == record["built"] and not any(map(native.why_missing, here.built)):
        return f"Nothing to do: {names} for torch {here.torch} are in {here.folder}{reasons}"
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        sys.exit(f"No C++ compiler: {compiler} is not there. {COMPILERS}. Or set CXX. Then {native.COMMAND}")
    place, lock = _writable(places)
    target = place / native.key()
    with _alone(place, lock), tempfile.TemporaryDirectory(prefix=STAGE, dir=place) as stage:
        there = native.read(target)
        if there is not None and there != here and there.built == record["built"]:  # made meanwhile, or not the latest
            with contextlib.suppress(OSError):
                os.utime(target / "_build.json")
            return f"Found {names} in {target}{reasons}"
        print(f"Compiling {names} for torch {torch.__version__}, which takes a minute or more ", end="")
        _compile(Path(stage), lock, verbose)
        made = Path(stage, "fusedaccum")
        (made / "_build.json").write_text(json.dumps(record | {"sources": native.sources()}, indent=1) + "\n")
        _put(made, target, there)
    return f"Built {names} in {target}{reasons}"


def _writable(places: list[Path]) -> tuple[Path, IO[str]]:
    """The first of the folders that can be written, and its open file for locks."""
    refused = []
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            return place, open(place / ".lock", "w")
        except OSError as error:
            refused.append(f"{place} ({error.strerror})")
    sys.exit(
        f"No folder to build in: {', '.join(refused)}. Set FUSEDACCUM_CACHE to one of yours, then {native.COMMAND}"
    )


@contextlib.contextmanager
def _alone(place: Path, lock: IO[str]) -> Iterator[None]:
    """Wait for other builders, then sweep what killed ones left. Where a file system has no locks, builders work beside each other."""
    with lock:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"Waiting for another build in {place}", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in place.glob(f"{STAGE}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _compile(stage: Path, lock: IO[str], verbose: bool) -> None:
    """Run setup.py. It holds the lock too, so that nobody sweeps its folder if this process is killed and it is not."""
    command = [sys.executable, "setup.py", "build_ext", f"--build-lib={stage}", f"--build-temp={stage / 'temp'}"]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        to = None if verbose else output
        with subprocess.Popen(command, stdout=to, stderr=to, pass_fds=[lock.fileno()]) as child:
            while child.poll() is None:
                print(".", end="", flush=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(5)
        print()
        output.seek(0)
        lines = output.read().splitlines()
    if child.returncode:
        of_errors = (
            n for says in (r"\berror\s*:", "^FAILED:") for n, line in enumerate(lines) if re.search(says, line)
        )
        first = next(of_errors, max(0, len(lines) - 8))
        shown = [line[:300] for line in lines[first : first + 8]]
        sys.exit("\n".join(["It does not compile.", *shown, f"All of it, and another try: {native.COMMAND} -v"]))


def _put(made: Path, target: Path, before: native.Build | None) -> None:
    """Put what was made in place of what was there before. If another process was faster, what it made stays."""
    if native.read(target) == before:
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, made.with_name("before"))
    try:
        os.rename(made, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
