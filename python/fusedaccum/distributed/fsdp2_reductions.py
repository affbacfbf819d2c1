"""What the wrapper does when FSDP2 is about to take the gradients of a backward.

FSDP2 does so in ``post_backward`` of each group of parameters that it sends together: within a
backward, wherever that began (at the root's output, at that of a part, at a loss that a layer has
set aside), and whether it adds them up over the ranks now or holds them back.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..core.buffers import Slot
from ..engine import outside_graphs, within_backward
from ..warn import warn
from .shards import is_shard

# FSDP2's records of parameters that are sent together -> those whose wrappers have some of them.
_FOLLOWERS: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Reductions]] = weakref.WeakKeyDictionary()


class Reductions:
    """FSDP2's reductions of one wrapper's parameters.

    As long as it lives, sums for FP32 buffers arrive in FP32, and divisors are known.

    Args:
        groups: FSDP2's records of parameters sent together, and the wrapper's slots of each.
        begin: a method, held weakly. Called in a backward pass, before FSDP2 looks at ``p.grad``.
        as_given: True if its averages stay averages. Otherwise slots are told what makes them sums.
    """

    def __init__(self, groups: Mapping[Any, Sequence[Slot]], begin: Callable[[], None], as_given: bool):
        self._groups, self._begin, self._as_given = groups, weakref.WeakMethod(begin), as_given
        self._divided: dict[Any, tuple] = {}  # how each group's last gradients were divided
        self._warned = False
        slots = [slot for members in groups.values() for slot in members]
        self._wide = {
            id(s.param): s for s in slots if not s.half_precision and s.dtype.itemsize > s.param.dtype.itemsize
        }
        for group in groups:
            self._read_divisor(group)
            _FOLLOWERS.setdefault(group, weakref.WeakSet()).add(self)
            group.post_backward = functools.partial(_post_backward, weakref.ref(group))
            weakref.finalize(self, _left, weakref.ref(group)).atexit = False

    def _read_divisor(self, group: Any) -> None:
        """Read how FSDP2 divides, which may change at any time.

        Raises RuntimeError if what it has added up in part was divided in another way.
        """
        factor = group.gradient_divide_factor
        divided = factor, getattr(group, "force_sum_reduction_for_comms", False)
        if partly_reduced(group) and self._divided.get(group, divided) != divided:
            raise RuntimeError(
                "set_gradient_divide_factor() or set_force_sum_reduction_for_comms() was called while FSDP2 held "
                "gradients that set_requires_all_reduce(False) kept from the replicas "
                f"({self._groups[group][0].name}), and those were divided in another way; call it before a window's "
                "first backward (opt.reset() drops the open one)"
            )
        self._divided[group] = divided
        for slot in self._groups[group]:
            slot.averaged_by = 1.0 if self._as_given else float(factor or math.prod(group.mesh_info.mesh.shape))

    def before(self, group: Any) -> None:
        """FSDP2 will take this group's gradients next. May raise, which breaks off the backward."""
        begin = self._begin()
        if begin is None:
            return
        if within_backward():
            begin()
        elif group.reduce_grads and any(map(unreduced, group.fsdp_params)):
            raise RuntimeError(
                f"FSDP2 was told to reduce the gradient of {self._groups[group][0].name} while no backward runs, as "
                "pipeline schedules do (torch.distributed.pipelining), so it would belong to no micro-batch; make the "
                "stages DistributedDataParallel"
            )
        self._read_divisor(group)

    def warn_of_others(self, group: Any, others: Sequence[Any]) -> None:
        """Warn, once, that ``others`` keep gradients for FP32 buffers from arriving in FP32."""
        ours = [slot.name for slot in self._groups[group] if id(slot.param) in self._wide]
        if self._warned or not ours or group._reduce_dtype in (None, group._orig_dtype):
            return
        self._warned = True
        warn(
            f"FSDP2 rounds the gradient of parameter {ours[0]} to {group._orig_dtype} before its FP32 buffer gets it, "
            f"because it sends it together with that of {others[0]._param_fqn}, which has no such buffer. Wrap that "
            "parameter's optimizer with FP32 buffers, too, or call fully_shard on a module that has it alone. (Further "
            "cases are not reported.)"
        )

    def wants(self, param: Any) -> bool:
        """True if this record's gradient should arrive in FP32, and its parameter is narrower."""
        slot = self._wide.get(id(param.sharded_param))
        return slot is not None and slot.holder is not slot.param and self._begin() is not None

    def warn_of_narrow_sums(self, slots: Collection[Slot]) -> None:
        """Warn if FSDP2 adds up gradients of ``slots`` in fewer bits than their buffers have."""
        for group, members in self._groups.items():
            summed = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype or members[0].param.dtype
            rounded = [
                slot.name for slot in members if slot in slots and not slot.half_precision and summed.itemsize < 4
            ]
            if rounded:
                return warn(
                    f"FSDP2 adds up the gradient of parameter {rounded[0]} in {summed}, over the ranks and over "
                    "micro-batches that it holds back, before its FP32 buffer gets it, so that small parts are rounded "
                    "away. Have it added in FP32: fully_shard(model, mp_policy=MixedPrecisionPolicy(..., "
                    "reduce_dtype=torch.float32)). (Further cases are not reported.)"
                )


@outside_graphs
def _post_backward(place: weakref.ref[Any], *unused: Any) -> None:
    """Stands in for a group's ``post_backward``."""
    group: Any = place()
    followers = list(_FOLLOWERS[group])
    for follower in followers:
        follower.before(group)
    trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    others = [param for param in trained if not any(follower.wants(param) for follower in followers)]
    for follower in followers if others else ():
        follower.warn_of_others(group, others)
    # To this dtype FSDP2 casts what it has added up; None leaves it as it is. (PyTorch 2.15 leaves
    # it where p.grad may be of any dtype.)
    kept = getattr(group, "_orig_dtype", None)
    if not others:
        group._orig_dtype = None
        if any(map(_holds_a_part, trained)):
            for param in group.fsdp_params:
                _widen(param)
    try:
        type(group).post_backward(group, *unused)
    finally:
        group._orig_dtype = kept


def _holds_a_part(param: Any) -> bool:
    """True if the gradient is a part of a sum over tensor parallelism's ranks.

    FSDP2 adds that sum up before it casts anything.
    """
    grad: Any = getattr(getattr(param, "_unsharded_param", None), "grad", None)
    return is_shard(grad) and any(placement.is_partial() for placement in grad.placements)


def _widen(param: Any) -> None:
    """Cast a fresh gradient to the dtype in which FSDP2 adds up, as it does with held-back ones."""
    if getattr(param, "_unsharded_param", None) is not None:
        for name in ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed"):
            getattr(param, name, lambda: None)()  # PyTorch 2.15 accumulates in that dtype


def unreduced(param: Any) -> bool:
    """True if a record holds a gradient that ``set_requires_gradient_sync(False)`` keeps back."""
    unsharded = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def partly_reduced(group: Any) -> bool:
    """True if a record holds what ``set_requires_all_reduce(False)`` keeps from the replicas."""
    return getattr(group, "_partial_reduce_output", None) is not None


def _left(place: weakref.ref[Any]) -> None:
    """One who followed the reductions of a group is gone: after the last, FSDP2 is as it was."""
    group: Any = place()
    if group is not None and not list(_FOLLOWERS.get(group, ())):
        _FOLLOWERS.pop(group, None)
        vars(group).pop("post_backward", None)
