"""Tables of a benchmark's rows, for the terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .harness import BARE, GRAPH, HEADLINES, HOOKS_ALONE, OURS, PYTHON_HOOKS, PYTHON_HOOKS_ALONE, TRITON, Row
from .questions import QUESTIONS

Table = tuple[list[str], list[list[str]]]
# Marks of a share of the bandwidth, and what they say below the table.
ABOVE, SLOWER = "†", "‡"
FOOTNOTES = {
    ABOVE: "Faster than the memory streams that took turns with it, which measure the bandwidth from below.",
    SLOWER: "The memory streams of this case were more than 15% slower than those of another one with the same mix of "
    "reads and writes: the machine was slower then. The ratios hold, because all ways of a case take turns; "
    "milliseconds and GB/s do not compare with other rows.",
}
# The ways to sum a bf16 model's gradients, as the tables of whole steps name them.
SUMS = {
    "plain `p.grad`, in bf16": "p.grad in bf16",
    "FP32 sums by hand": "add after backward",
    "**fusedaccum**": OURS,
}


def text(table: Table) -> str:
    """Columns padded with blanks; the first left-aligned, the others right-aligned."""
    header, lines = table
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]

    def padded(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:], widths[1:])]
        return "  ".join(cells).rstrip()

    return "\n".join([padded(header), "  ".join("-" * w for w in widths), *map(padded, lines), *_footnotes(table)])


def markdown(table: Table, of_words: bool = False) -> str:
    """A GitHub table: of figures, aligned as in :func:`text`, or ``of_words``, to the left."""
    header, lines = table
    rule = ["---"] + ["---" if of_words else "---:"] * (len(header) - 1)
    rows = "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])
    escaped = rows if of_words else rows.replace("_", r"\_")  # Markdown takes the underscores of names for emphasis
    return "\n\n".join([escaped, *_footnotes(table)])


def _footnotes(table: Table) -> list[str]:
    """What the marks in the table say."""
    return [
        f"{mark} {note}" for mark, note in FOOTNOTES.items() if any(mark in cell for line in table[1] for cell in line)
    ]


def accumulate(rows: Sequence[Row]) -> Table:
    """One line per case without a norm: our time and bandwidth, how many times slower peers were.

    "At the bandwidth" is how many times faster than the best peer a way would be if it reached the
    bandwidth of the same run: the most that can be asked for there.
    """
    rows = [r for r in rows if not r["stats"]]
    cases = grouped(rows, ("set", "grads", "buffers", "mode"))
    peers = _names(rows, "peer") + _names(rows, "variant")
    header = [
        "case",
        "ms (p10–p90)",
        "GB/s",
        "of bandwidth",
        "vs best",
        "at the bandwidth",
        *(f"vs {p}" for p in peers),
    ]
    fastest = _fastest(rows)
    lines = []
    for (name, grads, buffers, mode), of_case in cases.items():
        ours = of_case[OURS]
        ceiling = f"{ours['speedup'] / ours['share_of_bandwidth']:.2f}×" if "share_of_bandwidth" in ours else "–"
        against = [_against(of_case.get(p)) for p in peers]
        label = f"{name} {grads}→{buffers} {mode}"
        lines.append([label, *_measured(ours, fastest), f"{ours['speedup']:.2f}×", ceiling, *against])
    return header, lines


def stats_cost(rows: Sequence[Row]) -> Table:
    """An accumulation with the norm and the finite check, and without them, in the same race.

    And how the former compares with the best peer that measures a norm.
    """
    lines = []
    cases = grouped([r for r in rows if r["stats"]], ("set", "grads", "buffers"))
    for (name, grads, buffers), of_case in cases.items():
        ours, without = of_case[OURS], of_case["fusedaccum without stats"]
        cost = f"{_cost_of_stats(of_case):+.1%}"
        times = [_milliseconds(r, digits=2) for r in (ours, without)]
        lines.append([f"{name} {grads}→{buffers}", *times, cost, f"{ours['speedup']:.2f}×", str(ours["best_peer"])])
    header = [
        "set and dtypes",
        "ms with the norm",
        "ms without",
        "the norm costs",
        "vs best way with a norm",
        "the best way",
    ]
    return header, lines


def window(rows: Sequence[Row]) -> Table:
    """One line per set and dtype pair: whole windows of every contestant."""
    cases = grouped(rows, ("set", "grads", "buffers"))
    others = _names(rows, "variant") + _names(rows, "peer")
    header = ["window of 8", "fusedaccum ms (p10–p90)", "GB/s", "of bandwidth", "vs best", *others]
    fastest = _fastest(rows)
    lines = []
    for (name, grads, buffers), of_case in cases.items():
        ours = of_case[OURS]
        times = [_milliseconds(of_case.get(o)) for o in others]
        lines.append([f"{name} {grads}→{buffers}", *_measured(ours, fastest), f"{ours['speedup']:.2f}×", *times])
    return header, lines


def parts(rows: Sequence[Row]) -> Table:
    """One line per set and call: sums of 24 bits beside FP32 ones."""
    lines = []
    for (name, case), of_case in grouped(rows, ("set", "case")).items():
        ours = of_case[OURS]
        (wide,) = (r for r in of_case.values() if r["kind"] == "variant")
        share = f"{ours['share_of_bandwidth']:.0%}"
        lines.append(
            [f"{name} {case}", _spread(ours), f"{ours['gb_per_s']:.1f}", share, _milliseconds(wide), _against(wide)]
        )
    return ["sums of 24 bits", "ms (p10–p90)", "GB/s", "of bandwidth", "FP32 sums, ms", "vs FP32"], lines


def cpu_optimizer(rows: Sequence[Row]) -> Table:
    """One line per set: a window's end beside the longest of its floors, and beside other ways."""
    others = _names(rows, "variant") + _names(rows, "floor")
    lines = []
    for (name,), of_case in grouped(rows, ("set",)).items():
        ours = of_case[OURS]
        floor = max(r["median_ms"] for r in of_case.values() if r["kind"] == "floor")
        times = [_milliseconds(of_case.get(o)) for o in others]
        lines.append([name, _spread(ours), f"{ours['median_ms'] / floor:.2f}×", *times])
    return ["a window's end, ms", "fusedaccum (p10–p90)", "of the floor", *others], lines


