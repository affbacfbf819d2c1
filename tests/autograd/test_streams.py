"""Gradients queued on a CUDA stream, added on another: stand-ins here, real ones in tests/gpu."""

import contextlib

import fusedaccum as fa
import pytest
import torch
from adding import Adding, marked
from fusedaccum.autograd.grad_queue import GradQueue
from fusedaccum.autograd.streams import StreamOrder, join, keep
from sizes import limits
from torch import nn

DEVICE, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


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
def current(monkeypatch):
    """The current stream of each device; none of them is capturing."""
    streams = {DEVICE: Stream(3), SECOND: Stream(3, 1)}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    monkeypatch.setattr("fusedaccum.autograd.streams.current_name", lambda device: streams[device].name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return streams


@pytest.fixture
def adds(current):
    """The stream that the adds run on."""
    return current[DEVICE]


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


def test_the_memory_of_a_gradient_may_be_another_streams(current):
    here, on_the_second, on_the_cpu = Grad(), Grad(SECOND), Grad(torch.device("cpu"))
    current[DEVICE] = Stream(7)
    for grad in (here, on_the_second, on_the_cpu):
        keep(grad)
    assert (here.recorded, on_the_second.recorded, on_the_cpu.recorded) == ([(7, 0, 1)], [(3, 1, 1)], [])


# -- the adds of a pass ----------------------------------------------------------------------------


def moved_to(current, stream):
    """Makes this the current stream of its device."""
    current[stream.device] = stream
    return stream


def test_each_add_waits_for_the_one_before_and_the_passes_caller_for_the_last(current):
    order, caller = StreamOrder(), current[DEVICE]
    first = moved_to(current, Stream(1))
    order.acquire([DEVICE])
    order.acquire([DEVICE])
    second = moved_to(current, Stream(2))
    order.acquire([DEVICE])
    moved_to(current, caller)
    order.release()
    assert (first.waited_for, second.waited_for, caller.waited_for) == ([], [first.name], [second.name])
    order.release()
    moved_to(current, first)
    order.acquire([DEVICE])
    assert (first.waited_for, caller.waited_for) == ([], [second.name])


def test_devices_have_turns_of_their_own(current):
    order = StreamOrder()
    on_both = [moved_to(current, Stream(1)), moved_to(current, Stream(2, 1))]
    order.acquire([DEVICE, SECOND])
    callers = [moved_to(current, Stream(3)), moved_to(current, Stream(3, 1))]
    order.release()
    assert [stream.waited_for for stream in callers] == [[stream.name] for stream in on_both]


def test_tensors_on_the_cpu_ask_cuda_for_nothing(monkeypatch):
    monkeypatch.setattr("fusedaccum.autograd.streams.current_name", None)
    order = StreamOrder()
    order.acquire([torch.device("cpu")])
    order.release()


@pytest.mark.parametrize("in_it", [False, True])
def test_a_capture_waits_for_what_is_part_of_it(current, monkeypatch, in_it):
    order, now = StreamOrder(), [True]
    last = moved_to(current, Stream(1))
    order.acquire([DEVICE])
    captured = moved_to(current, Stream(2))

    @contextlib.contextmanager
    def stream(other):
        assert other == last
        now[0] = in_it
        yield
        now[0] = True

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    order.acquire([DEVICE])
    assert captured.waited_for == ([last.name] if in_it else [])
    order.release()
    assert not last.waited_for


@pytest.fixture
def buckets(current, monkeypatch):
    """Buckets of one gradient each, which seem to come from and be added on streams 10, 11, ...

    After them the caller's stream, 3, is back.
    """
    monkeypatch.setenv("FUSEDACCUM_INTAKE", "python")
    plain, caller, seen = GradQueue.take, current[DEVICE], []

    def take(self):
        batches, _ = plain(self)
        moved_to(current, Stream(10 + len(seen)) if batches else caller)
        if batches:
            seen.append(current[DEVICE])
        return batches, [seen[-1].name] if batches else []

    monkeypatch.setattr(GradQueue, "take", take)
    with limits(bucket=1):
        yield seen


def test_the_adds_of_a_pass_take_turns(current, buckets):
    caller, layers = current[DEVICE], Stream(7)
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 1)

    def added_by_layer(_):
        moved_to(current, layers)
        with opt._accumulation.collector.within_pass(DEVICE):
            pass

    hidden = net[0](torch.ones(2, 3))
    hidden.register_hook(added_by_layer)
    net[1](hidden).sum().backward()
    second, first = buckets
    assert layers.waited_for == [second.name] and first.waited_for == [layers.name]
    assert caller.waited_for == [first.name]
    opt.step()
    assert caller.waited_for == [first.name]


def test_what_a_broken_off_pass_has_added_is_waited_for(current, buckets):
    caller = current[DEVICE]
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 1)
    hidden = net[0](torch.ones(2, 3))
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net[1](hidden).sum().backward()
    moved_to(current, caller)
    with pytest.warns(RuntimeWarning, match="was broken off"):
        opt.step()
    assert caller.waited_for == [buckets[0].name]


@pytest.mark.parametrize("how", ["fused", "lent"])
def test_a_layer_that_adds_by_itself_takes_its_devices_turn(monkeypatch, how):
    taken = []
    monkeypatch.setattr(StreamOrder, "acquire", lambda self, devices=(): taken.extend(devices))
    net = marked(Adding(3, 3, bias=False)) if how == "lent" else fa.fuse_linear(nn.Linear(3, 3, bias=False))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 1)
    net(torch.ones(2, 3)).sum().backward()
    opt.step()
    assert opt.updated and taken == [torch.device("cpu")]
