"""``python -m benchmarks``: run all or some; print tables, write results and plots."""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path

import torch

from . import (
    bench_accumulate,
    bench_buckets,
    bench_cpu_optimizer,
    bench_explain,
    bench_fused,
    bench_memory,
    bench_overhead,
    bench_pairs,
    bench_parts,
    bench_questions,
    bench_ranks,
    bench_states,
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
        bench_parts,
        bench_training,
        bench_step,
        bench_pairs,
        bench_cpu_optimizer,
        bench_fused,
        bench_overhead,
        bench_buckets,
        bench_memory,
        bench_states,
        bench_ranks,
        bench_explain,
        bench_questions,
    )
}


def everything(device: str) -> list[str]:
    """The names of all benchmarks that apply to this kind of device."""
    # Questions are about numbers, not hardware; and page faults are of CPU memory.
    of_the_cpu = (bench_questions.NAME, bench_buckets.NAME)
    return [name for name in BENCHMARKS if device == "cpu" or name not in of_the_cpu]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"any of {', '.join(BENCHMARKS)} (default: all that apply to the device)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, few rounds: checks the harness, measures nothing"
    )
    parser.add_argument("--sets", nargs="+", choices=list(SETS), help="shape sets (default: all)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds per case (default: 9)")
    parser.add_argument("--threads", type=int, help="PyTorch's threads (default: PyTorch's own)")
    parser.add_argument("--headlines", action="store_true", help="only the dtype pairs that most people run")
    parser.add_argument("--no-compile", action="store_true", help="leave the torch.compile peer out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--backend", help="the backend to measure (default: the one named like the device)")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for results and plots (default: benchmarks/results; its gpu/ with --device cuda, quick/ with "
        "--quick)",
    )
    arguments = parser.parse_args()
    unknown = [n for n in arguments.names if n not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "There is no CUDA device here that PyTorch can use: nothing was measured.\n")
    environment.device = torch.device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    options = Options.parse(arguments)
    failed = []
    for name in arguments.names or everything(arguments.device):
        try:
            rows = BENCHMARKS[name].run(options)
        except Exception:  # what the others measure is worth having
            traceback.print_exc()
            failed.append(name)
        else:
            print(report.printed(name, rows), flush=True)
    for path in report.draw_all(options.out):
        print(f"plot: {path}")
    print(f"results: {options.out}/*.jsonl")
    if failed:
        parser.exit(1, f"These benchmarks failed, as told above: {', '.join(failed)}\n")


if __name__ == "__main__":
    main()
