"""Inner optimizers that do more than step(): they hold another, or have methods of their own."""

import copy
import math
from collections import deque

import fusedaccum as fa
import pytest
import torch
from fusedaccum.ops import memory
from graphs import recorded
from torch.nn import Parameter
from torch.optim import Optimizer
from training import assert_same_parameters, data, masters_of, mean_loss, model, parts, wrapper_of, zeros


class Lookahead(Optimizer):
    """Zhang et al., 2019, as packaged: steps another with the same groups, and has a state, too."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure=None):
        for p in self.base.param_groups[0]["params"]:
            self.state[p].setdefault("slow", p.detach().clone())
        self.base.step()
        for p, entry in self.state.items():
            entry["slow"].lerp_(p.detach(), 0.5)
            p.detach().copy_(entry["slow"])

    def state_dict(self):
        slow = [entry["slow"] for p in self.param_groups[0]["params"] if (entry := self.state.get(p))]
        return {**self.base.state_dict(), "slow": slow}

    def load_state_dict(self, state):
        self.base.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        for p, slow in zip(self.param_groups[0]["params"], state["slow"], strict=False):
            self.state[p] = {"slow": slow.clone()}


class ScheduleFree(Optimizer):
    """Defazio et al., 2024: evaluates at other weights than it trains."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            p.detach().lerp_(z, 0.5).sub_(p.grad, alpha=1e-3)
            z.sub_(p.grad, alpha=1e-2)

    def eval(self):
        for p, entry in self.state.items():
            p.detach().lerp_(entry["z"], -1.0)  # PyTorch wants one dtype here

    def train(self):
        for p, entry in self.state.items():
            p.detach().lerp_(entry["z"], 0.5)


class SAM(Optimizer):
    """Foret et al., 2020: climbs along one gradient, and descends from there along another."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.AdamW(self.param_groups, lr=1e-3)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["was"] = p.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["was"])
        self.base.step()
        self.zero_grad()


def lookahead(parameters):
    return Lookahead(torch.optim.AdamW(parameters, lr=1e-3))


def gradients(net, x, y):
    """The window's gradient, summed in FP32 as a window does it."""
    each = [torch.autograd.grad(mean_loss(net, *part), list(net.parameters())) for part in parts(x, y, (8, 8, 8))]
    return [sum(g.float() for g in of_one) / 3 for of_one in zip(*each, strict=True)]


def oracle(net, make):
    """FP32 copies of the model's parameters and their plain optimizer."""
    copies = [Parameter(p.detach().float()) for p in net.parameters()]
    return copies, make(copies)


def plain_call(call, copies, its):
    for p, g in zip(copies, its, strict=True):
        p.grad = g
    call()


def window(net, x, y, opt):
    for part in parts(x, y, (8, 8, 8)):
        mean_loss(net, *part).backward()
        opt.step()


