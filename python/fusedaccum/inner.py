"""What is asked of an inner optimizer.

Which others it has inside, what its groups ask for, whether it can be stepped in parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def with_those_inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and those inside it."""
    found = [optimizer]
    for one in found:
        found += [other for _, other in inside(one) if other not in found]
    return found


def inside(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers in this one's attributes, or in lists, tuples or dicts; with the names."""
    for name, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for other in several:
            if isinstance(other, Optimizer):
                yield name, other


def states_of(optimizer: Optimizer) -> list[dict]:
    """The optimizer's state, and those of the optimizers inside it."""
    return list({id(one.state): one.state for one in with_those_inside(optimizer)}.values())


# The key for the dtype in which a group's gradients accumulate, instead of the wrapper's argument.
BUFFER_DTYPE = "buffer_dtype"


def asked_dtypes(inner: Optimizer, of_all: torch.dtype | None) -> set[torch.dtype | None]:
    """The buffer dtypes asked for: by the wrapper's argument, ``of_all``, and by groups."""
    return {of_all, *(group[BUFFER_DTYPE] for group in inner.param_groups if BUFFER_DTYPE in group)}


def asked_dtype(inner: Optimizer, parameter: Tensor, of_all: torch.dtype | None) -> torch.dtype | None:
    """The buffer dtype that is asked for this parameter."""
    return dtypes_of_groups(inner).get(parameter, of_all)


def dtypes_of_groups(inner: Optimizer) -> dict[Tensor, torch.dtype | None]:
    """The buffer dtypes of the parameters whose group asks for one."""
    return {p: group[BUFFER_DTYPE] for group in inner.param_groups if BUFFER_DTYPE in group for p in group["params"]}


# The attribute of an optimizer under which a wrapper keeps what it has put around its methods.
GUARD = "_fusedaccum_guard"


def is_patched(inner: Optimizer) -> bool:
    """True if other code has patched this optimizer's ``step()``.

    A scheduler's patch does not count: it only notes that it was called at all.
    """
    patch, found = vars(inner).get("step"), vars(inner).get(GUARD)
    while patch is not None:
        if found is not None and patch in found.patches:
            patch = found.step
        elif hasattr(patch, "_wrapped_by_lr_sched"):
            patch = patch.__wrapped__
        else:
            return patch is not type(inner).step
    return False


def is_pytorchs(inner: Optimizer) -> bool:
    """True if this is one of PyTorch's own optimizers, which keep copies of gradients at most."""
    return type(inner).__module__.startswith("torch.optim.")


# PyTorch's attribute of optimizers whose step() divides by their grad_scale.
SAYS_SO = "_step_supports_amp_scaling"


def scales_gradients(inner: Optimizer) -> bool:
    """True if a fused inner optimizer scales gradients itself, and nothing sees them before.

    Step pre-hooks, and a step() around PyTorch's, would.
    """
    kind = type(inner)
    # Its own attribute: an optimizer that shows another one's would not hand grad_scale on to that.
    return (
        vars(inner).get(SAYS_SO, getattr(kind, SAYS_SO, False))
        and all(group.get("fused") for group in inner.param_groups)
        and (str(kind.step.__module__).startswith("torch.optim.") or SAYS_SO in vars(kind))
        and not is_patched(inner)
        and not (inner._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
    )


# The attribute by which an optimizer that is not PyTorch's says that it may be stepped in parts.
STEPS_EACH_ALONE = "steps_each_alone"


def steps_each_alone(inner: Optimizer) -> bool:
    """True if stepping some parameters, then the others, is equivalent.

    So it is for PyTorch's own optimizers, and those that say so, if no hook counts the steps.
    """
    if not getattr(inner, STEPS_EACH_ALONE, is_pytorchs(inner)) or is_patched(inner):
        return False
    hooks = (inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks)
    return not any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
