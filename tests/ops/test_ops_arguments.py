"""Bad input raises errors naming argument, value and fix, writes nothing. C++ and Python agree."""

import itertools
import random
import re

import numpy as np
import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import arguments, memory
from fusedaccum.ops.arguments import Layout
from ops_cases import BACKENDS, NATIVE, running

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])


def z(*shape, **kwargs):
    return torch.zeros(shape or (3,), **kwargs)


SHARED = torch.zeros(10)
FREED = torch.zeros(10)
FREED.untyped_storage().resize_(0)
with torch.inference_mode():
    INFERENCE = torch.zeros(3)


class Wrapper(torch.Tensor):
    """A wrapper subclass, which has no memory of its own."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Subclass(torch.Tensor):
    """A subclass that behaves like any other tensor."""


# name -> (buffers, grads, error, message)
BAD_LISTS = {
    "tensor": (z(), [z()], TypeError, r"buffers must be a list or tuple of tensors, not Tensor; write \[buffers\]"),
    "generator": ((x for x in ()), [], TypeError, "buffers must be a list or tuple of tensors, not generator"),
    "grads-none": ([z()], None, TypeError, "grads must be a list or tuple of tensors, not NoneType"),
    "none-inside": (
        [z()],
        [None],
        TypeError,
        r"grads\[0\] must be a tensor, not NoneType \(None\); leave out what has no gradient",
    ),
    "array-inside": ([z()], [np.zeros(3)], TypeError, r"grads\[0\] must be a tensor, not ndarray"),
    "length": ([z(), z()], [z()], ValueError, "buffers and grads must have the same length, but have 2 and 1 tensors"),
    "shape": (
        [z(), z(2, 3)],
        [z(), z(3, 2)],
        ValueError,
        r"grads\[1\] has shape \(3, 2\) but buffers\[1\] has \(2, 3\)",
    ),
    "more-dimensions": (
        [z(), z()],
        [z(), z(3, 4)],
        ValueError,
        r"grads\[1\] has shape \(3, 4\) but buffers\[1\] has \(3,\)",
    ),
    "fewer-dimensions": (
        [z(), z(3, 1)],
        [z(), z()],
        ValueError,
        r"grads\[1\] has shape \(3,\) but buffers\[1\] has \(3, 1\)",
    ),
    "broadcast": (
        [z(3)],
        [z(1)],
        ValueError,
        r"grads\[0\] has shape \(1,\) but buffers\[0\] has \(3,\).*no broadcasting",
    ),
    "integer": (
        [z(dtype=torch.int32)],
        [z()],
        TypeError,
        r"buffers\[0\] has dtype torch.int32; supported are torch.float64",
    ),
    "complex": ([z()], [z(dtype=torch.complex64)], TypeError, r"grads\[0\] has dtype torch.complex64"),
    "float8": ([z()], [z().to(torch.float8_e5m2)], TypeError, r"grads\[0\] has dtype torch.float8_e5m2"),
    "sparse": ([z()], [z().to_sparse()], TypeError, r"grads\[0\] has layout torch.sparse_coo; .* call .to_dense\(\)"),
    "meta": ([z(device="meta")], [z(device="meta")], ValueError, r"buffers\[0\] has no memory behind it"),
    "device": ([z()], [z(device="meta")], ValueError, r"grads\[0\] .*"),
    "freed": ([z(10)], [FREED], ValueError, r"grads\[0\] has no memory behind it"),
    "subclass": ([z()], [Wrapper()], TypeError, r"grads\[0\] is a Wrapper, which has no memory of its own"),
    "expanded": (
        [z(1).expand(3)],
        [z()],
        ValueError,
        r"buffers\[0\] overlaps itself \(shape \(3,\), strides \(0,\)\).*contiguous",
    ),
    "windows": ([SHARED.unfold(0, 4, 1)], [z(7, 4)], ValueError, r"buffers\[0\] overlaps itself"),
    "inference": ([INFERENCE], [z()], RuntimeError, r"buffers\[0\] is an inference tensor.*clone"),
    "zero-tensor": ([torch._efficientzerotensor(3)], [z()], ValueError, r"buffers\[0\] has no memory"),
    "same-twice": (
        [SHARED, z(), SHARED],
        [z(10), z(), z(10)],
        ValueError,
        r"buffers\[0\] and buffers\[2\] share memory",
    ),
    "overlapping": (
        [SHARED[:6], SHARED[5:]],
        [z(6), z(5)],
        ValueError,
        r"buffers\[0\] and buffers\[1\] share memory.*once",
    ),
    "inside": ([SHARED, SHARED[3:5]], [z(10), z(2)], ValueError, r"buffers\[0\] and buffers\[1\] share memory"),
    "aliased-grad": (
        [z(), SHARED[:4]],
        [z(), SHARED[3:7]],
        ValueError,
        r"buffers\[1\] and grads\[1\] share memory.*clone\(\) as grads\[1\]",
    ),
    "other-grad": ([SHARED[:4], z()], [z(4), SHARED[:3]], ValueError, r"buffers\[0\] and grads\[1\] share memory"),
    "strided-overlap": ([SHARED[::2]], [SHARED[2:7]], ValueError, r"buffers\[0\] and grads\[0\] share memory"),
    "reinterpreted": (
        [SHARED[2:4]],
        [SHARED.view(torch.float16)[4:6]],
        ValueError,
        r"buffers\[0\] and grads\[0\] share memory",
    ),
}
NO_PAIRS = ("tensor", "generator", "grads-none", "length")
GOOD_LISTS = {
    "flat": ([z(4, 5), z()], [z(4, 5), z(dtype=torch.float64)], Layout.FLAT),
    "tuples": ((z(),), (z(),), Layout.FLAT),
    "none": ([], [], Layout.FLAT),
    "empty": ([z(0), z(0, 4)], [z(0), z(4, 0).t()], Layout.FLAT),
    "both-transposed": ([z(4, 5).t()], [z(4, 5).t()], Layout.FLAT),
    "one-transposed": ([z(5, 4)], [z(4, 5).t()], Layout.STRIDED),
    "gaps": ([z(4, 5)[:, :3]], [z(4, 5)[:, :3]], Layout.STRIDED),
    "size-one": ([z(4, 1)], [torch.zeros(8).as_strided((4, 1), (1, 77))], Layout.FLAT),
    "expanded-grad": ([z(4)], [z(1).expand(4)], Layout.STRIDED),
    "negated-grad": ([z(4)], [torch._neg_view(z(4))], Layout.STRIDED),
    "zero-tensor-grad": ([z(4)], [torch._efficientzerotensor(4)], Layout.STRIDED),
    "overlapping-grad-without-gaps": ([z(2, 2, 2)], [z(8).as_strided((2, 2, 2), (5, 1, 1))], Layout.STRIDED),
    "size-one-buffer": ([z(8).as_strided((4, 1), (1, 0))], [z(4, 1)], Layout.FLAT),
    "neighbours": ([SHARED[5:], SHARED[:5]], [z(5), z(5)], Layout.FLAT),
    "adjacent-grad": ([SHARED[:5]], [SHARED[5:]], Layout.FLAT),
    "grads-may-share": ([z(10), z(10)], [SHARED, SHARED], Layout.FLAT),
    "interleaved": ([SHARED[::2], SHARED[1::2]], [z(5), z(5)], Layout.STRIDED),
    "subclass": ([Subclass(z()), torch.nn.Parameter(z())], [torch.nn.Parameter(z()), z()], Layout.FLAT),
    "empty-inside-another": ([SHARED, SHARED[3:3]], [z(10), z(0)], Layout.FLAT),
    "empty-part-of-empty": ([z(0, 2)], [z(0, 3)[:, 1:]], Layout.FLAT),
}


@every_backend
@pytest.mark.parametrize("case", BAD_LISTS)
def test_accumulate_refuses_lists(backend, case):
    buffers, grads, error, message = BAD_LISTS[case]
    before = SHARED.clone()
    with running(backend) as name, pytest.raises(error, match=message):
        ops.accumulate_(buffers, grads, 1.0, overwrite=True, stats=(stats := ops.Stats.empty()), backend=name)
    assert torch.equal(SHARED, before)
    assert stats.sq_norm._version == 0


@every_backend
def test_nothing_is_written_when_the_last_of_many_is_bad(backend):
    buffers, grads = [torch.ones(5) for _ in range(50)], [torch.ones(5) for _ in range(50)]
    for bad in (None, z(4), z(5, dtype=torch.int64), buffers[7]):
        with running(backend) as name, pytest.raises((TypeError, ValueError), match=r"grads\[49\]|share memory"):
            ops.accumulate_(buffers, [*grads[:49], bad], 1.0, backend=name)
    assert all((x == 1).all() for x in buffers)


@pytest.fixture(params=["addresses", "storages"])
def places(request, monkeypatch):
    """By what memory is compared: addresses or, as on Apple's GPUs, storages and places in them."""
    if request.param == "storages":
        monkeypatch.setattr(memory, "WITHOUT_ADDRESSES", ("cpu",))