def assert_rounded(net, opt, copies):
    """Check that the masters are those of plain FP32 training, and the model is them rounded."""
    for p, m in zip(net.parameters(), copies, strict=True):
        torch.testing.assert_close(masters_of(opt)[p].detach(), m.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(p, masters_of(opt)[p].bfloat16())


@pytest.mark.parametrize("stepped_before", [False, True])
def test_masters_of_an_optimizer_inside_another_that_keeps_its_own_state(stepped_before):
    """Its new state used to stay with the masters and its old one with the model.

    So it started over, and had no state_dict().
    """
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    inner = lookahead(net.parameters())
    if stepped_before:
        mean_loss(net, x, y).backward()
        inner.step()
        net.zero_grad()
    copies, plain = oracle(net, lookahead)
    state = copy.deepcopy(inner.state_dict())
    plain.load_state_dict({**state, "slow": [slow.float() for slow in state["slow"]]})
    opt = fa.AccumulatingOptimizer(inner, 3, master_weights=True)
    for _ in range(3):
        plain_call(plain.step, copies, gradients(net, x, y))
        window(net, x, y, opt)
    assert_rounded(net, opt, copies)
    assert set(inner.base.state) == set(inner.state) == set(net.parameters())
    other = copy.deepcopy(net)
    again = fa.AccumulatingOptimizer(lookahead(other.parameters()), 3, master_weights=True)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    window(net, x, y, opt)
    window(other, x, y, again)
    assert_same_parameters(other, net, 0)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_masters_of_optimizers_in_a_container_inside_another(kind):
    """Their momentum used to start over."""

    class Chained(Optimizer):
        def __init__(self, optimizers):
            super().__init__([{"params": []}], {})
            self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            self.chained = dict(enumerate(optimizers)) if kind is dict else kind(optimizers)

        def step(self, closure=None):
            for optimizer in self.chained.values() if kind is dict else self.chained:
                optimizer.step()

    ps = [Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    each = [torch.optim.SGD([p], lr=1.0, momentum=0.5) for p in ps]
    inner = Chained(each)
    sum(ps).sum().backward()
    inner.step()
    for p in ps:
        p.grad = None
    opt = fa.AccumulatingOptimizer(inner, 1, master_weights=True)
    sum(ps).sum().backward()
    opt.step()
    for p, optimizer in zip(ps, each, strict=True):
        assert (p == -2.5).all()
        assert list(optimizer.state) == [p] and optimizer.state[p]["momentum_buffer"].dtype is torch.float32


def test_methods_of_the_inner_optimizer_work_on_the_masters():
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    copies, plain = oracle(net, ScheduleFree)
    opt = fa.AccumulatingOptimizer(ScheduleFree(net.parameters()), 3, master_weights=True)
    for i in range(4):
        plain_call(plain.step, copies, gradients(net, x, y))
        for part in parts(x, y, (8, 8, 8)):
            mean_loss(net, *part).backward()
            if i == 2:  # inside a window
                opt.eval()
                opt.train()
            opt.step()
        opt.eval()
        plain.eval()
        assert_rounded(net, opt, copies)
        opt.train()
        plain.train()


def test_methods_that_step_step_the_masters():
    """Not the 16-bit model. What they do to the masters' gradients must reach p.grad, too."""
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    copies, plain = oracle(net, SAM)
    opt = fa.AccumulatingOptimizer(SAM(net.parameters()), master_weights=True)
    for _ in range(3):
        for ours, its in ((opt.first_step, plain.first_step), (opt.second_step, plain.second_step)):
            plain_call(its, copies, gradients(net, x, y))
            for part in parts(x, y, (8, 8, 8)):
                mean_loss(net, *part).backward()
            opt.normalize_()
            ours()
            assert all(p.grad is None for p in net.parameters())
        assert_rounded(net, opt, copies)


def test_a_method_that_takes_every_gradient_away_inside_a_counted_window_is_warned_of():
    class Clearing(torch.optim.SGD):
        def clear(self):
            self.zero_grad()

    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Clearing([p], lr=1.0), 2, master_weights=True)
    p.sum().backward()
    opt.step()
    opt.clear()
    with pytest.warns(RuntimeWarning, match="was set to None inside an open window"):
        p.sum().backward()
    opt.step()
    assert opt.last_window.micro_batches == 2 and (p == -0.5).all()


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_a_method_drops_of_a_window_that_the_caller_ends_does_not_count(set_to_none, master_weights):
    class Clearing(torch.optim.SGD):
        def clear(self):
            self.zero_grad(set_to_none)

    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Clearing([p], lr=1.0), master_weights=master_weights)
    opt.backward(p.sum(), weight=3)
    opt.clear()
    opt.backward(2 * p.sum(), weight=1)
    opt.step()
    assert (p == -2).all() and opt.last_window.weight == 1


def test_a_gradient_that_such_a_method_replaces_is_stepped():
    class Signed(torch.optim.SGD):
        def take_signs(self):
            for p in self.param_groups[0]["params"]:
                p.grad = p.grad.sign()

    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Signed([p], lr=1.0), master_weights=True)
    (3 * p).sum().backward()
    opt.take_signs()
    opt.step()
    assert (p == -1).all()


