"""A feature is one file and its row: without it the package trains and loads checkpoints."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PACKAGE = Path(__file__).parents[2] / "python/fusedaccum"
FEATURES = sorted(path.stem for path in (PACKAGE / "extensions").glob("*.py") if path.stem != "__init__")
# What a recipe is made of goes with the recipe (`explain` knows the ring). Moments are a part of
# batch_norm; split masters and those in CPU memory are masters.
IN_PARTS = ["split_masters", "cpu_optimizer"]
WITH_OTHERS = {
    "batch_norm": ["moments"],
    "master_weights": ["master_state", "masters_in_parts", *IN_PARTS],
    "master_state": ["master_weights", "masters_in_parts", *IN_PARTS],
    "masters_in_parts": IN_PARTS,
}
OF_RECIPES = {"batch_norm", "fused_layers", "retries", "moments", "ring"}

TRAINS = """
import copy, torch, fusedaccum as fa
from torch import nn
def train(net, opt, steps):
    for i in steps:
        torch.manual_seed(i)
        net(torch.randn(1 + i % 3, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()
def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return net, fa.AccumulatingOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1), accum_steps=4, max_grad_norm=1.0)
net, opt = made()
train(net, opt, range(6))
weights, state = copy.deepcopy((net.state_dict(), opt.state_dict()))
other, resumed = made()
other.load_state_dict(weights)
resumed.load_state_dict(state)
train(net, opt, range(6, 9))
train(other, resumed, range(6, 9))
assert resumed.progress == opt.progress == {"window": 2, "micro_batch": "1/4"}, opt.progress
assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters()))
print(sum(p.double().sum().item() for p in net.parameters()))
"""


def trained(folder):
    done = subprocess.run([sys.executable, "-c", TRAINS], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def without(feature, folder):
    """A copy of the package without the feature's file and its rows."""
    copy = folder / "fusedaccum"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    table = copy / "features.py"
    text = table.read_text()
    for name in [feature, *WITH_OTHERS.get(feature, [])]:
        (copy / f"extensions/{name}.py").unlink()
        text = without_rows(name, text)
    table.write_text(text)


def without_rows(feature, text):
    (imports,) = re.findall(rf"^from \.extensions\.{feature} import (.*)$", text, re.M) or [""]
    text = re.sub(rf"^from \.extensions\.{feature} import .*\n", "", text, flags=re.M)
    text = re.sub(rf"^(from \.extensions import .*)\b{feature}\b(, )?", r"\1", text, flags=re.M)
    text = re.sub(r"^from \.extensions import $\n", "", text.replace(", \n", "\n"), flags=re.M)
    for name in filter(None, imports.split(", ")):
        text, rows = re.subn(rf"^    \(.*\b{name}\),.*\n", "", text, flags=re.M)
        assert rows == 1
    return text


@pytest.fixture(scope="module")
def with_all():
    return trained(PACKAGE.parent)


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in OF_RECIPES])
def test_the_package_works_without(feature, with_all, tmp_path):
    without(feature, tmp_path)
    assert trained(tmp_path) == with_all
