"""Compiled models train as uncompiled ones do, and as plain PyTorch does on the big batch."""

import fusedaccum as fa
import pytest
import torch
from graphs import compiled_functions
from ops_cases import assert_same_bits
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, big_batch_step, data, model, parts, sgd, twin, wrapped

# PyTorch 2.13 warns itself when its compiler is loaded.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("compiled_anew")]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WINDOWS = 4  # enough for a CUDA graph to be warmed up, recorded and replayed


class Checkpointed(nn.Module):
    """A model whose middle is recomputed in backward."""

    def __init__(self, net, use_reentrant):
        super().__init__()
        self.net, self.use_reentrant = net, use_reentrant

    def forward(self, x):
        x = self.net[0](x)
        x = checkpoint(self.net[1:4], x, use_reentrant=self.use_reentrant)
        return self.net[4](x)


def trained(net, forward, micro_batches, **settings):
    """Train for some windows; a micro-batch's weight is its number of samples."""
    opt = wrapped(net, len(micro_batches), **settings)
    for _ in range(WINDOWS):
        for xs, ys in micro_batches:
            opt.backward(nn.functional.mse_loss(forward(xs), ys), weight=len(xs))
            opt.step()
            opt.zero_grad()
    assert opt.updated


def big(net, x, y):
    optimizer = sgd(net.parameters())
    for _ in range(WINDOWS):
        big_batch_step(net, optimizer, x, y)


MODES = {
    "aot_eager": {"backend": "aot_eager"},
    "inductor": {},
    # CUDA graphs (on a GPU only): the next backward writes its gradients to the same addresses.
    "reduce-overhead": {"mode": "reduce-overhead"},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_compiled_model_is_the_uncompiled_one_and_the_big_batch(options, each_intake):
    net, (x, y) = model().to(DEVICE), (each.to(DEVICE) for each in data())
    plain, whole = twin(net), twin(net)
    micro_batches = parts(x, y, (4, 12, 8))
    trained(net, torch.compile(net, fullgraph=True, dynamic=True, **options), micro_batches)
    trained(plain, plain, micro_batches)
    big(whole, x, y)
    assert_same_parameters(net, plain, 1e-13)
    assert_same_parameters(net, whole, 1e-12)


def test_compiled_backward_gives_the_bits_of_the_uncompiled_one():
    """aot_eager runs eager kernels, so only what we do with the gradients could differ."""
    net, (x, y) = model(torch.bfloat16), data(dtype=torch.bfloat16)
    plain, micro_batches = twin(net), parts(x, y, (8, 8, 8))
    settings = {"max_grad_norm": 0.1, "nonfinite": "skip_window"}
    trained(net, torch.compile(net, fullgraph=True, backend="aot_eager"), micro_batches, **settings)
    trained(plain, plain, micro_batches, **settings)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p, q)


def test_sizes_that_change_within_a_window_are_one_graph():
    net, (x, y) = model(), data()
    whole, counter = twin(net), CompileCounterWithBackend("aot_eager")
    trained(net, torch.compile(net, fullgraph=True, dynamic=True, backend=counter), parts(x, y, (2, 3, 12, 7)))
    big(whole, x, y)
    assert counter.frame_count == 1
    assert_same_parameters(net, whole, 1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["checkpoint", "reentrant"])
def test_activation_checkpointing_within_the_compiled_model(use_reentrant):
    net, (x, y) = model(), data()
    whole = twin(net)
    compiled = torch.compile(Checkpointed(net, use_reentrant), fullgraph=not use_reentrant, backend="aot_eager")
    trained(net, compiled, parts(x, y, (8, 8, 8)))
    big(whole, x, y)
    assert_same_parameters(net, whole, 1e-12)


# -- calls of the wrapper inside a compiled function -----------------------------------------------


