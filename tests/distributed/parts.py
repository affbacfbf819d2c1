"""What the ranks train: a small model, on a batch cut into micro-batches of unequal weights."""

import fusedaccum as fa
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class Net(nn.Module):
    """Two dtypes, a parameter that only some micro-batches use, an unused one, and a frozen one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(12, 40)
        self.second = nn.Linear(40, 3, bias=False)
        self.to(dtype)
        self.scale = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.full((3,), 0.5))
        self.never = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, use=False):
        y = self.second(torch.tanh(self.first(x.to(self.first.weight.dtype)))).float() * self.scale + self.frozen
        return y + self.sometimes if use else y


class Gathered(torch.autograd.Function):
    """All ranks' rows; in backward, a rank's rows get the sum of all ranks' gradients for them."""

    @staticmethod
    def forward(ctx, mine):
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.tensor_split(dist.get_world_size())[dist.get_rank()]


class Block(nn.Module):
    """Layers that tensor parallelism splits, and a parameter that it does not."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale


def made(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    return Net(dtype)


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.02)


def micro_batches(window, count, equal=False):
    """The ``count`` micro-batches of a window.

    Each is its inputs, targets, weight (tokens), and whether ``sometimes`` is used.
    """
    generator = torch.Generator().manual_seed(window)
    for number in range(count):
        tokens = 4 if equal else int(torch.randint(1, 9, (), generator=generator))
        x = torch.randn(tokens, 12, generator=generator)
        y = torch.randn(tokens, 3, generator=generator)
        yield x, y, float(tokens), number == 1


def mean_loss(model, x, y, use):
    return (model(x, use) - y).square().mean()


def big_batch(model, opt, window, count, equal=False, limit=None, sometimes=True):
    """The oracle: one gradient of all tokens of a window, in the model's dtype, and one step.

    Returns the norm before clipping. ``sometimes``: is the parameter of that name used? (FSDP2
    needs it used by all ranks or by none.)
    """
    parts = [(x, y, w, use and sometimes) for x, y, w, use in micro_batches(window, count, equal)]
    return one_batch(model, opt, parts, limit)


def one_batch(model, opt, parts, limit=None):
    """As :func:`big_batch`, for these micro-batches."""
    opt.zero_grad()
    total = sum(w for *_, w, _ in parts)
    sum(mean_loss(model, x, y, use) * (w / total) for x, y, w, use in parts).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
    opt.step()
    return float(norm)


def share(window, count, rank, size, equal=False):
    """A rank's micro-batches: every ``size``-th."""
    return list(micro_batches(window, count, equal))[rank::size]


def full(x):
    """A copy of a tensor; of a DTensor, the full one (all ranks with parts must call this)."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def contents(model, opt):
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [full(x) for x in [*model.parameters(), *state]]


def assert_close(ours, theirs, tolerance=1e-6):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert not a.isnan().any()
        a, b = a.detach().double(), b.detach().double()
        error, size = (a - b).norm(), b.norm()
        assert error <= tolerance * max(float(size), 1e-3), f"{float(error / size)} in {tuple(a.shape)}"


def wrapped(model, make=sgd, **settings):
    return fa.AccumulatingOptimizer(make(model.parameters()), **settings)
