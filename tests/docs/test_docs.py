"""The examples in README and docs run, and their links are not dead."""

import ast
import functools
import itertools
import re
import socket

import fusedaccum as fa
import pytest
import torch
from fusedaccum import features
from fusedaccum.core.extension import Extension, MicroBatchEvents
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


def events_of_a_window(monkeypatch):
    """By the call that makes them, the methods of an extension that are called; repeats are one."""
    told = []

    def telling(name):
        def called(self, *args, **kwargs):
            told.append(name)
            return getattr(Extension, name)(self, *args, **kwargs)

        return called

    names = {name for kind in (MicroBatchEvents, Extension) for name, value in vars(kind).items() if callable(value)}
    names = {name for name in names if not name.startswith("_")} - {"attach", "refuses", "run_step"}
    Telling = type("Telling", (Extension,), {name: telling(name) for name in names})
    monkeypatch.setattr(features, "FEATURES", [*features.FEATURES, (features.always, Telling)])
    found = {}

    def calls(call, function, *args, **kwargs):
        told.clear()
        result = function(*args, **kwargs)
        found[call] = [name for name, _ in itertools.groupby(told)]
        return result

    net = torch.nn.Linear(4, 2)
    make = functools.partial(fa.AccumulatingOptimizer, torch.optim.SGD(net.parameters(), lr=0.1))
    opt = calls("building", make, accum_steps=2, max_grad_norm=1.0)
    for _ in range(2):
        for when in ("the first", "the last"):
            calls(f"{when} `opt.backward(loss)`", opt.backward, net(torch.ones(1, 4)).sum())
            calls(f"{when} `opt.step()`", opt.step)
        calls("`opt.zero_grad()`", opt.zero_grad)
    return found


def test_the_page_about_extensions_has_the_events_in_their_order(monkeypatch):
    page = (ROOT / "docs/extensions.md").read_text()
    rows = re.findall(r"^\| (building|.*`opt\..*?`) \| (.*) \|$", page, re.M)
    shown = {call: re.findall(r"`(\w+)`", events) for call, events in rows}
    assert shown == events_of_a_window(monkeypatch)
