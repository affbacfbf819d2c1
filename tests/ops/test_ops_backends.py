"""Backends: which one gets a call, what the environment variable says, and why one is missing."""

import importlib.util
import re
import subprocess
import sys
import types

import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import backends, memory
from fusedaccum.ops.memory import native_lists
from ops_cases import NATIVE, OPS, child_environment

needs_native = pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built")


@pytest.fixture
def one_missing(monkeypatch):
    """Makes the CPU backend look as if it had not been built."""
    table = [
        row if row.name != "cpu" else backends.Backend("cpu", row.module, row.devices, lambda: "it was not built here")
        for row in backends.TABLE
    ]
    monkeypatch.setattr(backends, "TABLE", tuple(table))
    monkeypatch.setattr(memory, "native_lists", lambda: None)
    for cached in (backends.why_missing, backends._automatic):
        cached.cache_clear()
    yield
    for cached in (backends.why_missing, backends._automatic):
        cached.cache_clear()


@pytest.mark.parametrize("name", [row.name for row in backends.TABLE if backends.why_missing(row.name)])
def test_a_requested_backend_that_is_missing_raises_and_says_why(name):
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=f"backend='{name}' is not available: .+ or use 'auto'"):
        ops.scale_([x], 2.0, backend=name)
    assert (x == 1).all()


def test_a_missing_backend_is_refused_by_name_and_passed_over_by_auto(one_missing):
    with pytest.raises(RuntimeError, match="backend='cpu' is not available: it was not built here; or use 'auto'"):
        ops.scale_([torch.ones(3)], 2.0, backend="cpu")
    ops.accumulate_([x := torch.ones(3)], [torch.ones(3)], 2.0)
    assert (x == 3).all()
    with pytest.raises(ValueError, match=r"buffers\[0\] and buffers\[1\] share memory"):
        ops.accumulate_([x, x], [x.clone(), x.clone()], 1.0)
    assert backends.select(None, x.device, "accumulate_").__name__ == "fusedaccum.ops.reference"


@needs_native
def test_auto_prefers_the_native_backend_for_cpu_tensors():
    for op in OPS:
        assert backends.select("auto", torch.device("cpu"), op).__name__ == "fusedaccum._cpu"


@pytest.mark.parametrize(("name", "error"), [("gpu", ValueError), (3, TypeError), ("", ValueError)])
def test_what_is_no_backend_is_refused(name, error):
    with pytest.raises(error, match=r"backend .*'auto', 'cuda', 'cpu', 'triton', 'reference'"):
        ops.scale_([torch.ones(3)], 2.0, backend=name)


