"""``fa.cached_backward`` in a wrapper's windows, with a GradScaler or pooled batch statistics."""

import copy

import fusedaccum as fa
import pytest
import torch
from contrastive import WAYS, Clip, Tower, assert_close, both, clip, gradients, modules
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


def wrapped(parts, **settings):
    return fa.AccumulatingOptimizer(torch.optim.SGD(parts.parameters(), lr=0.1), **settings)


@pytest.mark.parametrize("settings", [{}, {"accum_steps": 3}, {"accum_steps": 3, "nonfinite": "skip_micro_batch"}])
def test_windows_of_cached_micro_batches(settings):
    """bf16 parameters, three cached micro-batches of unequal weight, against a model in FP64."""
    a, b, loss_fn = Tower(5).bfloat16(), Tower(7).bfloat16(), Clip()
    parts = nn.ModuleList([a, b, loss_fn])
    exact = copy.deepcopy(parts).double()
    opt, norms = wrapped(parts, max_grad_norm=1e9, **settings), {}
    opt.register_step_pre_hook(lambda *_: norms.update(gradients(parts)))
    batches = [(n, torch.randn(n, 5).bfloat16(), torch.randn(n, 7).bfloat16()) for n in (13, 9, 4)]

    def loss_in_fp32(x, y):
        return loss_fn(x.float(), y.float())

    for n, x, y in batches:
        fa.cached_backward(loss_in_fp32, [a, b], [x, y], micro_batch_size=4, opt=opt, weight=n)
        if settings:
            opt.step()
    if not settings:
        opt.step()
    total = sum(n / 26 * exact[2](exact[0](x.double()), exact[1](y.double())) for n, x, y in batches)
    total.backward()
    assert opt.updated and opt.last_window.micro_batches == 3 and opt.last_window.weight == 26
    assert float(opt.last_window.loss) == pytest.approx(total.item(), rel=0.02)
    theirs = torch.cat([p.grad.flatten() for p in exact.parameters()])
    ours = torch.cat([grad.double().flatten() for grad in norms.values()])
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # a bf16 forward and backward of three layers
    assert float(opt.last_window.grad_norm) == pytest.approx(float(theirs.norm()), rel=0.02)


def test_sums_over_micro_batches_are_not_rounded_to_bf16():
    """The sum is 1 + 256 * 2**-9; in bf16 each of those 256 additions would be lost."""
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([weight], lr=0.1))
    x = torch.full((257, 1), 2**-9, dtype=torch.bfloat16)
    x[0] = 1
    fa.cached_backward(lambda z: z.float().sum(), lambda x: x @ weight, x, micro_batch_size=1, opt=opt)
    assert weight.grad.dtype == torch.float32 and weight.grad.item() == 1.5


def test_a_call_is_one_micro_batch_however_it_is_grouped():
    for group in ("opt", "outside"):
        case, theirs, _ = both(clip, torch.float32)
        opt = wrapped(modules(case))
        if group == "opt":
            fa.cached_backward(*case, micro_batch_size=4, opt=opt)
        else:
            with opt.micro_batch():
                fa.cached_backward(*case, micro_batch_size=4)
        opt.normalize_()
        assert_close(gradients(modules(case)), theirs, 1e-6)
        opt.step()
        assert opt.last_window.micro_batches == 1


def test_counted_windows_need_no_group():
    case, theirs, _ = both(clip, torch.float32)
    opt = wrapped(modules(case), accum_steps=2)
    for _ in range(2):
        fa.cached_backward(*case, micro_batch_size=4)
        opt.step()
    assert opt.last_window.micro_batches == 2
    assert_close(gradients(modules(case)), theirs, 1e-6)


@pytest.mark.parametrize("through", ["modules", "functions", "the loss"])
@pytest.mark.parametrize("settings", [{}, {"accum_steps": 2, "nonfinite": "raise"}])
def test_ungrouped_passes_are_refused_before_anything_is_added(settings, through):
    loss_fn, (a, b), inputs = clip(torch.float32)
    owner = nn.ModuleList([loss_fn] if through == "the loss" else [a, b])
    opt = wrapped(owner, **settings)
    encoders = [a, b] if through == "modules" else [lambda x: a(x), lambda x: b(x)]
    loss = loss_fn if through == "modules" else lambda x, y: loss_fn(x, y)
    with pytest.raises(RuntimeError, match="give opt="):
        fa.cached_backward(loss, encoders, inputs, micro_batch_size=4)
    assert all(p.grad is None for p in owner.parameters())
    opt.flush()
    assert opt.last_window is None  # nothing was counted


def test_another_wrapper_must_be_grouped_too():
    case = clip(torch.float32)
    one, other = wrapped(nn.ModuleList([case[0], case[1][0]])), wrapped(case[1][1])
    with pytest.raises(RuntimeError, match="every such wrapper"):
        fa.cached_backward(*case, micro_batch_size=4, opt=one)
    with other.micro_batch():
        fa.cached_backward(*case, micro_batch_size=4, opt=one)
    for opt in (one, other):
        opt.step()
        assert opt.last_window.micro_batches == 1


