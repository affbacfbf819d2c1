"""``make demo``, or ``python -m demo``: train two models with micro-batches, and see that they follow the big batch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import figure, tasks
from .ways import WAYS, Run, Task, train, ways_of

FIGURE = Path(__file__).resolve().parent / "output" / "demo.png"
HEADER = ("way", "final loss", "largest difference from (a)", "seconds", "peak MiB")


def main(arguments: Sequence[str] | None = None) -> list[tuple[Task, dict[str, Run]]]:
    """Train everything, print the table, draw the figure; returns every task with its runs."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny models and data, to check that the demo runs")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the figure's file (.png, .svg or .pdf)")
    # One thread: models this small gain little from a second one, and sums are then taken in the same order on every machine.
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads (default: 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    print(f"PyTorch {torch.__version__}, threads: {torch.get_num_threads()}")
    results = []
    for make in (tasks.digits, tasks.gpt):
        task = make(options.tiny)
        count = sum(p.numel() for p in task.make_model().parameters())
        window = f"{task.accum_steps} micro-batches of {task.micro_batch}"
        print(
            f"\n{task.title}: {count:,} parameters, {len(task.data[0]):,} samples, {window} per window, {task.steps} steps"
        )
        results.append((task, {key: train(task, way, f"({key}) {name}") for key, (name, way) in ways_of(task).items()}))
    print("\n" + table(results))
    print("\n" + "\n".join(findings(results)))
    figure.draw(results, options.figure)
    print(f"\nFigure: {options.figure}  ({time.perf_counter() - started:.0f} s in all)")
    return results


def table(results: Sequence[tuple[Task, dict[str, Run]]]) -> str:
    """One table for all tasks and ways."""
    lines: list[tuple[str, ...]] = [HEADER]
    for task, runs in results:
        lines.append((task.title, "", "", "", ""))
        for key, run in runs.items():
            apart = figure.drift(run, runs["a"])[-1]
            cells = (f"{run.final_loss:.5f}", "–" if key == "a" else f"{apart:.1e}", f"{run.seconds:.1f}")
            lines.append((f"  ({key}) {WAYS[key][0]}", *cells, f"{run.peak_bytes / 2**20:.1f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    padded = [
        line[0].ljust(widths[0]) + "".join("  " + c.rjust(w) for c, w in zip(line[1:], widths[1:])) for line in lines
    ]
    padded.insert(1, "-" * len(padded[0]))
    return "\n".join(line.rstrip() for line in padded)


def _rounded(times: float) -> str:
    return f"{times:,.0f}" if times >= 10 else f"{times:.1f}"


def findings(results: Sequence[tuple[Task, dict[str, Run]]]) -> list[str]:
    """What the table means, from its own numbers."""
    lines = []
    for task, runs in results:
        apart = {key: figure.drift(run, runs["a"])[-1] for key, run in runs.items()}
        times = {key: f"{_rounded(value / apart['b'])} times" for key, value in apart.items()}
        if task.master_weights:
            lines.append(
                f"{task.title}: (b) ends {times['c']} closer to the big batch (in FP32 arithmetic) than plain sums in bf16, "
                f"{times['d']} closer than those weighted by hand, and {times['e']} closer than the big batch in bf16 arithmetic."
            )
        else:
            lines.append(
                f"{task.title}: (b) ends {times['c']} closer to the big batch than plain loss / N, which divides an epoch's "
                f"last, partial window by the full N. In FP32, (d), weighted by hand, does as well as (b)."
            )
    return lines


if __name__ == "__main__":
    main()
