"""What is queued on one CUDA stream and added on another, with stand-ins for streams and tensors; tests/test_gpu.py has real ones."""

import torch
from fusedaccum.streams import Streams


class Stream:
    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class Grad:
    is_cuda = True
    device = torch.device("cuda:0")

    def __init__(self):
        self.recorded = []

    def record_stream(self, stream):
        self.recorded.append(stream)


def test_who_adds_waits_for_other_streams_and_their_memory_for_him(monkeypatch):
    first, second, adds = Stream(), Stream(), Stream()
    grads, streams = [Grad(), Grad(), Grad()], Streams()
    for grad, stream in zip(grads, (first, second, adds)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        streams.arrived(grad)
    streams.join(grads)
    assert set(adds.waited_for) == {first, second}
    assert [grad.recorded for grad in grads] == [[adds]] * 3
    streams.join(grads)
    assert len(adds.waited_for) == 2


def test_one_stream_costs_nothing(monkeypatch):
    only, grads, streams = Stream(), [Grad(), Grad()], Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: only)
    for grad in grads:
        streams.arrived(grad)
    streams.join(grads)
    assert not only.waited_for
    assert not any(grad.recorded for grad in grads)
