"""``fa.cached_backward``: the gradient of the one big backward of losses that are no sum over samples, and nothing left behind."""

import copy
import re

import fusedaccum as fa
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SAMPLES = 13
SIZES = [1, 4, 13, 50]  # dividing the batch or not, all of it, and more
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.fixture(autouse=True)
def one_thread(threads):
    """So small tensors only wait for others."""
    threads(1)


class Tower(nn.Module):
    """An encoder without any statistics over the batch; of keyword, positional or single inputs."""

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
    """Khosla et al., 2020: every sample of the same label is a positive. (A module as loss, without parameters.)"""

    labels = torch.arange(SAMPLES) % 3

    def forward(self, z):
        alone = torch.eye(len(z), dtype=torch.bool)
        log_p = F.log_softmax((z @ z.T / 0.2).masked_fill(alone, -1e9), dim=1)
        positive = (self.labels[:, None] == self.labels) & ~alone
        return -((log_p * positive).sum(1) / positive.sum(1)).mean()


def barlow_twins(a, b):
    """Zbontar et al., 2021: the correlation over the batch of the two views' features shall be the identity."""
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
    """Three passages a query, as in dense retrieval; one batch given as a tuple, the other encoded by a function."""
    queries, passages = Tower(5), Tower(5)

    def loss(q, p):
        scores = (20 * q @ p["embedding"].T + p["given"].sum(1)).masked_fill(p["mask"], -5)
        return F.cross_entropy(scores, 3 * torch.arange(len(q)))

    x = (torch.randn(SAMPLES, 5, dtype=dtype), torch.rand(SAMPLES, 1, dtype=dtype))
    y = {"tokens": torch.randn(3 * SAMPLES, 5, dtype=dtype)}
    encode = Encode(passages)
    return loss, [queries, encode], [x, y]


class Encode:
    """A function of a micro-batch as it is, that returns more than a tensor."""

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
    """The literal expression."""
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
    """Of each parameter's gradient, but in relation to all of it: where terms cancel out, their roundings do not."""
    assert ours.keys() == theirs.keys()
    size = torch.stack([grad.double().norm() for grad in theirs.values()]).norm()
    for name, grad in theirs.items():
        error = (ours[name].double() - grad.double()).norm() / size
        assert error <= tolerance, f"{name}: {float(error)}"


def both(make, dtype=torch.float64):
    """A case twice, with weights of its own: for us and for the big batch, whose gradients and loss are there already."""
    case = make(dtype)
    modules(case).to(dtype)
    ours = copy.deepcopy(case)
    loss = big_batch(case)
    loss.backward()
    return ours, gradients(modules(case)), loss.detach()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", CASES)
def test_gradients_and_loss_are_those_of_the_big_batch(make, size, dtype):
    case, theirs, loss = both(make, dtype)
    returned = fa.cached_backward(*case, micro_batch_size=size)
    assert_close(gradients(modules(case)), theirs, TOLERANCES[dtype])
    assert torch.allclose(returned, loss, rtol=TOLERANCES[dtype]) and not returned.requires_grad


def test_accumulating_such_a_loss_is_not_the_big_batch():
    """Else the tests above would prove nothing."""
    case, theirs, _ = both(clip)
    loss_fn, (a, b), (x, y) = case
    for i in range(0, 12, 4):
        (loss_fn(a(x[i : i + 4]), b(y[i : i + 4])) / 3).backward()
    with pytest.raises(AssertionError):
        assert_close(gradients(modules(case)), theirs, 0.1)


# -- random numbers ----------------------------------------------------------------------------------------------


