"""The features that are extensions, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import LBFGS

from .extension import Extension, Extensions
from .extensions.batch_norm import BatchNormStats
from .extensions.lbfgs import EvaluatedWindows
from .extensions.master_weights import MasterWeights

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .window.settings import Settings


def always(settings: Settings, inner: Optimizer) -> bool:
    return True


def asked_for_masters(settings: Settings, inner: Optimizer) -> bool:
    return settings.master_weights


def is_lbfgs(settings: Settings, inner: Optimizer) -> bool:
    return isinstance(inner, LBFGS)


# When a wrapper of these settings and this inner optimizer has the feature, and what makes it.
FEATURES: list[tuple[Callable[[Settings, Optimizer], bool], type[Extension]]] = [
    (always, BatchNormStats),
    (asked_for_masters, MasterWeights),
    (is_lbfgs, EvaluatedWindows),
]


def check(settings: Settings, inner: Optimizer) -> None:
    """Raises as the features do that do not work with these settings, or this optimizer."""
    for on, feature in FEATURES:
        if on(settings, inner):
            feature.refuses(settings, inner)


def extensions_for(settings: Settings, inner: Optimizer) -> Extensions:
    """Those of a wrapper of these settings and this inner optimizer."""
    has = [on(settings, inner) for on, _ in FEATURES]
    features = [feature for _, feature in FEATURES]
    return Extensions(
        [feature() for feature, on in zip(features, has, strict=True) if on],
        [feature for feature, on in zip(features, has, strict=True) if not on],
    )
