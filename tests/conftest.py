"""Fixtures that every test may use."""

import functools
import gc
import importlib
import importlib.util

import fusedaccum.modules
import pytest
import torch
from fusedaccum.ops import backends
from graphs import compile_anew
from sizes import limits

if backends.INTERPRETED:
    from triton.runtime import interpreter

    patched = set()

    def call_device_function(function, *args, **kwargs):
        """Triton's own patches its whole language at every call: half of these tests' time.

        The calling kernel has patched it already, but for what only the function's module sees.
        """
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_device_function


COUNT_FROZEN = gc.get_freeze_count


def freeze_imports():
    """What has been imported is no garbage, and no test's model.

    Neither the collector nor a wrapper, which searches all modules alive at its first window's end,
    need go through a million objects, or count them. That took half of the tests' time.
    """
    gc.collect()
    gc.freeze()
    fusedaccum.modules._FROZEN_BEFORE = COUNT_FROZEN()
    gc.get_freeze_count = functools.partial(int, fusedaccum.modules._FROZEN_BEFORE)


def pytest_collection_finish():
    freeze_imports()


@pytest.fixture
def freeze():
    """``gc.freeze()``, as before a long training: the collector no longer sees what is there."""
    gc.get_freeze_count = COUNT_FROZEN
    yield gc.freeze
    gc.unfreeze()
    freeze_imports()


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that in the end no process waits for one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def cpu():
    """The native CPU extension; after the test it has its former instruction set again."""
    if importlib.util.find_spec("fusedaccum._cpu") is None:
        pytest.skip("the extension fusedaccum._cpu was not built")
    module = importlib.import_module("fusedaccum._cpu")
    before = module.capability()
    yield module
    module.set_capability(before)


@pytest.fixture(params=["native", "python"])
def each_intake(request, monkeypatch):
    """Runs the test twice: wrappers take gradients by hooks in C++, then by those in Python."""
    if request.param == "native" and importlib.util.find_spec("fusedaccum._intake") is None:
        pytest.skip("the extension fusedaccum._intake was not built")
    monkeypatch.setenv("FUSEDACCUM_INTAKE", request.param)
    return request.param


@pytest.fixture
def small_buckets():
    """A bucket holds one gradient or a few, so that backward adds as it goes."""
    with limits(bucket=100):
        yield


@pytest.fixture
def threads():
    """``threads(n)`` sets PyTorch's number of threads for the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """One thread, for small tensors: more would only wait for each other."""
    threads(1)


@pytest.fixture
def compiled_anew():
    """Forgets what earlier tests have compiled."""
    compile_anew()
