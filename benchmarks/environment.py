"""What a row must say about where it was measured: hardware, versions, commit.

In a source tree without ``.git`` the environment variable FUSEDACCUM_COMMIT names the commit.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from pathlib import Path

import fusedaccum
import torch

ROOT = Path(__file__).resolve().parent.parent
# Where tensors are made: torch.set_default_device() would put Python into the calls that are timed.
device = torch.device("cpu")


def describe() -> dict[str, object]:
    """Hardware, versions and commit as flat columns, the same for every row of a run."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **_gpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "huge_pages": _huge_pages(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fusedaccum": getattr(fusedaccum, "__version__", "unknown"),
        "commit": _commit(),
        "measured": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def compiler() -> str | None:
    """The C compiler for ``stream.c`` (``torch.compile`` needs the C++ one beside it), or None."""
    return next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
        named = {key.strip(): value.strip() for key, value in fields.items()}
        if "model name" in named:
            family = f" (family {named['cpu family']}, model {named['model']})" if "cpu family" in named else ""
            return named["model name"] + family
    return platform.processor() or platform.machine()


def _huge_pages() -> str:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists():
        return "unknown"
    return setting.read_text().split("[")[1].split("]")[0]


def _gpu() -> dict[str, object]:
    """A measured GPU's name, memory and driver, and PyTorch's CUDA version; empty on a CPU."""
    if device.type != "cuda":
        return {}
    p = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split() if shutil.which("nvidia-smi") else []
    return {
        "gpu": p.name,
        "gpu_memory_gib": round(p.total_memory / 2**30, 1),
        "driver": driver[0] if driver else "unknown",
        "cuda": torch.version.cuda,
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Results do not count as a change, because the run itself writes them.
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs", ":!README.md")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FUSEDACCUM_COMMIT") or "unknown"
