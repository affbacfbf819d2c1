"""A window of all ranks of a process group equals the one big batch."""

import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import adamw, assert_close, big_batch, contents, made, mean_loss, sgd, share, wrapped
from torch import nn

WINDOWS, COUNT = 3, 8
BF16 = WINDOWS * 2**-8  # each step rounds a gradient and a parameter, each by at most half of 2**-8


def train(rank, make, equal, settings, ddp=False, dtype=torch.float32):
    size = dist.get_world_size()
    model = made(dtype)
    if ddp:
        module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        opt = wrapped(model, make, **settings)
    else:
        module, opt = model, wrapped(model, make, process_group=dist.group.WORLD, **settings)
    norms = []
    for window in range(WINDOWS):
        for x, y, weight, use in share(window, COUNT, rank, size, equal):
            loss = mean_loss(module, x, y, use)
            if settings.get("reduction") == "sum":
                loss = loss * weight
            if settings.get("reduction") == "none":
                loss = loss / (COUNT / size)
            opt.backward(loss, weight=weight)
            if settings.get("accum_steps"):
                opt.step()
                opt.zero_grad()
        if not settings.get("accum_steps"):
            opt.step()
            opt.zero_grad()
        assert opt.updated and opt.last_window.micro_batches == COUNT
        norms.append(opt.last_window.grad_norm)
    return contents(model, opt), [None if n is None else float(n) for n in norms]


def literal(make, equal, limit=None, dtype=torch.float32):
    model = made(dtype)
    opt = make(model.parameters())
    norms = [big_batch(model, opt, window, COUNT, equal, limit) for window in range(WINDOWS)]
    return contents(model, opt), norms


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(
    "settings", [{"accum_steps": 2}, {}, {"accum_steps": 2, "reduction": "sum"}], ids=["counted", "owned", "sum"]
)
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
def test_a_window_of_all_ranks_is_the_big_batch(world, make, equal, settings, ddp):
    settings = {**settings, **({"accum_steps": COUNT // world.size} if "accum_steps" in settings else {})}
    theirs, _ = literal(make, equal)
    results = world.run(train, make=make, equal=equal, settings=settings, ddp=ddp)
    for ours, _ in results:
        assert_close(ours, theirs, 1e-6 if make is sgd else 1e-5)
        for a, b in zip(ours, results[0][0]):
            assert torch.equal(a, b)  # all ranks hold the same bits


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
def test_gradients_that_come_normalised_are_a_mean_over_the_ranks(worlds, ddp):
    theirs, _ = literal(sgd, True)
    for ours, _ in worlds(2).run(
        train, make=sgd, equal=True, settings={"accum_steps": 4, "reduction": "none"}, ddp=ddp
    ):
        assert_close(ours, theirs)


def test_clipping_and_the_norm_are_of_all_ranks(world):
    theirs, norms = literal(sgd, False, limit=0.05)
    settings = {"accum_steps": COUNT // world.size, "max_grad_norm": 0.05}
    for ours, ours_norms in world.run(train, make=sgd, equal=False, settings=settings):
        assert_close(ours, theirs)
        assert ours_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    "settings, tolerance",
    [
        ({"comm_dtype": torch.bfloat16}, BF16),
        ({"comm_dtype": torch.float32}, 1e-6),
        ({"buffer_dtype": torch.float64}, 1e-6),
        ({"backend": "reference"}, 1e-6),
        ({"nonfinite": "skip_micro_batch"}, 1e-6),
    ],
)
def test_dtypes_and_backends(worlds, settings, tolerance):
    theirs, _ = literal(sgd, False)
    results = worlds(2).run(train, make=sgd, equal=False, settings={"accum_steps": 4, **settings})
    for ours, _ in results:
        assert_close(ours, theirs, tolerance)
        assert all(torch.equal(a, b) for a, b in zip(ours, results[0][0]))
    if settings.get("comm_dtype") is torch.bfloat16:
        exact = worlds(2).run(train, make=sgd, equal=False, settings={"accum_steps": 4})[0][0]
        assert any(not torch.equal(a, b) for a, b in zip(results[0][0], exact))  # it was rounded


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"buffer_dtype": torch.bfloat16},
        {"buffer_dtype": None},
        {"buffer_dtype": None, "rounding": "compensated"},
        {"master_weights": True},
    ],
)
def test_16_bit_models(worlds, settings):
    theirs, _ = literal(sgd, False, dtype=torch.bfloat16)
    model = made(torch.bfloat16)
    for ours, _ in worlds(2).run(
        train, make=sgd, equal=False, settings={"accum_steps": 4, **settings}, dtype=torch.bfloat16
    ):
        assert_close(ours[: len(list(model.parameters()))], theirs[: len(list(model.parameters()))], BF16)
        if settings.get("master_weights"):
            continue
        assert all(x.dtype in (torch.bfloat16, torch.float32) for x in ours)


