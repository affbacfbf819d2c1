"""Backward passes under way, by thread, read off Python stacks; how many each thread has called."""

from __future__ import annotations

import dis
import sys
import threading
from collections import Counter
from types import FrameType
from typing import NamedTuple

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

_SEEN: Counter[int | None] = Counter()  # passes by the thread that has called them; None: not known


def saw_pass(thread: int | None) -> None:
    """Count a pass that this thread called, which may be over, or reach no wrapper's parameters."""
    _SEEN[thread] += 1


def passes_seen(thread: int) -> int:
    """How many were seen that this thread has called, or may have."""
    return _SEEN[thread] + _SEEN[None]


class Outermost(NamedTuple):
    """The outermost backward pass under way.

    Its call, that call's thread (if known), and whether the pass running here is nested in it.
    """

    call: FrameType | None
    thread: int | None
    nested: bool


def outermost_backward() -> Outermost:
    """The pass for which the calling hook runs.

    Autograd gives no name to the pass around a re-entrant one (activation checkpointing with
    ``use_reentrant=True``), so this reads it off the Python stack: every pass is a call of
    ``_engine_run_backward``. For parameters on a GPU the hooks run in a thread of the engine's,
    whose stack begins inside the engine; there the outermost call is on another thread's. So may be
    the call of a re-entrant pass, which ends where its last node ran: on another device, or in a
    thread of the engine's pool. Its caller waits for it, so a pass that is seen anywhere within
    another counts as the one that runs here. (Where it is another model's, this pass is taken to be
    nested too, and its end is noticed late.) The call is None if it was made from C++.
    """
    here = threading.get_ident()
    frames, begins_inside = _backward_frames(sys._getframe())
    nested = len(frames) > 1 or (begins_inside and bool(frames))
    if frames and not begins_inside:
        return Outermost(frames[-1], here, nested)
    callers = []
    for thread, frame in sys._current_frames().items():
        others, inside = _backward_frames(frame) if thread != here else ([], False)
        nested = nested or len(others) > 1 or (inside and bool(others))
        if others and not inside:
            callers.append((others[-1], thread))
    if not callers:
        return Outermost(None, None, nested)
    call, thread = callers[0]
    return Outermost(call, thread if len(callers) == 1 else None, nested)


def under_way(call: FrameType | None) -> bool:
    """True if this backward pass is still running, in any thread."""
    return call is not None and any(call in _backward_frames(frame)[0] for frame in sys._current_frames().values())


def returned(call: FrameType | None) -> bool:
    """True if this pass has returned. (A finished call's frame stays at its last instruction.)"""
    return call is not None and dis.opname[call.f_code.co_code[call.f_lasti]].startswith("RETURN")


def broke_off(call: FrameType | None) -> bool:
    """True if an exception has ended this backward pass. False for one that cannot be seen."""
    return call is not None and not returned(call) and not under_way(call)


def running_backward() -> FrameType | None:
    """The ``_engine_run_backward`` call that this thread, or the one that waits for it, is in."""
    frames = _backward_frames(sys._getframe())[0]
    if not frames:
        stacks = [_backward_frames(frame)[0] for frame in sys._current_frames().values()]
        frames = next((stack for stack in stacks if stack), [])
    return frames[0] if frames else None


def _backward_frames(frame: FrameType | None) -> tuple[list[FrameType], bool]:
    """A stack's backward calls, innermost first, and whether the last lies in a running node."""
    found: list[FrameType] = []
    inside = False
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            found.append(frame)
            inside = False
        elif frame.f_code is BackwardCFunction.apply.__code__:
            inside = True
        frame = frame.f_back
    return found, inside
