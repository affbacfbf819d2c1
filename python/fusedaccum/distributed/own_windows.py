"""Windows that a rank keeps to itself within DDP's ``no_sync()``, as in local SGD and DiLoCo.

Plain DDP adds up nothing there: ranks that step go apart, until they average their parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.config import Settings
from ..core.extension import Extensions, RaisedByAllError
from ..core.ledger import Ledger
from ..core.sums import Sums
from ..warn import warn
from .ddp import Replicas


class OwnWindows:
    """Tells which windows are a rank's own.

    Those that end within ``no_sync()`` and had no backward that DDP would have synchronised. A
    drop-in's windows (caller-owned, ``reduction="none"``) are, too, if step() comes after the
    block. Others are shared then: there the caller has left it to the wrapper to add up the ranks'
    sums, once per window, and ``no_sync()`` round a backward does not say more.
    """

    def __init__(self, settings: Settings, ledger: Ledger, sums: Sums, extensions: Extensions):
        schedule = settings.schedule
        self._ledger, self._sums, self._counted = ledger, sums, not schedule.caller_owned
        self._drop_in = settings.drop_in
        needs = {"shard": settings.shard or None, "window_weight": schedule.window_weight}
        self._needs_all = [f"{name}={value}" for name, value in needs.items() if value is not None]
        self._needs_all += filter(None, [e.needs_all_ranks() for e in extensions.all])
        self._first: int | None = None  # own counted window
        self._unchecked = False
        self.reset()

    def reset(self) -> None:
        """A window begins."""
        self._synced: bool | None = None  # None: no backward yet

    def pass_begins(self, replicas: Replicas) -> None:
        # Pipeline schedules run all forwards within no_sync(), and the last backward outside of it.
        self._synced = self.synced or replicas.synced or not replicas.off

    @property
    def synced(self) -> bool:
        """True if a backward of the open window was one that DDP would have synchronised."""
        return bool(self._synced)

    def ends(self, replicas: Replicas) -> bool:
        """True if the open window, ending now, is this rank's own.

        Raises RuntimeError if the settings rule that out; nothing is lost.
        """
        own = not self.synced and (replicas.off or (self._drop_in and self._synced is False))
        needs_all = [*self._needs_all, *(["FSDP2's fully_shard"] if self._sums.buffers.has_parts else [])]
        if own and needs_all:
            raise RuntimeError(
                f"a window that ends within no_sync() is this rank's own (local SGD), but with {needs_all[0]} window "
                f"{self._ledger.index} is that of all ranks. To share it, call opt.flush(), and later step(), outside "
                f"of no_sync(): nothing is lost. To let ranks step alone, leave {needs_all[0]} out"
            )
        return own

    def ended(self) -> None:
        """The open window ends as this rank's own."""
        if self._counted and self._first is None:
            self._first, self._unchecked = self._ledger.index, True

    def shared(self, compare: Callable[[], None]) -> None:
        """A window is shared.

        If it is the first after counted windows of a rank's own, warn if ``compare`` finds that the
        ranks' parameters differ: then the loop's ``no_sync()`` may follow another count than the
        windows do. In windows that the caller closes it cannot.
        """
        if not self._unchecked:
            return
        self._unchecked = False
        try:
            compare()
        except RaisedByAllError:
            warn(
                f"the ranks' parameters differ since window {self._first}, which ended within no_sync() and so was "
                "each rank's own, as under plain DDP. Average them before a window that is shared (local SGD); or, if "
                "all windows are to be shared, call step() and flush() outside of no_sync()"
            )
