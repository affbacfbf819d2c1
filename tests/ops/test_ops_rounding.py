"""Stochastic rounding: published draws, one per element, only neighbours as results, no bias."""

import itertools

import numpy as np
import pytest
import torch
from fusedaccum import ops
from fusedaccum.ops import reference
from ops_cases import BACKENDS, DTYPES, assert_same_bits, running, values

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=[f"backend={name}" for name in BACKENDS])
every_format = pytest.mark.parametrize("dtype", ["bf16", "f16"])

# Random123, examples/kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_answers(counter, key, answer):
    low, high = words(key)
    got = reference.philox4x32(tuple(torch.tensor([word]) for word in words(counter)), low | high << 32)
    assert [int(word) for word in got] == words(answer)


def philox_with_numpy(block, seed):
    """A second implementation of Philox4x32-10, in Python's integers."""
    c, k = [block & 0xFFFFFFFF, block >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.array(c, dtype=np.uint32).view(np.uint16).tolist()  # little-endian: low halves first


def draws(seed, counter, count):
    numbers = [n % 2**64 for n in range(counter, counter + count)]
    return [philox_with_numpy(n >> 3, seed)[n & 7] for n in numbers]


@every_backend
@pytest.mark.parametrize("counter", [0, 1, 13, 2**32 * 8 - 5, 2**63 - 3, 2**64 - 20])
def test_element_e_uses_number_counter_plus_e(backend, counter):
    """1 + 2^-7 * r' / 2^16 rounds up in bf16 exactly where the element's draw is >= 2^16 - r'."""
    seed, count, fraction = 2**64 - 12345, 100, 20000
    x = torch.full((count,), 0x3F800000 + fraction, dtype=torch.int32).view(torch.float32)
    got = torch.empty(count, dtype=torch.bfloat16)
    with running(backend) as name:
        ops.accumulate_([got], [x], 1.0, overwrite=True, rounding=ops.StochasticRounding(seed, [counter]), backend=name)
    up = [r + fraction >= 2**16 for r in draws(seed, counter, count)]
    assert (got > 1).tolist() == up


@every_backend
@every_format
def test_only_the_two_neighbours_are_chosen(backend, dtype):
    x = values(20000, torch.float32)
    x = x[x.isfinite()]
    got = torch.empty(x.shape, dtype=DTYPES[dtype])
    rounding = ops.StochasticRounding(1, [0])
    with running(backend) as name:
        ops.accumulate_([got], [x], 1.0, overwrite=True, rounding=rounding, backend=name)
    nearest = x.to(DTYPES[dtype])
    other = nearest.nextafter(torch.where(nearest.float() < x, torch.inf, -torch.inf).to(DTYPES[dtype]))
    exact = nearest.float() == x
    assert_same_bits(got[exact], nearest[exact])
    assert ((got == nearest) | (got == other)).all()
    chosen = (got == other)[~exact].float().mean()
    assert 0.1 < chosen < 0.5


def counters_of(*wanted):
    """For each of these 16-bit numbers, a counter at which the seed 11 draws it."""
    numbers = reference.random16(11, 0, 1 << 19)
    return [int((numbers == number).nonzero()[0]) for number in wanted]


@every_backend
@every_format
def test_what_is_exact_stays_whatever_is_drawn(backend, dtype):
    """For every bit of the format, and its neighbours: subnormal numbers, and normal ones.

    Subnormals lie on an even grid. The draws 0 and 65535 are those that would move a number if the
    test for "greater" were one for "greater or equal", or the reverse.
    """
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    sizes = [2**k + d for k in range(15) for d in (-1, 0, 1)]
    exact = exact[[n for n in sizes if n >= 0] + [n + (1 << 15) for n in sizes if n >= 0]]
    exact = exact[exact.isfinite()]
    for counter in counters_of(0, 1, 0x7FFF, 0xFFFF):
        outs = [torch.full((1,), 9.0, dtype=DTYPES[dtype]) for _ in exact]
        rounding = ops.StochasticRounding(11, [counter] * len(outs))
        with running(backend) as name:
            ops.accumulate_(outs, list(exact.float().split(1)), 1.0, overwrite=True, rounding=rounding, backend=name)
        assert_same_bits(torch.cat(outs), exact)


@every_backend
@every_format
def test_what_lies_between_two_numbers_goes_up_at_the_draws_that_it_should(backend, dtype):
    """A quarter of the way from one number to the next: up at a quarter of the draws.

    These end, or begin, at a quarter of 65536.
    """
    exact = [2.0**-24, 5 * 2.0**-24, 1023 * 2.0**-24, -3 * 2.0**-24] if dtype == "f16" else [1.0, -3.0, 2.0**-100, 7.5]
    steps = [2.0**-24] * 4 if dtype == "f16" else [2.0**-7, 2.0**-6, 2.0**-107, 2.0**-5]
    low = torch.tensor(exact)
    high = low + torch.tensor(steps) * low.sign()
    at = [0, 0x3FFF, 0x4000, 0xBFFF, 0xC000, 0xFFFF]
    went_up = []
    for counter in counters_of(*at):
        outs = [torch.zeros(1, dtype=DTYPES[dtype]) for _ in exact]
        rounding = ops.StochasticRounding(11, [counter] * len(outs))
        with running(backend) as name:
            ops.accumulate_(
                outs, list((low + (high - low) / 4).split(1)), 1.0, overwrite=True, rounding=rounding, backend=name
            )
        got = torch.cat(outs).float()
        assert torch.equal(torch.where(got == high, high, low), got)
        went_up.append((got == high).tolist())
    # FP16's subnormals go up at draws below the distance, bf16 at draws that carry over.
    expected = [draw < 0x4000 for draw in at] if dtype == "f16" else [draw >= 0xC000 for draw in at]
    assert went_up == [[up] * 4 for up in expected]


@every_backend
@every_format
def test_rounding_is_unbiased(backend, dtype):
    n = 1 << 16
    points = [1.001, -3.1415926, 1000.3, 1e-4, -7.7e-6, 3.1e-7, 2.0**-24 * 0.3]
    x = torch.tensor(points).repeat_interleave(n)
    got = torch.empty(x.shape, dtype=DTYPES[dtype])
    with running(backend) as name:
        ops.accumulate_([got], [x], 1.0, overwrite=True, rounding=ops.StochasticRounding(7, [3]), backend=name)
    for point, rounded in zip(torch.tensor(points).double(), got.view(len(points), n).double(), strict=True):
        step = (rounded.max() - rounded.min()).item()
        assert step > 0
        sigma = step * 0.5 / n**0.5
        assert abs(rounded.mean() - point) < 5 * sigma


@every_backend
def test_a_mean_that_nearest_loses_is_kept(backend):
    """Adds are 1/1000 of a bf16 step: nearest never moves, stochastic rounding keeps the mean."""
    n, additions = 4096, 1000 if backend.startswith("cpu") else 200
    up, plain = torch.ones(n, dtype=torch.bfloat16), torch.ones(n, dtype=torch.bfloat16)
    grad = torch.full((n,), 2.0**-7 / 1000)
    with running(backend) as name:
        for i in range(additions):
            ops.accumulate_([plain], [grad], 1.0, backend=name)
            ops.accumulate_([up], [grad], 1.0, rounding=ops.StochasticRounding(3, [i * n]), backend=name)
    steps = (up.double().mean() - 1) / 2.0**-7
    assert (plain == 1).all()
    assert abs(steps - additions / 1000) < 0.1


@every_backend
@every_format
def test_nonfinite_and_overflowing_values_round_as_nearest(backend, dtype):
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3.4028235e38, 65536.0, -1e30])
    got = torch.empty(8, dtype=DTYPES[dtype])
    with running(backend) as name:
        ops.accumulate_([got], [x], 1.0, overwrite=True, rounding=ops.StochasticRounding(1, [0]), backend=name)
    expected = x.to(DTYPES[dtype])
    keep = torch.ones(8, dtype=torch.bool)
    if dtype == "bf16":
        keep[[5, 7]] = False  # finite in bf16, and between two of its numbers
    assert_same_bits(got[keep], expected[keep])


