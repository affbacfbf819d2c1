"""Exact, fast gradient accumulation for PyTorch: ``opt = fusedaccum.AccumulatingOptimizer(opt, accum_steps=8)``."""

from . import ops
from ._version import __version__
from .distributed_checkpoint import DistributedState
from .explaining import Explanation, explain
from .fuse import fuse_embedding, fuse_linear, unfuse
from .optimizer import AccumulatingOptimizer
from .window import LastWindow

__all__ = [
    "AccumulatingOptimizer",
    "DistributedState",
    "Explanation",
    "LastWindow",
    "__version__",
    "explain",
    "fuse_embedding",
    "fuse_linear",
    "ops",
    "unfuse",
]