def training(rows: Sequence[Row]) -> Table:
    """One line per set and dtype pair: windows through autograd, of every contestant."""
    others = _names(rows, "peer") + _names(rows, "variant")
    lines = []
    for (name, grads, buffers), of_case in grouped(rows, ("set", "grads", "buffers")).items():
        ours = of_case[OURS]
        times = [_milliseconds(of_case.get(o)) for o in others]
        lines.append([f"{name} {grads}→{buffers}", _spread(ours), f"{ours['speedup']:.2f}×", *times])
    return ["window of 8 through autograd", "fusedaccum ms (p10–p90)", "vs best", *others], lines


def ranks(rows: Sequence[Row]) -> Table:
    """One line per set: windows over several ranks, of every contestant."""
    others = _names(rows, "variant") + _names(rows, "peer")
    lines = []
    for (name, number), of_case in grouped(rows, ("set", "ranks")).items():
        ours = of_case[OURS]
        if "median_ms" in ours:
            times = [_milliseconds(of_case.get(o)) for o in others]
            lines.append([f"{name}, {number} ranks", _spread(ours), f"{ours['speedup']:.2f}×", *times])
    return ["window of 8 on every rank", "fusedaccum ms (p10–p90)", "vs best", *others], lines


def step(rows: Sequence[Row]) -> Table:
    """One line per model and way: a window of training, and the share of accumulation in it."""
    lines = []
    for r in rows:
        model = f"{r['set']}, {r['micro_batches']} × {r['tokens']} tokens"
        share = r["accumulation_share"]
        lines.append([f"{model}: {r['contestant']}", _spread(r), "–" if share is None else f"{share:.1%}"])
    return ["window", "ms (p10–p90)", "accumulation"], lines


def pairs(rows: Sequence[Row]) -> Table:
    """One line per model and way to run it: a window of training beside the best plain way's."""
    lines = []
    for of_case in grouped(rows, ("set", "sequences", "length", "how")).values():
        ours = of_case[OURS]
        best = of_case[ours["best_peer"]]
        faster = f"{ours['speedup']:.3f}× ({ours['speedup_low']:.3f}–{ours['speedup_high']:.3f})"
        lines.append([_pair(ours), _spread(ours), str(ours["best_peer"]), _spread(best), faster])
    header = ["window of 8", "fusedaccum ms (p10–p90)", "best plain way", "its ms (p10–p90)"]
    return [*header, "as fast (95% of the median)"], lines


def profiles(rows: Sequence[Row]) -> list[Table]:
    """Where the time of a window goes that is slower than the best plain way's."""
    found = [r for r in rows if "profile" in r]
    return [
        (
            [_pair(r), "fusedaccum ms", f"{r['best_peer']} ms"],
            [[name, f"{a:.2f}", f"{b:.2f}"] for name, a, b in r["profile"]],
        )
        for r in found
    ]


