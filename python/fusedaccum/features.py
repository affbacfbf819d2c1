"""The features that are extensions, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .extension import Extension, Extensions
from .extensions.batch_norm import BatchNormStats
from .extensions.losses import Losses
from .extensions.noise_scale import NoiseScale

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .window.settings import Settings


def always(settings: Settings, inner: Optimizer) -> bool:
    return True


# When a wrapper of these settings and this inner optimizer has the feature, and what makes it.
FEATURES: list[tuple[Callable[[Settings, Optimizer], bool], Callable[[], Extension]]] = [
    (always, Losses),  # divides by what NoiseScale and others do not change
    (lambda settings, _: settings.noise_scale is not None, NoiseScale),
    (always, BatchNormStats),
]


def extensions_for(settings: Settings, inner: Optimizer) -> Extensions:
    """Those of a wrapper of these settings and this inner optimizer."""
    return Extensions(make() for on, make in FEATURES if on(settings, inner))
