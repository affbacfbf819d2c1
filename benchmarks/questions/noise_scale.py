"""How long should a window be?

The noise scale that windows measure, against the covariance of single samples' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import fusedaccum as fa
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from .. import digits
from ..harness import OURS, Row
from ..style import BLUE, GREY, NAVY

SUBTITLE = "while a small network is trained"
WINDOWS = 200  # averaged over at every point of LOOKS
DIRECT, FIXED = "covariance of single samples", f"fusedaccum, averaged over {WINDOWS} windows at that point"
LOOKS = (0, 5, 20, 60)  # measure after so many windows of training
WINDOW, FIRST = 512, 16  # samples per window, and in the first of its two micro-batches


def measure(quick: bool) -> list[Row]:
    """Train; at every point of ``LOOKS`` measure the noise scale both ways, the model unchanged."""
    x, y = digits.samples(200 if quick else 1797)
    model = digits.model()
    opt = _wrapped(model, lr=0.05, decay=0.95)
    rows: list[Row] = []
    for trained in range(3 if quick else LOOKS[-1] + 1):
        if trained in LOOKS:
            known = {DIRECT: direct(model, x, y), FIXED: _at(model, x, y, 2 if quick else WINDOWS)}
            rows += [{"contestant": way, "trained": trained, "noise_scale": value} for way, value in known.items()]
        _window(opt, model, x, y, trained)
        running = opt.last_window.noise_scale.item()
        rows.append({"contestant": OURS, "trained": trained + 1, "noise_scale": running})
    return rows


def finding(rows: Sequence[Row]) -> str:
    """How far apart the two are at the same points, and how the noise scale changes."""
    exact = _points(rows, DIRECT)
    first, last = min(exact), max(exact)
    return (
        f"The noise scale estimated from norms of windows is within {_apart(rows):.0%} of the one from single samples. "
        f"In {last} windows, the batch that still pays off goes from {exact[first]:.0f} to {exact[last]:.0f} samples."
    )


def title(rows: Sequence[Row]) -> str:
    """How far apart the two are at the same points."""
    return f"The noise scale: within {_apart(rows):.0%} of its definition"


def draw(rows: Sequence[Row], figure: Figure) -> None:
    """The noise scale over training: the running average as a line, the others as points."""
    figure.set_figheight(4.6)
    axes = figure.subplots()
    for way, style in {
        OURS: {"color": BLUE, "label": "fusedaccum while training, noise_scale=0.95"},
        DIRECT: {"color": GREY, "marker": "o", "ms": 13, "ls": "", "mfc": "none", "mew": 2, "label": DIRECT},
        FIXED: {"color": NAVY, "marker": "x", "ms": 8, "ls": "", "mew": 2, "label": FIXED},
    }.items():
        axes.plot(*zip(*_points(rows, way).items()), **style)
    axes.set(xlabel="windows trained", ylabel="noise scale, samples", ylim=(0, None))
    figure.legend(loc="outside lower center")


def _points(rows: Sequence[Row], way: str) -> dict[int, float]:
    return {r["trained"]: r["noise_scale"] for r in rows if r["contestant"] == way}


def _apart(rows: Sequence[Row]) -> float:
    exact, measured = _points(rows, DIRECT), _points(rows, FIXED)
    return max(abs(measured[at] / exact[at] - 1) for at in exact)


def direct(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """``tr(Sigma) / |G|^2`` over these samples, as it is defined."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, parameters, x[None]), y[None])

    each = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0), chunk_size=300)(parameters, x, y)
    trace = sum(g.double().var(0, correction=0).sum() for g in each.values())
    return (trace / sum(g.double().mean(0).square().sum() for g in each.values())).item()


def _at(model: nn.Module, x: Tensor, y: Tensor, windows: int) -> float:
    """The wrapper's estimate while nothing changes; on a copy, as a parameter has one wrapper."""
    twin = digits.model()
    twin.load_state_dict(model.state_dict())
    opt = _wrapped(twin, lr=0.0, decay=1 - 1e-6)  # all windows count alike
    for i in range(windows):
        _window(opt, twin, x, y, 1000 + i)
    return opt.last_window.noise_scale.item()


def _wrapped(model: nn.Module, lr: float, decay: float) -> fa.AccumulatingOptimizer:
    return fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=lr), noise_scale=decay)


def _window(opt: fa.AccumulatingOptimizer, model: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
    """One window of samples drawn independently, as the formula assumes."""
    drawn = torch.randint(len(x), (WINDOW,), generator=torch.Generator().manual_seed(seed))
    for i in drawn.split([FIRST, WINDOW - FIRST]):
        opt.backward(digits.loss(model, x[i], y[i]), weight=len(i))
    opt.step()
