"""Tables of a benchmark's rows, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .harness import BARE, GRAPH, HEADLINES, HOOKS_ALONE, OURS, PYTHON_HOOKS, PYTHON_HOOKS_ALONE, TRITON, Row
from .questions import QUESTIONS

Table = tuple[list[str], list[list[str]]]


def text(table: Table) -> str:
    """Columns padded with blanks; the first left-aligned, the others right-aligned."""
    header, lines = table
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]

    def padded(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:], widths[1:])]
        return "  ".join(cells).rstrip()

    return "\n".join([padded(header), "  ".join("-" * w for w in widths), *map(padded, lines)])


def markdown(table: Table, of_words: bool = False) -> str:
    """A GitHub table, aligned as :func:`text` is, or to the left if it is ``of_words``."""
    header, lines = table
    rule = ["---"] + ["---" if of_words else "---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def accumulate(rows: Sequence[Row]) -> Table:
    """One line per case: our time, GB/s and share of the bandwidth, and how many times slower each peer was.

    "At the bandwidth" is how many times faster than the best peer a way would be if it reached the bandwidth of the same run: the most
    that can be asked for there.
    """
    cases = grouped(rows, ("set", "grads", "buffers", "mode", "stats"))
    peers = _names(rows, "peer") + [n for n in _names(rows, "variant") if n != "fusedaccum without stats"]
    header = [
        "case",
        "ms (p10–p90)",
        "GB/s",
        "of bandwidth",
        "vs best",
        "at the bandwidth",
        *(f"vs {p}" for p in peers),
    ]
    lines = []
    for (name, grads, buffers, mode, stats), of_case in cases.items():
        ours = of_case[OURS]
        label = f"{name} {grads}→{buffers} {mode}{' + stats' if stats else ''}"
        ceiling = f"{ours['speedup'] / ours['share_of_bandwidth']:.2f}×" if "share_of_bandwidth" in ours else "–"
        against = [_against(of_case.get(p)) for p in peers]
        lines.append([label, *_measured(ours), f"{ours['speedup']:.2f}×", ceiling, *against])
    return header, lines


def stats_cost(rows: Sequence[Row]) -> Table:
    """What the norm and the finite check add to an accumulation, and how the whole compares with the best peer that measures a norm."""
    lines = []
    for (name, grads, buffers, _, stats), of_case in grouped(
        rows, ("set", "grads", "buffers", "mode", "stats")
    ).items():
        if stats:
            ours, cost = of_case[OURS], _cost_of_stats(of_case)
            lines.append(
                [f"{name} {grads}→{buffers}", f"{cost:+.1%}", f"{ours['speedup']:.2f}×", str(ours["best_peer"])]
            )
    return ["set and dtypes", "cost of norm and finite check", "vs best way with a norm", "the best way"], lines


def window(rows: Sequence[Row]) -> Table:
    """One line per set and dtype pair: whole windows of every contestant."""
    cases = grouped(rows, ("set", "grads", "buffers"))
    others = _names(rows, "variant") + _names(rows, "peer")
    header = ["window of 8", "fusedaccum ms (p10–p90)", "GB/s", "of bandwidth", "vs best", *others]
    lines = []
    for (name, grads, buffers), of_case in cases.items():
        ours = of_case[OURS]
        times = [_milliseconds(of_case.get(o)) for o in others]
        lines.append([f"{name} {grads}→{buffers}", *_measured(ours), f"{ours['speedup']:.2f}×", *times])
    return header, lines


def training(rows: Sequence[Row]) -> Table:
    """One line per set and dtype pair: windows through autograd, of every contestant."""
    others = _names(rows, "peer") + _names(rows, "variant")
    lines = []
    for (name, grads, buffers), of_case in grouped(rows, ("set", "grads", "buffers")).items():
        ours = of_case[OURS]
        times = [_milliseconds(of_case.get(o)) for o in others]
        lines.append([f"{name} {grads}→{buffers}", _measured(ours)[0], f"{ours['speedup']:.2f}×", *times])
    return ["window of 8 through autograd", "fusedaccum ms (p10–p90)", "vs best", *others], lines


def ranks(rows: Sequence[Row]) -> Table:
    """One line per set: windows over several ranks, of every contestant."""
    others = _names(rows, "variant") + _names(rows, "peer")
    lines = []
    for (name, number), of_case in grouped(rows, ("set", "ranks")).items():
        ours = of_case[OURS]
        if "median_ms" in ours:
            times = [_milliseconds(of_case.get(o)) for o in others]
            lines.append([f"{name}, {number} ranks", _measured(ours)[0], f"{ours['speedup']:.2f}×", *times])
    return ["window of 8 on every rank", "fusedaccum ms (p10–p90)", "vs best", *others], lines


def step(rows: Sequence[Row]) -> Table:
    """One line per model and way: a window of training, and the share of it that is accumulation."""
    lines = []
    for r in rows:
        model = f"{r['set']}, {r['micro_batches']} × {r['tokens']} tokens"
        share = r["accumulation_share"]
        lines.append([f"{model}: {r['contestant']}", _measured(r)[0], "–" if share is None else f"{share:.1%}"])
    return ["window", "ms (p10–p90)", "accumulation"], lines


def fused(rows: Sequence[Row]) -> Table:
    """One line per layer: the time of a micro-batch for every contestant, and how many times faster ours is."""
    others = _names(rows, "peer") + _names(rows, "variant")
    lines = []
    for (layer, n, columns, dtype, tokens), of_case in grouped(
        rows, ("layer", "rows", "columns", "dtype", "tokens")
    ).items():
        times = [f"{_milliseconds(of_case[o])} ({_against(of_case[o])})" for o in others]
        name = f"{layer} {n:,} × {columns:,}, {dtype}, {tokens:,} tokens"
        lines.append([name, _measured(of_case[OURS])[0], *times])
    return ["a micro-batch of one layer", "fused ms (p10–p90)", *others], lines


def overhead(rows: Sequence[Row]) -> Table:
    """Microseconds per tensor of every contestant, by number of tensors; and what C++ hooks add to a backward, as a share of what Python
    hooks add: for hooks and queue alone, and for the whole wrapper.
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
    """One line per model and way of ours: its process time against the peer that does as much, and page faults of both."""
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


