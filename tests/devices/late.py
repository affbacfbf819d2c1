"""A device made for tests, "late": late_device.cpp, and what torch asks of a device."""

import contextlib
import functools
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent


@functools.cache
def loaded():
    """The extension module, which this process has as its only device from now on."""
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
    # It has no random numbers of its own.
    as_torch_has_it.manual_seed_all = as_torch_has_it.set_rng_state = lambda seed: None
    as_torch_has_it.get_rng_state = lambda: None
    torch._register_device_module("late", as_torch_has_it)
    return module
