"""Memory that runs out where a test wants it to.

Each place in a window where PyTorch may allocate is a point, and points can fail.
"""

import functools

import fusedaccum as fa
import fusedaccum.extensions.batch_norm
import fusedaccum.ops
import fusedaccum.recipes.micro_batcher
import torch
from fusedaccum.extensions.retries import Attempt
from torch import nn


class Points:
    """Counts the points that the window passes, and raises at those in ``fail``.

    Attributes:
        attempts: every attempt of the batcher. broken: those that ran out of memory.
    """

    def __init__(self, monkeypatch, net, fail=(), error=torch.OutOfMemoryError):
        self.met, self.fail, self.error = 0, set(fail), error
        self.attempts, self.broken = [], []
        for module in net.modules():
            module.register_forward_pre_hook(self)
            module.register_forward_hook(self._made)
        fused = {
            module.weight for module in net.modules() if isinstance(module, nn.Linear) and type(module) is not nn.Linear
        }
        for p in net.parameters():
            if p.requires_grad and p not in fused:  # a fused layer goes the plain way when its weight has hooks
                p.register_hook(self)  # a gradient that is about to arrive
        self._inside(monkeypatch, fusedaccum.ops, "accumulate_")
        self._inside(monkeypatch, fusedaccum.recipes.micro_batcher.nested, "cut")
        monkeypatch.setattr(fusedaccum.recipes.micro_batcher, "Attempt", self._tried)
        # What make_room() does is not tested here, and looking through all objects takes long.
        monkeypatch.setattr(
            fusedaccum.recipes.micro_batcher, "make_room", lambda: self.broken.append(self.attempts[-1])
        )
        for module in (fusedaccum.recipes.micro_batcher, fusedaccum.extensions.batch_norm):
            monkeypatch.setattr(module, "modules_alive", functools.partial(_modules_of, net))

    def __call__(self, *_):
        self.met += 1
        if self.met in self.fail:
            raise self.error("injected: CUDA out of memory")

    def _made(self, module, args, output):
        if output.requires_grad:
            output.register_hook(self)
        self()

    def _inside(self, monkeypatch, module, name):
        plain = getattr(module, name)

        def asks(*args, **kwargs):
            self()
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, asks)

    def _tried(self, done):
        self.attempts.append(Attempt(done))
        return self.attempts[-1]

    @property
    def partial(self):
        """How many attempts broke off with some, but not all, of their gradients added."""
        most = max(len(attempt.taken) for attempt in self.attempts)
        return sum(0 < len(attempt.taken) < most for attempt in self.broken if not attempt.done)


def _modules_of(net, kind, wanted=lambda module: True):
    return [module for module in net.modules() if isinstance(module, kind) and wanted(module)]


class Net(nn.Module):
    """A tied weight, a parameter that only some samples use, a frozen one, and an unused one."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.third, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.frozen, self.unused = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(2))
        self.sometimes = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, x):
        y = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        y = self.head(y) + self.frozen
        uses = x[:, :1] > 0
        return y + self.sometimes * uses if uses.any() else y


def made(dtype=torch.float64, make=None, net=Net, **settings):
    torch.manual_seed(1)
    model = net(dtype)
    inner = (make or sgd)(model.parameters())
    return model, fa.AccumulatingOptimizer(inner, **settings)


def sgd(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def batch(n=11, dtype=torch.float64, seed=3):
    """Inputs, targets, and one weight per sample, which is 0 for some."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (6, 3))
    return {"x": x.to(dtype), "y": y.to(dtype), "weight": torch.arange(n) * 5 % 4}


def function(net, reduction="mean", total=None):
    """The loss of a micro-batch, weighted by ``batch``'s weights."""

    def loss(part):
        each = (net(part["x"]) - part["y"]).square().mean(1)
        summed = (each * part["weight"]).sum()
        return {"sum": summed, "mean": summed / part["weight"].sum().clamp(min=1), "none": summed / (total or 1)}[
            reduction
        ]

    return loss


def weight(part):
    return part["weight"].sum()


def oracle(whole, dtype=torch.float64, make=None, net=Net):
    """Plain PyTorch on each window as one big batch: the model, and the last loss."""
    torch.manual_seed(1)
    model = net(dtype)
    optimizer = (make or sgd)(model.parameters())
    for samples in whole:
        optimizer.zero_grad()
        loss = function(model)(samples)
        loss.backward()
        optimizer.step()
    return model, loss.detach()


def assert_close(model, expected, tolerance):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        error = (p.detach().double() - q.detach().double()).norm() / q.detach().double().norm()
        assert error <= tolerance, f"{name}: relative error {float(error):.3g}"


class Memory:
    """A loss that runs out of memory beyond ``room`` elements."""

    def __init__(self, room):
        self.room, self.errors, self.sizes = room, 0, []
        self.net = nn.Linear(1, 1)
        self.opt = fa.AccumulatingOptimizer(torch.optim.SGD(self.net.parameters(), lr=0.01))

    def __call__(self, x):
        self.sizes.append(len(x))
        if x.numel() > self.room:
            self.errors += 1
            raise torch.OutOfMemoryError("injected")
        return self.net(x.unsqueeze(-1)).square().mean()


def ran(monkeypatch, fail=(), first=4, dtype=torch.float64, windows=1, net=Net, reduction="mean", **settings):
    """Windows that begin with micro-batches of ``first`` and run out of memory at ``fail``.

    Returns model, points, losses and optimizer.
    """
    with monkeypatch.context() as patched:
        model, opt = made(dtype, reduction=reduction, net=net, **settings)
        points = Points(patched, model, fail)
        loss = function(model, reduction, total=float(weight(batch())))
        batcher = fa.MicroBatcher(loss, opt, weight=weight)
        batcher._sizes.of(batch(dtype=dtype)).limit = first
        losses = [batcher.step(batch(dtype=dtype, seed=3 + window)) for window in range(windows)]
    return model, points, losses, opt