@pytest.mark.parametrize("buffer_device", [None, "cpu"])
def test_methods_that_only_read_may_be_called_between_forward_and_backward(buffer_device):
    """The model was written back to after every call, and autograd refused the backward."""

    class Telling(torch.optim.SGD):
        def learning_rate(self):
            return self.param_groups[0]["lr"]

        def shrink(self, how):
            for p in self.param_groups[0]["params"]:
                how(p).detach().mul_(0.5)

    p, x = Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    opt = fa.AccumulatingOptimizer(Telling([p], lr=0.25), 1, master_weights=True, buffer_device=buffer_device)
    loss = (p * x).sum()
    assert opt.learning_rate() == 0.25
    loss.backward()
    opt.step()
    assert (p == 0.75).all()
    loss = (p * x).sum()
    opt.shrink(lambda p: p.data)  # which autograd does not see in plain PyTorch, either
    assert (p == 0.375).all()
    loss.backward()
    opt.step()
    assert (p == 0.125).all()
    loss = (p * x).sum()
    opt.shrink(lambda p: p)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_methods_may_have_arguments_of_any_name():
    class Swapping(torch.optim.SGD):
        def swap(self, method, *, inner):
            return inner, method

    opt = fa.AccumulatingOptimizer(Swapping([Parameter(torch.ones(3, dtype=torch.bfloat16))]), 1, master_weights=True)
    assert opt.swap(method=1, inner=2) == (2, 1)


def test_what_a_method_that_raises_has_done_reaches_the_model():
    class Raising(torch.optim.SGD):
        def double(self):
            self.param_groups[0]["params"][0].detach().mul_(2)
            raise KeyError("half of it")

    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Raising([p]), 1, master_weights=True)
    with pytest.raises(KeyError, match="half of it"):
        opt.double()
    assert (p == 2).all()


def test_masters_have_the_attributes_of_their_parameters():
    """Some optimizers read them from each parameter (p.lr_mul); masters must have them, too."""

    class Multiplying(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(getattr(p, "lr_mul", 1.0))
            return super().step()

    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    p.lr_mul = 2.0
    opt = fa.AccumulatingOptimizer(Multiplying([p], lr=1.0), 1, master_weights=True)
    for expected in (-2, -5):
        p.sum().backward()
        opt.step()
        assert (p == expected).all()
        p.lr_mul = 3.0


def test_masters_are_frozen_as_their_parameters_are():
    class Trainable(torch.optim.SGD):
        def step(self, closure=None):
            self.trained = [p.requires_grad for p in self.param_groups[0]["params"]]
            return super().step()

    p, q = (Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=trained) for trained in (False, True))
    opt = fa.AccumulatingOptimizer(Trainable([p, q], lr=1.0), 1, master_weights=True)
    for trained in (True, False):
        p.requires_grad_(trained)
        (p + q).sum().backward()
        opt.step()
        assert opt.optimizer.trained == [trained, True]


def test_what_is_set_on_the_wrapper_reaches_the_inner_optimizer():
    """It used to stay on the wrapper, so that Opacus' noise schedulers, for one, had no effect."""

    class Noisy(torch.optim.SGD):
        noise, settings = 1.0, None

        def step(self, closure=None):
            self.seen = self.noise
            return super().step()

    p = Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(Noisy([p], lr=1.0), 1)
    opt.noise = 0.5
    opt.mine = 2
    p.sum().backward()
    opt.step()
    assert opt.noise == opt.seen == 0.5
    assert opt.mine == 2 and not hasattr(opt.optimizer, "mine")
    assert opt.optimizer.settings is None
    opt.optimizer.mine = 3
    opt.mine = 4
    assert opt.mine == 4 and opt.optimizer.mine == 3
    del opt.noise, opt.mine
    assert opt.noise == 1.0 and opt.mine == 3
    with pytest.raises(AttributeError, match="nothing"):
        del opt.nothing


