"""Kernels without nvcc: NVRTC compiles, files keep, CUDA's driver loads and launches them.

No GPU: a stand-in is the driver. What needs the stand-in is run again by a test at the end, in a
process that finds it as libcuda.so.1.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from cuda_standins import ROOT, compile_driver, run_tests
from fusedaccum import native, nvrtc, ops
from fusedaccum.ops import Stats, backends
from ops_cases import child_environment

WITH_DRIVER = "CUDA_SHIM" in os.environ
KERNEL = "write_kernel<float, float, true, false, false>"

pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.version.cuda is None, reason="needs NVRTC")]
with_driver = pytest.mark.skipif(not WITH_DRIVER, reason="is run by the test at the end")


# -- the compiler, and what is kept ----------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDACCUM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/nvrtc"


def never(*arguments):
    raise AssertionError("compiled again")


def is_code(compiled, kernel=KERNEL):
    symbol, code = compiled
    return code.startswith(b"\x7fELF") and b".text." + symbol in code and kernel.split("<")[0].encode() in symbol


def test_what_was_compiled_is_found_again(cache, monkeypatch):
    first = nvrtc.compiled(KERNEL, 90)
    assert is_code(first)
    monkeypatch.setattr(nvrtc, "_compile", never)
    assert nvrtc.compiled(KERNEL, 90) == first
    for other in ((KERNEL, 80), ("add_up_kernel", 90)):
        with pytest.raises(AssertionError, match="compiled again"):
            nvrtc.compiled(*other)
    for name, value in (("FLAGS", (*nvrtc.FLAGS, "-G")), ("_source", lambda: b"other"), ("_version", lambda: (12, 1))):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="compiled again"):
            patch.setattr(nvrtc, name, value)
            nvrtc.compiled(KERNEL, 90)


@pytest.mark.parametrize("damage", [b"", b"short", 40, -1], ids=["empty", "short", "one bit", "cut off"])
def test_a_damaged_file_is_compiled_again_and_replaced(cache, damage):
    nvrtc.compiled(KERNEL, 90)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    if damage == -1:
        damaged = whole[:-1]
    else:
        damaged = (
            damage if isinstance(damage, bytes) else whole[:damage] + bytes([whole[damage] ^ 1]) + whole[damage + 1 :]
        )
    path.write_bytes(damaged)
    assert is_code(nvrtc.compiled(KERNEL, 90))
    assert len(path.read_bytes()) >= len(whole) - 8  # the symbol has a number of the process's in it
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null"])
def test_a_cache_that_cannot_be_written_costs_only_time(cache, monkeypatch, folder):
    monkeypatch.setenv("FUSEDACCUM_CACHE", folder)
    assert is_code(nvrtc.compiled(KERNEL, 90))


def test_what_was_written_is_not_read_back_and_nothing_is_left_of_a_failure(cache, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    assert is_code(nvrtc.compiled(KERNEL, 90))
    assert list(cache.iterdir()) == []


def test_a_folder_in_the_place_of_a_file_is_no_error(cache):
    nvrtc.compiled(KERNEL, 90)
    (path,) = cache.iterdir()
    path.unlink()
    path.mkdir()
    assert is_code(nvrtc.compiled(KERNEL, 90))
    assert list(cache.iterdir()) == [path]


@pytest.mark.slow
def test_eight_processes_at_once(cache):
    code = (
        "import sys; from fusedaccum import nvrtc; sys.stdin.read()\n"
        f"symbol, code = nvrtc.compiled({KERNEL!r}, 90); assert b'.text.' + symbol in code"
    )
    environment = child_environment(FUSEDACCUM_CACHE=str(cache.parent))
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdin=subprocess.PIPE)
        for _ in range(8)
    ]
    for rank in ranks:
        rank.stdin.close()
    assert [rank.wait() for rank in ranks] == [0] * 8
    assert len(list(cache.iterdir())) == 1


def test_a_compile_error_says_which_kernel_and_where(cache, monkeypatch):
    source = nvrtc._source().replace(b"* scale;", b"* scael;")
    monkeypatch.setattr(nvrtc, "_source", lambda: source)
    with pytest.raises(
        RuntimeError, match=r'NVRTC_ERROR_COMPILATION, of write_kernel<.*> for sm_90\n.*"scael" is undef'
    ) as error:
        nvrtc.compiled(KERNEL, 90)
    assert len(str(error.value).splitlines()) <= 7
    assert not cache.exists()


def test_gpus_that_nvrtc_does_not_know(monkeypatch):
    assert nvrtc._arch(109) >= 100  # a later one of a major version that it knows
    monkeypatch.setattr(native, "build", lambda: native.Build(cuda_archs="nvrtc"))
    monkeypatch.setattr(native, "why_missing", lambda extension: None)
    monkeypatch.setattr(native, "why_not_with_driver", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for second, said in (((8, 0), None), ((99, 0), "knows no GPUs of compute capability 99.0; use another torch")):
        monkeypatch.setattr(backends, "_capabilities", lambda second=second: [(9, 0), second])
        reason = backends._cuda_missing()
        assert reason == said or said in reason
    monkeypatch.setattr(nvrtc, "_library", lambda: ctypes.CDLL("libnonesuch.so.13"))
    assert "libnonesuch.so.13: cannot open" in backends._cuda_missing()


# -- the driver ------------------------------------------------------------------------------------


@pytest.fixture
def driver():
    """The stand-in, with nothing recorded."""
    library = ctypes.CDLL("libcuda.so.1")
    library.record.restype = ctypes.c_char_p
    library.record()
    return library


def accumulate(out, x, **options):
    outs, ins = [torch.ones(5, dtype=out)], [torch.full((5,), 2.0, dtype=x)]
    ops.accumulate_(outs, ins, 1.0, backend="cuda", **options)
    assert outs[0].tolist() == [3.0] * 5


def calls(driver):
    """What was called since the last time, without the calls that are NVRTC's own."""
    return [call for call in driver.record().decode().splitlines() if call != "cuInit"]


