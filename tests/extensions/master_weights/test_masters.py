"""Master weights beside step hooks, the inner optimizer's methods and lists, and earlier state."""

import copy
import gc
import pickle
import weakref

import fusedaccum as fa
import pytest
import torch
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import wrapper_of


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


class Brief(torch.optim.Optimizer):
    """Momentum in 16 bits, whatever the parameter's dtype; what is loaded is made so again."""

    def __init__(self, params, lr=0.125):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.bfloat16))
                momentum.lerp_(p.grad.to(momentum.dtype), 0.25)
                p.sub_(momentum.to(p.dtype), alpha=group["lr"])

    def __setstate__(self, state):
        super().__setstate__(state)
        for entry in self.state.values():
            entry["momentum"] = entry["momentum"].to(torch.bfloat16)


@pytest.mark.parametrize("how", ["add_param_group", "param_groups", "deepcopy", "pickle", "wrapped late", "loaded"])
def test_state_that_an_optimizer_keeps_in_16_bits_stays_so(how):
    torch.manual_seed(0)
    params = [Parameter(torch.randn(8)) for _ in range(2)]
    model = [Parameter(p.detach().bfloat16()) for p in params]
    params = [Parameter(p.detach().float()) for p in model]
    pairs = [(params, Brief(params[:1])), (model, Brief(model[:1]))]
    if how != "wrapped late":
        pairs[1] = model, fa.AccumulatingOptimizer(pairs[1][1], 1, master_weights=True)

    def train(known):
        grads = torch.randn(2, 8).bfloat16()
        for mine, opt in pairs:
            for p, grad in zip(mine[:known], grads, strict=False):
                p.grad = grad.to(p.dtype)
            opt.step()
            opt.zero_grad()

    train(1)
    if how == "wrapped late":
        with torch.no_grad():
            params[0].copy_(model[0].bfloat16())  # what the optimizer alone has rounded
        pairs[1] = model, fa.AccumulatingOptimizer(pairs[1][1], 1, master_weights=True)
    elif how == "loaded":
        for _, opt in pairs:
            inner = getattr(opt, "optimizer", opt)
            inner.load_state_dict(inner.state_dict())
    elif how in ("deepcopy", "pickle"):
        pairs[1] = copy.deepcopy(pairs[1]) if how == "deepcopy" else pickle.loads(pickle.dumps(pairs[1]))
    else:
        for mine, opt in pairs:
            if how == "add_param_group":
                opt.add_param_group({"params": mine[1:]})
            else:
                opt.param_groups = [*opt.param_groups, {"params": mine[1:], "lr": 0.125}]
    known = sum(len(group["params"]) for group in pairs[1][1].param_groups)
    for _ in range(3):
        train(known)
    for p, q in zip(pairs[1][0][:known], params, strict=False):
        assert pairs[1][1].state[p]["momentum"].dtype is torch.bfloat16
        assert torch.equal(p, q.bfloat16())


def test_state_in_lists_tuples_and_dicts_fits_the_masters():
    p, q = Parameter(torch.zeros(3, dtype=torch.bfloat16)), Parameter(torch.zeros(3))
    inner = torch.optim.SGD([p, q], lr=1.0)
    narrow, count = torch.ones(3, dtype=torch.bfloat16), torch.tensor(4)
    for known in (p, q):
        inner.state[known] = {
            "factors": [narrow, (narrow, count)],
            "inner": {"average": narrow, "step": narrow},
            "tag": "a",
        }
    fa.AccumulatingOptimizer(inner, 1, master_weights=True)
    state = inner.state[p]
    first, (second, third) = state["factors"]
    assert first.dtype is second.dtype is state["inner"]["average"].dtype is torch.float32
    assert third is count and state["inner"]["step"] is narrow and state["tag"] == "a"
    assert inner.state[q]["factors"][0] is narrow  # which has no master


def test_overrides_that_are_found_by_id_are_found_before_the_masters_take_the_places():
    """As bitsandbytes does it, in its first step."""

    class Overridden(torch.optim.SGD):
        def check_overrides(self):
            for i, p in enumerate(self.param_groups[0]["params"]):
                if id(p) == chosen:
                    places.add(i)

        def step(self):
            self.check_overrides()
            super().step()

    places = set()
    params = [Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    chosen = id(params[1])
    opt = fa.AccumulatingOptimizer(Overridden(params, lr=1.0), 1, master_weights=True)
    params[0].sum().backward()
    opt.step()
    assert places == {1}


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=2**-4, momentum=0.5),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=2**-4),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=2**-4, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=2**-4, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=2**-4, momentum=0.5, centered=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=2**-4),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=2**-4),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
}