def test_dropout_of_the_second_pass_is_that_of_the_first():
    """Against one graph in which the encoders run in the same micro-batches, from the same seed."""
    a, b, loss_fn = Tower(5, dropout=0.5).double(), Tower(7, dropout=0.3).double(), Clip().double()
    x, y = torch.randn(SAMPLES, 5).double(), torch.randn(SAMPLES, 7).double()
    literal = copy.deepcopy(nn.ModuleList([a, b, loss_fn]))

    def drawing(a, b):
        return loss_fn(a, b) + torch.rand(())  # the loss draws too

    torch.manual_seed(3)
    fa.cached_backward(drawing, [a, b], [x, y], micro_batch_size=4)
    after = torch.rand(5)

    torch.manual_seed(3)
    embeddings = [torch.cat([net(part) for part in batch.split(4)]) for net, batch in zip(literal, (x, y))]
    (literal[2](*embeddings) + torch.rand(())).backward()
    assert_close(gradients(nn.ModuleList([a, b, loss_fn])), gradients(literal), 1e-10)
    assert torch.equal(after, torch.rand(5)), "the generator does not stand where one pass would have left it"


def test_the_generator_stands_where_one_pass_leaves_it_also_after_an_exception():
    tower, passes = Tower(5, dropout=0.5), []

    def encode(x):
        passes.append(len(x))
        if len(passes) == 6:  # in the second pass
            raise KeyError("broken")
        return tower(x)

    torch.manual_seed(3)
    with pytest.raises(KeyError):
        fa.cached_backward(SupCon(), encode, torch.randn(SAMPLES, 5), micro_batch_size=4)
    after = torch.rand(3)
    torch.manual_seed(3)
    for part in torch.randn(SAMPLES, 5).split(4):
        tower(part)
    assert torch.equal(after, torch.rand(3))


# -- what moves in a forward ------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Replaces one buffer, writes another, and its output depends on what it has written, as that of spectral_norm does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        self.calls = self.calls + 1
        self.seen.mul_(1.5)
        return x @ self.weight * self.seen.clone()


def test_buffers_move_once_and_the_second_pass_sees_what_the_first_saw():
    net = Counting()
    literal, x = copy.deepcopy(net), torch.randn(8, 5)
    fa.cached_backward(lambda a, b: (a.T @ b).square().sum(), [net, net], [x, x + 1], micro_batch_size=4)
    a, b = (torch.cat([literal(part) for part in batch.split(4)]) for batch in (x, x + 1))
    (a.T @ b).square().sum().backward()
    assert net.calls == 4 and torch.equal(net.seen, literal.seen)
    assert_close(gradients(net), gradients(literal), 1e-6)


def test_running_statistics_move_once():
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    literal, x = copy.deepcopy(net), torch.randn(12, 5)
    fa.cached_backward(lambda z: (z.T @ z).std(), net, x, micro_batch_size=4)
    torch.cat([literal(part) for part in x.split(4)])
    for ours, theirs in zip(net.buffers(), literal.buffers()):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("place", ["first pass", "loss"])
def test_buffers_are_as_before_when_the_first_pass_or_the_loss_fails(place):
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    before, calls = copy.deepcopy(net.state_dict()), []

    def fails(*_):
        calls.append(1)
        if place == "loss" or len(calls) == 2:
            raise KeyError("broken")

    if place == "first pass":
        net.register_forward_hook(fails)
    with pytest.raises(KeyError):
        fa.cached_backward(fails, net, torch.randn(12, 5), micro_batch_size=4)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


# -- what needs a gradient ----------------------------------------------------------------------------------------------


class Calls(Tower):
    def __init__(self, features):
        super().__init__(features)
        self.modes = []

    def forward(self, x):
        self.modes.append(torch.is_grad_enabled())
        return super().forward(x)


def test_a_frozen_encoder_runs_once_and_the_other_is_right():
    case, _, _ = both(clip)
    loss_fn, (a, b), (x, y) = case
    frozen = Calls(5).double().requires_grad_(False)
    frozen.load_state_dict(a.state_dict())
    literal = copy.deepcopy((loss_fn, b))
    fa.cached_backward(loss_fn, [frozen, b], [x, y], micro_batch_size=4)
    literal[0](a(x), literal[1](y)).backward()
    assert_close(gradients(nn.ModuleList([loss_fn, b])), gradients(nn.ModuleList(literal)), 1e-10)
    assert frozen.modes == [True] * 4 and all(p.grad is None for p in frozen.parameters())