def huge(rank, settings):
    """Gradients whose sum over the ranks would overflow, although their mean fits."""
    p = nn.Parameter(torch.ones(4, dtype=torch.float16))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 4, process_group=dist.group.WORLD, **settings)
    for _ in range(4):
        (p * 40000.0).sum().backward()
        opt.step()
    return p.detach()


@pytest.mark.parametrize(
    "settings", [{"buffer_dtype": torch.float16}, {"buffer_dtype": torch.float16, "reduction": "none"}]
)
def test_running_means_do_not_overflow_over_the_ranks(worlds, settings):
    for p in worlds(2).run(huge, settings=settings):
        if settings.get("reduction") == "none":
            assert p.isinf().all()  # 4 times 40,000 overflows in fp16
        else:
            assert torch.equal(p, torch.full((4,), 1 - 40000.0, dtype=torch.float16))


# -- where windows end -----------------------------------------------------------------------------


def uneven(rank, counts):
    """Rank r takes ``counts[r]`` micro-batches a window, and calls flush() if others take more."""
    model = made()
    opt = wrapped(model, accum_steps=max(counts), process_group=dist.group.WORLD)
    for window in range(WINDOWS):
        begin = sum(counts[:rank])
        parts = share(window, sum(counts), 0, 1)[begin : begin + counts[rank]]
        for x, y, weight, use in parts:
            opt.backward(mean_loss(model, x, y, use), weight=weight)
            opt.step()
        if counts[rank] < max(counts):
            opt.flush()
        assert opt.updated and opt.last_window.micro_batches == sum(counts)
    opt.flush()
    assert not opt.updated  # no rank had anything
    return contents(model, opt)


@pytest.mark.parametrize("counts", [[3, 1], [0, 4], [5, 0]])
def test_ranks_with_unequal_numbers_of_micro_batches(worlds, counts):
    model = made()
    opt = sgd(model.parameters())
    for window in range(WINDOWS):
        big_batch(model, opt, window, sum(counts))
    for ours in worlds(2).run(uneven, counts=counts):
        assert_close(ours, contents(model, opt))


