"""Exact, fast gradient accumulation for PyTorch: ``opt = fusedaccum.AccumulatingOptimizer(opt, accum_steps=8)``."""

from . import ops, schedules
from ._version import __version__
from .batchnorm import accumulate_batchnorm, restore_batchnorm
from .cached import cached_backward
from .distributed_checkpoint import DistributedState
from .explaining import Explanation, explain
from .fuse import fuse_embedding, fuse_linear, unfuse
from .micro_batcher import MicroBatcher
from .optimizer import AccumulatingOptimizer
from .window import LastWindow

__all__ = [
    "AccumulatingOptimizer",
    "DistributedState",
    "Explanation",
    "LastWindow",
    "MicroBatcher",
    "__version__",
    "accumulate_batchnorm",
    "cached_backward",
    "explain",
    "fuse_embedding",
    "fuse_linear",
    "ops",
    "restore_batchnorm",
    "schedules",
    "unfuse",
]
