"""How a feature takes part in a wrapper's windows without the core's knowing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..scalars import product

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from ..distributed.group import Group
    from ..ops import StochasticRounding
    from ..scalars import Scalar
    from .accumulation import Accumulation
    from .apply import Closing, Conclusion
    from .buffers import Block, Slot
    from .closures import Evaluated
    from .config import Settings
    from .window import MicroBatch

Kind = TypeVar("Kind", bound="Extension")


class LossFrom(Enum):
    """Who says what a micro-batch's loss is."""

    PASS = auto()  # opt.backward(), of one backward pass, with a loss scale if there is one
    RECIPE = auto()  # a recipe, of all the passes of the micro-batch, with a loss scale if there is one
    CALLER = auto()  # the caller, without a loss scale


class ScaleNews(Enum):
    """What has become known of the loss scale that the open window's losses and sums carry."""

    KNOWN = auto()  # what may have carried an unknown scale carries this one
    UNKNOWN = auto()  # it will not become known
    ANOTHER = auto()  # since the last step() it was another one than assumed
    NONE = auto()  # the open micro-batch carries none


class Instead(Enum):
    """What ``p.grad`` shows, or has shown, instead of the sums."""

    NOTHING = auto()
    REJECTED = auto()  # a gradient of a rejected micro-batch
    WAS_REJECTED = auto()  # one, until a call put the sums back; no micro-batch has begun since


class RaisedByAllError(RuntimeError):
    """Raised by all ranks at the same place between their collectives, so they can go on."""


class InnerScaling(NamedTuple):
    """What an inner optimizer does by itself with the window's gradient.

    Attributes:
        applied: True if it applies the window; a tensor, if it decides that on its device.
        around: a block in which its step() must be called.
        divides: True if it makes ``p.grad`` the gradient; else it must be that before.
    """

    applied: bool | Tensor
    around: AbstractContextManager[None]
    divides: bool


class Judge:
    """Decides whether a micro-batch is added, when it is whole and before any of it is. One
    extension at most is this, too.
    """

    def accepts(self, held: list[Tensor], added: list[Slot]) -> bool:
        """False leaves out the micro-batch. Its gradients are ``held``, or ``added`` by layers."""
        return True

    def rejected(self, batches: Sequence[tuple[list[Slot], list[Tensor]]]) -> None:
        """The micro-batch of these gradients is left out."""

    def sums_shown(self) -> None:
        """A pass is over: what ``p.grad`` shows stays until the next call or backward."""

    def shown_instead(self) -> Instead:
        """What this has put in the place of the sums in ``p.grad``."""
        return Instead.NOTHING

    def unhide(self) -> None:
        """Have ``p.grad`` show the sums again, if it shows something else."""


class StandIns:
    """Makes what the inner optimizer steps in the place of parameters (`Slot.stepped`). One
    extension at most is this, too.
    """

    def stands_in(self) -> bool:
        """True if there are any."""
        return False

    def stepping(self, slots: Sequence[Slot], call: FrameType) -> AbstractContextManager[None]:
        """A block in ``call`` where the inner optimizer is at work; ``slots`` may be stepped."""
        return nullcontext()

    def calling(self, slots: Sequence[Slot], call: FrameType) -> AbstractContextManager[None]:
        """A block in ``call`` where another method of the inner optimizer runs; all ``slots``."""
        return nullcontext()

    def recover(self) -> None:
        """``param_groups`` are read: end a :meth:`stepping` block that Ctrl-C has left open."""

    def others_may_have_written(self, slots: Sequence[Slot]) -> None:
        """Other code may have written to the model, and replaced gradients of ``slots``."""

    def stepped(self, slots: Sequence[Slot]) -> None:
        """The inner optimizer has stepped these. May come again, if something raised after it."""


