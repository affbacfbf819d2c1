"""Tests that need a device besides the CPU: a GPU, or a simulated one (late_device.cpp).

They run in a process of their own, because PyTorch can have only one such device and then treats it
as the machine's accelerator.
"""

import late
import pytest
import torch
from sizes import limits


@pytest.fixture(scope="session")
def late_device():
    """The extension module that provides the device "late", or None on a machine with a GPU."""
    return None if torch.cuda.is_available() else late.loaded()


@pytest.fixture
def device(late_device):
    """The device of the test's parameters."""
    torch.manual_seed(0)
    return torch.device("cuda:0" if late_device is None else "late:0")


@pytest.fixture(autouse=True)
def small_stages():
    """Makes stages so small that some gradients need several, and several gradients share one."""
    with limits(STAGE=1024, bucket=3000):
        yield
