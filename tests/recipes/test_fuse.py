"""Layers that add their weight's gradient into its buffer train like unfused ones, in any use."""

import copy
import io

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, twin

pytestmark = pytest.mark.long

VOCABULARY, WIDTH, CLASSES = 50, 12, 7
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


class Net(nn.Module):
    """Tokens to classes: an embedding, a layer used twice, one without bias, and a head.

    The head may be the embedding's weight.
    """

    def __init__(self, dtype=torch.float64, tied=False, padding=None, checkpointed=None):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY if tied else CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed
        self.to(dtype)

    def middle(self, x):
        return self.narrow(torch.tanh(self.twice(torch.tanh(self.twice(x)))))

    def forward(self, tokens):
        x = self.embedding(tokens)
        again = self.checkpointed is not None
        x = checkpoint(self.middle, x, use_reentrant=self.checkpointed) if again else self.middle(x)
        return self.head(x)


def fused(net):
    return fa.fuse_embedding(fa.fuse_linear(net))


def batches(count=3, classes=CLASSES, length=5):
    g = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    sizes = [4 + 2 * i for i in range(count)]
    return [
        (torch.randint(0, VOCABULARY, (n, length), generator=g), torch.randint(0, classes, (n, length), generator=g))
        for n in sizes
    ]


def loss_of(net, tokens, targets):
    return functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())


def train(net, data, **kwargs):
    """Train for two windows of weighted micro-batches; returns the wrapper."""
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9), len(data), **kwargs)
    for _ in range(2):
        for tokens, targets in data:
            opt.backward(loss_of(net, tokens, targets), weight=targets.numel())
            opt.step()
            opt.zero_grad()
    assert opt.updated
    return opt


class Made(TorchDispatchMode):
    """Records the shapes of all tensors that ops return, but not of in-place ops.

    Those return the tensor that they were given.
    """

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not op._schema.is_mutable:
            self.sizes.append((str(op), tuple(found.shape)))
        return found


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_training_is_the_same_as_unfused(dtype, tied, checkpointed):
    net = fused(Net(dtype, tied, checkpointed=checkpointed))
    plain = twin(fa.unfuse(twin(net)))
    data = batches(classes=VOCABULARY if tied else CLASSES)
    ours = train(net, data, max_grad_norm=0.3)
    theirs = train(plain, data, max_grad_norm=0.3)
    assert_same_parameters(net, plain, TOLERANCE[dtype])
    torch.testing.assert_close(ours.last_window.grad_norm, theirs.last_window.grad_norm, rtol=1e-5, atol=0)


def test_equals_the_big_batch():
    net, data = fused(Net()), batches()
    big = fa.unfuse(twin(net))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), len(data))
    for tokens, targets in data:
        opt.backward(loss_of(net, tokens, targets), weight=targets.numel())
        opt.step()
    plain = torch.optim.SGD(big.parameters(), lr=0.5)
    loss_of(big, *(torch.cat(parts) for parts in zip(*data, strict=True))).backward()
    plain.step()
    assert_same_parameters(net, big, 1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["first micro-batch", "second"])
def test_no_weight_gradient_is_ever_a_tensor(first):
    net = fused(Net(torch.float32))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), 3)
    losses = [loss_of(net, *batch) for batch in batches(2)]
    if not first:
        losses.pop(0).backward()
        opt.step()
    with Made() as made:
        losses[0].backward()
    assert len(made.sizes) > 10
    weights = {tuple(m.weight.shape) for m in net.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    # Views of weights and buffers may have this shape or its transpose; results may not.
    shapes = weights | {shape[::-1] for shape in weights}
    views = (
        "aten.t.default",
        "aten.detach.default",
        "aten.as_strided.default",
        "aten.view.default",
        "aten.alias.default",
    )
    assert not [(op, shape) for op, shape in made.sizes if shape in shapes and op not in views and "empty" not in op]


def test_unfused_makes_them():
    """Shows that the test above can fail."""
    net = Net(torch.float32)
    fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), 3)
    loss = loss_of(net, *batches(1)[0])
    with Made() as made:
        loss.backward()
    assert (VOCABULARY, WIDTH) in [shape for op, shape in made.sizes if "embedding_dense_backward" in op]
    assert (WIDTH, WIDTH) in [shape for op, shape in made.sizes if "aten.mm" in op]


