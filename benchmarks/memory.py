"""Memory as PyTorch's allocator sees it, on one kind of device, from the profiler's events.

Every allocation and release, exact for tensors, including temporaries inside ops. It does not see
what a library allocates by itself (oneDNN's scratch pads), or Python objects. Whatever is to be
counted has to be built inside the block.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "memory: "
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # as c10::DeviceType numbers them


@dataclass
class Timeline:
    """Bytes allocated after every event, and marked stretches, in seconds from the first event."""

    seconds: list[float] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    marks: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(self.allocated, default=0)

    def within(self, start: float, end: float) -> list[int]:
        """The levels between two moments, beginning with the level at the first of them."""
        before = [b for s, b in zip(self.seconds, self.allocated) if s <= start]
        return before[-1:] + [b for s, b in zip(self.seconds, self.allocated) if start < s <= end]

    def peak_of(self, *names: str) -> int:
        """The peak over the stretches with these names."""
        stretches = [m for m in self.marks if m[0] in names]
        return max(max(self.within(start, end), default=0) for _, start, end in stretches)

    def highest(self, name: str, points: int) -> list[int]:
        """Peaks of at most ``points`` parts of a stretch, cut by events and not by the clock."""
        ((_, start, end),) = [m for m in self.marks if m[0] == name]
        levels = self.within(start, end)
        size = -(-len(levels) // points)
        return [max(levels[i : i + size]) for i in range(0, len(levels), size)]


@contextmanager
def recorded(device_type: str) -> Iterator[Timeline]:
    """Record a block on this kind of device; the yielded timeline is filled when the block ends."""
    timeline = Timeline()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log lines would tear the progress bar
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield timeline
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    events = sorted(
        (
            (e["ts"], e["args"]["Bytes"])
            for e in trace
            if e.get("name") == "[memory]" and e["args"]["Device Type"] == _DEVICE_TYPES[device_type]
        ),
        key=lambda e: e[0],
    )
    marks = [e for e in trace if str(e.get("name", "")).startswith(_MARK) and e.get("ph") == "X"]
    origin = min([e[0] for e in events[:1]] + [e["ts"] for e in marks], default=0.0)
    total = 0
    for moment, size in events:
        total += size
        timeline.seconds.append((moment - origin) / 1e6)
        timeline.allocated.append(total)
    for e in sorted(marks, key=lambda e: e["ts"]):
        start = (e["ts"] - origin) / 1e6
        timeline.marks.append((e["name"].removeprefix(_MARK), start, start + e["dur"] / 1e6))


def mark(name: str) -> record_function:
    """Name a stretch of the recording: ``with mark("backward"): ...``."""
    return record_function(_MARK + name)
