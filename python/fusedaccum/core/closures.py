"""Closures for the inner optimizer: the micro-batches have run, so they only return the loss."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def required_by_step(optimizer: Optimizer) -> list[str]:
    """The arguments without which the optimizer's ``step()`` does nothing but raise."""
    # Of the class: an LR scheduler patches the instance's.
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def takes_closure(optimizer: Optimizer) -> bool:
    """True if the optimizer's ``step()`` can be given one."""
    return "closure" in inspect.signature(optimizer.step).parameters


def evaluates_itself(optimizer: Optimizer) -> bool:
    """True for SAM, by whoever wrote it: its ``step()`` needs a gradient of other weights."""
    return hasattr(optimizer, "first_step")


def check_steps_alone(optimizer: Optimizer) -> None:
    """Raises TypeError for an optimizer that cannot step with a gradient computed before."""
    needed = ["closure"] if evaluates_itself(optimizer) else required_by_step(optimizer)
    if evaluates_itself(optimizer) or needed not in ([], ["closure"]):
        raise refused(optimizer, needed)


def refused(optimizer: Optimizer, needed: list[str], when: str = "") -> TypeError:
    return TypeError(
        f"{when}optimizer is {type(optimizer).__name__}, whose step() cannot do without its {' and '.join(needed)}, "
        "but a window is stepped with what is in p.grad; leave out accum_steps and window_weight, and after "
        "opt.normalize_() call the optimizer's own methods (SAM's first_step() and second_step()); or wrap another "
        "optimizer"
    )


class Evaluated:
    """Stands for the user's closure in the inner optimizer's ``step()``. Returns the loss of what
    has been evaluated, as often as it is called, as long as the weights are those of which it is
    the loss.

    Args:
        result: what the user's closure has returned.
    """

    def __init__(self, result: Any):
        self.result = result

    def of_all(self, loss: Tensor) -> Evaluated:
        """The same, of the window's loss; the closure has returned the last micro-batch's."""
        like = self.result
        return Evaluated(loss.to(like.device, like.dtype) if isinstance(like, Tensor) else float(loss))

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer steps from the weights and gradients that it has now."""
        self._optimizer, self._before = optimizer, _state(optimizer)

    def __call__(self) -> Any:
        if _state(self._optimizer) != self._before:
            when = "step() has changed the weights, or dropped the gradients, before it called its closure: "
            raise refused(self._optimizer, ["closure"], when)
        return self.result


def _state(optimizer: Optimizer) -> tuple[list[int], bool]:
    """What changes if weights are written, or all gradients dropped."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p._version for p in parameters], all(p.grad is None for p in parameters)
