"""The look of all plots: a colour for every contestant, and where texts stand.

The colours are from a palette that the colour-blind can tell apart.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from .harness import BARE, GRAPH, HOOKS_ALONE, OURS, PYTHON_HOOKS, PYTHON_HOOKS_ALONE, TRITON, WITHOUT_EXTENSIONS

# Okabe and Ito's palette: ours in the strong colour, the peers in the others.
BLUE, NAVY, ORANGE, GREEN, YELLOW, SKY, PURPLE, GREY = (
    "#0072B2",
    "#003F63",
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
    HOOKS_ALONE: NAVY,
    PYTHON_HOOKS_ALONE: PURPLE,
    WITHOUT_EXTENSIONS: YELLOW,
    BARE: "#999999",
    "fusedaccum, coefficient handed on": SKY,
    GRAPH: SKY,
    TRITON: NAVY,
    "p.grad in bf16": ORANGE,
    "p.grad in FP32": ORANGE,
    "fusedaccum, bf16 sums": SKY,
    "fusedaccum, skip_micro_batch": YELLOW,
    "fusedaccum, FP32 weights": BLUE,
    "fusedaccum, fused layers": SKY,
    "fusedaccum, optimizer in CPU memory": "#444444",
    "fusedaccum, buffers in CPU memory": NAVY,
    "fusedaccum, masters in CPU memory": "#999999",
    "add after backward": PURPLE,
    "a hook per parameter": GREEN,
    "a hook per parameter, FP32 main_grad": GREEN,
    "PyTorch's own p.grad, bf16": ORANGE,
}
# Narrow, in large letters: on a phone, figures are 390 pixels wide. White on dark pages, too.
WIDTH = 5.5
STYLE = {
    "figure.figsize": (WIDTH, 3.7),
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
    "font.size": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "svg.hashsalt": "fusedaccum",  # the same rows give the same file
}


def titled(figure: Figure, title: str, subtitle: str = "") -> None:
    """A title, and a line in smaller letters below it."""
    place = figure.suptitle(f"{title}\n" if subtitle else title)  # room for the second line
    figure.add_artist(Annotation(subtitle, (0.5, 0), xycoords=place, ha="center", va="bottom", fontsize=10))


def label_ends(axes: Axes) -> None:
    """Put labels beside the axes, where their curves end, none on another. Comes last."""
    axes.figure.draw_without_rendering()  # settles the limits, and how high the axes are
    ends = [
        (*axes.transAxes.inverted().transform(line.get_transform().transform(line.get_xydata()[-1])), line)
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    ]
    ends.sort(key=lambda end: end[1])
    texts = [str(line.get_label()).replace(", ", ",\n") for *_, line in ends]
    height_of_line = 1.2 * STYLE["font.size"] / 72 * axes.figure.dpi / axes.get_window_extent().height
    heights = [height_of_line * (1.3 + text.count("\n")) for text in texts]
    at = [end[1] for end in ends]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + (heights[i - 1] + heights[i]) / 2)
    at[-1] = min(at[-1], 1)
    for i in reversed(range(len(at) - 1)):
        at[i] = min(at[i], at[i + 1] - (heights[i] + heights[i + 1]) / 2)
    for (x, y, line), text, height in zip(ends, texts, at, strict=True):
        to_its_end = {"arrowstyle": "-", "color": line.get_color(), "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            text, (x, y), (1.06, height), "axes fraction", va="center", arrowprops=to_its_end, annotation_clip=False
        )
