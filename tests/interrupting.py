"""Ctrl-C at a point of a call where Python looks for it.

Python looks for signals where one of its functions begins, and where a call of a C function has returned. A profiler is called there, too.
"""

import inspect
import sys

import torch


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(call, at):
    """Call it, with an interrupt at point number ``at``. Returns the exception, None if there are not so many points."""
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
    """What that leaves half done is not the wrapper's business: it does more when the optimizer's own step has returned."""
    while frame is not None:
        if frame.f_code.co_filename == PYTORCHS:
            return True
        frame = frame.f_back
    return False
