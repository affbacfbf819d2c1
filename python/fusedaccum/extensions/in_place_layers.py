"""Layers that add their weights' gradients into ``p.grad`` itself, say within a GEMM's kernel.

Where ``p.grad`` is None, such a layer returns its gradient; later it adds to what is there, and
then there are three ways to go on. It takes ``p.grad`` away and returns that tensor, which autograd
puts back (torchtitan); or it returns nothing (DeepSeek's TileKernels); or it returns ``p.grad`` and
leaves it where it is, and then autograd adds that to itself.
"""

from __future__ import annotations

from enum import Enum, auto

from torch import Tensor

from ..core import adding
from ..core.buffers import Slot
from ..core.extension import Extension
from ..engine import without_grad


class Way(Enum):
    """How a layer tells that it has added."""

    TAKEN_AWAY = auto()  # p.grad is None, and what has arrived is the tensor that it was
    NOTHING = auto()  # nothing has arrived, but p.grad was written to
    LEFT = auto()  # what has arrived is p.grad, or a part of its memory: another gradient, too


class InPlaceLayers(Extension):
    """Finds out that a layer has added to ``p.grad``, and counts it."""

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        way = None if slot.intercepted else way_of(slot, grad)
        if way is None:
            return False
        copy = None
        if grad is not None and way is Way.LEFT:
            copy = grad.clone()  # autograd adds it to itself
        if way is not Way.LEFT or not slot.block.untouched_by_user:
            # Not by other code, of which the pass would warn. Before the pass begins, and perhaps a
            # window, which forgets what was written.
            slot.block.written()
            with self.accumulation.collector.within_pass(slot.param.device):
                if slot.shown is not None or way is Way.TAKEN_AWAY:
                    self._count(slot)
        if copy is not None:
            self.accumulation.collector.put(slot, copy)
        return True

    @without_grad
    def _count(self, slot: Slot) -> None:
        """Count what the layer added, times 1. Waits if a loss scale or weight is on the device."""
        accumulation, ledger = self.accumulation, self.accumulation.ledger
        accumulation.ranks.check_unsent(slot)
        ledger.micro.in_place.append(slot)
        scale = float(adding.contribution(accumulation, ledger.micro.factor_left()))
        try:
            check_added(slot, scale, ledger.window.void)
        except RuntimeError:
            ledger.micro.adds += slot.shown is not None  # the sum is not the window's any more
            raise
        adding.count_added(accumulation, slot, announced=False)
        adding.tell_arrived(accumulation, [slot])


def way_of(slot: Slot, grad: Tensor | None) -> Way | None:
    """How the slot's layer has added its gradient, if what arrives (None: nothing) shows that."""
    if not slot.placed or slot.private or slot.part is not None:
        return None
    if grad is None:
        written = slot.shown is not None and slot.holder.grad is slot.shown and not slot.block.untouched_by_user
        return Way.NOTHING if written else None
    if not _share_storage(grad, slot.buffer):
        return None
    taken_away = slot.holder.grad is None and slot.shown is not None and _is_same(grad, slot.shown)
    return Way.TAKEN_AWAY if taken_away else Way.LEFT if slot.holder.grad is slot.shown else None


def check_added(slot: Slot, scale: float, void: bool) -> None:
    """Raises RuntimeError unless the window's sum now includes ``scale`` times what a layer added.

    ``void``: the window will not be applied.
    """
    how = f"the layer of parameter {slot.name} has added its gradient to {slot.name}.grad itself"
    if slot.shown is None:
        raise RuntimeError(
            f"{how}, which still held that of a window that had closed; call opt.zero_grad() after opt.step()"
        )
    if scale != 1.0 and not void:
        raise RuntimeError(
            f"{how}, unscaled, but the window needs {scale:g} times it: the micro-batch has a weight, or a GradScaler "
            "has changed its scale within the window; use weight 1 (or losses that are sums, and reduction='sum') and "
            "one scale per window, or have the layer return its gradient"
        )
    if isinstance(slot.divisor, Tensor) or slot.divisor != 1.0:
        raise RuntimeError(
            f"{how}, which holds a mean: after opt.normalize_(), or in a 16-bit buffer to which others have added; "
            "normalise a window after its last backward, and use buffer_dtype=torch.float32 or reduction='none'"
        )


def _share_storage(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _is_same(x: Tensor, y: Tensor) -> bool:
    """True if two tensors of one storage are the same elements, in the same order."""
    return (x.storage_offset(), x.shape, x.stride(), x.dtype) == (y.storage_offset(), y.shape, y.stride(), y.dtype)
