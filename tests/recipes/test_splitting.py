"""Recipes that split a batch find layers and losses that do not, and name the modules, once."""

import copy
import re
import warnings

import fusedaccum as fa
import fusedaccum.recipes.micro_batcher
import pytest
import torch
from fusedaccum.extensions import batch_norm
from fusedaccum.modules import name_of
from fusedaccum.recipes import splitting
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.long

SAMPLES = 12


@pytest.fixture(autouse=True)
def not_told_yet(monkeypatch):
    monkeypatch.setattr(splitting, "_told", set())
    monkeypatch.setattr(batch_norm, "_noted", False)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 3, 3, padding=1), norm()

    def forward(self, x):
        return x + F.relu(self.bn1(self.conv1(x)))


class ResNet(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layer1, self.fc = nn.Sequential(Block(norm), Block(norm)), nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(self.layer1(x).mean((2, 3)))


class SimCLR(nn.Module):
    def __init__(self, norm=lambda: nn.BatchNorm2d(3)):
        super().__init__()
        self.encoder, self.unused = ResNet(norm), nn.BatchNorm1d(4)  # of which nothing is to be said


def contrastive(a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


def views():
    return [torch.randn(SAMPLES, 3, 5, 5, dtype=torch.float64) for _ in range(2)]


def distance(net, expected):
    """How far the gradient is from the expected one, relative to that."""
    ours = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    return float((ours - expected).norm() / expected.norm())


def big_batch(net, batch):
    """The gradient of the whole batch, in plain PyTorch; the running statistics stay the same."""
    net = copy.deepcopy(net)
    net.zero_grad()
    contrastive(*(net.encoder(x) for x in batch)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


FIRST = r"2 BatchNorm layer\(s\), the first being encoder\.layer1\.0\.bn1 \({}\)"


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(
    "kind", ["BatchNorm2d", "SyncBatchNorm", "without affine", "without running statistics, eval()"]
)
def test_a_resnet_in_cached_backward_is_told_of_once_by_name(windows, kind):
    norm = {
        "BatchNorm2d": lambda: nn.BatchNorm2d(3),
        "SyncBatchNorm": lambda: nn.SyncBatchNorm(3),
        "without affine": lambda: nn.BatchNorm2d(3, affine=False),
        "without running statistics, eval()": lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(),
    }[kind]
    net, batch = SimCLR(norm).double(), views()
    expected = big_batch(net, batch)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.encoder.parameters(), lr=0.0)) if windows else None
    with pytest.warns(UserWarning, match=FIRST.format(type(norm()).__name__)) as told:
        fa.cached_backward(contrastive, [net.encoder] * 2, batch, micro_batch_size=4, opt=opt)
    assert len(told) == 1 and told[0].filename == __file__
    assert distance(net, expected) > 0.01  # the warning is true
    fa.cached_backward(contrastive, [net.encoder] * 2, batch, micro_batch_size=4, opt=opt)  # warnings are errors
    if windows:
        opt.step()  # nor is it told a second time as what an ordinary window is told of


@pytest.mark.parametrize(
    "case", ["whole batch", "eval", "GroupNorm", "InstanceNorm", "InstanceNorm of a batch", "pooled", "LayerNorm"]
)
def test_what_splits_is_not_told_of(case):
    norm = {
        "GroupNorm": lambda: nn.GroupNorm(1, 3),
        "InstanceNorm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        "InstanceNorm of a batch": lambda: nn.InstanceNorm2d(3),
        "LayerNorm": lambda: nn.LayerNorm([3, 5, 5]),
    }.get(case, lambda: nn.BatchNorm2d(3))
    net, batch = SimCLR(norm).double(), views()
    if case == "eval":
        net.eval()
    if case == "pooled":  # as one says that it is meant
        fa.accumulate_batchnorm(net)
        fa.AccumulatingOptimizer(torch.optim.SGD(net.encoder.parameters(), lr=0.0), 1)
    expected = None if case == "pooled" else big_batch(net, batch)
    size = SAMPLES if case == "whole batch" else 4
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.encoder.parameters(), lr=0.0)) if case == "pooled" else None
    fa.cached_backward(contrastive, [net.encoder] * 2, batch, micro_batch_size=size, opt=opt)
    if expected is not None:
        assert distance(net, expected) < 1e-9


