"""``make demo`` or ``python -m demo``: two models trained in micro-batches follow the big batch."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import figure, tasks
from .ways import WAYS, Run, Task, Way, train, ways_of

FIGURE = Path(__file__).resolve().parent / "output" / "demo.png"
INTRODUCTION = """\
Two models are trained, each in several ways on the same samples in the same order: in big batches,
and in the micro-batches that they are cut into. Do the weights follow those of the big batch?
"""
HEADER = ("way", "distance from (a)", "final loss", "seconds", "peak MiB")
BELOW = """\
Distance: of the weights at the end, as a share of how far those of (a) have moved since the start.
Final losses differ by chance: a lower one does not mean a better way to train. Seconds: one run's.
"""


def main(arguments: Sequence[str] | None = None) -> list[tuple[Task, dict[str, Run]]]:
    """Train everything, print the table, draw the figure; returns every task with its runs."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny models and data, to check that the demo runs")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="the figure's file (.png, .svg or .pdf)")
    # One thread: a second would gain little, and sums are taken in the same order on every machine.
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads (default: 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    print(INTRODUCTION)
    print("\n".join(f"({key}) {way.name.ljust(17)}  {way.meaning}" for key, way in WAYS.items()))
    print(f"\nPyTorch {torch.__version__}, threads: {torch.get_num_threads()}")
    results = []
    for make in (tasks.digits, tasks.gpt):
        task = make(options.tiny)
        count = sum(p.numel() for p in task.make_model().parameters())
        print(f"\n{task.title}: {count:,} parameters, {len(task.data[0]):,} samples")
        micro_batches = f"{task.accum_steps} micro-batches of {task.micro_batch}"
        print(f"{task.steps} steps, each of {micro_batches}; an epoch's last step is smaller")
        results.append((task, {key: _trained(task, key, way) for key, way in ways_of(task).items()}))
    print(f"\n{table(results)}\n\n{BELOW}")
    print("\n".join(findings(results)))
    figure.draw(results, options.figure)
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    print(f"Figure: {os.path.relpath(options.figure)}. Read next: docs/guide.md")
    return results


def _trained(task: Task, key: str, way: Way) -> Run:
    run = train(task, way, f"({key}) {way.name}")
    losses = f"loss {run.losses[0]:.3f} at the first step, {run.final_loss:.3f} at the end"
    print(f"  ({key}) {way.name.ljust(17)}  {losses}, {run.seconds:.1f} s", flush=True)
    return run


def table(results: Sequence[tuple[Task, dict[str, Run]]]) -> str:
    """One table for all tasks and ways."""
    lines: list[tuple[str, ...]] = [HEADER]
    for task, runs in results:
        lines.append((task.title, "", "", "", ""))
        for key, run in runs.items():
            apart = "–" if key == "a" else f"{figure.drift(run, runs['a'])[-1]:.1e}"
            cells = (apart, f"{run.final_loss:.5f}", f"{run.seconds:.1f}", f"{run.peak_bytes / 2**20:.1f}")
            lines.append((f"  ({key}) {WAYS[key].name}", *cells))
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    padded = [
        line[0].ljust(widths[0]) + "".join("  " + c.rjust(w) for c, w in zip(line[1:], widths[1:])) for line in lines
    ]
    padded.insert(1, "-" * len(padded[0]))
    return "\n".join(line.rstrip() for line in padded)


def findings(results: Sequence[tuple[Task, dict[str, Run]]]) -> list[str]:
    """What the table means, from its own numbers."""
    lines = []
    for task, runs in results:
        apart = {key: f"{figure.drift(run, runs['a'])[-1]:.1e}" for key, run in runs.items()}
        lines.append(f"{task.title}: the weights of (b) end {apart['b']} from the big batch's.")
        if task.master_weights:
            lines.append(
                f"  Those of (c), {apart['c']}, and of (d), {apart['d']}: their sums are in bf16, those of (b) in FP32."
            )
            lines.append(
                f"  Those of (e), {apart['e']}: here PyTorch adds the gradients of embeddings and norms in bf16."
            )
        else:
            lines.append(f"  Those of (c), {apart['c']}: it divides an epoch's last, smaller step by N, too.")
            lines.append(f"  Those of (d), {apart['d']}: in FP32, weighting by hand gives what (b) gives.")
    return lines


if __name__ == "__main__":
    main()
