"""How a feature takes part in a wrapper's windows without the core's knowing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from .buffers.buffers import Slot
    from .closing.conclusion import Conclusion
    from .distributed.group import Group
    from .gathering.accumulation import Accumulation
    from .gathering.rejected import Rejected
    from .scalars import Scalar
    from .window.window import MicroBatch

Kind = TypeVar("Kind", bound="Extension")


class LossFrom(Enum):
    """Who says what a micro-batch's loss is."""

    PASS = auto()  # opt.backward(), of one backward pass, with a loss scale if there is one
    BACKWARD = auto()  # a recipe, of all the passes of the micro-batch, with a loss scale if there is one
    CALLER = auto()  # the caller, without a loss scale


class ScaleNews(Enum):
    """What has become known of the loss scale that the open window's losses and sums carry."""

    KNOWN = auto()  # what may have carried an unknown scale carries this one
    UNKNOWN = auto()  # it will not become known
    ANOTHER = auto()  # since the last step() it was another one than assumed
    NONE = auto()  # the open micro-batch carries none


class RaisedByAllError(RuntimeError):
    """Raised by all ranks at the same place between their collectives, so they can go on."""


class Extension:
    """One feature of one wrapper. The core calls these methods; a feature overrides those that it needs. features.py has their order.

    Attributes:
        key: of the feature's entry in a checkpoint; None for one that has nothing to continue from.
        asleep: is it not told of anything, until :meth:`Extensions.wake`? (Ranks and checkpoints have its numbers nevertheless.)
        attributes: of the wrapper, by name, that are attributes of this instead.
        holds: must a micro-batch be judged whole, before any of it is added?
        counts: must it be known in which micro-batches a value was not finite?
        wants_norm: must the norm of every window's gradient be known?
        wants_first_alone: must a window's first micro-batch be counted before its sums are added to other ranks'?
        accumulation: the wrapper's, of which this is a part. inner: the optimizer that is wrapped.
    """

    key: str | None = None
    asleep = False
    attributes: tuple[str, ...] = ()
    holds = False
    counts = False
    wants_norm = False
    wants_first_alone = False
    accumulation: Accumulation
    inner: Optimizer

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        """Become a part of a wrapper, before it has any parameters."""
        # A proxy, because the accumulation holds its extensions: dropping the wrapper must free the model at once.
        self.accumulation, self.inner = weakref.proxy(accumulation), inner

    def needs_all_ranks(self) -> str | None:
        """The argument for which every window must be that of all ranks, as the caller has written it; None if none does."""
        return None

    # -- events ------------------------------------------------------------------------------------------------

    def window_opened(self) -> None:
        """A window is open, and empty."""

    def micro_batch_opened(self) -> None:
        """A micro-batch is open."""

    def admit(self) -> None:
        """A backward pass begins, in a window that is open. May raise, which refuses it."""

    def micro_batch_ends(self, micro: MicroBatch) -> None:
        """The micro-batch is about to be counted. If this raises, it is not, and still open."""

    def micro_batch_counted(self, micro: MicroBatch) -> None:
        """The micro-batch is over, and part of the open window."""

    def holds_one(self, micro: MicroBatch) -> None:
        """The buffers hold the gradients of this micro-batch, which was counted, of this rank, and nothing else."""

    def micro_batch_rejected(self) -> None:
        """A micro-batch was left out when it was complete. It was dropped before this."""

    def micro_batch_dropped(self) -> None:
        """What has happened since the last micro-batch was counted belongs to none."""

    def window_dropped(self) -> None:
        """The micro-batches that the open window has counted no longer count."""

    def step_begins(self) -> None:
        """``step()`` was called; the micro-batch that it ends is still open."""

    def ended(self, rejected: Rejected) -> None:
        """``step()`` has ended the micro-batch; ``rejected`` are those that were left out since the last one."""

    def window_goes_on(self) -> None:
        """``step()`` has ended a micro-batch, and the window is not complete."""

    def step_ended(self) -> None:
        """``step()`` returns, or raises."""

    def forgotten(self) -> None:
        """``reset()`` was called, or another state is loaded: what other code has shown so far does not count."""

    def weighed_late(self) -> None:
        """The micro-batches that had no weight are given one, together, at the window's end."""

    def closing(self, end: Conclusion) -> None:
        """The window is complete, and ``end`` says what it comes to. May change that."""

    def normed(self, end: Conclusion, sq_norm: Tensor) -> None:
        """The norm of the window that is closing is known; ``sq_norm`` is that of its sums, squared."""

    def window_closed(self) -> None:
        """The next gradient begins a new window. With several ranks, all are notified at the same place between their collectives."""

    def closed(self, end: Conclusion) -> None:
        """The window has been applied, or skipped. May be called again for the same window, if something raised meanwhile."""

    def loss_given(self, loss: Scalar, source: LossFrom) -> None:
        """The loss of the open micro-batch, or of the one counted last."""

    def scale_news(self, news: ScaleNews, scale: Scalar | None) -> None:
        """Something has become known of the loss scale; ``scale`` is what it is, if it is known now."""

    def parameters_moved(self, places: dict[int, int]) -> None:
        """Parameters have new places in the optimizer, by their old ones; those that are not in ``places`` are gone."""

    # -- policies ----------------------------------------------------------------------------------------------

    def scale(self, scale: Scalar) -> Scalar:
        """What to multiply the open micro-batch's gradients by, in place of ``scale``."""
        return scale

    def carries(self) -> Scalar:
        """The factor that the window's sums carry, beside weights."""
        return 1.0

    def loss_scale(self) -> Tensor | None:
        """The factor that losses carry which ``opt.backward()`` is given, and that are reported without it."""

    def normalizing(self) -> Scalar:
        """The factor that ``normalize_()`` leaves in the window's gradient, over the one that its sums carry."""
        return 1.0

    def judge(self, held: list[Tensor], added: list[Slot]) -> bool:
        """False if the micro-batch must be left out, whose gradients are ``held``; layers have added those of the slots ``added``."""
        return True

    def rejects(self, slots: list[Slot], grads: list[Tensor]) -> dict[Slot, Tensor]:
        """Those of a rejected micro-batch's gradients for which it was rejected, as far as this rank has them."""
        return {}

    def finished(self, cast: list[Slot]) -> bool:
        """False if the window must not be applied, now that ``p.grad`` is its gradient, cast to FP16 in the slots ``cast``."""
        return True

    def measures(self) -> bool:
        """True if the adds of the open micro-batch must take norms, and count what is not finite."""
        return False

    def lacks_loss(self) -> bool:
        """True if the loss of the micro-batch that is open, or was counted last, is wanted and has not come."""
        return False

    # -- micro-batches that can only be dropped together -------------------------------------------------------

    def snapshot(self) -> Any:
        """A copy of what it keeps of the micro-batches that the open window has counted."""

    def roll_back(self, snapshot: Any) -> None:
        """Those that the window has counted since ``snapshot`` was taken no longer count."""

    # -- ranks that share windows ------------------------------------------------------------------------------

    def reduce(self) -> dict[str, float]:
        """Numbers of this rank's window, by names that are the same on all ranks: they are added up at the window's end."""
        return {}

    def reduced(self, totals: dict[str, float], group: Group) -> None:
        """The numbers of all ranks, added up. What they show to be needed may be added up here, on all ranks."""

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save(self) -> Any:
        """Copies of what it needs to continue, as tensors and plain values."""

    def check(self, saved: Any) -> None:
        """Raises ValueError if :meth:`load` could not continue with this."""

    def load(self, saved: Any) -> None:
        """Continue from what :meth:`save` has returned."""

    def check_together(self, parts: Sequence[Any]) -> None:
        """Raises ValueError, on all ranks, if what those of them that hold a part of the open window have saved is not of one window."""

    def join(self, parts: Sequence[Any], mine: Sequence[int], ranks: int) -> Any:
        """What to :meth:`load` on one of ``ranks`` ranks, where another number has saved ``parts`` between two micro-batches, and the
        windows of those at ``mine`` continue here.
        """


