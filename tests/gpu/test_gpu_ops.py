"""On a GPU, every op of every kernel backend gives the bits of the reference on the CPU."""

import contextlib
import itertools

import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import Stats, StochasticRounding, backends, reference
from gpu_cases import DEVICE, KERNELS, SIZES, every_kernel, made, needs_gpu, there
from ops_cases import DTYPES, OPS, PAIR_IDS, PAIRS, assert_same_bits, assert_same_stats, copies, values, with_nonfinite

every_pair = pytest.mark.parametrize(("out", "x"), [(DTYPES[o], DTYPES[x]) for o, x in PAIRS], ids=PAIR_IDS)


def assert_neighbours_untouched(tensors):
    for x in tensors:
        whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        assert (whole == 77.0).sum() >= whole.numel() - x.numel()


def check(call, expected_call, outs, offset=0, measured=False):
    """Check that ``call(outs, stats)`` writes on the device what ``expected_call`` does."""
    ours, expected = there(outs, offset), copies(outs)
    got, right = (Stats.empty(DEVICE), Stats.empty()) if measured else (None, None)
    written = [*ours, got.sq_norm, got.nonfinite] if measured else ours
    versions = [x._version for x in written]
    call(ours, got)
    expected_call(expected, right)
    assert all(x._version > version for x, version in zip(written, versions)), "autograd would not notice"
    for a, b in zip(ours, expected):
        assert_same_bits(a.cpu(), b)
    assert_neighbours_untouched(ours)
    if measured:
        assert_same_stats(Stats(got.sq_norm.cpu(), got.nonfinite.cpu()), right)


@pytest.mark.parametrize("offset", [0, 1, 8])
@every_pair
@every_kernel
def test_accumulate(backend, out, x, offset):
    generator = torch.Generator().manual_seed(5)
    outs, ins = ([torch.randn(n, generator=generator).to(d) for n in SIZES] for d in (out, x))
    if offset == 1:
        outs, ins = made(out, 1), made(x, 100)
        with_nonfinite(ins[7])
    ins_there = there(ins, offset % 3)
    for (scale, decay, overwrite), measured in itertools.product(
        ((0.37, 1.0, False), (-2.5, 0.75, False), (0.0, 1.0, False), (3.0, 1.0, True)), (False, True)
    ):
        for wrap in (
            float,
            lambda s: torch.tensor(s, device=DEVICE),
            lambda s: torch.tensor(s, dtype=torch.float64, device=DEVICE),
        ):
            if wrap is not float and scale == 0.37:
                continue  # FP32 has another 0.37
            check(
                lambda o, s: ops.accumulate_(o, ins_there, wrap(scale), overwrite=overwrite, decay=wrap(decay), stats=s, backend=backend),
                lambda o, s: reference.accumulate_(o, ins, scale, overwrite, decay, None, s),
                outs, offset, measured,
            )  # fmt: skip


@every_pair
def test_the_reference_gives_the_same_bits_on_the_device(out, x):
    outs, ins = made(out, 1), made(x, 100)
    with_nonfinite(ins[7])
    ins_there = there(ins)
    for scale, decay, overwrite in ((0.37, 1.0, False), (-2.5, 0.75, False), (0.0, 1.0, False), (3.0, 1.0, True)):
        check(
            lambda o, s: ops.accumulate_(o, ins_there, scale, overwrite=overwrite, decay=decay, stats=s, backend="reference"),
            lambda o, s: reference.accumulate_(o, ins, scale, overwrite, decay, None, s),
            outs, 0, True,
        )  # fmt: skip


