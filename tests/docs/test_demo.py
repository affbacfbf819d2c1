"""A tiny version of the demo: its claims hold, and its table and figure are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from demo import __main__ as demo
from demo import figure, tasks, ways
from demo.ways import WAYS, Run, Way

pytestmark = pytest.mark.slow


class Outcome(NamedTuple):
    results: list
    path: Path
    printed: list[str]
    errors: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    threads = torch.get_num_threads()
    path = tmp_path_factory.mktemp("demo") / "demo.png"
    printed, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            results = demo.main(["--tiny", "--figure", str(path)])
        return Outcome(results, path, printed.getvalue().splitlines(), errors.getvalue())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("place", [0, 1], ids=["digits", "gpt"])
def test_demo_fusedaccum_is_closer_to_the_big_batch_than_plain(outcome: Outcome, place: int) -> None:
    _, runs = outcome.results[place]
    apart = {key: figure.drift(run, runs["a"])[-1] for key, run in runs.items()}
    assert apart["b"] < 0.5 * apart["c"]


def test_demo_digits_follow_the_big_batch_to_rounding(outcome: Outcome) -> None:
    _, runs = outcome.results[0]
    for way in ("b", "d"):
        assert figure.drift(runs[way], runs["a"])[-1] < 1e-5
    assert runs["b"].final_loss == pytest.approx(runs["a"].final_loss, rel=1e-5)


def test_demo_gpt_is_closer_than_the_big_batch_in_bf16(outcome: Outcome) -> None:
    _, runs = outcome.results[1]
    assert figure.drift(runs["b"], runs["a"])[-1] < figure.drift(runs["e"], runs["a"])[-1]


@pytest.mark.usefixtures("one_thread")
def test_demo_gpt_ends_as_close_with_sums_of_24_bits_as_with_fp32_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "peak_of", lambda *_: 0)  # records allocations, which takes most of the time
    task = dataclasses.replace(tasks.gpt(tiny=True), epochs=8)
    split = {"master_weights": "split"}
    in_24_bits = {"buffer_dtype": torch.bfloat16, "rounding": "compensated"}
    big_batch = ways.train(task, WAYS["a"], "a")
    apart = {}
    for name, settings in {"copies": {}, "split": split, "24 bits": {**split, **in_24_bits}}.items():
        run = ways.train(task, Way(name, "", functools.partial(ways.fused, **settings)), name)
        apart[name] = figure.drift(run, big_batch)[-1]
    rounded = figure.drift(ways.train(task, WAYS["d"], "d"), big_batch)[-1]
    assert len(big_batch.losses) == 24 and big_batch.losses[-1] < big_batch.losses[0] - 2
    assert apart["24 bits"] < 1.5 * min(apart["copies"], apart["split"]) < 0.3 * rounded


def test_demo_every_way_makes_the_same_steps_with_a_partial_window(outcome: Outcome) -> None:
    for task, runs in outcome.results:
        assert len(task.data[0]) % (task.micro_batch * task.accum_steps) != 0
        assert {len(run.losses) for run in runs.values()} == {task.steps}


def test_demo_micro_batches_need_less_memory_than_the_big_batch(outcome: Outcome) -> None:
    for _, runs in outcome.results:
        assert 0 < runs["b"].peak_bytes < runs["a"].peak_bytes


def test_demo_table_is_complete(outcome: Outcome) -> None:
    lines = demo.table(outcome.results).splitlines()
    assert all(column in lines[0] for column in demo.HEADER)
    assert len(lines) == 2 + sum(1 + len(runs) for _, runs in outcome.results)
    assert "nan" not in "".join(lines)
    assert set(lines) < set(outcome.printed)
    assert outcome.path.stat().st_size > 10_000


def test_demo_what_is_printed_fits_and_explains_every_way(outcome: Outcome) -> None:
    assert max(map(len, outcome.printed)) <= 100
    for key, way in WAYS.items():
        assert any(line.startswith(f"({key}) {way.name} ") and line.endswith(way.meaning) for line in outcome.printed)
    assert outcome.printed[-1].endswith(f"{outcome.path.name}. Read next: docs/guide.md")


def test_demo_a_log_gets_a_line_for_every_way_and_no_progress_bars(outcome: Outcome) -> None:
    assert outcome.errors == ""
    told = [line for line in outcome.printed if "at the first step" in line]
    assert len(told) == sum(len(runs) for _, runs in outcome.results)


def test_demo_distance_is_relative_to_the_way_that_the_reference_has_come() -> None:
    start = torch.tensor([1.0, 1.0])
    reference = Run(start, [start + torch.tensor([3.0, 4.0])])
    run = Run(start, [reference.parameters[0] + torch.tensor([0.0, 1.0])])
    assert figure.drift(run, reference) == [pytest.approx(1 / 5)]
