"""Master weights at hand and stepped part by part, if the inner optimizer steps each alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import limits
from ..core.apply import Conclusion
from ..core.buffers import Slot
from ..inner import steps_each_alone
from .master_weights import MasterWeights


class MastersInParts(MasterWeights):
    """One call of the inner optimizer for each part.

    One with all, if that is another optimizer than PyTorch's, or has step hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        # While they hold a part: the groups' lists, and what these hold otherwise.
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._stepped: frozenset[int] = frozenset()  # indices of the slots that the window being applied has stepped

    @abstractmethod
    def _at_hand(self, slots: Sequence[Slot]) -> AbstractContextManager[None]:
        """Within the block, which is one of :meth:`stepping`, ``slots`` can be stepped.

        If it raises, :meth:`_leave` follows.
        """

    def _parts_come(self, parts: Sequence[Sequence[Slot]]) -> None:
        """Each of these parts will be at hand, one after another."""

    def step_inner(self, end: Conclusion, step: Callable[[], None]) -> bool:
        if not self.of:
            return False
        if not steps_each_alone(self.inner) or not end.slots:
            every = self.accumulation.sums.buffers.slots
            done = frozenset([slot.index for slot in every])
            self._parts_come([every])
            with self._at_hand(every):
                if self._stepped != done:
                    step()
                    self._stepped = done  # no call comes between, where Ctrl-C could
            return True
        parts = list(self._parts([slot for slot in end.slots if slot.index not in self._stepped]))
        self._parts_come(parts)
        holding: dict[int, list[list[Any]]] = {}  # by id(), which is faster than a tensor's hash
        for group in self.inner.param_groups:
            for p in group["params"]:
                holding.setdefault(id(p), []).append(group["params"])
        self._lists = [(group["params"], list(group["params"])) for group in self.inner.param_groups]
        for part in parts:
            for members, _ in self._lists:
                members.clear()
            for slot in part:
                for members in holding[id(slot.stepped)]:
                    members.append(slot.stepped)
            with self._at_hand(part):
                done = self._stepped.union([slot.index for slot in part])
                step()
                self._stepped = done  # no call comes between, where Ctrl-C could
        self._fill_lists()
        return True

    def _parts(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        by_device: dict[torch.device, list[Slot]] = {}
        for slot in slots:
            by_device.setdefault(slot.stepped.device, []).append(slot)
        for device, members in by_device.items():
            yield from limits.in_parts(members, _bytes_stepped, limits.stepped(device))

    def _fill_lists(self) -> None:
        for members, every in self._lists:
            members[:] = every
        self._lists = []

    def window_reported(self, end: Conclusion) -> None:
        self._stepped = frozenset()

    def sums_dropped(self) -> None:
        self._stepped = frozenset()

    def _leave(self, slots: Sequence[Slot]) -> None:
        self._fill_lists()
        super()._leave(slots)


def _bytes_stepped(slot: Slot) -> int:
    return 4 * slot.param.numel()
