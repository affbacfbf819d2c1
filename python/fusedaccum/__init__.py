"""Exact, fast gradient accumulation for PyTorch: ``opt = fusedaccum.AccumulatingOptimizer(opt, accum_steps=8)``."""

from . import ops, schedules
from ._version import __version__
from .cached import cached_backward
from .distributed_checkpoint import DistributedState
from .fuse import fuse_embedding, fuse_linear, unfuse
from .optimizer import AccumulatingOptimizer
from .window import LastWindow

__all__ = [
    "AccumulatingOptimizer",
    "DistributedState",
    "LastWindow",
    "__version__",
    "cached_backward",
    "fuse_embedding",
    "fuse_linear",
    "ops",
    "schedules",
    "unfuse",
]
