"""The documentation as a site: every page has its place, every figure is drawn from results, every question is answered in code."""

import re

import pytest
from pages import PAGES, ROOT

QUESTIONS = sorted(ROOT.glob("docs/questions/[!i]*.md"))
SITE = (ROOT / "mkdocs.yml").read_text()
# Pages of the site that have their source outside docs/: see docs/site.py.
FROM_OUTSIDE = {"index.md", "contributing.md", "changelog.md"}


def images(page):
    """The files that a page shows."""
    return [(page.parent / target).resolve() for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())]


def test_every_page_is_in_the_navigation_once():
    named = re.findall(r"[\w/-]+\.md", SITE[SITE.index("\nnav:") :])
    ours = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sorted(named) == sorted(ours | FROM_OUTSIDE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_drawn_from_results(page, tmp_path):
    shown = images(page)
    if shown:
        pytest.importorskip("matplotlib")
        from benchmarks import plots, report

        for folder in {path.parent for path in shown}:
            drawn = {f"{p}.svg" for name in plots.PLOTS if report.load(name, folder) for p, _ in plots.PLOTS[name]}
            drawn |= {f"questions-{row['question']}.svg" for row in report.load("questions", folder)}
            assert {path.name for path in shown if path.parent == folder} <= drawn


def test_figures_of_questions_are_those_of_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots, report

    results = ROOT / "benchmarks/results"
    for path in plots.draw("questions", report.load("questions"), tmp_path):
        texts = [re.findall(r"<!-- (.*?) -->", p.read_text()) for p in (path, results / path.name)]
        assert texts[0] == texts[1], path.name  # matplotlib names every text that it draws


def test_pages_hold_what_the_results_say(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import report

    for page in QUESTIONS + [ROOT / "docs/questions/index.md"]:
        copy = ROOT / "docs/questions" / page.name
        before = copy.read_text()
        assert report.rewritten(before, copy.parent, report.blocks())[0] == before, page.name


def test_there_are_eight_questions():
    listed = re.findall(r"^\d\. \[.*\]\(([\w-]+\.md)\)", (ROOT / "docs/questions/index.md").read_text(), re.MULTILINE)
    assert len(listed) == 8
    assert sorted(listed) == [page.name for page in QUESTIONS]


@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_every_question_is_answered_by_code_that_proves_it_and_a_figure(page):
    text = page.read_text()
    assert text.startswith("# ")
    assert any("assert" in block for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert "## What goes wrong otherwise" in text
    name = f"questions-{page.stem.replace('-', '_')}"
    assert f"<!-- benchmarks:{name} -->" in text
    assert [path.name for path in images(page)] == [f"{name}.svg"]
