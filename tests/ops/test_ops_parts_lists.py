"""Lists of numbers in two parts: what is refused, what memory is touched, what compilers record."""

import math
import random
import re

import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import arguments, backends
from fusedaccum.ops.arguments import Layout
from ops_cases import BACKENDS, DTYPES, NATIVE, assert_same_bits, running, values
from parts_cases import LOWS, number_of, split
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
every_low = pytest.mark.parametrize("low", LOWS.values(), ids=[f"low={name}" for name in LOWS])
SENTINEL = 7


def h(*shape):
    return torch.ones(shape or (3,), dtype=torch.bfloat16)


def r(*shape, dtype=torch.int8):
    return torch.ones(shape or (3,), dtype=dtype)


def g(*shape):
    return torch.ones(shape or (3,))


SHARED = h(8)
BYTES = r(8)
FREED = r(10)
FREED.untyped_storage().resize_(0)
with torch.inference_mode():
    INFERENCE = r()

# buffers, grads, low, error, message
BAD = {
    "tensor": ([h()], [g()], r(), TypeError, r"low must be a list or tuple of tensors, not Tensor; write \[low\]"),
    "length": ([h(), h()], [g(), g()], [r()], ValueError, r"buffers and low must have the same length, but have 2 and 1"),
    "empty": ([h()], [g()], [], ValueError, r"buffers and low must have the same length, but have 1 and 0"),
    "none": ([h()], [g()], [None], TypeError, r"low\[0\] must be a tensor, not NoneType"),
    "fp16": ([h().half()], [g()], [r()], TypeError, r"buffers\[0\] has dtype torch.float16; .* because FP16 has not FP32's range"),
    "fp32": ([g()], [g()], [r()], TypeError, r"buffers\[0\] has dtype torch.float32; with low= it must be torch.bfloat16: convert it"),
    "uint8": ([h()], [g()], [r(dtype=torch.uint8)], TypeError, r"low\[0\] has dtype torch.uint8; low parts are torch.int8 "),
    "float": ([h()], [g()], [h()], TypeError, r"low\[0\] has dtype torch.bfloat16; low parts are"),
    "mixed": ([h(), h()], [g(), g()], [r(), r(dtype=torch.int16)], TypeError, r"low\[1\] has dtype torch.int16 but low\[0\] has"),
    "grads-fp64": ([h()], [g().double()], [r()], TypeError, r"grads\[0\] has dtype torch.float64; with low= it must be torch.bfloat16 or"),
    "grads-fp16": ([h(), h()], [g(), g().half()], [r(), r()], TypeError, r"grads\[1\] has dtype torch.float16; with low="),
    "shape": ([h(2, 3)], [g(2, 3)], [r(3, 2)], ValueError, r"low\[0\] has shape \(3, 2\) but buffers\[0\] has \(2, 3\)"),
    "device": ([h()], [g()], [r().to("meta")], ValueError, r"low\[0\] has no memory behind it"),
    "freed": ([h(10)], [g(10)], [FREED], ValueError, r"low\[0\] has no memory behind it"),
    "expanded": ([h(3)], [g(3)], [r(1).expand(3)], ValueError, r"low\[0\] overlaps itself"),
    "inference": ([h()], [g()], [INFERENCE], RuntimeError, r"low\[0\] is an inference tensor"),
    "twice": ([h(), h()], [g(), g()], [BYTES[:3], BYTES[2:5]], ValueError, r"low\[0\] and low\[1\] share"),
    "buffers": ([SHARED[:4]], [g(4)], [SHARED.view(torch.int8)[7:11]], ValueError, r"buffers\[0\] and low\[0\] share memory"),
    "grads": ([h(4)], [SHARED[:4]], [SHARED.view(torch.int8)[7:11]], ValueError, r"low\[0\] and grads\[0\] share memory.*clone"),
    "grad-is-buffer": ([SHARED[:3]], [SHARED[:3]], [r()], ValueError, r"buffers\[0\] and grads\[0\] share memory"),
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("case", BAD)
def test_accumulate_refuses_before_it_writes(backend, case):
    buffers, grads, low, error, message = BAD[case]
    before = [x.clone() for x in buffers]
    with running(backend) as name, pytest.raises(error, match=message):
        ops.accumulate_(buffers, grads, 2.0, low=low, backend=name)
    assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True))


