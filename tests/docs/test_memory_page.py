"""The table of bytes a parameter: what fa.explain counts."""

from pathlib import Path

import fusedaccum as fa
import torch

PAGE = Path(__file__).parents[2] / "docs/memory.md"


def test_the_table_of_modes_is_what_explain_counts():
    with torch.device("meta"):
        net = torch.nn.Linear(1 << 13, 1 << 13, bias=False, dtype=torch.bfloat16)
    found = fa.explain(net, desired_batch=64, micro_batch=8, optimizer=torch.optim.AdamW)
    expected = {}
    for mode in found.modes:
        kept = (sum(memory.values()) - memory.get("ring", 0) for memory in (mode.memory, mode.cpu))
        here, there = (bytes_ / mode.elements for bytes_ in kept)
        here -= mode.memory["gradients"] / mode.elements
        cells = (f"`{mode.arguments}`" if mode.arguments else "none", f"{here:g}", f"{there:g}")
        expected[mode.name] = (*cells, f"{mode.moved / mode.elements:g}")
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.count(" | ") == 5]
    table = {name: tuple(cells) for name, *cells, _ in lines}
    assert {name: table.get(name) for name in expected} == expected
