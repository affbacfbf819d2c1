"""A checkpoint inside a window that an earlier version has written goes on as it did there."""

import pytest
import torch
from fusedaccum.checkpoint.older import as_now
from old_checkpoints import AFTER, BEFORE, OF, resumed, started, train


@pytest.mark.parametrize(("kind", "rtol"), [("window", 1e-5), ("masters", 1e-3)])
def test_a_window_goes_on_as_where_it_was_saved(kind, rtol):
    ours, theirs = resumed(kind)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-7)


def test_the_noise_scale_goes_on_from_the_window_that_was_open():
    """Its small batch was measured before the checkpoint, and its large one is complete after it."""
    net, opt = started("window")
    saved = torch.load(OF / "window0.pt")
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    train("window", net, opt, range(BEFORE, BEFORE + AFTER), 0)
    whole_net, whole = started("window")
    train("window", whole_net, whole, range(BEFORE + AFTER), 0)
    ours, theirs = opt.last_window.noise_scale, whole.last_window.noise_scale
    assert theirs.isfinite() and ours.item() == pytest.approx(theirs.item(), rel=1e-3)


@pytest.mark.parametrize("overflowed", [False, True])
def test_a_window_that_will_not_be_applied_is_still_known_to_be(overflowed):
    own = torch.load(OF / "window0.pt")["opt"]["fusedaccum"]
    own["window"] |= {"overflowed": overflowed, "unit": 64.0, "unit_lost": overflowed}
    now = as_now(own, 3)
    assert now["window"]["void"] is overflowed
    assert now["loss_scale"] == {"scale": None, "unit": 64.0, "unit_lost": overflowed}
