"""The benchmarks: peers do the same work, shapes are the models', and pages show the results."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import fusedaccum as fa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path as MatplotlibPath
from matplotlib.text import Text

from benchmarks import (
    bench_accumulate,
    bench_buckets,
    bench_cpu_optimizer,
    bench_explain,
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
    harness,
    memory,
    models,
    peers,
    plots,
    questions,
    report,
    shapes,
    style,
    tables,
)
from benchmarks.bench_accumulate import DTYPES

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "elements", "tensors"),
    [
        ("resnet-101", 44_549_160, 314),
        ("gpt2-124m", 124_439_808, 148),
        ("llama3-8b", 2 * 218_112_000, 18),
        ("2000x64x64", 8_192_000, 2000),
    ],
)
def test_shapes_are_the_models(name: str, elements: int, tensors: int) -> None:
    found = shapes.SETS[name]()
    assert (found.elements, len(found.shapes)) == (elements, tensors)


@pytest.mark.parametrize("buffers", DTYPES)
@pytest.mark.parametrize("grads", DTYPES)
@pytest.mark.parametrize("way", [peers.add_each, peers.add_foreach, peers.cast_then_add])
def test_peers_add_what_we_add(grads: str, buffers: str, way: peers.Way) -> None:
    ours, theirs = (harness.filled([(5, 7), (130,)], DTYPES[buffers]) for _ in range(2))
    fresh = harness.filled([(5, 7), (130,)], DTYPES[grads], seed=1)
    fa.ops.accumulate_(ours, fresh, 0.125)
    way(theirs, fresh, 0.125)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("way", [peers.copy_each, peers.copy_foreach])
def test_peers_overwrite_with_what_we_overwrite_with(way: peers.Way) -> None:
    ours, theirs = (harness.filled([(5, 7), (130,)], torch.float32) for _ in range(2))
    fresh = harness.filled([(5, 7), (130,)], torch.bfloat16, seed=1)
    fa.ops.accumulate_(ours, fresh, 0.5, overwrite=True)
    way(theirs, fresh, 0.5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_what_only_a_gpu_has_measures_a_norm_where_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fa.ops, "accumulate_", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(bench_accumulate, "_why_missing", {"triton": "", "cuda": "no CUDA here"}.get)
    stats = fa.ops.Stats.empty()
    triton, graph = bench_accumulate._on_gpu([([], [])], 0.5, overwrite=False, stats=stats)
    triton.run(0)
    assert asked == [{"overwrite": False, "stats": stats, "backend": "triton"}]
    assert (graph.run, graph.skipped) == (None, "no CUDA here")


def test_window_contestants_finish_with_the_same_gradient() -> None:
    micro_batches = [harness.filled([(40, 9), (130,)], torch.bfloat16, seed) for seed in range(8)]
    sums = [harness.filled([(40, 9), (130,)], torch.float32, seed=9) for _ in range(3)]
    bench_window.fused(sums[0], micro_batches)
    bench_window.as_usual(sums[1], micro_batches, peers.add_each)
    bench_window.folded(sums[2], micro_batches, peers.add_each)
    for other in sums[1:]:
        torch.testing.assert_close(sums[0], other, rtol=1e-5, atol=1e-8)


def test_training_contestants_leave_the_same_gradient() -> None:
    work = bench_training.Work.of([(40, 9), (130,)], torch.bfloat16, torch.float32)
    left = []
    for way, params in (
        (lambda params: bench_training.wrapped(work, params), work.own_params()),
        (lambda params: bench_training.hooked(work, params), work.own_params()),
        (lambda params: bench_training.added_after(work), work.params),
    ):
        window = way(params)
        window(0)
        window(1)  # nothing of the first window may get into the second
        left.append([p.grad.clone() for p in params])
    for other in left[1:]:
        torch.testing.assert_close(left[0], other, rtol=8e-3, atol=1e-8)


def test_models_have_the_sizes_of_their_names() -> None:
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in models.LanguageModel(size).parameters()) for name, size in models.SIZES.items()
        }
    # GPT-2 also has 1,024 position embeddings and a final norm.
    assert counts["gpt2-124m"] == 124_439_808 - 1024 * 768 - 2 * 768
    assert counts["llama-1b"] == 2 * 32000 * 2048 + 20 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048)


def test_a_step_tells_accumulation_from_forward_and_backward(tmp_path: Path) -> None:
    options = harness.Options(quick=True, rounds=2, out=tmp_path, compile=False, backend="reference")
    rows = bench_step.run(options)
    shares = {row["contestant"]: row["accumulation_share"] for row in rows}
    assert shares[bench_step.ALONE] == 0
    assert all(share < 1 for share in shares.values())
    assert "tiny, 8 × 64 tokens: fusedaccum" in report.printed("step", rows)


def test_a_slower_step_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of the ratio decides, and the profile is of a window of either."""
    real = bench_pairs.wrapped

    def slower(*arguments: Any, **settings: Any) -> Callable[[int], object]:
        window = real(*arguments, **settings)
        return lambda i: [window(i) for _ in range(4)]

    options = harness.Options(quick=True, rounds=9, out=tmp_path, compile=False, backend="reference")
    monkeypatch.setattr(bench_pairs, "wrapped", slower)
    (ours, *others) = bench_pairs.run(options)
    assert (ours["contestant"], ours["how"], ours["sequences"]) == (harness.OURS, "eager", 2)
    assert ours["speedup_low"] <= ours["speedup"] <= ours["speedup_high"] < 1
    assert {row["contestant"] for row in others} == bench_pairs.PLAIN.keys()
    mine, theirs = (sum(line[k] for line in ours["profile"]) for k in (1, 2))
    assert mine > theirs > 0
    shown = report.printed("pairs", [ours, *others])
    assert "tiny, 2 × 32 tokens, eager" in shown and str(ours["profile"][0][0]) in shown


