"""Passes that break off, gradients that are refused: nothing counts twice or is lost silently."""

import contextlib
import threading
import weakref

import fusedaccum as fa
import pytest
import torch
from sizes import limits
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, big_batch_step, data, grads, mean_loss, model, parts, sgd, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")


class Boom(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise MemoryError("boom")


def broken_loss(net, x, y):
    hidden = Boom.apply(net[:2](x))
    return nn.functional.mse_loss(net[2:](hidden), y)


@pytest.mark.parametrize("through", ["opt.backward", "loss.backward"])
@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_exception_in_backward_leaves_the_window_as_it_was(through, owned):
    """None of the pass's gradients had been added yet: they were in the queue, and are dropped."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, None if owned else 2), sgd(big.parameters())
    batches = parts(x, y, (12, 12))
    for i, batch in enumerate(batches):
        mean_loss(net, *batch).backward()
        if not owned:
            opt.step()
        if i == 0:
            held = grads(net)
            with pytest.raises(MemoryError):
                loss = broken_loss(net, x, y)
                opt.backward(loss) if through == "opt.backward" else loss.backward()
            del loss
            for p, g in zip(net.parameters(), held, strict=True):
                assert torch.equal(p.grad, g)
    if owned:
        opt.step()
    assert opt.updated and opt.last_window.micro_batches == 2
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("through", ["opt.backward", "loss.backward"])
@limits(bucket=1)
def test_exception_after_part_was_added_drops_the_window_and_says_so(through):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, 2), sgd(big.parameters())
    mean_loss(net, x, y).backward()
    opt.step()
    with pytest.warns(RuntimeWarning, match="window was dropped"):
        loss = broken_loss(net, x, y)
        with pytest.raises(MemoryError):
            opt.backward(loss) if through == "opt.backward" else loss.backward()
        opt.zero_grad()  # the wrapper notices at its next call that a plain backward broke off
    assert grads(net) == [None] * 6
    for batch in parts(x, y, (12, 12)):
        mean_loss(net, *batch).backward()
        opt.step()
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("through", ["opt.backward", "loss.backward"])
@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("settings", [{"accum_steps": 2}, {"window_weight": 24}], ids=str)
def test_a_part_that_raises_before_it_adds_anything_leaves_the_parts_before_it(settings, repeated, through):
    """The micro-batch keeps its weight and gradients; the part may be repeated or left out."""
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, **settings), sgd(big.parameters())
    for batch in parts(x, y, (4, 20)):
        weight = len(batch[0])
        opt.backward(mean_loss(net, *batch) / (2 if repeated else 1), weight=weight)
        with pytest.raises(MemoryError):
            loss = broken_loss(net, *batch)
            opt.backward(loss, weight=weight) if through == "opt.backward" else loss.backward()
        del loss
        with pytest.raises(ZeroDivisionError), opt.micro_batch(weight=weight):
            raise ZeroDivisionError
        if repeated:
            opt.backward(mean_loss(net, *batch) / 2, weight=weight)
        opt.step()
    assert (opt.last_window.micro_batches, opt.last_window.weight) == (2, 24)
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("call", ["opt.backward", "opt.micro_batch"])
@pytest.mark.parametrize("added", [False, True], ids=["queued", "partly added"])
def test_a_plain_backward_that_broke_off_is_no_part_of_the_next_micro_batch(added, call):
    net, (x, y) = model(), data()
    big = twin(net)
    with limits(bucket=1 if added else 8 << 20):
        opt, plain = wrapped(net, 2), sgd(big.parameters())
    first, second = parts(x, y, (4, 20))
    opt.backward(mean_loss(net, *first), weight=4)
    opt.step()
    with pytest.raises(MemoryError):
        broken_loss(net, x, y).backward()
    told = pytest.warns(RuntimeWarning, match="window was dropped") if added else contextlib.nullcontext()
    with told:
        if call == "opt.backward":
            opt.backward(mean_loss(net, *second), weight=20)
        else:
            with opt.micro_batch(weight=20):
                mean_loss(net, *second).backward()
    opt.flush()
    assert opt.last_window.weight == (20 if added else 24)
    big_batch_step(big, plain, *(second if added else (x, y)))
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_a_backward_whose_exception_is_caught_in_the_block_leaves_it_to_the_next(owned):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, None if owned else 2), sgd(big.parameters())
    first, second = parts(x, y, (4, 20))
    for batch in (first, second):
        with opt.micro_batch(weight=float(len(batch[0]))):
            with contextlib.suppress(MemoryError):
                broken_loss(net, x, y).backward()
            mean_loss(net, *batch).backward()
        if not owned:
            opt.step()
    with opt.micro_batch(weight=100), contextlib.suppress(MemoryError):
        broken_loss(net, x, y).backward()
    opt.flush()
    assert (opt.last_window.micro_batches, opt.last_window.weight) == (2, 24)
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


@limits(bucket=1)
def test_nothing_joins_a_block_whose_first_backward_dropped_the_window():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    with (
        pytest.warns(RuntimeWarning, match="window was dropped"),
        pytest.raises(RuntimeError, match="nothing can join it"),
        opt.micro_batch(weight=3),
    ):
        with contextlib.suppress(MemoryError):
            broken_loss(net, x, y).backward()
        mean_loss(net, x, y).backward()
    assert grads(net) == [None] * 6 and opt.progress["micro_batch"] == "0/2"


def test_exception_inside_micro_batch_outside_backward():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    held = grads(net)
    with pytest.raises(ZeroDivisionError), opt.micro_batch(weight=3):
        raise ZeroDivisionError
    for p, g in zip(net.parameters(), held, strict=True):
        assert torch.equal(p.grad, g)
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.updated and opt.last_window.weight == 2


def test_create_graph_is_refused_before_anything_is_added():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    held = grads(net)
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad"):
        mean_loss(net, x, y).backward(create_graph=True)
    for p, g in zip(net.parameters(), held, strict=True):
        assert torch.equal(p.grad, g)
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.updated and opt.last_window.micro_batches == 2


def test_sparse_gradients_are_refused_with_the_fix():
    net = nn.Embedding(10, 4, sparse=True)
    opt = wrapped(net, 2, make=lambda ps: torch.optim.SGD(ps, lr=0.1))
    with pytest.raises(RuntimeError, match="sparse=False"):
        net(torch.tensor([1, 2])).sum().backward()
    opt.reset()


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_parameter_changed_under_the_wrapper_is_an_error_that_names_it(change):
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    opt = wrapped(net, 2)
    mean_loss(net, x, y).backward()
    opt.step()
    if change == "dtype":
        net.double()
        x, y = x.double(), y.double()
    else:
        net[4].weight.data = net[4].weight.data[:2]
        net[4].bias.data = net[4].bias.data[:2]
    if change == "dtype":
        mean_loss(net, x, y).backward()
    with pytest.raises(RuntimeError, match=r"parameter param_groups\[0\]\['params'\]\[\d\] was .* when it was wrapped"):
        opt.step()


@pytest.mark.parametrize("windows", [0, 1])
@pytest.mark.parametrize("how", ["a group of the inner optimizer's", "appended", "replaced"])
def test_a_parameter_that_came_past_the_wrapper_is_refused_by_name(how, windows):
    """The inner optimizer would get undivided sums. Also after ``windows`` without a fault."""
    net, (x, y) = model(), data()
    *most, last = net.parameters()
    opt = fa.AccumulatingOptimizer(sgd(most), 2)
    for _ in range(2 * windows):
        mean_loss(net, x, y).backward()
        opt.step()
    if how == "appended":
        opt.param_groups[0]["params"].append(last)
    elif how == "replaced":
        opt.param_groups[0]["params"][0] = last
    else:
        opt.optimizer.add_param_group({"params": [last]})
    place = {"appended": r"\[0\]\['params'\]\[5\]", "replaced": r"\[0\]\['params'\]\[0\]"}.get(
        how, r"\[1\]\['params'\]\[0\]"
    )
    for call in (opt.step, opt.flush):
        mean_loss(net, x, y).backward()
        with pytest.raises(RuntimeError, match=rf"parameter param_groups{place}, of shape \(3,\), .*add_param_group"):
            call()
    opt.reset()
    net.zero_grad()
    opt.param_groups = opt.param_groups  # as the message says
    before = last.detach().clone()
    for _ in range(2):
        mean_loss(net, x, y).backward()
        opt.step()
    assert opt.updated and not torch.equal(last, before)


def test_broken_pass_retried_on_the_same_graph_counts_once():
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p, q], lr=1.0), 1)
    fail, x = [True], p * 1.0

    def hook(grad):
        if fail:
            raise MemoryError

    x.register_hook(hook)
    loss = (x + q * 1.0).sum()
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    fail.clear()
    loss.backward()
    opt.step()
    assert p.item() == q.item() == -1


def test_concurrent_backward_passes_are_refused_not_lost():
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p, q], lr=1.0))
    inside, go_on = threading.Event(), threading.Event()
    x = p * 1.0
    x.register_hook(lambda grad: (inside.set(), go_on.wait(10))[:0] or None)
    first = (x + q * 1.0).sum()
    thread = threading.Thread(target=first.backward)
    thread.start()
    inside.wait(10)
    with pytest.raises(RuntimeError, match="two backward passes run at once"):
        (q * 5.0).sum().backward()
    go_on.set()
    thread.join()
    opt.step()
    assert p.item() == q.item() == -1


@pytest.mark.parametrize("call", ["state_dict", "zero_grad", "step", "flush", "reset", "normalize_"])
def test_calls_from_within_backward_are_refused(call):
    p = nn.Parameter(torch.zeros(1))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
    x = p * 1.0
    x.register_hook(lambda grad: getattr(opt, call)() and None)
    with pytest.raises(RuntimeError, match="from inside a backward pass"):
        x.sum().backward()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "thawed later"])
@pytest.mark.parametrize("memory", ["new", "the same"])
def test_conversion_there_and_back_is_noticed(memory, frozen):
    """PyTorch drops a parameter's gradient hooks when the dtype of its data changes."""
    net, (x, y) = model(torch.float32), data(dtype=torch.float32)
    opt = wrapped(net, 2)
    before = [p.data for p in net.parameters()]
    net.requires_grad_(not frozen)
    net.bfloat16().float()
    if memory == "the same":  # as an allocator may choose
        for p, there in zip(net.parameters(), before, strict=True):
            p.data = there
    net.requires_grad_()
    mean_loss(net, x, y).backward()
    with pytest.raises(RuntimeError, match="dropped its gradient hooks"):
        opt.step()


def test_a_parameter_that_stays_frozen_may_be_converted_there_and_back(each_intake):
    frozen, trained = (nn.Parameter(torch.ones(2)) for _ in range(2))
    frozen.requires_grad_(False)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([frozen, trained], lr=1.0), 2)
    for dtype in (torch.bfloat16, torch.float32):
        frozen.data = frozen.data.to(dtype)
    for _ in range(2):
        (frozen * trained).sum().backward()
        opt.step()
    assert frozen.tolist() == [1, 1] and trained.tolist() == [0, 0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("op", ["stats", "accumulate_"])
@pytest.mark.parametrize("group", [False, True], ids=["one pass", "grouped"])
@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_an_exception_after_backward_leaves_nothing_behind(owned, group, op, error, monkeypatch):
    """If it comes while held gradients are checked or added, only that micro-batch is dropped."""
    p = nn.Parameter(torch.zeros(2))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([p], lr=1.0), None if owned else 2, nonfinite="skip_micro_batch", backend="reference"
    )
    plain, errors = getattr(fa.ops, op), [error("here")]
    monkeypatch.setattr(fa.ops, op, lambda *args, **how: raised(errors) if errors else plain(*args, **how))
    for value in (1000.0, 1.0, 3.0):
        try:
            with opt.micro_batch() if group else contextlib.nullcontext():
                (p * value).sum().backward()
        except error:
            continue
        if not owned:
            opt.step()
    if owned:
        opt.step()
    assert not errors and opt.last_window.micro_batches == 2 and p.tolist() == [-2.0, -2.0]


