"""Windows that change length, for ``accum_steps=``, and the learning rate of a larger batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from .core.window import checked_steps
from .last_window import LastWindow
from .scalars import checked_count, is_number

Steps = Callable[[int], int]


def piecewise(steps: Mapping[int, int]) -> Steps:
    """``piecewise({0: 4, 1000: 8})``: 4 micro-batches per window, and 8 from window 1000 on.

    Raises:
        TypeError, ValueError: not a dict, no entry for window 0, or an entry that is not a window
            and a count of micro-batches.
    """
    if not isinstance(steps, Mapping):
        raise TypeError(
            "steps must be a dict of windows and micro-batches, such as {0: 4, 1000: 8}, got a "
            f"{type(steps).__name__}"
        )
    if 0 not in steps:
        raise ValueError(f"steps must say what window 0 holds, got {dict(steps)!r}; begin with {{0: 1, ...}}")
    for window, count in steps.items():
        if isinstance(window, bool) or not isinstance(window, int) or window < 0:
            raise ValueError(f"steps must map windows, counted from 0, to micro-batches, got the window {window!r}")
        checked_steps(count, f"steps[{window}]")
    return functools.partial(_piecewise, dict(sorted(steps.items())))


def _piecewise(steps: dict[int, int], index: int) -> int:
    return next(count for window, count in reversed(steps.items()) if window <= index)


def linear(start: int, end: int, windows: int) -> Steps:
    """From ``start`` micro-batches per window to ``end``, in equal steps over ``windows`` windows.

    It is ``end`` from window ``windows`` on. Window i holds
    ``round(start + (end - start) * min(i / windows, 1))``: the ramp of GPT-3 (Brown et al., 2020,
    section 2.3), there in samples. Raises as :func:`geometric`.
    """
    return functools.partial(_linear, *_ramp(start, end, windows))


def _linear(start: int, end: int, windows: int, index: int) -> int:
    return round(start + (end - start) * min(index / windows, 1.0))


def geometric(start: int, end: int, windows: int) -> Steps:
    """From ``start`` micro-batches per window to ``end`` by equal factors over ``windows`` windows.

    It is ``end`` from window ``windows`` on. Window i holds
    ``round(start * (end / start) ** min(i / windows, 1))``.

    Raises:
        TypeError, ValueError: an argument that is not an int of at least 1.
    """
    return functools.partial(_geometric, *_ramp(start, end, windows))


def _geometric(start: int, end: int, windows: int, index: int) -> int:
    return round(start * (end / start) ** min(index / windows, 1.0))


def _ramp(start: int, end: int, windows: int) -> tuple[int, int, int]:
    return checked_steps(start, "start"), checked_steps(end, "end"), checked_count(windows, "windows")


class noise_scale:  # named as the functions beside it
    """Windows as long as a batch still pays off, by the gradient noise scale.

    ``accum_steps=noise_scale(start=4, at_most=64), noise_scale=0.95``: every ``every`` windows, the
    next ones hold ``fraction`` of ``last_window.noise_scale``, in micro-batches that weigh what the
    last window's did, on all ranks together. At a batch of the noise scale, training takes twice
    the steps of a far larger batch, and twice the samples of a far smaller one (McCandlish et al.,
    2018, equation 2.11).

    Args:
        start: micro-batches per window until the noise scale is known.
        at_most, at_least: bounds. With at_least=1 a window may shrink to one micro-batch, which
            measures no noise, so it stays at one.
        every: windows between two checks. Each check waits for the device.
        fraction: of the noise scale.
        growth: the largest factor by which one check changes the length (one micro-batch is
            always allowed).

    Attributes:
        steps: micro-batches of the next window, on each rank.

    Raises:
        TypeError, ValueError: an invalid argument.
    """

    def __init__(
        self,
        start: int,
        *,
        at_most: int,
        at_least: int = 2,
        every: int = 20,
        fraction: float = 1.0,
        growth: float = 2.0,
    ):
        bounds = {"at_least": at_least, "start": start, "at_most": at_most}
        at_least, start, at_most = (checked_steps(value, name) for name, value in bounds.items())
        if not at_least <= start <= at_most:
            raise ValueError(f"at_least <= start <= at_most does not hold for {bounds}")
        for name, value in (("fraction", fraction), ("growth", growth)):
            if not is_number(value):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(fraction) and fraction > 0):
            raise ValueError(
                f"fraction must be greater than 0, got {fraction!r}; 1.0 makes windows as large as the noise scale"
            )
        if not growth > 1:
            raise ValueError(f"growth must be greater than 1, got {growth!r}; 2.0 doubles or halves a window at most")
        self.steps = start
        self._bounds = at_least, at_most
        self._every = checked_count(every, "every", "; it counts windows")
        self._fraction, self._growth = fraction, growth
        self._seen = 0

    def __call__(self, index: int) -> int:
        return self.steps

    def window_closed(self, window: LastWindow, ranks: int) -> None:
        """Called by the wrapper with every window that has closed, shared by ``ranks`` ranks."""
        self._seen += 1
        if self._seen % self._every or window.noise_scale is None or not window.micro_batches:
            return
        each = float(window.weight) * ranks / window.micro_batches
        wanted = self._fraction * float(window.noise_scale) / each if each else math.nan
        if not math.isnan(wanted):
            least, most = self._bounds
            shorter, longer = self.steps / self._growth, self.steps * self._growth
            wanted = min(max(wanted, min(shorter, self.steps - 1)), max(longer, self.steps + 1))
            self.steps = round(min(max(wanted, least), most))

    def state_dict(self) -> dict[str, Any]:
        """What ``opt.state_dict()`` keeps of this schedule."""
        return {"steps": self.steps, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        least, most = self._bounds  # which may be others now
        self.steps, self._seen = min(max(state["steps"], least), most), state["seen"]


def scaled_lr(lr: float, *, batch: float, base_batch: float, rule: str) -> float:
    """The learning rate for batches of ``batch``, given an ``lr`` that suits ``base_batch``.

    Both are in samples, or both in tokens. Accumulating does not change a batch: a window of 8
    micro-batches takes the learning rate of the batch that they add up to. Use this for batches
    that become larger or smaller.

    Args:
        rule: ``"linear"``, ``lr * batch / base_batch``, for SGD while batches are small beside the
            noise scale (Goyal et al., 2017, "Accurate, Large Minibatch SGD", with a warmup);
            ``"sqrt"``, ``lr * sqrt(batch / base_batch)``, for Adam and the like (Malladi et al.,
            2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; Krizhevsky,
            2014, for SGD).

    Raises:
        ValueError: another rule; a batch or a learning rate that is not greater than 0. TypeError:
            one that is not a number.
    """
    powers = {"linear": 1.0, "sqrt": 0.5}
    if rule not in list(powers):
        raise ValueError(f"rule must be one of {', '.join(map(repr, powers))}, got {rule!r}")
    for name, value in (("lr", lr), ("batch", batch), ("base_batch", base_batch)):
        if not is_number(value):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and greater than 0, got {value!r}")
    return lr * (batch / base_batch) ** powers[rule]
