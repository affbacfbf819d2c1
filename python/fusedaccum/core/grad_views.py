"""How ``p.grad`` shows a buffer where it cannot simply be the buffer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor


class GradView(Protocol):
    """What shows a slot's buffer, in its ``grad``: the parameter, or what stands for it."""

    grad: Tensor | None


class Part(GradView, Protocol):
    """Stands for a parameter of which this process holds a part. An extension makes it; whatever has spread the parameter over processes
    also adds up their gradients.

    Attributes:
        grad: the part of ``p.grad`` that this process holds.
        whole: ``p.grad``, as we have last set it.
        layout: a key shared by the parameters whose norms can be added up together over the processes.
    """

    whole: Tensor | None

    @property
    def layout(self) -> Hashable: ...

    def local_gradient(self, grad: Tensor) -> Tensor:
        """The part of a gradient that belongs to this process's part of the parameter."""

    def wrap(self, local: Tensor) -> Tensor:
        """The tensor, laid out as the parameter, of which this process's part is ``local``, whose memory it shares."""

    def sum_over_parts(self, value: Tensor) -> Tensor:
        """``value`` of the part, summed over the processes that hold others."""
