"""Loops that step within DDP's no_sync(), as local SGD and DiLoCo do.

Ranks go apart, and average their parameters themselves. The oracle is plain DDP, run beside it on
the same ranks.
"""

import contextlib
import functools
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
from parts import adamw, assert_close, contents, made, mean_loss, one_batch, sgd, share
from torch import nn
from training import masters_of

DDP = nn.parallel.DistributedDataParallel
PARTS, INNER = 3, 2  # micro-batches in a rank's window; windows of its own between two that are shared
CLIP = 0.05


def collectives(run):
    """How many of them PyTorch's profiler saw during ``run()``, DDP's included."""
    with torch.profiler.profile(acc_events=True) as profiler:
        run()
    return sum(event.name.startswith("gloo:") for event in profiler.events())


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def off(module, how):
    """Switches synchronisation off for a block; "attribute" as nanoGPT does."""
    if how != "attribute":
        return module.no_sync()

    @contextlib.contextmanager
    def attribute():
        module.require_backward_grad_sync = False
        yield
        module.require_backward_grad_sync = True

    return attribute()


class Plain:
    """Plain DDP, one window at a time."""

    def __init__(self, dtype=torch.float32, clip=False):
        self.model, self.clip = made(dtype), clip
        self.module = DDP(self.model, find_unused_parameters=True)
        make = (
            sgd if dtype == torch.bfloat16 else adamw
        )  # Adam's first steps have the gradient's sign, which rounding may turn
        self.opt = self.wrap(make(self.model.parameters()))

    def wrap(self, inner):
        return inner

    def window(self, parts, how, own):
        """``how``: are the steps inside no_sync(), if it is ``own``, or after it?"""
        with off(self.module, how) if own else contextlib.nullcontext():
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                with contextlib.nullcontext() if own or last else off(self.module, how):
                    self.micro_batch(part, parts)
                if how != "outside":
                    self.after(last)
        if how == "outside":
            self.after(True)

    def micro_batch(self, part, parts):
        x, y, weight, use = part
        (mean_loss(self.module, x, y, use) * (weight / sum(w for *_, w, _ in parts))).backward()

    def after(self, last):
        if last:
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.opt.step()
            self.opt.zero_grad()


class Wrapped(Plain):
    """The same loop, wrapped: a drop-in, or windows it divides, counted or closed by the caller."""

    def __init__(self, dtype=torch.float32, clip=False, **settings):
        self.settings = {**settings, **({"max_grad_norm": CLIP} if clip else {})}
        super().__init__(dtype)

    def wrap(self, inner):
        return fa.AccumulatingOptimizer(inner, **self.settings)

    def micro_batch(self, part, parts):
        if self.settings.get("reduction") == "none":
            return super().micro_batch(part, parts)
        x, y, weight, use = part
        self.opt.backward(mean_loss(self.module, x, y, use), weight=weight)

    def after(self, last):
        if last or self.settings.get("accum_steps"):
            self.opt.step()
            self.opt.zero_grad()
            assert bool(self.opt.updated) == last


def rounds(rank, how, settings, dtype=torch.float32, clip=False, late=False):
    """Two rounds: windows of this rank's own, an average, and a window of all ranks.

    The average may come ``late``, after that. Returns both loops' states after each.
    """
    size = dist.get_world_size()
    loops = [Plain(dtype, clip), Wrapped(dtype, clip, **settings)]
    found, calls = [[], []], 0
    for number, (loop, states) in enumerate(zip(loops, found, strict=True)):
        for index in range(2 * (INNER + 1)):
            own = index % (INNER + 1) < INNER
            if not own and not late:
                average(loop.model)
                states.append(contents(loop.model, loop.opt))
            # Of equal weights where the mean over ranks is that of what each has normalised.
            parts = share(index, PARTS * size, rank, size, equal=not own)
            if own and number:
                calls += collectives(functools.partial(loop.window, parts, how, own))
            else:
                loop.window(parts, how, own)
            if not own and late:
                average(loop.model)
            states.append(contents(loop.model, loop.opt))
    return *found, calls


def check(results, tolerance=2e-5):
    for theirs, ours, calls in results:
        assert calls == 0
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, tolerance)
    (_, first, _), (_, second, _) = results[:2]
    assert not torch.equal(first[0][0], second[0][0])  # they do go apart
    assert torch.equal(first[INNER][0], second[INNER][0])  # and are equal again, once averaged