def test_a_subclass_may_set_attributes_before_there_is_an_inner_optimizer():
    class Named(fa.AccumulatingOptimizer):
        def __init__(self, optimizer, name):
            self.name = name
            super().__init__(optimizer, 1)

    assert Named(torch.optim.SGD([Parameter(torch.zeros(3))]), "mine").name == "mine"


class Remembering(Optimizer):
    """Keeps gradients without copying them: in plain PyTorch they survive zero_grad()."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            entry = self.state[p]
            p.sub_(p.grad - 0.5 * entry.get("last", p.grad), alpha=0.1)
            entry["last"] = p.grad
            entry.setdefault("all", []).append(p.grad)


def test_a_wrapper_equals_the_optimizer_that_it_stands_for_and_no_other():
    net, other = model(), torch.optim.SGD(model().parameters())
    inner = torch.optim.SGD(net.parameters())
    opt = fa.AccumulatingOptimizer(inner)
    assert inner in [opt] and opt in [inner] and opt == opt and hash(opt) == hash(inner)
    assert other not in [opt] and opt not in [other, None, "SGD"]
    _, copied = copy.deepcopy((net, opt))
    assert copied not in [opt, inner] and copied.optimizer in [copied]


@pytest.mark.parametrize("settings", [{}, {"accum_steps": 3}, {"accum_steps": 3, "master_weights": True}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_that_the_inner_optimizer_keeps_stay_what_they_were(dtype, settings):
    """The next window's gradients used to be written into them."""
    p, q = (Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2))
    opt, plain = fa.AccumulatingOptimizer(Remembering([p]), **settings), Remembering([q])
    opt.load_state_dict(opt.state_dict())  # gives the inner optimizer a new state dict
    for value in (1.0, 4.0, 2.0):
        for part in (value - 1, value, value + 1):
            (part * p).sum().backward()
            if "accum_steps" in settings:
                opt.step()
        if "accum_steps" not in settings:
            opt.step()
            opt.zero_grad()
        q.grad = torch.full_like(q, value)
        plain.step()
    assert [g[0].item() for g in opt.state[p]["all"]] == [1, 4, 2]
    torch.testing.assert_close(p, q, rtol=2**-6 if dtype is torch.bfloat16 else 1e-12, atol=0)


