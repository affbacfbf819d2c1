"""Under torch.compile and other tracers ops give eager's bits; writes and reads keep order."""

import re

import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import Stats, StochasticRounding
from ops_cases import DTYPES, NATIVE, PAIRS, assert_same_bits, assert_same_stats, values, with_nonfinite
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

# PyTorch 2.13 warns itself when its compiler is loaded.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("compiled_anew")]

BACKENDS = ["reference", *(["triton"] if NATIVE == ["triton"] else ["cpu"] if NATIVE else [])]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
SIZES = (0, 1, 33, 4097)
REFUSES_VIEWS = torch.__version__ < "2.13"  # the older compiler writes to the wrong place
HUGE = StochasticRounding(2**63 + 5, [2**64 - 5, 0, 2**63, 77])


def made(dtype, seed):
    return [values(n, dtype, seed + k) for k, n in enumerate(SIZES)]


# A function per op and way of calling it; arguments are tensors, or numbers that may change.
CALLS = {
    "accumulate": lambda outs, ins, s, stats, backend: ops.accumulate_(outs, ins, s, stats=stats, backend=backend),
    "decay": lambda outs, ins, s, stats, backend: ops.accumulate_(
        outs, ins, s, decay=0.75, stats=stats, backend=backend
    ),
    "overwrite": lambda outs, ins, s, stats, backend: ops.accumulate_(
        outs, ins, s, overwrite=True, stats=stats, backend=backend
    ),
    "stochastic": lambda outs, ins, s, stats, backend: ops.accumulate_(
        outs, ins, s, rounding=HUGE, stats=stats, backend=backend
    ),
    "scale": lambda outs, ins, s, stats, backend: ops.scale_(outs, s, stats=stats, backend=backend),
    "cast": lambda outs, ins, s, stats, backend: ops.cast_(outs, ins, s, stats=stats, backend=backend),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def step(call, outs, sources, scale, stats, backend):
    """The call between other ops: gradients are made here, buffers are read before and after."""
    before = [out * 2 for out in outs]
    ins = [x * 2 for x in sources]
    call(outs, ins, scale, stats, backend)
    measured = ops.stats(outs, backend=backend)
    after = [out * 2 for out in outs]
    return before, after, measured


def assert_compiled_is_eager(compiled, call, pairs, scale, backend, measured=True):
    sources = [x for k, (_, dtype) in enumerate(pairs) for x in made(dtype, 100 + k)]
    with_nonfinite(sources[-1])
    ours, right = ([x for k, (dtype, _) in enumerate(pairs) for x in made(dtype, k)] for _ in range(2))
    got, expected = (Stats.empty(), Stats.empty()) if measured else (None, None)
    found = compiled(call, ours, sources, scale, got, backend)
    known = step(call, right, sources, scale, expected, backend)
    for a, b in zip((*ours, *found[0], *found[1]), (*right, *known[0], *known[1]), strict=True):
        assert_same_bits(a, b)
    for a, b in ((found[2], known[2]), (got, expected)):
        if b is not None:
            assert_same_bits(a.sq_norm, b.sq_norm)
            assert a.nonfinite == b.nonfinite


BF16_FP32 = [(torch.bfloat16, torch.float32)]


@every_call
@every_backend
def test_compiled_ops_give_the_bits_of_eager_ones(call, backend):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_compiled_is_eager(compiled, call, BF16_FP32, 0.37, backend, measured=True)
    assert_compiled_is_eager(compiled, call, BF16_FP32, torch.tensor(-2.5), backend, measured=False)


def test_compiled_accumulation_of_all_pairs_of_dtypes_in_one_call():
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    pairs = [(DTYPES[out], DTYPES[x]) for out, x in PAIRS]
    assert_compiled_is_eager(compiled, CALLS["accumulate"], pairs, 0.37, None)


@pytest.mark.parametrize("call", ["accumulate", "stochastic", "scale"])
def test_inductor_gives_the_bits_of_eager(call):
    compiled = torch.compile(step, fullgraph=True)
    assert_compiled_is_eager(compiled, CALLS[call], BF16_FP32, 0.37, None)


# -- what a graph is made for ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_that_change_do_not_compile_anew(backend):
    """One compilation for the first value, one for all others but NaN; no value loses precision.

    PyTorch guards NaN separately.
    """
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def add(buffers, grads, scale, decay, first_draw):
        rounding = StochasticRounding(2**63 + 5, [first_draw])
        ops.accumulate_(buffers, grads, scale, decay=decay, rounding=rounding)

    ours, right = torch.ones(50, dtype=torch.bfloat16), torch.ones(50, dtype=torch.bfloat16)
    grad = torch.randn(50, dtype=torch.float64)
    for k, scale in enumerate((0.1, 1 / 3, 1e-320, -0.0, float("inf"), 1e300)):
        add([ours.fill_(1)], [grad], scale, 1.0 / (k + 3), k * 1000 + 10)
        rounding = StochasticRounding(2**63 + 5, [k * 1000 + 10])
        ops.accumulate_([right.fill_(1)], [grad], scale, decay=1.0 / (k + 3), rounding=rounding)
        assert_same_bits(ours, right, str(scale))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("mark", [False, True], ids=["dynamic=True", "mark_dynamic"])
def test_one_graph_for_all_sizes(mark):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=None if mark else True)
    first = 0
    for n in (8, 17, 4096, 5000):
        sources, ours = [torch.randn(n, 3)], [torch.randn(3, n).t()]
        right, got = [x.clone() for x in ours], Stats.empty()
        if mark:
            torch._dynamo.mark_dynamic(sources[0], 0)
            torch._dynamo.mark_dynamic(ours[0], 0)
        compiled(CALLS["accumulate"], ours, sources, 0.5, got, None)
        step(CALLS["accumulate"], right, sources, 0.5, expected := Stats.empty(), None)
        assert_same_bits(ours[0], right[0])
        assert_same_stats(got, expected)
        first = first or counter.frame_count  # the first compilation may restart
    assert counter.frame_count == first


