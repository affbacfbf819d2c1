"""The definition: every op in plain PyTorch, one readable expression per formula, on any device.

Other backends must give the same bits (a NaN may have any payload). All functions here, as in every
backend, get checked arguments: lists of equal length whose pairs are dense and have the same
layout, and ``scale`` and ``decay`` as floats or 0-d tensors.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011),
Philox4x32-10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..scalars import widened

if TYPE_CHECKING:
    from .arguments import Stats, StochasticRounding

_SUM_ROW = 4096  # values added up at a time, so that the order of a sum never depends on the number of threads
_MASK32 = 0xFFFFFFFF


@torch.no_grad()
def accumulate_(
    buffers: list[Tensor],
    grads: list[Tensor],
    scale: float | Tensor,
    overwrite: bool,
    decay: float | Tensor,
    rounding: StochasticRounding | None,
    stats: Stats | None,
    low: list[Tensor] | None = None,
) -> None:
    """``buffer = round(t if overwrite else buffer * decay + t)`` for every pair.

    Here ``t = 0 if scale == 0 else grad * scale``.
    """
    scale, decay = _apart(scale), _apart(decay)
    bad = []
    for k, (buffer, grad) in enumerate(zip(buffers, grads, strict=True)):
        compute = compute_dtype(buffer, grad)
        t = _contribution(grad.detach().to(compute), scale)
        new = t if overwrite else _values(buffer, low, k).to(compute) * _scalar(decay, t) + t
        if low is not None:
            _split_(buffer, low[k], new)
        elif rounding is not None and buffer.dtype.itemsize == 2:
            _store_stochastic(buffer, new, rounding.seed, rounding.counters[k])
        else:
            buffer.copy_(_narrowed(new, buffer.dtype))
        if stats is not None:
            bad.append((~t.isfinite()).sum())
    if stats is not None:
        _fill(stats, _all_values(buffers, low), bad)


@torch.no_grad()
def scale_(tensors: list[Tensor], scale: float | Tensor, stats: Stats | None, low: list[Tensor] | None = None) -> None:
    """``x = x * scale``."""
    if low is None:
        return cast_(tensors, tensors, scale, stats)
    scale = _apart(scale)
    for x, part in zip(tensors, low, strict=True):
        wide = joined(x, part)
        _split_(x, part, wide * _scalar(scale, wide))
    if stats is not None:
        _measure(stats, _all_values(tensors, low))


@torch.no_grad()
def cast_(
    outs: list[Tensor],
    ins: list[Tensor],
    scale: float | Tensor,
    stats: Stats | None,
    low: list[Tensor] | None = None,
) -> None:
    """``out = cast(in * scale)``, rounded to nearest even."""
    scale = _apart(scale)
    for k, (out, x) in enumerate(zip(outs, ins, strict=True)):
        wide = _values(x.detach(), low, k).to(compute_dtype(out, x))
        out.copy_(_narrowed(wide * _scalar(scale, wide), out.dtype))
    if stats is not None:
        _measure(stats, outs)


@torch.no_grad()
def stats(tensors: list[Tensor], into: Stats, low: list[Tensor] | None = None) -> None:
    """``sq_norm = sum(x * x)`` in FP64 and the number of elements that are not finite."""
    _measure(into, _all_values(tensors, low))


def compute_dtype(out: Tensor, x: Tensor) -> torch.dtype:
    """FP64 if either side is, else FP32."""
    return torch.float64 if torch.float64 in (out.dtype, x.dtype) else torch.float32


def _apart(value: float | Tensor) -> float | Tensor:
    """A copy of a tensor, which may be an element of what will be written."""
    return value.clone() if isinstance(value, Tensor) else value


def _scalar(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A factor of ``like``; PyTorch rounds a float to the dtype that it multiplies."""
    return value.detach().to(like.device, like.dtype) if isinstance(value, Tensor) else value


