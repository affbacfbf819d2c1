"""The examples in README and docs run, and their links are not dead."""

import ast
import functools
import re
import socket

import pytest
import torch
from pages import OF_FRAMEWORKS, PAGES, ROOT, run_examples


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")  # a warm-up, on a GPU
@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_FRAMEWORKS], ids=lambda page: page.name)
def test_examples_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # PyTorch's default backend compiles C++, which is slow; tests/core/test_compile.py covers it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    # A page that begins with a process group finds what torchrun sets, for one process.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    try:
        run_examples(page)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_page_about_extensions_shows_the_file_that_it_explains():
    page = (ROOT / "docs/extensions.md").read_text()
    file = ast.parse((ROOT / "python/fusedaccum/extensions/norm_spike.py").read_text())
    (extension,) = (node for node in file.body if isinstance(node, ast.ClassDef))
    members = {ast.dump(node) for node in extension.body}
    shown = [node for code in re.findall(r"^```py\n(.*?)^```", page, re.M | re.S) for node in ast.parse(code).body]
    assert len(shown) == 6 and all(ast.dump(node) in members for node in shown)