def test_a_function_around_the_encoder_is_told_of_too():
    net, batch = SimCLR().double(), views()
    with pytest.warns(UserWarning, match=FIRST.format("BatchNorm2d")):
        fa.cached_backward(contrastive, [lambda x: net.encoder(x)] * 2, batch, micro_batch_size=4)


@pytest.mark.parametrize("frozen", ["encoder", "a part of it"])
def test_frozen_layers_that_are_not_in_eval_mode_are_told_of(frozen):
    """Nothing of them is in the graph."""
    net, batch = SimCLR().double(), views()
    net.encoder.requires_grad_(False)
    head = nn.Linear(4, 4).double()
    encoder = nn.Sequential(net.encoder, head) if frozen == "a part of it" else net.encoder
    with pytest.warns(UserWarning, match=r"2 BatchNorm layer\(s\), the first being .*layer1\.0\.bn1"):
        fa.cached_backward(lambda a, b: contrastive(a, head(b)), [encoder] * 2, batch, micro_batch_size=4)


def test_layers_that_leave_eval_mode_are_told_of_then():
    net, batch = SimCLR().double().eval(), views()
    fa.cached_backward(contrastive, [net.encoder] * 2, batch, micro_batch_size=4)
    net.train()
    with pytest.warns(UserWarning, match="BatchNorm layer"):
        fa.cached_backward(contrastive, [net.encoder] * 2, batch, micro_batch_size=4)


def test_a_compiled_encoder_is_told_of(compiled_anew):
    net, batch = SimCLR().double(), views()
    net.encoder.compile(backend="eager")
    with pytest.warns(UserWarning, match=FIRST.format("BatchNorm2d")):
        fa.cached_backward(contrastive, [net.encoder] * 2, batch, micro_batch_size=4)


def two_views(z):
    """As SimCLR's loss compares two views of every sample."""
    return (z @ z.T).softmax(1) @ z


FUNCTIONS = {
    "F.batch_norm": (lambda h: F.batch_norm(h, None, None, training=True), r"F\.batch_norm\(training=True\)"),
    "std": (lambda h: (h - h.mean(0)) / h.std(0), "a variance or standard deviation over the samples"),
    "std, from the end": (lambda h: (h - h.mean(0)) / h.std(-2), "a variance or standard deviation over the samples"),
    "var": (lambda h: h / (h.var(dim=0, keepdim=True) + 1), "a variance or standard deviation over the samples"),
    "var_mean": (lambda h: h / torch.var_mean(h, 0)[0], "a variance or standard deviation over the samples"),
    "std of all": (lambda h: h / h.std(), "a variance or standard deviation over the samples"),
    "products": (lambda h: (h @ h.T).softmax(1) @ h, "a product of all samples with each other"),
    "products of two views": (
        lambda h: two_views(torch.cat([h, 2 * h]))[: len(h)],
        "a product of all samples with each other",
    ),
    "distances": (lambda h: torch.cdist(h, h).sum(1, keepdim=True) * h, "a product of all samples with each other"),
}