def fails(driver, call, out, x):
    """Fails if the driver's function does, before anything is written, and no longer than that."""
    outs, ins = [torch.ones(5, dtype=out)], [torch.ones(5, dtype=x)]
    driver.plan(call.encode(), 2)
    with pytest.raises(RuntimeError, match=f"CUDA error in {call}: out of memory"):
        ops.accumulate_(outs, ins, 1.0, backend="cuda")
    driver.plan(call.encode(), 0)
    assert outs[0].tolist() == [1.0] * 5
    found = driver.record().decode()
    assert found.count("cuCtxPopCurrent") == found.count("cuCtxPushCurrent") - (call == "cuCtxPushCurrent")
    assert found.count("cuThreadExchangeStreamCaptureMode") != 1 or call == "cuThreadExchangeStreamCaptureMode"


@with_driver
def test_a_device_that_cannot_be_reached_is_tried_again(driver):
    """The first test to use the device."""
    for call in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"):
        fails(driver, call, torch.float32, torch.float32)
    accumulate(torch.float32, torch.float32)


@with_driver
def test_a_kernel_is_loaded_once(driver):
    load = [
        "cuThreadExchangeStreamCaptureMode",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuThreadExchangeStreamCaptureMode",
    ]
    launch = "cuLaunchKernel write_kernel<double, float, false, false, false> device 0 stream 0"
    for loading in (load, []):
        accumulate(torch.float64, torch.float32)
        assert calls(driver) == ["cuCtxPushCurrent", *loading, launch, "cuCtxPopCurrent"]


@with_driver
@pytest.mark.parametrize(
    ("call", "x"),
    [
        ("cuCtxPushCurrent", torch.float64),
        ("cuThreadExchangeStreamCaptureMode", torch.float32),
        ("cuModuleLoadData", torch.bfloat16),
        ("cuModuleGetFunction", torch.float16),
        ("cuLaunchKernel", torch.float16),
    ],
)
def test_an_error_of_the_driver_is_an_exception(driver, call, x):
    fails(driver, call, torch.float16, x)
    accumulate(torch.float16, x)


@with_driver
def test_an_error_without_a_text_is_a_number(driver):
    driver.plan(b"cuLaunchKernel", 719)
    with pytest.raises(RuntimeError, match="CUDA error in cuLaunchKernel: 719"):
        accumulate(torch.float32, torch.float32)
    driver.plan(b"cuLaunchKernel", 0)


