"""Buffers, or the optimizer, in CPU memory beside every other feature."""

import pytest
from pairs import ON, On, check

REFUSED = {
    *("LossScale", "MainGrads"),  # which look for gradients in p.grad, or at the buffers
    *("LowParts", "SplitMasters", "CpuOptimizer"),  # for memory on the device
    "FusedOptimizers",  # there are none for the device made for tests
}


@pytest.mark.parametrize("other", sorted(ON.keys() - REFUSED))
def test_a_window_of_another_feature_ends_with_the_big_batchs_step(device, other):
    if other == "BatchNormStats" and device.type == "late":
        pytest.skip("BatchNorm's running statistics do not change on this device, in plain PyTorch either")
    check(On({"buffer_device": "cpu"}), ON[other], device)


REFUSED_AWAY = {
    *("RunningMeans", "RandomRounding"),  # 16-bit gradients
    *("SplitMasters", "CpuOptimizer"),
    "FusedOptimizers",  # do not divide for themselves there: test_cpu_optimizer
}


@pytest.mark.parametrize("other", sorted(ON.keys() - REFUSED_AWAY))
def test_a_window_of_another_feature_whose_optimizer_is_on_the_cpu(device, other):
    if other == "BatchNormStats" and device.type == "late":
        pytest.skip("BatchNorm's running statistics do not change on this device, in plain PyTorch either")
    check(ON["CpuOptimizer"], ON[other], device)
