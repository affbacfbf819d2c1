"""README and docs: the code on a page, and how the tests run it."""

import copy
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
# Run by tests/frameworks, which has what they import.
OF_FRAMEWORKS = [page for page in PAGES if page.stem in ("accelerate", "huggingface-trainer", "lightning")]


def run_examples(page):
    """Runs a page, top to bottom, in one namespace that has a model, a criterion and a loader.

    Of a diff, what it leads to is run, with a model of its own; what it comes from need only be Python.
    """
    text = page.read_text()
    # On a GPU the pages of many ranks take NCCL, which knows no tensors of the CPU.
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


def side(diff, mark):
    """One of a diff's two sides, with empty lines in place of the other's."""
    return "".join(line[1:] if line[0] in (" ", mark) else "\n" for line in diff.splitlines(keepends=True))
