"""A checkpoint inside a window that an earlier version has written goes on as it did there."""

import fusedaccum as fa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fusedaccum.older_checkpoints import as_now
from old_checkpoints import AFTER, BEFORE, OF, resumed, started, train


@pytest.mark.parametrize(("kind", "rtol"), [("window", 1e-5), ("masters", 1e-3)])
def test_a_window_goes_on_as_where_it_was_saved(kind, rtol):
    ours, theirs = resumed(kind)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-7)


def test_the_noise_scale_goes_on_from_the_window_that_was_open():
    """Its small batch was measured before the checkpoint; its large one is complete after it."""
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


def distributed_state():
    p = torch.nn.Parameter(torch.ones(4))
    return p, fa.AccumulatingOptimizer(torch.optim.AdamW([p], lr=0.1), 3, noise_scale=0.5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_a_distributed_state_of_an_open_window_goes_on():
    """Five micro-batches of losses (1 + i) * sum(p) had run; nothing else moved p."""
    path = OF.parent / "6c1f5ed/dcp"
    (p, opt), (q, whole) = distributed_state(), distributed_state()
    dcp.load({"opt": fa.DistributedState(opt, path)}, checkpoint_id=path)
    assert opt.progress == {"window": 1, "micro_batch": "2/3"}
    for i in range(6):
        whole.backward((q * (1 + i)).sum())
        whole.step()
        whole.zero_grad()
        if i == 2:
            p.data.copy_(q.data)
    opt.backward((p * 6).sum())
    opt.step()
    torch.testing.assert_close(p, q)
    assert opt.last_window.loss.item() == pytest.approx(whole.last_window.loss.item())
    torch.testing.assert_close(opt.last_window.noise_scale, whole.last_window.noise_scale, equal_nan=True)


def test_a_micro_batch_that_was_open_in_format_4_goes_on():
    """Gradients of 1 to 5 were in a window of 3. The last was judged; its step() was to come."""
    saved = torch.load(OF.parent / "684b957/micro_batch.pt")
    assert saved["opt"]["fusedaccum"]["format"] == 4
    (p, opt), (q, whole) = (
        (p, fa.AccumulatingOptimizer(torch.optim.AdamW([p], lr=0.1), 3, nonfinite="skip_micro_batch"))
        for p in (torch.nn.Parameter(saved["p"].clone()), torch.nn.Parameter(torch.ones(4)))
    )
    opt.load_state_dict(saved["opt"])
    with pytest.raises(RuntimeError, match="must see a whole micro-batch"):
        (p * 9).sum().backward()
    for i in range(6):
        whole.backward((q * (1 + i)).sum())
        whole.step()
    opt.step()
    opt.backward((p * 6).sum())
    opt.step()
    assert torch.equal(p, q)
    assert opt.last_window.loss.item() == pytest.approx(sum((1 + i) * 4 * saved["p"][0].item() for i in (3, 4, 5)) / 3)


def test_a_micro_batch_that_was_open_in_format_5_is_rounded_as_where_it_was_saved():
    """A micro-batch of weight 2 was in, and a part of one of weight 3.

    The rest of that, and one of weight 1, had followed.
    """
    saved = torch.load(OF.parent / "57349e1/rounding.pt")
    params = [torch.nn.Parameter(p) for p in saved["params"]]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD(params, lr=1.0), 3, buffer_dtype=None, rounding="stochastic", backend="reference"
    )
    opt.load_state_dict(saved["opt"])
    for value, weight in ((0.11, 3), (0.01, 1)):
        opt.backward(sum((p * value).float().sum() for p in params), weight=weight)
        opt.step()
    assert all(map(torch.equal, params, saved["after"]))
