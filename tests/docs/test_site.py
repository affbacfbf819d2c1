"""The documentation site: its navigation, figures and questions.

Every page is in the navigation, figures are drawn from results, questions are answered in code.
"""

import re
import runpy

import fusedaccum as fa
import pytest
from pages import PAGES, ROOT

pytestmark = pytest.mark.long

QUESTIONS = sorted(ROOT.glob("docs/questions/[!i]*.md"))
SITE = (ROOT / "mkdocs.yml").read_text()
# Pages of the site whose source is outside docs/: see docs/site.py.
FROM_OUTSIDE = {"index.md", "contributing.md", "changelog.md"}


def images(page):
    """The images on a page."""
    return [(page.parent / target).resolve() for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())]


def test_every_page_is_in_the_navigation_once():
    named = re.findall(r"[\w/-]+\.md", SITE[SITE.index("\nnav:") :])
    ours = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sorted(named) == sorted(ours | FROM_OUTSIDE)


def test_the_reference_has_all_that_is_public():
    named = set(re.findall(r"^::: fusedaccum\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    assert set(fa.__all__) - {"__version__"} <= named


def test_roles_in_docstrings_are_names_in_the_reference():
    pytest.importorskip("mkdocs")
    rendered = runpy.run_path(str(ROOT / "docs/site.py"))["on_page_content"]
    html = "raises as :meth:<code>step</code>, of :class:<code>~fusedaccum.LastWindow</code>"
    assert rendered(html, None, None, None) == "raises as <code>step()</code>, of <code>LastWindow</code>"


def test_figures_are_drawn_from_results(tmp_path):
    """Every figure's titles and legends are those drawn from the current results."""
    pytest.importorskip("matplotlib")
    from benchmarks import report

    drawn = {}
    for folder in {path.parent for page in PAGES for path in images(page)}:
        out = tmp_path / folder.relative_to(ROOT)
        out.mkdir(parents=True, exist_ok=True)
        for rows in folder.glob("*.jsonl"):
            (out / rows.name).symlink_to(rows)
        drawn |= {folder / path.name: path for path in report.draw_all(out)}
    for page in PAGES:
        for path in images(page):
            assert path in drawn, f"no results draw {path}"
            assert texts(path) == texts(drawn[path]), path


def texts(figure):
    """Titles and legends, which matplotlib writes into an SVG as comments.

    (Short texts are ticks, which depend on its version.)
    """
    return [text for text in re.findall(r"<!-- (.*?) -->", figure.read_text()) if len(text) > 15]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.name)
def test_pages_fit_their_width(page):
    """The site cuts off code at about 82 characters. Prose is wrapped, except what is generated."""
    text = re.sub(r"(?ms)^<!-- benchmarks:(\S+) -->.*?^<!-- /benchmarks:\1 -->", "", page.read_text())
    code = "".join(re.findall(r"(?ms)^```(?:python|diff|text)\n(.*?)^```", text))
    assert [line for line in code.splitlines() if len(line) > 82] == []
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    assert [line for line in prose.splitlines() if len(line) > 100 and not line.startswith(("|", "!["))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_results_say(page):
    pytest.importorskip("matplotlib")
    from benchmarks import report

    before = page.read_text()
    assert report.rewritten(before, page.parent, report.blocks())[0] == before


def test_there_are_nine_questions_and_one_that_comes_later():
    text = (ROOT / "docs/questions/index.md").read_text()
    listed = re.findall(r"^\d\. \[[^\]]*\]\(([\w-]+\.md)\)", text, re.MULTILINE)
    assert len(listed) == 9
    assert sorted([*listed, "different-denominators.md"]) == [page.name for page in QUESTIONS]
    assert "](different-denominators.md)" in text


@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_every_question_is_answered_by_code_that_proves_it_and_a_figure(page):
    text = page.read_text()
    assert text.startswith("# ")
    assert any("assert" in block for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert "## What goes wrong otherwise" in text
    name = f"questions-{page.stem.replace('-', '_')}"
    assert f"<!-- benchmarks:{name} -->" in text
    assert [path.name for path in images(page)] == [f"{name}.svg"]
