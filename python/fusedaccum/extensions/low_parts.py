"""``rounding="compensated"``: sums of 24 bits, a bf16 buffer and one more byte for the rest.

``p.grad`` is the buffer, so every optimizer takes it as it is, without a cast or a copy. At the
window's end one pass makes it the gradient, rounded to nearest even; the low parts do not count
from then on. Formulas: ``low`` in :mod:`fusedaccum.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import ops
from ..core.buffers import Block, BufferOps, Slot
from ..core.extension import Extension
from ..inner import asked_dtype, asked_dtypes
from ..scalars import Scalar

if TYPE_CHECKING:
    from ..core.config import Settings


class LowParts(BufferOps, Extension):
    """The ops of buffers that have a low part beside them."""

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        if asked_dtypes(inner, settings.buffer_dtype).isdisjoint((None, torch.bfloat16)):
            raise ValueError(
                "rounding='compensated' is for bf16 buffers, with the range of FP32, but buffer_dtype is "
                f"{settings.buffer_dtype}; use buffer_dtype=torch.bfloat16, or rounding='nearest'"
            )
        if settings.buffer_device is not None:
            raise ValueError(
                "rounding='compensated' does not work with buffer_device='cpu', where memory is not short; leave it "
                "out, with buffer_dtype=torch.float32"
            )

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        asked = asked_dtype(self.inner, parameter, self.accumulation.settings.buffer_dtype)
        if parameter.dtype == torch.float16 and asked in (None, torch.float16):
            raise ValueError(
                f"rounding='compensated' keeps sums, which FP16 has not the range for, but parameter {name} is "
                f"{parameter.dtype}; use buffer_dtype=torch.float32, or rounding='stochastic'"
            )

    def __init__(self) -> None:
        self._low: dict[Tensor, Tensor] = {}  # of the buffers that have one
        self._void: set[Tensor] = set()  # buffers whose low part does not count, and is zeroed before it is read

    # -- buffers -----------------------------------------------------------------------------------

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        for slot in new:
            if slot.dtype == torch.bfloat16:
                # It holds a sum, not a running mean.
                slot.ops, slot.rounded, slot.half_precision = self, True, False
        here = {slot.buffer for slot in self.accumulation.sums.buffers.slots if slot.placed}
        for gone in self._low.keys() - here:
            del self._low[gone]
        self._void &= here

    def block_made(self, block: Block, slots: Sequence[Slot]) -> None:
        if slots[0].ops is self:
            flat = torch.empty_like(block.flat, dtype=torch.int8)
            for slot in slots:
                self._low[slot.buffer] = flat.as_strided(slot.buffer.shape, slot.buffer.stride(), slot.offset)

    def written_by_others(self, slots: Sequence[Slot]) -> None:
        self._void.update(slot.buffer for slot in slots)

    def finishes(self, slots: Sequence[Slot], scale: Scalar, backend: str) -> bool:
        if any(slot.stepped is not slot.param for slot in slots):
            return False  # FP32 is stepped, by an extension that reads the sums
        buffers = [slot.buffer for slot in slots]
        low = self._of(buffers)
        self._void.update(buffers)
        ops.cast_(buffers, buffers, scale, low=low, backend=backend)
        return True

    def _of(self, buffers: Sequence[Tensor], overwrite: bool = False) -> list[Tensor]:
        """The low parts, for an op that reads them, or overwrites them with the buffers."""
        low = [self._low[buffer] for buffer in buffers]
        void = self._void.intersection(buffers) if self._void else set()
        if void and not overwrite:
            torch._foreach_zero_([self._low[buffer] for buffer in void])
        self._void -= void
        return low

    # -- their ops ---------------------------------------------------------------------------------

    def accumulate_(
        self,
        buffers: Sequence[Tensor],
        grads: Sequence[Tensor],
        scale: Scalar,
        *,
        overwrite: bool,
        rounding: None,
        **how: Any,
    ) -> None:
        ops.accumulate_(buffers, grads, scale, overwrite=overwrite, low=self._of(buffers, overwrite), **how)

    def scale_(self, buffers: Sequence[Tensor], scale: Scalar, *, backend: str) -> None:
        ops.scale_(buffers, scale, low=self._of(buffers), backend=backend)

    def stats(self, buffers: Sequence[Tensor], *, backend: str) -> ops.Stats:
        return ops.stats(buffers, low=self._of(buffers), backend=backend)

    # -- ranks and checkpoints, which take FP32 ----------------------------------------------------

    def read_sums(self, slots: Sequence[Slot], outs: Sequence[Tensor], backend: str) -> None:
        buffers = [slot.buffer for slot in slots]
        ops.cast_(outs, buffers, low=self._of(buffers), backend=backend)

    def write_sums(self, slots: Sequence[Slot], sums: Sequence[Tensor], backend: str) -> None:
        buffers = [slot.buffer for slot in slots]
        here = [x.to(buffer.device) for x, buffer in zip(sums, buffers, strict=True)]  # a checkpoint's may be elsewhere
        self.accumulate_(buffers, here, 1.0, overwrite=True, rounding=None, backend=backend)
