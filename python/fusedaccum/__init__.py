"""Exact, fast gradient accumulation for PyTorch: ``opt = fusedaccum.AccumulatingOptimizer(opt, accum_steps=8)``."""

from . import ops
from ._version import __version__
from .optimizer import AccumulatingOptimizer
from .window import LastWindow

__all__ = ["AccumulatingOptimizer", "LastWindow", "__version__", "ops"]
