"""Ctrl-C at a point of a call where Python looks for it.

Python looks for signals where one of its functions begins, and where a call of a C function has
returned. A profiler is called there, too.
"""

import inspect
import sys

import torch


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(call, at):
    """Call it with an interrupt at point ``at``; returns the exception, None past the last one."""
    points = 0

    def look(frame, event, _):
        nonlocal points
        points += event in ("call", "c_return") and not within_pytorchs_step(frame)
        if points == at:
            sys.setprofile(None)
            raise Interrupt

    sys.setprofile(look)
    try:
        call()
    except Interrupt as interrupt:
        return interrupt
    finally:
        sys.setprofile(None)
    return Interrupt() if points == at else None  # a callback of the garbage collector's may have swallowed it


PYTORCHS = inspect.getfile(torch.optim.Optimizer)


def within_pytorchs_step(frame):
    """True in the optimizer's own step: what it leaves half done is not the wrapper's business."""
    while frame is not None:
        if frame.f_code.co_filename == PYTORCHS:
            return True
        frame = frame.f_back
    return False
