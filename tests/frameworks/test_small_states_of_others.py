"""The optimizers of torchao and bitsandbytes whose state has 8 or 4 bits, under FP32 masters."""

import bitsandbytes
import pytest
import torchao.optim
from sizes import limits
from small_states import MASTERS, assert_same, by_hand, bytes_of_state, masters, resumed, straight

# Each with its bytes of state a parameter. torchao's compilation takes most of the time here.
OPTIMIZERS = {
    "torchao, 8 bits": (torchao.optim.AdamW8bit, 2),
    "torchao, 4 bits": (torchao.optim.AdamW4bit, 1),
    "torchao, FP8": (torchao.optim.AdamWFp8, 2),
    "bitsandbytes, 8 bits": (bitsandbytes.optim.AdamW8bit, 2),
    "bitsandbytes, Lion in 8 bits": (bitsandbytes.optim.Lion8bit, 1),
}


def made(kind, in_parts):
    def make(ps):
        opt = kind(ps, lr=0.01)
        opt.steps_each_alone = in_parts
        return opt

    return make


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("settings", MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@limits(STEPPED_CPU=1 << 15)
def test_masters_are_those_that_it_steps_by_hand_and_a_run_goes_on_to_the_bit(name, settings, in_parts):
    make = made(OPTIMIZERS[name][0], in_parts)
    ps, opt = straight(make, settings)
    assert_same(masters(opt), by_hand(make))
    qs, again = resumed(make, settings)
    assert_same(masters(again), masters(opt))
    assert_same(qs, ps)


@pytest.mark.parametrize("settings", MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_its_state(name, settings):
    kind, each = OPTIMIZERS[name]
    assert bytes_of_state(made(kind, False), settings) == pytest.approx(each, rel=0.1)
