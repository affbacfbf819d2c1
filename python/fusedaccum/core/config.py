"""The wrapper's arguments, checked before anything is touched."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SparseAdam

from ..ops import backends
from ..scalars import is_number
from ..times_mean import TimesMean
from .closures import check_steps_alone
from .window import Schedule

REDUCTIONS = ("mean", "sum", "none")
ROUNDINGS = ("nearest", "stochastic", "compensated")
NONFINITE = ("propagate", "skip_window", "skip_micro_batch", "raise")
BUFFER_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Settings:
    """The arguments of an :class:`~fusedaccum.AccumulatingOptimizer`, which documents them."""

    schedule: Schedule
    reduction: str
    buffer_dtype: torch.dtype | None
    rounding: str
    master_weights: bool | str
    max_grad_norm: float | None
    nonfinite: str
    backend: str
    buffer_device: torch.device | None
    optimizer_device: torch.device | None
    process_group: dist.ProcessGroup | None
    comm_dtype: torch.dtype | None
    shard: bool
    noise_scale: float | None
    skip_norm: float | TimesMean | None

    @classmethod
    def checked(
        cls, *, accum_steps: Any, window_weight: Any, buffer_device: Any, optimizer_device: Any, **others: Any
    ) -> Settings:
        """Build from the user's arguments; raises TypeError or ValueError for invalid ones."""
        return cls(
            schedule=Schedule.checked(accum_steps, window_weight),
            buffer_device=checked_device("buffer_device", buffer_device),
            optimizer_device=checked_device("optimizer_device", optimizer_device),
            **others,
        )

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, REDUCTIONS)
        one_of("buffer_dtype", self.buffer_dtype, BUFFER_DTYPES)
        one_of("rounding", self.rounding, ROUNDINGS)
        one_of("nonfinite", self.nonfinite, NONFINITE)
        one_of("master_weights", self.master_weights, (True, False, "split"))
        if self.max_grad_norm is not None:
            check_norm("max_grad_norm", self.max_grad_norm, "None does not clip, math.inf only measures")
        if self.noise_scale is None and self.schedule.adaptive is not None:
            raise ValueError(
                "accum_steps follows the noise scale, but nothing measures it; add noise_scale=0.95, the decay of its "
                "averages per window"
            )
        backends.check(self.backend)

    @functools.cached_property
    def drop_in(self) -> bool:
        """True for a loop of plain PyTorch's: no window divides, and each ends with ``step()``."""
        return self.reduction == "none" and self.schedule.caller_owned


def one_of(name: str, value: Any, allowed: tuple) -> None:
    """Raises ValueError unless ``value`` is one of ``allowed``."""
    if not any(value is a or (isinstance(value, type(a)) and value == a) for a in allowed):  # 1 is not True
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_norm(name: str, norm: Any, hint: str) -> None:
    """Raises TypeError or ValueError for what is no limit of a norm."""
    if not is_number(norm):
        raise TypeError(f"{name} must be a number or None, got {norm!r}")
    if math.isnan(norm) or norm <= 0:
        raise ValueError(f"{name} must be greater than 0, got {norm}; {hint}")


def checked_device(name: str, device: Any) -> torch.device | None:
    """The argument of this name as a device; raises ValueError for all but None and the CPU."""
    if device is not None and str(device) not in ("cpu", "cpu:0"):
        raise ValueError(f"{name} must be 'cpu', or None for the parameters' device, got {device!r}")
    return None if device is None else torch.device("cpu")


def check_optimizer(optimizer: Any, settings: Settings, wrapper: type) -> None:
    """Raises TypeError or ValueError for an optimizer that cannot be wrapped like this."""
    if isinstance(optimizer, wrapper):
        raise TypeError(
            "optimizer is wrapped already; wrap the torch optimizer inside it (optimizer.optimizer) instead"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("optimizer has no parameters (any more): build it anew, from model.parameters()")
    if isinstance(optimizer, SparseAdam):
        raise TypeError(
            "optimizer is SparseAdam, which needs sparse gradients, and accumulation buffers are dense; "
            "use torch.optim.Adam and make the embedding with sparse=False"
        )
    accelerates = getattr(optimizer, "gradient_state", None)
    if accelerates is not None and accelerates.num_steps != 1:
        raise ValueError(
            f"optimizer is Accelerate's, which steps once for every {accelerates.num_steps} calls, so that most "
            "windows would be lost; wrap the optimizer before accelerator.prepare()"
        )
    if not settings.schedule.caller_owned:
        check_steps_alone(optimizer)


def check_parameter(name: str, parameter: Tensor, left: bool) -> None:
    """Raises ValueError for a parameter whose gradients cannot be accumulated like this.

    ``left``: True if another wrapper, which is left behind, has put there what is in ``p.grad``.
    """
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {name} has no shape yet, because its lazy module has seen no input; run one forward of the "
            "model before wrapping"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(parameter):
        raise ValueError(
            f"parameter {name} belongs to a function that torch.func transforms, where no backward() runs; wrap an "
            "optimizer of the model outside of it, and bring the gradients with torch.autograd.backward(parameters, "
            "gradients)"
        )
    if parameter.is_inference():
        raise ValueError(
            f"parameter {name} was made in torch.inference_mode(), where it can get no gradient; make the model "
            "outside of it"
        )
    if not parameter.is_leaf:
        computed = parameter.grad_fn.name()  # type: ignore[union-attr]
        raise ValueError(
            f"parameter {name} is not a leaf of the graph: it was computed from another tensor ({computed}; a view of "
            "one counts as computed), and gradients accumulate in leaves only. Give the optimizer that tensor, or a "
            "leaf of its own, torch.nn.Parameter(parameter.detach()); an optimizer that is differentiated through "
            "steps without a wrapper"
        )
    if parameter.is_complex():
        raise ValueError(
            f"parameter {name} is {parameter.dtype}; only real floating-point parameters can be accumulated "
            "(store a complex one as two real ones, torch.view_as_real)"
        )
    if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
        raise ValueError(
            f"parameter {name} is {parameter.dtype}; FP64, FP32, bf16 and fp16 parameters can be accumulated. Leave "
            "quantized parameters that are not trained out of the optimizer: [p for p in model.parameters() if "
            "p.requires_grad]"
        )
    if parameter.layout is not torch.strided or parameter.is_nested:
        form = "a nested tensor" if parameter.is_nested else parameter.layout
        raise ValueError(f"parameter {name} is {form}; only dense parameters can be accumulated")
    if parameter.grad is not None and not left:
        raise ValueError(
            f"parameter {name} has a gradient already, which would be in no window; call optimizer.zero_grad() before "
            "you wrap it"
        )