def _pair(row: Row) -> str:
    return f"{row['set']}, {row['sequences']} × {row['length']:,} tokens, {row['how']}"


def fused(rows: Sequence[Row]) -> Table:
    """One line per layer: a micro-batch's time for all contestants, and how much faster ours is."""
    others = _names(rows, "peer") + _names(rows, "variant")
    lines = []
    for (layer, n, columns, dtype, tokens), of_case in grouped(
        rows, ("layer", "rows", "columns", "dtype", "tokens")
    ).items():
        times = [f"{_milliseconds(of_case[o])} ({_against(of_case[o])})" for o in others]
        name = f"{layer} {n:,} × {columns:,}, {dtype}, {tokens:,} tokens"
        lines.append([name, _spread(of_case[OURS]), *times])
    return ["a micro-batch of one layer", "fused ms (p10–p90)", *others], lines


def overhead(rows: Sequence[Row]) -> Table:
    """Microseconds per tensor of every contestant, by number of tensors.

    And what C++ hooks add to a backward, as a share of what Python hooks add: for hooks and queue
    alone, and for the whole wrapper.
    """
    contestants = list(dict.fromkeys(str(r["contestant"]) for r in rows))
    pairs = {
        "hooks and queue, C++ / Python": (HOOKS_ALONE, PYTHON_HOOKS_ALONE),
        "whole wrapper, C++ / Python": (OURS, PYTHON_HOOKS),
    }
    lines = []
    for (level, tensors), of_case in grouped(rows, ("level", "tensors")).items():
        times = [f"{of_case[c]['us_per_tensor']:.2f}" if c in of_case else "–" for c in contestants]
        shares = [
            f"{_above_bare(of_case, native) / _above_bare(of_case, python):.0%}" if BARE in of_case else "–"
            for native, python in pairs.values()
        ]
        lines.append([f"{level}, {tensors:,} tensor{'s' if tensors > 1 else ''}", *times, *shares])
    return ["µs per tensor", *contestants, *pairs], lines


def _above_bare(of_case: dict[str, Row], contestant: str) -> float:
    return of_case[contestant]["us_per_tensor"] - of_case[BARE]["us_per_tensor"]


def buckets(rows: Sequence[Row]) -> Table:
    """One line per model and way of ours: process time against its peer's, page faults of both."""
    lines = []
    for r in (r for r in rows if "against" in r):
        same = ("set", "weights", "with_threads")
        (peer,) = (p for p in rows if p["contestant"] == r["against"] and all(p[k] == r[k] for k in same))
        threads = f"{r['with_threads']} thread{'s' if r['with_threads'] > 1 else ''}"
        lines.append(
            [
                f"{r['set']} {r['weights']}, {threads}: {r['contestant']}",
                f"{r['largest_gradient_bytes'] / 2**20:.1f} of {r['gradient_bytes'] / 2**20:.1f}",
                f"{r['median_ms']:.1f} ({r['p10_ms']:.1f}–{r['p90_ms']:.1f})",
                str(r["against"]),
                f"{r['takes']:.2f}× ({r['takes_p10']:.2f}–{r['takes_p90']:.2f})",
                f"{r['least_takes']:.2f}×",
                f"{r['faults']:,.0f} / {peer['faults']:,.0f}",
            ]
        )
    header = ["window of 8, step included", "largest gradient of all, MiB", "process ms (p10–p90)", "against"]
    return [*header, "takes (p10–p90)", "at their least", "page faults / its"], lines


def memory(rows: Sequence[Row]) -> Table:
    """Peaks in MiB, and what they consist of."""
    lines = []
    for r in rows:
        columns = ("parameter_bytes", "sum_bytes", "excess_bytes", "peak_bytes")
        lines.append([f"{r['weights']} weights: {r['contestant']}", *(f"{r[c] / 2**20:.1f}" for c in columns)])
    return ["way", "parameters MiB", "sums MiB", "gradients and the rest MiB", "peak MiB"], lines


def states(rows: Sequence[Row]) -> Table:
    """Peaks with AdamW, and what was predicted."""
    lines = []
    for r in rows:
        peak, predicted = r["peak_bytes"], r["predicted_bytes"]
        sizes = [f"{peak / r['elements']:.1f}", *(f"{n / 2**20:,.0f}" for n in (peak, predicted))]
        lines.append([str(r["contestant"]), *sizes, f"{predicted / peak:.3f}"])
    return ["AdamW, bf16 weights", "bytes a parameter", "peak MiB", "fa.explain MiB", "fa.explain / peak"], lines