def test_no_pass_but_the_second_makes_a_graph():
    tower = Calls(5)
    fa.cached_backward(SupCon(), tower, torch.randn(SAMPLES, 5), micro_batch_size=4)
    assert tower.modes == [False] * 4 + [True] * 4


def test_inputs_get_their_gradients_also_through_what_made_them():
    """A leaf, a frozen encoder's input, and the output of a trunk that both encoders share: one backward goes through that."""
    case, _, _ = both(clip)
    loss_fn, (a, _), (x, _) = case
    b, trunk, leaf = Tower(5).double().requires_grad_(False), nn.Linear(5, 5).double(), x.clone().requires_grad_()
    literal_trunk, literal_leaf, literal_loss, literal_a = copy.deepcopy((trunk, leaf, loss_fn, a))
    hidden = trunk(leaf)
    fa.cached_backward(loss_fn, [a, b], [hidden, hidden + leaf], micro_batch_size=4)
    hidden = literal_trunk(literal_leaf)
    literal_loss(literal_a(hidden), b(hidden + literal_leaf)).backward()
    assert_close(
        {"leaf": leaf.grad, **gradients(trunk)}, {"leaf": literal_leaf.grad, **gradients(literal_trunk)}, 1e-10
    )
    assert_close(gradients(a), gradients(literal_a), 1e-10)


def test_embeddings_that_the_loss_does_not_use():
    a, b, x = Tower(5), nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), torch.randn(SAMPLES, 5)
    literal = copy.deepcopy(a)
    fa.cached_backward(lambda z, _: SupCon()(z), [a, b], [x, x], micro_batch_size=7)
    SupCon()(literal(x)).backward()
    assert_close(gradients(a), gradients(literal), 1e-6)
    assert all(p.grad is None for p in b.parameters()) and b[1].num_batches_tracked == 2


# -- autocast ----------------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """One product under autocast, and one kept out of it."""

    def __init__(self):
        super().__init__()
        self.cast, self.exact = nn.Linear(5, 32), nn.Parameter(torch.randn(32, 6))

    def forward(self, x):
        hidden = self.cast(x)
        with torch.autocast("cpu", enabled=False):
            return F.normalize(hidden.float() @ self.exact, dim=-1)


