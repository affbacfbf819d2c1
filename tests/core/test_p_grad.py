"""What p.grad holds when; how zero_grad, normalize_, hooks or user code clear or change it."""

import warnings

import fusedaccum as fa
import pytest
import torch
from torch import nn
from training import (
    assert_grads,
    assert_same_parameters,
    big_batch_step,
    data,
    gradient,
    grads,
    mean_loss,
    model,
    parts,
    sgd,
    twin,
    wrapped,
)


def test_p_grad_is_the_running_sum_then_the_windows_gradient():
    net, (x, y) = model(), data()
    batches = parts(x, y, (4, 8, 12))
    each = [gradient(net, *batch) for batch in batches]
    big = gradient(net, x, y)
    opt = wrapped(net, 3)
    total = [torch.zeros_like(p) for p in net.parameters()]
    for i, batch in enumerate(batches):
        n = len(batch[0])
        opt.backward(mean_loss(net, *batch), weight=n)
        total = [t + n * g for t, g in zip(total, each[i], strict=True)]
        assert_grads(net, total)
        opt.step()
        if i < 2:
            opt.zero_grad()  # must not drop anything
            assert_grads(net, total)
    assert_grads(net, big)  # stays readable until the next micro-batch
    opt.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_window_starts_anew_without_zero_grad():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    for _ in range(3):
        for xs, ys in parts(x, y, (12, 12)):
            mean_loss(net, xs, ys).backward()
            opt.step()
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_normalize_makes_p_grad_the_windows_gradient_to_clip_by_hand():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 3), sgd(big.parameters())
    for i, (xs, ys) in enumerate(parts(x, y, (4, 8, 12))):
        opt.backward(mean_loss(net, xs, ys), weight=len(xs))
        if i == 2:
            opt.normalize_()
            assert_grads(net, gradient(big, x, y))
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        opt.step()
    plain.zero_grad()
    mean_loss(big, x, y).backward()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(big.parameters(), 0.05), norm)
    plain.step()
    assert_same_parameters(net, big, 1e-12)


def test_backward_after_normalize_still_counts_right():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net), sgd(big.parameters())
    first, second = parts(x, y, (12, 12))
    mean_loss(net, *first).backward()
    opt.normalize_()
    mean_loss(net, *second).backward()
    opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_backward_after_normalize_that_reaches_some_parameters_and_then_all(owned):
    """The last gradients share a bucket, though normalize_() left a mean in only one buffer."""
    a, c = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, c], lr=1.0), None if owned else 2)
    ones = torch.ones(2, dtype=torch.float64)
    (a * ones).sum().backward()
    if not owned:
        opt.step()
    (a * ones).sum().backward()
    opt.normalize_()
    (c * ones).sum().backward()
    ((a * ones).sum() + (c * ones).sum()).backward()
    torch.testing.assert_close(torch.stack([a.grad, c.grad]), torch.stack([3 * ones, 2 * ones]))
    opt.step()
    micro_batches = 4 if owned else 2
    torch.testing.assert_close(torch.stack([a, c]), torch.stack([-3 * ones, -2 * ones]) / micro_batches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("owned", [True, False], ids=["caller-owned", "counted"])
def test_a_gradient_put_in_by_hand_after_normalize_is_the_windows(owned, dtype):
    used, unused, late = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([used, unused, late], lr=1.0), None if owned else 4, buffer_dtype=None
    )
    for window in range(2):
        for number in range(4):
            (used * 2).sum().backward()
            if not owned and number < 3:
                opt.step()
        opt.normalize_()
        for p in (used, unused):
            p.grad = torch.full_like(p, 0.5) if p.grad is None else p.grad + 0.5
        opt.state_dict()  # looks at p.grad
        late.grad = torch.full_like(late, 0.25)
        opt.step()
        for p, expected in ((used, 2.5), (unused, 0.5), (late, 0.25)):
            assert torch.equal(p, torch.full_like(p, -expected * (window + 1)))
    opt.zero_grad()
    unused.grad = torch.full_like(unused, 8.0)  # in the next window, it is a sum
    for _ in range(1 if owned else 4):
        opt.step()
    assert torch.equal(unused, torch.full_like(unused, -1.0 - (8.0 if owned else 2.0)))