@every_backend
def test_other_ops_refuse_what_is_no_number_in_two_parts(backend):
    calls = {
        r"rounding is StochasticRounding.* pass rounding=None": lambda name: ops.accumulate_(
            [h()], [h()], 1.0, low=[r()], rounding=ops.StochasticRounding(1, [0]), backend=name
        ),
        r"tensors\[0\] has dtype torch.float16; with low=": lambda name: ops.scale_(
            [h().half()], 1.0, low=[r()], backend=name
        ),
        r"tensors and low must have the same length": lambda name: ops.stats([h()], low=[], backend=name),
        r"ins\[0\] has dtype torch.float32; with low= it must": lambda name: ops.cast_(
            [h()], [g()], low=[r()], backend=name
        ),
        r"outs\[0\] has dtype torch.float16; with low= it must": lambda name: ops.cast_(
            [h().half()], [h()], low=[r()], backend=name
        ),
        r"outs\[0\] and ins\[0\] share memory": lambda name: ops.cast_(
            [SHARED[1:4]], [SHARED[:3]], low=[r()], backend=name
        ),
        r"outs\[0\] and ins\[1\] share memory": lambda name: ops.cast_(
            [SHARED[:3], h()], [h(), SHARED[:3]], low=[r(), r()], backend=name
        ),
        r"outs\[0\] and ins\[0\] share memory, ": lambda name: ops.cast_(
            [SHARED[:4].view(2, 2)], [SHARED[:4].view(2, 2).t()], low=[r(2, 2)], backend=name
        ),
        r"outs\[0\] and low\[0\] share memory": lambda name: ops.cast_(
            [SHARED[:4]], [h(4)], low=[SHARED.view(torch.int8)[7:11]], backend=name
        ),
        r"tensors\[0\] and low\[0\] share memory": lambda name: ops.scale_(
            [SHARED[:4]], 1.0, low=[SHARED.view(torch.int16)[3:7]], backend=name
        ),
    }
    for message, call in calls.items():
        with running(backend) as name, pytest.raises((TypeError, ValueError), match=message):
            call(name)
    assert (SHARED == 1).all()


@every_backend
def test_an_input_by_itself_is_still_no_output(backend):
    x = h()
    with running(backend) as name, pytest.raises(ValueError, match=r"outs\[0\] and ins\[0\] share memory"):
        ops.cast_([x], [x], backend=name)


@every_backend
def test_what_is_only_read_may_share_its_memory(backend):
    low = r()
    with running(backend) as name:
        ops.cast_([g(), g()], [h(), h()], low=[low, low], backend=name)
        x = h()
        assert ops.stats([x, x], low=[low, low], backend=name).nonfinite == 0
        assert ops.stats([SHARED], low=[SHARED.view(torch.int16)], backend=name).nonfinite == 0


@pytest.mark.skipif(not [name for name in NATIVE if name.startswith("cpu")], reason="needs fusedaccum._cpu")
def test_both_checks_of_lists_say_the_same():
    from fusedaccum import _cpu

    random.seed(4)
    memory = torch.zeros(64, dtype=torch.uint8)

    def some(dtypes):
        x = memory.view(random.choice(dtypes))
        at = random.randrange(6)
        return random.choice(
            [
                torch.zeros(4, dtype=x.dtype),
                x[at : at + 4],
                x[:8:2],
                x[1:9:2],
                x[:4].view(2, 2),
                x[:4].view(2, 2).t(),
                x[:1].expand(4),
            ]
        )

    verdicts = set()
    for _ in range(6000):
        of = random.choice(["a", "b"])
        lists = {name: [some([torch.bfloat16] * 4 + [torch.float32, torch.float16])] for name in "ab"}
        low = [some([torch.int8, torch.int8, torch.int16, torch.uint8])]
        if of == "b" and random.random() < 0.3:
            lists["b"] = lists["a"]
        try:
            expected = arguments.check_lists(lists, low=low, of=of)
        except (TypeError, ValueError):
            expected = Layout.REFUSED
        got = _cpu.predicate(*lists.values(), True, low, of == "b")
        interleaved = (
            got == Layout.REFUSED and expected == Layout.STRIDED
        )  # of which C++ leaves the last word to Python
        assert got == expected or interleaved, (lists, low, of)
        verdicts.add((of, expected))
    assert len(verdicts) == 6


# -- memory ----------------------------------------------------------------------------------------


def guarded(x, offset):
    """A copy of ``x``, ``offset`` elements into memory full of sentinels; and that memory."""
    memory = torch.full((x.numel() + offset + 70,), SENTINEL, dtype=x.dtype)
    view = memory[offset : offset + x.numel()]
    view.copy_(x)
    return view, memory


