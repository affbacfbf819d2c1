"""Tests that need a device besides the CPU: a GPU, or a simulated one (late_device.cpp).

They run in a process of their own, because PyTorch can have only one such device and then treats it
as the machine's accelerator.
"""

import contextlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sizes import limits
from torch.utils import cpp_extension

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def late_device():
    """The extension module that provides the device "late", or None on a machine with a GPU."""
    if torch.cuda.is_available():
        return None
    torch.utils.rename_privateuse1_backend("late")
    build = HERE.parents[1] / "build" / f"late_device-torch-{torch.__version__}"
    build.mkdir(parents=True, exist_ok=True)
    module = cpp_extension.load("late_device", [str(HERE / "late_device.cpp")], build_directory=str(build))
    as_torch_has_it = ModuleType("torch.late")
    as_torch_has_it.is_available = lambda: True
    as_torch_has_it.device_count = lambda: 2
    as_torch_has_it.current_device = module.current_device
    as_torch_has_it._is_in_bad_fork = lambda: False
    as_torch_has_it.get_amp_supported_dtype = lambda: [torch.bfloat16]
    as_torch_has_it.device = lambda index: contextlib.nullcontext()
    as_torch_has_it.manual_seed_all = as_torch_has_it.set_rng_state = lambda seed: (
        None
    )  # it has no random numbers of its own
    as_torch_has_it.get_rng_state = lambda: None
    torch._register_device_module("late", as_torch_has_it)
    return module


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