@pytest.mark.parametrize("case", BAD_LISTS)
def test_python_refuses_them_by_itself(case, places):
    buffers, grads, error, message = BAD_LISTS[case]
    with pytest.raises(error, match=message):
        arguments.check_lists({"buffers": buffers, "grads": grads})


def test_a_list_is_not_its_own_partner():
    buffers = [z(), z()]
    # Of two such pairs, the one of the lower address is named.
    with pytest.raises(ValueError, match=r"buffers\[(\d)\] and grads\[\1\] share memory"):
        arguments.check_lists({"buffers": buffers, "grads": buffers})


def test_ordinary_lists_are_not_looked_at_tensor_by_tensor(monkeypatch):
    """That would take several times as long without the extension: microseconds for each tensor."""
    monkeypatch.delattr(arguments, "_check_tensor")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 1))
    outs = list(model.to(memory_format=torch.channels_last).parameters())
    ins = [torch.zeros_like(x, dtype=torch.bfloat16) for x in outs]
    assert arguments.check_lists({"outs": outs, "ins": ins}) == Layout.FLAT
    assert arguments.check_lists({"tensors": outs}) == Layout.FLAT
    assert arguments.check_lists({"tensors": [*outs, *outs]}, written=False) == Layout.FLAT


@pytest.mark.parametrize("case", BAD_LISTS)
@pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built")
def test_predicate_refuses_what_python_refuses(cpu, case):
    buffers, grads, _, _ = BAD_LISTS[case]
    assert cpu.predicate(buffers, grads, True) == Layout.REFUSED