def raised(errors):
    raise errors.pop()


def all_in_checkpoints(net, x, y, broken):
    """A loss with all parameters inside re-entrant checkpoints; may break in between.

    The outermost pass has no gradient for them.
    """
    hidden = checkpoint(net[:2], x.requires_grad_(), use_reentrant=True)
    return nn.functional.mse_loss(checkpoint(net[2:], Boom.apply(hidden) if broken else hidden, use_reentrant=True), y)


@pytest.mark.parametrize("through", ["opt.backward", "loss.backward"])
@pytest.mark.parametrize("owned", [False, True], ids=["counted", "caller-owned"])
def test_a_pass_that_breaks_off_between_checkpoints_is_not_a_micro_batch(owned, through):
    net, (x, y) = model(), data()
    big = twin(net)
    opt, plain = wrapped(net, None if owned else 2), sgd(big.parameters())
    loss = all_in_checkpoints(net, x.clone(), y, True)
    with pytest.warns(RuntimeWarning, match="window was dropped"):
        with pytest.raises(MemoryError):
            opt.backward(loss) if through == "opt.backward" else loss.backward()
        opt.reset()  # the wrapper notices at its next call that a plain backward broke off
    for i, batch in enumerate(parts(x, y, (12, 12))):
        all_in_checkpoints(net, *batch, False).backward()
        if not owned or i:
            opt.step()
    assert opt.last_window.micro_batches == 2
    big_batch_step(big, plain, x, y)
    assert_same_parameters(net, big, 1e-12)