@pytest.mark.parametrize("between", [True, False], ids=["after normalize_()", "as a sum"])
def test_a_backward_after_normalize_takes_what_was_put_in_by_hand_as_a_mean(between):
    used, unused = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    for _ in range(3):
        (used * 2).sum().backward()
    opt.normalize_()
    if between:
        unused.grad = torch.ones(3)  # the mean of three
        used.sum().backward()
    else:
        used.sum().backward()
        unused.grad = torch.ones(3)  # p.grad is a sum again
    opt.step()
    assert torch.equal(used, torch.full((3,), -7 / 4))
    assert torch.equal(unused, torch.full((3,), -3 / 4 if between else -1 / 4))


@pytest.mark.parametrize("nothing", [0, torch.tensor(0)], ids=["number", "tensor"])
def test_normalize_of_a_window_without_weight_shows_that_nothing_was_added(nothing):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net), sgd(big.parameters())
    opt.backward(mean_loss(net, x, y), weight=nothing)
    opt.normalize_()
    assert_grads(net, [torch.zeros_like(p) for p in net.parameters()])
    opt.backward(mean_loss(net, x, y), weight=len(x))
    opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_normalize_inside_a_micro_batch_is_refused_for_its_gradients_may_be_held_still():
    net, (x, y) = model(), data()
    big = twin(net)
    opt = wrapped(net, 1, nonfinite="skip_micro_batch")
    with opt.micro_batch(weight=len(x)):
        mean_loss(net, x, y).backward()
        with pytest.raises(RuntimeError, match=r"normalize_\(\) was called inside `with opt.micro_batch\(\)`"):
            opt.normalize_()
    opt.normalize_()
    mean_loss(big, x, y).backward()
    for p, q in zip(net.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-15)


def test_normalize_before_the_end_is_refused():
    net, (x, y) = model(), data()
    opt = wrapped(net, 3)
    with pytest.raises(RuntimeError, match="found no gradient"):
        opt.normalize_()
    mean_loss(net, x, y).backward()
    before = grads(net)
    with pytest.raises(RuntimeError, match=r"1 micro-batches.*closes at 3"):
        opt.normalize_()
    assert_grads(net, before, 0)


@pytest.mark.parametrize("whose", ["opt", "model"])
def test_zero_grad_in_a_caller_owned_window_drops_as_plain_pytorch_does(whose):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net), sgd(big.parameters())
    mean_loss(net, 5 * x, y).backward()
    (opt if whose == "opt" else net).zero_grad()
    assert all(p.grad is None for p in net.parameters())
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.last_window.micro_batches == 1
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_zero_grad_is_the_inner_optimizers_too(owned):
    """Which may have more to do in it than the gradients."""

    class Counting(torch.optim.SGD):
        zeroed = 0

        def zero_grad(self, set_to_none=True):
            self.zeroed += 1
            super().zero_grad(set_to_none)

    net, (x, y) = model(), data()
    opt = wrapped(net, None if owned else 1, make=lambda ps: Counting(ps, lr=0.1))
    for i in range(2):
        mean_loss(net, x, y).backward()
        opt.step()
        opt.zero_grad()
        assert opt.optimizer.zeroed == i + 1


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_zero_grad_to_zeros_leaves_a_gradient_of_zeros(owned):
    """With set_to_none=False, unused parameters keep decaying, as in the plain loop."""
    net, (x, y) = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double(), data()
    big = twin(net)

    def make(ps):
        return torch.optim.SGD(ps, lr=0.1, weight_decay=0.5)

    opt, plain = wrapped(net, None if owned else 1, make=make), make(big.parameters())
    for o, n in ((opt, net), (plain, big)):
        (mean_loss(n[0], x, y) + mean_loss(n[1], x, y)).backward()
        o.step()
        o.zero_grad(set_to_none=False)
        assert all(p.grad.count_nonzero() == 0 for p in n.parameters())
        mean_loss(n[0], x, y).backward()
        o.step()
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("clear", ["model", "by hand"])
def test_clearing_p_grad_inside_a_window_drops_it_with_one_warning(clear):
    net, (x, y) = model(), data()
    opt = wrapped(net, 3)
    for i in range(3):
        mean_loss(net, x, y).backward()
        if i < 2:
            opt.step()
            if clear == "model":
                net.zero_grad()
            else:
                net[0].weight.grad = None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                mean_loss(net, x, y).backward()
            assert len(caught) == (i == 0)
    expected = gradient(net, x, y)
    held = net[0].weight.grad.clone()
    opt.step()
    # of the 5 backward passes, the 2 since the last clearing
    torch.testing.assert_close(held, 2 * expected[0])