def scaled(rank, windows):
    """A GradScaler whose scale grows; after its ``windows`` windows, rank 1's stays behind."""
    model = made()
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for window in range(WINDOWS):
        if rank == 0 or window < windows:
            x, y, _, use = share(window, 2, rank, 2)[0]
            scaler.scale(mean_loss(model, x, y, use)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        else:
            opt.flush()
    return contents(model, opt)


@pytest.mark.parametrize("windows", [0, 1])
def test_the_loss_scale_of_a_rank_without_data_says_nothing(worlds, windows):
    model = made()
    opt = sgd(model.parameters())
    for window in range(WINDOWS):
        opt.zero_grad()
        parts = share(window, 2, 0, 1)[: 2 if window < windows else 1]
        (sum(mean_loss(model, x, y, use) for x, y, _, use in parts) / len(parts)).backward()
        opt.step()
    for ours in worlds(2).run(scaled, windows=windows):
        assert_close(ours, contents(model, opt))


def weighed(rank):
    model = made()
    opt = wrapped(model, window_weight=40, process_group=dist.group.WORLD)
    closed = []
    for number in range(12):
        ((x, y, weight, use),) = share(number, 1, 0, 1) if rank == 0 else share(100 + number, 1, 0, 1)
        opt.backward(mean_loss(model, x, y, use), weight=weight)
        opt.step()
        if opt.updated:
            closed.append((number, float(opt.last_window.weight)))
    return closed


def test_a_weighed_window_closes_when_all_ranks_together_have_gathered_it(worlds):
    first, second = worlds(2).run(weighed)
    assert first == second and len(first) > 1
    weights = [sum(share(k + number, 1, 0, 1)[0][2] for k in (0, 100)) for number in range(12)]
    expected, total = [], 0.0
    for number, weight in enumerate(weights):
        total += weight
        if total >= 40:
            expected.append((number, total))
            total = 0.0
    assert first == expected


def said_by_some(rank, how):
    """Rank 0 marks the last micro-batch of a weighed window with ``last=``.

    The other rank does not, or has run out of data by then.
    """
    model = made()
    opt = wrapped(model, window_weight=40, process_group=dist.group.WORLD)
    for window in range(2):
        for number, (x, y, _, use) in enumerate(share(window, 4, rank, 2)):
            if how == "flushes" and rank == 1 and number == 1:
                opt.flush()
                break
            opt.backward(mean_loss(model, x, y, use), weight=10, last=number == 1 and rank == 0)
            opt.step()
        assert opt.updated and float(opt.last_window.weight) == (30 if how == "flushes" else 40)
    return contents(model, opt)


@pytest.mark.parametrize("how", ["says nothing", "flushes"])
def test_weights_decide_which_micro_batch_is_the_last(worlds, how):
    model = made()
    opt = sgd(model.parameters())
    for window in range(2):
        opt.zero_grad()
        parts = share(window, 4, 0, 1)[: 3 if how == "flushes" else 4]
        (sum(mean_loss(model, x, y, use) for x, y, _, use in parts) / len(parts)).backward()
        opt.step()
    for ours in worlds(2).run(said_by_some, how=how):
        assert_close(ours, contents(model, opt))


def by_hand(rank):
    """normalize_(), clip, step: the same as clipping the big batch by hand."""
    model = made()
    opt = wrapped(model, process_group=dist.group.WORLD)
    for window in range(WINDOWS):
        for x, y, weight, use in share(window, COUNT, rank, dist.get_world_size()):
            opt.backward(mean_loss(model, x, y, use), weight=weight)
        opt.normalize_()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if window == 0:
            with pytest.raises(
                RuntimeError, match=r"opt\.step\(\) before the next backward|before\s+the next backward"
            ):
                mean_loss(model, x, y, use).backward()
            with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
                opt.state_dict()
        opt.step()
        assert opt.last_window.micro_batches == COUNT
        opt.zero_grad()
    return contents(model, opt)


def test_normalised_and_clipped_by_hand(world):
    theirs, _ = literal(sgd, False, limit=0.05)
    for ours in world.run(by_hand):
        assert_close(ours, theirs)


def weighed_late(rank):
    model = made()
    opt = wrapped(model, accum_steps=1, reduction="none", process_group=dist.group.WORLD)
    x, y, *_ = share(0, 2, rank, 2)[0]
    opt.backward(mean_loss(model, x, y, False))
    opt.normalize_()
    with pytest.raises(
        ValueError, match=r"step\(weight=5\) comes too late: opt.normalize_\(\) has added up the weights"
    ):
        opt.step(weight=5)
    opt.step()
    opt.backward(mean_loss(model, x, y, False), weight=5)
    opt.normalize_()
    opt.step()
    return float(opt.last_window.weight)


def test_a_weight_that_comes_after_the_ranks_weights_were_added_up_is_refused(worlds):
    assert worlds(2).run(weighed_late) == [10.0, 10.0]


def weightless(rank):
    torch.manual_seed(1)
    model = nn.Linear(4, 4).bfloat16()
    opt = wrapped(model, accum_steps=1, process_group=dist.group.WORLD, buffer_dtype=None)
    before = contents(model, opt)[:2]
    x = torch.full((3, 4), float(rank + 1), dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.backward(model(x).square().mean(), weight=0)
        opt.step()
    same = not opt.updated and all(torch.equal(a, b) for a, b in zip(before, contents(model, opt)[:2]))
    opt.backward(model(x).square().mean(), weight=rank + 1)
    opt.step()
    return same, contents(model, opt)


def test_a_window_without_weight_in_16_bit_buffers_changes_nothing(worlds):
    (same, ours), (same_there, theirs) = worlds(2).run(weightless)
    assert same and same_there and all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(ours, theirs))
