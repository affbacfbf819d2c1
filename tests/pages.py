"""README and docs: the code on a page, and how the tests run it."""

import copy
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
# tests/frameworks runs these: it has what they import.
OF_FRAMEWORKS = [page for page in PAGES if page.stem in ("accelerate", "huggingface-trainer", "lightning")]


def run_examples(page):
    """Runs a page, top to bottom, in one namespace that has a model, a criterion and a loader.

    Of a diff, the new side is run, with a model of its own; the old side must only be valid Python.
    """
    text = page.read_text()
    # On a GPU the pages about several ranks use NCCL, which does not take CPU tensors.
    device = "cuda" if "nccl" in text and torch.cuda.is_available() else "cpu"
    namespace: dict = {
        "model": torch.nn.Linear(5, 3, device=device),
        "criterion": torch.nn.MSELoss(),
        "loader": [(torch.randn(4, 5, device=device), torch.randn(4, 3, device=device)) for _ in range(9)],
    }
    for block in re.finditer(r"^```(python|diff)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        before = "\n" * (text[: block.start()].count("\n") + 1)
        kind, code = block.groups()
        if kind == "python":
            exec(compile(before + code, str(page), "exec"), namespace)
        else:
            compile(before + side(code, "-"), str(page), "exec")
            own = {**namespace, "model": copy.deepcopy(namespace["model"])}
            exec(compile(before + side(code, "+"), str(page), "exec"), own)


def assert_shows(page, printed):
    """The page shows what an example printed: the same words and numbers, but for rounding."""
    blocks = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = (block for block in blocks if block.startswith(printed.splitlines()[0]))
    number = re.compile(r"\d+\.\d+")
    assert number.sub("#", shown) == number.sub("#", printed)
    a, b = ([float(x) for x in number.findall(text)] for text in (shown, printed))
    assert a == pytest.approx(b, rel=1e-4)


def side(diff, mark):
    """One side of a diff, with empty lines in place of the other's."""
    return "".join(line[1:] if line[0] in (" ", mark) else "\n" for line in diff.splitlines(keepends=True))
