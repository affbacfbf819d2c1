"""Losses of several ranks that one weight does not describe.

As in docs/questions/different-denominators.md, terms have denominators of their own, or ranks have
parts of one sequence. The oracle is plain PyTorch on the whole window, in one process.
"""

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import Gathered, full
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

COEFFICIENTS = torch.tensor([1.0, 0.3, 0.1])


def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def window(size, seed=2):
    """``size`` unequal parts: inputs, targets, and which tokens each of the three terms is over."""
    g = torch.Generator().manual_seed(seed)
    counts = [int(n) for n in torch.randint(3, 20, (size,), generator=g)]
    return [
        (torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g), torch.arange(n) >= n - k, torch.arange(n) >= n - 1)
        for n, k in zip(counts, [int(n) for n in torch.randint(1, 4, (size,), generator=g)], strict=True)
    ]  # fmt: skip


def terms(net, x, y, some, last):
    """Each term's sum: cross-entropy over some tokens, error over the last, penalty over all."""
    out = net(x)
    losses = nn.functional.cross_entropy(out[:, :3], y, reduction="none")
    return torch.stack([losses[some].sum(), out[last, 3].square().sum(), out.logsumexp(1).square().sum()])


def counted(x, y, some, last):
    return torch.tensor([some.sum(), last.sum(), len(x)])


def gradient(loss, net):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def whole_window(parts):
    net = made()
    counts = sum(counted(*part) for part in parts)
    return gradient((COEFFICIENTS * sum(terms(net, *part) for part in parts) / counts).sum(), net)


def divided_by_the_windows_counts(rank, parts, how):
    net = made()
    module = DistributedDataParallel(net) if how == "ddp" else fully_shard(net) if how == "fsdp2" else net
    settings = {"process_group": dist.group.WORLD} if how == "group" else {}
    ranks = dist.get_world_size()
    mine = parts[rank::ranks]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), len(mine), reduction="none", **settings)
    counts = sum(counted(*part) for part in mine)
    dist.all_reduce(counts)
    for part in mine:
        (ranks * COEFFICIENTS * terms(module, *part) / counts).sum().backward()
        opt.step()
    return torch.cat([full(p.grad).flatten() for p in net.parameters()])


@pytest.mark.parametrize("how", ["group", "ddp", "fsdp2"])
@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_terms_divided_by_the_windows_counts_of_all_ranks_are_the_big_batchs(worlds, length, how):
    parts = window(2 * length)
    expected = whole_window(parts)
    for found in worlds(2).run(divided_by_the_windows_counts, parts=parts, how=how):
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def weighed(rank, parts):
    net = made()
    mine = parts[rank :: dist.get_world_size()]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), len(mine), process_group=dist.group.WORLD)
    for part in mine:
        counts = counted(*part)
        opt.backward((COEFFICIENTS * terms(net, *part) / counts).sum(), weight=counts[0])
        opt.step()
    return torch.cat([full(p.grad).flatten() for p in net.parameters()])


def test_own_means_with_the_weight_of_one_of_them_are_not(worlds):
    parts = window(8)
    expected = whole_window(parts)
    for found in worlds(2).run(weighed, parts=parts):
        assert (found - expected).norm() > 0.05 * expected.norm()


# -- both ranks have a part of every sequence ------------------------------------------------------


class Attends(nn.Module):
    """Every token sees the mean over its whole sequence, of which this rank has a part."""

    def __init__(self, gather):
        super().__init__()
        torch.manual_seed(1)
        self.seen, self.head, self.gather = nn.Linear(6, 5), nn.Linear(11, 3), gather

    def forward(self, x):
        keys = self.gather(self.seen(x).tanh())
        return self.head(torch.cat([x, keys.mean(0).expand(len(x), 5)], 1))


def sequences(count):
    """Of 8 tokens, of which only some count: nearly all that do are in the second half."""
    g = torch.Generator().manual_seed(4)
    for number in range(count):
        y = torch.randint(3, (8,), generator=g)
        y[: 3 + number % 2] = -100
        yield torch.randn(8, 6, generator=g), y


def summed(net, x, y):
    return nn.functional.cross_entropy(net(x), y, ignore_index=-100, reduction="sum")


def in_parts(rank, way):
    ranks = dist.get_world_size()
    net = Attends(Gathered.apply)
    reduction = {"own sum": "sum", "window's count": "none"}.get(way, "mean")
    settings = {"accum_steps": 4, "reduction": reduction, "process_group": dist.group.WORLD}
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **settings)
    everything = list(sequences(4))
    in_window = sum(int((y != -100).sum()) for _, y in everything)
    for x, y in everything:
        whole = int((y != -100).sum())
        x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        own, loss = int((y != -100).sum()), summed(net, x, y)
        if way == "own sum":
            loss.backward()
            opt.step(weight=own)
            continue
        if way == "window's count":
            (ranks * loss / in_window).backward()
        elif way == "own mean":
            opt.backward(loss / own, weight=own)
        elif way == "whole mean":
            opt.backward(loss / whole, weight=whole)
        elif way == "whole mean, times the ranks":
            opt.backward(ranks * loss / whole, weight=whole)
        else:  # the sum over the ranks, whose backward sums their gradients
            opt.backward(Gathered.apply(loss.reshape(1)).sum() / whole, weight=whole)
        opt.step()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    ("way", "factor"),
    [
        ("own sum", 1),
        ("window's count", 1),
        ("whole mean, times the ranks", 1),
        ("whole mean, summed with its gradient", 1),
        ("whole mean", 0.5),
        ("own mean", None),
    ],
)
def test_what_ranks_that_share_sequences_pass(worlds, way, factor):
    net = Attends(lambda keys: keys)
    everything = list(sequences(4))
    expected = gradient(sum(summed(net, *of) for of in everything) / sum((y != -100).sum() for _, y in everything), net)
    for found in worlds(2).run(in_parts, way=way):
        if factor is None:  # it depends on the other rank's tokens, whose loss was weighted otherwise
            assert (found - expected).norm() > 0.05 * expected.norm()
        else:
            assert (found - factor * expected).norm() <= 1e-6 * expected.norm()