@pytest.mark.parametrize("case", GOOD_LISTS)
def test_predicate_and_python_accept_the_same(case, request, places):
    buffers, grads, layout = GOOD_LISTS[case]
    assert arguments.check_lists({"buffers": buffers, "grads": grads}) == layout
    if NATIVE:
        verdict = request.getfixturevalue("cpu").predicate(buffers, grads, True)
        # C++ leaves interleaved views to the exact comparison in Python.
        assert verdict == layout or (verdict, layout) == (Layout.REFUSED, Layout.STRIDED)
    ops.accumulate_(buffers, grads, 1.0)


@pytest.mark.parametrize("case", [case for case in BAD_LISTS | GOOD_LISTS if case not in NO_PAIRS])
@pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built")
def test_predicate_sees_the_same_among_thousands(cpu, case):
    """The case is hidden at random places among pairs in a random order of addresses."""
    buffers, grads, *_ = (BAD_LISTS | GOOD_LISTS)[case]
    expected = cpu.predicate(buffers, grads, True)
    draw, memory = random.Random(), torch.zeros(4_000, 2, 3)
    pairs = [(b, g) for b, g in memory]
    draw.shuffle(pairs)
    for pair in zip(buffers, grads, strict=True):
        pairs.insert(draw.randrange(len(pairs) + 1), pair)
    assert cpu.predicate([b for b, _ in pairs], [g for _, g in pairs], True) == expected


@pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built")
def test_predicate_finds_the_one_overlap_among_thousands(cpu):
    draw, memory = random.Random(), torch.zeros(9_001)
    flat = list(memory[:9_000].split(3))
    draw.shuffle(flat)
    outs, ins = flat[:1_500], flat[1_500:]
    assert cpu.predicate(outs, ins, True) == Layout.FLAT
    for lists in (outs, ins):
        moved, j, k = list(lists), *draw.sample(range(1_500), 2)
        start = max(outs[j].storage_offset() + draw.randint(-2, 2), 0)
        moved[k] = memory[start : start + 3]
        assert cpu.predicate(moved if lists is outs else outs, moved if lists is ins else ins, True) == Layout.REFUSED
    assert cpu.predicate(ins, True) == Layout.FLAT
    assert cpu.predicate([*ins, ins[7]], True) == Layout.REFUSED
    assert cpu.predicate([*ins, ins[7]], False) == Layout.FLAT


