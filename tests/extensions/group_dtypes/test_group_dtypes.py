"""``buffer_dtype`` in the optimizer's groups: some gradients accumulate in another dtype."""

import copy

import fusedaccum as fa
import pytest
import torch
from torch.nn import Parameter

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def made(groups, dtype=BF16, **settings):
    """A wrapper of one parameter for each group; an empty dict for one that asks for nothing."""
    ps = [Parameter(torch.zeros(5, dtype=dtype)) for _ in groups]
    inner = torch.optim.SGD([{"params": [p], **group} for p, group in zip(ps, groups, strict=True)], lr=1.0)
    return ps, fa.AccumulatingOptimizer(inner, 3, **settings)


def window(ps, opt, values=(256.0, 1.0, 1.0)):
    for value in values:
        opt.backward(sum((p.float() * value).sum() for p in ps))
        opt.step()
    return [p.grad for p in ps]


def dtypes(ps, opt):
    return [opt._sums.buffers.of[p].dtype for p in ps]


def test_each_group_has_its_own():
    ps, opt = made([{"buffer_dtype": BF16}, {}, {"buffer_dtype": None}, {"buffer_dtype": torch.float64}])
    window(ps, opt, (1.0,))
    assert dtypes(ps, opt) == [BF16, FP32, BF16, torch.float64]


def test_the_wrappers_dtype_is_that_of_the_others():
    ps, opt = made([{}, {"buffer_dtype": FP32}], buffer_dtype=BF16)
    window(ps, opt, (1.0,))
    assert dtypes(ps, opt) == [BF16, FP32]


def test_sums_are_those_of_a_wrapper_with_that_dtype():
    """16-bit buffers hold a running mean here, too, and so cannot overflow."""
    for dtype, narrow in ((BF16, BF16), (FP16, FP16)):
        values = (256.0, 1.0, 1.0) if dtype is BF16 else (60000.0, 60000.0, 100.0)
        found = window(*made([{"buffer_dtype": narrow}, {}], dtype), values)
        alone = [window(*made([{}], dtype, buffer_dtype=of), values)[0] for of in (narrow, FP32)]
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
        assert torch.isfinite(found[0]).all()


def test_a_group_that_comes_later_may_ask_too():
    ps, opt = made([{}])
    late = Parameter(torch.zeros(5, dtype=FP16))
    opt.add_param_group({"params": [late], "buffer_dtype": FP16})
    window([*ps, late], opt, (60000.0, 60000.0, 100.0))
    assert dtypes([*ps, late], opt) == [FP32, FP16] and torch.isfinite(late.grad).all()


def test_rounding_is_for_the_groups_that_have_16_bits():
    ps, opt = made([{"buffer_dtype": BF16}, {}], rounding="compensated")
    narrow, wide = window(ps, opt, (256.0, 0.5, 0.5))
    assert torch.equal(narrow, wide.to(BF16))
    ps, opt = made([{"buffer_dtype": BF16}, {}], rounding="stochastic")
    window(ps, opt)
    assert dtypes(ps, opt) == [BF16, FP32]


def test_masters_of_either_kind_of_sum():
    ps, opt = made([{"buffer_dtype": BF16}, {}], rounding="compensated", master_weights="split")
    window(ps, opt, (256.0, 0.5, 0.5))
    assert torch.equal(ps[0], ps[1])
    assert dtypes(ps, opt) == [BF16, FP32]


def test_another_wrapper_of_the_same_groups_has_the_same():
    ps, opt = made([{"buffer_dtype": BF16}, {}])
    again = fa.AccumulatingOptimizer(opt.optimizer, 3)
    window(ps, again, (1.0,))
    assert dtypes(ps, again) == [BF16, FP32]


def test_an_open_window_goes_on():
    ps, opt = made([{"buffer_dtype": BF16}, {}])
    window(ps, opt, (256.0,))
    qs, other = made([{"buffer_dtype": BF16}, {}])
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for a, b in zip(window(ps, opt, (1.0, 1.0)), window(qs, other, (1.0, 1.0)), strict=True):
        assert torch.equal(a, b)
    window(ps, opt, (1.0,))
    for others in ([{"buffer_dtype": FP32}, {}], [{}, {}], [{"buffer_dtype": BF16}, {"buffer_dtype": FP32}]):
        differing = next(g for g in (0, 1) if others[g] != [{"buffer_dtype": BF16}, {}][g])
        with pytest.raises(ValueError, match=rf"inside a window with param_groups\[{differing}\]\['buffer_dtype'\]="):
            made(others)[1].load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ({"buffer_dtype": "bf16"}, {}, r"param_groups\[0\]\['buffer_dtype'\] must be one of .*got 'bf16'"),
        ({"buffer_dtype": torch.int8}, {}, "must be one of"),
        ({"buffer_dtype": BF16}, {"master_weights": True}, "needs FP32 gradients, but in the group of parameter"),
        ({"buffer_dtype": FP32}, {"rounding": "compensated"}, "is for bf16 buffers"),
    ],
)
def test_what_does_not_work_is_refused(group, settings, message):
    with pytest.raises(ValueError, match=message):
        made([group], **settings)


@pytest.mark.parametrize("masters", [False, True])
def test_a_later_group_that_does_not_work_is_refused_and_not_added(masters):
    ps, opt = made([{}], master_weights=masters)
    if masters:
        with pytest.raises(ValueError, match="needs FP32 gradients"):
            opt.add_param_group({"params": [Parameter(torch.zeros(2, dtype=BF16))], "buffer_dtype": BF16})
    with pytest.raises(ValueError, match="must be one of"):
        opt.add_param_group({"params": [Parameter(torch.zeros(2, dtype=BF16))], "buffer_dtype": "bf16"})
    assert len(opt.param_groups) == 1
    window(ps, opt)
