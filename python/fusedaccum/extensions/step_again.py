"""In a drop-in, a ``step()`` with no backward since the last steps again, as in plain PyTorch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..core.extension import Extension
from ..core.window import WindowState

if TYPE_CHECKING:
    from ..core.apply import Closing, Conclusion
    from ..core.closures import Evaluated


class StepAgain(Extension):
    """Keeps the last window for as long as ``p.grad`` shows its gradient."""

    def __init__(self) -> None:
        self._last: Conclusion | None = None

    def window_reported(self, end: Conclusion) -> None:
        self._last = end

    def steps_again(self, closing: Closing, evaluated: Evaluated | None) -> bool:
        end = self._last
        if end is None or not closing.still_shows(end):
            return False
        # PyTorch's fused optimizers have written the scaled gradient back.
        finished = end.finished or type(self.inner).step.__module__.startswith("torch.optim.")
        again = dataclasses.replace(end, state=WindowState.CLOSED, applied=False, finished=finished)
        again.closure = closing.handed_on(evaluated, end)
        if not self.accumulation.ranks.alone:
            if self._others_close(closing):
                return True
            again.begun = self.accumulation.sums.begun
        closing.apply(again)
        return True

    def _others_close(self, closing: Closing) -> bool:
        """If a rank has had a backward since the last step(), close the window that it has begun.

        Else return False: ``p.grad`` then shows again what it has shown, from memory of its own,
        because the buffers are what the ranks find it out with.
        """
        accumulation, ranks = self.accumulation, self.accumulation.ranks
        shown = [(slot, slot.shown.clone()) for slot in accumulation.sums.buffers.slots if slot.shown is not None]
        stepped = ranks.slots_with_grad
        accumulation.begin_window()
        ranks.agree()
        if accumulation.ledger.has_any:
            closing.close()
            return True
        accumulation.reset()
        for slot, grad in shown:
            slot.show(grad)
        ranks.slots_with_grad = stepped
        return False
