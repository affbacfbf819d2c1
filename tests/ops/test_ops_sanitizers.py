"""The CPU kernels under g++'s address and undefined-behaviour sanitizers, without PyTorch."""

import hashlib
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Unoptimized, so that the sanitizers see every access as it is written. Null and size checks would
# double the time to compile, and AddressSanitizer finds such accesses anyway.
FLAGS = [
    *("-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-ffp-contract=off"),
    *("-fsanitize=address,undefined", "-fno-sanitize=null,object-size", "-fno-sanitize-recover=all"),
]
X86 = platform.machine() in ("x86_64", "AMD64")
ISA_FLAGS = {"avx2": ["-mavx2", "-mf16c"], "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"]}
SOURCES = [*sorted((ROOT / "csrc/cpu").glob("*.cpp")), ROOT / "tests/ops/cpp/test_kernels.cpp"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


@pytest.fixture(scope="module")
def program(request, tmp_path_factory):
    """The program, built once for these sources."""
    cache = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    home = cache.mkdir("sanitizers") if cache else tmp_path_factory.mktemp("sanitizers")
    headers = [*sorted((ROOT / "csrc").glob("*.h")), *sorted((ROOT / "csrc/cpu").glob("*.h"))]
    parts = [repr(FLAGS).encode(), *(path.read_bytes() for path in [*headers, *SOURCES])]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = home / digest
    if not (folder / "test_kernels").exists():
        shutil.rmtree(folder.parent)
        folder.mkdir(parents=True)
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda source: compiled(source, folder), SOURCES))
        run(["g++", *FLAGS, *objects, "-pthread", "-o", folder / "partial"])
        (folder / "partial").rename(folder / "test_kernels")
    return folder / "test_kernels"


def compiled(source, folder):
    own = ISA_FLAGS.get(source.stem.removeprefix("kernels_"), []) if X86 else []
    run(["g++", *FLAGS, *own, "-c", source, "-o", folder / f"{source.stem}.o"])
    return folder / f"{source.stem}.o"


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_kernels_touch_no_byte_they_should_not(program):
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "checks passed" in done.stdout


@pytest.mark.parametrize(("fault", "message"), [("overrun", "heap-buffer-overflow"), ("shift", "shift exponent")])
def test_sanitizers_see_a_planted_fault(program, fault, message):
    done = subprocess.run([program, fault], capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
