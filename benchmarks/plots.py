"""Plots of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from . import tables
from .harness import HEADLINES, OURS, Row
from .questions import QUESTIONS
from .style import BLUE, COLOURS, STYLE


def accumulate(rows: Sequence[Row]) -> Figure:
    """GB/s of every way on every set, below the bandwidth that the same race measured."""
    cases = tables.grouped(rows, ("set", "grads", "buffers", "mode", "stats"))
    sets = list(dict.fromkeys(str(r["set"]) for r in rows))
    shown = [r for r in rows if r["kind"] != "bandwidth" and r["mode"] == "add" and not r["stats"]]
    ways = list(dict.fromkeys(str(r["contestant"]) for r in shown))
    figure, panels = plt.subplots(
        1, len(sets), figsize=(3.3 * len(sets) + 0.6, 4.1), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, name in zip(panels[0], sets):
        pairs = [p for p in HEADLINES if (name, *p, "add", False) in cases]
        for at, pair in enumerate(pairs):
            of_case = cases[(name, *pair, "add", False)]
            _bars(axes, at, [(COLOURS[w], of_case[w]["gb_per_s"]) for w in ways if "gb_per_s" in of_case.get(w, {})])
            ceiling = of_case[OURS]["bandwidth_gb_per_s"]
            axes.hlines(ceiling, at - 0.44, at + 0.44, color="black", lw=1.4, ls=(0, (4, 2)))
            axes.text(
                at - 0.4,
                of_case[OURS]["gb_per_s"],
                f" {of_case[OURS]['speedup']:.1f}×",
                va="bottom",
                ha="left",
                color=BLUE,
            )
        axes.set_xticks(range(len(pairs)), [f"{g}\n→ {b}" for g, b in pairs])
        axes.set_title(name)
    panels[0][0].set_ylabel("useful bytes moved, GB/s")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[w]) for w in ways]
    handles.append(plt.Line2D([], [], color="black", lw=1.4, ls=(0, (4, 2))))
    labels = [*ways, "bandwidth measured in the same race"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    headline = next((cases[k] for k in cases if k[1:] == ("bf16", "fp32", "add", False)), None)
    if headline:
        ours = headline[OURS]
        figure.suptitle(
            f"bf16 gradients into FP32 sums: {ours['speedup']:.1f}× the best plain-PyTorch way on {sets[0]}, "
            f"{ours['share_of_bandwidth']:.0%} of the memory bandwidth"
        )
    return figure


def pairs(rows: Sequence[Row]) -> Figure:
    """How many times faster we are than the best peer, for every dtype pair, set and mode."""
    cases = tables.grouped(rows, ("set", "mode", "grads", "buffers", "stats"))
    dtypes = ("fp64", "fp32", "bf16", "fp16")
    columns = [(g, b) for g in dtypes for b in dtypes if any(k[2:4] == (g, b) for k in cases)]
    lines = list(dict.fromkeys(k[:2] for k in cases))
    values = [
        [cases.get((*line, *c, False), {}).get(OURS, {}).get("speedup", float("nan")) for c in columns]
        for line in lines
    ]
    figure, axes = plt.subplots(figsize=(0.62 * len(columns) + 3, 0.42 * len(lines) + 1.9), layout="constrained")
    axes.imshow(values, cmap="cividis", norm=LogNorm(0.8, 8), aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value == value:
                axes.text(
                    x,
                    y,
                    f"{value:.1f}" if value >= 1.05 else f"{value:.2f}",
                    ha="center",
                    va="center",
                    color="black" if value > 2.3 else "white",
                    fontsize=8.5,
                )
    axes.set_xticks(range(len(columns)), [f"{g}\n→ {b}" for g, b in columns], fontsize=8)
    axes.set_yticks(range(len(lines)), [f"{name}, {mode}" for name, mode in lines])
    axes.grid(False)
    known = [v for line in values for v in line if v == v]
    figure.suptitle(f"Times faster than the best plain-PyTorch way: from {min(known):.2f}× to {max(known):.1f}×")
    return figure


def window(rows: Sequence[Row]) -> Figure:
    """Milliseconds of a whole window, one panel per set."""
    cases = tables.grouped(rows, ("set", "grads", "buffers"))
    shown = [k for k in cases if k[1:] == ("bf16", "fp32")]
    figure, panels = plt.subplots(
        1, len(shown), figsize=(4.3 * len(shown) + 1, 3.6), squeeze=False, layout="constrained"
    )
    for axes, key in zip(panels[0], shown):
        measured = {name: r for name, r in cases[key].items() if "median_ms" in r}
        ordered = sorted(measured, key=lambda n: -measured[n]["median_ms"])
        for y, name in enumerate(ordered):
            r = measured[name]
            axes.barh(y, r["median_ms"], color=COLOURS[name], height=0.72)
            axes.plot([r["p10_ms"], r["p90_ms"]], [y, y], color="black", lw=1)
            axes.text(r["p90_ms"], y, f" {r['median_ms']:.0f}", va="center")
        axes.set_yticks(range(len(ordered)), ordered)
        axes.grid(axis="x")
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("ms, median with p10–p90")
        axes.margins(x=0.12)
        axes.set_title(f"{key[0]}: {measured[OURS]['speedup']:.1f}× as fast as the best")
    best = cases[shown[0]][OURS]
    figure.suptitle(
        f"A window of 8 bf16 micro-batches, clipped: {best['speedup']:.1f}× as fast as the best plain-PyTorch way on {shown[0][0]}"
    )
    return figure


def memory(rows: Sequence[Row]) -> Figure:
    """Allocated bytes over two micro-batches and a step, one line per way, above their floors; one panel per dtype of the weights."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    for axes, weights in zip(panels, dict.fromkeys(str(r["weights"]) for r in rows)):
        of_panel = [r for r in rows if r["weights"] == weights]
        for r in of_panel:
            start = next(a for label, a, _ in r["marks"] if label == "micro-batch")
            end = next(b for label, _, b in r["marks"] if label == "step")
            points = [((s - start) / (end - start), b / 2**20) for s, b in r["timeline"] if start <= s <= end]
            name = str(r["contestant"])
            label = f"{name}: peak {r['peak_bytes'] / 2**20:.0f} MiB"
            width = 2 if r is of_panel[0] else 1.2
            axes.plot(*zip(*points), drawstyle="steps-post", color=COLOURS[name], lw=width, label=label)
        ours = of_panel[0]
        floor = ours["parameter_bytes"] / 2**20
        total = floor + ours["sum_bytes"] / 2**20
        for level, text in ((floor, f"parameters ({weights})"), (total, "parameters + FP32 sums")):
            axes.axhline(level, color="black", lw=0.9, ls=":")
            axes.text(0.005, level, text, ha="left", va="bottom", fontsize=8.5)
        axes.set_ylim(0)
        axes.set_xlim(0, 1)
        axes.set_xticks([])
        axes.set_xlabel("two micro-batches, then the step; each run scaled to the same width")
        axes.legend(loc="lower right", frameon=True, framealpha=0.95, fontsize=8)
    panels[0].set_ylabel("allocated, MiB")
    figure.suptitle(memory_finding(rows))
    return figure


