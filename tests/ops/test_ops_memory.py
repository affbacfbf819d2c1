"""Ops touch only the elements given: misaligned views, strides, NaN in outputs, neighbours."""

import gc
import weakref

import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops.memory import increment_version, traits, views_like
from ops_cases import BACKENDS, DTYPES, PAIR_IDS, PAIRS, assert_same_bits, running, values
from torch import nn

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
SENTINEL = 7.0


def guarded(x, offset):
    """A copy of ``x``, ``offset`` elements into memory full of sentinels; and that memory."""
    memory = torch.full((x.numel() + offset + 70,), SENTINEL, dtype=x.dtype)
    view = memory[offset : offset + x.numel()]
    view.copy_(x)
    return view, memory


@every_backend
@pytest.mark.parametrize(("buffer", "grad"), PAIRS, ids=PAIR_IDS)
def test_accumulate_misaligned_views_leave_their_neighbours(backend, buffer, grad):
    sizes = [1, 15, 31, 33, 63, 65, 300]
    for offset in (0, 1, 3, 8, 33):
        b, g = [values(n, DTYPES[buffer]) for n in sizes], [values(n, DTYPES[grad], seed=9) for n in sizes]
        expected = [x.clone() for x in b]
        ops.accumulate_(expected, g, 0.3, backend="reference")
        outs, ins = zip(*(guarded(x, offset) for x in b), strict=True), [guarded(x, offset + 1)[0] for x in g]
        views, memories = outs
        with running(backend) as name:
            ops.accumulate_(list(views), ins, 0.3, backend=name)
        for n, view, memory, want in zip(sizes, views, memories, expected, strict=True):
            assert_same_bits(view, want)
            assert (memory[:offset] == SENTINEL).all()
            assert (memory[offset + n :] == SENTINEL).all()


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_overwrite_and_cast_do_not_read_their_outputs(backend, dtype):
    x = [torch.ones(n) for n in (1, 31, 33, 5000)]
    with running(backend) as name:
        for op in ("accumulate_", "cast_"):
            poisoned = [torch.full((y.numel(),), float("nan"), dtype=DTYPES[dtype]) for y in x]
            extra = {"overwrite": True} if op == "accumulate_" else {}
            getattr(ops, op)(poisoned, x, 2.0, stats=(stats := ops.Stats.empty()), backend=name, **extra)
            assert all((y == 2).all() for y in poisoned)
            assert (stats.sq_norm, stats.nonfinite) == (4 * sum(y.numel() for y in x), 0)


# Layouts of shape (30, 40).
LAYOUTS = {
    "contiguous": lambda: torch.randn(30, 40),
    "transposed": lambda: torch.randn(40, 30).t(),
    "permuted": lambda: torch.randn(6, 40, 5).permute(2, 0, 1).as_strided((30, 40), (1, 30)),
    "every-other": lambda: torch.randn(30, 80)[:, ::2],
    "one-of-two": lambda: torch.randn(30, 40, 2)[:, :, 1],
    "gap-between-rows": lambda: torch.randn(30, 50)[:, :40],
}
# Layouts that can only be read.
ONLY_READ = {
    "expanded": lambda: torch.randn(1, 40).expand(30, 40),
    "expanded-scalar": lambda: torch.randn(()).expand(30, 40),
    "overlapping-windows": lambda: torch.randn(100).as_strided((30, 40), (2, 1)),
    "negated-view": lambda: torch.randn(30, 40, dtype=torch.complex64).conj().imag,
    "zero-tensor": lambda: torch._efficientzerotensor(30, 40),
    "requires-grad": lambda: torch.randn(30, 40, requires_grad=True) * 2,
}
SHAPES = {
    "channels-last": lambda: torch.randn(2, 30, 5, 4).contiguous(memory_format=torch.channels_last),
    "size-one-dims": lambda: torch.randn(30, 1, 40).as_strided((30, 1, 40), (40, 999, 1)),
    "column": lambda: torch.randn(1200, 2)[:, 1],
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
}


def check_accumulate(buffer, grad, backend):
    expected = buffer * 0.5 + grad.detach() * 0.25
    with running(backend) as name:
        ops.accumulate_([buffer], [grad], 0.25, decay=0.5, stats=(stats := ops.Stats.empty()), backend=name)
    assert_same_bits(buffer, expected)
    torch.testing.assert_close(stats.sq_norm, expected.double().square().sum(), rtol=1e-12, atol=0)
    assert not buffer.requires_grad