DROP_IN = {"reduction": "none"}


def test_ranks_may_share_a_window_while_their_parameters_differ(worlds):
    check(worlds(2).run(rounds, how="inside", settings=DROP_IN, late=True))


@pytest.mark.parametrize("how", ["inside", "outside", "attribute"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_a_drop_in_steps_alone_as_plain_ddp_does(world, how, clip):
    check(world.run(rounds, how=how, settings=DROP_IN, clip=clip))


@pytest.mark.parametrize("how", ["inside", "attribute"])
@pytest.mark.parametrize("settings", [{"accum_steps": PARTS}, {}], ids=["counted", "caller-owned"])
@pytest.mark.parametrize(
    "more", [{}, {"comm_dtype": torch.float32}, {"nonfinite": "skip_window"}, {"nonfinite": "skip_micro_batch"}]
)
def test_windows_that_end_within_no_sync_are_a_ranks_own(worlds, how, settings, more):
    check(worlds(2).run(rounds, how=how, settings={**settings, **more}))


@pytest.mark.parametrize("more", [{"master_weights": True}, {"buffer_dtype": None}], ids=["masters", "16-bit buffers"])
def test_a_bf16_model_steps_alone(worlds, more):
    """It rounds at other places than plain DDP."""
    check(worlds(2).run(rounds, how="inside", settings={**DROP_IN, **more}, dtype=torch.bfloat16), 3e-2)


# -- loops that share their windows, and go on doing so --------------------------------------------


def steps_in_the_block(rank, epochs, micro_batches):
    """A counted loop that steps within the block, too.

    no_sync() is for all but the last of PARTS, counted from each epoch's start.
    """
    size = dist.get_world_size()
    loop = Wrapped(accum_steps=PARTS)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(epochs):
            for number, (x, y, weight, use) in enumerate(share(epoch, micro_batches * size, rank, size)):
                with contextlib.nullcontext() if number % PARTS == PARTS - 1 else loop.module.no_sync():
                    loop.opt.backward(mean_loss(loop.module, x, y, use), weight=weight)
                    loop.opt.step()
                    loop.opt.zero_grad()
                told.append(bool(loop.opt.updated))
        loop.opt.flush()
    return list(loop.model.parameters()), told, [str(w.message) for w in caught if w.category is RuntimeWarning]


def test_no_sync_around_all_but_the_last_micro_batch_shares_the_window(worlds):
    """Also a partial one at the end, whose backwards were all within the block; flush() is not."""
    model = made()
    opt = adamw(model.parameters())
    parts = [share(0, 2 * 4, 0, 1)[: 2 * PARTS], share(0, 2 * 4, 0, 1)[2 * PARTS :]]
    for window in parts:
        one_batch(model, opt, window)
    for ours, told, warned in worlds(2).run(steps_in_the_block, epochs=1, micro_batches=4):
        assert_close(ours, list(model.parameters()), 1e-5)
        assert told == [False, False, True, False] and not warned


def test_ranks_that_come_apart_because_another_count_closes_their_windows_are_told(worlds):
    """4 micro-batches an epoch: the second window ends within no_sync().

    The third is shared, and later ones do the same.
    """
    for _, told, warned in worlds(2).run(steps_in_the_block, epochs=6, micro_batches=4):
        assert told[5] and len(warned) == 1
        assert "parameters differ since window 1, which ended within no_sync()" in warned[0]
        assert "call step() and flush() outside of no_sync()" in warned[0]


def after_the_block(rank):
    """Windows that the wrapper divides, with no_sync() round each backward and step() after it.

    no_sync() keeps DDP quiet.
    """
    size = dist.get_world_size()
    loop = Wrapped()
    for window in range(2):
        for x, y, weight, use in share(window, PARTS * size, rank, size):
            with loop.module.no_sync():
                loop.opt.backward(mean_loss(loop.module, x, y, use), weight=weight)
        loop.after(True)
    return list(loop.model.parameters())


def test_a_step_after_no_sync_shares_a_window_that_the_wrapper_divides(worlds):
    model = made()
    opt = adamw(model.parameters())
    for window in range(2):
        one_batch(model, opt, share(window, PARTS * 2, 0, 1))
    for ours in worlds(2).run(after_the_block):
        assert_close(ours, list(model.parameters()), 1e-5)


def synchronised_first(rank, settings):
    loop = Wrapped(**settings)
    for window in range(2):
        (x, y, weight, use), *rest = share(window, PARTS * 2, rank, 2)
        loop.opt.backward(mean_loss(loop.module, x, y, use), weight=weight)
        with loop.module.no_sync():
            loop.after(False)
            for number, (x, y, weight, use) in enumerate(rest):
                loop.opt.backward(mean_loss(loop.module, x, y, use), weight=weight)
                loop.after(number == len(rest) - 1)
    return list(loop.model.parameters())


@pytest.mark.parametrize("settings", [{"accum_steps": PARTS}, {}], ids=["counted", "caller-owned"])
def test_a_window_with_one_synchronised_backward_is_shared_wherever_it_ends(worlds, settings):
    model = made()
    opt = adamw(model.parameters())
    for window in range(2):
        one_batch(model, opt, share(window, PARTS * 2, 0, 1))
    for ours in worlds(2).run(synchronised_first, settings=settings):
        assert_close(ours, list(model.parameters()), 1e-5)


# -- what else a loop does -------------------------------------------------------------------------


def other_calls(rank, settings):
    """flush(), normalize_(), an empty step(), a checkpoint in a window, without the other rank."""
    loop = Wrapped(**settings)
    if rank == 0:
        return None
    theirs = made()
    their_opt = adamw(theirs.parameters())
    parts = share(0, 4, 0, 1, equal=True)
    with loop.module.no_sync():
        loop.opt.flush()  # nothing there
        assert not loop.opt.updated
        for number, part in enumerate(parts):
            loop.micro_batch(part, parts)
            if number == 1:
                saved = loop.opt.state_dict()
                loop.opt.reset()
                loop.opt.load_state_dict(saved)
        loop.opt.normalize_()
        nn.utils.clip_grad_norm_(loop.model.parameters(), CLIP)
        loop.opt.flush()
        assert loop.opt.updated and loop.opt.last_window.micro_batches == 4
        loop.opt.zero_grad()
        loop.opt.step()  # no gradients
        assert not loop.opt.updated
    one_batch(theirs, their_opt, parts, limit=CLIP)
    assert_close(list(loop.model.parameters()), list(theirs.parameters()), 1e-5)


@pytest.mark.parametrize("settings", [DROP_IN, {}], ids=["drop-in", "mean"])
def test_nothing_within_no_sync_needs_another_rank(worlds, settings):
    worlds(2).run(other_calls, settings=settings)


def overflowed(rank):
    """A GradScaler, whose scale the ranks' overflows move apart, as under plain DDP."""
    loops, found = [Plain(), Wrapped(**DROP_IN)], []
    for loop in loops:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        with loop.module.no_sync():
            for window in range(4):
                for x, y, _, use in share(window, 4, rank, 2):
                    bad = float("inf") if window == 1 and rank == 0 else 1.0
                    scaler.scale(mean_loss(loop.module, x, y, use) / 2 * bad).backward()
                scaler.unscale_(loop.opt)
                nn.utils.clip_grad_norm_(loop.model.parameters(), CLIP)
                scaler.step(loop.opt)
                scaler.update()
                loop.opt.zero_grad()
        found.append((list(loop.model.parameters()), scaler.get_scale()))
    return found


def test_an_overflow_costs_its_own_rank_a_window(worlds):
    results = worlds(2).run(overflowed)
    for (theirs, their_scale), (ours, our_scale) in results:
        assert_close(ours, theirs, 1e-5)
        assert our_scale == their_scale
    assert results[0][0][1] != results[1][0][1]


def post_local(rank, inside):
    """PyTorch's PostLocalSGDOptimizer, around or inside the wrapper and plain optimizers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.13 warns of what it uses itself
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer
    found = []
    for wraps in (False, True):
        model = made()
        module, opt = DDP(model, find_unused_parameters=True), adamw(model.parameters())
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        if wraps and not inside:
            opt = fa.AccumulatingOptimizer(opt, **DROP_IN)
        opt = PostLocalSGDOptimizer(opt, averager)
        if wraps and inside:
            opt = fa.AccumulatingOptimizer(opt, **DROP_IN)
        for window in range(5):
            with module.no_sync() if window > 0 else contextlib.nullcontext():
                for x, y, _, _ in share(window, 4, rank, 2, equal=True):
                    (mean_loss(module, x, y, False) / 2).backward()
                opt.step()
                opt.zero_grad()
        found.append(list(model.parameters()))
    return found


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_post_local_sgd_optimizer(worlds, inside):
    results = worlds(2).run(post_local, inside=inside)
    for theirs, ours in results:
        assert_close(ours, theirs, 1e-5)


def averaged_masters(rank, through_data):
    """Masters that differ between ranks by less than a bit of bf16, which no average shows."""
    model = nn.Linear(2, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    module = DDP(model)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), reduction="none", master_weights=True)

    def window(grad):
        (module(torch.tensor([[1.0, 1.0]]).bfloat16()).float().sum() * grad).backward()
        opt.step()
        opt.zero_grad()

    found = []
    for far in (False, True):  # True: apart in one element, which writes into p.data show
        with module.no_sync():
            window(0.0015 if rank == 0 else -0.0015)
            window(0.0002)  # not averaged in between: FP32 bits stay
        (master,) = masters_of(opt).values()
        found.append(master.detach().clone())
        with torch.no_grad():
            mean = model.weight.clone()
            mean[0, 0] += far * rank
            dist.all_reduce(mean)
            (model.weight.data if through_data and far else model.weight).copy_(mean / 2)
        window(0.0)
        (master,) = masters_of(opt).values()
        found.append(master.detach().clone())
    return found


@pytest.mark.parametrize("through_data", [False, True])
def test_ranks_have_equal_masters_after_an_average(worlds, through_data):
    first, second = worlds(2).run(averaged_masters, through_data=through_data)
    assert not torch.equal(first[0], second[0]) and first[0][0, 0] == pytest.approx(1 - 0.0015 - 0.0002, abs=1e-4)
    assert torch.equal(first[1], second[1]) and torch.equal(first[3], second[3])


# -- what cannot be followed -----------------------------------------------------------------------


def refused(rank, settings):
    loop = Wrapped(**settings)
    x, y, weight, use = share(0, 2, rank, 2)[0]
    with loop.module.no_sync():
        loop.opt.backward(mean_loss(loop.module, x, y, use), weight=weight)
        before = [p.detach().clone() for p in loop.model.parameters()]
        name = next(name for name in settings if name != "accum_steps")
        with pytest.raises(
            RuntimeError,
            match=rf"ends within no_sync\(\) is.*with {name}=.*window 0.*opt\.flush\(\).*outside.*leave {name}=",
        ):
            loop.opt.step()
        assert all(map(torch.equal, before, loop.model.parameters()))
    loop.opt.flush()
    return list(loop.model.parameters())


@pytest.mark.parametrize(
    "settings",
    [
        {"shard": True},
        {"shard": True, "accum_steps": 1},
        {"window_weight": 1000.0},
        {"noise_scale": 0.9},
        {"noise_scale": 0.0},
        {"master_weights": "split"},
    ],
    ids=["shard", "shard, counted", "window_weight", "noise_scale", "noise_scale of each window", "split masters"],
)
def test_windows_that_need_all_ranks_are_refused_within_no_sync_and_lose_nothing(worlds, settings):
    model = made()
    one_batch(model, adamw(model.parameters()), share(0, 2, 0, 1))
    for ours in worlds(2).run(refused, settings=settings):
        assert_close(ours, list(model.parameters()), 1e-5)


def one_of_two(rank):
    """Of two modules under one optimizer, one is in no_sync() at the window's end: it is shared."""
    torch.manual_seed(0)
    modules = [DDP(nn.Linear(12, 3)) for _ in range(2)]
    parameters = [p for module in modules for p in module.parameters()]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(parameters, lr=0.1), 1)
    x, y, _, _ = share(0, 2, rank, 2, True)[0]
    with modules[0].no_sync():
        with modules[1].no_sync():
            (modules[0](x) + modules[1](x) - y).square().mean().backward()
        opt.step()
    return [p.detach() for p in parameters]


def test_a_window_is_shared_unless_all_modules_are_within_no_sync(worlds):
    torch.manual_seed(0)
    layers = [nn.Linear(12, 3) for _ in range(2)]
    opt = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for rank in range(2):
        x, y, _, _ = share(0, 2, rank, 2, True)[0]
        ((layers[0](x) + layers[1](x) - y).square().mean() / 2).backward()
    opt.step()
    for ours in worlds(2).run(one_of_two):
        assert_close(ours, [p.detach() for layer in layers for p in layer.parameters()])
