"""On a GPU: every kernel backend against the reference on the CPU, bit for bit, and what only a GPU has: streams, graphs, no waiting.

Without a GPU the same tests run on CPU tensors (with the CPU kernels, or Triton's under TRITON_INTERPRET=1), so that they are known to
work on the day they meet one; what needs CUDA itself is skipped.
"""

import contextlib
import itertools

import fusedaccum as fa
import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import Stats, StochasticRounding, backends, reference
from ops_cases import DTYPES, OPS, PAIR_IDS, PAIRS, assert_same_bits, assert_same_stats, copies, values, with_nonfinite
from torch import nn
from training import assert_same_parameters, big_batch_step, data, mean_loss, model, parts, sgd, twin

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
KERNELS = [r.name for r in backends.TABLE if DEVICE.type in r.devices and backends.why_missing(r.name) is None]
SIZES = [0, 1, 7, 8, 9, 31, 1023, 2049, 4095, 4096, 4097, 16383, 16384, 16385, 50_001]

every_kernel = pytest.mark.parametrize(
    "backend", KERNELS or [pytest.param("", marks=pytest.mark.skip("no kernels here"))]
)
every_pair = pytest.mark.parametrize(("out", "x"), [(DTYPES[o], DTYPES[x]) for o, x in PAIRS], ids=PAIR_IDS)
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


def there(tensors, offset=0):
    """Copies on the device, ``offset`` elements into memory of their own that ends and begins with sentinels."""
    placed = []
    for x in tensors:
        whole = torch.full((x.numel() + 32,), 77.0, dtype=x.dtype, device=DEVICE)
        placed.append(whole[16 + offset : 16 + offset + x.numel()].copy_(x))
    return placed


def assert_neighbours_untouched(tensors):
    for x in tensors:
        whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        assert (whole == 77.0).sum() >= whole.numel() - x.numel()


def made(dtype, seed, sizes=SIZES):
    return [values(n, dtype, seed + k) for k, n in enumerate(sizes)]


def check(call, expected_call, outs, offset=0, measured=False):
    """``call(outs, stats)`` on the device gives what ``expected_call(outs, stats)`` gives on the CPU."""
    ours, expected = there(outs, offset), copies(outs)
    got, right = (Stats.empty(DEVICE), Stats.empty()) if measured else (None, None)
    call(ours, got)
    expected_call(expected, right)
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


