"""The example without a framework prints what its page says. (tests/frameworks has the others.)"""

import runpy

import pytest
from pages import ROOT, assert_shows


@pytest.mark.usefixtures("one_thread")
def test_nanogpts_loop_has_the_same_losses_each_way(capsys):
    plain, added, windows = runpy.run_path(str(ROOT / "examples/nanogpt_loop.py"))["main"]()
    assert added == plain and plain[-1] < plain[0] - 0.5
    assert windows == pytest.approx(plain, rel=1e-4)
    assert_shows(ROOT / "docs/frameworks/moving-from.md", capsys.readouterr().out)