@pytest.mark.parametrize("without_addresses", [(), ("cpu",)])
@pytest.mark.parametrize("kind", [list, deque, tuple])
def test_gradients_that_the_inner_optimizer_keeps_in_a_container_stay_what_they_were(
    kind, without_addresses, monkeypatch
):
    monkeypatch.setattr(memory, "WITHOUT_ADDRESSES", without_addresses)

    class Collecting(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                entry = self.state[p]
                entry["all"] = kind([*entry.get("all", ()), p.grad])
                entry["group"], self.param_groups[0]["first"] = self.param_groups[0], entry  # a cycle
            return super().step()

    p = Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(Collecting([p], lr=1.0), 1)
    for value in (1, 4, 2):
        (value * p).sum().backward()
        opt.step()
    assert type(opt.state[p]["all"]) is kind
    assert [g[0].item() for g in opt.state[p]["all"]] == [1, 4, 2]


class Extrapolating(Optimizer):
    """Steps with twice the gradient, less that of the last step, which it keeps itself."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            last = self.state[p].get("last")
            p.sub_(0.1 * (p.grad if last is None else 2 * p.grad - last))
            self.state[p]["last"] = p.grad


def test_a_gradient_is_kept_as_it_is_until_the_next_window_begins():
    """Other code that writes to p.grad before the next step() writes to what is kept, too."""
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    for r, opt in ((p, fa.AccumulatingOptimizer(Extrapolating([p]), reduction="none")), (q, Extrapolating([q]))):
        (2 * r).sum().backward()
        opt.step()
        assert opt.state[r]["last"] is r.grad
        r.grad.mul_(3)
        opt.step()
    assert torch.equal(p, q)


def test_a_graph_keeps_the_gradient_that_the_window_before_its_replay_has_left():
    moved = []
    for captured in (False, True):
        p, x, graph = Parameter(torch.ones(3)), torch.ones(3), None
        opt = fa.AccumulatingOptimizer(Extrapolating([p]), 1)

        def window(p=p, x=x, opt=opt):
            (p * x).sum().backward()
            opt.step()

        for number, value in enumerate((1.0, 2.0, 4.0, 7.0, 5.0)):
            x.fill_(value)
            if captured and number == 2:
                graph = recorded(window, None)
            elif graph is not None:
                graph.replay()
            else:
                window()
        moved.append(p.detach())
    assert torch.equal(*moved)


class Again(torch.optim.SGD):
    """Runs a backward of its own inside step(), as kozistr's GSAM does."""

    def step(self, closure=None):
        self.zero_grad()
        with torch.enable_grad():
            self.again()
        return super().step()


@pytest.mark.parametrize(
    "settings", [{"accum_steps": 2}, {"accum_steps": 2, "nonfinite": "raise"}, {"master_weights": True}]
)
def test_a_backward_within_the_inner_step_is_refused_where_it_would_be_the_next_windows(settings):
    p = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(Again([p], lr=1.0), **settings)
    opt.optimizer.again = lambda: p.sum().backward()
    with pytest.raises(RuntimeError, match=r"inside step\(\).*leave out accum_steps"):
        for _ in range(2):
            p.sum().backward()
            opt.step()
    opt.optimizer.again = lambda: None
    opt.zero_grad()
    assert (p == 0).all()


def test_a_backward_within_the_inner_step_of_a_window_that_the_caller_owns():
    p = Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(Again([p], lr=1.0))
    opt.optimizer.again = lambda: (2 * p).sum().backward()
    for _ in range(2):
        p.sum().backward()
        opt.step()
        opt.zero_grad()
    assert (p == -4).all()


def test_groups_that_are_not_fused_any_more():
    """As after loading a state that was not fused: such a step does not divide by grad_scale."""
    p = Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0, fused=True), 2)
    opt.param_groups[0]["fused"] = False
    for _ in range(2):
        p.sum().backward()
        opt.step()
    assert (p == -1).all()


def test_fused_sgd_whose_first_window_is_skipped():
    """PyTorch creates the momentum with empty_like, and does not fill it when found_inf is set."""
    p = zeros(300)
    opt = wrapper_of(
        [p], nonfinite="skip_window", make=lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=0.9, fused=True)
    )
    (p * math.inf).sum().backward()
    opt.step()
    assert not opt.updated
    p.sum().backward()
    opt.step()
    assert opt.updated and p.eq(-1).all()


class Showing(torch.optim.Optimizer):
    """Steps another optimizer, and forwards all attributes to it."""

    def __init__(self, optim):
        self.optim = optim

    def __getattr__(self, name):
        return getattr(self.optim, name)

    def step(self, closure=None):
        return self.optim.step(closure)


def test_an_optimizer_round_a_fused_one_gets_the_finished_gradient():
    """It used to get the undivided sum, with a grad_scale that the fused optimizer never saw."""
    p = zeros()
    opt = wrapper_of([p], 4, make=lambda ps: Showing(torch.optim.SGD(ps, lr=1.0, fused=True)))
    for _ in range(4):
        p.sum().backward()
        opt.step()
    assert p.item() == -1


def test_one_group_of_a_fused_optimizer_is_not_fused():
    a, b = zeros(3), zeros(3)
    groups = [{"params": [a]}, {"params": [b], "fused": False}]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(groups, lr=1.0, fused=True), 4)
    for _ in range(4):
        (a.sum() + b.sum()).backward()
        opt.step()
    assert a.tolist() == b.tolist() == [-1] * 3


def test_groups_and_state_that_are_set_reach_the_inner_optimizer():
    opt = wrapper_of([zeros()], 2)
    for name in ("param_groups", "state"):
        value = copy.copy(getattr(opt, name))
        setattr(opt, name, value)
        assert getattr(opt.optimizer, name) is value and name not in vars(opt)
