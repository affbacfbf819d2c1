"""The whole CUDA backend, compiled against stand-ins for CUDA, passes a GPU's tests on the CPU."""

import shutil

import pytest
import torch
from cuda_standins import ROOT, compile_driver, compile_runtime, run_tests

EACH_KIND = "stochastic or scale_and_stats or (f32 and bf16) or (two_parts and int8 and bf16)"
FILES = [f"tests/gpu/test_gpu_{name}.py" for name in ("ops", "windows", "parts")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.mark.parametrize(
    ("compiled", "more"),
    [
        (
            compile_runtime,
            "thousands or read_before or window or finite or scaler",
        ),  # thousands: of every pair of dtypes
        pytest.param(
            compile_driver,
            "f64 and f16",
            marks=pytest.mark.skipif(torch.version.cuda is None, reason="needs NVRTC"),
        ),
    ],
)
def test_the_cuda_backend_passes_the_tests_of_a_gpu(compiled, more, tmp_path):
    compiled(tmp_path)
    code, output = run_tests(tmp_path, "-k", f"cuda and ({EACH_KIND} or {more})", *FILES)
    assert code == 0, output[-4000:]
    assert " passed" in output


def test_a_fault_in_the_bindings_would_show(tmp_path):
    """All groups of dtypes write their statistics to the same place."""
    source = (ROOT / "csrc/bindings_cuda.h").read_text()
    right = "call.partials += "
    assert source.count(right) == 1
    (tmp_path / "bindings_cuda.h").write_text(source.replace(right, "call.partials += 0 * "))
    broken = tmp_path / "broken.cpp"
    broken.write_text((ROOT / "csrc/bindings_cuda.cpp").read_text())
    compile_runtime(tmp_path, broken)
    code, output = run_tests(tmp_path, "-k", "cuda and thousands", *FILES)
    assert code == 1, output[-4000:]
    assert "assert_same_stats" in output
