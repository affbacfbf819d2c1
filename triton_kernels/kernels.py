"""The kernels: one that writes (accumulate and cast are its modes) and one that only measures.

A program takes BLOCK elements of one tensor, which it finds in a table on the device: so one launch
serves any number of tensors. BF16 travels as 16-bit integers and is rounded here, which makes its
bits the same on every GPU and in Triton's interpreter.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# Triton reads the annotations: anything but constexpr would be a name for it to look up.

import triton
import triton.language as tl

# The table is int64: a header of three (scale and decay as FP64, the seed as 64 bits), then a row
# of each of the others for all tensors.
SCALE, DECAY = 0, 1
_SEED, _HEADER = tl.constexpr(2), tl.constexpr(3)
_OUT, _IN, _ELEMENTS, _FIRST_BLOCK, _COUNTER = (tl.constexpr(row) for row in range(5))
_LOW = _COUNTER  # addresses of low parts: numbers in two parts are not rounded stochastically


@triton.jit
def _row(table, tensors, tensor, row: tl.constexpr):
    return tl.load(table + _HEADER + row * tensors + tensor)


@triton.jit
def _tensor_of(table, tensors, block):
    """The last tensor whose first block is not after this one."""
    low = 0
    high = tensors
    while high - low > 1:
        middle = (low + high) // 2
        here = _row(table, tensors, middle, _FIRST_BLOCK) <= block
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    return low


@triton.jit
def _place(table, tensors, BLOCK: tl.constexpr):
    """This program's tensor, how many elements it has, and the program's first of them."""
    block = tl.program_id(0)
    tensor = _tensor_of(table, tensors, block)
    begin = (block - _row(table, tensors, tensor, _FIRST_BLOCK)) * BLOCK
    return tensor, _row(table, tensors, tensor, _ELEMENTS), begin


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, WIDER: tl.constexpr, ALIGNED: tl.constexpr):
    """Accesses are of as many elements, on both sides, as 16 bytes of the WIDER one are.

    Then all threads hold the same elements of both, and nothing has to be exchanged between them.
    """
    stored: tl.constexpr = tl.int16 if DTYPE == tl.bfloat16 else DTYPE
    pointer = address.to(tl.pointer_type(stored))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16 * DTYPE.primitive_bitwidth // WIDER.primitive_bitwidth)
    return pointer


@triton.jit
def _load(pointer, at, elements, FULL: tl.constexpr):
    # Without a mask wherever a block is full: with one, nothing moves in 16 bytes.
    if FULL:
        x = tl.load(pointer + at)
    else:
        x = tl.load(pointer + at, mask=at < elements, other=0)
    return x


@triton.jit
def _widened(x, DTYPE: tl.constexpr):
    """As FP32, or FP64 as it is."""
    if DTYPE == tl.bfloat16:
        y = ((x.to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        y = x.to(tl.float32)
    else:
        y = x
    return y


@triton.jit
def _bf16(bits):
    return ((bits >> 16) & 0xFFFF).to(tl.int16)


@triton.jit
def _nearest(x, DTYPE: tl.constexpr):
    """Rounded to nearest even; FP64 becomes 16 bits by way of FP32."""
    if DTYPE == tl.bfloat16:
        f = x.to(tl.float32)
        bits = f.to(tl.int32, bitcast=True)
        y = _bf16(tl.where(f == f, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000))
    elif DTYPE == tl.float16:
        y = x.to(tl.float32).to(tl.float16)
    else:
        y = x.to(DTYPE)
    return y


# -- numbers in two parts: csrc/formulas.h. BITS: of a low part, 8 or 16, or 0 without one.


@triton.jit
def _low(table, tensors, tensor, WIDER: tl.constexpr, ALIGNED: tl.constexpr, BITS: tl.constexpr):
    dtype: tl.constexpr = tl.int8 if BITS == 8 else tl.int16
    return _pointer(_row(table, tensors, tensor, _LOW), dtype, WIDER, ALIGNED)


@triton.jit
def _number(h, low, BITS: tl.constexpr):
    """The FP32 of two parts.

    Where other code has written 0 or, beside 8 bits, infinity to h, a negative low part is none.
    """
    upper = (h.to(tl.int32) & 0xFFFF) << 16
    part = low.to(tl.int32) << (16 - BITS)
    magnitude = upper & 0x7FFFFFFF
    whole = magnitude == 0
    if BITS == 8:
        whole = whole | (magnitude == 0x7F800000)
    return (upper + tl.where(whole & (part < 0), 0, part)).to(tl.float32, bitcast=True)


@triton.jit
def _values(pointer, low, at, elements, DTYPE: tl.constexpr, BITS: tl.constexpr, FULL: tl.constexpr):
    x = _load(pointer, at, elements, FULL)
    if BITS == 0:
        y = _widened(x, DTYPE)
    else:
        y = _number(x, _load(low, at, elements, FULL), BITS)
    return y


@triton.jit
def _word(x, BITS: tl.constexpr):
    """Both parts of an FP32: h in the upper half of word + 0x8000, low from bit 16 - BITS on."""
    word = x.to(tl.int32, bitcast=True)
    if BITS == 8:
        rounded = word + 0x7F + ((word >> 8) & 1)
        infinite = ((rounded + 0x8000) & 0x7FFF0000) == 0x7F800000
        word = tl.where(infinite, (word & -0x80000000) | 0x7F800000, rounded)
    return tl.where(x == x, word, 0x7FC00000)


@triton.jit
def _random_blocks(block, seed):
    zero = (block * 0).to(tl.uint32)
    return tl.philox(seed, (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32), zero, zero)


@triton.jit
def _whole_blocks(first, seed, COUNT: tl.constexpr):
    """COUNT numbers from a block's first one on: each block is drawn once, for all its 8."""
    w0, w1, w2, w3 = _random_blocks((first + 8 * tl.arange(0, COUNT // 8).to(tl.uint64)) >> 3, seed)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return tl.interleave(words & 0xFFFF, words >> 16)


@triton.jit
def _one_by_one(first, seed, COUNT: tl.constexpr):
    n = first + tl.arange(0, COUNT).to(tl.uint64)
    w0, w1, w2, w3 = _random_blocks(n >> 3, seed)
    which = (n & 7) >> 1
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return tl.where((n & 1) == 0, word & 0xFFFF, word >> 16)


@triton.jit
def _random16(first, seed, COUNT: tl.constexpr):
    """COUNT numbers of csrc/formulas.h from ``first`` on: number n is 16 bits of block n >> 3."""
    if (first & 7) == 0:
        numbers = _whole_blocks(first, seed, COUNT)
    else:
        numbers = _one_by_one(first, seed, COUNT)
    return numbers.to(tl.int32)


@triton.jit
def _stochastic(x, r, DTYPE: tl.constexpr):
    """One of the two neighbours, the upper with the probability of the distance to the lower."""
    f = x.to(tl.float32)
    bits = f.to(tl.int32, bitcast=True)
    finite = f - f == 0
    if DTYPE == tl.bfloat16:
        y = tl.where(finite, _bf16(bits + r), _nearest(f, DTYPE))
    else:
        normal = tl.where(finite, (bits + (r >> 3)) & -0x2000, bits).to(tl.float32, bitcast=True)
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        steps = magnitude * 16777216.0  # of 2^-24, the grid of the subnormals
        whole = tl.floor(steps)
        whole = tl.where(r.to(tl.float32) < (steps - whole) * 65536.0, whole + 1.0, whole)
        subnormal = (whole * 5.9604644775390625e-08).to(tl.int32, bitcast=True) | (bits & -0x80000000)
        small = magnitude < 6.103515625e-05
        y = tl.where(small, subnormal.to(tl.float32, bitcast=True), normal).to(tl.float16)
    return y


@triton.jit
def _bad(x):
    return tl.sum(tl.where(x - x == 0, 0, 1))


@triton.jit
def _squares(x):
    wide = x.to(tl.float64)
    return tl.sum(wide * wide)


@triton.jit
def _write_block(
    table,
    tensors,
    tensor,
    begin,
    at,
    elements,
    scale_at,
    decay_at,
    partials,
    bad,
    OUT_DTYPE: tl.constexpr,
    IN_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAST: tl.constexpr,
    OVERWRITE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STATS: tl.constexpr,
    BITS: tl.constexpr,
    LOW_ALIGNED: tl.constexpr,
    LOW_WRITTEN: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    wide: tl.constexpr = OUT_DTYPE == tl.float64 or IN_DTYPE == tl.float64
    compute: tl.constexpr = tl.float64 if wide else tl.float32
    wider: tl.constexpr = OUT_DTYPE if OUT_DTYPE.primitive_bitwidth > IN_DTYPE.primitive_bitwidth else IN_DTYPE
    out = _pointer(_row(table, tensors, tensor, _OUT), OUT_DTYPE, wider, ALIGNED)
    source = _pointer(_row(table, tensors, tensor, _IN), IN_DTYPE, wider, ALIGNED)

    low = _low(table, tensors, tensor, wider, LOW_ALIGNED, BITS)

    scale = tl.load(scale_at)
    t = _values(source, low, at, elements, IN_DTYPE, BITS if CAST else 0, FULL).to(compute) * scale.to(compute)
    if not CAST:
        t = tl.where(scale == 0, 0.0, t).to(compute)  # adds nothing, whatever the gradient holds
    new = t
    if not OVERWRITE:
        new = _values(out, low, at, elements, OUT_DTYPE, BITS, FULL).to(compute) * tl.load(decay_at).to(compute) + t

    if LOW_WRITTEN:
        word = _word(new, BITS)
        rounded = _bf16(word + 0x8000)
        if FULL:
            tl.store(low + at, (word >> (16 - BITS)).to(low.dtype.element_ty))
        else:
            tl.store(low + at, (word >> (16 - BITS)).to(low.dtype.element_ty), mask=at < elements)
    elif STOCHASTIC:
        first = (_row(table, tensors, tensor, _COUNTER) + begin).to(tl.uint64)
        rounded = _stochastic(new, _random16(first, tl.load(table + _SEED), BLOCK), OUT_DTYPE)
    else:
        rounded = _nearest(new, OUT_DTYPE)
    if FULL:
        tl.store(out + at, rounded)
    else:
        tl.store(out + at, rounded, mask=at < elements)

    if STATS:
        if LOW_WRITTEN:
            written = (word & (-0x100 if BITS == 8 else -1)).to(tl.float32, bitcast=True)
        else:
            written = _widened(rounded, OUT_DTYPE)
        judged = written if CAST else t
        if not FULL:
            inside = at < elements
            written = tl.where(inside, written, 0.0)
            judged = tl.where(inside, judged, 0.0)
        # In this order: in the other, a register of a cast spills on GPUs of 8.0.
        tl.store(bad + tl.program_id(0), _bad(judged).to(tl.int64))
        tl.store(partials + tl.program_id(0), _squares(written))


# Not specialized: a value of 1 would become a constant, which no loop can change, and these
# pointers' alignment is of no use.
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["scale_at", "decay_at", "partials", "bad"])
def write(
    table,
    tensors,
    scale_at,
    decay_at,
    partials,
    bad,
    OUT_DTYPE: tl.constexpr,
    IN_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAST: tl.constexpr,
    OVERWRITE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STATS: tl.constexpr,
    BITS: tl.constexpr,
    LOW_ALIGNED: tl.constexpr,
    LOW_WRITTEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``t = in * scale; new = t if OVERWRITE else out * decay + t; out = round(new)``."""
    tensor, elements, begin = _place(table, tensors, BLOCK)
    at = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= elements:
        _write_block(
            table, tensors, tensor, begin, at, elements, scale_at, decay_at, partials, bad,
            OUT_DTYPE, IN_DTYPE, ALIGNED, CAST, OVERWRITE, STOCHASTIC, STATS, BITS, LOW_ALIGNED, LOW_WRITTEN,
            BLOCK, True,
        )  # fmt: skip
    else:
        _write_block(
            table, tensors, tensor, begin, at, elements, scale_at, decay_at, partials, bad,
            OUT_DTYPE, IN_DTYPE, ALIGNED, CAST, OVERWRITE, STOCHASTIC, STATS, BITS, LOW_ALIGNED, LOW_WRITTEN,
            BLOCK, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=["partials", "bad"])
def measure(
    table,
    tensors,
    partials,
    bad,
    IN_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BITS: tl.constexpr,
    LOW_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Squares and elements that are not finite, one number of each per block."""
    tensor, elements, begin = _place(table, tensors, BLOCK)
    at = begin + tl.arange(0, BLOCK)
    source = _pointer(_row(table, tensors, tensor, _IN), IN_DTYPE, IN_DTYPE, ALIGNED)
    low = _low(table, tensors, tensor, IN_DTYPE, LOW_ALIGNED, BITS)
    if begin + BLOCK <= elements:
        x = _values(source, low, at, elements, IN_DTYPE, BITS, True)
    else:
        x = _values(source, low, at, elements, IN_DTYPE, BITS, False)
    tl.store(partials + tl.program_id(0), _squares(x))
    tl.store(bad + tl.program_id(0), _bad(x).to(tl.int64))
