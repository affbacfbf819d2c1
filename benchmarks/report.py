"""Writes the results into README.md and docs/: ``python -m benchmarks.report``.

Replaces the text between ``<!-- benchmarks:NAME -->`` and ``<!-- /benchmarks:NAME -->``; no figure
is typed by hand.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import plots, tables
from .environment import ROOT
from .harness import RESULTS, Row, rows_in
from .questions import QUESTIONS

PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
TABLES: dict[str, Callable[[Sequence[Row]], tables.Table]] = {
    "accumulate": tables.accumulate,
    "window": tables.window,
    "parts": tables.parts,
    "training": tables.training,
    "step": tables.step,
    "pairs": tables.pairs,
    "cpu_optimizer": tables.cpu_optimizer,
    "fused": tables.fused,
    "overhead": tables.overhead,
    "buckets": tables.buckets,
    "memory": tables.memory,
    "states": tables.states,
    "ranks": tables.ranks,
    "explain": tables.explain,
    "questions": tables.questions,
}


def load(name: str, folder: Path = RESULTS) -> list[Row]:
    """The rows that a benchmark has left in a folder; none if it has not been run."""
    return rows_in(folder / f"{name}.jsonl")


def printed(name: str, rows: Sequence[Row]) -> str:
    """A benchmark's tables, for the terminal."""
    if name == "questions":
        return "\n\n".join(["", *(": ".join(line) for line in tables.questions(rows)[1]), ""])
    parts = [tables.text(TABLES[name](rows))]
    if name == "accumulate":
        parts.append(tables.text(tables.stats_cost(rows)))
    if name == "pairs":
        parts += map(tables.text, tables.profiles(rows))
    return "\n\n".join(["", *parts, ""])


def draw_all(folder: Path = RESULTS) -> list[Path]:
    """Draw every plot that has results, beside the results files; returns the paths."""
    return [path for name in TABLES if (rows := load(name, folder)) for path in plots.draw(name, rows, folder)]


def blocks() -> dict[str, str]:
    """Every block's text for the pages; names of those measured on a GPU begin with ``gpu_``."""
    texts = _blocks_of(RESULTS)
    on_gpu = {name: load(name, RESULTS / "gpu") for name in ("accumulate", "window", "step")}
    if on_gpu["accumulate"]:
        texts["goals_gpu"] = tables.markdown(tables.goals(on_gpu["accumulate"], on_gpu["window"]))
    if on_cpu := load("step"):
        places = dict.fromkeys(_where(rows) for rows in (on_cpu, on_gpu["step"]) if rows)
        for name, table in {
            "headline": tables.headline(on_cpu, on_gpu["step"], load("memory")),
            "steps": tables.steps(on_cpu, on_gpu["step"]),
        }.items():
            texts[name] = "\n\n".join([tables.markdown(table), *places])
    texts |= _questions(load("questions"))
    machines = (load("accumulate", folder) for folder in sorted((RESULTS / "machines").iterdir()))
    texts["machines"] = "\n\n".join(map(_summary, machines))
    return texts | {f"gpu_{name}": text for name, text in _blocks_of(RESULTS / "gpu").items()}


def _questions(rows: Sequence[Row]) -> dict[str, str]:
    """For every question that was measured: the finding, the plot, and where it was measured.

    And a table of all, in the page's order, which is from as many places as the questions.
    """
    found = tables.by_question(rows)
    places = dict.fromkeys(map(_where, found.values()))
    listed = (ROOT / "docs/questions/index.md").read_text(encoding="utf-8")
    page = {name: f"{name.replace('_', '-')}.md" for name in found} | {"noise_scale": "../window-length.md"}
    lines = [
        [f"[{name.replace('_', ' ')}]({page[name]})", QUESTIONS[name].finding(found[name])]
        for name in sorted(found, key=lambda name: listed.find(page[name]))
    ]
    texts = {"questions": "\n\n".join([tables.markdown((["question", "found"], lines), of_words=True), *places])}
    for name, of_question in found.items():
        picture = f"![{name.replace('_', ' ')}](benchmarks/results/questions-{name}.svg)"
        texts[f"questions-{name}"] = f"{QUESTIONS[name].finding(of_question)}\n\n{picture}\n\n{_where(of_question)}"
    return texts


def _summary(rows: Sequence[Row]) -> str:
    """The short table of adds or windows, and where they were measured."""
    return f"{tables.markdown(tables.summary(rows))}\n\n{_where(rows)}"


def _blocks_of(folder: Path) -> dict[str, str]:
    """Tables and plots of the results in a folder."""
    found = {name: rows for name in TABLES if (rows := load(name, folder))}
    texts = {name: f"{_where(rows)}\n\n{tables.markdown(TABLES[name](rows))}" for name, rows in found.items()}
    texts |= {f"{name}_summary": _summary(found[name]) for name in ("accumulate", "window") if name in found}
    for name in found.keys() & plots.PLOTS.keys():
        for plot, _ in plots.PLOTS[name]:
            texts[f"{plot}_plot"] = f"![{plot.replace('_', ' ')}]({folder.relative_to(ROOT) / plot}.svg)"
    if "accumulate" in found:
        texts["stats"] = tables.markdown(tables.stats_cost(found["accumulate"]))
    return texts


def rewrite(page: Path, texts: dict[str, str]) -> list[str]:
    """Rewrite a page's marked blocks; returns the names of those without results."""
    before = page.read_text(encoding="utf-8")
    after, missing = rewritten(before, page.parent, texts)
    if after != before:
        page.write_text(after, encoding="utf-8")
    return missing


def rewritten(before: str, folder: Path, texts: dict[str, str]) -> tuple[str, list[str]]:
    """A page's text with its marked blocks rewritten, and the names of those without results.

    The texts give pictures by their path from the project's root; on the page, which is in
    ``folder``, the path is relative to that.
    """
    missing = []

    def block(match: re.Match[str]) -> str:
        name = match.group("name")
        plot = name.endswith("_plot")
        if name not in texts and not plot:
            missing.append(name)
        text = texts.get(name, "" if plot else "Not measured yet.")
        up = os.path.relpath(ROOT, folder)
        text = re.sub(r"\]\((?=benchmarks/)", "](" if up == "." else f"]({up}/", text)
        return f"<!-- benchmarks:{name} -->\n{text}\n<!-- /benchmarks:{name} -->"

    blocks = r"<!-- benchmarks:(?P<name>[\w-]+) -->.*?<!-- /benchmarks:(?P=name) -->"
    return re.sub(blocks, block, before, flags=re.DOTALL), missing


def _where(rows: Sequence[Row]) -> str:
    r = rows[0]
    gpu = f"{r['gpu']} (driver {r['driver']}, CUDA {r['cuda']}), " if "gpu" in r else ""
    return (
        f"{gpu}{r['cpu']}, {r['threads']} thread{'s' if r['threads'] > 1 else ''} of {r['cores']} cores, "
        f"{r['cpu_capability']}, PyTorch {r['torch']}, Python {r['python']}, fusedaccum {r['fusedaccum']} at "
        f"{r['commit']}, {r['measured']}."
    )


def main() -> None:
    for path in draw_all() + draw_all(RESULTS / "gpu"):
        print(f"drew {path.relative_to(ROOT)}")
    texts = blocks()
    for page in PAGES:
        if page.exists():
            for name in rewrite(page, texts):
                where = " --device cuda" if name.startswith("gpu_") else ""
                print(
                    f"{page.relative_to(ROOT)}: no results for {name}; run python -m benchmarks{where}", file=sys.stderr
                )


if __name__ == "__main__":
    main()
