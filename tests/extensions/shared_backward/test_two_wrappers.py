"""Two wrappers of one model (Muon and AdamW, say): a backward serves both, one gets its weight."""

import threading

import fusedaccum as fa
import pytest
import torch
from fusedaccum.autograd.passes import outermost_backward
from gpu_cases import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, big_batch_step, data, mean_loss, model, parts, twin


def split(net):
    """An optimizer for the matrices and one for the vectors."""
    ps = list(net.parameters())
    return [torch.optim.SGD([p for p in ps if p.ndim == dims], lr=lr) for dims, lr in ((2, 0.1), (1, 0.3))]


def two(net, *args, **kwargs):
    return [fa.AccumulatingOptimizer(inner, *args, **kwargs) for inner in split(net)]


class Both:
    """Steps and clears both like one optimizer."""

    def __init__(self, *opts):
        self.opts = opts

    def step(self):
        for opt in self.opts:
            opt.step()

    def zero_grad(self):
        for opt in self.opts:
            opt.zero_grad()


def told_backward(first, second, loss, weight):
    first.backward(loss, weight=weight)


def told_block(first, second, loss, weight):
    with first.micro_batch(weight=weight):
        loss.backward()


def told_around(first, second, loss, weight):
    with first.micro_batch(weight=weight):
        second.backward(loss)


def told_both(first, second, loss, weight):
    with second.micro_batch(weight=weight):
        first.backward(loss, weight=weight)


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("accum_steps", [3, None], ids=["counted", "caller-owned"])
@pytest.mark.parametrize("tell", [told_backward, told_block, told_around, told_both])
def test_the_weight_that_one_wrapper_is_told_is_that_of_both(tell, accum_steps, kind):
    net, (x, y) = model().to(DEVICE), data()
    x, y = x.to(DEVICE), y.to(DEVICE)
    big = twin(net)
    opts, plain = two(net, accum_steps), Both(*split(big))
    for _ in range(2):
        for xs, ys in parts(x, y, (4, 8, 12)):
            tell(*opts, mean_loss(net, xs, ys), kind(len(xs)))
            if accum_steps:
                Both(*opts).step()
        if not accum_steps:
            Both(*opts).step()
        Both(*opts).zero_grad()
        big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)
    assert [float(opt.last_window.weight) for opt in opts] == [24, 24]


@pytest.mark.parametrize("told", [0, 1])
def test_it_is_told_in_a_pass_of_reentrant_checkpoints_too(told):
    net, (x, y) = model(), data()
    big = twin(net)
    opts = two(net, 3)
    for xs, ys in parts(x, y, (4, 8, 12)):
        out = checkpoint(net, xs.requires_grad_(), use_reentrant=True)
        opts[told].backward(nn.functional.mse_loss(out, ys), weight=len(xs))
        Both(*opts).step()
    big_batch_step(big, Both(*split(big)), x, y, loss=lambda net, x, y: nn.functional.mse_loss(net(x), y))
    assert_same_parameters(net, big, 1e-12)


def test_a_wrappers_own_weight_counts_more_than_that_of_another():
    p, q = (nn.Parameter(torch.zeros(()).double()) for _ in range(2))
    first, second = (fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0), 2) for leaf in (p, q))
    for factor in (1.0, 5.0):
        with second.micro_batch(weight=1):
            first.backward(factor * (p + q), weight=factor)
        Both(first, second).step()
    assert (-p.item(), -q.item()) == ((1 + 25) / 6, 3.0)


@pytest.mark.parametrize("accum_steps", [2, None])
def test_a_weight_given_to_both_counts_also_where_the_loss_reaches_only_one(accum_steps):
    p, q = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    first, second = (fa.AccumulatingOptimizer(torch.optim.SGD([x], lr=1.0), accum_steps) for x in (p, q))
    for loss, weight in ((lambda: 2 * p, 3), (lambda: 2 * p + 4 * q, 1)):
        told_both(first, second, loss().sum(), weight)
        if accum_steps:
            Both(first, second).step()
    if not accum_steps:
        Both(first, second).step()
    assert (p.item(), q.item()) == (-2, -1)
    assert first.last_window.weight == second.last_window.weight == 4


def test_sums_are_weighed_by_their_own_wrappers():
    """Each needs its own weight, which may come with ``step()``; without one, step() raises."""
    p, q = (nn.Parameter(torch.zeros(())) for _ in range(2))
    first, second = (fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0), 1, reduction="sum") for leaf in (p, q))
    first.backward(6 * (p + q), weight=3)
    first.step()
    with pytest.raises(ValueError, match="was given none"):
        second.step()
    second.step(weight=2)
    assert (p.item(), q.item()) == (-2.0, -3.0)


@pytest.mark.parametrize("reductions", [("sum", "mean"), ("mean", "sum")])
def test_a_weight_is_not_taken_from_a_wrapper_with_another_reduction(reductions):
    """To one the loss is a mean, to the other a sum: one weight cannot be right for both."""
    p, q = (nn.Parameter(torch.zeros(())) for _ in range(2))
    first, second = (
        fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0), 1, reduction=reduction)
        for leaf, reduction in zip((p, q), reductions, strict=True)
    )
    first.backward(p + q, weight=4)
    if reductions[1] == "sum":
        with pytest.raises(ValueError, match="was given none"):
            second.step()
    else:
        second.step()
        assert second.last_window.weight.item() == 1