@pytest.mark.filterwarnings("ignore:p.grad was written to")
def test_gradients_put_in_by_hand_are_accumulated_onto():
    net, (x, y) = model(), data()
    opt = wrapped(net)
    g = gradient(net, x, y)
    for p, value in zip(net.parameters(), g, strict=True):
        p.grad = value.clone()
    mean_loss(net, x, y).backward()
    assert_grads(net, [2 * value for value in g])
    for p in net.parameters():
        p.grad = p.grad * 3  # replaced, not changed in place
    mean_loss(net, x, y).backward()
    assert_grads(net, [7 * value for value in g])
    opt.step()
    assert opt.last_window.micro_batches == 2


def test_step_with_gradients_put_in_by_hand_alone():
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net), sgd(big.parameters())
    for n, o in ((net, opt), (big, plain)):
        for p, value in zip(n.parameters(), gradient(n, x, y), strict=True):
            p.grad = value
        o.step()
    assert_same_parameters(net, big, 1e-12)
    assert opt.updated


@pytest.mark.parametrize(
    "settings", [{}, {"accum_steps": 1}, {"master_weights": True}, {"buffer_dtype": None}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_with_gradients_written_into_p_grad_alone(dtype, settings):
    """Reptile's loop: the p.grad of the last step is written in place, without a zero_grad()."""
    net = model(dtype)
    torch.nn.utils.vector_to_parameters(torch.zeros(1000, dtype=dtype), net.parameters())  # so that nothing is rounded
    plain = twin(net).float()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.25), **settings)
    both = [(net, opt), (plain, torch.optim.SGD(plain.parameters(), lr=0.25))]
    for _ in range(4):
        written = [torch.randint(-4, 5, p.shape).float() for p in net.parameters()]
        for n, o in both:
            for p, value in zip(n.parameters(), written, strict=True):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad.zero_().add_(value)
            o.step()
        assert opt.updated and opt.last_window.micro_batches == 1
    torch.testing.assert_close(grads(net), grads(plain), rtol=0, atol=0, check_dtype=False)
    assert_same_parameters(net.float(), plain, 0)


