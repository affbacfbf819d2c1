"""The features that are extensions, in the order in which they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .extension import Extensions
from .extensions.batch_norm import BatchNormStats

if TYPE_CHECKING:
    from .buffers.buffers import Buffers


def extensions_for(buffers: Buffers) -> Extensions:
    """Those of a wrapper that has these buffers."""
    return Extensions([BatchNormStats(buffers)])