@with_driver
def test_what_does_not_compile_leaves_tensors_alone(driver, monkeypatch):
    monkeypatch.setattr(nvrtc, "_source", lambda: b"int x = y;")
    outs, ins = [torch.ones(5, dtype=torch.bfloat16)], [torch.ones(5, dtype=torch.float64)]
    import cuda_shim

    version = outs[0]._version
    with pytest.raises(RuntimeError, match='identifier "y" is undefined'):
        cuda_shim.accumulate_(outs, ins, 1.0, False, 1.0, None, None)
    assert outs[0].tolist() == [1.0] * 5 and outs[0]._version == version
    assert calls(driver) == ["cuCtxPushCurrent", "cuCtxPopCurrent"]


@with_driver
def test_code_that_the_driver_refuses_is_an_error(driver, monkeypatch):
    monkeypatch.setattr(nvrtc, "compiled", lambda kernel, device: (b"symbol", b"no machine code" * 10))
    with pytest.raises(RuntimeError, match="CUDA error in cuModuleLoadData: 200"):
        accumulate(torch.bfloat16, torch.float16)


@with_driver
def test_thousands_of_tensors_take_few_launches(driver):
    outs, ins = ([torch.ones(2) for _ in range(2_000)] for _ in range(2))
    stats = Stats.empty()
    ops.accumulate_(outs, ins, 1.0, stats=stats, backend="cuda")
    launches = [call for call in calls(driver) if "Launch" in call]
    assert [re.search("(write|add_up)_kernel", launch)[1] for launch in launches] == ["write"] * 3 + ["add_up"]
    assert stats.sq_norm == 4 * 2 * 2_000


@with_driver
def test_statistics_of_nothing(driver):
    stats = Stats(torch.full((), 7.0, dtype=torch.float64), torch.full((), 7))
    ops.accumulate_([torch.ones(0)], [torch.ones(0)], 1.0, stats=stats, backend="cuda")
    assert (stats.sq_norm, stats.nonfinite) == (0.0, 0)


@with_driver
def test_each_device_has_code_and_context_of_its_own_in_every_thread(driver):
    """Device 1 has another compute capability: the stand-in refuses another's code or context."""
    import cuda_shim

    library = ctypes.PyDLL(cuda_shim.__file__)  # keeps the GIL
    x = torch.ones(9)
    for device in (0, 1, 0):
        launch = threading.Thread(
            target=library.add_on, args=(device, ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(9))
        )
        launch.start()
        launch.join()
    assert x.tolist() == [8.0] * 9
    found = calls(driver)
    assert [re.findall(r"\d+", call) for call in found if "Launch" in call] == [
        ["0", "7000"],
        ["1", "7001"],
        ["0", "7000"],
    ]
    assert found.count("cuModuleLoadData") == 2 * 2 and found.count("cuDevicePrimaryCtxRetain") == 2


@with_driver
def test_both_compilers_lay_out_the_kernels_argument_alike(driver):
    sizes = (ctypes.c_size_t * 5).in_dll(driver, "layout")
    members = [f"__INTADDR__(&static_cast<Batch*>(nullptr)->{name})" for name in ("call", "first_block", "tensors")]
    expected = zip(["sizeof(Batch)", *members, "sizeof(AddUp)"], sizes, strict=True)
    checks = "".join(f'static_assert({what} == {size}, "");\n' for what, size in expected)
    nvrtc._compile(nvrtc._source() + checks.encode(), "add_up_kernel", 90)
    assert 32_000 < sizes[0] <= 32_764


@with_driver
def test_the_drivers_version(driver):
    import cuda_shim

    assert (cuda_shim.driver(), cuda_shim.NEEDS_DRIVER) == (13000, 12010)
    driver.plan(b"cuDriverGetVersion", 3)
    assert cuda_shim.driver() == 0
    driver.plan(b"cuDriverGetVersion", 0)


@pytest.mark.skipif(WITH_DRIVER, reason="this run is the one with a driver")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_with_a_driver(tmp_path):
    compile_driver(tmp_path)
    code, output = run_tests(tmp_path, "-m", "not slow", __file__)
    assert code == 0, output[-6000:]
    assert " passed, 1 skipped" in output