@every_backend
@pytest.mark.parametrize("grad", [*LAYOUTS, *ONLY_READ])
@pytest.mark.parametrize("buffer", LAYOUTS)
def test_accumulate_any_strides(backend, buffer, grad):
    check_accumulate(LAYOUTS[buffer](), (LAYOUTS | ONLY_READ)[grad](), backend)


@every_backend
@pytest.mark.parametrize("shape", SHAPES)
def test_accumulate_any_shape_and_memory_format(backend, shape):
    check_accumulate(SHAPES[shape](), SHAPES[shape](), backend)
    check_accumulate(SHAPES[shape](), torch.randn(SHAPES[shape]().shape), backend)
    check_accumulate(torch.randn(SHAPES[shape]().shape), SHAPES[shape](), backend)


@every_backend
@pytest.mark.parametrize("layout", [*LAYOUTS, *SHAPES])
def test_cast_scale_and_stats_any_strides(backend, layout):
    x = (LAYOUTS | SHAPES)[layout]()
    dense = x.clone(memory_format=torch.contiguous_format)
    with running(backend) as name:
        ops.cast_([out := torch.zeros_like(dense, dtype=torch.float16)], [x], 3.0, backend=name)
        assert_same_bits(out, (dense * 3).half())
        assert torch.isclose(ops.stats([x], backend=name).sq_norm, dense.double().square().sum(), rtol=1e-12)
        ops.cast_([x], [out], 2.0, backend=name)
        assert_same_bits(x, out.float() * 2)
        ops.scale_([x], 0.5, backend=name)
        assert_same_bits(x, out.float())


@every_backend
@pytest.mark.parametrize("layout", ONLY_READ)
def test_stats_of_what_is_only_read(backend, layout):
    x = ONLY_READ[layout]()
    with running(backend) as name:
        got = ops.stats([x, x], backend=name).sq_norm
    torch.testing.assert_close(got, 2 * x.detach().double().square().sum(), rtol=1e-12, atol=0)


@every_backend
def test_strided_outputs_leave_the_elements_between(backend):
    memory = torch.full((30, 80), SENTINEL)
    with running(backend) as name:
        ops.accumulate_([memory[:, ::2]], [torch.ones(30, 40)], 2.0, backend=name)
        ops.scale_([memory[:, ::2]], 0.5, backend=name)
    assert (memory[:, ::2] == (SENTINEL + 2) / 2).all()
    assert (memory[:, 1::2] == SENTINEL).all()


@every_backend
def test_interleaved_views_of_one_tensor_are_separate_buffers(backend):
    memory = torch.zeros(10, 3, 4)
    parts, grads = list(memory.unbind(1)), [torch.full((10, 4), float(k + 1)) for k in range(3)]
    with running(backend) as name:
        ops.accumulate_(parts, grads, 1.0, backend=name)
        ops.accumulate_([memory[:, 0]], [memory[:, 1]], 1.0, backend=name)  # reads rows in between those it writes
    assert [memory[:, k].unique().tolist() for k in range(3)] == [[3.0], [2.0], [3.0]]


@every_backend
def test_neighbouring_views_are_no_overlap(backend):
    flat, halves = torch.zeros(1000), torch.ones(1000)
    with running(backend) as name:
        ops.accumulate_([flat[500:], flat[:500]], [halves[:500], halves[500:]], 1.0, backend=name)
        ops.cast_([flat[:300]], [flat[300:600]], 2.0, backend=name)
    assert flat.sum() == 300 * 2 + 700


@every_backend
def test_written_tensors_get_a_new_version_and_read_ones_do_not(backend):
    buffer, grad, stats = torch.zeros(8), torch.ones(8), ops.Stats.empty()
    weight = torch.ones(8, requires_grad=True)
    loss = (weight * buffer).sum()
    with running(backend) as name:
        ops.accumulate_([buffer], [grad], 1.0, stats=stats, backend=name)
    assert buffer._version > 0
    assert stats.sq_norm._version > 0
    assert grad._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_backend
def test_leaves_that_require_grad_can_be_written(backend):
    parameter = torch.nn.Parameter(torch.ones(5))
    with running(backend) as name:
        ops.cast_([parameter], [torch.full((5,), 2.0, dtype=torch.float64)], backend=name)
        ops.accumulate_([parameter], [parameter.detach().clone()], 1.0, backend=name)
    assert (parameter == 4).all()
    assert parameter.is_leaf
    assert parameter.requires_grad


@every_backend
def test_inference_tensors_within_inference_mode(backend):
    with torch.inference_mode(), running(backend) as name:
        x = torch.ones(5)
        ops.scale_([x], 2.0, stats=(stats := ops.Stats.empty()), backend=name)
        assert stats.sq_norm == 20


