"""A checkpoint inside a window that an earlier version has written goes on as it did there."""

import pytest
import torch
from old_checkpoints import resumed


@pytest.mark.parametrize(("kind", "rtol"), [("window", 1e-5), ("masters", 1e-3)])
def test_a_window_goes_on_as_where_it_was_saved(kind, rtol):
    ours, theirs = resumed(kind)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-7)
