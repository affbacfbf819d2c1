"""Several wrappers of the same parameters, one after another: the last has their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn import Parameter
from torch.optim import Optimizer

from ..core.buffers import Slot, buffer_dtype, gradient_dtype
from ..core.extension import Extension
from ..core.parameters import accumulation_of, let_go
from ..warn import callers_line, warn

if TYPE_CHECKING:
    from ..core.accumulation import Accumulation


class Refuses(Extension):
    """Refuses all calls of a wrapper."""

    def __init__(self, why: str):
        self._why = why

    def check_call(self) -> None:
        raise RuntimeError(self._why)


class ChangingOwners(Extension):
    """Takes parameters from the wrapper that had them, which refuses calls from then on.

    Wrappers are named by where they were built.
    """

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        super().attach(accumulation, inner)
        self._name = f"around {type(inner).__name__}, built at {callers_line()}"

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        other = accumulation_of(parameter)
        if other is not None:
            other.passes.end_open_pass()
            if other.passes.inside:
                raise RuntimeError(
                    f"parameter {name} belongs to an AccumulatingOptimizer "
                    f"{other.extensions.of(ChangingOwners)._name}, which is inside micro_batch(); build another after "
                    "the block"
                )

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        owners = {owner for slot in new if (owner := accumulation_of(slot.param)) is not None}
        for other in {owner.extensions.of(ChangingOwners) for owner in owners} - {self}:
            other._leave(self._name)
            for slot in new:  # whose grad_dtype the other has given back
                slot.set_dtype(buffer_dtype(gradient_dtype(slot.param), self.accumulation.settings.buffer_dtype))

    def _leave(self, successor: str) -> None:
        """Another wrapper has been built for some of the parameters."""
        if self.accumulation.ledger.is_open:
            warn(
                f"the open window of an AccumulatingOptimizer {self._name}, is dropped, because another one, "
                f"{successor}, has taken its parameters. To apply such a window, call flush() before building another; "
                "to drop it, reset()"
            )
        lost = (
            f"this AccumulatingOptimizer, {self._name}, has lost its parameters to another one, {successor}, because "
            "the last that is built for a parameter has its gradients: call that one. Of two optimizers for one "
            "parameter, wrap only one, and that without accum_steps and window_weight"
        )
        self.accumulation.extensions.add([Refuses(lost)])
        let_go(self.accumulation)