@every_backend
def test_wide_buffers_ignore_rounding(backend):
    x, y = torch.randn(100), torch.randn(100)
    with running(backend) as name:
        ops.accumulate_([a := x.clone()], [y], 0.3, rounding=ops.StochasticRounding(1, [0]), backend=name)
        ops.accumulate_([b := x.clone()], [y], 0.3, backend=name)
    assert_same_bits(a, b)


@every_backend
def test_draws_do_not_depend_on_how_a_stretch_is_cut(backend):
    x = values(1000, torch.float32)
    whole, parts = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16)
    cuts = [0, 1, 34, 500, 777, 1000]
    pieces = list(itertools.pairwise(cuts))
    with running(backend) as name:
        ops.accumulate_([whole], [x], 0.3, rounding=ops.StochasticRounding(5, [77]), backend=name)
        ops.accumulate_(
            [parts[a:b] for a, b in pieces],
            [x[a:b] for a, b in pieces],
            0.3,
            rounding=ops.StochasticRounding(5, [77 + a for a, _ in pieces]),
            backend=name,
        )
    assert_same_bits(whole, parts)


@every_backend
def test_draws_go_by_the_memory_order_of_the_buffer(backend):
    x = values(600, torch.float32).view(20, 30)
    rounding = ops.StochasticRounding(5, [9])
    flat, transposed, strided = (torch.zeros(s, dtype=torch.bfloat16) for s in ((20, 30), (30, 20), (20, 60)))
    with running(backend) as name:
        ops.accumulate_([flat], [x], 0.3, rounding=rounding, backend=name)
        ops.accumulate_([strided[:, ::2]], [x], 0.3, rounding=rounding, backend=name)
        ops.accumulate_([transposed.t()], [x], 0.3, rounding=rounding, backend=name)
        assert_same_bits(strided[:, ::2], flat)
        ops.accumulate_(
            [other := torch.zeros(30, 20, dtype=torch.bfloat16)], [x.t()], 0.3, rounding=rounding, backend=name
        )
    assert_same_bits(transposed, other)
    assert not torch.equal(transposed.t(), flat)