@pytest.mark.parametrize("recipe", ["cached_backward", "MicroBatcher"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_look_at_several_samples_are_told_of_once(recipe, function):
    layer, x = nn.Linear(6, 5), torch.randn(SAMPLES, 6)
    of_batch, named = FUNCTIONS[function]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(layer.parameters(), lr=0.0))
    for again in (False, True):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if recipe == "cached_backward":
                loss_fn = lambda z: z.square().mean()  # noqa: E731
                fa.cached_backward(loss_fn, lambda x: of_batch(layer(x)), x, micro_batch_size=4, opt=opt)
            else:
                fa.MicroBatcher(lambda x: of_batch(layer(x)).square().mean(), opt, micro_batch_size=4).step(x)
        assert [w.filename for w in told] == ([] if again else [__file__]), [str(w.message) for w in told]
        for w in told:
            assert re.match(rf"{recipe} splits the batch, and {named}", str(w.message))
        opt.reset()


FINE = {
    "eval": lambda h, w: F.batch_norm(h, torch.zeros(5), torch.ones(5), training=False),
    "instance_norm": lambda h, w: F.instance_norm(h.unsqueeze(2).expand(-1, -1, 3)).mean(2) + h,
    "std of each sample": lambda h, w: h / h.std(1, keepdim=True),
    "std of each sample, from the end": lambda h, w: h / h.std(-1, keepdim=True),
    "weights": lambda h, w: h + (w @ w.T).mean() + w.std(0).mean(),
    "each sample by itself": lambda h, w: torch.stack([(v := row.view(4, 1).expand(4, 2)) @ v.T for row in h[:, :4]]),
    "a mean": lambda h, w: h - h.detach().mean(1, keepdim=True),
}


@pytest.mark.parametrize("recipe", ["cached_backward", "MicroBatcher"])
@pytest.mark.parametrize("function", FINE)
def test_functions_of_one_sample_or_of_weights_are_not_told_of(recipe, function):
    layer, w, x = nn.Linear(6, 5), nn.Parameter(torch.randn(4, 5)), torch.randn(SAMPLES, 6)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([*layer.parameters(), w], lr=0.0))
    if recipe == "cached_backward":
        fa.cached_backward(
            lambda z: z.square().mean(), lambda x: FINE[function](layer(x), w), x, micro_batch_size=4, opt=opt
        )
    else:
        fa.MicroBatcher(lambda x: FINE[function](layer(x), w).square().mean(), opt, micro_batch_size=4).step(x)


@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("given", ["function", "module"])
def test_a_micro_batcher_tells_of_layers_once_it_splits(size, given, monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.simclr, self.room = SimCLR().double(), SAMPLES

        def forward(self, x):
            if len(x) > self.room:
                raise torch.OutOfMemoryError("injected")
            return self.simclr.encoder(x).square().mean()

    model, x = Model(), views()[0]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.simclr.encoder.parameters(), lr=0.0))
    batcher = fa.MicroBatcher(model if given == "module" else lambda x: model(x), opt, micro_batch_size=size)
    if size == "auto":
        batcher.step(x)  # the whole batch: warnings are errors
        model.room = 7
    with pytest.warns(
        UserWarning, match=r"2 BatchNorm layer\(s\), the first being simclr\.encoder\.layer1\.0\.bn1"
    ) as told:
        batcher.step(x)
    assert len(told) == 1 and told[0].filename == __file__
    with monkeypatch.context() as patched:
        patched.delattr(fusedaccum.recipes.micro_batcher, "note_layers")  # it looks once
        batcher.step(x)


def test_a_micro_batcher_says_nothing_of_what_splits():
    net, x = SimCLR(lambda: nn.GroupNorm(1, 3)), views()[0].float()
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.encoder.parameters(), lr=0.0))
    fa.MicroBatcher(lambda x: net.encoder(x).square().mean(), opt, micro_batch_size=4).step(x)


def test_the_note_can_be_silenced():
    warnings.filterwarnings("ignore", ".*BatchNorm layer")
    net = SimCLR().double()
    fa.cached_backward(contrastive, [net.encoder] * 2, views(), micro_batch_size=4)


def test_modules_and_parameters_are_named_as_in_the_outermost_module():
    net = SimCLR()
    outer = nn.ModuleDict({"student": nn.DataParallel(net)})
    compiled = torch.compile(net)  # nothing runs
    assert name_of(net.encoder.layer1[1].bn1) == "student.encoder.layer1.1.bn1"
    assert name_of(net.encoder.fc.weight) == "student.encoder.fc.weight"
    del outer, compiled
    assert name_of(net.encoder.fc.weight) == "encoder.fc.weight"
    assert name_of(net) == "" and name_of(nn.Parameter(torch.zeros(1))) == ""
    net.encoder.itself = net  # a cycle
    assert name_of(net.encoder.fc.bias).endswith("encoder.fc.bias")
