"""The boundary between the core and its extensions: who is called, and with whose numbers."""

import pytest
from fusedaccum.core.extension import Extension, Extensions


class Counts(Extension):
    """Keeps how many micro-batches were counted, and adds up over the ranks as many again."""

    def __init__(self, key):
        self.key, self.micro_batches, self.of_all = key, 0, None

    def micro_batch_counted(self, micro):
        self.micro_batches += 1

    def snapshot(self):
        return self.micro_batches

    def roll_back(self, snapshot):
        self.micro_batches = snapshot

    def reduce(self):
        return {"micro_batches": self.micro_batches}

    def reduced(self, totals, group):
        self.of_all = totals, group


class Silent(Extension):
    key = "silent"


def test_only_what_is_overridden_is_called():
    one, other = Counts("one"), Counts("other")
    extensions = Extensions([one, Silent(), other])
    assert extensions.micro_batch_counted == (one.micro_batch_counted, other.micro_batch_counted)
    assert extensions.window_closed == extensions.window_dropped == extensions.micro_batch_dropped == ()
    assert extensions.of(Silent) is extensions.all[1] and extensions.of(Counts) is one


def test_each_is_rolled_back_to_its_own_snapshot():
    one, other = Counts("one"), Counts("other")
    extensions = Extensions([one, Silent(), other])
    one.micro_batches, other.micro_batches = 3, 5
    before = extensions.snapshot()
    for counted in extensions.micro_batch_counted:
        counted(None)
    assert (one.micro_batches, other.micro_batches) == (4, 6)
    extensions.roll_back(before)
    assert (one.micro_batches, other.micro_batches) == (3, 5)


def test_numbers_of_the_same_name_come_back_to_whose_they_are():
    one, other = Counts("one"), Counts("other")
    extensions = Extensions([one, Silent(), other])
    one.micro_batches, other.micro_batches = 3, 5
    numbers = extensions.reduce()
    assert list(numbers.values()) == [3, 5]
    extensions.reduced({name: 10 * number for name, number in numbers.items()}, "group")
    assert one.of_all == ({"micro_batches": 30}, "group") and other.of_all == ({"micro_batches": 50}, "group")


class Windows:
    """Stands for the accumulation."""


def test_one_that_comes_later_becomes_a_part_of_the_wrapper_and_is_called_after_the_others():
    first, other, windows = Counts("first"), Counts("other"), Windows()
    extensions = Extensions([first])
    extensions.attach(windows, "inner")
    later = extensions.ensure(Silent)
    assert extensions.ensure(Silent) is later and extensions.ensure(Counts) is first
    before = extensions.snapshot()
    extensions.add([other])
    assert all(e.inner == "inner" and isinstance(e.accumulation, Windows) for e in (first, later, other))
    assert extensions.micro_batch_counted == (first.micro_batch_counted, other.micro_batch_counted)
    assert extensions.saved == {"first": first, "silent": later, "other": other}
    other.micro_batches = 3
    extensions.roll_back(before)  # to when it was not there
    assert other.micro_batches == 3


def test_an_interrupt_while_an_event_is_looked_up_leaves_nothing_behind():
    class Interrupted(list):
        def append(self, event):
            raise KeyboardInterrupt

    sleeps = Counts("one")
    sleeps.asleep = True
    extensions = Extensions([sleeps])
    extensions._listeners = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        extensions.micro_batch_counted  # noqa: B018
    extensions._listeners = []
    extensions.wake(sleeps)
    assert extensions.micro_batch_counted == (sleeps.micro_batch_counted,)
