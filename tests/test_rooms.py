"""Which part of the tree may know which: docs/decisions.md, "Rooms". Read from the imports, so nothing has to be installed."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/fusedaccum"

# The functional layer, and whom of the package each of its modules may import. All other modules are the wrapper.
FUNCTIONAL = {
    "_version": set(),
    "memory": set(),
    "arguments": {"memory"},
    "native": set(),
    "backends": {"native"},
    "eager": {"arguments", "backends", "memory"},
    "traced": {"arguments", "backends", "eager"},
    "ops": {"arguments", "eager", "traced"},
    "reference": {"arguments"},
    "__main__": {"_version", "backends", "native"},
}
WRAPPER = sorted({path.stem for path in PACKAGE.glob("*.py")} - set(FUNCTIONAL))
# Beyond the ops: one checks a backend's name, one looks whether its hooks were built.
BEYOND_OPS = {"settings": {"backends"}, "intake": {"native"}}

PLAIN_CPP = sorted(
    path.relative_to(ROOT).as_posix()
    for folder, pattern in (("csrc", "formulas.h"), ("csrc", "chunks.h"), ("csrc/cpu", "*"), ("csrc/cuda", "*"))
    for path in (ROOT / folder).glob(pattern)
)


def imports(path, package="fusedaccum"):
    """Full names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def siblings(module):
    names = {path.stem for path in PACKAGE.glob("*.py")}
    return {name.split(".")[1] for name in imports(PACKAGE / f"{module}.py") if name.startswith("fusedaccum.")} & names


@pytest.mark.parametrize("module", FUNCTIONAL)
def test_functional_layer_knows_nothing_of_optimizers(module):
    assert siblings(module) <= FUNCTIONAL[module]
    assert not {name for name in imports(PACKAGE / f"{module}.py") if name.startswith(("torch.optim", "torch.nn"))}


@pytest.mark.parametrize("module", WRAPPER)
def test_wrapper_reaches_kernels_through_ops_only(module):
    allowed = {"ops", "_version"} | BEYOND_OPS.get(module, set())
    assert siblings(module) & set(FUNCTIONAL) <= allowed
    assert not {
        name for name in imports(PACKAGE / f"{module}.py") if "_cpu" in name or "_cuda" in name or "triton" in name
    }


@pytest.mark.parametrize("module", [module for module in WRAPPER if module != "__init__"])
def test_the_wrapper_knows_no_recipe(module):
    assert not {name for name in imports(PACKAGE / f"{module}.py") if name.startswith("fusedaccum.recipes")}


@pytest.mark.parametrize("path", sorted((PACKAGE / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_recipes_reach_kernels_through_ops_only(path):
    found = imports(path, package="fusedaccum.recipes")
    below = {f"fusedaccum.{module}" for module in set(FUNCTIONAL) - {"ops", "_version"}}
    assert not [name for name in found if name in below or "_cpu" in name or "_cuda" in name or "triton" in name]


@pytest.mark.parametrize("path", sorted((PACKAGE / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_recipes_take_from_a_wrapper_what_gathers_its_windows_and_nothing_else(path):
    private = re.findall(r"opt(?:imizer)?\.(_\w+)", path.read_text())
    assert set(private) <= {"_gathering"}


def test_nothing_but_its_own_integration_imports_a_framework():
    extras = ("accelerate", "lightning", "transformers", "fusedaccum.integrations")
    assert not [name for path in PACKAGE.glob("*.py") for name in imports(path) if name.startswith(extras)]


@pytest.mark.parametrize("folder", ["benchmarks", "demo", "examples", "python/fusedaccum/integrations"])
def test_users_of_the_package_use_its_public_api(folder):
    public = {
        "fusedaccum",
        "fusedaccum.ops",
        "fusedaccum.__version__",
        "fusedaccum.AccumulatingOptimizer",
        "fusedaccum.DistributedState",
        "fusedaccum.Explanation",
        "fusedaccum.LastWindow",
        "fusedaccum.explain",
        "fusedaccum.MicroBatcher",
        "fusedaccum.cached_backward",
        "fusedaccum.accumulate_batchnorm",
        "fusedaccum.fuse_embedding",
        "fusedaccum.fuse_linear",
        "fusedaccum.integrations.lightning",
        "fusedaccum.integrations.lightning.ResumeInsideWindow",
    }
    for path in (ROOT / folder).rglob("*.py"):
        ours = {name for name in imports(path, package=folder) if name.split(".")[0] == "fusedaccum"}
        assert ours - public <= {name for name in ours if name.startswith("fusedaccum.ops.")}, path


@pytest.mark.parametrize("path", PLAIN_CPP)
def test_formulas_launchers_and_kernels_include_no_torch(path):
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', (ROOT / path).read_text(), re.MULTILINE)
    assert not [name for name in included if re.match(r"(torch|ATen|c10|pybind11|Python\.h)", name)]


def test_formulas_know_no_dtype_dispatch_and_no_header_of_ours():
    source = (ROOT / "csrc/formulas.h").read_text()
    assert not re.findall(r'#include "', source)
    assert not re.findall(r"\b(switch|DType|ScalarType)\b", source)