def moments(entry):
    return [name for name, value in entry.items() if isinstance(value, torch.Tensor) and value.dim()]


def made_anew(opt, p):  # as ReLoRA does
    for name in moments(opt.state[p]):
        opt.state[p][name] = torch.zeros_like(p.data)


def filled(opt, p):
    for name in moments(opt.state[p]):
        opt.state[p][name] = torch.full_like(p.data, 0.5)


def a_new_entry(opt, p):
    kept = {name: value for name, value in opt.state[p].items() if name not in moments(opt.state[p])}
    opt.state[p] = kept | {name: torch.zeros_like(p) for name in moments(opt.state[p])}


def popped(opt, p):
    opt.state.pop(p)


def emptied(opt, p):
    opt.state[p] = {}


def all_anew(opt, p):
    fresh = {q: dict(entry) for q, entry in opt.state.items()}
    for name in moments(fresh[p]):
        fresh[p][name] = torch.zeros_like(p.data)
    opt.state.clear()
    opt.state.update(fresh)


WAYS = [made_anew, filled, a_new_entry, popped, emptied, all_anew]


def beside_an_fp32_model(make, **settings):
    """A bf16 model with masters, and an FP32 model of the masters, each with its optimizer."""
    model = [Parameter(torch.randn(5, 3).bfloat16()) for _ in range(3)]
    masters = [Parameter(p.detach().float()) for p in model]
    return [
        (model, fa.AccumulatingOptimizer(make(model), 1, master_weights=True, **settings)),
        (masters, make(masters)),
    ]


def train_both(pairs):
    grads = [torch.randn(5, 3).bfloat16() for _ in pairs[0][0]]
    for parameters, opt in pairs:
        torch.autograd.backward(parameters, [grad.to(p.dtype) for p, grad in zip(parameters, grads)])
        opt.step()
        opt.zero_grad()


def assert_same_training(pairs):
    (model, opt), (masters, oracle) = pairs
    for p, q in zip(model, masters):
        assert torch.equal(p, q.bfloat16())
        assert opt.state[p].keys() == oracle.state[q].keys()
        for name, theirs in oracle.state[q].items():
            if isinstance(theirs, torch.Tensor):
                assert opt.state[p][name].dtype is theirs.dtype and torch.equal(opt.state[p][name], theirs), name
            else:
                assert opt.state[p][name] == theirs, name


