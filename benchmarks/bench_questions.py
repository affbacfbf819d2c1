"""What do newcomers ask? Every question of docs/questions, measured on the CPU: errors, losses and bytes, not seconds."""

from __future__ import annotations

import torch

from .harness import Options, Row, Sink
from .questions import QUESTIONS

NAME = "questions"


def run(options: Options) -> list[Row]:
    """Measure all questions; the rows, each with its question."""
    with Sink(NAME, options, len(QUESTIONS)) as sink:
        for name, question in QUESTIONS.items():
            sink.case(name)
            torch.manual_seed(0)
            sink.add([{"question": name, **row} for row in question.measure(options.quick)])
    return sink.rows
