"""Threads and instruction sets change nothing but time; other Python threads run during a call."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from fusedaccum import ops
from ops_cases import (
    BACKENDS,
    DTYPES,
    NATIVE,
    PAIR_IDS,
    PAIRS,
    assert_same_bits,
    child_environment,
    copies,
    running,
    values,
)

pytestmark = pytest.mark.long

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
native_only = pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built")
SIZES = [100_003, 5, 0, 1, 16384, 40_000, 3, 16385, 300, 7]


@every_backend
@pytest.mark.parametrize(("buffer", "grad"), [("f32", "bf16"), ("bf16", "bf16"), ("f64", "f32")])
def test_stats_and_buffers_do_not_depend_on_the_number_of_threads(backend, buffer, grad, threads):
    outs = [values(n, DTYPES[buffer]) for n in SIZES]
    ins = [values(n, DTYPES[grad], seed=8) for n in SIZES]
    results = []
    with running(backend) as name:
        for n in (1, 2, 3, 8):
            threads(n)
            ops.accumulate_(got := copies(outs), ins, 0.3, stats=(stats := ops.Stats.empty()), backend=name)
            results.append((got, stats.sq_norm, ops.stats(got, backend=name).sq_norm))
    for got, norm, again in results:
        for a, b in zip(got, results[0][0], strict=True):
            assert_same_bits(a, b)
        assert norm == again == results[0][1]


@native_only
@pytest.mark.parametrize(("buffer", "grad"), PAIRS, ids=PAIR_IDS)
def test_stats_do_not_depend_on_the_instruction_set_or_the_alignment(buffer, grad):
    out, x = values(20_001, DTYPES[buffer]), values(20_001, DTYPES[grad], seed=1)
    norms = set()
    for backend in NATIVE:
        for offset in (0, 1):
            shifted = torch.cat([torch.zeros(offset, dtype=out.dtype), out])[offset:]
            with running(backend) as name:
                ops.accumulate_([shifted], [x], 0.3, stats=(stats := ops.Stats.empty()), backend=name)
            norms.add(repr(stats.sq_norm.item()))  # as text, all NaNs are one value
    assert len(norms) == 1


@native_only
def test_many_tensors_fall_to_threads_evenly(threads, cpu):
    """Sums are right with few large tensors among thousands of small, by any number of threads."""
    sizes = [1] * 1500 + [200_000] + [17] * 1500 + [70_000]
    outs, ins = [torch.zeros(n) for n in sizes], [torch.ones(n, dtype=torch.bfloat16) for n in sizes]
    for n in (1, 2, 5, 16):
        threads(n)
        ops.accumulate_(outs, ins, 1.0, stats=(stats := ops.Stats.empty()), backend="cpu")
    assert all((x == 4).all() for x in outs)
    assert stats.sq_norm == 16 * sum(sizes)


@native_only
@pytest.mark.parametrize("op", ["accumulate_", "cast_", "scale_", "stats"])
def test_other_python_threads_run_during_a_call(op, threads, cpu):
    threads(1)
    large, other = torch.zeros(30_000_000), torch.zeros(30_000_000)
    calls = {
        "accumulate_": lambda: ops.accumulate_([large], [other], 1.0, backend="cpu"),
        "cast_": lambda: ops.cast_([large], [other], backend="cpu"),
        "scale_": lambda: ops.scale_([large], 1.0, backend="cpu"),
        "stats": lambda: ops.stats([large], backend="cpu"),
    }
    ticks, running_now = [], threading.Event()

    def tick():
        while not running_now.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    watcher = threading.Thread(target=tick)
    watcher.start()
    spans = []
    for _ in range(8):
        begin = time.perf_counter()
        calls[op]()
        spans.append((begin, time.perf_counter()))
    running_now.set()
    watcher.join()
    # If calls held the GIL, no tick could fall well inside one.
    inside = [sum(a + 0.2 * (b - a) < t < b - 0.2 * (b - a) for t in ticks) for a, b in spans]
    assert sum(n > 0 for n in inside) >= 2


@native_only
def test_calls_from_several_python_threads():
    outs = [[torch.zeros(50_000) for _ in range(3)] for _ in range(4)]
    grads = [torch.ones(50_000, dtype=torch.bfloat16) for _ in range(3)]

    def work(mine):
        for _ in range(20):
            ops.accumulate_(mine, grads, 0.5, backend="cpu")

    workers = [threading.Thread(target=work, args=(mine,)) for mine in outs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all((x == 10).all() for mine in outs for x in mine)


def child(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code], env=child_environment(**variables), capture_output=True, text=True
    )


@native_only
@pytest.mark.parametrize("name", [backend.removeprefix("cpu-") for backend in NATIVE])
def test_environment_lowers_the_instruction_set(name):
    code = (
        "import torch; from fusedaccum import _cpu, ops; x = [torch.arange(100.)]; y = [torch.ones(100).half()]\n"
        "ops.accumulate_(x, y, 0.1, backend='cpu'); print(_cpu.capability(), x[0].double().sum().item())"
    )
    done = child(code, FUSEDACCUM_CPU_CAPABILITY=name)
    assert done.returncode == 0, done.stderr
    x = torch.arange(100.0)
    ops.accumulate_([x], [torch.ones(100).half()], 0.1, backend="reference")
    assert done.stdout.split() == [name, str(x.double().sum().item())]


@native_only
def test_environment_with_an_unknown_instruction_set_is_an_error():
    done = child(
        "import torch; from fusedaccum import ops; ops.scale_([torch.ones(3)], 2.0)", FUSEDACCUM_CPU_CAPABILITY="neon9"
    )
    assert done.returncode != 0
    assert "FUSEDACCUM_CPU_CAPABILITY is 'neon9'; this CPU has: default" in done.stderr