def test_a_graph_is_recorded_after_windows_have_made_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the guide says it: made, run and recorded on one stream, which is not the default one."""
    calls: list[object] = []
    stream = mock.MagicMock(name="stream")
    graph = mock.MagicMock(name="graph")
    graph.replay = lambda: calls.append("replayed")
    recording = mock.MagicMock(name="recording")
    recording.return_value.__enter__.side_effect = lambda: calls.append("records")
    recording.return_value.__exit__.side_effect = lambda *_: calls.append("recorded")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda of: contextlib.nullcontext() if of is stream else pytest.fail())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)

    def make() -> Callable[[int], object]:
        calls.append("made")
        return calls.append

    window = bench_pairs.graphed(make)
    assert calls == ["made", 0, 0, "records", 0, "recorded"]
    assert recording.call_args == mock.call(graph, stream=stream)
    window(1)
    assert calls[6:] == ["replayed"]


def test_a_gpu_is_warm_when_turns_get_no_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([4.0, 3.0, 2.99, 2.0])
    monkeypatch.setattr(environment, "device", torch.device("cpu"))
    harness._settle(lambda: next(took))
    monkeypatch.setattr(environment, "device", torch.device("cuda"))
    harness._settle(lambda: next(took))
    assert list(took) == [2.0]
    always = iter(float(n) for n in range(100, 0, -5))
    harness._settle(lambda: next(always))
    assert len(list(always)) == 20 - harness.TURNS


@pytest.mark.parametrize("rounds", [1, 5, 9, 30])
def test_the_interval_of_a_median_holds_it(rounds: int) -> None:
    """Of 2,000 draws from a skewed distribution, whose median is known."""
    generator = random.Random(rounds)
    median, within = math.log(2), 0
    for _ in range(2000):
        low, high = harness.interval([generator.expovariate(1) for _ in range(rounds)])
        within += low <= median <= high
    fewest = 0 if rounds == 1 else 0.92 if rounds < 6 else 0.935
    assert fewest <= within / 2000 < 0.995


def test_calls_are_timed_with_as_many_tensors_as_their_limits_speak_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_overhead, "COUNTS", (1,))
    monkeypatch.setattr(bench_overhead, "race", lambda contestants, _: harness.race(contestants, 1, at_least=0.0))
    rows = bench_overhead.run(harness.Options(out=tmp_path))
    counts = {r["tensors"] for r in rows if r["level"] == "call"}
    assert counts >= {len(shapes.SETS[name]().shapes) for name in ("resnet-101", "2000x64x64")}
    assert "call, 2,000 tensors" in tables.markdown(tables.overhead(rows))
    assert plots.draw("overhead", rows, tmp_path)


@pytest.mark.slow
def test_explain_is_measured_beside_what_it_says(tmp_path: Path) -> None:
    options = harness.Options(quick=True, rounds=2, sets=("resnet-101",), out=tmp_path, backend="reference")
    rows = bench_explain.run(options)
    assert {row["contestant"] for row in rows} == {*bench_explain.SETTINGS, bench_explain.PLAIN} - {
        "buffers in CPU memory",  # only for parameters on another device
        "masters there too",
    }
    assert all(row["said_ms"] > 0 and row["median_ms"] > 0 for row in rows)
    assert "resnet-101 bf16: plain p.grad" in report.printed("explain", rows)


@pytest.mark.parametrize("named", ["", "4ca5cadeb0a7"])
def test_a_source_tree_without_git_is_of_the_commit_that_the_environment_names(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("FUSEDACCUM_COMMIT", named)
    assert environment.describe()["commit"] == (named or "unknown")


def test_memory_records_the_peak_of_a_stretch() -> None:
    with memory.recorded("cpu") as timeline:
        kept = torch.zeros(1000)
        with memory.mark("stretch"):
            torch.zeros(500_000).add_(1)
        kept.add_(1)
    assert 2_004_000 <= timeline.peak_of("stretch") < 2_100_000


@pytest.mark.slow
def test_quick_run_writes_rows_tables_and_plots(tmp_path: Path) -> None:
    options = harness.Options(
        quick=True, rounds=2, sets=("gpt2-124m",), out=tmp_path, compile=False, backend="reference"
    )
    rows = bench_accumulate.run(options)
    assert rows == report.load("accumulate", tmp_path)
    for column in ("cpu", "torch", "commit", "threads"):
        assert all(column in row for row in rows)
    ours = next(row for row in rows if row["contestant"] == harness.OURS)
    assert {"median_ms", "p10_ms", "p90_ms", "bytes", "gb_per_s", "share_of_bandwidth", "speedup"} <= set(ours)
    assert "gpt2-124m bf16→fp32 add" in report.printed("accumulate", rows)
    assert tables.markdown(tables.accumulate(rows)).startswith("| case |")
    assert all(path.stat().st_size > 1000 for path in report.draw_all(tmp_path))


def test_sets_are_measured_one_after_another_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*sets: str) -> None:
        with harness.Sink("window", harness.Options(out=tmp_path, sets=sets), 1) as sink:
            for name in sets or ("resnet-101",):
                sink.add([{"set": name, "contestant": c, "median_ms": random.random()} for c in "ab"])

    def sets() -> list[object]:
        return [row["set"] for row in report.load("window", tmp_path)]

    measure("resnet-101", "gpt2-124m")
    first = report.load("window", tmp_path)
    measure("llama3-8b")
    assert report.load("window", tmp_path)[:4] == first
    assert sets() == ["resnet-101"] * 2 + ["gpt2-124m"] * 2 + ["llama3-8b"] * 2
    measure("resnet-101")
    assert sets() == ["gpt2-124m"] * 2 + ["llama3-8b"] * 2 + ["resnet-101"] * 2
    assert report.load("window", tmp_path)[-1]["median_ms"] != first[1]["median_ms"]
    with (
        pytest.raises(KeyboardInterrupt),
        harness.Sink("window", harness.Options(out=tmp_path, sets=("a", "b")), 2) as sink,
    ):
        sink.add([{"set": "a"}])
        raise KeyboardInterrupt
    assert sets()[-1:] == ["a"] and len(sets()) == 7
    measure()  # all sets: a run of its own
    assert sets() == ["resnet-101"] * 2
    monkeypatch.setattr(environment, "describe", lambda: {"commit": "another"})
    measure("gpt2-124m")
    assert sets() == ["gpt2-124m"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["window.jsonl"]


def test_ways_of_buffers_in_cpu_memory_have_a_colour_too() -> None:
    """They are drawn only on a GPU, after all measurements, which a missing colour would waste."""
    assert style.COLOURS.keys() >= bench_memory.WAYS.keys() | bench_memory.OFFLOADED.keys()


def test_a_contestant_has_one_colour_in_all_questions() -> None:
    colours: dict[str, set[str]] = {}
    for question in questions.QUESTIONS.values():
        for contestant, colour in getattr(question, "COLOURS", {}).items():
            colours.setdefault(contestant, {style.COLOURS.get(contestant, colour)}).add(colour)
    assert all(len(found) == 1 for found in colours.values()), colours


@pytest.mark.parametrize("folder", [report.RESULTS, report.RESULTS / "gpu"], ids=lambda folder: folder.name)
def test_what_is_written_in_a_plot_can_be_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is cut off, small, or on another text, curve or bar; titles and legends are short."""
    with monkeypatch.context() as patched:
        figures: list[Figure] = []
        patched.setattr(plots.plt, "close", figures.append)
        measured = {name: rows for name in report.TABLES if (rows := report.load(name, folder))}
        names = [path.name for name, rows in measured.items() for path in plots.draw(name, rows, tmp_path)]
    wrong = []
    for name, figure in zip(names, figures, strict=True):
        texts = _written(figure, monkeypatch)
        plots.plt.close(figure)
        assert len(figure.get_suptitle().split()) <= 8, name
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        assert all(len(legend.get_texts()) <= 4 for legend in legends), name
        assert all(text.get_fontsize() >= 10 for text in texts), name
        drawn = [path for axes in figure.axes for path in _outlines(axes)]
        boxes = {text: Text.get_window_extent(text).padded(-1) for text in texts}  # without an annotation's arrow
        # A tilted text's box is larger than the text; and a title's has room for the subtitle.
        exact = [text for text in texts if not text.get_rotation() % 90 and not text.get_text().endswith("\n")]
        for text, box in boxes.items():
            if (
                not figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
                or not figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
                or any(path.intersects_bbox(box) for path in drawn)
                or (text in exact and any(boxes[other].overlaps(box) for other in exact if other is not text))
            ):
                wrong.append((name, text.get_text()))
    assert not wrong