def test_modules_keep_names_parameters_and_results(tmp_path):
    net = Net(torch.float32)
    tokens, names, state = batches(1)[0][0], [type(m).__name__ for m in net.modules()], list(net.state_dict())
    before = net(tokens)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), 2)
    parameters = list(net.parameters())
    assert fused(net) is net
    assert torch.equal(net(tokens), before)
    assert [type(m).__name__ for m in net.modules()] == names and list(net.state_dict()) == state
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for copied in (torch.load(file, weights_only=False), copy.deepcopy(net)):
        assert torch.equal(copied(tokens), before)
        loss_of(copied, *batches(1)[0]).backward()  # no wrapper accumulates the copy's gradients
        assert all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in net.parameters())
    fa.unfuse(net)
    assert type(net.head) is nn.Linear and type(net.embedding) is nn.Embedding
    opt.reset()


def test_subclasses_and_other_modules_are_left_alone():
    class Mine(nn.Linear):
        pass

    net = fused(nn.Sequential(Mine(2, 2), nn.Conv2d(1, 1, 1)))
    assert type(net[0]) is Mine and type(net[1]) is nn.Conv2d
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        fa.fuse_linear([nn.Linear(2, 2)])


@pytest.mark.parametrize("padding", [0, VOCABULARY - 1])
def test_padding_gets_no_gradient(padding):
    net, data = fused(Net(padding=padding)), batches()
    for tokens, _ in data:
        tokens[:, 0] = padding
    before = net.embedding.weight[padding].clone()
    plain = fa.unfuse(twin(net))
    train(net, data)
    train(plain, data)
    assert_same_parameters(net, plain, 1e-13)
    assert torch.equal(net.embedding.weight[padding], before)


def test_repeated_tokens_add_up_the_same_every_time():
    weight = torch.zeros(4, 33)
    tokens = torch.randint(0, 4, (3000,))
    sums = []
    for _ in range(3):
        net = fa.fuse_embedding(nn.Sequential(nn.Embedding.from_pretrained(weight.clone(), freeze=False)))
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), 2)
        torch.manual_seed(5)
        rows = torch.randn(3000, 33)
        (net(tokens) * rows).sum().backward()
        opt.step()
        sums.append(net[0].weight.grad.clone())
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    expected = torch.zeros(4, 33, dtype=torch.float64).index_add_(0, tokens, rows.double())
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch", "raise", "propagate"])
def test_a_bad_micro_batch_is_dealt_with_as_unfused(policy):
    results = []
    for make in (fused, lambda net: net):
        net = make(Net())
        opt = fa.AccumulatingOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.5), 2, nonfinite=policy, max_grad_norm=1.0
        )
        torch.manual_seed(1)
        for i, batch in enumerate([b for _ in range(3) for b in batches(2)]):
            (loss_of(net, *batch) * (float("nan") if i == 2 else 1.0)).backward()
            try:
                opt.step()
            except FloatingPointError:
                assert policy == "raise"
            opt.zero_grad()
        results.append((net, opt.last_window))
    (ours, window), (plain, expected) = results
    if policy != "propagate":
        assert_same_parameters(ours, plain, 1e-12)
        assert int(window.nonfinite) == int(expected.nonfinite) and window.micro_batches == expected.micro_batches
    else:
        assert not torch.isfinite(ours.head.weight).any() and not torch.isfinite(plain.head.weight).any()


def test_a_weight_of_0_adds_nothing_and_tensor_weights_count():
    net, data = fused(Net()), batches(2)
    plain = fa.unfuse(twin(net))
    for each in (net, plain):
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(each.parameters(), lr=0.5), 3)
        opt.backward(loss_of(each, *data[0]) * float("nan"), weight=0)
        opt.step()
        for i, batch in enumerate(data):
            opt.backward(loss_of(each, *batch), weight=torch.tensor(i + 2.0))
            opt.step()
        assert opt.updated
    assert_same_parameters(net, plain, 1e-13)


def test_frozen_and_thawed():
    net, data = fused(Net()), batches()
    plain = fa.unfuse(twin(net))
    for each in (net, plain):
        each.narrow.weight.requires_grad_(False)
        each.embedding.weight.requires_grad_(False)
        opt = train(each, data)
        assert each.narrow.weight.grad is None and each.embedding.weight.grad is None
        each.narrow.weight.requires_grad_(True)
        for batch in data:
            loss_of(each, *batch).backward()
            opt.step()
    assert_same_parameters(net, plain, 1e-12)


