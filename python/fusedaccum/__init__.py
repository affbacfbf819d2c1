"""Exact, fast gradient accumulation for PyTorch.

``opt = fusedaccum.AccumulatingOptimizer(opt, accum_steps=8)``
"""

from . import native, ops, schedules
from ._version import __version__
from .core.optimizer import AccumulatingOptimizer
from .distributed.checkpoint import DistributedState
from .last_window import LastWindow
from .recipes.batchnorm import accumulate_batchnorm, restore_batchnorm
from .recipes.cached import cached_backward
from .recipes.explaining import Explanation, explain
from .recipes.fuse import fuse_embedding, fuse_linear, unfuse
from .recipes.micro_batcher import MicroBatcher
from .times_mean import TimesMean

__all__ = [
    "AccumulatingOptimizer",
    "DistributedState",
    "Explanation",
    "LastWindow",
    "MicroBatcher",
    "TimesMean",
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

native.warn_of_upgrade()
