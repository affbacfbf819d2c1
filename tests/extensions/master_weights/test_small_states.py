"""AdamW with moments in bf16, as docs/memory.md has it, under FP32 masters."""

import ast
import copy
import functools
import re

import fusedaccum as fa
import pytest
import torch
from pages import ROOT
from sizes import limits
from small_states import (
    MASTERS,
    MICRO_BATCHES,
    assert_same,
    by_hand,
    bytes_of_state,
    masters,
    parameters,
    resumed,
    straight,
)
from torch.nn import Parameter

from benchmarks.bf16_moments import AdamWInBF16

OPTIMIZERS = {
    "fused": functools.partial(AdamWInBF16, lr=0.01, fused=True),
    "foreach": functools.partial(AdamWInBF16, lr=0.01, foreach=True),
}
several_parts = limits(STEPPED_CPU=1 << 15)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("settings", MASTERS.values(), ids=MASTERS)
@several_parts
def test_masters_are_those_that_it_steps_by_hand(make, settings):
    ps, opt = straight(make, settings)
    assert_same(masters(opt), by_hand(make))
    assert {opt.state[p][key].dtype for p in ps for key in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}


@pytest.mark.parametrize("settings", MASTERS.values(), ids=MASTERS)
@several_parts
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(settings):
    make = OPTIMIZERS["fused"]
    (ps, went_on), (qs, again) = straight(make, settings), resumed(make, settings)
    assert_same(masters(again), masters(went_on))
    assert_same(qs, ps)
    for p, q in zip(ps, qs, strict=True):
        assert_same(again.state[q].values(), went_on.state[p].values())


@pytest.mark.parametrize("settings", MASTERS.values(), ids=MASTERS)
def test_loaded_state_has_its_16_bits_before_the_first_step(settings):
    make = OPTIMIZERS["fused"]
    _, opt = straight(make, settings)
    again = fa.AccumulatingOptimizer(make(parameters()), MICRO_BATCHES, **settings)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert {entry[key].dtype for entry in again.state.values() for key in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}


@pytest.mark.parametrize("settings", MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_state_that_other_code_casts_is_fp32_again_when_it_is_stepped(kind, settings):
    """Also where PyTorch would take bf16: code that casts all like the model rarely means state."""
    (p,) = parameters(((8,),))
    opt = fa.AccumulatingOptimizer(kind([p]), **settings)
    for _ in range(2):
        opt.backward(p.float().sum())
        opt.step()
        (key,) = opt.state[p].keys() & {"square_avg", "exp_avg_sq"}
        assert opt.state[p][key].dtype == torch.float32
        opt.state[p][key] = opt.state[p][key].bfloat16()


@pytest.mark.parametrize("settings", MASTERS.values(), ids=MASTERS)
def test_its_state_takes_4_bytes_a_parameter(settings):
    assert bytes_of_state(OPTIMIZERS["fused"], settings) == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize(("beta2", "falls"), [(0.95, True), (0.999, False)])
def test_its_second_moment_falls_only_by_more_than_it_is_rounded(beta2, falls):
    """As its page says: a change of 0.1% a step is less than half of the last of 8 bits."""
    p = Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(AdamWInBF16([p], betas=(0.9, beta2)), master_weights="split")
    after = []
    for value in (1.0, *[0.0] * 20):
        opt.backward((p * value).sum())
        opt.step()
        after.append(opt.state[p]["exp_avg_sq"].item())
    expected = beta2**20 if falls else 1
    assert after[-1] / after[0] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"fused": True}])
def test_pytorchs_own_takes_no_bf16_moments_of_fp32_parameters_on_a_cpu(name, how):
    """If this fails, PyTorch has learnt it, and the page's class can go."""
    p = Parameter(torch.ones(4))
    opt = getattr(torch.optim, name)([p], **how)
    p.grad = torch.ones(4)
    opt.step()
    for key in ("exp_avg", "exp_avg_sq"):
        opt.state[p][key] = opt.state[p][key].bfloat16()
    with pytest.raises(RuntimeError, match="BFloat16"):
        opt.step()


def test_the_page_shows_the_class_that_is_tested():
    def classes(code):
        return [ast.dump(node) for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]

    page = (ROOT / "docs/memory.md").read_text()
    shown = [found for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) for found in classes(code)]
    assert shown == classes((ROOT / "benchmarks/bf16_moments.py").read_text())
