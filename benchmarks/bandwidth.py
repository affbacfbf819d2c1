"""The machine's own bandwidth, as contestants of the same race.

STREAM-like patterns over separate arrays, with as many threads as PyTorch has: the exact read:write
mix of an accumulation in C (``stream.c``, compiled when there is a compiler), and PyTorch's own
streaming ops whose mix is the same or the nearest. The fastest of them is the ceiling, and a row
names it. Bytes are counted as for the operations: what is read plus what is written, without
write-allocate traffic.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from pathlib import Path

import torch

from . import environment
from .harness import Contestant

_BLOCK = 256  # as in stream.c
_STREAM_BYTES = 512 * 2**20  # for each pattern's arrays together: far beyond any last-level cache

Pattern = tuple[str, Callable[[], object], int]  # name, function that makes one pass, bytes of the pass


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """``stream.c`` compiled for this machine, or None without a compiler."""
    cc = environment.compiler()
    if cc is None:
        return None
    source = Path(__file__).with_name("stream.c")
    target = Path(tempfile.mkdtemp(prefix="fusedaccum-stream-")) / "stream.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    try:
        subprocess.run([cc, *flags, str(source), "-o", str(target)], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        return None
    return ctypes.CDLL(str(target))


@functools.lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    # Python threads: a ctypes call releases the GIL, and an OpenMP pool of our own would spin.
    return ThreadPoolExecutor(torch.get_num_threads())


def streams(
    source_bytes: int, destination_bytes: int, overwrite: bool, moved: int, quick: bool = False
) -> list[Contestant]:
    """Patterns with the mix of an accumulation, each timed as if it moved ``moved`` bytes.

    Args:
        source_bytes, destination_bytes: bytes per element of both; only the ratio matters.
        overwrite: the destination is only written, not read and written.
        moved: bytes of the case with which the patterns are compared.
        quick: small arrays, which profit from caches: only to check the harness.
    """
    size = _STREAM_BYTES // 16 if quick else _STREAM_BYTES
    patterns = [*_c_patterns(source_bytes, destination_bytes, overwrite, size), *_torch_patterns(overwrite, size)]
    return [_contestant(name, run, traffic, moved) for name, run, traffic in patterns]


def _contestant(name: str, run: Callable[[], object], traffic: int, moved: int) -> Contestant:
    """Repeat a pattern until it has moved about ``moved`` bytes, at most a gigabyte.

    ``scale`` corrects its time to exactly ``moved``.
    """
    times = max(1, min(round(moved / traffic), 2**30 // traffic))
    return Contestant(name, lambda _: [run() for _ in range(times)], kind="bandwidth", scale=moved / (times * traffic))


def _c_patterns(source: int, destination: int, overwrite: bool, size: int) -> list[Pattern]:
    library = _library() if environment.device.type == "cpu" else None
    if library is None:
        return []
    parts, wholes = source // gcd(source, destination), destination // gcd(source, destination)
    unit = _BLOCK * torch.get_num_threads()
    groups = size // (unit * (parts + wholes))
    into = _array("C destination").view(torch.uint8)[: groups * unit * wholes]
    out_of = _array("C source").view(torch.uint8)[: groups * unit * parts]
    function = library.stream_overwrite if overwrite else library.stream_update
    n = torch.get_num_threads()

    def part(k: int) -> None:
        function(
            ctypes.c_void_p(into.data_ptr() + k * (into.numel() // n)),
            ctypes.c_void_p(out_of.data_ptr() + k * (out_of.numel() // n)),
            ctypes.c_size_t(into.numel() // n),
            ctypes.c_size_t(parts),
            ctypes.c_size_t(wholes),
        )

    traffic = out_of.numel() + into.numel() * (1 if overwrite else 2)
    reads = out_of.numel() + (0 if overwrite else into.numel())
    name = f"C {'overwrite' if overwrite else 'update'} ({_percent(reads, traffic)} reads, this mix)"
    return [(name, lambda: list(_threads().map(part, range(n))), traffic)]


def _torch_patterns(overwrite: bool, size: int) -> list[Pattern]:
    count = size // 8
    a, b = _array("torch destination")[:count], _array("torch source")[:count]
    copy = ("torch copy_ fp32 (50% reads)", lambda: a.copy_(b), 8 * count)
    if overwrite or a.is_cuda:  # a GPU's bandwidth is commonly stated as that of a copy
        return [copy]
    return [
        ("torch add_ fp32 (67% reads)", lambda: a.add_(b), 12 * count),
        ("torch mul_ fp32 (50% reads)", lambda: a.mul_(1.0), 8 * count),
    ]


@functools.cache
def _array(role: str) -> torch.Tensor:
    """One array per role for the whole run, as large as any pattern needs."""
    return torch.ones(_STREAM_BYTES // 4, device=environment.device)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%"