@pytest.mark.skipif(not NATIVE, reason="the extension fusedaccum._cpu was not built")
def test_predicate_agrees_with_python_on_all_pairs_of_views(cpu):
    """Views of one stretch of memory, as output and input: overlaps, gaps, transposes, dtypes."""
    base = torch.zeros(48)
    views = [
        base[:12],
        base[12:24],
        base[11:23],
        base[::4],
        base[1::4],
        base[:24:2],
        base[36:].view(3, 4),
        base[:12].view(4, 3).t(),
    ]
    views += [
        base.view(torch.float16)[24:36],
        base.view(torch.float64)[6:18],
        base.as_strided((12,), (0,)),
        base.as_strided((3, 4), (2, 1)),
        base[5:5],
    ]
    for out, x in itertools.product(views, views):
        for written in (True, False):
            try:
                expected = arguments.check_lists({"a": [out], "b": [x]}, written)
            except ValueError:
                expected = Layout.REFUSED
            got = cpu.predicate([out], [x], written)
            assert got == expected or (got, expected) == (Layout.REFUSED, Layout.STRIDED), (out.stride(), x.stride())


@every_backend
@pytest.mark.parametrize("argument", ["scale", "decay"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("8", TypeError, r"must be a real number or a 0-d tensor, not str \('8'\)"),
        (None, TypeError, r"must be a real number or a 0-d tensor, not NoneType \(None\)"),
        ([1.0], TypeError, r"must be a real number or a 0-d tensor, not list"),
        (1j, TypeError, r"must be a real number or a 0-d tensor, not complex"),
        (torch.ones(2), ValueError, r"must be a number or a tensor of one element, but has shape \(2,\)"),
        (torch.tensor(1j), TypeError, r"must be real, but is a torch.complex64 tensor"),
        (10**400, ValueError, "is out of range for a float"),
        (
            torch.ones((), device="meta"),
            ValueError,
            "is on meta but the tensors are on cpu; move it there, or pass a number",
        ),
    ],
)
def test_accumulate_refuses_scalars(backend, argument, value, error, message):
    buffer, given = torch.ones(3), {"scale": 1.0} | {argument: value}
    with running(backend) as name, pytest.raises(error, match=f"{argument} {message}"):
        ops.accumulate_([buffer], [torch.ones(3)], **given, backend=name)
    assert (buffer == 1).all()


@every_backend
@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True + 1,
        np.float32(2),
        np.int64(2),
        torch.tensor(2),
        torch.tensor(2.0),
        torch.tensor([2.0]),
        torch.tensor(2.0, requires_grad=True),
        torch.tensor(-2j).conj().imag,
    ],
)
def test_accumulate_takes_every_kind_of_scalar(backend, value):
    with running(backend) as name:
        ops.accumulate_([x := torch.ones(3)], [torch.ones(3)], value, decay=value, backend=name)
        ops.scale_([x], value, backend=name)
    assert (x == 8).all()


@every_backend
@pytest.mark.parametrize(
    ("stats", "error", "message"),
    [
        (torch.zeros(2), TypeError, r"stats must be a fusedaccum.ops.Stats, not Tensor .*Stats.empty\(device\)"),
        (
            ops.Stats(z(), torch.tensor(0)),
            TypeError,
            "stats.sq_norm must be a 0-d torch.float64 tensor, not 1-d torch.float32",
        ),
        (
            ops.Stats(z(dtype=torch.float64), torch.tensor(0)),
            TypeError,
            "stats.sq_norm must be a 0-d torch.float64 tensor, not 1-d",
        ),
        (
            ops.Stats(torch.tensor(0.0).double(), torch.tensor(0.0)),
            TypeError,
            "stats.nonfinite must be a 0-d torch.int64 tensor",
        ),
        (
            ops.Stats.empty("meta"),
            ValueError,
            r"stats.sq_norm is on meta but the tensors are on cpu; make it with Stats.empty\('cpu'\)",
        ),
    ],
)
def test_ops_refuse_stats(backend, stats, error, message):
    with running(backend) as name:
        for call in (
            lambda: ops.accumulate_([z()], [z()], 1.0, stats=stats, backend=name),
            lambda: ops.scale_([z()], 1.0, stats=stats, backend=name),
            lambda: ops.cast_([z()], [z()], stats=stats, backend=name),
        ):
            with pytest.raises(error, match=message):
                call()


