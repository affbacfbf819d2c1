"""What tests of numbers in two parts share: an oracle in NumPy, words around every boundary."""

import numpy as np
import torch
from ops_cases import bits

LOWS = {"int8": torch.int8, "int16": torch.int16}
DIGITS = {torch.int8: 16, torch.int16: 24}  # of a number in two parts
LARGEST = 2.0**128

# The lower halves of FP32 words: around ties and ends of both kinds of low parts.
LOWER = [
    0,
    1,
    0x7F,
    0x80,
    0x81,
    0xFF,
    0x100,
    0x17F,
    0x180,
    0x7F7F,
    0x7F80,
    0x7FFF,
    0x8000,
    0x8001,
    0xFF7F,
    0xFF80,
    0xFFFF,
]


def parts_of(x, dtype):
    """FP32 numbers' parts, by FP64 arithmetic: BF16 bits as int16, and integers. NaNs have any."""
    x = x.double().numpy()
    magnitude = np.abs(x)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -126)
    unit = np.exp2(exponent - (DIGITS[dtype] - 1.0))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        number = np.rint(magnitude / unit) * unit  # ties to even
        step = np.exp2(exponent - 7.0)
        upper = np.floor(number / step + 0.5) * step  # ties away from zero
        low = (number - upper) / unit
    if dtype == torch.int8:
        low[upper >= LARGEST] = 0
    low[~np.isfinite(x)] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        h = np.copysign(upper, x).astype(np.float32)
    h[np.isinf(x)] = x[np.isinf(x)]
    assert not (h.view(np.uint32)[~np.isnan(x)] & 0xFFFF).any()
    upper_bits = (h.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
    return torch.from_numpy(upper_bits), torch.from_numpy(low.astype(np.int64)).to(dtype)


def number_of(h, low):
    """The FP32 numbers of parts, by integer arithmetic."""
    upper = bits(h).numpy().astype(np.int64) & 0xFFFF
    part = low.numpy().astype(np.int64)
    magnitude = upper & 0x7FFF
    left = (magnitude == 0) | ((magnitude == 0x7F80) & (low.dtype == torch.int8))
    part[left & (part < 0)] = 0
    word = (upper << 16) + (part << (8 if low.dtype == torch.int8 else 0))
    return torch.from_numpy((word & 0xFFFFFFFF).astype(np.uint32).view(np.float32))


def boundary_words():
    """FP32 numbers: every upper half with every one of LOWER."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    return torch.from_numpy((upper | np.array(LOWER, dtype=np.uint32)).ravel().view(np.float32))


def split(x, dtype, backend="reference"):
    """New parts of FP32 numbers, by the op."""
    from fusedaccum import ops

    h, low = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(x.shape, dtype=dtype)
    ops.accumulate_([h], [x], 1.0, overwrite=True, low=[low], backend=backend)
    return h, low