@every_pair
@every_kernel
def test_cast(backend, out, x):
    outs, ins = made(out, 1), made(x, 100)
    with_nonfinite(ins[5])
    ins_there = there(ins)
    for scale in (1.0, 0.25, 0.0, 1e30):
        check(
            lambda o, s: ops.cast_(o, ins_there, scale, stats=s, backend=backend),
            lambda o, s: reference.cast_(o, ins, scale, s),
            outs, 3, True,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@every_kernel
def test_scale_and_stats(backend, dtype):
    generator = torch.Generator().manual_seed(5)
    finite = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
    for outs in (finite, [with_nonfinite(x.clone()) for x in finite], made(dtype, 1)):
        check(
            lambda o, s: ops.scale_(o, -1.7, stats=s, backend=backend),
            lambda o, s: reference.scale_(o, -1.7, s),
            outs, 1, True,
        )  # fmt: skip
        right = Stats.empty()
        reference.stats(outs, right)
        found = [ops.stats(there(outs), backend=backend) for _ in range(2)]
        assert_same_stats(Stats(found[0].sq_norm.cpu(), found[0].nonfinite.cpu()), right)
        if outs is finite:
            assert right.sq_norm.isfinite()
            assert found[0].sq_norm == found[1].sq_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_a_scale_that_is_written_too_is_read_before(backend, dtype):
    """Called past the checks of ops, which make a CPU scale, as the interpreter has, a number."""
    module = backends.select(backend, DEVICE, "scale_")
    factor = torch.randn(1, dtype=dtype).abs() + 1.5
    whole = torch.cat([factor, torch.randn(100_000, dtype=dtype)])
    scaled, added = whole.to(DEVICE, copy=True), whole.to(DEVICE, copy=True)
    module.scale_(scaled.split([1, 100_000]), scaled[0], None)
    torch.testing.assert_close(scaled.cpu(), whole * factor)
    grads, decay = added.clone().split([1, 100_000]), added[0] - 1
    module.accumulate_(added.split([1, 100_000]), grads, added[0], False, decay, None, None)
    torch.testing.assert_close(added.cpu(), whole * (factor - 1) + whole * factor)


@pytest.mark.parametrize("counter", [0, 3, 2**64 - 5])
@pytest.mark.parametrize(
    ("out", "x"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float64)]
)
@every_kernel
def test_stochastic_rounding(backend, out, x, counter):
    outs, ins = made(out, 1), made(x, 100)
    rounding, ins_there = StochasticRounding(2**63 + 5, [counter] * len(outs)), there(ins)
    check(
        lambda o, s: ops.accumulate_(o, ins_there, 0.37, rounding=rounding, stats=s, backend=backend),
        lambda o, s: reference.accumulate_(o, ins, 0.37, False, 1.0, rounding, s),
        outs, 1, True,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [[*DTYPES.values()], [torch.float32]], ids=["all dtypes", "one, in full tables"])
@every_kernel
def test_thousands_of_tensors_in_one_call(backend, kinds):
    sizes = [(k * 37) % 211 for k in range(3000)]
    # From pair to pair, the dtype of one changes, of both, or none; all pairs of dtypes occur.
    outs = [values(n, kinds[k // 2 % len(kinds)], k) for k, n in enumerate(sizes)]
    ins = [values(n, kinds[k // 3 % len(kinds)], k + 1) for k, n in enumerate(sizes)]
    ins_there = there(ins)
    check(
        lambda o, s: ops.accumulate_(o, ins_there, 0.37, stats=s, backend=backend),
        lambda o, s: reference.accumulate_(o, ins, 0.37, False, 1.0, None, s),
        outs, 0, True,
    )  # fmt: skip


@needs_gpu
@every_kernel
def test_more_than_2_to_the_31_elements(backend):
    n = 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 16 * n:
        pytest.skip("needs 34 GB of GPU memory")
    out, x = torch.zeros(n, device=DEVICE), torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    marks = [0, 2**31 - 1, 2**31, n - 1]
    x[marks] = 3.0
    stats = Stats.empty(DEVICE)
    ops.accumulate_([out], [x], 0.5, stats=stats, backend=backend)
    assert out[marks].tolist() == [1.5] * 4
    assert out.count_nonzero() == 4
    assert stats.sq_norm == 9.0


@needs_gpu
def test_auto_takes_the_kernels():
    assert KERNELS
    for op in OPS:
        assert backends.select("auto", DEVICE, op).__name__ != "fusedaccum.ops.reference"


def test_a_device_without_kernels_gets_plain_pytorch_and_one_warning(monkeypatch):
    missing = backends.Backend("cuda", "fusedaccum._cuda", ("cuda",), lambda: "no nvcc; install it")
    monkeypatch.setattr(backends, "TABLE", (missing, backends.TABLE[-1]))
    caches = (backends.why_missing, backends._automatic, backends._warn_no_kernels)
    with contextlib.ExitStack() as after:
        for cached in caches:
            cached.cache_clear()
            after.callback(cached.cache_clear)
        with pytest.warns(RuntimeWarning, match=r"no kernels for cuda tensors.*cuda: no nvcc; install it") as caught:
            for op in OPS:
                assert backends.select("auto", torch.device("cuda"), op).__name__ == "fusedaccum.ops.reference"
        assert [w.filename for w in caught] == [__file__]
