"""Warnings that point at the caller's line."""

from __future__ import annotations

import sys
import warnings

BETWEEN = {"fusedaccum", "torch", "contextlib", "accelerate", "lightning", "pytorch_lightning", "transformers"}


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the line of the caller's code that called us, perhaps through PyTorch. (In a thread of autograd's own there is none.)"""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