@pytest.mark.parametrize(
    ("make", "way"),  # Adagrad's constructor makes its state: in plain PyTorch, too, it must not be taken away
    [(make, way) for make in OPTIMIZERS for way in WAYS if make != "Adagrad" or way not in (popped, emptied)],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_state_that_is_made_anew_like_the_parameter_is_the_masters(make, way):
    pairs = beside_an_fp32_model(OPTIMIZERS[make])
    for _ in range(2):
        train_both(pairs)
    for _ in range(2):
        for parameters, opt in pairs:
            way(opt, parameters[1])
        for _ in range(2):
            train_both(pairs)
            assert_same_training(pairs)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_that_is_there_before_the_first_step_is_the_masters(make):
    pairs = beside_an_fp32_model(OPTIMIZERS[make])
    scratch = [Parameter(torch.randn(5, 3)) for _ in range(3)]
    its = OPTIMIZERS[make](scratch)
    train_both([(scratch, its)] * 2)
    for parameters, opt in pairs:
        for p, like in zip(parameters, scratch):
            opt.state[p] = {
                name: torch.zeros_like(p.data) if name in moments(its.state[like]) else copy.deepcopy(value)
                for name, value in its.state[like].items()
            }
    for _ in range(2):
        train_both(pairs)
        assert_same_training(pairs)


@pytest.mark.parametrize("carried", ["deepcopy", "pickle", "add_param_group", "param_groups", "state_dict"])
def test_state_that_was_made_anew_is_the_masters_whatever_comes_before_the_step(carried):
    pairs = beside_an_fp32_model(OPTIMIZERS["AdamW"])
    train_both(pairs)
    more = torch.randn(5, 3).bfloat16()
    for i, (parameters, opt) in enumerate(pairs):
        made_anew(opt, parameters[1])
        if carried == "deepcopy":
            pairs[i] = copy.deepcopy((parameters, opt))
        elif carried == "pickle":
            pairs[i] = pickle.loads(pickle.dumps((parameters, opt)))
        elif carried == "state_dict":
            opt.load_state_dict(opt.state_dict())
        else:
            parameters.append(Parameter(more.to(parameters[0].dtype)))
            if carried == "add_param_group":
                opt.add_param_group({"params": parameters[-1:]})
            else:
                opt.param_groups = [*opt.param_groups, opt.param_groups[0] | {"params": parameters[-1:]}]
    for _ in range(2):
        train_both(pairs)
        assert_same_training(pairs)


def test_the_inner_optimizers_methods_find_state_that_fits_the_masters():
    class Nudging(torch.optim.SGD):
        @torch.no_grad()
        def nudge(self):
            for p in self.param_groups[0]["params"]:
                p.addcmul_(p, self.state[p]["momentum_buffer"])

    pairs = beside_an_fp32_model(lambda ps: Nudging(ps, lr=2**-4, momentum=0.5))
    train_both(pairs)
    for parameters, opt in pairs:
        filled(opt, parameters[0])
        opt.nudge()
    assert_same_training(pairs)


def test_state_that_an_optimizer_keeps_in_16_bits_stays_so_when_it_is_made_anew():
    pairs = beside_an_fp32_model(Brief)
    train_both(pairs)
    for _ in range(3):
        for parameters, opt in pairs:
            for p in parameters[:2]:
                opt.state[p]["momentum"] = torch.full_like(p.data, 0.5, dtype=torch.bfloat16)
            opt.state.pop(parameters[2])
        train_both(pairs)
        made = {p: opt.state[p]["momentum"] for parameters, opt in pairs for p in parameters}
        train_both(pairs)
        assert all(opt.state[p]["momentum"] is made[p] for parameters, opt in pairs for p in parameters)  # untouched
        assert_same_training(pairs)


def test_a_parameter_that_comes_back_has_the_state_that_its_optimizer_means():
    pairs = beside_an_fp32_model(Brief)
    train_both(pairs)
    with torch.no_grad():
        back = pairs[1][0][0]
        back.copy_(back.bfloat16())  # what is left of a master whose parameter is gone
    for parameters, opt in pairs:
        (group,) = opt.param_groups
        opt.param_groups = [group | {"params": parameters[1:]}]
        opt.param_groups = [group | {"params": [*parameters[1:], parameters[0]]}]
    train_both(pairs)
    assert_same_training(pairs)


def test_a_parameter_that_is_gone_is_freed():
    parameters = [Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    opt = fa.AccumulatingOptimizer(Brief(parameters), 1, master_weights=True)
    sum(p.sum() for p in parameters).backward()
    opt.step()
    opt.param_groups = [opt.param_groups[0] | {"params": parameters[:1]}]
    gone = parameters.pop()
    del opt.state[gone]
    alive = weakref.ref(gone)
    del gone
    gc.collect()
    assert alive() is None


class InBytes(torch.optim.Optimizer):
    """The moving average of signs, in a list of bytes and a scale."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "average" not in state:
                state["average"] = [torch.zeros_like(p, dtype=torch.uint8), torch.ones((), dtype=torch.bfloat16)]
            bytes_, scale = state["average"]
            assert bytes_.dtype is torch.uint8 and scale.dtype is torch.bfloat16
            bytes_.add_((p.grad > 0).to(torch.uint8))
            p.sub_(bytes_.to(p.dtype) * scale, alpha=2**-6)


def test_state_in_bytes_and_lists_stays_what_its_optimizer_made():
    pairs = beside_an_fp32_model(InBytes)
    for _ in range(3):
        train_both(pairs)
        for parameters, opt in pairs:
            opt.state[parameters[1]]["average"] = [x.clone() for x in opt.state[parameters[1]]["average"]]
    for p, q in zip(pairs[0][0], pairs[1][0]):
        assert torch.equal(p, q.bfloat16())


class InLists(torch.optim.Optimizer):
    """Two moments, in a list and a dict."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["moments"] = [torch.zeros_like(p), {"second": torch.zeros_like(p)}]
            first, second = state["moments"][0], state["moments"][1]["second"]
            first.add_(p.grad, alpha=0.3)
            second.add_(first, alpha=0.3)
            p.sub_(second, alpha=2**-6)


@pytest.mark.parametrize("anew", ["first", "second"])
def test_state_in_lists_and_dicts_that_is_made_anew_is_the_masters(anew):
    pairs = beside_an_fp32_model(InLists)
    for _ in range(3):
        train_both(pairs)
        (first, second), (theirs, their_second) = (opt.state[parameters[1]]["moments"] for parameters, opt in pairs)
        assert torch.equal(first, theirs) and torch.equal(second["second"], their_second["second"])  # dtypes, too
        for parameters, opt in pairs:
            p, (first, second) = parameters[1], opt.state[parameters[1]]["moments"]
            fresh = torch.full_like(p.data, 0.3125)
            moments = [fresh, second] if anew == "first" else [first, {"second": fresh}]
            opt.state[p]["moments"] = moments


def test_a_hook_of_every_optimizer_sees_the_model_that_was_stepped():
    p, seen = Parameter(torch.ones(3, dtype=torch.bfloat16)), []
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.5), 1, master_weights=True)
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(p.detach().clone()))
    try:
        p.sum().backward()
        opt.step()
    finally:
        hook.remove()
    assert len(seen) == 1 and torch.equal(seen[0], p.detach()) and (p == 0.5).all()


