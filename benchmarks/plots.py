"""Plots of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from . import tables
from .harness import GRAPH, HEADLINES, OURS, WITHOUT_EXTENSIONS, Row
from .questions import QUESTIONS
from .style import COLOURS, STYLE, WIDTH, label_ends, titled

# The tables have the other ways too.
ADDING = (OURS, GRAPH, "torch._foreach_add_", "torch.compile of the list")
NOT_OF_WINDOWS = ("add_ per tensor", "cast then add")
HOSTED = (
    OURS,
    WITHOUT_EXTENSIONS,
    "add_ per tensor",
    "torch._foreach_add_",
    "PyTorch's own p.grad, bf16",
    "a hook per parameter, FP32 main_grad",
)


def accumulate(rows: Sequence[Row]) -> Figure:
    """GB/s of the main ways on every set, below the bandwidth that the same race measured."""
    cases = tables.grouped(rows, ("set", "grads", "buffers", "mode", "stats"))
    sets = list(dict.fromkeys(str(r["set"]) for r in rows))
    ways = [way for way in ADDING if any(r["contestant"] == way for r in rows)]
    figure, panels = _panels(len(sets), 1.7 * len(sets) + 1.1, sharey=True)
    for axes, name in zip(panels, sets):
        pairs = [p for p in HEADLINES if (name, *p, "add", False) in cases]
        ticks = []
        for at, pair in enumerate(pairs):
            of_case = cases[(name, *pair, "add", False)]
            for k, way in enumerate(way for way in ways if "gb_per_s" in of_case.get(way, {})):
                axes.bar(at + 0.2 * k - 0.3, of_case[way]["gb_per_s"], width=0.18, color=COLOURS[way])
            ceiling = of_case[OURS]["bandwidth_gb_per_s"]
            axes.hlines(ceiling, at - 0.44, at + 0.44, color="black", lw=1.4, ls=(0, (4, 2)))
            ticks.append(f"{pair[0]}→{pair[1]}\n{of_case[OURS]['speedup']:.1f}×")
        axes.set_xticks(range(len(pairs)), ticks)
        axes.set_title(name)
        axes.set_ylabel("GB/s")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[way]) for way in ways]
    figure.legend(handles, ways, loc="outside lower center", ncols=2)
    speedups = [cases[(name, "bf16", "fp32", "add", False)][OURS]["speedup"] for name in sets]
    subtitle = "×: against the best plain-PyTorch way; dashed: the bandwidth"
    titled(figure, f"bf16 into FP32: {_from_to(speedups)} as fast", subtitle)
    return figure


def pairs(rows: Sequence[Row]) -> Figure:
    """How many times faster we are than the best peer, for every dtype pair, set and mode."""
    cases = tables.grouped(rows, ("set", "mode", "grads", "buffers", "stats"))
    dtypes = ("fp64", "fp32", "bf16", "fp16")
    pairs = [(g, b) for g in dtypes for b in dtypes if any(k[2:4] == (g, b) for k in cases)]
    sets, modes = (list(dict.fromkeys(key[i] for key in cases)) for i in (0, 1))
    figure, panels = plt.subplots(1, len(modes), figsize=(WIDTH, 0.27 * len(pairs) + 2.1), sharey=True)
    known = []
    for axes, mode in zip(panels, modes):
        ours = [[cases.get((name, mode, *pair, False), {}).get(OURS, {}) for name in sets] for pair in pairs]
        values = [[r.get("speedup", float("nan")) for r in line] for line in ours]
        axes.imshow(values, cmap="cividis", norm=LogNorm(0.8, 8), aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                if value == value:
                    known.append(value)
                    text = f"{value:.1f}" if value >= 1.05 else f"{value:.2f}"
                    colour = "black" if value > 2.3 else "white"
                    axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=10)
        axes.set_xticks(range(len(sets)), sets, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(pairs)), [f"{g} → {b}" for g, b in pairs])
        axes.grid(False)
        axes.set_title(mode)
    subtitle = "as the best plain-PyTorch way, by dtypes of gradient and buffer"
    titled(figure, f"Add and overwrite: {_from_to(known)} as fast", subtitle)
    return figure


def window(rows: Sequence[Row]) -> Figure:
    """Milliseconds of a whole window, one panel per set."""
    cases = tables.grouped(rows, ("set", "grads", "buffers"))
    shown = [k for k in cases if k[1:] == ("bf16", "fp32")]
    figure, panels = _panels(len(shown), 2.4 * len(shown) + 0.9)
    for axes, key in zip(panels, shown):
        measured = {name: r for name, r in cases[key].items() if "median_ms" in r and name not in NOT_OF_WINDOWS}
        ordered = sorted(measured, key=lambda n: -measured[n]["median_ms"])
        for y, name in enumerate(ordered):
            r = measured[name]
            axes.barh(y, r["median_ms"], color=COLOURS[name], height=0.72)
            axes.plot([r["p10_ms"], r["p90_ms"]], [y, y], color="black", lw=1)
            axes.text(r["p90_ms"], y, f" {r['median_ms']:.3g}", va="center")
        _named(axes, ordered)
        axes.margins(x=0.15)
        axes.set_title(f"{key[0]}: {measured[OURS]['speedup']:.1f}× as fast as the best")
    panels[-1].set_xlabel("ms, median with p10–p90")
    speedups = [cases[key][OURS]["speedup"] for key in shown]
    subtitle = "bf16 micro-batches into FP32, clipped; against the best of plain PyTorch"
    titled(figure, f"Windows of 8: {_from_to(speedups)} as fast", subtitle)
    return figure


def memory(rows: Sequence[Row]) -> Figure:
    """What the peak of every way consists of, one panel per dtype of the weights."""
    of_weights = {w: [r for r in rows if r["weights"] == w] for w in dict.fromkeys(str(r["weights"]) for r in rows)}
    counts = [len(each) for each in of_weights.values()]
    figure, panels = _panels(len(counts), 0.43 * len(rows) + 2.2, sharex=True, height_ratios=counts)
    parts = {"parameters": 0.25, "sums": 0.55, "gradients and the rest": 1.0}
    for axes, (weights, of_panel) in zip(panels, of_weights.items()):
        for y, r in enumerate(reversed(of_panel)):
            left = 0.0
            for size, alpha in zip(("parameter_bytes", "sum_bytes", "excess_bytes"), parts.values(), strict=True):
                axes.barh(y, r[size] / 2**20, left=left, color=COLOURS[r["contestant"]], alpha=alpha, height=0.72)
                left += r[size] / 2**20
            axes.text(left, y, f" {r['peak_bytes'] / 2**20:.0f}", va="center")
        _named(axes, [str(r["contestant"]) for r in reversed(of_panel)])
        axes.margins(x=0.12)
        axes.set_title(f"{weights} weights")
    panels[-1].set_xlabel("peak, MiB")
    handles = [plt.Rectangle((0, 0), 1, 1, color="black", alpha=alpha) for alpha in parts.values()]
    figure.legend(handles, parts, loc="outside lower center", ncols=3, handlelength=1, columnspacing=1)
    titled(figure, *memory_finding(rows))
    return figure


def memory_finding(rows: Sequence[Row]) -> tuple[str, str]:
    """What the wrapper holds beside parameters and sums, against all gradients, for each dtype."""
    ours = [next(r for r in rows if r["weights"] == weights) for weights in dict.fromkeys(r["weights"] for r in rows)]
    held = [f"{r['excess_bytes'] / 2**20:.0f} MiB ({r['weights']} weights)" for r in ours]
    shares = [f"{r['excess_bytes'] / r['parameter_bytes']:.0%}" for r in ours]
    return f"Beyond parameters and sums: {' and '.join(shares)}", f"of all gradients: {' and '.join(held)}"


def overhead(rows: Sequence[Row]) -> Figure:
    """Microseconds per tensor over the number of tensors, for a micro-batch and for one call."""
    titles = {"micro-batch": "a micro-batch through autograd", "call": "one call of the functional layer"}
    figure, panels = _panels(2, 6.4)
    most = max(r["tensors"] for r in rows if r["level"] == "micro-batch")
    us = next(
        r["us_per_tensor"] for r in rows if (r["level"], r["tensors"], r["contestant"]) == ("micro-batch", most, OURS)
    )
    subtitle = f"of {most:,} parameters, autograd's own included"
    titled(figure, f"Host cost: {us:.0f} µs per parameter and micro-batch", subtitle)
    for axes, (level, title) in zip(panels, titles.items()):
        of_level = [r for r in rows if r["level"] == level and r["contestant"] in HOSTED]
        for name in dict.fromkeys(str(r["contestant"]) for r in of_level):
            x, y = zip(*((r["tensors"], r["us_per_tensor"]) for r in of_level if r["contestant"] == name))
            axes.loglog(x, y, "o-", ms=4, color=COLOURS[name], label=name)
        axes.set(title=title, xlabel="tensors", ylabel="µs per tensor")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
        label_ends(axes)
    return figure


def question(name: str, rows: Sequence[Row]) -> Figure:
    """One question's measurements."""
    figure = plt.figure()
    titled(figure, QUESTIONS[name].title(rows), QUESTIONS[name].SUBTITLE)
    QUESTIONS[name].draw(rows, figure)
    return figure


