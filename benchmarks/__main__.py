"""``python -m benchmarks``: run them all, or those named; print the tables, write results and plots."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import (
    bench_accumulate,
    bench_explain,
    bench_fused,
    bench_memory,
    bench_overhead,
    bench_questions,
    bench_ranks,
    bench_step,
    bench_training,
    bench_window,
    environment,
    report,
)
from .harness import Options
from .shapes import SETS

BENCHMARKS = {
    b.NAME: b
    for b in (
        bench_accumulate,
        bench_window,
        bench_training,
        bench_step,
        bench_fused,
        bench_overhead,
        bench_memory,
        bench_ranks,
        bench_explain,
        bench_questions,
    )
}


def everything(device: str) -> list[str]:
    """The names of all benchmarks that have something to say of this kind of device: the questions are of numbers, not of hardware."""
    return [name for name in BENCHMARKS if device == "cpu" or name != bench_questions.NAME]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"of {', '.join(BENCHMARKS)}; all that concern the device when left out",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, few rounds: checks the harness, measures nothing"
    )
    parser.add_argument("--sets", nargs="+", choices=list(SETS), help="shape sets, all when left out")
    parser.add_argument("--rounds", type=int, help="interleaved rounds a case (9)")
    parser.add_argument("--threads", type=int, help="PyTorch's threads (its own default)")
    parser.add_argument("--headlines", action="store_true", help="of the dtype pairs only those that most people run")
    parser.add_argument("--no-compile", action="store_true", help="leave the torch.compile peer out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (cpu)")
    parser.add_argument("--backend", help="the backend to measure (that of the device's name)")
    parser.add_argument(
        "--out",
        type=Path,
        help="where results and plots go (benchmarks/results; its gpu/ and quick/ with those options)",
    )
    arguments = parser.parse_args()
    unknown = [n for n in arguments.names if n not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "There is no CUDA device here that PyTorch can use: nothing was measured.\n")
    environment.device = torch.device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    options = Options.parse(arguments)
    for name in arguments.names or everything(arguments.device):
        rows = BENCHMARKS[name].run(options)
        print(report.printed(name, rows), flush=True)
    for path in report.draw_all(options.out):
        print(f"plot: {path}")
    print(f"results: {options.out}/*.jsonl")


if __name__ == "__main__":
    main()