def test_two_passes_over_one_graph_of_checkpoints_are_two_micro_batches():
    net, (x, y) = model(), data()
    opt = wrapped(net, None)
    loss = all_in_checkpoints(net, x, y, False)
    loss.backward(retain_graph=True)
    loss.backward()
    opt.step()
    assert opt.last_window.micro_batches == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own code reads it
@pytest.mark.filterwarnings("ignore:backward was broken off")
def test_a_pass_whose_end_autograd_does_not_tell_is_an_error():
    """Compiled autograd runs Python hooks but not their callback, and refuses hooks in C++."""
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    loss = mean_loss(net, x, y)
    with pytest.raises(RuntimeError, match="compiled autograd"):
        with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
            loss.backward()
        opt.step()
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.progress["micro_batch"] == "1/2"


@pytest.mark.parametrize("call", ["state_dict", "step", "zero_grad"])
def test_a_call_while_another_thread_is_in_backward_is_refused(call):
    net, (x, y) = model(), data()
    big = twin(net)
    opt = wrapped(net, 1)
    inside, go_on = threading.Event(), threading.Event()
    hidden = net[:2](x)
    hidden.register_hook(lambda _: inside.set() or (go_on.wait(10) and None))
    thread = threading.Thread(target=nn.functional.mse_loss(net[2:](hidden), y).backward)
    thread.start()
    assert inside.wait(10)
    try:
        with pytest.raises(RuntimeError, match="in another thread"):
            getattr(opt, call)()
    finally:
        go_on.set()
        thread.join()
    opt.step()
    big_batch_step(big, sgd(big.parameters()), x, y)
    assert_same_parameters(net, big, 1e-12)


