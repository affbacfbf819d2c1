"""The pages in docs/frameworks and the scripts in examples run as written."""

import runpy

import pytest
from pages import OF_FRAMEWORKS, ROOT, run_examples

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", OF_FRAMEWORKS, ids=lambda page: page.name)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(page)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_example_follows_the_frameworks_big_batch(script):
    losses, big = runpy.run_path(str(script))["main"]()
    assert len(losses) == len(big) >= 10
    assert losses == pytest.approx(big, rel=1e-5)  # AdamW amplifies last-bit differences where gradients are small
