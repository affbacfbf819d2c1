"""How things are divided into parts of a limited size."""

import pytest
from fusedaccum.limits import in_parts


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([2, 2, 4], [[2, 2], [4]]),  # a part may be full
        ([2, 3, 1], [[2], [3, 1]]),
        ([9, 1, 9], [[9], [1], [9]]),  # what is too large is a part of its own
    ],
)
def test_parts_are_as_large_as_they_may_be(sizes, parts):
    assert list(in_parts(sizes, lambda size: size, 4)) == parts
