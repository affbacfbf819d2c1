"""Data already on the machine: scikit-learn's digits, and the standard library's sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Modules that every Python has, in this order; the text is cut to the same length in every Python.
SOURCES = (
    "argparse.py",
    "ast.py",
    "calendar.py",
    "datetime.py",
    "decimal.py",
    "difflib.py",
    "inspect.py",
    "statistics.py",
)


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images of 8 x 8 in [-1, 1], float32, shape (n, 1, 8, 8), and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(found.target)


def text(sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, shape (sequences, context), and each one's next."""
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join((folder / name).read_bytes() for name in SOURCES if (folder / name).exists())
    needed = sequences * context + 1
    if len(content) < needed:
        raise RuntimeError(
            f"the modules read from the standard library in {folder} have {len(content)} bytes, but {needed} are needed"
        )
    stream = torch.frombuffer(bytearray(content[:needed]), dtype=torch.uint8).long()
    return stream[:-1].view(sequences, context), stream[1:].view(sequences, context)
