"""The features that are extensions, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import LBFGS

from .core.extension import Extension, Extensions
from .distributed.data_parallel import DataParallel
from .extensions import kept_gradients, low_precision, main_grad
from .extensions.batch_norm import BatchNormsLeftOut, BatchNormStats
from .extensions.changing_owners import ChangingOwners
from .extensions.changing_parameters import ChangingParameters
from .extensions.cpu_offload import CpuOffload
from .extensions.cpu_optimizer import CpuOptimizer
from .extensions.fused_optimizers import FusedOptimizers
from .extensions.group_dtypes import GroupDtypes
from .extensions.in_place_layers import InPlaceLayers
from .extensions.inner_guard import InnerGuard
from .extensions.kept_gradients import KeptGradients
from .extensions.lbfgs import EvaluatedWindows
from .extensions.loop_warnings import LoopWarnings
from .extensions.loss_scale import LossScale
from .extensions.losses import Losses
from .extensions.low_parts import LowParts
from .extensions.low_precision import RandomRounding, RunningMeans
from .extensions.main_grad import MainGrads
from .extensions.master_weights import MasterWeights
from .extensions.noise_scale import NoiseScale
from .extensions.nonfinite import Raise, SkipMicroBatch, SkipWindow
from .extensions.norm_spike import NormSpike
from .extensions.shared_backward import SharedBackward
from .extensions.split_masters import SplitMasters
from .extensions.step_again import StepAgain

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .core.config import Settings


def always(settings: Settings, inner: Optimizer) -> bool:
    return True


# When a wrapper of these settings and this inner optimizer has the feature, and what makes it.
FEATURES: list[tuple[Callable[[Settings, Optimizer], bool], type[Extension]]] = [
    (always, ChangingOwners),  # first: others find the parameters that it has taken
    (always, GroupDtypes),  # before all that depends on a buffer's dtype
    (always, DataParallel),
    (always, ChangingParameters),
    (always, InnerGuard),
    (always, SharedBackward),  # gives the micro-batch its weight before others look at it
    (always, Losses),
    (lambda settings, _: settings.noise_scale is not None, NoiseScale),
    (lambda settings, _: settings.nonfinite == "skip_window", SkipWindow),
    (lambda settings, _: settings.nonfinite == "skip_micro_batch", SkipMicroBatch),
    (lambda settings, _: settings.nonfinite == "raise", Raise),
    (lambda settings, _: settings.skip_norm is not None, NormSpike),
    (always, LossScale),  # divides after Losses, and reports over what the three above have
    (low_precision.may_be_narrow, RunningMeans),
    (lambda settings, _: settings.rounding == "stochastic", RandomRounding),
    (lambda settings, _: settings.rounding == "compensated", LowParts),
    (always, BatchNormStats),
    (always, BatchNormsLeftOut),
    (always, InPlaceLayers),
    (lambda settings, _: settings.drop_in, StepAgain),
    (kept_gradients.may_keep, KeptGradients),
    (main_grad.any_enabled, MainGrads),
    (always, FusedOptimizers),
    (lambda settings, _: settings.buffer_device is not None, CpuOffload),
    # Are made where the one above puts their gradients.
    (lambda settings, _: settings.optimizer_device is not None, CpuOptimizer),
    (lambda settings, _: settings.master_weights is True and settings.optimizer_device is None, MasterWeights),
    (lambda settings, _: settings.master_weights == "split", SplitMasters),
    (lambda _, inner: isinstance(inner, LBFGS), EvaluatedWindows),
    (always, LoopWarnings),  # last: where warnings are errors, all others have heard of what it warns of
]


def check(settings: Settings, inner: Optimizer) -> None:
    """Raises as the features do that do not work with these settings, or this optimizer."""
    for on, feature in FEATURES:
        if on(settings, inner):
            feature.refuses(settings, inner)


def extensions_for(settings: Settings, inner: Optimizer) -> Extensions:
    """Those of a wrapper of these settings and this inner optimizer."""
    extensions = Extensions([])
    extend(extensions, settings, inner)
    return extensions


def extend(extensions: Extensions, settings: Settings, inner: Optimizer) -> None:
    """Add those that the wrapper has not yet, but has reason for by now."""
    here = {type(e) for e in extensions.all}
    extensions.add([make() for on, make in FEATURES if make not in here and on(settings, inner)])