def test_a_step_between_a_forward_and_its_backward_is_an_error_as_in_plain_pytorch():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), master_weights=True)
    loss = p.square().sum()
    p.sum().backward()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_checkpoint_of_masters_does_not_overwrite_other_weights_loaded_before():
    p = Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = wrapper_of([p], master_weights=True)
    (p * 0.0).sum().backward()
    opt.step()
    q = Parameter(torch.full((4,), 5.0, dtype=torch.bfloat16))
    other = wrapper_of([q], master_weights=True)
    other.load_state_dict(opt.state_dict())
    (q * 0.0).sum().backward()
    other.step()
    assert q.tolist() == [5] * 4


def test_a_window_that_is_left_out_writes_no_masters_over_weights_that_were_loaded_since():
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.5), 1, master_weights=True, nonfinite="skip_window")
    for factor in (1.0, float("inf"), 1.0):
        with torch.no_grad():
            p.fill_(2.0)
        (p * factor).sum().backward()
        opt.step()
        assert opt.updated == (factor == 1.0) and (p == (1.5 if factor == 1.0 else 2.0)).all()


def test_masters_are_compared_with_a_model_only_that_other_code_has_written_to(monkeypatch):
    p, compared = Parameter(torch.ones(3, dtype=torch.bfloat16)), []
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.5), 1, master_weights=True)
    where = torch.where
    monkeypatch.setattr(torch, "where", lambda *args: compared.append(len(compared)) or where(*args))
    for written in (False, False, True, False):
        if written:
            with torch.no_grad():
                p.fill_(2.0)
        p.sum().backward()
        opt.step()
    assert len(compared) == 1 and (p == 1).all()


def test_the_model_follows_masters_where_a_fused_optimizer_decides_on_the_device_whether_it_steps():
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    inner = torch.optim.SGD([p], lr=0.5, momentum=0.5, fused=True)
    opt = fa.AccumulatingOptimizer(inner, 1, master_weights=True, nonfinite="skip_window")
    for factor, after in ((1.0, 0.5), (float("inf"), 0.5), (1.0, -0.25)):
        (p * factor).sum().backward()
        opt.step()
        assert opt.updated == (factor == 1.0) and (p == after).all()
    assert isinstance(opt._accumulation.updated, torch.Tensor)


@pytest.mark.parametrize("settings", [True, "split"])
@pytest.mark.parametrize("reads", [False, True], ids=["step", "param_groups"])
def test_masters_that_an_interrupt_has_left_in_the_optimizers_lists_make_room(settings, reads):
    """Ctrl-C may come in place of the first line that would have put the parameters back."""
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    inner = torch.optim.SGD([p], lr=1.0)
    opt = fa.AccumulatingOptimizer(inner, 1, master_weights=settings)

    def interrupted():
        block = opt._accumulation.inner_steps(opt._sums.buffers.slots)
        block.__enter__()
        assert inner.param_groups[0]["params"][0] is not p
        return block  # which is never left

    left_open = interrupted()
    p.sum().backward()
    if reads:
        assert opt.param_groups[0]["params"][0] is p
    opt.step()
    assert inner.param_groups[0]["params"][0] is p and not p.any()
    del left_open