def test_with_a_grad_scaler():
    case, theirs, loss = both(clip, torch.float32)
    loss_fn, encoders, inputs = case
    opt, scaler = wrapped(modules(case), accum_steps=2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        scaled = fa.cached_backward(lambda *z: scaler.scale(loss_fn(*z)), encoders, inputs, micro_batch_size=4, opt=opt)
        assert torch.allclose(scaled, 1024 * loss)
        scaler.step(opt)
        scaler.update()
    assert_close(gradients(modules(case)), theirs, 1e-6)


@pytest.mark.parametrize("place", ["first pass", "loss", "second pass"])
def test_an_exception_counts_for_nothing(place):
    case, theirs, _ = both(clip, torch.float32)
    loss_fn, (a, b), inputs = case
    opt = wrapped(modules(case), accum_steps=2, nonfinite="skip_micro_batch")

    def broken_loss(*z):
        if place == "loss":
            raise KeyError("broken")
        return loss_fn(*z)

    def broken(x):
        if place == ("second pass" if torch.is_grad_enabled() else "first pass"):
            raise KeyError("broken")
        return b(x)

    fa.cached_backward(*case, micro_batch_size=4, opt=opt)
    opt.step()
    with pytest.raises(KeyError):
        fa.cached_backward(broken_loss, [a, broken], inputs, micro_batch_size=4, opt=opt)
    fa.cached_backward(*case, micro_batch_size=4, opt=opt)
    opt.step()
    assert opt.last_window.micro_batches == 2
    assert_close(gradients(modules(case)), theirs, 1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the first pass
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["", "checkpointed", "re-entrant"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", [1, 2])
def test_pooled_batch_statistics_are_the_big_batchs(calls, way, checkpointed):
    """A cached micro-batch's parts are one population, counted once: not in the first pass."""
    torch.manual_seed(0)
    encoder = Checkpointed(checkpointed)
    views = [torch.randn(10, 3).double() * (i + 1) + i for i in range(calls)]
    oracle = copy.deepcopy(encoder)
    for view in views:
        oracle(view)

    fa.accumulate_batchnorm(encoder)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(encoder.parameters(), lr=0.0))
    fa.cached_backward(
        lambda *embeddings: sum(e.square().mean() for e in embeddings),
        [encoder] * calls,
        views,
        micro_batch_size=4,
        opt=opt,
    )
    opt.step()
    for name, buffer in encoder.norm.named_buffers():
        torch.testing.assert_close(buffer, getattr(oracle.norm, name), rtol=1e-12, atol=1e-12)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(3, 3).double(),
            nn.BatchNorm1d(3).double(),
            nn.Linear(3, 2).double(),
        )
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        x = self.norm(x) if self.reentrant is None else checkpoint(self.norm, x, use_reentrant=self.reentrant)
        return self.last(x)


def test_an_encoder_without_parameters_is_pooled_too():
    """Its statistics follow the wrapper of the modules around it."""
    trunk, head = nn.Linear(3, 3).double(), nn.Sequential(nn.BatchNorm1d(3, affine=False).double(), nn.Tanh())
    oracle, x = copy.deepcopy(head), torch.randn(10, 3).double()
    oracle(trunk(x))
    opt = wrapped(fa.accumulate_batchnorm(nn.Sequential(trunk, head)))
    fa.cached_backward(lambda z: (z @ z.T).logsumexp(1).mean(), head, trunk(x), micro_batch_size=5, opt=opt)
    opt.step()
    for name, buffer in head[0].named_buffers():
        torch.testing.assert_close(buffer, getattr(oracle[0], name), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:cached_backward splits the batch")  # the other encoder
def test_a_frozen_encoder_is_pooled_too():
    encoder, frozen = Checkpointed(None), Checkpointed(None).requires_grad_(False)
    x = torch.randn(10, 3).double()
    oracle = copy.deepcopy(frozen)
    oracle(x)
    fa.accumulate_batchnorm(frozen)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([*encoder.parameters(), *frozen.parameters()], lr=0.0))
    fa.cached_backward(lambda a, b: (a * b).mean(), [encoder, frozen], [x, x], micro_batch_size=4, opt=opt)
    opt.step()
    for name, buffer in frozen.norm.named_buffers():
        torch.testing.assert_close(buffer, getattr(oracle.norm, name), rtol=1e-12, atol=1e-12)


def test_the_loss_is_told_without_a_grad_scalers_factor():
    case, _, loss = both(clip, torch.float32)
    loss_fn, encoders, inputs = case
    opt, scaler = wrapped(modules(case), accum_steps=2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        fa.cached_backward(lambda *z: scaler.scale(loss_fn(*z)), encoders, inputs, micro_batch_size=4, opt=opt)
        scaler.step(opt)
        scaler.update()
    assert opt.last_window.loss.item() == pytest.approx(loss.item(), rel=1e-6)