def _written(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[Text]:
    """The texts that are drawn: matplotlib keeps others, which are not."""
    texts: list[Text] = []
    with monkeypatch.context() as patched:
        patched.setattr(Text, "draw", lambda text, _: texts.append(text))
        figure.draw_without_rendering()
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def _outlines(axes: Axes) -> Iterator[MatplotlibPath]:
    """Curves, bars and filled areas, where they are on the page."""
    for artist in (*axes.lines, *axes.patches):
        yield artist.get_transform().transform_path(artist.get_path())
    for collection in axes.collections:
        yield from map(collection.get_transform().transform_path, collection.get_paths())


@pytest.mark.slow
def test_buckets_are_held_against_the_way_that_does_as_much(tmp_path: Path) -> None:
    rows = bench_buckets.run(harness.Options(quick=True, rounds=2, out=tmp_path))
    assert rows == report.load("buckets", tmp_path)
    of = {str(row["contestant"]): row for row in rows}
    assert set(of) == set(bench_buckets.WAYS["fp32"])
    ours, plain = of[harness.OURS], of[bench_buckets.PLAIN]
    assert ours["against"] == bench_buckets.PLAIN and "against" not in plain
    assert ours["least_takes"] == pytest.approx(ours["least_ms"] / plain["least_ms"], rel=1e-3)
    assert f"{ours['faults']:,.0f} / {plain['faults']:,.0f}" in report.printed("buckets", rows)


@pytest.mark.parametrize(("excess", "said"), [((11, 14), "7% and 4%"), ((177, 325), "109% and 100%")])
def test_the_title_of_the_memory_plot_says_what_its_rows_say(excess: tuple[int, int], said: str) -> None:
    parts: dict[str, list[int]] = {"parameter_bytes": [162, 325], "excess_bytes": list(excess)}
    rows: list[harness.Row] = []
    for way, (weights, at) in {"ours": ("bf16", 0), "theirs": ("bf16", 1), "ours again": ("fp32", 1)}.items():
        rows.append({"contestant": way, "weights": weights, **{k: v[at] << 20 for k, v in parts.items()}})
    title, subtitle = plots.memory_finding(rows)
    assert title == f"Beyond parameters and sums: {said}"
    assert subtitle == f"of all gradients: {excess[0]} MiB (bf16 weights) and {excess[1]} MiB (fp32 weights)"


def test_questions_are_measured_found_and_drawn(tmp_path: Path) -> None:
    rows = bench_questions.run(harness.Options(quick=True, out=tmp_path))
    assert {str(row["question"]) for row in rows} == set(questions.QUESTIONS)
    assert all("contestant" in row for row in rows)
    printed = report.printed("questions", rows)
    found, in_full = tables.by_question(rows), tables.by_question(report.load("questions"))
    for name, question in questions.QUESTIONS.items():
        assert question.finding(found[name]) in printed
        assert question.title(found[name]) != question.title(in_full[name]), "the title is not from the rows"
    drawn = {path.name: path.stat().st_size for path in report.draw_all(tmp_path)}
    assert drawn.keys() == {f"questions-{name}.svg" for name in questions.QUESTIONS}
    assert min(drawn.values()) > 5000


def test_report_rewrites_marked_blocks_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmarks:window -->\nold\n<!-- /benchmarks:window -->\nafter\n")
    assert report.rewrite(page, {"window": "new"}) == []
    assert page.read_text() == "before\n<!-- benchmarks:window -->\nnew\n<!-- /benchmarks:window -->\nafter\n"
    assert report.rewrite(page, {}) == ["window"]


def test_goals_are_held_against_what_was_measured() -> None:
    """Of a device of 1 GB/s and 1,000 elements: a byte takes a nanosecond."""

    def row(contestant: str, nanoseconds: float, against: float, kind: str = "variant", **case: object) -> harness.Row:
        case = {"set": "small", "grads": "bf16", "buffers": "fp32", **case}
        moved = case.pop("moved")
        return {
            **case,
            "contestant": contestant,
            "kind": kind,
            "median_ms": nanoseconds / 1e6,
            "bytes_per_element": moved,
            "share_of_bandwidth": 1000 * moved / nanoseconds,
            "ours_is_faster": nanoseconds / against,
        }

    adds: list[harness.Row] = []
    for mode, stats, moved, ours in (
        ("add", False, 10, 12_500),
        ("overwrite", False, 6, 8_000),
        ("add", True, 10, 13_000),
    ):
        case = {"mode": mode, "stats": stats, "moved": moved}
        adds += [
            row(harness.OURS, ours, ours, "ours", **case),
            row(harness.GRAPH, 10_000, ours, **case),
            row(harness.TRITON, 1.25 * ours, ours, **case),
            row("add_ per tensor", 4 * ours, ours, "peer", **case),
            row("torch._foreach_add_", 3 * ours, ours, "peer", **case),
        ]
    adds.append(row("fusedaccum without stats", 12_500, 13_000, mode="add", stats=True, moved=10))
    windows = [row("fusedaccum, coefficient handed on", 95_000, 100_000, moved=84)]
    header, lines = tables.goals(adds, windows)
    assert header[2:] == ["small"]
    assert [line[2] for line in lines] == ["80% (100%)", "75% (60%)", "3.00×", "+4.0%", "+25%", "+25%"]
    assert tables.goals(adds, [])[1][4][2] == "–"


@pytest.mark.slow
def raced(contestant: str, kind: str, ms: float, **of_row: object) -> harness.Row:
    """A row of an add of one set, in a race whose fastest stream took 10 ms."""
    case = {"set": "small", "grads": "bf16", "buffers": "fp32", "mode": "add", "stats": False}
    times = {
        "median_ms": ms,
        "p10_ms": ms,
        "p90_ms": ms,
        "gb_per_s": 100 / ms,
        "speedup": 2.0,
        "best_peer": "add_ per tensor",
    }
    row = {
        **case,
        **times,
        "contestant": contestant,
        "kind": kind,
        "share_of_bandwidth": 10 / ms,
        "bandwidth_gb_per_s": 10.0,
    }
    return row | of_row


def test_shares_that_do_not_compare_are_marked_and_the_marks_explained() -> None:
    """Above 100%, and where another race measured a bandwidth that is more than 15% higher."""
    fast = {"set": "fast", "bandwidth_gb_per_s": 11.7}
    slow = {"set": "slow", "bandwidth_gb_per_s": 11.9}
    for other, mark in ((fast, ""), (slow, tables.SLOWER)):
        for ms, above in ((10.0, ""), (9.0, tables.ABOVE)):
            ours = [raced(harness.OURS, "ours", ms), raced(harness.OURS, "ours", 10.0, **other)]
            for table in (tables.accumulate(ours), tables.window(ours), tables.summary(ours)):
                (share,) = {cell for cell in table[1][0] if "%" in cell}
                assert share == f"{10 / ms:.0%}{above}{mark}"
                for page in (tables.text(table), tables.markdown(table)):
                    assert [note in page for note in tables.FOOTNOTES.values()] == [bool(above), bool(mark)]


def test_the_cost_of_a_norm_is_that_of_the_times_beside_it() -> None:
    rows = [
        raced(harness.OURS, "ours", 12.0, stats=True),
        raced("fusedaccum without stats", "variant", 10.0, stats=True, ours_is_faster=10 / 12),
        raced(harness.OURS, "ours", 20.0),  # when the machine was slower
    ]
    ((_, of_both, without, cost, *_),) = tables.stats_cost(rows)[1]
    assert (of_both, without, cost) == ("12.00", "10.00", "+20.0%")
    assert len(tables.accumulate(rows)[1]) == 1


def test_the_page_that_one_reads_has_narrow_tables() -> None:
    page = (environment.ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rules = [line for line in page.splitlines() if line.startswith(("| ---", "|---"))]
    assert rules and max(line.count("|") - 1 for line in rules) <= 5


def test_ranks_run_every_way(tmp_path: Path) -> None:
    options = harness.Options(
        quick=True, rounds=2, sets=("resnet-101",), out=tmp_path, compile=False, backend="reference"
    )
    rows = bench_ranks.run(options)
    assert [row["contestant"] for row in rows] == list(bench_ranks.WAYS)
    assert all(row["median_ms"] > 0 for row in rows)
    assert "resnet-101, 2 ranks" in report.printed("ranks", rows)


def test_a_benchmark_that_fails_leaves_the_others_their_results(monkeypatch, tmp_path, capsys) -> None:
    from types import SimpleNamespace

    from benchmarks import __main__ as command

    def broken(options: harness.Options) -> list[harness.Row]:
        raise ValueError("no such peer")

    ran = []
    others = {"first": SimpleNamespace(run=broken), "second": SimpleNamespace(run=ran.append)}
    monkeypatch.setattr(command, "BENCHMARKS", others)
    monkeypatch.setattr(report, "printed", lambda name, rows: f"table of {name}")
    monkeypatch.setattr("sys.argv", ["benchmarks", "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    told = capsys.readouterr()
    assert len(ran) == 1 and "table of second" in told.out
    assert "no such peer" in told.err and "failed, as told above: first" in told.err


def test_an_optimizer_in_cpu_memory_is_held_against_what_has_to_be_done(tmp_path: Path) -> None:
    options = harness.Options(quick=True, rounds=2, sets=("gpt2-124m",), out=tmp_path, backend="reference")
    rows = bench_cpu_optimizer.run(options)
    assert {r["kind"] for r in rows} == {"ours", "variant", "floor"}
    header, (line,) = tables.cpu_optimizer(rows)
    (ours,), (floor,) = ([r["median_ms"] for r in rows if r["kind"] == kind] for kind in ("ours", "floor"))
    assert len(line) == len(header) and line[2] == f"{ours / floor:.2f}×"


def test_sums_of_24_bits_are_held_against_fp32_ones(tmp_path: Path) -> None:
    options = harness.Options(quick=True, rounds=2, sets=("gpt2-124m",), out=tmp_path, backend="reference")
    rows = bench_parts.run(options)
    assert {str(r["case"]) for r in rows} == {*bench_parts.CASES}
    header, lines = tables.parts(rows)
    assert [line[0] for line in lines] == [f"gpt2-124m {case}" for case in bench_parts.CASES]
    assert all(len(line) == len(header) and line[-1].endswith("×") for line in lines)


def test_peaks_with_adamw_are_those_that_explain_predicts(tmp_path: Path) -> None:
    rows = bench_states.run(harness.Options(quick=True, out=tmp_path, backend="auto"))
    assert [r["contestant"] for r in rows] == [*bench_states.WAYS]
    assert all(r["predicted_bytes"] == pytest.approx(r["peak_bytes"], rel=0.1) for r in rows)
    each = [r["peak_bytes"] / r["elements"] for r in rows]
    # Two layers of the twelve; what is on top, a bucket and a part of the step, is the same.
    assert each == pytest.approx([8, 18, 16, 15, 11], rel=0.25) and each[1:] == sorted(each[1:], reverse=True)
    header, lines = tables.states(rows)
    assert all(len(line) == len(header) for line in lines)