def test_gradients_that_somebody_asks_for_are_given_to_him():
    net, batch = fused(Net()), batches(1)[0]
    plain = fa.unfuse(twin(net))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), 2)
    ours = torch.autograd.grad(loss_of(net, *batch), list(net.parameters()))
    for g, e in zip(ours, torch.autograd.grad(loss_of(plain, *batch), list(plain.parameters())), strict=True):
        torch.testing.assert_close(g, e)
    assert all(p.grad is None for p in net.parameters())
    loss_of(net, *batch).backward(inputs=[net.head.weight])
    assert [p.grad is not None for p in net.parameters()] == [p is net.head.weight for p in net.parameters()]
    opt.reset()
    for others in (
        [net.head.bias],
        [net.twice.bias],
        [net.narrow.weight, net.head.bias],
    ):  # of layers that backward passes on its way
        loss_of(net, *batch).backward(inputs=others)
        same = {id(p) for p in others}
        assert [p.grad is not None for p in net.parameters()] == [id(p) in same for p in net.parameters()]
        of_plain = [dict(plain.named_parameters())[n] for n, p in net.named_parameters() if id(p) in same]
        expected = torch.autograd.grad(loss_of(plain, *batch), of_plain)
        theirs = [p.grad for p in net.parameters() if p.grad is not None]
        for g, e in zip(theirs, expected, strict=True):
            torch.testing.assert_close(g, e)
        opt.reset()
    first = torch.autograd.grad(loss_of(net, *batch), net.head.weight, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), net.twice.weight)[0]
    first = torch.autograd.grad(loss_of(plain, *batch), plain.head.weight, create_graph=True)[0]
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), plain.twice.weight)[0])


def test_autocast_compile_and_functional_transforms_take_the_plain_way():
    net, batch = fused(Net(torch.float32)), batches(1)[0]
    plain = fa.unfuse(twin(net))
    opts = [fa.AccumulatingOptimizer(torch.optim.SGD(each.parameters(), lr=0.5), 9) for each in (net, plain)]
    for each in (net, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each, *batch)
        loss.backward()
        functional.cross_entropy(
            torch.compile(each, backend="aot_eager")(batch[0]).flatten(0, 1), batch[1].flatten()
        ).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    for opt in opts:
        opt.reset()
    parameters = dict(net.named_parameters())
    found = torch.func.grad(
        lambda ps: functional.cross_entropy(
            torch.func.functional_call(net, ps, batch[0]).flatten(0, 1), batch[1].flatten()
        )
    )(parameters)
    for name, g in zip(parameters, torch.autograd.grad(loss_of(plain, *batch), list(plain.parameters())), strict=True):
        torch.testing.assert_close(found[name], g)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_a_weight_see_its_gradient(kind):
    net, seen = fused(Net()), []
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), 2)
    loss = loss_of(net, *batches(1)[0])
    getattr(net.head.weight, kind)(lambda x: seen.append(x.shape))
    loss.backward()
    assert seen == [net.head.weight.shape]
    opt.step()


def wrapped(net, accum_steps=1, **kwargs):
    return fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), accum_steps, **kwargs)


def test_a_weight_frozen_between_forward_and_backward_gets_no_gradient():
    net, batch = fused(Net()), batches(1)[0]
    wrapped(net)
    loss = loss_of(net, *batch)
    frozen = [net.embedding.weight, net.head.weight]
    for p in frozen:
        p.requires_grad_(False)
    loss.backward()
    assert all(p.grad is None for p in frozen) and net.narrow.weight.grad is not None


@pytest.mark.parametrize("buffer_dtype", [torch.float32, None], ids=str)
def test_16_bit_layers(buffer_dtype):
    """FP32 buffers: fused where there is a GEMM (never on a CPU); an embedding always.

    16-bit buffers go the plain way.
    """
    net, data = fused(Net(torch.bfloat16)), batches()
    plain = fa.unfuse(twin(net))
    for each in (net, plain):
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(each.parameters(), lr=0.5), 9, buffer_dtype=buffer_dtype)
        for batch in data:
            loss_of(each, *batch).backward()
            opt.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == (buffer_dtype or torch.bfloat16)
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-3)


def test_a_pass_after_normalize_goes_on_from_the_sum():
    torch.manual_seed(4)
    plain, net = Net(), fused(Net())
    data = batches(3)
    for model in (plain, net):
        opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for tokens, targets in data[:2]:
            loss_of(model, tokens, targets).backward()
        opt.normalize_()
        loss_of(model, *data[2]).backward()
        opt.step()
    assert_same_parameters(net, plain, TOLERANCE[torch.float64])
