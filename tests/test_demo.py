"""A tiny version of the demo: its claims hold, and its table and figure are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from demo import __main__ as demo
from demo import figure

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, Path]:
    threads = torch.get_num_threads()
    path = tmp_path_factory.mktemp("demo") / "demo.png"
    try:
        return demo.main(["--tiny", "--figure", str(path)]), path
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("place", [0, 1], ids=["digits", "gpt"])
def test_demo_fusedaccum_is_closer_to_the_big_batch_than_plain(outcome: tuple[list, Path], place: int) -> None:
    _, runs = outcome[0][place]
    apart = {key: figure.drift(run, runs["a"])[-1] for key, run in runs.items()}
    assert apart["b"] < 0.5 * apart["c"]


def test_demo_digits_follow_the_big_batch_to_rounding(outcome: tuple[list, Path]) -> None:
    _, runs = outcome[0][0]
    assert figure.drift(runs["b"], runs["a"])[-1] < 1e-5
    assert runs["b"].final_loss == pytest.approx(runs["a"].final_loss, rel=1e-5)


def test_demo_gpt_is_closer_than_the_big_batch_in_bf16(outcome: tuple[list, Path]) -> None:
    _, runs = outcome[0][1]
    assert figure.drift(runs["b"], runs["a"])[-1] < figure.drift(runs["e"], runs["a"])[-1]


def test_demo_every_way_makes_the_same_steps_with_a_partial_window(outcome: tuple[list, Path]) -> None:
    for task, runs in outcome[0]:
        assert len(task.data[0]) % (task.micro_batch * task.accum_steps) != 0
        assert {len(run.losses) for run in runs.values()} == {task.steps}


def test_demo_micro_batches_need_less_memory_than_the_big_batch(outcome: tuple[list, Path]) -> None:
    for _, runs in outcome[0]:
        assert 0 < runs["b"].peak_bytes < runs["a"].peak_bytes


def test_demo_table_is_complete(outcome: tuple[list, Path]) -> None:
    results, path = outcome
    lines = demo.table(results).splitlines()
    assert all(column in lines[0] for column in demo.HEADER)
    assert len(lines) == 2 + sum(1 + len(runs) for _, runs in results)
    assert "nan" not in "".join(lines)
    assert path.stat().st_size > 10_000