@every_backend
@pytest.mark.parametrize(
    ("rounding", "error", "message"),
    [
        (
            "stochastic",
            TypeError,
            r"rounding must be None \(nearest\) or a fusedaccum.ops.StochasticRounding.* not 'stochastic'",
        ),
        (ops.StochasticRounding(1, [0, 0]), ValueError, "rounding.counters has 2 entries for 1 buffers"),
        (ops.StochasticRounding(1.5, [0]), TypeError, r"rounding.seed must be an int, not float \(1.5\)"),
        (
            ops.StochasticRounding(-1, [0]),
            ValueError,
            r"rounding.seed is -1, which does not fit into 64 bits; take it modulo 2\*\*64",
        ),
        (
            ops.StochasticRounding(0, [1 << 64]),
            ValueError,
            r"rounding.counters\[0\] is 18446744073709551616, which does not fit into 64 bits",
        ),
    ],
)
def test_accumulate_refuses_rounding(backend, rounding, error, message):
    buffer = torch.ones(3).bfloat16()
    with running(backend) as name, pytest.raises(error, match=message):
        ops.accumulate_([buffer], [z()], 1.0, rounding=rounding, backend=name)


def test_the_other_ops_name_their_own_arguments():
    for call, message in (
        (lambda: ops.scale_([z(dtype=torch.int8)], 2.0), "tensors[0] has dtype torch.int8"),
        (lambda: ops.scale_([SHARED, SHARED], 2.0), "tensors[0] and tensors[1] share memory"),
        (lambda: ops.cast_([z()], [z(4)]), "ins[0] has shape (4,) but outs[0] has (3,)"),
        (lambda: ops.cast_([SHARED], [SHARED]), "outs[0] and ins[0] share memory"),
        (lambda: ops.stats(z()), "tensors must be a list or tuple of tensors, not Tensor"),
        (lambda: ops.stats([z(dtype=torch.bool)]), "tensors[0] has dtype torch.bool"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()


def test_without_addresses_two_storages_never_overlap(monkeypatch):
    """Where data_ptr() is not an address, that two of them are close says nothing."""
    x = torch.zeros(10)
    close = torch.from_numpy(x.numpy()[2:])  # a storage that begins within the other
    with pytest.raises(ValueError, match="share memory"):
        arguments.check_lists({"outs": [x, close]})
    monkeypatch.setattr(memory, "WITHOUT_ADDRESSES", ("cpu",))
    assert arguments.check_lists({"outs": [x, close]}) == Layout.FLAT
    with pytest.raises(ValueError, match="share memory"):
        arguments.check_lists({"outs": [x, close, x[1:]]})


def test_a_view_of_which_the_storage_was_cut_off_is_refused(cpu):
    x = torch.zeros(10)
    view = x[6:]
    x.untyped_storage().resize_(16)
    with pytest.raises(ValueError, match=r"tensors\[0\] has no memory behind it"):
        arguments.check_lists({"tensors": [view]})
    assert cpu.predicate([view], True) == Layout.REFUSED


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("as_input", [False, True], ids=["written", "read"])
def test_a_view_beyond_a_cut_storage_is_refused_among_others_of_its_kind(cpu, as_input, cut):
    """All are compared with the first; each is shorter than what is left of the storage."""
    x, fine = torch.zeros(12), [torch.zeros(3) for _ in range(4)]
    views = [x[3 * k : 3 * k + 3] for k in range(4)]
    x.untyped_storage().resize_(4 * (3 * cut + 2))  # one element of view number ``cut`` is gone, and all after it
    for end in range(1, 5):
        lists = {"outs": fine[:end], "ins": views[:end]} if as_input else {"outs": views[:end]}
        within = end <= cut
        assert cpu.predicate(*lists.values(), True) == (Layout.FLAT if within else Layout.REFUSED)
        if not within:
            where = rf"{'ins' if as_input else 'outs'}\[{cut}\] has no memory behind it"
            with pytest.raises(ValueError, match=where):
                arguments.check_lists(lists)


def test_a_list_of_one_meta_tensor_is_refused():
    with pytest.raises(ValueError, match=r"tensors\[0\] has no memory behind it"):
        arguments.check_lists({"tensors": [z(device="meta")]})


def test_what_vmap_passes_has_no_memory_of_its_own():
    with pytest.raises(TypeError, match=r"tensors\[0\] is a Tensor, which has no memory of its own"):
        torch.func.vmap(lambda x: ops.scale_([x], 2.0))(torch.ones(3, 2))
