"""Changes of parameters that are refused, or come when something is wrong: nothing is lost."""

import copy
import math

import fusedaccum as fa
import pytest
import torch
from torch.nn import Parameter
from training import assert_same_parameters, big_batch_step, data, mean_loss, model, sgd, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")


def test_a_parameter_that_cannot_be_taken_is_refused_before_anything_changes():
    net, plain = model(), model()
    opt = wrapped(net, 1)
    x, y = data()
    before = opt.param_groups
    with pytest.raises(ValueError, match="complex"):
        opt.param_groups = [{**before[0], "params": [Parameter(torch.zeros(2, dtype=torch.complex64))]}]
    assert opt.param_groups is before
    mean_loss(net, x, y).backward()
    opt.step()
    big_batch_step(plain, sgd(plain.parameters()), x, y)
    assert_same_parameters(net, plain, 1e-12)


@pytest.mark.parametrize("change", ["removed", "last removed", "reversed"])
def test_groups_that_were_changed_in_place_are_refused_until_they_are_assigned(change):
    """Norms would include what nothing steps, and checkpoints know parameters by their places."""
    params = [Parameter(torch.full((3,), float(i + 1))) for i in range(3)]
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([{"params": [p]} for p in params], lr=0.5), 1, max_grad_norm=math.inf
    )
    if change == "removed":
        del opt.param_groups[0]
    elif change == "last removed":
        opt.param_groups.pop()
    else:
        opt.param_groups.reverse()
    for call in (opt.step, opt.flush, opt.state_dict, lambda: copy.deepcopy((params, opt))):
        with pytest.raises(
            RuntimeError, match=r"parameter param_groups.*not in its place.*opt.param_groups = opt.param_groups"
        ):
            call()
    opt.param_groups = opt.param_groups
    copy.deepcopy((params, opt))
    left = [p for group in opt.param_groups for p in group["params"]]
    sum((i + 1) * p.sum() for i, p in enumerate(params)).backward()
    opt.step()
    square = sum(3 * (i + 1) ** 2 for i, p in enumerate(params) if any(p is q for q in left))
    torch.testing.assert_close(opt.last_window.grad_norm.item(), math.sqrt(square))


def test_groups_changed_in_place_are_not_lost_in_an_open_window():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    opt.param_groups[0]["params"].reverse()
    with pytest.raises(RuntimeError, match="not in its place"):
        opt.state_dict()
    opt.param_groups[0]["params"].reverse()
    opt.state_dict()
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.updated


def test_a_window_whose_step_broke_off_is_not_lost():
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise MemoryError("no memory")
            return super().step(closure)

    a, b = (Parameter(torch.ones(2)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(Failing([a, b], lr=1.0), 1)
    (a.sum() + b.sum()).backward()
    with pytest.raises(MemoryError):
        opt.step()
    with pytest.raises(RuntimeError, match="after one that an exception broke off"):
        opt.param_groups = [{**opt.param_groups[0], "params": [b]}]
    opt.optimizer.fails = False
    opt.step()
    assert a.tolist() == b.tolist() == [0.0] * 2
    opt.param_groups = [{**opt.param_groups[0], "params": [b]}]


@pytest.mark.parametrize("settings", [{"accum_steps": 1}, {}])
def test_a_step_hook_cannot_take_parameters_away(settings):
    net, (x, y) = model(), data()
    opt = wrapped(net, **settings)

    def prune(*_):
        (group,) = opt.param_groups
        opt.param_groups = [{**group, "params": group["params"][1:]}]

    hook = opt.register_step_post_hook(prune)
    mean_loss(net, x, y).backward()
    with pytest.raises(RuntimeError, match="within a step"):
        opt.step()
    hook.remove()
    opt.step()
    prune()
    before = [p.detach().clone() for p in net.parameters()]
    mean_loss(net, x, y).backward()
    opt.step()
    assert [torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)] == [True] + [False] * 5


@pytest.mark.parametrize("how", ["assigned", "loaded"])
def test_a_traceback_that_is_kept_keeps_nothing_else(how):
    """In a notebook the last error stays, and with it whatever its frames hold."""
    net, (x, y) = model(), data()
    opt = wrapped(net, 1, nonfinite="raise")
    if how == "assigned":
        (mean_loss(net, x, y) * math.nan).backward()
    else:
        net.float().double()
    with pytest.raises((FloatingPointError, RuntimeError)) as kept:
        opt.step()
    if how == "assigned":
        opt.param_groups = [{**opt.param_groups[0], "params": list(net.parameters())[::-1]}]
    else:
        opt.load_state_dict(opt.state_dict())
    plain = twin(net)
    mean_loss(net, x, y).backward()
    opt.step()
    big_batch_step(plain, sgd(plain.parameters()), x, y)
    assert_same_parameters(net, plain, 1e-12)
    assert kept.value.__traceback__ is not None


def test_names_that_no_longer_fit_are_no_names():
    """param_names of an optimizer from named_parameters(), whose parameters alone were changed."""
    net, (x, y) = model(), data()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.named_parameters(), lr=0.1), 1)
    opt.param_groups[0]["params"].pop()
    opt.param_groups = opt.param_groups
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.updated


def test_a_gradient_that_is_held_for_a_parameter_that_leaves_is_left_out():
    stays, leaves = (Parameter(torch.zeros(1)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([stays, leaves], lr=1.0), nonfinite="skip_micro_batch")
    with opt.micro_batch():
        (stays + leaves).sum().backward()
        opt.param_groups = [{**opt.param_groups[0], "params": [stays]}]
        stays.sum().backward()
    opt.step()
    assert (stays.item(), leaves.item(), leaves.grad) == (-2.0, 0.0, None)


def test_what_has_no_hook_cannot_be_unhooked():
    p = Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
    with pytest.raises(KeyError):
        opt._accumulation.collector._queue.unhook(object())