@every_kernel
def test_thousands_of_tensors_of_all_dtypes_in_one_call(backend):
    sizes = [(k * 37) % 211 for k in range(3000)]
    kinds = list(DTYPES.values())
    outs = [values(n, kinds[k % 4], k) for k, n in enumerate(sizes)]
    ins = [values(n, kinds[k // 4 % 4], k + 1) for k, n in enumerate(sizes)]
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


NO_WAITING = "ignore:Synchronization debug mode is a prototype"


@contextlib.contextmanager
def no_waiting():
    """Within, whatever waits for the device raises."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.filterwarnings(NO_WAITING)
@pytest.mark.parametrize("backend", [*KERNELS, "reference"])
def test_nothing_waits_for_the_device(backend):
    outs, ins = there(made(torch.float32, 1)), there(made(torch.bfloat16, 2))
    scale, stats = torch.tensor(0.5, device=DEVICE), Stats.empty(DEVICE)
    ops.accumulate_(outs, ins, scale, stats=stats, backend=backend)
    with no_waiting():
        for number in (scale, 0.5):
            ops.accumulate_(outs, ins, number, stats=stats, backend=backend)
            ops.scale_(outs, number, backend=backend)
        ops.stats(outs, backend=backend)


@needs_gpu
@pytest.mark.filterwarnings(NO_WAITING)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_pooled_batch_statistics_wait_for_nothing(momentum):
    layer = fa.accumulate_batchnorm(nn.BatchNorm2d(3, momentum=momentum)).to(DEVICE)
    oracle = nn.BatchNorm2d(3, momentum=momentum)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), accum_steps=2)
    micro_batches = [torch.randn(4, 3, 5, 5) for _ in range(4)]
    there = [x.to(DEVICE) for x in micro_batches]
    for i, x in enumerate(there):
        with no_waiting() if i else contextlib.nullcontext():
            layer(x).square().mean().backward()
            opt.step()
    for window in (micro_batches[:2], micro_batches[2:]):
        oracle(torch.cat(window))
    for ours, theirs in zip(layer.buffers(), oracle.buffers()):
        torch.testing.assert_close(ours.cpu(), theirs)


@needs_gpu
@pytest.mark.filterwarnings(NO_WAITING)
@pytest.mark.parametrize(
    "settings", [{}, {"max_grad_norm": 1.0}, {"nonfinite": "skip_window"}, {"noise_scale": 0.5}], ids=str
)
def test_a_window_with_a_fused_optimizer_waits_for_nothing(settings):
    net = model(torch.float32).to(DEVICE)
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW(net.parameters(), fused=True), 2, **settings)
    _, _, micro_batches = batches(torch.float32, (12, 12))

    def window():
        for xs, ys in micro_batches:
            opt.backward(mean_loss(net, xs, ys), weight=12.0)
            opt.step()
            opt.zero_grad()

    window()  # the first makes the optimizer's state
    with no_waiting():
        window()
    assert opt.last_window.applied


@pytest.mark.skipif(not GPU or "cuda" not in KERNELS, reason="needs a CUDA device and the CUDA kernels")
def test_a_graph_replays_with_the_scale_of_the_moment():
    outs, ins = there(made(torch.float32, 1)), there(made(torch.bfloat16, 2))
    scale, stats = torch.tensor(0.5, device=DEVICE), Stats.empty(DEVICE)
    expected = [x.cpu() for x in outs]
    graph = torch.cuda.CUDAGraph()
    ops.accumulate_(
        there(made(torch.float32, 1)), ins, scale, stats=stats, backend="cuda"
    )  # loads what is loaded lazily
    with torch.cuda.graph(graph):
        ops.accumulate_(outs, ins, scale, stats=stats, backend="cuda")
    for number in (0.5, -2.0):
        scale.fill_(number)
        graph.replay()
        right = Stats.empty()
        reference.accumulate_(expected, [x.cpu() for x in ins], number, False, 1.0, None, right)
        for a, b in zip(outs, expected):
            assert_same_bits(a.cpu(), b)
        assert_same_stats(Stats(stats.sq_norm.cpu(), stats.nonfinite.cpu()), right)


@pytest.mark.skipif(not GPU or "cuda" not in KERNELS, reason="needs a CUDA device and the CUDA kernels")
def test_compiled_functions_with_graphs_of_their_own_write_the_same_buffers():
    """mode="reduce-overhead" warms up, records and replays; buffers are memory that it must not copy."""

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def add(buffers, grads, scale):
        ops.accumulate_(buffers, [x * 2 for x in grads], scale, backend="cuda")
        return ops.stats(buffers, backend="cuda").sq_norm

    # In memory of their own: PyTorch before 2.13 compiles writes to parts of a storage wrongly, and they are refused.
    outs, ins = ([x.to(DEVICE) for x in made(dtype, seed)] for dtype, seed in ((torch.float32, 1), (torch.bfloat16, 2)))
    for x in outs:
        torch._dynamo.mark_static_address(x)  # no graphs are made that write to what may move
    expected, right = [x.cpu().clone() for x in outs], Stats.empty()
    for scale in (0.5, 0.5, 0.5, -2.0, 0.25, 0.25, 0.25):
        torch.compiler.cudagraph_mark_step_begin()
        sq_norm = add(outs, ins, scale).clone()
        reference.accumulate_(expected, [x.cpu() * 2 for x in ins], scale, False, 1.0, None, right)
        for a, b in zip(outs, expected):
            assert_same_bits(a.cpu(), b)
        torch.testing.assert_close(sq_norm.cpu(), right.sq_norm, rtol=1e-13, atol=0)


@needs_gpu
@pytest.mark.parametrize("settings", [{}, {"buffer_device": "cpu", "master_weights": True}], ids=["there", "offloaded"])
def test_loading_takes_a_model_that_was_moved_after_it_was_wrapped(settings):
    """As Accelerate and Hugging Face's Trainer do."""
    nets = [model(torch.float32), model(torch.float32).to(DEVICE)]
    opts = [fa.AccumulatingOptimizer(sgd(net.parameters()), 2, **settings) for net in nets]
    nets[0].to(DEVICE)
    opts[0].load_state_dict(opts[0].state_dict())
    x, y = (t.to(DEVICE) for t in data(dtype=torch.float32))
    for net, opt in zip(nets, opts):
        for xs, ys in parts(x, y, (6, 6, 6, 6)):
            mean_loss(net, xs, ys).backward()
            opt.step()
        assert opt.updated and opt.last_window.micro_batches == 2
    assert_same_parameters(*nets, 0)


@needs_gpu
@every_kernel
def test_work_goes_to_the_current_stream(backend):
    n = 50_000_000
    out, x = torch.zeros(n, device=DEVICE), torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.fill_(1.0)  # late: whoever does not queue behind it adds zeros
        ops.accumulate_([out], [x], 1.0, backend=backend)
    torch.cuda.current_stream().wait_stream(side)
    assert out.sum(dtype=torch.float64) == n


@needs_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # which is what this is about
@every_kernel
def test_gradients_from_several_streams_arrive_whole(backend):
    n, side = 2_000_000, torch.cuda.Stream()
    params = [nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)) for _ in range(4)]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), 3, reduction="none", backend=backend)
    for _ in range(3):
        losses = []
        for k, p in enumerate(params):
            stream = side if k % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                losses.append((p * (k + 1.0)).sum(dtype=torch.float32))
        torch.cuda.current_stream().wait_stream(side)
        torch.stack(losses).sum().backward()
        opt.step()
        junk = [
            torch.full((n,), float("nan"), dtype=torch.bfloat16, device=DEVICE) for _ in range(4)
        ]  # takes freed memory
        del junk
    for k, p in enumerate(params):
        assert (p == -3.0 * (k + 1)).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@every_kernel