@every_backend
@every_low
@pytest.mark.parametrize("other", ["bf16", "f32"])
def test_misaligned_views_leave_their_neighbours(backend, low, other):
    sizes = [1, 15, 31, 33, 65, 300]
    for offset in (0, 1, 8, 33):
        for overwrite in (False, True):
            uppers, parts = zip(*(split(values(n, torch.float32), low) for n in sizes), strict=True)
            grads = [guarded(values(n, DTYPES[other], seed=9), offset + 1)[0] for n in sizes]
            views, memories = zip(*(guarded(x, offset) for x in uppers), strict=True)
            lows, low_memories = zip(*(guarded(x, offset + 3) for x in parts), strict=True)
            outs, out_memories = zip(
                *(guarded(torch.zeros(n, dtype=DTYPES[other]), offset + 2) for n in sizes), strict=True
            )
            with running(backend) as name:
                ops.accumulate_(list(views), grads, 0.3, overwrite=overwrite, low=list(lows), backend=name)
                ops.scale_(list(views), 3.0, low=list(lows), backend=name)
                before = [x.clone() for x in lows]
                ops.cast_(list(outs), list(views), 0.7, low=list(lows), backend=name)
            assert all(map(torch.equal, lows, before))
            uppers, parts = list(uppers), list(parts)
            ops.accumulate_(uppers, grads, 0.3, overwrite=overwrite, low=parts, backend="reference")
            ops.scale_(uppers, 3.0, low=parts, backend="reference")
            for k, n in enumerate(sizes):
                assert_same_bits(views[k], uppers[k])
                assert torch.equal(lows[k], parts[k])
                assert_same_bits(outs[k], (number_of(uppers[k], parts[k]) * torch.tensor(0.7)).to(DTYPES[other]))
                for start, memory in (
                    (offset, memories[k]),
                    (offset + 3, low_memories[k]),
                    (offset + 2, out_memories[k]),
                ):
                    assert (memory[:start] == SENTINEL).all()
                    assert (memory[start + n :] == SENTINEL).all()


@every_backend
@every_low
def test_any_strides(backend, low):
    layouts = [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.repeat(1, 2)[:, :40],
    ]
    upper, part = (x.view(30, 40) for x in split(values(1200, torch.float32), low))
    grad = torch.randn(30, 40)
    expected, expected_part = upper.clone(), part.clone()
    ops.accumulate_([expected], [grad], 0.3, decay=0.5, low=[expected_part], backend="reference")
    for of_h in layouts:
        for of_low in layouts:
            out, out_part = of_h(upper.clone()), of_low(part.clone())
            with running(backend) as name:
                ops.accumulate_([out], [of_low(grad)], 0.3, decay=0.5, low=[out_part], backend=name)
                assert_same_bits(out, expected)
                assert torch.equal(out_part, expected_part)
                norm = ops.stats([out], low=[out_part], backend=name).sq_norm
                torch.testing.assert_close(norm, number_of(out, out_part).double().square().sum(), rtol=1e-12, atol=0)


@every_backend
def test_overwriting_does_not_read_parts(backend):
    upper, part = torch.full((5000,), math.nan, dtype=torch.bfloat16), torch.full((5000,), -1, dtype=torch.int8)
    with running(backend) as name:
        ops.accumulate_(
            [upper], [torch.ones(5000)], 2.0, overwrite=True, low=[part], stats=(s := ops.Stats.empty()), backend=name
        )
    assert (number_of(upper, part) == 2).all()
    assert (s.sq_norm, s.nonfinite) == (20_000, 0)


@every_backend
def test_lanes_beyond_a_tensors_end_are_not_measured(backend):
    for n in (1, 31, 33, 2049):
        with running(backend) as name:
            for overwrite in (False, True):
                ops.accumulate_(
                    [h(n)],
                    [g(n)],
                    math.inf,
                    overwrite=overwrite,
                    low=[r(n)],
                    stats=(s := ops.Stats.empty()),
                    backend=name,
                )
                assert (s.sq_norm, s.nonfinite) == (math.inf, n)
            for call in (
                lambda s, name, n=n: ops.scale_([h(n)], math.inf, low=[r(n)], stats=s, backend=name),
                lambda s, name, n=n: ops.cast_([h(n)], [h(n)], math.inf, low=[r(n)], stats=s, backend=name),
            ):
                call(s := ops.Stats.empty(), name)
                assert (s.sq_norm, s.nonfinite) == (math.inf, n)


@every_backend
def test_autograd_notices_what_is_written_and_tracks_nothing(backend):
    upper, part = h().requires_grad_(), r()
    with running(backend) as name:
        ops.accumulate_([upper], [g().requires_grad_()], 2.0, low=[part], backend=name)
        assert (upper._version, part._version) == (1, 1)
        ops.scale_([upper], 2.0, low=[part], backend=name)
        assert upper._version > 1 < part._version
        versions = upper._version, part._version
        ops.cast_([out := g()], [upper], low=[part], backend=name)
        ops.stats([upper], low=[part], backend=name)
        assert (upper._version, part._version) == versions and out._version
    assert upper.is_leaf and not out.requires_grad


