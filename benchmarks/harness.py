"""The harness: contestants race in interleaved rounds, each result is a row of a JSON lines file.

Rules that every benchmark here keeps:

- All contestants of a case run in the same process, one after the other in every round, so that a
  neighbour's noise or a change of clock speed affects all of them. The order differs from round to
  round, so that none profits from the one before it. A ratio is the median over the rounds of the
  ratio within a round.
- Inputs rotate over the calls of all contestants, so that none finds in the cache what the one
  before it left there.
- On a GPU a measurement ends when the device is idle again: it is the longer of the host's time and
  the device's, as long as the host's before the first launch, and the wait, are small beside it. So
  it lasts longer than on a CPU.
- GB/s counts the bytes the *operation* has to move, for every contestant alike; a way that moves
  more shows as slower.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from . import environment
from .shapes import SETS, ShapeSet

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "fusedaccum"
TRITON = "fusedaccum, triton"
GRAPH = "fusedaccum, from a graph"
PYTHON_HOOKS = "fusedaccum, hooks in Python"
HOOKS_ALONE = "fusedaccum, adds left out"
PYTHON_HOOKS_ALONE = "fusedaccum, hooks in Python, adds left out"
WITHOUT_EXTENSIONS = "fusedaccum, where no compiler was"
BARE = "gradients alone"  # a backward that accumulates nothing
# Dtypes of gradients and buffers that most people run: measured on every set, also with statistics
# and against torch.compile.
HEADLINES = (("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"))
SHORTEST = {"cpu": 3e-3, "cuda": 10e-3}  # seconds of a measurement, at least
TURNS = 10  # of the contestants before the first round, at most
Row = dict[str, object]


@dataclass
class Options:
    """The command line's options; ``--quick`` shrinks the sets, only to check the harness.

    ``backend`` is requested by name, so that no other is measured in its place where it is missing.
    """

    quick: bool = False
    rounds: int = 9
    sets: tuple[str, ...] = ()
    out: Path = RESULTS
    compile: bool = True
    backend: str = "cpu"
    headlines: bool = False

    @classmethod
    def parse(cls, arguments: argparse.Namespace) -> Options:
        results = RESULTS / "gpu" if arguments.device == "cuda" else RESULTS
        out = arguments.out or (results / "quick" if arguments.quick else results)
        rounds = arguments.rounds or (3 if arguments.quick else 9)
        compiled = not (arguments.no_compile or arguments.quick)
        backend = arguments.backend or arguments.device
        return cls(arguments.quick, rounds, tuple(arguments.sets or ()), out, compiled, backend, arguments.headlines)

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Those of these sets that were asked for; all if none was."""
        return [name for name in names if not self.sets or name in self.sets]

    def shapes_of(self, name: str) -> ShapeSet:
        """The set of this name."""
        return SETS[name]().shrunk(64) if self.quick else SETS[name]()


@dataclass
class Contestant:
    """One way to do a case's work: ``run(i)`` does it once, on the i-th rotation of the inputs.

    ``kind`` is "ours", "variant", "peer" or "bandwidth"; ``skipped`` says why it could not run;
    ``scale`` multiplies its seconds (a stream moves a whole number of arrays, not exactly the
    case's bytes).
    """

    name: str
    run: Callable[[int], object] | None = None
    kind: str = "peer"
    skipped: str = ""
    scale: float = 1.0


