"""What do newcomers ask?

Every question in docs/questions, measured on the CPU: errors, losses and bytes, not seconds.
"""

from __future__ import annotations

import torch

from .harness import Options, Row, Sink
from .questions import QUESTIONS

NAME = "questions"


def run(options: Options) -> list[Row]:
    """Measure all questions; returns the rows, each with its question.

    On one thread: models this small gain little from a second one, and sums are then taken in the
    same order on every machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Sink(NAME, options, len(QUESTIONS)) as sink:
        for name, question in QUESTIONS.items():
            sink.case(name)
            torch.manual_seed(0)
            sink.add([{"question": name, **row} for row in question.measure(options.quick)])
    torch.set_num_threads(threads)
    return sink.rows
