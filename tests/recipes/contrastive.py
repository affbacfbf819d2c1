"""Losses that are not a sum over samples, their encoders, inputs and big batches, written out."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

SAMPLES = 13


class Tower(nn.Module):
    """An encoder without batch statistics, which takes keyword, positional or single inputs."""

    def __init__(self, features, embedding=6, dropout=0.0):
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(
            nn.Linear(features, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, embedding)
        )

    def forward(self, x, scale=None):
        return F.normalize(self.layers(x if scale is None else x * scale), dim=-1)


class Clip(nn.Module):
    """The loss of CLIP, with its learned temperature."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        logits = self.log_scale.exp() * a @ b.T
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class SupCon(nn.Module):
    """Khosla et al., 2020: samples of one label are positives. (A module without parameters.)"""

    labels = torch.arange(SAMPLES) % 3

    def forward(self, z):
        alone = torch.eye(len(z), dtype=torch.bool)
        log_p = F.log_softmax((z @ z.T / 0.2).masked_fill(alone, -1e9), dim=1)
        positive = (self.labels[:, None] == self.labels) & ~alone
        return -((log_p * positive).sum(1) / positive.sum(1)).mean()


def barlow_twins(a, b):
    """Zbontar et al., 2021: pulls the correlation of two views' features towards the identity."""
    a, b = ((z - z.mean(0)) / z.std(0) for z in (a, b))
    apart = (a.T @ b / len(a) - torch.eye(a.shape[1], dtype=a.dtype)).square()
    return apart.diagonal().sum() + 0.1 * (apart.sum() - apart.diagonal().sum())


def clip(dtype):
    a, b = Tower(5), Tower(7)
    return Clip(), [a, b], [torch.randn(SAMPLES, 5, dtype=dtype), torch.randn(SAMPLES, 7, dtype=dtype)]


def info_nce_of_shared_weights(dtype):
    shared = Tower(5)
    return Clip(), [shared, shared], [torch.randn(SAMPLES, 5, dtype=dtype) for _ in range(2)]


def supcon(dtype):
    return SupCon(), Tower(5), {"x": torch.randn(SAMPLES, 5, dtype=dtype), "scale": torch.rand(SAMPLES, 1, dtype=dtype)}


def barlow(dtype):
    tower = Tower(5)
    return barlow_twins, nn.ModuleList([tower, tower]), [torch.randn(SAMPLES, 5, dtype=dtype) for _ in range(2)]


def unequal_batches(dtype):
    """Three passages per query (dense retrieval); one batch is a tuple, one encoder a function."""
    queries, passages = Tower(5), Tower(5)

    def loss(q, p):
        scores = (20 * q @ p["embedding"].T + p["given"].sum(1)).masked_fill(p["mask"], -5)
        return F.cross_entropy(scores, 3 * torch.arange(len(q)))

    x = (torch.randn(SAMPLES, 5, dtype=dtype), torch.rand(SAMPLES, 1, dtype=dtype))
    y = {"tokens": torch.randn(3 * SAMPLES, 5, dtype=dtype)}
    encode = Encode(passages)
    return loss, [queries, encode], [x, y]


class Encode:
    """A function that takes a micro-batch as it is, and returns more than a tensor."""

    def __init__(self, tower):
        self.tower = tower

    def __call__(self, batch):
        given = batch["tokens"]
        return {"embedding": self.tower(given), "mask": given[:, 0] > 0, "given": given.abs(), "cache": None}


CASES = [clip, info_nce_of_shared_weights, supcon, barlow, unequal_batches]


def modules(case):
    loss_fn, encoders, _ = case
    encoders = encoders if isinstance(encoders, (list, nn.ModuleList)) else [encoders]
    parts = [getattr(part, "tower", part) for part in [loss_fn, *encoders]]
    return nn.ModuleList(part for part in parts if isinstance(part, nn.Module))


def big_batch(case):
    """The loss over the whole batch, written out in plain PyTorch."""
    loss_fn, encoders, inputs = case
    if not isinstance(encoders, (list, nn.ModuleList)):
        encoders, inputs = [encoders], [inputs]
    embeddings = []
    for encoder, batch in zip(encoders, inputs):
        if isinstance(encoder, nn.Module) and isinstance(batch, dict):
            embeddings.append(encoder(**batch))
        elif isinstance(encoder, nn.Module) and isinstance(batch, tuple):
            embeddings.append(encoder(*batch))
        else:
            embeddings.append(encoder(batch))
    return loss_fn(*embeddings)


def gradients(parts):
    return {name: p.grad for name, p in parts.named_parameters()}


def assert_close(ours, theirs, tolerance):
    """Compare each parameter's gradient, with an error relative to the whole gradient.

    Where terms cancel, their rounding errors do not.
    """
    assert ours.keys() == theirs.keys()
    size = torch.stack([grad.double().norm() for grad in theirs.values()]).norm()
    for name, grad in theirs.items():
        error = (ours[name].double() - grad.double()).norm() / size
        assert error <= tolerance, f"{name}: {float(error)}"


def both(make, dtype=torch.float64):
    """A case for us, and the big batch's gradients and loss, from a copy with its own weights."""
    case = make(dtype)
    modules(case).to(dtype)
    ours = copy.deepcopy(case)
    loss = big_batch(case)
    loss.backward()
    return ours, gradients(modules(case)), loss.detach()


WAYS = {
    "module": lambda encoder: encoder,
    "function": lambda encoder: lambda x: encoder(x),
    "method": lambda encoder: encoder.forward,
}