def memory_finding(rows: Sequence[Row]) -> str:
    """What the wrapper holds beside parameters and sums, against all gradients of a micro-batch, for each dtype of the weights."""
    ours = [next(r for r in rows if r["weights"] == weights) for weights in dict.fromkeys(r["weights"] for r in rows)]
    held = [f"{r['excess_bytes'] / 2**20:.0f} MiB with {r['weights']} weights" for r in ours]
    shares = [f"{r['excess_bytes'] / r['parameter_bytes']:.0%}" for r in ours]
    return (
        f"Beyond parameters and sums, fusedaccum holds {' and '.join(held)}:\n{' and '.join(shares)} of all gradients"
    )


def overhead(rows: Sequence[Row]) -> Figure:
    """Microseconds per tensor over the number of tensors, for a micro-batch and for one call."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    titles = {"micro-batch": "a micro-batch through autograd", "call": "one call of the functional layer"}
    for axes, (level, title) in zip(panels, titles.items()):
        of_level = [r for r in rows if r["level"] == level]
        for name in dict.fromkeys(str(r["contestant"]) for r in of_level):
            mine = [r for r in of_level if r["contestant"] == name]
            axes.loglog(
                [r["tensors"] for r in mine], [r["us_per_tensor"] for r in mine], "o-", color=COLOURS[name], label=name
            )
        axes.set_title(title)
        axes.set_xlabel("tensors")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.legend(frameon=False, fontsize=8.5)
    panels[0].set_ylabel("µs per tensor")
    most = max(r["tensors"] for r in rows if r["level"] == "micro-batch")
    us = next(
        r["us_per_tensor"] for r in rows if (r["level"], r["tensors"], r["contestant"]) == ("micro-batch", most, OURS)
    )
    figure.suptitle(f"The wrapper's host cost: {us:.0f} µs per parameter and micro-batch, autograd's own included")
    return figure


def question(name: str, rows: Sequence[Row]) -> Figure:
    """One question's measurements."""
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    QUESTIONS[name].draw(rows, axes)
    figure.suptitle(QUESTIONS[name].TITLE)
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


def _bars(axes: Axes, at: float, bars: Sequence[tuple[str, float]]) -> None:
    width = 0.84 / len(bars)
    for k, (colour, height) in enumerate(bars):
        axes.bar(at - 0.42 + (k + 0.5) * width, height, width=0.92 * width, color=colour)
