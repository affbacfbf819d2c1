"""Accelerate's and the Trainer's own loops on two ranks: they put the model into DDP themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run(which, how, folder):
    out = folder / f"{which}-{how}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).parent / "two_ranks.py"), which, how, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out)


@pytest.mark.parametrize("which", ["accelerate", "trainer"])
def test_a_frameworks_own_loop_on_two_ranks_is_its_big_batch(which, tmp_path):
    norms, ours = run(which, "wrapped", tmp_path)
    their_norms, theirs = run(which, "plain", tmp_path)
    assert norms == pytest.approx(their_norms, rel=1e-5)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_accelerates_loops_that_synchronise_by_hand_are_those_without_the_wrapper(tmp_path):
    norms, ours = run("accelerate_alone", "wrapped", tmp_path)
    their_norms, theirs = run("accelerate_alone", "plain", tmp_path)
    assert norms == pytest.approx(their_norms, rel=1e-5)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
