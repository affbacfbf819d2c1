"""The look of all plots: a colour for every contestant, from a palette that the colour-blind can tell apart."""

from __future__ import annotations

from .harness import BARE, GRAPH, HOOKS_ALONE, OURS, PYTHON_HOOKS, PYTHON_HOOKS_ALONE, TRITON, WITHOUT_EXTENSIONS

# Okabe and Ito's palette: ours in the strong colour, the peers in the others.
BLUE, ORANGE, GREEN, YELLOW, SKY, PURPLE, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#F0E442",
    "#56B4E9",
    "#CC79A7",
    "#8C8C8C",
)
COLOURS = {
    OURS: BLUE,
    "add_ per tensor": ORANGE,
    "torch._foreach_add_": GREEN,
    "cast then add": PURPLE,
    "torch.compile of the list": YELLOW,
    "torch.compile of the adds, folded": YELLOW,
    "add_ per tensor, folded": "#D55E00",
    PYTHON_HOOKS: SKY,
    HOOKS_ALONE: "#003F63",
    PYTHON_HOOKS_ALONE: PURPLE,
    WITHOUT_EXTENSIONS: YELLOW,
    BARE: "#999999",
    "fusedaccum, coefficient handed on": SKY,
    GRAPH: SKY,
    TRITON: "#003F63",
    "p.grad in bf16": ORANGE,
    "p.grad in FP32": ORANGE,
    "fusedaccum, bf16 sums": SKY,
    "fusedaccum, skip_micro_batch": YELLOW,
    "fusedaccum, FP32 weights": BLUE,
    "fusedaccum, fused layers": SKY,
    "fusedaccum, buffers in CPU memory": "#003F63",
    "fusedaccum, masters in CPU memory": "#999999",
    "add after backward": PURPLE,
    "a hook per parameter": GREEN,
    "a hook per parameter, FP32 main_grad": GREEN,
    "PyTorch's own p.grad, bf16": ORANGE,
}
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "svg.hashsalt": "fusedaccum",  # the same rows give the same file
}