class Extensions:
    """A wrapper's extensions, and for every event the methods that some of them override: a feature that is off costs no call."""

    def __init__(self, extensions: Iterable[Extension]):
        self.all = tuple(extensions)
        self.saved = {e.key: e for e in self.all if e.key is not None}
        self.attributes = {name: e for e in self.all for name in e.attributes}
        self._listen()

    def wake(self, extension: Extension) -> None:
        """From now on the extension is told what happens."""
        if extension.asleep:
            extension.asleep = False
            self._listen()

    def _listen(self) -> None:
        self.window_opened = self._listening("window_opened")
        self.micro_batch_opened = self._listening("micro_batch_opened")
        self.admit = self._listening("admit")
        self.micro_batch_ends = self._listening("micro_batch_ends")
        self.micro_batch_counted = self._listening("micro_batch_counted")
        self.holds_one = self._listening("holds_one")
        self.micro_batch_rejected = self._listening("micro_batch_rejected")
        self.micro_batch_dropped = self._listening("micro_batch_dropped")
        self.window_dropped = self._listening("window_dropped")
        self.step_begins = self._listening("step_begins")
        self.ended = self._listening("ended")
        self.window_goes_on = self._listening("window_goes_on")
        self.step_ended = self._listening("step_ended")
        self.forgotten = self._listening("forgotten")
        self.weighed_late = self._listening("weighed_late")
        self.closing = self._listening("closing")
        self.normed = self._listening("normed")
        self.window_closed = self._listening("window_closed")
        self.closed = self._listening("closed")
        self.parameters_moved = self._listening("parameters_moved")
        self.loss_given = self._listening("loss_given")
        self.scale_news = self._listening("scale_news")
        self.scale = self._listening("scale")
        self.carries = self._listening("carries")
        self.loss_scale = self._listening("loss_scale")
        self.normalizing = self._listening("normalizing")
        self.judge = self._listening("judge")
        self.rejects = self._listening("rejects")
        self.finished = self._listening("finished")
        self.measures = self._listening("measures")
        self.lacks_loss = self._listening("lacks_loss")

    def _listening(self, event: str) -> tuple[Callable[..., Any], ...]:
        def overrides(e: Extension) -> bool:
            return getattr(type(e), event) is not getattr(Extension, event)

        return tuple(getattr(e, event) for e in self.all if not e.asleep and overrides(e))

    def of(self, kind: type[Kind]) -> Kind:
        """The one of this kind."""
        return next(e for e in self.all if isinstance(e, kind))

    def tell_scale(self, news: ScaleNews, scale: Scalar | None = None) -> None:
        for tell in self.scale_news:
            tell(news, scale)

    def reduce(self) -> dict[tuple[int, str], float]:
        """The numbers of all of them, by whose they are and by name."""
        return {(i, name): number for i, e in enumerate(self.all) for name, number in e.reduce().items()}

    def reduced(self, totals: dict[tuple[int, str], float], group: Group) -> None:
        """Hand each of them its numbers of all ranks."""
        for i, e in enumerate(self.all):
            e.reduced({name: total for (of, name), total in totals.items() if of == i}, group)

    def snapshot(self) -> list[Any]:
        return [e.snapshot() for e in self.all]

    def roll_back(self, snapshot: list[Any]) -> None:
        for e, kept in zip(self.all, snapshot, strict=True):
            e.roll_back(kept)