def test_threads_make_no_difference():
    before = torch.get_num_threads()
    sums = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            upper, part = split(values(300_001, torch.float32), torch.int8)
            ops.accumulate_(
                [upper], [values(300_001, torch.bfloat16, 3)], 0.3, low=[part], stats=(s := ops.Stats.empty())
            )
            sums.append((upper.view(torch.int16), part, s.sq_norm))
    finally:
        torch.set_num_threads(before)
    for found in sums[1:]:
        assert all(map(torch.equal, found, sums[0]))


@every_backend
def test_empty_lists_and_empty_tensors(backend):
    with running(backend) as name:
        ops.accumulate_([], [], 1.0, low=[], backend=name)
        ops.scale_([], 1.0, low=[], backend=name)
        ops.cast_([], [], low=[], backend=name)
        ops.accumulate_([h(0), h(2)], [g(0), g(2)], 1.0, low=[r(0), r(2)], backend=name)
        assert ops.stats([h(0)], low=[r(0)], backend=name).sq_norm == 0


def test_a_backend_without_low_parts_leaves_them_to_the_reference(monkeypatch):
    for name in ("reference", *({backend.partition("-")[0] for backend in NATIVE})):
        module = backends.select(name, torch.device("cpu"), "stats")
        assert backends.select(name, torch.device("cpu"), "stats", low=True) is module
        if name != "reference":
            monkeypatch.delattr(module, "TAKES_LOW")
            assert backends.select(name, torch.device("cpu"), "stats", low=True).__name__ == "fusedaccum.ops.reference"
            assert backends.select(name, torch.device("cpu"), "stats") is module


# -- compilers -------------------------------------------------------------------------------------


def window(upper, grad, part):
    stats = ops.Stats.empty(upper.device)
    ops.accumulate_([upper], [grad], 0.5, low=[part], stats=stats)
    ops.scale_([upper], 0.3, low=[part])
    norm = ops.stats([upper], low=[part]).sq_norm
    ops.cast_([out := torch.empty_like(grad)], [upper], 2.0, low=[part])
    ops.cast_([upper], [upper], 2.0, low=[part])
    return stats.sq_norm, norm, out


def inputs(low):
    upper, part = split(values(100, torch.float32), low)
    return upper, values(100, torch.float32, 5), part


@every_low
@pytest.mark.parametrize("way", ["inductor", "aot_eager", "make_fx", "make_fx symbolic"])
def test_compilers_record_the_calls(low, way):
    expected = inputs(low)
    results = window(*expected)
    if way.startswith("make_fx"):
        compiled = make_fx(window, tracing_mode="symbolic" if "symbolic" in way else "real")(*inputs(low))
    else:
        compiled = torch.compile(window, backend=way, fullgraph=True)
    got = inputs(low)
    for a, b in zip((*compiled(*got), *got), (*results, *expected), strict=True):
        assert torch.equal(a, b)


def test_export_records_the_calls():
    class Module(torch.nn.Module):
        def forward(self, upper, grad, part):
            return window(upper, grad, part)

    program = torch.export.export(Module(), inputs(torch.int8))
    got, expected = inputs(torch.int8), inputs(torch.int8)
    for a, b in zip((*program.module()(*got), *got), (*window(*expected), *expected), strict=True):
        assert torch.equal(a, b)


def test_registered_overloads_pass_opcheck():
    scale, decay = torch.tensor(0.37, dtype=torch.float64), torch.tensor(0.5)
    for backend in BACKENDS[:1] if "-" in BACKENDS[-1] else BACKENDS:
        for stats in ([], [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)]):
            for name, arguments_of in (
                ("accumulate_", ([h(7)], [g(7)], scale, decay, False, None, [], stats, backend, [r(7)])),
                ("scale_", ([h(7)], scale, stats, backend, [r(7)])),
                ("cast_", ([g(7)], [h(7)], scale, stats, backend, [r(7)])),
                ("stats", ([h(7)], backend, [r(7)])),
            ):
                torch.library.opcheck(getattr(torch.ops.fusedaccum, name).low, arguments_of)


def test_traces_refuse_what_calls_refuse():
    with FakeTensorMode():
        assert window(h(), g(), r())[0].shape == ()
    for case in ("length", "empty", "fp16", "uint8", "mixed", "grads-fp64", "shape", "expanded"):
        buffers, grads, low, error, message = BAD[case]
        with FakeTensorMode() as mode:
            fake = [[mode.from_tensor(x) for x in tensors] for tensors in (buffers, grads, low)]
            with pytest.raises(error, match=message):
                ops.accumulate_(fake[0], fake[1], 1.0, low=fake[2])
    with pytest.raises(Exception, match=re.escape("buffers and low must have the same length")):
        torch.compile(lambda: ops.accumulate_([h()], [g()], 1.0, low=[]), fullgraph=True, backend="aot_eager")()
