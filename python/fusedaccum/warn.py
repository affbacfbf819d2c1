"""Warnings that point at the caller's line."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

BETWEEN = {"fusedaccum", "torch", "contextlib", "accelerate", "lightning", "pytorch_lightning", "transformers"}


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the line of the caller's code that called us, perhaps through PyTorch.

    In a thread of autograd's own there is no such line.
    """
    _, level = _caller(sys._getframe(1))
    warnings.warn(message, category, stacklevel=level + 1)


def callers_line() -> str:
    """The line of the caller's code, as ``train.py:31``."""
    frame, _ = _caller(sys._getframe(1))
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _caller(frame: FrameType) -> tuple[FrameType, int]:
    """The frame of the caller's code that called this one, and how far up it is."""
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    return frame, level