def _contribution(grad: Tensor, scale: float | Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        return torch.where(scale.detach().to(grad.device) == 0, 0.0, grad * _scalar(scale, grad))
    return torch.zeros_like(grad) if scale == 0 else grad * _scalar(scale, grad)


def _narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """FP64 becomes 16 bits by way of FP32, as in PyTorch's own ``.to``."""
    return wide.float() if dtype.itemsize == 2 else wide


def _measure(into: Stats, outs: list[Tensor]) -> None:
    _fill(into, outs, [(~x.isfinite()).sum() for x in outs])


def _fill(into: Stats, outs: list[Tensor], bad: list[Tensor]) -> None:
    nothing = torch.zeros((), device=into.sq_norm.device)
    into.sq_norm.copy_(ordered_sum(torch.stack([_sq_norm(x) for x in outs])) if outs else nothing)
    into.nonfinite.copy_(torch.stack(bad).sum() if bad else nothing)


def _sq_norm(x: Tensor) -> Tensor:
    flat = x.detach().as_strided((x.numel(),), (1,))  # memory order: x is dense
    return ordered_sum(widened(flat).square())


def ordered_sum(values: Tensor) -> Tensor:
    """The sum of a 1-d tensor, in an order that depends on its length alone."""
    while values.numel() > _SUM_ROW:
        rows = -(-values.numel() // _SUM_ROW)
        values = torch.nn.functional.pad(values, (0, rows * _SUM_ROW - values.numel())).view(rows, _SUM_ROW).sum(1)
    return values.sum()


# -- numbers in two parts --------------------------------------------------------------------------
#
# The parts are halves of one integer W, the number's bits: W = (h << 16) + (low << shift). An int8
# for low is bits 8 to 15, which makes 24-bit numbers; an int16 is bits 0 to 15, which makes FP32
# ones. h alone is the number as BF16, to nearest, ties away from zero.


def joined(h: Tensor, low: Tensor) -> Tensor:
    """The FP32 numbers whose parts these are.

    Other code may have written h alone. What it set to 0 or, beside an int8, to infinity stays
    that: a negative ``low`` is not subtracted there. (No number has such parts, except those that
    FP32 has beyond BF16's range, beside an int16.)
    """
    part = low.to(torch.int32) << _shift(low)
    whole = (h == 0) | h.isinf() if low.dtype == torch.int8 else h == 0
    bits = (h.detach().view(torch.int16).to(torch.int32) << 16) + torch.where(whole, part.clamp(min=0), part)
    return bits.view(torch.float32)


def _split_(h: Tensor, low: Tensor, new: Tensor) -> None:
    """The parts of FP32 numbers; beside an int8, of the nearest 24-bit numbers, ties to even.

    Beside an int8, where h would be infinite, the parts of infinity.
    """
    bits = new.view(torch.int32)
    if low.dtype == torch.int8:
        bits = bits + 0x7F + ((bits >> 8) & 1)
        overflow = (bits + 0x8000) & 0x7FFF0000 == 0x7F800000
        bits = torch.where(overflow, (bits & -0x80000000) | 0x7F800000, bits)
    bits = torch.where(new.isnan(), 0x7FC00000, bits)
    low.copy_((bits >> _shift(low)).to(low.dtype))
    h.detach().view(torch.int16).copy_(((bits + 0x8000) >> 16).to(torch.int16))


def _shift(low: Tensor) -> int:
    return 8 if low.dtype == torch.int8 else 0


def _values(x: Tensor, low: list[Tensor] | None, k: int) -> Tensor:
    """Tensor ``k`` of a list, joined with its low part if it has one."""
    return x if low is None else joined(x, low[k])


def _all_values(tensors: list[Tensor], low: list[Tensor] | None) -> list[Tensor]:
    return [_values(x, low, k) for k, x in enumerate(tensors)]


# -- stochastic rounding ---------------------------------------------------------------------------


def _store_stochastic(buffer: Tensor, new: Tensor, seed: int, counter: int) -> None:
    n = buffer.numel()
    flat = torch.empty_like(buffer, dtype=torch.float32).copy_(new).as_strided((n,), (1,))
    r = random16(seed, counter, n, buffer.device)
    rounded = (_bf16_stochastic if buffer.dtype == torch.bfloat16 else _fp16_stochastic)(flat, r)
    buffer.as_strided((n,), (1,)).copy_(rounded)


def _bf16_stochastic(x: Tensor, r: Tensor) -> Tensor:
    """Add ``r`` below the 16 bits that stay, and drop what is below."""
    bits = (x.view(torch.int32) + r.int()) & ~0xFFFF
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


def _fp16_stochastic(x: Tensor, r: Tensor) -> Tensor:
    """In the normal range as BF16, with 13 bits that fall away; below it on the grid of 2**-24."""
    bits = (x.view(torch.int32) + (r >> 3).int()) & ~0x1FFF
    y = x.abs() * 2.0**24
    up = r < (y - y.floor()) * 65536.0
    subnormal = torch.copysign((y.floor() + up) * 2.0**-24, x)
    normal = torch.where(x.isfinite(), bits.view(torch.float32), x)
    return torch.where(x.abs() < 2.0**-14, subnormal, normal).half()


def random16(seed: int, counter: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The 16-bit numbers of index ``counter`` to ``counter + count - 1`` (mod 2**64), as int64.

    Number n: Philox4x32-10 of the counter words ``(lo32(n >> 3), hi32(n >> 3), 0, 0)`` and the key
    words ``(lo32(seed), hi32(seed))`` gives 4 words; word ``(n & 7) >> 1`` holds it, in its low
    half when n is even.
    """
    signed = counter - (1 << 64) if counter >= 1 << 63 else counter
    n = torch.arange(count, dtype=torch.int64, device=device) + signed  # wraps
    block = (n >> 3) & ((1 << 61) - 1)
    zero = torch.zeros_like(block)
    words = torch.stack(philox4x32((block & _MASK32, block >> 32, zero, zero), seed))
    word = words.gather(0, ((n & 7) >> 1).unsqueeze(0))[0]
    return torch.where(n & 1 == 0, word, word >> 16) & 0xFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on 32-bit words in int64; ``key``: both key words, low one first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK32, key >> 32
    for _ in range(10):
        hi0, lo0 = _multiply32(c0, 0xD2511F53)
        hi1, lo1 = _multiply32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _multiply32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, without ever passing 2**63."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