def test_the_callers_autocast_holds_in_both_passes_and_not_in_the_backward():
    net, x = Mixed(), torch.randn(SAMPLES, 5)
    literal = copy.deepcopy(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fa.cached_backward(SupCon(), net, x, micro_batch_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = [literal(part) for part in x.split(4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = SupCon()(torch.cat(parts))
    loss.backward()
    assert_close({"exact": net.exact.grad}, {"exact": literal.exact.grad}, 1e-6)
    # A bf16 weight's gradient is summed over the micro-batches here in FP32, and there in bf16 at most.
    assert_close(gradients(net.cast), gradients(literal.cast), 2**-8)


# -- the wrapper -----------------------------------------------------------------------------------------------------------


def wrapped(parts, **settings):
    return fa.AccumulatingOptimizer(torch.optim.SGD(parts.parameters(), lr=0.1), **settings)


@pytest.mark.parametrize("settings", [{}, {"accum_steps": 3}, {"accum_steps": 3, "nonfinite": "skip_micro_batch"}])
def test_windows_of_cached_micro_batches(settings):
    """bf16 parameters, three cached micro-batches of unequal weight, against FP64 of the same weights."""
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
    """1 + 256 times 2**-9: in bf16 every such addition would be lost."""
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


# -- what cannot be meant -------------------------------------------------------------------------------------------------


def refused(message, *, error=ValueError, loss_fn=None, encoders=None, inputs=None, **settings):
    case_loss, case_encoders, case_inputs = clip(torch.float32)
    a, b = case_encoders
    with pytest.raises(error, match=re.escape(message)):
        fa.cached_backward(
            loss_fn or case_loss,
            case_encoders if encoders is None else encoders,
            case_inputs if inputs is None else inputs,
            **{"micro_batch_size": 4, **settings},
        )
    assert all(p.grad is None for part in (a, b, case_loss) for p in part.parameters())


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (2.0, ValueError, "got the float 2.0; write 2 "),
        (2.5, ValueError, "got the float 2.5; round it"),
        (True, TypeError, "got True"),
        (None, TypeError, "got None"),
        (0, ValueError, "at least 1, got 0"),
    ],
)
def test_refuses_a_micro_batch_size(size, error, message):
    refused(message, error=error, micro_batch_size=size)


def test_refuses_encoders_and_inputs_that_do_not_fit():
    x = torch.randn(SAMPLES, 5)
    refused("encoders holds 2 and inputs holds 1", inputs=[x])
    refused("encoders holds 2 and inputs holds one Tensor", inputs=x)
    refused("encoders holds 0", encoders=[], inputs=[])
    refused("encoders[0] must be a module or a function, got None", error=TypeError, encoders=[None, None])
    refused("holds no tensors", encoders=Tower(5), inputs=[])


def test_refuses_losses_and_outputs():
    refused("got a tensor of shape (13, 13)", loss_fn=lambda a, b: a @ b.T)
    refused("got a float", loss_fn=lambda a, b: (a.T @ b).sum().item())
    refused("depends on nothing", loss_fn=lambda a, b: a.detach().sum() + b.detach().sum())
    tower = Tower(5)
    one = {"encoders": tower, "inputs": torch.randn(SAMPLES, 5), "loss_fn": SupCon()}
    refused("encoders[0](...) has the shape (6,) for 4 samples", **{**one, "encoders": lambda x: tower(x).mean(0)})
    refused("encoders[0](...)['loss'] has the shape ()", **{**one, "encoders": lambda x: {"loss": tower(x).mean()}})
    refused("encoders[0](...)[1] is a str", error=TypeError, **{**one, "encoders": lambda x: (tower(x), "text")})
    with torch.no_grad():
        refused("within torch.no_grad()", **one)


def test_refuses_an_encoder_that_changes_its_inputs():
    net = nn.Sequential(nn.ReLU(inplace=True), Tower(5))
    refused("changes its inputs in place", error=RuntimeError, encoders=net, inputs=torch.randn(8, 5), loss_fn=SupCon())


def test_refuses_what_is_no_wrapper():
    refused("weight=3 is that of a wrapper's micro-batch", weight=3)
    refused(
        "got a SGD; leave it out", error=TypeError, opt=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), weight=3
    )


WAYS = {
    "module": lambda encoder: encoder,
    "function": lambda encoder: lambda x: encoder(x),
    "method": lambda encoder: encoder.forward,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the first pass
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["", "checkpointed", "re-entrant"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", [1, 2])
def test_pooled_batch_statistics_are_the_big_batchs(calls, way, checkpointed):
    """The parts of a cached micro-batch are one population, and those of the first pass, without a graph, are not counted."""
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


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_changes_its_buffers_in_a_forward_finds_them_as_they_were(way):
    torch.manual_seed(0)
    encoder, x = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)).double(), torch.randn(8, 5).double()
    twin = copy.deepcopy(encoder)
    # The literal thing: all parts in one graph, each moving the power iteration on.
    embeddings = torch.cat([twin(part) for part in x.split(4)])
    embeddings.square().mean().backward()
    fa.cached_backward(lambda e: e.square().mean(), WAYS[way](encoder), x, micro_batch_size=4)
    for p, q in zip(encoder.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)
    for p, q in zip(encoder.buffers(), twin.buffers()):
        torch.testing.assert_close(p, q)