class MicroBatchEvents:
    """What becomes of a micro-batch: the first part of :class:`Extension`."""

    # -- a micro-batch -----------------------------------------------------------------------------

    def micro_batch_opened(self) -> None:
        """A micro-batch is open."""

    def pass_comes(self) -> None:
        """A backward pass brings its first gradient, and has opened nothing yet. May refuse it."""

    def block_begins(self, thread: int) -> None:
        """A block of passes that are one micro-batch, which is open, begins in this thread."""

    def block_ends(self) -> None:
        """The block is over, or was not begun, because an exception came before."""

    def pass_begins(self, thread: int | None) -> None:
        """A pass of the open micro-batch brings its first gradient. May refuse it.

        ``thread``: that called the backward; None if it is not known.
        """

    def passes_over(self) -> None:
        """No pass is under way any more: ``p.grad`` is the wrapper's again."""

    def pass_failed(self) -> None:
        """A pass broke off."""

    def weighed_elsewhere(self, thread: int | None) -> MicroBatch | None:
        """Another wrapper's micro-batch, if its weight is that of the loss under way.

        ``thread``: called that loss's backward; None if it is not known.
        """
        return None

    def micro_batch_ends(self, micro: MicroBatch) -> None:
        """The micro-batch will be counted, or left out. If this raises, it stays open."""

    def micro_batch_counted(self, micro: MicroBatch) -> None:
        """The micro-batch is over, and part of the open window."""

    def counted_alone(self, micro: MicroBatch) -> None:
        """The buffers hold the gradients of this counted micro-batch alone, of this rank."""

    def micro_batch_rejected(self) -> None:
        """A micro-batch was left out when it was complete. It was dropped before this."""

    def micro_batch_dropped(self) -> None:
        """What has happened since the last micro-batch was counted belongs to none."""

    # -- its gradients on their way ----------------------------------------------------------------

    def select(self, slots: Sequence[Slot], grads: Sequence[Tensor]) -> tuple[Sequence[Slot], Sequence[Tensor]]:
        """Those of the gradients of ``slots`` that are to be added."""
        return slots, grads

    def scale(self, scale: Scalar) -> Scalar:
        """What to multiply the open micro-batch's gradients by, in place of ``scale``."""
        return scale

    def as_mean(self, slots: Sequence[Slot], scale: Scalar) -> tuple[Scalar, Scalar]:
        """What to multiply the gradients of ``slots`` by, in place of ``scale``, and what their
        sums are divided by in the buffers. One at most.
        """
        return scale, 1.0

    def rounding(self, slots: Sequence[Slot]) -> StochasticRounding | None:
        """How an add to the buffers of ``slots`` rounds; None for to nearest. One at most."""
        return None

    def added_already(self, slot: Slot, grad: Tensor | None) -> bool:
        """True if the slot's gradient is in its buffer, so that ``grad``, which autograd brings, is
        none. It may be used by other code.

        Asked about a gradient that other code holds, too, about None, and about all of a slot with
        ``intercepted``.
        """
        return False

    def adding(self, slots: Sequence[Slot]) -> None:
        """Gradients are about to be added to the buffers of ``slots``."""

    def added(self, slots: Sequence[Slot]) -> None:
        """Gradients of ``slots`` were added, in one call."""

    def arrived(self, slots: Sequence[Slot]) -> None:
        """What a backward has brought for ``slots`` is in their sums."""

    def unfinished(self) -> str | None:
        """Why no pass can follow one that broke off and left what no hook has told of."""
        return None

    def measures(self) -> bool:
        """True if this micro-batch's adds must take norms, and count what is not finite."""
        return False

    # -- its loss ----------------------------------------------------------------------------------

    def backward_begins(self, loss: Tensor) -> None:
        """``opt.backward()`` was given this loss, and runs its backward next."""

    def loss_given(self, loss: Scalar, source: LossFrom) -> None:
        """The loss of the open micro-batch, or of the one counted last."""

    def lacks_loss(self) -> bool:
        """True if the loss of the open micro-batch, or of the last, is wanted and has not come."""
        return False

    def loss_scale(self) -> Tensor | None:
        """The factor in losses that ``opt.backward()`` is given; reports leave it out."""

    def scale_news(self, news: ScaleNews, scale: Scalar | None) -> None:
        """Something has become known of the loss scale, which is ``scale``, if that is known."""


