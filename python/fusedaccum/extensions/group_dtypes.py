"""``{"params": ..., "buffer_dtype": torch.bfloat16}``: a buffer dtype for a group's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ..core.buffers import Slot, buffer_dtype, gradient_dtype
from ..core.config import BUFFER_DTYPES, one_of
from ..core.extension import Extension
from ..inner import BUFFER_DTYPE

if TYPE_CHECKING:
    from ..core.config import Settings


class GroupDtypes(Extension):
    """Gives buffers the dtype that their parameter's group asks for, in place of the wrapper's."""

    def __init__(self) -> None:
        self._asked: dict[Parameter, torch.dtype | None] = {}

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        for g, group in enumerate(inner.param_groups):
            one_of(f"param_groups[{g}][{BUFFER_DTYPE!r}]", group.get(BUFFER_DTYPE), BUFFER_DTYPES)

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        settings, asked = self.accumulation.settings, self._of(parameter)
        one_of(f"{BUFFER_DTYPE!r} in the group of parameter {name}", asked, BUFFER_DTYPES)
        away = settings.optimizer_device is not None
        takes_narrow = (away or settings.master_weights == "split") and settings.rounding == "compensated"
        if (
            (away or settings.master_weights)
            and not takes_narrow
            and buffer_dtype(gradient_dtype(parameter), asked).itemsize < 4
        ):
            argument = "optimizer_device='cpu'" if away else f"master_weights={settings.master_weights!r}"
            raise ValueError(
                f"{argument} steps FP32 parameters and needs FP32 gradients, but in the group of parameter "
                f"{name} buffer_dtype is {asked}; use torch.float32 there"
            )

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        for slot in new:
            if not slot.placed:
                slot.set_dtype(buffer_dtype(gradient_dtype(slot.param), self._of(slot.param)))
        self._asked = {}  # which would keep parameters that are gone

    def _of(self, parameter: Parameter) -> torch.dtype | None:
        """The dtype that is asked for."""
        if parameter not in self._asked:
            of_all = self.accumulation.settings.buffer_dtype
            groups = self.inner.param_groups
            self._asked = {p: group.get(BUFFER_DTYPE, of_all) for group in groups for p in group["params"]}
        return self._asked[parameter]

    def window_settings(self) -> dict[str, Any]:
        groups = enumerate(self.inner.param_groups)
        return {
            f"param_groups[{g}][{BUFFER_DTYPE!r}]": str(group[BUFFER_DTYPE])
            for g, group in groups
            if BUFFER_DTYPE in group
        }
