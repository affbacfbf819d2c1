"""The calls of our Python functions, and their files, in one plain window. They may only fall."""

import os
import sys
from pathlib import Path

import fusedaccum as fa
import pytest
import torch
from fusedaccum import native

PACKAGE = Path(os.path.realpath(fa.__file__)).parent
# (calls, files)
LIMITS = {"backward": (76, 23), "step inside": (41, 17), "closing step": (108, 26)}


def traced(call):
    """The files of ours whose functions are called, once for each call."""
    files = []

    def profile(frame, event, _):
        path = Path(os.path.realpath(frame.f_code.co_filename))
        if event == "call" and PACKAGE in path.parents:
            files.append(path)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


@pytest.fixture(scope="module")
def window():
    """The files of each part of a window of two micro-batches: two Linear layers, AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW(model.parameters()), accum_steps=2)
    x = torch.randn(4, 8)
    for _ in range(6):
        model(x).mean().backward()
        opt.step()
        opt.zero_grad()
    found = {"backward": traced(model(x).mean().backward), "step inside": traced(opt.step)}
    model(x).mean().backward()
    return found | {"closing step": traced(opt.step)}


@pytest.mark.skipif(bool(native.why_no_hooks()), reason="hooks in Python are calls of ours, too")
@pytest.mark.parametrize("part", LIMITS)
def test_a_plain_window_calls_no_more_than_it_did(window, part):
    calls, files = LIMITS[part]
    assert len(window[part]) <= calls
    assert len(set(window[part])) <= files