def loop(opt, loss_of, x, y):
    loss = loss_of(x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def loop_of_ours(opt, loss_of, x, y):
    loss = loss_of(x, y)
    opt.backward(loss, weight=float(len(x)))
    opt.step()
    return loss * 2


def loop_in_blocks(opt, loss_of, x, y):
    with opt.micro_batch(weight=float(len(x))):
        loss = loss_of(x, y)
        loss.backward()
    opt.record_loss(loss)
    if opt.step() is None and opt.updated:
        opt.zero_grad()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads the loss's .grad after a graph break
@pytest.mark.parametrize("body", [loop, loop_of_ours, loop_in_blocks])
def test_calls_within_a_compiled_function_are_graph_breaks(body, each_intake):
    """The wrapper's counts cause no recompilation, and our code in backward is not traced."""
    net, (x, y) = model(), data()
    whole, opt = twin(net), wrapped(net, 2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(body, backend=counter)
    optimizer = sgd(whole.parameters())
    compiled_by_then = []
    for _ in range(6):
        for xs, ys in parts(x, y, (12, 12)):
            compiled(opt, lambda x, y: nn.functional.mse_loss(net(x), y), xs, ys)
        big_batch_step(whole, optimizer, x, y)
        compiled_by_then.append(counter.frame_count)
    assert opt.last_window.micro_batches == 2
    assert_same_parameters(net, whole, 1e-12)
    assert compiled_by_then[2] == compiled_by_then[-1] > 0
    seen, ours = compiled_functions()
    assert seen and not ours


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_fused_layers_of_a_model_that_is_not_compiled_in_a_loop_that_is():
    net, (x, y) = fa.fuse_linear(model()), data()
    whole, opt = fa.unfuse(twin(net)), wrapped(net, 2)
    loss_of = torch.compiler.disable(lambda x, y: nn.functional.mse_loss(net(x), y))

    @torch.compile(backend="aot_eager")
    def micro_step(x, y):
        loss_of(x * 2, y).backward()
        opt.step()

    optimizer = sgd(whole.parameters())
    for _ in range(WINDOWS):
        for xs, ys in parts(x, y, (12, 12)):
            micro_step(xs, ys)
        big_batch_step(whole, optimizer, x * 2, y)
    assert_same_parameters(net, whole, 1e-12)
    seen, ours = compiled_functions()
    assert seen and not ours


@pytest.mark.parametrize("call", ["step", "flush", "reset", "zero_grad", "normalize_", "state_dict"])
def test_calls_within_a_full_graph_are_refused_by_name(call):
    opt = wrapped(model(), 2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=getattr(fa.AccumulatingOptimizer, call).__qualname__):
        torch.compile(lambda: getattr(opt, call)(), fullgraph=True, backend="eager")()


# -- a loop of one's own, in one graph -------------------------------------------------------------


def test_a_step_with_the_functional_ops_is_one_graph():
    """Forward, backward (torch.func), accumulation and norm, with the big batch's gradient."""
    net, (x, y) = model().to(DEVICE), (each.to(DEVICE) for each in data())
    counter = CompileCounterWithBackend("aot_eager")
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    buffers = {name: torch.full_like(w, float("nan")) for name, w in weights.items()}

    def loss_of(weights, x, y):
        return nn.functional.mse_loss(torch.func.functional_call(net, weights, x), y)

    @torch.compile(fullgraph=True, backend=counter)
    def micro_step(weights, buffers, x, y, scale, first):
        grads, loss = torch.func.grad_and_value(loss_of)(weights, x, y)
        stats = fa.ops.Stats.empty(DEVICE)
        fa.ops.accumulate_(
            list(buffers.values()), [grads[name] for name in buffers], scale, overwrite=first, stats=stats
        )
        return loss, stats.sq_norm.sqrt()

    graphs = []
    for _ in range(3):
        graphs.append(counter.frame_count)
        for k, (xs, ys) in enumerate(parts(x, y, (4, 6, 14))):
            _, norm = micro_step(weights, buffers, xs, ys, len(xs) / len(x), k == 0)
    assert graphs[1] == graphs[2] == counter.frame_count
    nn.functional.mse_loss(net(x), y).backward()
    for buffer, p in zip(buffers.values(), net.parameters(), strict=True):
        torch.testing.assert_close(buffer, p.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]))
