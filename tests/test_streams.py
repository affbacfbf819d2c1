"""What is queued on one CUDA stream and added on another, with stand-ins for streams and tensors; tests/test_gpu.py has real ones."""

import pytest
import torch
from fusedaccum.streams import join

DEVICE = torch.device("cuda:0")


class Stream:
    def __init__(self, stream_id, device_index=0, device_type=1):
        self.name, self.device = (stream_id, device_index, device_type), torch.device("cuda", device_index)
        self.waited_for = []

    def __eq__(self, other):
        return self.name == other.name

    def wait_stream(self, other):
        self.waited_for.append(other.name)


class Grad:
    def __init__(self, device=DEVICE):
        self.device, self.recorded = device, []

    def record_stream(self, stream):
        self.recorded.append(stream.name)


@pytest.fixture
def adds(monkeypatch):
    """The stream that the adds run on."""
    stream = Stream(3)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", {DEVICE: stream}.get)
    return stream


def test_who_adds_waits_for_other_streams_and_their_memory_for_him(adds):
    grads, elsewhere = [Grad(), Grad()], Grad(torch.device("cpu"))
    join([(1, 0, 1), adds.name, (2, 0, 1)], [*grads, elsewhere])
    assert adds.waited_for == [(1, 0, 1), (2, 0, 1)]
    assert all(set(grad.recorded) == {adds.name} for grad in grads)
    assert not elsewhere.recorded


def test_one_stream_costs_nothing(adds):
    grads = [Grad(), Grad()]
    join([adds.name], grads)
    assert not adds.waited_for
    assert not any(grad.recorded for grad in grads)