@every_backend
def test_nothing_is_kept_alive(backend):
    buffer, grad = torch.zeros(100), torch.ones(100)
    gone = [weakref.ref(buffer), weakref.ref(grad)]
    with running(backend) as name:
        ops.accumulate_([buffer], [grad], 1.0, backend=name)
    del buffer, grad
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@every_backend
def test_empty_lists_and_empty_tensors(backend):
    stats = ops.Stats(torch.tensor(3.0, dtype=torch.float64), torch.tensor(3))
    with running(backend) as name:
        ops.accumulate_([], [], 1.0, stats=stats, backend=name)
        assert (stats.sq_norm, stats.nonfinite) == (0, 0)
        ops.accumulate_([torch.zeros(0)], [torch.zeros(0).half()], 1.0, stats=stats, backend=name)
        ops.scale_((), 2.0, backend=name)
        ops.cast_((torch.zeros(0, 4),), (torch.zeros(0, 4),), backend=name)
        assert ops.stats([], backend=name).sq_norm == 0


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_traits_tell_what_has_changed(native, monkeypatch):
    if not native:
        monkeypatch.setattr("fusedaccum.ops.memory.native_lists", lambda: None)
    memory = torch.zeros(9)
    tensors = [memory[:4], memory[4:8].view(2, 2), torch.zeros(0), nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
    before = traits(tensors)
    assert traits(list(tensors)) == before
    tensors[0].fill_(1.0)
    assert traits(tensors) == before
    for other in (
        memory[1:5],
        memory[:5],
        memory[:4].view(torch.int32),
        memory[:4].clone(),
        torch.zeros(4, device="meta"),
    ):
        assert traits([other, *tensors[1:]]) != before
    assert traits(tensors[:3]) != before
    tensors[3].data = torch.zeros(3, dtype=torch.bfloat16)
    assert traits(tensors) != before


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_views_are_laid_out_like_tensors_of_another_dtype(native, monkeypatch):
    if not native:
        monkeypatch.setattr("fusedaccum.ops.memory.native_lists", lambda: None)
    wide = torch.zeros(40)
    alike = [wide[3:7], wide[8:20].view(3, 4).t(), wide[20:21].view(()), wide[21:21]]
    memory = torch.randn(40, dtype=torch.bfloat16)
    views = views_like(memory, alike)
    for view, expected in zip(
        views, [memory[3:7], memory[8:20].view(3, 4).t(), memory[20], memory[21:21]], strict=True
    ):
        assert view.stride() == expected.stride() or view.numel() == 0
        assert torch.equal(view, expected)
    version = memory._version
    views[0].zero_()
    assert memory._version == version + 1 and not memory[3:7].any()


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_autograd_sees_what_is_written(native, monkeypatch):
    if not native:
        monkeypatch.setattr("fusedaccum.ops.memory.native_lists", lambda: None)
    with torch.inference_mode():
        without = torch.zeros(3)  # a version
    memory = torch.zeros(9)
    version = memory._version
    increment_version([memory[:4], without, torch.zeros(0)])
    assert memory._version == version + 1
    increment_version((memory[:4], memory[4:]))
    assert memory._version == version + 3


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_numbers_do_not_depend_on_which_predicate_looks(native, monkeypatch):
    """Where the extension is missing, Python alone tells what a kernel may take as it is."""
    if not native:
        monkeypatch.setattr("fusedaccum.ops.memory.native_lists", lambda: None)
    memory = torch.randn(8, dtype=torch.float64)
    grads = [
        torch._neg_view(torch.randn(4, 2, dtype=torch.float64)),
        torch.randn(2, 4, dtype=torch.float64).t(),
        memory.as_strided((4, 2), (1, 3)),
        memory[:4, None].expand(4, 2),
        memory.as_strided((2, 2, 2), (5, 1, 1)),
    ]
    values = [torch.tensor(grad.tolist(), dtype=torch.float64) for grad in grads]
    buffers = [torch.ones(grad.shape, dtype=torch.float64) for grad in grads]
    ops.accumulate_(buffers, grads, 3.0, backend="reference")
    for buffer, value in zip(buffers, values):
        torch.testing.assert_close(buffer, 1 + 3 * value)
    found = ops.stats(grads, backend="reference")
    assert found.sq_norm.item() == pytest.approx(sum(value.square().sum().item() for value in values))
    base = torch.ones(6, 4, dtype=torch.float64)
    for view in (base[::2, 1:3], torch._neg_view(base[1])):
        before = view.tolist()
        ops.scale_([view], 2.0, backend="reference")
        assert view.tolist() == (2 * torch.tensor(before)).tolist()
