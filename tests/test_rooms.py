"""Which part of the tree may import which (docs/decisions.md, "Rooms"). Imports are only parsed."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python/fusedaccum"

# The package's rooms: folders, single files, and files of a folder that are a room of their own.
# Which others each may import at run time; imports for types alone are free.
ROOMS = {
    "_version": set(),
    "_sources": set(),
    "engine": set(),
    "inner": set(),
    "native": {"_sources"},
    "builder": {"native"},
    "nvrtc": {"native"},
    "scalars": set(),
    "modules": set(),
    "times_mean": {"scalars"},
    "warn": set(),
    "last_window": set(),
    "older_checkpoints": set(),
    "parts": set(),
    "limits": set(),
    "mistakes": {"warn"},
    "ops": {"native", "nvrtc", "scalars", "warn"},
    "kept": {"ops", "parts"},
    "autograd": {"engine", "limits", "native", "parts"},
    "core": {
        "autograd",
        "engine",
        "last_window",
        "older_checkpoints",
        "ops",
        "parts",
        "scalars",
        "times_mean",
        "warn",
    },
    "distributed": {
        "autograd",
        "core",
        "engine",
        "limits",
        "modules",
        "older_checkpoints",
        "ops",
        "parts",
        "scalars",
        "warn",
    },
    "extensions": {
        "autograd",
        "core",
        "distributed",
        "engine",
        "inner",
        "kept",
        "limits",
        "mistakes",
        "modules",
        "ops",
        "parts",
        "scalars",
        "times_mean",
        "warn",
    },
    "features": {"core", "distributed", "extensions"},
    "core/proxy": {"core", "distributed", "engine", "features", "last_window"},
    "core/optimizer": {
        "autograd",
        "core",
        "core/proxy",
        "distributed",
        "engine",
        "features",
        "mistakes",
        "scalars",
        "times_mean",
    },
    "schedules": {"core", "last_window", "scalars"},
    "recipes": {
        "core",
        "core/optimizer",
        "engine",
        "extensions",
        "inner",
        "limits",
        "modules",
        "ops",
        "parts",
        "scalars",
        "warn",
    },
    "integrations": {"__init__"},
    "__init__": {
        "_version",
        "core/optimizer",
        "distributed",
        "last_window",
        "native",
        "ops",
        "recipes",
        "schedules",
        "times_mean",
    },
    "__main__": {"_version", "builder", "native", "ops"},
}
# What files of `ops` may import of each other. Others import only `ops` itself and BEYOND_OPS.
OPS = {
    "__init__": {"arguments", "eager", "traced"},
    "traced": {"arguments", "backends", "eager"},
    "eager": {"arguments", "backends", "memory"},
    "backends": set(),
    "reference": {"arguments"},
    "arguments": {"memory"},
    "memory": set(),
}
BEYOND_OPS = {
    "core/config.py": {"backends"},  # to check a backend's name
    "__main__.py": {"backends"},  # to list those that are available
    "core/buffers.py": {"memory"},
    "extensions/cpu_offload.py": {"backends", "memory"},
    "extensions/ring.py": {"memory"},
    "kept.py": {"memory"},
}

PLAIN_CPP = sorted(
    path.relative_to(ROOT).as_posix()
    for folder, pattern in [
        *(("csrc", f"{name}.h") for name in ("formulas", "chunks", "types")),
        ("csrc/cpu", "*"),
        ("csrc/cuda", "*"),
    ]
    for path in (ROOT / folder).glob(pattern)
)


def imports(path, types=True):
    """Full names of modules that a file imports anywhere or, if not ``types``, at run time."""
    package = ["fusedaccum", *path.relative_to(PACKAGE).parts[:-1]] if PACKAGE in path.parents else [path.parent.name]
    tree = ast.parse(path.read_text())
    guarded = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    left_out = set() if types else {inner for node in guarded for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def room_of(module):
    """The room of a module, or of a name in it; None for the package itself.

    ``"core/proxy"`` for fusedaccum.core.proxy.Wrapper, for example.
    """
    parts = module.split(".")[1:]
    return next((room for n in (2, 1) if (room := "/".join(parts[:n])) in ROOMS), None)


def files(room):
    found = sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]
    return [path for path in found if room_of(module_of(path)) == room]


def module_of(path):
    return ".".join(["fusedaccum", *path.relative_to(PACKAGE).with_suffix("").parts])


def rooms_of(path):
    """The rooms that a file imports from at run time."""
    names = {name for name in imports(path, types=False) if name.startswith("fusedaccum.")}
    folders = {name for name in names if any(other.startswith(f"{name}.") for other in names)}  # of what is imported
    return {room_of(name) for name in names - folders} - {room_of(module_of(path)), None}


def test_every_file_is_in_a_room():
    assert {room_of(module_of(path)) for path in PACKAGE.rglob("*.py")} == set(ROOMS)


def test_every_folder_is_installed():
    listed = set(re.findall(r'^    "(fusedaccum[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.M))
    folders = {module_of(path).removesuffix(".__init__") for path in PACKAGE.rglob("__init__.py")}
    assert listed == folders | {"fusedaccum.triton_kernels"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_those_below_it_and_no_others(room):
    allowed = ROOMS[room] - {"__init__"}  # the package itself is the public API
    assert set().union(*map(rooms_of, files(room))) == allowed
    assert allowed <= set(
        list(ROOMS)[: list(ROOMS).index(room)]
    )  # rooms further up in the table only, so there are no cycles


def test_every_folder_of_extensions_tests_is_named_after_an_extension():
    folders = {path.parent.name for path in (ROOT / "tests/extensions").glob("*/test_*.py")}
    assert folders <= {path.stem for path in (PACKAGE / "extensions").glob("*.py")}


# What accumulates, and knows no feature by name. (core/config.py has the public arguments.)
CORE = [*files("autograd"), *files("core")]
CORE = [path for path in CORE if path.name != "config.py"]
FEATURES = re.compile(
    r"scaler|noise|low_precision|random|draws|lbfgs|batch_?norm|master|retr(?:y|ies)|spike|unscale|offload|shard.|.shard|dtensor|fsdp|ddp|mesh|replica",
    re.I,
)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_core_names_no_feature(path):
    tree = ast.walk(ast.parse(path.read_text()))
    names = {
        name
        for node in tree
        for kind in ("id", "attr", "arg", "name")
        if isinstance(name := getattr(node, kind, None), str)
    }
    assert not set(filter(FEATURES.search, names))


CORE_LINES = 2773  # of code in core/, without docstrings, comments and blank lines: may fall, and not rise
CLASS_LINES = 300  # of any class, with all that is in it


def lines_of_code(path):
    """How many lines of a file are code."""
    source = path.read_text()
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = (node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body)
    strings = [of for of in first if isinstance(of, ast.Expr) and isinstance(of.value, ast.Constant)]
    documentation = {number for of in strings for number in range(of.lineno, of.end_lineno + 1)}
    numbered = enumerate(source.splitlines(), 1)
    return len({n for n, line in numbered if line.strip() and line.strip()[0] != "#"} - documentation)


def test_the_core_is_no_longer_than_it_was():
    assert sum(map(lines_of_code, (PACKAGE / "core").glob("*.py"))) <= CORE_LINES


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_class_is_too_long_to_be_read_at_once(path):
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    found = {node.name: node.end_lineno - node.lineno + 1 for node in classes}
    assert not {name: count for name, count in found.items() if count > CLASS_LINES}


def privates_of_pytorch(path):
    """Names with an underscore first, after ``torch.`` or ``dist.``, or imported from there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (x.name for x in node.names if x.name[0] == "_" and x.name != "_BatchNorm")
        chain = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.match(r"(torch|dist)\b", chain) and re.match(r"_(?!_|foreach_|C$|functorch$)", node.attr):
            yield node.attr


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_what_is_private_in_pytorch_is_listed_for_those_who_meet_a_new_one(path):
    rows = re.findall(r"^\| (.*) \| .* \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    listed = [what for what, where in rows if f"`{path.relative_to(PACKAGE).as_posix()}`" in where]
    assert [name for name in privates_of_pytorch(path) if name not in re.findall(r"\w+", " ".join(listed))] == []


@pytest.mark.parametrize("module", OPS)
def test_functional_layer_knows_nothing_of_optimizers(module):
    found = imports(PACKAGE / f"ops/{module}.py")
    assert {name.split(".")[2] for name in found if name.startswith("fusedaccum.ops.")} & set(OPS) <= OPS[module]
    assert not {name for name in found if name.startswith(("torch.optim", "torch.nn"))}


OTHERS = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "ops"]


