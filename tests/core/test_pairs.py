"""Every two features at once. The pairs are those of ``features.py``."""

import itertools

import pytest
from fusedaccum.features import FEATURES
from pairs import ON, check

ELSEWHERE = {
    "EvaluatedWindows",  # LBFGS runs its windows inside step(): test_closures
    "CpuOffload",  # needs another device: tests/devices/test_pairs_there
    "DataParallel",  # needs other ranks: tests/distributed
    "GroupDtypes",  # does nothing unless a group asks: test_group_dtypes
    "StepAgain",  # only in windows without weights: test_drop_in
    "KeptGradients",  # of optimizers that are not PyTorch's: test_inner_optimizers
    *("BatchNormsLeftOut", "ChangingParameters", "InnerGuard", "LoopWarnings"),  # look on in each of these pairs
}
REFUSED = {
    *(("SkipMicroBatch", "MainGrads"), ("Raise", "MainGrads")),  # the first do not see those layers' gradients
    *itertools.product(
        ("RunningMeans", "RandomRounding"), ("MasterWeights", "SplitMasters", "CpuOptimizer")
    ),  # which take FP32 gradients
    ("LowParts", "MasterWeights"),
    ("SplitMasters", "CpuOptimizer"),
}


def test_every_feature_can_be_turned_on_here():
    assert set(ON) | ELSEWHERE == {feature.__name__ for _, feature in FEATURES}


def pairs():
    for one, other in itertools.combinations(ON, 2):
        same = ON[one].settings.keys() & ON[other].settings.keys()
        if not same and (one, other) not in REFUSED:
            yield one, other


@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_a_window_of_two_features_ends_with_the_big_batchs_step(one, other):
    check(ON[one], ON[other])