def test_the_tensors_device_need_not_be_the_current_one(backend):
    out, x = torch.zeros(5000, device="cuda:1"), torch.ones(5000, dtype=torch.bfloat16, device="cuda:1")
    with torch.cuda.device(0):
        ops.accumulate_([out], [x], 2.0, backend=backend)
        assert torch.cuda.current_device() == 0
    assert (out == 2).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": 0.1}, {"nonfinite": "skip_window"}, {"master_weights": True}], ids=str
)
def test_a_model_on_two_devices_is_one_on_the_cpu(settings):
    dtype = torch.bfloat16 if "master_weights" in settings else torch.float64
    results = []
    for places in (("cpu", "cpu"), ("cuda:0", "cuda:1")):
        params = [nn.Parameter(torch.ones(100, dtype=dtype, device=place)) for place in places]
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=0.5), 2, **settings)
        for factor in (1.0, 3.0):
            sum((p * factor).sum().cpu() for p in params).backward()
            opt.step()
        results.append([p.detach().cpu() for p in params])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12 if dtype == torch.float64 else 0, atol=0)


# -- the wrapper -----------------------------------------------------------------------------------------------


def batches(dtype, sizes):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(sum(sizes), n, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for n in (6, 3))
    return x, y, parts(x, y, sizes)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (4, 6, 14)], ids=["equal", "unequal"])
@every_kernel
def test_a_window_is_the_big_batch(backend, sizes, fused):
    net = model(torch.float64).to(DEVICE)
    big = twin(net)
    opt = fa.AccumulatingOptimizer(
        torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, fused=fused), 3, backend=backend
    )
    x, y, micro_batches = batches(torch.float64, sizes)
    for xs, ys in micro_batches:
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        opt.step()
        opt.zero_grad()
    big_batch_step(big, torch.optim.AdamW(big.parameters(), lr=1e-2, eps=1e-3, fused=fused), x, y)
    assert_same_parameters(net, big, 1e-12)


@every_kernel
def test_bf16_gradients_gather_in_fp32_and_clip(backend):
    p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16, device=DEVICE))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([p], lr=1.0),
        2,
        reduction="none",
        max_grad_norm=float("inf"),
        master_weights=True,
        backend=backend,
    )
    for factor in (256.0, 1.0):
        (p * factor).sum().backward()
        opt.step()
    assert opt.last_window.grad_norm == 257.0 * 8
    state = opt.state_dict()["fusedaccum"]["masters"]
    assert all((master == -257.0).all() for master in state.values())


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
@every_kernel
def test_what_is_not_finite_leaves_no_trace(backend, policy):
    net = model(torch.float32).to(DEVICE)
    before = twin(net)
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 2, nonfinite=policy, backend=backend)
    _, _, micro_batches = batches(torch.float32, (12, 12))
    for factor, (xs, ys) in zip((1.0, float("nan")), micro_batches):
        (mean_loss(net, xs, ys) * factor).backward()
        opt.step()
    assert not opt.updated
    assert_same_parameters(net, before, 0)


@every_kernel
def test_a_grad_scaler_skips_the_window_and_backs_off(backend):
    net = model(torch.float32).to(DEVICE)
    before = twin(net)
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 2, backend=backend)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
    _, _, micro_batches = batches(torch.float32, (12, 12))
    for factor, (xs, ys) in zip((1.0, float("inf")), micro_batches):
        scaler.scale(mean_loss(net, xs, ys) * factor).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 32.0
    assert_same_parameters(net, before, 0)


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
        assert len(caught) == 1