@pytest.mark.skipif(REFUSES_VIEWS, reason="before torch 2.13 views that begin inside their storage are refused")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_writes_and_reads_keep_their_order(backend):
    """Gradients from torch.func, several adds, reads between, buffers in one stretch of memory."""

    def window(flat, weight, batches):
        buffer, other = flat[:12].view(3, 4), flat[12:]
        gradient = torch.func.grad(lambda w, x: (x @ w).sin().sum())
        seen = []
        for k, x in enumerate(batches):
            ops.accumulate_([buffer, other], [gradient(weight, x), x[0, :1]], 1.0, overwrite=k == 0)
            seen.append(flat * 2)
        flat.add_(1.0)
        ops.scale_([buffer], 0.5)
        return seen, flat + 1, buffer * 2

    weight, batches = torch.randn(3, 4), [torch.randn(2, 3) for _ in range(3)]
    ours, right = torch.full((13,), float("nan")), torch.full((13,), float("nan"))
    got = torch.compile(window, fullgraph=True, backend=backend)(ours, weight, batches)
    expected = window(right, weight, batches)
    for a, b in zip((ours, *got[0], *got[1:]), (right, *expected[0], *expected[1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_of_one_buffer_given_from_outside(backend):
    """As the p.grad of a wrapped model's parameters are."""

    def add(buffers, grads, scale):
        ops.accumulate_(buffers, [g * 2 for g in grads], scale)
        return [b * 2 for b in buffers]

    grads = [torch.randn(4, 5), torch.randn(7), torch.randn(5, 4).t()]
    flats = [torch.arange(64.0), torch.arange(64.0)]
    views = [[flat[:20].view(4, 5), flat[24:31], flat[40:60].view(5, 4).t()] for flat in flats]
    compiled = torch.compile(add, fullgraph=True, backend=backend)
    if REFUSES_VIEWS:
        with pytest.raises(RuntimeError, match=r"buffers\[1\] is a view.*use torch 2.13"):
            compiled(views[0], grads, 0.5)
        return
    for scale in (0.5, 0.3):
        for a, b in zip(compiled(views[0], grads, scale), add(views[1], grads, scale), strict=True):
            assert_same_bits(a, b)
    assert_same_bits(*flats)


def test_statistics_made_within():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def norm(buffers, grads):
        stats = Stats.empty()
        ops.accumulate_(buffers, grads, 1.0, stats=stats)
        return stats.sq_norm.sqrt(), stats

    norm_of, stats = norm([torch.ones(4)], [torch.ones(4)])
    assert norm_of == 4 and stats.sq_norm == 16 and stats.nonfinite == 0


def test_gradients_are_not_tracked():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_and_add(buffers, x):
        y = x * 3
        ops.accumulate_(buffers, [y], y.sum())
        return (y * 2).sum() + buffers[0].sum()

    x, buffer = torch.ones(3, requires_grad=True), torch.zeros(3)
    loss_and_add([buffer], x).backward()
    assert buffer.tolist() == [27.0] * 3 and not buffer.requires_grad
    assert x.grad.tolist() == [6.0] * 3


# -- errors ----------------------------------------------------------------------------------------

z = torch.zeros
BAD = {
    "no-list": lambda: ops.scale_(z(3), 2.0),
    "no-tensor": lambda: ops.accumulate_([z(3)], [None], 1.0),
    "length": lambda: ops.accumulate_([z(3)], [], 1.0),
    "shape": lambda: ops.accumulate_([z(3)], [z(4)], 1.0),
    "dtype": lambda: ops.cast_([z(3, dtype=torch.int8)], [z(3)]),
    "expanded": lambda: ops.scale_([z(1).expand(3)], 2.0),
    "scale": lambda: ops.scale_([z(3)], "8"),
    "scale-shape": lambda: ops.scale_([z(3)], torch.ones(2)),
    "decay-complex": lambda: ops.accumulate_([z(3)], [z(3)], 1.0, decay=torch.tensor(1j)),
    "stats": lambda: ops.scale_([z(3)], 1.0, stats=Stats(z(3), z(()))),
    "counters": lambda: ops.accumulate_([z(3)], [z(3)], 1.0, rounding=StochasticRounding(1, [0, 0])),
    "seed": lambda: ops.accumulate_([z(3)], [z(3)], 1.0, rounding=StochasticRounding(-1, [0])),
    "backend": lambda: ops.scale_([z(3)], 2.0, backend="tpu"),
    "missing-backend": lambda: ops.scale_([z(3)], 2.0, backend="cuda"),
    "shared": lambda: (x := z(3), ops.accumulate_([x, x], [z(3), z(3)], 1.0)),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_errors_are_those_of_eager_calls(call):
    """While tracing, the compiler's error contains the message; at run time it is the same."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as expected:
        call()
    with pytest.raises(Exception, match=re.escape(str(expected.value).split(" (")[0])):
        torch.compile(call, fullgraph=True, backend="aot_eager")()


# -- the registered ops ----------------------------------------------------------------------------


def registered_calls(dtype=torch.bfloat16):
    """``(op, arguments)`` as they appear in a trace."""
    for backend in BACKENDS:
        for sizes in ((), (7,), (0, 1, 33)):
            outs, ins = ([values(n, d, n) for n in sizes] for d in (dtype, torch.float32))
            scale, decay = torch.tensor(0.37, dtype=torch.float64), torch.tensor(0.5)
            for stats in ([], [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)]):
                for seed, counters in ((None, []), (-5, [-1] * len(sizes))):
                    for overwrite in (False, True):
                        yield "accumulate_", (outs, ins, scale, decay, overwrite, seed, counters, stats, backend)
                yield "scale_", (outs, scale, stats, backend)
                yield "cast_", (outs, ins, scale, stats, backend)
            yield "stats", (outs, backend)


def test_registered_ops_pass_opcheck():
    for name, arguments in registered_calls():
        torch.library.opcheck(getattr(torch.ops.fusedaccum, name).default, arguments)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it on its copies
def test_registered_ops_pass_opcheck_on_strided_tensors_that_require_gradients():
    x = torch.randn(4, 6, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    for name, arguments in (
        ("accumulate_", ([z(6, 8).t()[::2]], [x], scale, torch.tensor(1.0), False, None, [], [], None)),
        ("cast_", ([z(4, 12)[:, ::2]], [x], scale, [], None)),
        ("stats", ([x], None)),
    ):
        torch.library.opcheck(getattr(torch.ops.fusedaccum, name).default, arguments)


def fourfold(buffer, grad):
    ops.accumulate_([buffer], [grad], 2.0)
    ops.scale_([buffer], 2.0)
    return buffer + ops.stats([buffer]).nonfinite


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_calls(mode):
    graph = make_fx(fourfold, tracing_mode=mode)(z(3), torch.ones(3))
    buffer = torch.ones(3)
    assert graph(buffer, torch.ones(3)).tolist() == [6.0] * 3 == buffer.tolist()


def test_export_records_the_calls():
    class Module(torch.nn.Module):
        def forward(self, buffer, grad):
            return fourfold(buffer, grad)

    for strict in (False, True):
        program = torch.export.export(Module(), (z(3), torch.ones(3)), strict=strict)
        buffer = torch.ones(3)
        assert program.module()(buffer, torch.ones(3)).tolist() == [6.0] * 3 == buffer.tolist()


def test_fake_tensors_take_the_calls():
    with FakeTensorMode():
        buffer = z(3)
        assert fourfold(buffer, torch.ones(3)).shape == (3,)
        with pytest.raises(ValueError, match=r"grads\[0\] has shape \(4,\) but buffers\[0\] has \(3,\)"):
            ops.accumulate_([buffer], [z(4)], 1.0)
        assert ops.stats([z(1).expand(4)]).sq_norm.shape == ()  # what is only read may share its memory


def test_eager_calls_go_past_the_dispatcher(monkeypatch):
    for name in ("accumulate_", "scale_", "cast_", "stats"):
        monkeypatch.delattr(ops.traced, name)
    assert fourfold(z(3), torch.ones(3)).tolist() == [4.0] * 3
    ops.cast_([z(3)], [z(3)])
