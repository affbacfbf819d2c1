"""The examples in README and docs run, top to bottom, each page in one namespace that has a model, a criterion and a loader."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


@pytest.fixture
def alone(page, tmp_path, monkeypatch):
    """A folder of its own; for pages about several ranks, a process group of one."""
    monkeypatch.chdir(tmp_path)
    if page.parent.name != "frameworks":
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page):
    namespace: dict = {
        "model": torch.nn.Linear(5, 3),
        "criterion": torch.nn.MSELoss(),
        "loader": [(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(9)],
    }
    text = page.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