def explain(rows: Sequence[Row]) -> Table:
    """The time that explain predicted for a window's accumulation, the measured time, and the ratio within a round."""
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
    """README's table: milliseconds of a step of each model, and the peak of memory, for the ways to sum a bf16 model's gradients."""
    ways = {
        "plain `p.grad`, in bf16": "p.grad in bf16",
        "FP32 sums by hand": "add after backward",
        "**fusedaccum**": OURS,
    }
    columns: dict[str, dict[str, str]] = {}
    for place, rows in (("CPU", on_cpu), ("GPU", on_gpu)):
        for name in dict.fromkeys(str(r["set"]) for r in rows):
            (_, n, tokens), of_case = next(
                iter(grouped([r for r in rows if r["set"] == name], ("set", "micro_batches", "tokens")).items())
            )
            columns[f"{name} on a {place}, {n} × {tokens:,} tokens, ms"] = {
                k: f"{r['median_ms']:,.0f}" for k, r in of_case.items()
            }
    columns["peak of GPT-2's blocks, MiB"] = {
        str(r["contestant"]): f"{r['peak_bytes'] / 2**20:,.0f}" for r in memory if r["weights"] == "bf16"
    }
    lines = [[label, *(cells.get(way, "–") for cells in columns.values())] for label, way in ways.items()]
    return ["sums of a window", *columns], lines


def summary(accumulated: Sequence[Row], windows: Sequence[Row]) -> Table:
    """The short table: how many times faster than the best eager way, and (where it ran) than torch.compile."""
    lines = []
    found = grouped(accumulated, ("set", "grads", "buffers", "mode", "stats"))
    for name in dict.fromkeys(str(r["set"]) for r in accumulated):
        cells = [_eager_and_compiled(found.get((name, *pair, "add", False))) for pair in HEADLINES]
        ours = found.get((name, "bf16", "fp32", "add", False), {}).get(OURS)
        whole = grouped(windows, ("set", "grads", "buffers")).get((name, "bf16", "fp32"))
        lines.append([name, *cells, _share(ours), _eager_and_compiled(whole)])
    header = [
        "parameters of",
        *(f"{g}→{b}" for g, b in HEADLINES),
        "of bandwidth (bf16→fp32)",
        "window of 8 (bf16→fp32)",
    ]
    return header, lines


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
                _eager_and_compiled(add),
                f"{_cost_of_stats(with_norm):+.1%}" if with_norm else "–",
                # Its share of the bandwidth counts the bytes of a window that has the last pass, too.
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


def _measured(row: Row) -> list[str]:
    return [f"{row['median_ms']:.2f} ({row['p10_ms']:.2f}–{row['p90_ms']:.2f})", f"{row['gb_per_s']:.1f}", _share(row)]


def _share(row: Row | None) -> str:
    return f"{row['share_of_bandwidth']:.0%}" if row and "share_of_bandwidth" in row else "–"


def _milliseconds(row: Row | None) -> str:
    return f"{row['median_ms']:.1f}" if row and "median_ms" in row else "–"


def _against(row: Row | None) -> str:
    return f"{row['ours_is_faster']:.2f}×" if row and "ours_is_faster" in row else "–"


def _cost_of_stats(of_case: dict[str, Row]) -> float:
    return 1 / of_case["fusedaccum without stats"]["ours_is_faster"] - 1


def _eager_and_compiled(of_case: dict[str, Row] | None) -> str:
    raced = [r for r in (of_case or {}).values() if r["kind"] == "peer" and "ours_is_faster" in r]
    compiled = [r for r in raced if str(r["contestant"]).startswith("torch.compile")]
    eager = min((r for r in raced if r not in compiled), key=lambda r: r["median_ms"], default=None)
    return _against(eager) + "".join(f" ({_against(r)})" for r in compiled)
