"""The features that are extensions, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .extension import Extension, Extensions
from .extensions.batch_norm import BatchNormStats
from .extensions.loss_scale import LossScale
from .extensions.losses import Losses
from .extensions.noise_scale import NoiseScale
from .extensions.nonfinite import Raise, SkipMicroBatch, SkipWindow

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .window.settings import Settings


def always(settings: Settings, inner: Optimizer) -> bool:
    return True


# When a wrapper of these settings and this inner optimizer has the feature, and what makes it.
FEATURES: list[tuple[Callable[[Settings, Optimizer], bool], Callable[[], Extension]]] = [
    (always, Losses),
    (lambda settings, _: settings.noise_scale is not None, NoiseScale),
    (lambda settings, _: settings.nonfinite == "skip_window", SkipWindow),
    (lambda settings, _: settings.nonfinite == "skip_micro_batch", SkipMicroBatch),
    (lambda settings, _: settings.nonfinite == "raise", Raise),
    (always, LossScale),  # divides after Losses, and reports over what the three above have
    (always, BatchNormStats),
]


def extensions_for(settings: Settings, inner: Optimizer) -> Extensions:
    """Those of a wrapper of these settings and this inner optimizer."""
    return Extensions(make() for on, make in FEATURES if on(settings, inner))
