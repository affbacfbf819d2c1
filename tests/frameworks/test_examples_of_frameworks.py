"""docs/frameworks' pages and examples run as written, and the pages show what scripts print."""

import runpy

import pytest
from pages import OF_FRAMEWORKS, ROOT, assert_shows, run_examples

SCRIPTS = {"accelerate_loop": "accelerate", "hf_trainer": "huggingface-trainer", "lightning_trainer": "lightning"}


@pytest.mark.parametrize("page", OF_FRAMEWORKS, ids=lambda page: page.name)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(page)


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_follows_the_frameworks_big_batch(script, capsys):
    losses, big = runpy.run_path(str(ROOT / f"examples/{script}.py"))["main"]()
    assert len(losses) == len(big) >= 10
    assert losses == pytest.approx(big, rel=1e-5)  # AdamW amplifies last-bit differences where gradients are small
    assert_shows(ROOT / f"docs/frameworks/{SCRIPTS[script]}.md", capsys.readouterr().out)