def test_environment_is_the_default_and_no_more(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setenv("FUSEDACCUM_BACKEND", "reference")
    for asked in (None, "auto"):
        assert backends.select(asked, device, "stats").__name__ == "fusedaccum.ops.reference"
    if NATIVE:
        assert backends.select("cpu", device, "stats").__name__ == "fusedaccum._cpu"
    monkeypatch.setenv("FUSEDACCUM_BACKEND", "fast")
    with pytest.raises(ValueError, match="the environment variable FUSEDACCUM_BACKEND is 'fast'"):
        ops.scale_([torch.ones(3)], 2.0)
    monkeypatch.setenv("FUSEDACCUM_BACKEND", "")
    ops.scale_([torch.ones(3)], 2.0)


def test_a_backend_without_an_op_or_a_device(monkeypatch):
    half = types.ModuleType("half_a_backend")
    half.scale_ = lambda tensors, scale, stats: [x.fill_(9) for x in tensors]
    monkeypatch.setitem(sys.modules, "half_a_backend", half)
    rows = (
        backends.Backend("half", "half_a_backend", ("cpu",), lambda: None),
        backends.Backend("far", "half_a_backend", ("xpu",), lambda: None),
    )
    monkeypatch.setattr(backends, "TABLE", rows + backends.TABLE)
    backends._automatic.cache_clear()
    try:
        ops.scale_([x := torch.ones(3)], 2.0, backend="half")
        ops.scale_([y := torch.ones(3)], 2.0)
        ops.accumulate_([w := torch.ones(3)], [y], 1.0)  # an op that "half" does not have
        assert [t[0].item() for t in (x, y, w)] == [9, 9, 10]
        with pytest.raises(RuntimeError, match="backend='half' has no stats yet; use 'auto' or 'reference'"):
            ops.stats([x], backend="half")
        with pytest.raises(RuntimeError, match="backend='far' works on xpu tensors, but these are on cpu"):
            ops.scale_([x], 2.0, backend="far")
    finally:
        backends._automatic.cache_clear()


class _Driver:
    """Triton's, on a machine without a C compiler, or on one where it works."""

    def __init__(self, works):
        self._works = works

    @property
    def active(self):
        if not self._works:
            raise RuntimeError("Failed to find C compiler")
        return types.SimpleNamespace(get_current_target=lambda: "a GPU")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or backends.INTERPRETED, reason="needs Triton, and not its interpreter"
)
@pytest.mark.parametrize(
    ("capability", "hip", "works", "says"),
    [
        ((9, 0), None, True, None),
        ((9, 0), None, False, r"cannot reach the GPU \(Failed to find C compiler\); it needs a C compiler"),
        ((6, 1), None, True, "compute capability 7.0 and newer, and one here is of 6.1"),
        ((6, 1), "7.2", True, None),
    ],
    ids=["fine", "no compiler", "an old GPU", "AMD"],
)
def test_triton_is_missing_where_it_would_fail(monkeypatch, capability, hip, works, says):
    """So that "auto" takes the next backend there, instead of failing in the first backward."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: ((9, 0), capability)[i])
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("triton.runtime.driver", _Driver(works))
    reason = backends._triton_missing()
    assert (reason is None) if says is None else re.search(says, reason)


@needs_native
def test_environment_in_a_fresh_process():
    code = "import torch; from fusedaccum.ops import backends as b; print(b.select(None, torch.device('cpu'), 'stats').__name__)"
    for value, module in (("reference", "fusedaccum.ops.reference"), ("cpu", "fusedaccum._cpu")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=child_environment(FUSEDACCUM_BACKEND=value),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == module


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("counted", [True, False], ids=["counters", "no counters"])
@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False], ids=["native", "python"])
def test_a_triton_launch_has_what_is_alike(native, counted):
    """And rows of its table in int64: outputs, inputs, elements, first blocks, counters."""
    from fusedaccum.triton_kernels import backend

    f32, bf16 = torch.empty(4 * 4096), torch.empty(4 * 4096, dtype=torch.bfloat16)
    pairs = [
        (f32[:2049], bf16[:2049]),
        (f32[:0], bf16[:0]),
        (f32[4096:4099], bf16[4097:4100]),  # not aligned
        (bf16[8192:8193], bf16[8200:8201]),
        (f32[8192:12288].view(64, 64), bf16[8192:12288].view(64, 64)),
        (f32[12288:12289], bf16[12288:12289]),
    ]
    outs, ins = zip(*pairs)
    counters = [2**64 - 8, 1, 2**63, 24, 8, 16] if counted else None
    launches = native_lists().launches if native else backend.launches
    plan = launches(outs, ins, counters, 2048)
    expected = [
        (torch.float32, torch.bfloat16, True, [0, 4, 5], [0, 2, 4]),
        (torch.float32, torch.bfloat16, False, [2], [0]),
        (torch.bfloat16, torch.bfloat16, True, [3], [0]),
    ]
    assert [launch[:3] for launch in plan] == [launch[:3] for launch in expected]
    for (*_, count, blocks, rows), (*_, members, first) in zip(plan, expected, strict=True):
        assert count == len(members)
        assert blocks == first[-1] + -(-outs[members[-1]].numel() // 2048)
        columns = [
            [outs[k].data_ptr() for k in members],
            [ins[k].data_ptr() for k in members],
            [outs[k].numel() for k in members],
            first,
            [counters[k] if counted else 0 for k in members],
        ]
        assert rows == b"".join(n.to_bytes(8, sys.byteorder) for column in columns for n in column)
