"""Master weights beside step hooks, the inner optimizer's own methods and lists, and state that was there before."""

import fusedaccum as fa
import pytest
import torch
from torch.nn import Parameter


class Telling(torch.optim.SGD):
    def learning_rate(self):
        return self.param_groups[0]["lr"]


@pytest.mark.parametrize("calls", [lambda opt: opt.state_dict(), lambda opt: opt.learning_rate()])
def test_a_step_hook_may_call_the_wrapper_while_masters_are_at_work(calls):
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Telling([p], lr=2**-10), 1, master_weights=True)
    opt.register_step_pre_hook(lambda *_: calls(opt) and None)
    for _ in range(4):
        p.sum().backward()
        opt.step()
    assert (p == 1 - 2**-8).all()  # the model alone would have stayed at 1


def test_methods_leave_p_grad_what_it_is():
    p, q = Parameter(torch.ones(3, dtype=torch.bfloat16)), Parameter(torch.ones(3))
    opt = fa.AccumulatingOptimizer(Telling([p, q], lr=1.0), 2, master_weights=True)
    for _ in range(2):
        (p.float() + q).sum().backward()
        before = p.grad, q.grad
        assert opt.learning_rate() == 1.0
        assert p.grad is before[0] and q.grad is before[1]
        opt.step()
    assert (p == 0).all() and (q == 0).all()


def test_a_gradient_that_a_step_pre_hook_replaces_is_stepped():
    def signs(optimizer, args, kwargs):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad.sign()

    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, master_weights=True)
    opt.register_step_pre_hook(signs)
    (3 * p).sum().backward()
    opt.step()
    assert (p == -1).all()


def test_a_models_own_weights_win_over_loaded_masters():
    """The model may have been loaded before it was wrapped, from elsewhere."""
    p, q = (Parameter(torch.full((3,), value, dtype=torch.bfloat16)) for value in (1.0, 3.0))
    state = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 1, master_weights=True).state_dict()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([q], lr=1.0), 1, master_weights=True)
    opt.load_state_dict(state)
    q.sum().backward()
    opt.step()
    assert (q == 2).all()


def test_masters_leave_state_alone_that_is_no_float():
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    inner = torch.optim.SGD([p], lr=1.0)
    inner.state[p] = {"count": torch.tensor(2**24 + 1), "mask": torch.tensor([True, False, True])}
    opt = fa.AccumulatingOptimizer(inner, 1, master_weights=True)
    entry = opt.state[p]
    assert entry["count"].dtype is torch.int64 and entry["count"] == 2**24 + 1 and entry["mask"].dtype is torch.bool


def test_masters_are_in_the_list_that_the_inner_optimizer_keeps():
    class Keeping(torch.optim.Optimizer):
        """As LBFGS does."""

        def __init__(self, parameters):
            super().__init__(parameters, {})
            self._params = self.param_groups[0]["params"]

        @torch.no_grad()
        def step(self, closure=None):
            for p in self._params:
                p.sub_(p.grad, alpha=2**-10)

    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Keeping([p]), 1, master_weights=True)
    for _ in range(4):
        p.sum().backward()
        opt.step()
    assert (p == 1 - 2**-8).all()