def test_a_weight_that_comes_after_an_unweighted_backward_leaves_that_micro_batch_alone():
    """As where an actor's loss reaches a critic that has had its own backward already."""
    p, q = (nn.Parameter(torch.zeros(())) for _ in range(2))
    first, second = (fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0), 1) for leaf in (p, q))
    q.backward()
    first.backward(p + q, weight=4)
    second.step()
    assert (second.last_window.weight.item(), q.item()) == (1.0, -2.0)


def test_the_weight_of_a_block_holds_again_after_a_backward_with_its_own():
    leaves = [nn.Parameter(torch.zeros(())) for _ in range(3)]
    outer, inner, other = (fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0), 1) for leaf in leaves)
    with outer.micro_batch(weight=3):
        inner.backward(leaves[1] * 1, weight=5)
        (leaves[0] + leaves[2]).backward()
    for opt in (outer, inner, other):
        opt.step()
    assert [opt.last_window.weight.item() for opt in (outer, inner, other)] == [3, 5, 3]


def test_one_micro_batch_of_losses_with_two_weights_is_an_error():
    trunk, heads = nn.Parameter(torch.zeros(())), [nn.Parameter(torch.zeros(())) for _ in range(2)]
    opt, *tasks = (fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0)) for leaf in (trunk, *heads))
    with opt.micro_batch(weight=1):
        for task, head, weight in zip(tasks, heads, (2, 3), strict=True):
            task.backward(trunk + head, weight=weight)
    opt.step()
    assert trunk.item() == -2.0  # the gradient of the two losses' sum
    refused = pytest.raises(ValueError, match=r"weights 2 and 3, not both.*with opt.micro_batch")
    with pytest.warns(RuntimeWarning, match="window was dropped"), refused, opt.micro_batch():
        for task, head, weight in zip(tasks, heads, (2, 3), strict=True):
            task.backward(trunk + head, weight=weight)


def test_a_loss_of_another_weight_does_not_join_a_micro_batch_unseen():
    """As a generator's loss joins the discriminator's, whose step() comes after both."""
    p, q = (nn.Parameter(torch.zeros(())) for _ in range(2))
    first, second = (fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0), 1) for leaf in (p, q))
    first.backward(p * 1, weight=6)
    with pytest.raises(ValueError, match=r"weights 6 and 3, not both.*backward\(inputs"):
        second.backward(p + q, weight=3)
    second.backward(p + q, weight=3, inputs=[q])
    Both(first, second).step()
    assert (p.item(), q.item()) == (-1.0, -1.0)
    first.backward(p * 1, weight=torch.tensor(6))
    second.backward(p + q, weight=6.0)
    Both(first, second).step()
    assert (p.item(), q.item()) == (-3.0, -2.0)


def test_a_backward_in_another_thread_has_no_part_in_it():
    """Another thread trains another model, which must not get this block's weight."""
    p, q = (nn.Parameter(torch.zeros(())) for _ in range(2))
    first, second = (fa.AccumulatingOptimizer(torch.optim.SGD([leaf], lr=1.0)) for leaf in (p, q))

    def train():
        (3 * q).backward()
        second.step()

    with first.micro_batch(weight=8):
        p.backward()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    first.step()
    p.backward()
    (3 * q).backward()
    Both(first, second).step()
    assert (second.last_window.weight.item(), q.item()) == (1.0, -6.0)
    assert first.last_window.weight.item() == 1.0  # the finished block's weight no longer applies


@pytest.mark.parametrize("count", [1, 2])
def test_of_two_backward_passes_at_once_neither_is_taken_for_the_caller(count):
    """In an engine's thread, as for GPUs, a hook cannot tell for which of them it runs."""
    inside, over = threading.Barrier(count + 1), threading.Event()

    def wait(grad):
        inside.wait(60)
        over.wait(60)

    def run():
        x = torch.ones((), requires_grad=True)
        loss = x * 2
        loss.register_hook(wait)
        loss.backward()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    found = outermost_backward()
    over.set()
    for thread in threads:
        thread.join()
    assert found.call is not None and not found.nested
    assert found.thread == (threads[0].ident if count == 1 else None)


@pytest.mark.parametrize("frozen", [False, True])
def test_one_that_was_dropped_in_a_reference_cycle_leaves_its_parameters_to_the_next(frozen, freeze):
    net = model()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2)
    opt.itself = opt
    if frozen:
        freeze()
    del opt
    fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), 2)


@pytest.mark.filterwarnings("ignore:backward was broken off")
def test_a_block_that_an_interrupt_has_left_gives_its_weight_to_no_later_loss():
    p, q = (nn.Parameter(torch.ones(1)) for _ in range(2))
    opt, other = (fa.AccumulatingOptimizer(torch.optim.SGD([x], lr=0.1), 4) for x in (p, q))
    block = opt.micro_batch(weight=2.0)
    block.__enter__()
    p.sum().backward()
    opt._accumulation.passes.inside = False  # Ctrl-C has come in place of the block's end
    with opt.micro_batch(weight=2.0):
        p.sum().backward()
    del block
    opt.reset()
    other.reset()
    opt.backward(p.sum(), weight=8.0)  # the micro-batch stays open
    q.sum().backward()  # another loss, of the other wrapper alone
    assert q.grad.item() == 1.0
