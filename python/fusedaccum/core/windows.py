"""Windows, one after another: what they hold, and the ranks that share them."""

from __future__ import annotations

from types import FrameType

from torch import Tensor

from ..engine import runs
from ..scalars import Scalar, product
from ..warn import warn
from .accumulator import Accumulator
from .config import Settings
from .extension import Extensions
from .ledger import Ledger
from .ranks import Alone
from .sums import Sums


class Windows:
    """Joins the ledger (what micro-batches count for), the sums (where their gradients go) and the ranks (who has the others).

    Args:
        settings: of the wrapper.
        seed: of stochastic rounding, None for rounding to nearest.
        extensions: of the wrapper, not attached yet.

    Attributes:
        step_under_way: has a step() ended the micro-batch counted last, and not returned?
        inner_call: the call in which the inner optimizer steps, or another of its methods runs.
        updated: did the last step() or flush() change the parameters, and has no micro-batch begun since?
    """

    def __init__(self, settings: Settings, seed: int | None, extensions: Extensions):
        self.settings = settings
        self.sums = Sums(settings.buffer_dtype, extensions, settings.backend)
        self.extensions = extensions
        self.wants_norm = settings.max_grad_norm is not None or any(e.wants_norm for e in extensions.all)
        self.counts = any(e.counts for e in extensions.all)
        self.ledger = Ledger(settings.schedule, settings.reduction, self.extensions)
        self.accumulator = Accumulator(self.sums, self.ledger, extensions, seed)
        self.ranks = Alone()  # until an extension finds others that share the windows
        self.step_under_way = False
        self.inner_call: FrameType | None = None
        self.updated: bool | Tensor = False
        self._weighed: bool | None = None  # was the micro-batch counted last, in the open window, given a weight?
        self._not_zeroed = self._warned_not_zeroed = False

    @property
    def at_work(self) -> bool:
        """True while the inner optimizer is at work."""
        return self.inner_call is not None and runs(self.inner_call)

    def begin_window(self, backward: bool = False) -> None:
        """``backward``: because a backward begins, for which plain PyTorch would leave what is in ``p.grad``."""
        self._not_zeroed = False
        if backward and self.settings.drop_in:
            self.sums.part_with_written(False)  # zeroed, perhaps
            self._not_zeroed = self.sums.left_in_place
        self.sums.begin()
        self.step_under_way, self._weighed = False, None
        self.ledger.begin_window()  # last: if anything above raises, the next call begins it

    def warn_not_zeroed(self) -> None:
        """A window of a drop-in closes: warn, once, if plain PyTorch would have stepped with the gradient of the step before, too."""
        if self._not_zeroed and not self._warned_not_zeroed:
            self._warned_not_zeroed = True
            warn(
                "a backward came after step() with no zero_grad() between: it has begun a new window, where plain PyTorch would have added "
                "to the gradient that the step had left. Call opt.zero_grad() between the two. (Further cases are not reported.)"
            )

    def reset(self) -> None:
        """Drop what the open window has accumulated, and what was put into ``p.grad`` meanwhile."""
        if self.ledger.is_open:
            self.sums.clear()
        self.ledger.drop_window()
        self.step_under_way = False
        self.sums.begin()
        for released in self.extensions.buffers_released:
            released()

    @property
    def weighs_loss(self) -> bool:
        """True if a weight must be in the loss, because the ranks' gradients are added up before they get here."""
        return self.ledger.mixes_ranks and self.settings.reduction == "mean"

    @property
    def measures(self) -> bool:
        """Do adds take norms and count what is not finite? (Norms of sums that go to other ranks are taken when those have arrived.)"""
        takes_norm = self.wants_norm and (self.ranks.alone or self.ledger.mixes_ranks)
        return (takes_norm and self.ledger.may_be_last()) or any(measures() for measures in self.extensions.measures)

    @property
    def sums_carry(self) -> Scalar:
        """The factor that the window's sums carry, beside weights."""
        return product(carries() for carries in self.extensions.carries)

    @property
    def losses_carry(self) -> Tensor | None:
        """The factor that losses carry which opt.backward() is given; None if none is known."""
        return next((scale for known in self.extensions.loss_scale if (scale := known()) is not None), None)

    def complete(self) -> bool:
        """Does the window end here?"""
        self.ranks.before_weighing()
        return self.ranks.agreed or self.ledger.complete()

    def anything_to_flush(self) -> bool:
        """Has the open window accumulated anything, on this rank or another? With several ranks, it is that of all ranks afterwards."""
        if self.ranks.alone:
            return self.ledger.is_open
        if self.ledger.window is None:
            self.begin_window()
        self.ranks.flushes()
        self.ranks.agree()
        if not self.ledger.has_any:
            self.ledger.drop_window()
        # Dropped micro-batches alone make a window, too: a rank whose step() meets this flush() has closed one.
        return self.ledger.has_any