class Extension(MicroBatchEvents):
    """One feature of one wrapper. The core calls these methods; a feature overrides those that it
    needs. features.py has their order.

    Attributes:
        key: of the feature's entry in a checkpoint; None for one that has nothing to continue from.
        by_parameter: True if that entry is tensors by the index of their parameter's slot, which
            ranks save as parts of one tensor.
        asleep: True if it is called for checkpoints and ranks only, until :meth:`Extensions.wake`.
        attributes: names of attributes of the wrapper that are attributes of this instead.
        counts: True if it must be known in which micro-batches a value was not finite.
        wants_norm: True if the norm of every window's gradient must be known.
        wants_first_alone: True if ranks must not add up sums before a first micro-batch is counted.
        accumulation: the wrapper's, of which this is a part. inner: the optimizer that is wrapped.
    """

    key: str | None = None
    by_parameter = False
    asleep = False
    attributes: tuple[str, ...] = ()
    counts = False
    wants_norm = False
    wants_first_alone = False
    accumulation: Accumulation
    inner: Optimizer

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        """Become a part of a wrapper, before it has any parameters, or any that it is for."""
        # A proxy, because the accumulation holds this: dropping the wrapper must free the model.
        self.accumulation, self.inner = weakref.proxy(accumulation), inner

    # -- what it does not work with ----------------------------------------------------------------

    @classmethod
    def refuses(cls, settings: Settings, inner: Optimizer) -> None:
        """Raises TypeError or ValueError for settings or an optimizer that rule the feature out."""

    def check_parameter(self, name: str, parameter: Parameter, left: bool) -> None:
        """Raises ValueError for a parameter that the settings rule out.

        ``left``: it is taken over from another wrapper.
        """

    def check_changed(self, slot: Slot) -> None:
        """Raises RuntimeError if the slot's parameter can be accumulated no more."""

    def check_shared(self) -> None:
        """Raises ValueError if ranks cannot share windows of these parameters."""

    def check_weight(self, weight: Scalar) -> None:
        """Raises ValueError for a weight that the micro-batch cannot have."""

    def check_call(self) -> None:
        """Raises RuntimeError if the wrapper is not to be called."""

    def needs_all_ranks(self) -> str | None:
        """The argument, as written, for which a window must be that of all ranks, if any."""
        return None

    # -- a call of step() or flush() ---------------------------------------------------------------

    def steps_again(self, closing: Closing, evaluated: Evaluated | None) -> bool:
        """True if this ``step()`` without gradients has stepped with the last window's again."""
        return False

    def step_begins(self) -> None:
        """``step()`` was called; the micro-batch that it ends is still open."""

    def ended(self, rejected: list[str]) -> None:
        """``step()`` has ended the micro-batch.

        ``rejected``: names of parameters for which any were left out since the last ``step()``.
        """

    def window_goes_on(self) -> None:
        """``step()`` has ended a micro-batch, and the window is not complete."""

    def step_ended(self) -> None:
        """``step()`` returns, or raises."""

    def flush_begins(self) -> None:
        """``flush()`` was called. May raise, if it cannot apply the open window."""

    def check_sums(self) -> None:
        """Raises RuntimeError if the buffers are known not to hold the sums of all gradients."""

    def check_shown(self, why: str, instead: str) -> None:
        """Raises RuntimeError if ``p.grad`` does not show the sums, with what works ``instead``."""

    def run_step(self, closing: Closing, closure: Callable[[], Any] | None, weight: Scalar | None) -> Any:
        """Do what ``step()`` is for, in the core's place; return what the closure returned."""

    def forgotten(self) -> None:
        """``reset()``, or a state that is loaded, voids what other code has shown so far."""

    # -- a window ----------------------------------------------------------------------------------

    def window_begins(self, backward: bool) -> None:
        """A window opens next, for a ``backward`` or not; ``p.grad`` still shows the last one."""

    def window_kept(self) -> None:
        """``zero_grad()`` was called, and has left the open window as it is."""

    def window_opened(self) -> None:
        """A window is open, and empty."""

    def carries(self) -> Scalar:
        """The factor that the window's sums carry, beside weights."""
        return 1.0

    def normalizing(self) -> Scalar:
        """The factor that ``normalize_()`` leaves in the window's gradient, over the one that its
        sums carry.
        """
        return 1.0

    def weighed_late(self) -> None:
        """The micro-batches that had no weight are given one, together, at the window's end."""

    def closing(self, end: Conclusion) -> None:
        """The window is complete, and ``end`` says what it comes to. May change that."""

    def normed(self, end: Conclusion, sq_norm: Tensor) -> None:
        """The norm of the window that is closing is known; ``sq_norm`` is that of its sums,
        squared.
        """

    def window_closed(self) -> None:
        """The window is over: the next gradient begins a new one. It is applied, or skipped, next,
        unless :meth:`run_step` has done that. All ranks are told at the same place.
        """

    def window_reported(self, end: Conclusion) -> None:
        """The window, over since :meth:`window_closed`, was applied, or skipped. May come again, if
        something raised meanwhile.
        """

    def window_dropped(self) -> None:
        """The micro-batches that the open window has counted no longer count."""

    def buffers_overwritten(self) -> None:
        """What the buffers hold, perhaps a gradient that was stepped, will be overwritten."""

    def sums_changed(self, slots: Sequence[Slot] | None) -> None:
        """The sums of ``slots``, or it is not known which, are others than before."""

    def finishing(self, slots: Sequence[Slot], scale: Scalar) -> None:
        """``p.grad`` of the slots, which share their ops, will be the window's gradient next,
        ``scale`` times what the buffers hold.
        """

    def sums_dropped(self) -> None:
        """Of what was added to the buffers so far, nothing counts any more."""

    def buffers_released(self) -> None:
        """The buffers' window was applied and reported, or dropped: they are needed no more."""

    # -- the inner optimizer's work ----------------------------------------------------------------

    def inner_scales(self, end: Conclusion) -> InnerScaling | None:
        """What the inner optimizer does with the gradient of ``end`` within its own ``step()``.
        None: nothing but steps with it. One at most.
        """
        return None

    def step_inner(self, end: Conclusion, step: Callable[[], None]) -> bool:
        """True if this has stepped ``end.slots``, calling ``step``; else the core calls it."""
        return False

    def may_apply(self, cast: list[Slot]) -> bool:
        """False to skip the window: ``p.grad`` is its gradient, in the slots ``cast`` in FP16."""
        return True

    # -- parameters --------------------------------------------------------------------------------

    def newly_wrapped(self) -> None:
        """The inner optimizer and its state come from outside: the wrapper is no copy."""

    def built_again(self, before: Extension) -> None:
        """The wrapper was built again; ``before`` is what this was until then."""

    def slot_made(self, slot: Slot) -> None:
        """A slot was made, without a buffer. May say where that will be, and what adds to it."""

    def block_made(self, block: Block, slots: Sequence[Slot]) -> None:
        """These slots, all that lie in ``block``, have buffers, which hold nothing yet."""

    def parameters_come(self, slots: Sequence[Slot], all_of_them: bool) -> None:
        """The wrapper has these slots, too, or, if they are ``all_of_them``, no others.

        Raises ValueError, and changes nothing, if it cannot have them.
        """

    def parameters_added(self, slots: Sequence[Slot]) -> None:
        """The windows take these slots, too, from now on, on all ranks."""

    def parameters_changed(self, new: Sequence[Slot]) -> None:
        """The parameters are others. Those of ``new`` have no hook yet, and perhaps no buffer."""

    def rearrange(self, parameters: Sequence[tuple[str, Parameter]]) -> None:
        """The groups hold these parameters now, in this order; some are gone, or elsewhere."""

    def outdated(self) -> bool:
        """True if the wrapper must be built again before it can load a state."""
        return False

    def parameters_moved(self, places: dict[int, int]) -> None:
        """Parameters have new places, by their old ones; those not in ``places`` are gone."""

    # -- micro-batches that can only be dropped together -------------------------------------------

    def snapshot(self) -> Any:
        """A copy of what it keeps of the micro-batches that the window has counted."""

    def roll_back(self, snapshot: Any) -> None:
        """Those that the window has counted since ``snapshot`` was taken no longer count."""

    # -- ranks that share windows ------------------------------------------------------------------

    def reduce(self) -> dict[str, float]:
        """This rank's numbers of a window, by the same names on all ranks, to be added up."""
        return {}

    def reduced(self, totals: dict[str, float], group: Group) -> None:
        """The numbers of all ranks, added up. All ranks may communicate here."""

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self) -> Any:
        """Copies of what it needs to continue, as tensors and plain values."""

    def check(self, saved: Any) -> None:
        """Raises ValueError if :meth:`load` could not continue with this."""

    def load(self, saved: Any) -> None:
        """Continue from what :meth:`save` has returned."""

    def started_anew(self) -> None:
        """A state was loaded that has no entry of this: go on as if the wrapper were new."""

    def window_settings(self) -> dict[str, Any]:
        """Settings that must be the same for an open window to continue, as plain values."""
        return {}

    def check_settings(self, saved: dict[str, Any]) -> None:
        """Raises ValueError if what a wrapper of these settings saved cannot be loaded.

        Not even between two windows.
        """

    def check_together(self, parts: Sequence[Any]) -> None:
        """Raises ValueError on all ranks if ``parts`` of an open window are not of one."""

    def join(self, parts: Sequence[Any], mine: Sequence[int], ranks: int) -> Any:
        """What to :meth:`load` on one of ``ranks`` ranks, where another number has saved ``parts``
        between two micro-batches, and the windows of those at ``mine`` continue here.
        """