@pytest.mark.parametrize("path", OTHERS)
def test_kernels_are_reached_through_ops_only(path):
    found = imports(PACKAGE / path)
    inner = {name.split(".")[2] for name in found if name.startswith("fusedaccum.ops.")} & set(OPS)
    assert inner <= BEYOND_OPS.get(path, set())
    assert not {name for name in found if "_cpu" in name or "_cuda" in name or "triton" in name}


@pytest.mark.parametrize("path", sorted((PACKAGE / "recipes").glob("*.py")), ids=lambda path: path.stem)
def test_recipes_take_from_a_wrapper_what_gathers_its_windows_and_nothing_else(path):
    private = re.findall(r"opt(?:imizer)?\.(_\w+)", path.read_text())
    assert set(private) <= {"_accumulation"}


def test_nothing_but_its_own_integration_imports_a_framework():
    extras = ("accelerate", "lightning", "transformers", "fusedaccum.integrations")
    assert not [
        name
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "integrations"
        for name in imports(path)
        if name.startswith(extras)
    ]


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
        ours = {name for name in imports(path) if name.split(".")[0] == "fusedaccum"}
        assert ours - public <= {name for name in ours if name.startswith("fusedaccum.ops.")}, path


@pytest.mark.parametrize("path", PLAIN_CPP)
def test_formulas_launchers_and_kernels_include_no_torch(path):
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', (ROOT / path).read_text(), re.MULTILINE)
    assert not [name for name in included if re.match(r"(torch|ATen|c10|pybind11|Python\.h)", name)]


def test_formulas_know_no_dtype_dispatch_and_no_header_of_ours():
    source = (ROOT / "csrc/formulas.h").read_text()
    assert not re.findall(r'#include "', source)
    assert not re.findall(r"\b(switch|DType|ScalarType)\b", source)