@dataclass
class Timing:
    """Seconds per call, one number for each round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        return percentile(self.seconds, percent)


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile, interpolated linearly between the closest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def race(contestants: list[Contestant], rounds: int, at_least: float | None = None) -> dict[str, Timing]:
    """Time all contestants in interleaved rounds.

    A measurement repeats a short call until it lasts ``at_least`` seconds (by default, SHORTEST).
    """
    if at_least is None:
        at_least = SHORTEST[environment.device.type]
    running = [c for c in contestants if c.run is not None]
    calls = itertools.count()
    repeats = {}

    def measure(contestant: Contestant, times: int) -> float:
        turns = list(itertools.islice(calls, times))
        wait_for_device()
        start = time.perf_counter()
        for i in turns:
            contestant.run(i)
        wait_for_device()
        return contestant.scale * (time.perf_counter() - start) / times

    for c in running:
        measure(c, 1)  # page faults, compilation, thread pools
        repeats[c.name] = max(1, round(at_least * c.scale / measure(c, 1)))  # of its own time, not of the scaled one
    _settle(lambda: sum(measure(c, repeats[c.name]) for c in running))
    timings = {c.name: Timing() for c in running}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for c in shuffled.sample(running, len(running)):
            timings[c.name].seconds.append(measure(c, repeats[c.name]))
    return timings


def _settle(turn: Callable[[], float]) -> None:
    """On a GPU, whose clocks follow its load: wait until turns get no shorter any more."""
    before = math.inf
    for _ in range(TURNS if environment.device.type == "cuda" else 0):
        took = turn()
        if took > 0.99 * before:
            break
        before = took


def wait_for_device() -> None:
    """Wait until a GPU is idle: calls on it return before their work is done."""
    if environment.device.type == "cuda":
        torch.cuda.synchronize()


def ratios(other: Timing, ours: Timing) -> list[float]:
    """How many times faster ours was in each round."""
    return [a / b for a, b in zip(other.seconds, ours.seconds, strict=True)]


def spread(name: str, values: list[float]) -> Row:
    """The median of the values, its interval, p10 and p90, under keys that begin with ``name``."""
    low, high = interval(values)
    return {
        name: statistics.median(values),
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_p10": percentile(values, 10),
        f"{name}_p90": percentile(values, 90),
    }


def interval(values: Iterable[float]) -> tuple[float, float]:
    """The two values between which the median lies with 95% confidence, whatever is drawn from.

    The least and the largest where fewer than 6 are too few for that.
    """
    ordered = sorted(values)
    outside, beyond = 0, 0.5 ** len(ordered)  # the chance that no more than `outside` of them are below the median
    for k in range(1, len(ordered)):
        beyond += math.comb(len(ordered), k) * 0.5 ** len(ordered)
        if beyond > 0.025:
            break
        outside = k
    return ordered[outside], ordered[-1 - outside]


def rows_of(case: Row, contestants: list[Contestant], timings: dict[str, Timing], moved: int) -> list[Row]:
    """One row per contestant.

    ``moved`` is the bytes the operation has to move, for GB/s and the share of bandwidth.
    """
    streams = [c.name for c in contestants if c.kind == "bandwidth" and c.name in timings]
    # Streams are timed as if they moved `moved` bytes (bandwidth.py): the fastest is the ceiling.
    ceiling = min(streams, key=lambda name: timings[name].median) if streams else None
    ours = timings.get(OURS)
    peers = [c.name for c in contestants if c.kind == "peer" and c.name in timings]
    best = min(peers, key=lambda name: timings[name].median) if peers else None
    rows = []
    for c in contestants:
        row: Row = {**case, "contestant": c.name, "kind": c.kind}
        if c.run is None:
            rows.append({**row, "skipped": c.skipped})
            continue
        t = timings[c.name]
        row |= {"median_ms": 1e3 * t.median, "p10_ms": 1e3 * t.percentile(10), "p90_ms": 1e3 * t.percentile(90)}
        row |= {"rounds": len(t.seconds), "bytes": moved, "gb_per_s": moved / t.median / 1e9}
        if ceiling and c.kind != "bandwidth":
            row["bandwidth_gb_per_s"] = moved / timings[ceiling].median / 1e9
            row["bandwidth_pattern"] = ceiling
            row["share_of_bandwidth"] = statistics.median(ratios(timings[ceiling], t))
        if ours is not None and c.kind in ("peer", "variant"):
            row |= spread("ours_is_faster", ratios(t, ours))
        if c.name == OURS and best:
            row |= {"best_peer": best, **spread("speedup", ratios(timings[best], t))}
        rows.append(row)
    return rows


class Sink:
    """Rows of a benchmark, written to ``<out>/<name>.jsonl`` as they come, with the environment.

    A run of some sets keeps the rows there of others, if they are of the same code on the same
    machine: together they are one run.
    """

    def __init__(self, name: str, options: Options, cases: int):
        options.out.mkdir(parents=True, exist_ok=True)
        self.path = options.out / f"{name}.jsonl"
        self.environment = {"backend": options.backend, **environment.describe()}
        self.rows: list[Row] = []
        self.bar = tqdm(total=cases, desc=name, unit="case", dynamic_ncols=True)
        self._name = name
        self._kept = list(filter(self._can_stand, rows_in(self.path))) if options.sets else []

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def _can_stand(self, row: Row) -> bool:
        """May this row of an earlier run stand beside what is measured now?"""
        return "set" in row and all(row.get(k) == v for k, v in self.environment.items() if k != "measured")

    def case(self, label: str) -> None:
        self.bar.set_postfix_str(label)

    def add(self, rows: list[Row]) -> None:
        """Write the rows of one finished case."""
        for row in rows:
            rounded = {k: _rounded(v) for k, v in row.items()}
            self.rows.append({"benchmark": self._name, **rounded, **self.environment})
        measured = {row.get("set") for row in self.rows}
        self._kept = [row for row in self._kept if row["set"] not in measured]
        text = "".join(json.dumps(row) + "\n" for row in (*self._kept, *self.rows))
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.path)  # at once: a run may be stopped at any time
        self.bar.update()


def rows_in(path: Path) -> list[Row]:
    """The rows of a file of results; none if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _rounded(value: object) -> object:
    if isinstance(value, list) and all(isinstance(v, float) for v in value):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def filled(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Tensors of ordinary gradients' magnitude, each its own allocation, as autograd makes them."""
    generator = torch.Generator().manual_seed(seed)
    tile = (torch.randn(2**16, generator=generator) * 1e-2).to(environment.device, dtype)
    tensors = []
    for shape in shapes:
        flat = torch.empty(shape, dtype=dtype, device=environment.device).view(-1)
        whole = flat.numel() // tile.numel() * tile.numel()
        flat[:whole].view(-1, tile.numel()).copy_(tile)
        flat[whole:].copy_(tile[: flat.numel() - whole])
        tensors.append(flat.view(shape))
    return tensors


def rotations(bytes_each: int) -> int:
    """How many copies of the inputs keep a call from finding the previous call's in the cache."""
    return max(1, min(12, -(-ROTATED_BYTES // bytes_each)))


ROTATED_BYTES = 512 * 2**20  # several times the last-level cache, even of large servers