def explain(rows: Sequence[Row]) -> Table:
    """Predicted and measured time of a window's accumulation, and their ratio within a round."""
    lines = []
    for r in rows:
        ratio = f"{r['said_of_measured']:.2f} ({r['p10']:.2f}–{r['p90']:.2f})"
        lines.append(
            [f"{r['set']} {r['weights']}: {r['contestant']}", f"{r['said_ms']:.1f}", f"{r['median_ms']:.1f}", ratio]
        )
    return ["window of 8", "predicted ms", "measured ms", "predicted / measured (p10–p90)"], lines


def questions(rows: Sequence[Row]) -> Table:
    """One line per question: the finding."""
    found = by_question(rows)
    return ["question", "found"], [[name.replace("_", " "), QUESTIONS[name].finding(found[name])] for name in found]


def by_question(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows, grouped by question."""
    groups: dict[str, list[Row]] = {}
    for r in rows:
        groups.setdefault(str(r["question"]), []).append(r)
    return groups


def headline(on_cpu: Sequence[Row], on_gpu: Sequence[Row], memory: Sequence[Row]) -> Table:
    """README's table: step times and peak memory of the ways to sum a bf16 model's gradients."""
    columns = {}
    for place, rows in (("CPU", on_cpu), ("GPU", on_gpu)):
        for name in dict.fromkeys(str(r["set"]) for r in rows):
            window, of_case = next(iter(_windows(place, [r for r in rows if r["set"] == name]).items()))
            columns[f"{window}, ms"] = {k: f"{r['median_ms']:,.0f}" for k, r in of_case.items()}
    columns["peak of GPT-2's blocks, MiB"] = {
        str(r["contestant"]): f"{r['peak_bytes'] / 2**20:,.0f}" for r in memory if r["weights"] == "bf16"
    }
    lines = [[label, *(cells.get(way, "–") for cells in columns.values())] for label, way in SUMS.items()]
    return ["sums of a window", *columns], lines


def steps(on_cpu: Sequence[Row], on_gpu: Sequence[Row]) -> Table:
    """Milliseconds of windows, for the ways to sum a bf16 model's gradients, and for no sums."""
    columns = _windows("CPU", on_cpu) | _windows("GPU", on_gpu)
    ways = {"forward and backward alone": "forward and backward alone"} | SUMS
    lines = [
        [label, *(_spread(of_case[way]) if way in of_case else "–" for of_case in columns.values())]
        for label, way in ways.items()
    ]
    return ["ms of a window (p10–p90)", *columns], lines


def _windows(place: str, rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """The rows of whole steps, by window and contestant."""
    cases = grouped(rows, ("set", "micro_batches", "tokens")).items()
    return {f"{name} on a {place}, {n} × {tokens:,} tokens": of_case for (name, n, tokens), of_case in cases}


def summary(rows: Sequence[Row]) -> Table:
    """The short table of adds, or of windows.

    How many times as fast as the best eager way, and as torch.compile where that ran.
    """
    shown = [
        r
        for r in rows
        if (r["grads"], r["buffers"]) in HEADLINES and r.get("mode", "add") == "add" and not r.get("stats")
    ]
    fastest = _fastest(shown)
    lines = []
    for (name, grads, buffers), of_case in grouped(shown, ("set", "grads", "buffers")).items():
        ms, _, share = _measured(of_case[OURS], fastest)
        lines.append([f"{name} {grads}→{buffers}", ms, share, *_eager_and_compiled(of_case)])
    return ["parameters, gradient→buffer", "ms (p10–p90)", "of bandwidth", "vs eager", "vs torch.compile"], lines


# What the CUDA kernels were to reach, set before there was a GPU to measure them on.
GOALS = {
    "add, of the bandwidth (from a graph)": "85%; 95% on llama3-8b",
    "overwrite, of the bandwidth (from a graph)": "92%",
    "speed-up over the best eager way (torch.compile)": "2×; 8× on 2000x64x64",
    "norm and finite check, longer than without": "3%",
    "window of 8, longer than 76 bytes per element": "5%",
    "Triton, longer than CUDA": "5%",
}


def goals(accumulated: Sequence[Row], windows: Sequence[Row]) -> Table:
    """The goals for bf16→fp32 on a GPU, and what was measured on each set."""
    found = grouped(accumulated, ("set", "grads", "buffers", "mode", "stats"))
    whole = grouped(windows, ("set", "grads", "buffers"))
    header, columns = ["bf16→fp32", "goal"], []
    for name in dict.fromkeys(str(r["set"]) for r in accumulated):
        case = (name, "bf16", "fp32")
        add, overwrite, with_norm = (
            found.get((*case, *how), {}) for how in (("add", False), ("overwrite", False), ("add", True))
        )
        handed_on = whole.get(case, {}).get("fusedaccum, coefficient handed on")
        header.append(name)
        columns.append(
            [
                *(f"{_share(way.get(OURS))} ({_share(way.get(GRAPH))})" for way in (add, overwrite)),
                "{} ({})".format(*_eager_and_compiled(add)).removesuffix(" (–)"),
                f"{_cost_of_stats(with_norm):+.1%}" if with_norm else "–",
                # Its share of bandwidth counts the bytes of a window that has the last pass, too.
                f"{handed_on['bytes_per_element'] / 76 / handed_on['share_of_bandwidth'] - 1:+.0%}"
                if handed_on
                else "–",
                f"{add[TRITON]['ours_is_faster'] - 1:+.0%}" if "ours_is_faster" in add.get(TRITON, {}) else "–",
            ]
        )
    return header, [[*goal, *cells] for goal, *cells in zip(GOALS.items(), *columns, strict=True)]


def grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple, dict[str, Row]]:
    """Rows by the values of ``keys``, then by contestant; bandwidth streams are left out."""
    groups: dict[tuple, dict[str, Row]] = {}
    for r in rows:
        if r["kind"] != "bandwidth":
            groups.setdefault(tuple(r[k] for k in keys), {})[str(r["contestant"])] = r
    return groups


def _names(rows: Iterable[Row], kind: str) -> list[str]:
    return list(dict.fromkeys(str(r["contestant"]) for r in rows if r["kind"] == kind))


def _mix(row: Row) -> tuple:
    """What decides the mix of reads and writes: mode, and a gradient's width in buffer widths."""
    return row.get("mode"), int(row["grads"][2:]) / int(row["buffers"][2:])


def _fastest(rows: Iterable[Row]) -> dict[tuple, float]:
    """The highest bandwidth that any race of the run measured, for each mix of reads and writes."""
    fastest: dict[tuple, float] = {}
    for r in rows:
        if "bandwidth_gb_per_s" in r:
            fastest[_mix(r)] = max(fastest.get(_mix(r), 0.0), r["bandwidth_gb_per_s"])
    return fastest


def _measured(row: Row, fastest: dict[tuple, float]) -> list[str]:
    """Milliseconds, GB/s, and share of bandwidth, marked where it does not mean the usual."""
    marks = ABOVE if row.get("share_of_bandwidth", 0) >= 1.005 else ""
    if row.get("bandwidth_gb_per_s", math.inf) < 0.85 * fastest.get(_mix(row), 0):
        marks += SLOWER
    return [_spread(row), f"{row['gb_per_s']:.1f}", _share(row) + marks]


def _spread(row: Row) -> str:
    digits = 2 if row["median_ms"] < 100 else 0
    return "{:,.{d}f} ({:,.{d}f}–{:,.{d}f})".format(row["median_ms"], row["p10_ms"], row["p90_ms"], d=digits)


def _share(row: Row | None) -> str:
    return f"{row['share_of_bandwidth']:.0%}" if row and "share_of_bandwidth" in row else "–"


def _milliseconds(row: Row | None, digits: int = 1) -> str:
    return f"{row['median_ms']:.{digits}f}" if row and "median_ms" in row else "–"


def _against(row: Row | None) -> str:
    return f"{row['ours_is_faster']:.2f}×" if row and "ours_is_faster" in row else "–"


def _cost_of_stats(of_case: dict[str, Row]) -> float:
    return 1 / of_case["fusedaccum without stats"]["ours_is_faster"] - 1


def _eager_and_compiled(of_case: dict[str, Row]) -> tuple[str, str]:
    """How many times as fast ours was as the best eager way, and as torch.compile."""
    raced = [r for r in of_case.values() if r["kind"] == "peer" and "ours_is_faster" in r]
    compiled = [r for r in raced if str(r["contestant"]).startswith("torch.compile")]
    eager = min((r for r in raced if r not in compiled), key=lambda r: r["median_ms"], default=None)
    return _against(eager), _against(compiled[0] if compiled else None)