def test_a_step_after_a_step_applies_nothing_though_the_first_wrote_to_p_grad():
    class Decays(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.add_(p)
            super().step()

    net, (x, y) = model(), data()
    opt = wrapped(net, make=lambda params: Decays(params, lr=0.1))
    mean_loss(net, x, y).backward()
    opt.step()
    before = [p.detach().clone() for p in net.parameters()]
    opt.step()
    assert not opt.updated
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_post_accumulate_grad_hooks_and_tensor_hooks_still_run():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    calls = []
    net[0].weight.register_hook(lambda g: calls.append("tensor") or 2 * g)
    net[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("post"))
    expected = gradient(net, x, y)[0]  # torch.autograd.grad runs the tensor hook as well
    calls.clear()
    mean_loss(net, x, y).backward()
    assert calls == ["tensor", "post"]
    torch.testing.assert_close(net[0].weight.grad, expected)
    opt.step()


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing when gradients are computed with respect to module outputs"
)
@pytest.mark.parametrize("looks", [False, True], ids=["with no other hook", "with a hook of the weight"])
def test_a_modules_backward_hook_finds_the_sum_of_the_passes_before(looks, each_intake):
    """Plain PyTorch's finds this pass's gradient, too, except in the first layer.

    So does ours what is added for a hook of the weight.
    """
    net = model()
    plain, batches = twin(net), parts(*data(), (8, 8, 8))
    opt, found = wrapped(net, 3, reduction="none"), {}
    for which in (net, plain):
        for layer in (0, 4):

            def hook(module, into, out, key=(which, layer)):
                found.setdefault(key, []).append(None if module.weight.grad is None else module.weight.grad.clone())

            which[layer].register_full_backward_hook(hook)
    if looks:
        net[4].weight.register_post_accumulate_grad_hook(lambda p: found.setdefault("post", []).append(p.grad.clone()))
    sums = [None]
    for batch in batches:
        mean_loss(net, *batch).backward()
        mean_loss(plain, *batch).backward()
        sums.append((plain[0].weight.grad.clone(), plain[4].weight.grad.clone()))
        opt.step()
    for place, layer in enumerate((0, 4)):
        before, after = ([None if s is None else s[place] for s in part] for part in (sums[:-1], sums[1:]))
        torch.testing.assert_close(found[net, layer], after if looks and layer else before)
        torch.testing.assert_close(found[plain, layer], after if layer else before)
        if looks and layer:
            torch.testing.assert_close(found["post"], after)


def test_a_prehook_of_the_node_that_was_there_before_the_wrapper_changes_what_is_added(each_intake):
    net, (x, y) = model(), data()
    weight = net[0].weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_prehook(lambda grads: (grads[0].clamp(-0.01, 0.01),))
    expected = [gradient(net, *batch)[0].clamp(-0.01, 0.01) for batch in parts(x, y, (12, 12))]
    opt = wrapped(net, 2)
    for batch in parts(x, y, (12, 12)):
        mean_loss(net, *batch).backward()
        opt.step()
    torch.testing.assert_close(weight.grad, sum(expected) / 2)


CLIPPED = {
    "every sum": ({"accum_steps": 3}, "to which more micro-batches are added"),
    "the last sum": ({"accum_steps": 3}, "which is divided after that"),
    "the caller's": ({}, "which is divided after that"),
    "the caller's, replaced": ({}, "which is divided after that"),
    "after normalize_()": ({"accum_steps": 3}, None),
    "of reduction='none'": ({"reduction": "none"}, None),
    "a mean, in 16 bits": ({"buffer_dtype": torch.bfloat16}, None),
    "a sum of one": ({"accum_steps": 1}, None),
}


@pytest.mark.parametrize("case", CLIPPED)
def test_clipping_a_sum_by_hand_is_warned_of_once(case):
    settings, says = CLIPPED[case]
    dtype = settings.get("buffer_dtype", torch.float32)
    net, (x, y) = model(dtype), data(dtype=dtype)
    opt = wrapped(net, **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2 * 3):
            for i in range(settings.get("accum_steps", 3)):
                last = i == settings.get("accum_steps", 3) - 1
                mean_loss(net, x, y).backward()
                if case == "after normalize_()" and last:
                    opt.normalize_()
                if last and "replaced" in case:
                    for p in net.parameters():
                        p.grad = p.grad / 3
                elif last or case == "every sum":
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                if last or "accum_steps" in settings:
                    opt.step()
            if "reduction" in settings:
                opt.zero_grad()
    assert [says in str(warning.message) for warning in told] == [True] * (says is not None)


def test_a_gradient_that_requires_one_goes_back_into_its_block_without_a_graph():
    """state_dict() looks at the sums, with gradients enabled."""
    p = nn.Parameter(torch.ones(2, 3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 2)
    (2 * p).sum().backward()
    opt.step()
    p.grad.requires_grad_()
    p.grad.data = p.grad.data.clone()
    opt.state_dict()
    (4 * p).sum().backward()
    opt.step()
    assert (p == -2).all()
