"""Only a GPU can show: nothing waits for it; CUDA graphs, streams and several devices work."""

import contextlib
import subprocess
import sys

import fusedaccum as fa
import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import Stats, reference
from gpu_cases import DEVICE, GPU, KERNELS, batches, every_kernel, made, needs_gpu, there
from ops_cases import assert_same_bits, assert_same_stats
from sizes import limits
from torch import nn
from torch.autograd.graph import get_gradient_edge
from training import mean_loss, model

NO_WAITING = "ignore:Synchronization debug mode is a prototype"


@contextlib.contextmanager
def no_waiting():
    """Inside, anything that waits for the device raises."""
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
@pytest.mark.parametrize("backend", [*KERNELS, "reference"])
def test_calls_return_while_the_device_is_busy(backend):
    """PyTorch, asked above, knows no waits in the driver, as for copies of unpinned memory."""
    outs, ins, scale = there(made(torch.float32, 1)), there(made(torch.bfloat16, 2)), torch.tensor(0.5, device=DEVICE)

    def return_within(seconds):
        busy = torch.cuda.Event()
        torch.cuda._sleep(seconds * 2_000_000_000)  # clock cycles
        busy.record()
        ops.accumulate_(outs, ins, scale, stats=Stats.empty(DEVICE), backend=backend)
        ops.scale_(outs, 0.5, backend=backend)
        ops.stats(outs, backend=backend)
        return not busy.query()

    return_within(0)  # loads and compiles
    # A busy host may take longer than a second; a call that waits, however long that is.
    assert return_within(1) or return_within(10)


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
@pytest.mark.parametrize("weight", [12.0, torch.tensor(12)], ids=["number", "tensor on the CPU"])
def test_a_window_with_a_fused_optimizer_waits_for_nothing(settings, weight):
    net = model(torch.float32).to(DEVICE)
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW(net.parameters(), fused=True), 2, **settings)
    _, _, micro_batches = batches(torch.float32, (12, 12))

    def window():
        for xs, ys in micro_batches:
            opt.backward(mean_loss(net, xs, ys), weight=weight)
            opt.step()
            opt.zero_grad()

    window()  # the first window creates the optimizer's state
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
    """mode="reduce-overhead" must not warm up, record or replay on copies of the buffers."""

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def add(buffers, grads, scale):
        ops.accumulate_(buffers, [x * 2 for x in grads], scale, backend="cuda")
        return ops.stats(buffers, backend="cuda").sq_norm

    # Each a storage of its own: PyTorch before 2.13 miscompiles writes to parts, which we refuse.
    outs, ins = ([x.to(DEVICE) for x in made(dtype, seed)] for dtype, seed in ((torch.float32, 1), (torch.bfloat16, 2)))
    for x in outs:
        torch._dynamo.mark_static_address(x)  # a graph is not made for writes to memory that may move
    expected, right = [x.cpu().clone() for x in outs], Stats.empty()
    for scale in (0.5, 0.5, 0.5, -2.0, 0.25, 0.25, 0.25):
        torch.compiler.cudagraph_mark_step_begin()
        sq_norm = add(outs, ins, scale).clone()
        reference.accumulate_(expected, [x.cpu() * 2 for x in ins], scale, False, 1.0, None, right)
        for a, b in zip(outs, expected):
            assert_same_bits(a.cpu(), b)
        torch.testing.assert_close(sq_norm.cpu(), right.sq_norm, rtol=1e-13, atol=0)


@needs_gpu
@every_kernel
def test_work_goes_to_the_current_stream(backend):
    n = 50_000_000
    out, x = torch.zeros(n, device=DEVICE), torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)
    ops.accumulate_(
        [out], [x], 1.0, backend=backend
    )  # zeros: what the first call compiles would take longer than the sleep
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.fill_(1.0)  # late: an add that is not queued behind it adds zeros
        ops.accumulate_([out], [x], 1.0, backend=backend)
    torch.cuda.current_stream().wait_stream(side)
    assert out.sum(dtype=torch.float64) == n


@needs_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the subject of this test
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
        ]  # overwrites freed memory
        del junk
    for k, p in enumerate(params):
        assert (p == -3.0 * (k + 1)).all()


@needs_gpu
@pytest.mark.usefixtures("each_intake")
@every_kernel
def test_memory_of_gradients_from_two_streams_is_used_again_only_after_the_add(backend):
    """Within a backward: a bucket of one gradient per stream is added where the second arrives."""
    n, side, main = 2_000_000, torch.cuda.Stream(), torch.cuda.current_stream()
    params = [nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=DEVICE)) for _ in range(8)]
    streams, nodes = [side if k % 2 else main for k in range(8)], []
    for p, stream in zip(params, streams):
        with torch.cuda.stream(stream):
            nodes.append(get_gradient_edge(p).node)  # whose stream is that of the hook

    def spoil(grad):
        if torch.cuda.current_stream() == main:
            torch.cuda._sleep(20_000_000)  # so that the adds, which wait for this, are late
        torch.full_like(grad, float("nan"))  # overwrites memory that is free again on this stream

    with limits(bucket=2 * n * torch.bfloat16.itemsize):
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(params, lr=1.0), 3, reduction="none", backend=backend)
    for _ in range(3):
        losses = []
        for k, (p, stream) in enumerate(zip(params, streams)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                product = p * (k + 1.0)
                product.register_hook(spoil)
                losses.append(product.sum(dtype=torch.float32))
        main.wait_stream(side)
        torch.stack(losses).sum().backward()
        opt.step()
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


FIRST_USE = """
import threading, torch
from fusedaccum import ops
x, y = torch.zeros(9, device="cuda"), torch.ones(9, device="cuda", dtype=torch.float16)
def add():
    ops.accumulate_([x], [y], 1.0, backend="cuda")
"""


@needs_gpu
@pytest.mark.skipif("cuda" not in KERNELS, reason="the CUDA kernels are not here")
@pytest.mark.parametrize(
    "use",
    [
        "graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph): add()\ngraph.replay()",
        "thread = threading.Thread(target=add)\nthread.start()\nthread.join()",
    ],
    ids=["while a graph is captured", "in a new thread"],
)
def test_the_first_use_of_a_kernel_may_be(use):
    """In a process of its own, where no kernel has been loaded."""
    code = f"{FIRST_USE}{use}\nassert x.tolist() == [1.0] * 9"
    subprocess.run([sys.executable, "-c", code], check=True)