def unseen(tensor):
    """A backward past torch.autograd.backward, as some do, so that no stack frame shows it."""
    torch.autograd.Variable._execution_engine.run_backward(
        (tensor,), (torch.ones_like(tensor),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def test_a_pass_that_nobody_sees_and_that_breaks_off_is_dropped():
    net, (x, y) = model(), data()
    opt, expected = wrapped(net, 1), torch.autograd.grad(mean_loss(net, x, y), list(net.parameters()))
    with pytest.raises(MemoryError):
        unseen(broken_loss(net, x, y))
    unseen(mean_loss(net, x, y))
    opt.step()
    for p, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
def test_a_reentrant_checkpoint_in_a_pass_that_nobody_sees(nonfinite):
    net, (x, y) = model(), data()
    opt = fa.AccumulatingOptimizer(sgd(net.parameters()), 1, nonfinite=nonfinite)
    expected = torch.autograd.grad(mean_loss(net, x, y), list(net.parameters()))
    hidden = checkpoint(net[2:4], net[:2](x), use_reentrant=True)
    unseen(nn.functional.mse_loss(net[4:](hidden), y))
    opt.step()
    for p, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=0)


def test_what_a_broken_pass_held_is_freed_before_the_next_call():
    """A retry needs the memory of the graph and of whatever its callers held."""
    net, (x, y) = model(), data()
    opt, alive = wrapped(net, 2), []

    def attempt():
        local = torch.ones(3)
        loss = broken_loss(net, x, y)
        alive.extend(map(weakref.ref, (local, loss)))
        loss.backward()

    with pytest.raises(MemoryError):
        attempt()
    assert [ref() for ref in alive] == [None, None] and opt.progress["micro_batch"] == "0/2"


class Tolerant(torch.autograd.Function):
    """Its backward runs another backward, and goes on when that one breaks off."""

    @staticmethod
    def forward(ctx, x, inner):
        ctx.inner = inner
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad(), contextlib.suppress(MemoryError):
            ctx.inner().backward()
        return g, None


def test_a_reentrant_pass_whose_exception_is_caught():
    net, (x, y) = model(), data()
    opt = wrapped(net, 2)
    Tolerant.apply(x.requires_grad_(), lambda: broken_loss(net, x, y)).sum().backward()
    opt.step()
    assert opt.progress["micro_batch"] == "1/2" and grads(net) == [None] * 6
