"""Fixtures for the tests that need several ranks."""

import pytest
from worlds import World


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """``worlds(size)``: a World of that many processes, started once."""
    started = {}

    def of(size):
        if size in started and started[size].broken:
            started.pop(size).close()
        if size not in started:
            started[size] = World(size, tmp_path_factory.mktemp("world"))
        return started[size]

    yield of
    for world in started.values():
        world.close()


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def world(worlds, request):
    return worlds(request.param)