class Extensions:
    """A wrapper's extensions; for each event, the methods of those that override it."""

    def __init__(self, extensions: Iterable[Extension]):
        self.all: tuple[Extension, ...] = ()
        self._listeners: list[str] = []  # events that have been looked up
        self._wrapper: tuple[weakref.ref[Accumulation], Optimizer] | None = None
        self.add(extensions)

    def attach(self, accumulation: Accumulation, inner: Optimizer) -> None:
        """Make all of them a part of this wrapper, also those that are added later."""
        self._wrapper = weakref.ref(accumulation), inner
        for extension in self.all:
            extension.attach(accumulation, inner)

    def add(self, extensions: Iterable[Extension]) -> None:
        """Have these, too, which are called after the others."""
        new = tuple(extensions)
        self.all += new
        if self._wrapper is not None:
            accumulation, inner = self._wrapper[0](), self._wrapper[1]
            assert accumulation is not None  # it holds this
            for extension in new:
                extension.attach(accumulation, inner)
        self.saved = {e.key: e for e in self.all if e.key is not None}
        self.attributes = {name: e for e in self.all for name in e.attributes}
        self._forget_listeners()

    def wake(self, extension: Extension) -> None:
        """From now on the extension is told what happens."""
        if extension.asleep:
            extension.asleep = False
            self._forget_listeners()

    def __getattr__(self, event: str) -> tuple[Callable[..., Any], ...]:
        """The methods of this name of those that override it, in order; looked up once."""
        base = getattr(Extension, event)
        listening = tuple(getattr(e, event) for e in self.all if not e.asleep and getattr(type(e), event) is not base)
        self._listeners.append(event)  # first: Ctrl-C may come between
        vars(self)[event] = listening
        return listening

    def _forget_listeners(self) -> None:
        for event in self._listeners:
            vars(self).pop(event, None)
        self._listeners.clear()

    def of(self, kind: type[Kind]) -> Kind:
        """The one of this kind."""
        return next(e for e in self.all if isinstance(e, kind))

    def follow(self, before: Extensions) -> None:
        """The wrapper was built again, and had these before."""
        theirs = {type(e): e for e in before.all}
        for e in self.all:
            if type(e) in theirs:
                e.built_again(theirs[type(e)])

    def tell_scale(self, news: ScaleNews, scale: Scalar | None = None) -> None:
        for tell in self.scale_news:
            tell(news, scale)

    def sleep(self, extension: Extension) -> None:
        """From now on the extension is told of nothing."""
        extension.asleep = True
        self._forget_listeners()

    def ensure(self, kind: type[Kind]) -> Kind:
        """The one of this kind, which is added if there is none."""
        if not any(isinstance(e, kind) for e in self.all):
            self.add([kind()])
        return self.of(kind)

    def sums_carry(self) -> Scalar:
        """The factor that the window's sums carry, beside weights."""
        return product(carries() for carries in self.carries)

    def losses_carry(self) -> Tensor | None:
        """The factor that losses carry which opt.backward() is given; None if none is known."""
        return next((scale for known in self.loss_scale if (scale := known()) is not None), None)

    def reduce(self) -> dict[tuple[int, str], float]:
        """The numbers of all of them, by whose they are and by name."""
        return {(i, name): number for i, e in enumerate(self.all) for name, number in e.reduce().items()}

    def reduced(self, totals: dict[tuple[int, str], float], group: Group) -> None:
        """Hand each of them its numbers of all ranks."""
        for i, e in enumerate(self.all):
            e.reduced({name: total for (of, name), total in totals.items() if of == i}, group)

    def snapshot(self) -> dict[Extension, Any]:
        return {e: e.snapshot() for e in self.all}

    def roll_back(self, snapshot: dict[Extension, Any]) -> None:
        for e, kept in snapshot.items():
            e.roll_back(kept)
