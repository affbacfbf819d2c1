"""Puts the results files into README.md and docs/performance.md: ``python -m benchmarks.report``.

Rewrites what stands between ``<!-- benchmarks:NAME -->`` and ``<!-- /benchmarks:NAME -->``; no figure is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import plots, tables
from .environment import ROOT
from .harness import RESULTS, Row

PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
TABLES: dict[str, Callable[[Sequence[Row]], tables.Table]] = {
    "accumulate": tables.accumulate,
    "window": tables.window,
    "training": tables.training,
    "overhead": tables.overhead,
    "memory": tables.memory,
}


def load(name: str, folder: Path = RESULTS) -> list[Row]:
    """The rows of a benchmark's last run, none if it has not been run."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def printed(name: str, rows: Sequence[Row]) -> str:
    """The tables of a benchmark for the terminal."""
    parts = [tables.text(TABLES[name](rows))]
    if name == "accumulate":
        parts.append(tables.text(tables.stats_cost(rows)))
    return "\n\n".join(["", *parts, ""])


def draw_all(folder: Path = RESULTS) -> list[Path]:
    """Draw every plot there are results for, beside them."""
    return [path for name in plots.PLOTS if (rows := load(name, folder)) for path in plots.draw(name, rows, folder)]


def blocks() -> dict[str, str]:
    """The text of every block that a page may ask for."""
    found = {name: load(name) for name in TABLES}
    texts = {name: f"{_where(rows)}\n\n{tables.markdown(TABLES[name](rows))}" for name, rows in found.items() if rows}
    for name, rows in found.items():
        if rows and name in plots.PLOTS:
            texts[f"{name}_plots"] = "\n\n".join(
                f"![{name}](../benchmarks/results/{plot}.svg)" for plot, _ in plots.PLOTS[name]
            )
    if found["accumulate"]:
        texts["stats"] = tables.markdown(tables.stats_cost(found["accumulate"]))
        summary = tables.markdown(tables.summary(found["accumulate"], found["window"]))
        picture = "![bandwidth of every way](benchmarks/results/accumulate.svg)"
        texts["summary"] = f"{picture}\n\n{summary}\n\n{_where(found['accumulate'])}"
    return texts


def rewrite(page: Path, texts: dict[str, str]) -> list[str]:
    """Rewrite the marked blocks of a page; the names of those that there are no results for."""
    before = page.read_text(encoding="utf-8")
    missing = []

    def block(match: re.Match[str]) -> str:
        name = match.group("name")
        if name not in texts and not name.endswith("_plots"):
            missing.append(name)
        text = texts.get(name, "" if name.endswith("_plots") else "Not measured yet.")
        return f"<!-- benchmarks:{name} -->\n{text}\n<!-- /benchmarks:{name} -->"

    after = re.sub(
        r"<!-- benchmarks:(?P<name>\w+) -->.*?<!-- /benchmarks:(?P=name) -->", block, before, flags=re.DOTALL
    )
    if after != before:
        page.write_text(after, encoding="utf-8")
    return missing


def _where(rows: Sequence[Row]) -> str:
    r = rows[0]
    return (
        f"{r['cpu']}, {r['threads']} threads of {r['cores']} cores, {r['cpu_capability']}, PyTorch {r['torch']}, Python {r['python']}, "
        f"fusedaccum {r['fusedaccum']} at {r['commit']}, {r['measured']}."
    )


def main() -> None:
    for path in draw_all():
        print(f"drew {path.relative_to(ROOT)}")
    texts = blocks()
    for page in PAGES:
        if page.exists():
            for name in rewrite(page, texts):
                print(
                    f"{page.relative_to(ROOT)}: no results for {name}; run python -m benchmarks {name}", file=sys.stderr
                )


if __name__ == "__main__":
    main()