Plot = Callable[[Sequence[Row]], Figure]
PLOTS: dict[str, tuple[tuple[str, Plot], ...]] = {
    "accumulate": (("accumulate", accumulate), ("accumulate_pairs", pairs)),
    "window": (("window", window),),
    "memory": (("memory", memory),),
    "overhead": (("overhead", overhead),),
}


def draw(benchmark: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw a benchmark's plots into ``folder``; returns their paths."""
    if benchmark == "questions":
        found = tables.by_question(rows)
        return [_saved(partial(question, name), found[name], folder / f"questions-{name}.svg") for name in found]
    return [_saved(plot, rows, folder / f"{name}.svg") for name, plot in PLOTS.get(benchmark, ())]


def _saved(plot: Plot, rows: Sequence[Row], path: Path) -> Path:
    with plt.rc_context(STYLE):
        figure = plot(rows)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    return path


def _panels(number: int, height: float, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """Panels one above the other: on a narrow page each is as wide as the page."""
    figure, panels = plt.subplots(number, 1, figsize=(WIDTH, height), squeeze=False, **options)
    return figure, panels[:, 0]


def _named(axes: Axes, names: Sequence[str]) -> None:
    """Name horizontal bars; figures stand at their ends, where a grid would cross them."""
    axes.set_yticks(range(len(names)), [name.replace(", ", ",\n") if len(name) > 24 else name for name in names])
    axes.grid(False)


def _from_to(times: Sequence[float]) -> str:
    return f"{min(times):.1f}× to {max(times):.1f}×"
