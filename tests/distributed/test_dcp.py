"""torch.distributed.checkpoint: training goes on as the big batch would, on any number of ranks."""

import contextlib
import warnings

import fusedaccum as fa
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fusedaccum.distributed import resharding
from parts import adamw, assert_close, full, made, mean_loss, micro_batches, sgd, wrapped
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import masters_of

WINDOWS, COUNT = 2, 8
INSIDE = COUNT + 4  # micro-batches of all ranks: half of the second window
PLACES = {"window's end": COUNT, "inside": INSIDE}
MOVES = [(2, 2), (2, 4), (4, 2), (2, 1)]


def stream(equal=False):
    """The micro-batches of all windows and one more, in the order in which the ranks take them."""
    return [part for window in range(WINDOWS + 1) for part in micro_batches(window, COUNT, equal)]


def loss_of(model, part, kind):
    x, y, _, use = part
    return mean_loss(model, x, y, use and not kind.startswith("fsdp"))


def job(kind, make=sgd, dtype=torch.float32, seed=1, **settings):
    """A model, its module and its wrapper, as a script makes them on every rank."""
    model = made(dtype, seed)
    size = dist.get_world_size() if dist.is_initialized() else 1
    group = dist.group.WORLD if kind == "plain" and size > 1 else None
    module = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if kind == "ddp" else model
    if kind == "fsdp":
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.float32
        )  # otherwise sums over four ranks would round differently from sums over two
        fully_shard([model.first, model.second], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    if not settings.keys() & {"accum_steps", "window_weight"}:
        settings["accum_steps"] = COUNT // size
    return module, wrapped(module, make, process_group=group, **settings)


def train(module, opt, kind, begin, end):
    """Train on micro-batches [begin, end) of the stream, each rank on its own.

    Returns (micro-batches, weight) of each window.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    told = []
    equal = opt.settings.reduction == "none"
    for part in stream(equal)[begin + rank : end : size]:
        loss = loss_of(module, part, kind)
        if equal:
            (loss / (COUNT // size)).backward()
        else:
            opt.backward(loss, weight=torch.tensor(part[2]))
        opt.step()
        opt.zero_grad()
        if opt.updated:
            told.append((opt.last_window.micro_batches, float(opt.last_window.weight)))
    return told


def save(path, module, opt):
    dcp.save({"model": get_model_state_dict(module), "opt": fa.DistributedState(opt)}, checkpoint_id=path)


def load(path, module, opt):
    state = {"model": get_model_state_dict(module), "opt": fa.DistributedState(opt, path)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, state["model"])


def contents(module, opt):
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    masters = [masters_of(opt)[p] for p in module.parameters() if p in masters_of(opt)]
    return [full(x) for x in [*module.parameters(), *state, *masters]]


def saving(rank, path, kind, at, **settings):
    """Train, save at ``at`` if there is a path, and go on to the end."""
    module, opt = job(kind, **settings)
    told = train(module, opt, kind, 0, at)
    if path is not None:
        save(path, module, opt)
    told += train(module, opt, kind, at, WINDOWS * COUNT)
    return contents(module, opt), told


def loading(rank, path, kind, at, fault=None, **settings):
    """Another job, which goes on from what ``saving`` has saved."""
    module, opt = job(kind, seed=7, **settings)
    torch.manual_seed(3)
    train(module, opt, kind, 0, dist.get_world_size())  # loading must replace all of this
    with planted(fault):
        load(path, module, opt)
    opt.zero_grad()
    told = train(module, opt, kind, at, WINDOWS * COUNT)
    return contents(module, opt), told


@contextlib.contextmanager
def planted(fault):
    """Plants a mistake in how saved values are divided among the ranks."""
    patch = pytest.MonkeyPatch()
    window, added_up = resharding.window, resharding.added_up
    if fault == "weights not summed":
        patch.setattr(
            resharding, "window", lambda opt, ranks: {**window(opt, ranks), "weight": ranks[0]["window"]["weight"]}
        )
    elif fault == "sums not summed":
        patch.setattr(
            resharding, "added_up", lambda opt, i, rows, ranks: added_up(opt, i, {min(rows): rows[min(rows)]}, ranks)
        )
    elif fault == "all take all":
        patch.setattr(resharding, "falls_to", lambda here, saved_rank: True)
    yield
    patch.undo()


def literal(make=sgd, kind="plain", lengths=(COUNT,) * WINDOWS, equal=False):
    """The oracle: windows of these lengths, each with one gradient of all its tokens."""
    model = made()
    opt = make(model.parameters())
    told, parts = [], stream(equal)
    for length in lengths:
        held, parts = parts[:length], parts[length:]
        total = sum(w for *_, w, _ in held)
        opt.zero_grad()
        sum(loss_of(model, part, kind) * (part[2] / total) for part in held).backward()
        opt.step()
        told.append((length, total))
    state = [value for entry in opt.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [x.detach().clone() for x in [*model.parameters(), *state]], told


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


# -- the same number of ranks, and another ---------------------------------------------------------


@pytest.fixture(scope="module")
def straight(worlds):
    """The end result of a job that is never interrupted."""
    ends = {}

    def of(size, kind):
        if (size, kind) not in ends:
            ends[size, kind] = worlds(size).run(saving, path=None, kind=kind, at=0)
        return ends[size, kind]

    return of


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    """The path that a job has saved to on its way, and its end result."""
    jobs = {}

    def of(size, kind, at=INSIDE):
        if (size, kind, at) not in jobs:
            path = tmp_path_factory.mktemp("checkpoint")
            jobs[size, kind, at] = path, worlds(size).run(saving, path=path, kind=kind, at=at)
        return jobs[size, kind, at]

    return of


@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("before, after", MOVES)
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_gone_on_with_elsewhere_is_the_big_batch(worlds, straight, saved, kind, before, after, at):
    theirs, told = literal(kind=kind)
    path, ends = saved(before, kind, at)
    loaded = worlds(after).run(loading, path=path, kind=kind, at=at)
    for (a, told_a), (b, told_b) in zip(ends, straight(before, kind)):
        assert_equal(a, b)  # the job that saves goes on as if it had not
        assert told_a == told_b == told
    for ours, told_here in loaded:
        assert_close(ours, theirs)
        assert told_here == told[at // COUNT :]
    if before == after:
        for (a, _), (b, _) in zip(loaded, straight(before, kind)):
            assert_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("ddp", "ddp"), ("ddp", "fsdp"), ("fsdp", "plain")], ids="-".join)
def test_from_one_kind_of_parallelism_to_another(worlds, tmp_path, kinds, at=INSIDE):
    """With FSDP2, losses leave out ``sometimes``, which all ranks must use, or none."""
    before, after = kinds
    flavour = "fsdp" if "fsdp" in kinds else "plain"
    theirs, _ = literal(make=adamw, kind=flavour)
    worlds(2).run(moving, path=tmp_path, kind=before, flavour=flavour, at=at, load_from=None)
    for ours in worlds(4).run(moving, path=tmp_path, kind=after, flavour=flavour, at=at, load_from=tmp_path):
        assert_close(ours, theirs, 1e-5)  # AdamW divides by small numbers


def moving(rank, path, kind, flavour, at, load_from, make=adamw, **settings):
    module, opt = job(kind, make, **settings)
    if load_from is None:
        train(module, opt, flavour, 0, at)
        save(path, module, opt)
        return None
    load(load_from, module, opt)
    train(module, opt, flavour, at, WINDOWS * COUNT)
    return contents(module, opt)


def test_read_without_any_process_group(saved):
    module, opt = job("plain", seed=7)
    with pytest.warns(UserWarning, match="in a single process"):
        load(saved(2, "plain")[0], module, opt)
    told = train(module, opt, "plain", INSIDE, WINDOWS * COUNT)
    theirs, all_told = literal()
    assert_close(contents(module, opt), theirs)
    assert told == all_told[1:]


@pytest.mark.filterwarnings("ignore:.*in a single process")
def test_a_bad_micro_batch_that_step_has_not_told_of_is_told_of_after_loading(tmp_path):
    module, opt = job("plain", accum_steps=None, nonfinite="raise")
    (loss_of(module, stream()[0], "plain") * torch.nan).backward()
    save(tmp_path, module, opt)
    module, opt = job("plain", accum_steps=None, nonfinite="raise")
    load(tmp_path, module, opt)
    with pytest.raises(FloatingPointError, match="the micro-batch was dropped"):
        opt.step()


@pytest.mark.filterwarnings("ignore:p.grad was written to")
@pytest.mark.filterwarnings("ignore:.*in a single process")
@pytest.mark.parametrize("changed", [False, True])
def test_gradients_changed_by_hand_before_a_checkpoint_are_not_measured_after_it(tmp_path, changed):
    module, opt = job("plain", noise_scale=0.5, accum_steps=2)
    for number, part in enumerate(stream()[:2]):
        opt.backward(loss_of(module, part, "plain"), weight=part[2])
        if number == 0 and changed:
            next(module.parameters()).grad.zero_()
        opt.step()
        if number == 0:
            save(tmp_path, module, opt)
            del opt
            module, opt = job("plain", noise_scale=0.5, accum_steps=2)
            load(tmp_path, module, opt)
    assert (opt.last_window.noise_scale is None) == changed


@pytest.mark.filterwarnings("ignore:.*in a single process")
@pytest.mark.parametrize("after", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("before", [torch.bfloat16, torch.float32], ids=str)
def test_a_window_goes_on_in_a_model_of_another_dtype(tmp_path, before, after):
    """Buffers of 16 bits hold means, wider ones sums."""

    def made(dtype):
        p = nn.Parameter(torch.zeros(3, dtype=dtype))
        return p, fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0), 3, buffer_dtype=None)

    p, opt = made(before)
    for gradient in (1.0, 3.0):
        opt.backward((p * gradient).sum(), weight=2)
        opt.step()
    dcp.save({"opt": fa.DistributedState(opt)}, checkpoint_id=tmp_path)
    p, opt = made(after)
    dcp.load({"opt": fa.DistributedState(opt, tmp_path)}, checkpoint_id=tmp_path)
    opt.backward((p * 5.0).sum(), weight=4)
    opt.step()
    assert p.tolist() == [-(2 * 1 + 2 * 3 + 4 * 5) / 8] * 3


SETTINGS = {
    "weighed": {"window_weight": 30.0},
    "none": {"reduction": "none"},
    "stochastic": {"buffer_dtype": torch.bfloat16, "rounding": "stochastic", "dtype": torch.bfloat16},
    "compensated": {"buffer_dtype": torch.bfloat16, "rounding": "compensated", "dtype": torch.bfloat16},
    "skip_window": {"nonfinite": "skip_window", "max_grad_norm": 0.05},
    "masters": {"master_weights": True, "dtype": torch.bfloat16},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_as_many_ranks_go_on_bit_by_bit(worlds, tmp_path, kind, setting):
    settings = {"make": adamw, **SETTINGS[setting]}
    straight = worlds(2).run(saving, path=None, kind=kind, at=INSIDE, **settings)
    saved = worlds(2).run(saving, path=tmp_path, kind=kind, at=INSIDE, **settings)
    loaded = worlds(2).run(loading, path=tmp_path, kind=kind, at=INSIDE, **settings)
    for (a, told), (b, _), (c, told_there) in zip(straight, saved, loaded):
        assert_equal(a, b)
        assert_equal(a, c)
        assert told[-len(told_there) :] == told_there and told_there


# -- what the numbers become -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind, before, after", [("plain", 2, 4), ("plain", 2, 1), ("fsdp", 4, 2)])
def test_gradients_that_come_normalised(worlds, tmp_path, kind, before, after):
    """With reduction="none" the window's gradient is a mean over the ranks.

    For what was saved, it is over the ranks of that time.
    """
    theirs, _ = literal(kind=kind, equal=True)
    worlds(before).run(saving, path=tmp_path, kind=kind, at=INSIDE, reduction="none")
    for ours, _ in worlds(after).run(loading, path=tmp_path, kind=kind, at=INSIDE, reduction="none"):
        assert_close(ours, theirs)


@pytest.mark.parametrize(
    "kinds, ranks",
    [
        (("fsdp", "plain"), (2, 2)),
        (("plain", "fsdp"), (2, 2)),
        (("fsdp", "plain"), (2, 1)),
        pytest.param(("ddp", "fsdp"), (2, 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_that_come_normalised_from_one_kind_to_another(worlds, tmp_path, kinds, ranks):
    """FSDP2 has taken the mean over the ranks; replicas take it when the window closes."""
    theirs, _ = literal(kind="fsdp", equal=True)
    settings = {"path": tmp_path, "flavour": "fsdp", "at": INSIDE, "make": sgd, "reduction": "none"}
    worlds(ranks[0]).run(moving, kind=kinds[0], load_from=None, **settings)
    for ours in worlds(ranks[1]).run(moving, kind=kinds[1], load_from=tmp_path, **settings):
        assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind, before, after", [("plain", 2, 4), ("fsdp", 4, 2)])
def test_master_weights_and_their_state(worlds, tmp_path, kind, before, after):
    """Compared at the end of the open window.

    After that the 16-bit models may differ where a rounding goes the other way.
    """
    at = INSIDE
    settings = {"make": adamw, "master_weights": True, "dtype": torch.bfloat16}
    straight = worlds(before).run(saving, path=tmp_path, kind=kind, at=at, **settings)[0][0]
    there = worlds(before).run(until, path=tmp_path, kind=kind, begin=0, end=0, **settings)[0][0]
    for ours, _ in worlds(after).run(until, path=tmp_path, kind=kind, begin=0, end=0, **settings):
        assert_equal(ours, there)
        assert {x.dtype for x in ours} == {torch.bfloat16, torch.float32}
    for ours, _ in worlds(after).run(loading, path=tmp_path, kind=kind, at=at, **settings):
        masters, theirs = ([x for x in all_of if x.dtype == torch.float32] for all_of in (ours, straight))
        # FSDP2 rounds each micro-batch's sum over the ranks to the parameter's 16 bits, and other
        # numbers of ranks sum other micro-batches.
        assert_close(masters, theirs, 1e-6 if kind == "plain" else 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind, before, after", [("plain", 4, 2), ("fsdp", 2, 4)])
def test_buffers_of_16_bits(worlds, tmp_path, kind, before, after):
    at = INSIDE
    settings = {"dtype": torch.float16, "buffer_dtype": None, "make": heavy}
    straight = worlds(before).run(saving, path=tmp_path, kind=kind, at=at, **settings)
    for ours, _ in worlds(after).run(loading, path=tmp_path, kind=kind, at=at, **settings):
        assert_close(ours, straight[0][0], 2e-3)


def heavy(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_a_count_that_does_not_divide_is_rounded_down(worlds, tmp_path, kind):
    """Two saved micro-batches count as none on four ranks, so the window gets two more than others.

    It is the big batch of them all.
    """
    theirs, told = literal(kind=kind, lengths=(COUNT, COUNT + 2))
    worlds(2).run(saving, path=tmp_path, kind=kind, at=COUNT + 2)
    for ours, told_here in worlds(4).run(until, path=tmp_path, kind=kind, begin=COUNT + 2, end=2 * COUNT + 2):
        assert_close(ours, theirs)
        assert told_here == told[1:]


def until(rank, path, kind, begin, end, **settings):
    module, opt = job(kind, seed=7, **settings)
    load(path, module, opt)
    opt.zero_grad()
    told = train(module, opt, kind, begin, end)
    return contents(module, opt), told


def test_windows_that_the_caller_closes(worlds, tmp_path):
    theirs, told = literal(lengths=(COUNT + 3,))
    worlds(2).run(callers, path=tmp_path, begin=0, end=3)
    for ours, told_here in worlds(4).run(callers, path=tmp_path, begin=3, end=COUNT + 3):
        assert_close(ours, theirs)
        assert told_here == told


def callers(rank, path, begin, end):
    """In windows of the caller, ranks may have accumulated different numbers of micro-batches."""
    module, opt = job("plain", accum_steps=None)
    size = dist.get_world_size()
    if begin:
        load(path, module, opt)
    for part in stream()[begin + rank : end : size]:
        opt.backward(loss_of(module, part, "plain"), weight=part[2])
    if not begin:
        save(path, module, opt)
        return None
    opt.step()
    return contents(module, opt), [(opt.last_window.micro_batches, float(opt.last_window.weight))]


def test_a_mistake_would_show(worlds, saved):
    theirs, _ = literal()
    for fault in (None, "weights not summed", "sums not summed", "all take all"):
        loaded = worlds(2).run(loading, path=saved(4, "plain")[0], kind="plain", at=INSIDE, fault=fault)
        for ours, _ in loaded:
            with pytest.raises(AssertionError) if fault else contextlib.nullcontext():
                assert_close(ours, theirs)


# -- what is in the file, and what is refused ------------------------------------------------------


def test_sums_are_written_of_open_windows_only(saved):
    for kind in ("plain", "fsdp"):
        for at in PLACES.values():
            stored = dcp.FileSystemReader(saved(2, kind, at)[0]).read_metadata().state_dict_metadata
            sums = {name for name in stored if name.startswith("opt.sums.")}
            # Four parameters per rank, and on the second rank one that a single micro-batch uses.
            assert len(sums) == (0 if at == COUNT else 4 if kind == "fsdp" else 2 * 4 + 1), sums


def one_has_dropped_all(rank, path):
    p = nn.Parameter(torch.zeros(3))

    def made(**settings):
        return fa.AccumulatingOptimizer(
            torch.optim.SGD([p], lr=1.0), 3, nonfinite="skip_micro_batch", process_group=dist.group.WORLD, **settings
        )

    opt = made()
    (p * (1.0 if rank else torch.nan)).sum().backward()
    opt.step()
    dcp.save({"opt": fa.DistributedState(opt)}, checkpoint_id=path)
    opt.reset()
    with pytest.raises(ValueError, match=r"reduction=mean, and this wrapper has reduction=sum"):
        dcp.load({"opt": fa.DistributedState(made(reduction="sum"), path)}, checkpoint_id=path)


def test_settings_are_compared_with_those_of_a_rank_that_holds_something(worlds, tmp_path):
    worlds(2).run(one_has_dropped_all, path=tmp_path)


def refused(rank, path):
    module, opt = job("plain")
    train(module, opt, "plain", 0, INSIDE)
    save(path / "one", module, opt)
    dcp.save(
        {"a": fa.DistributedState(opt), "b": {"c": fa.DistributedState(opt).state_dict()}}, checkpoint_id=path / "two"
    )
    before = contents(module, opt)

    other = nn.Sequential(nn.Linear(12, 41), nn.Linear(41, 3))
    with pytest.raises(ValueError, match=r"has 7 parameters and the optimizer has 4; is it another model's"):
        load(path / "one", other, wrapped(other, process_group=dist.group.WORLD))
    shaped = made()
    shaped.second = nn.Linear(40, 4, bias=False)
    with pytest.raises(
        ValueError, match=r"shape \(3, 40\) for parameter .*, which is \(4, 40\); is it another model's"
    ):
        load(path / "one", shaped, wrapped(shaped, process_group=dist.group.WORLD))
    split, in_groups = job("plain", lambda params: sgd([{"params": [p]} for p in params]))
    untrained = contents(split, in_groups)
    with pytest.raises(
        ValueError, match=r"param_groups have \[7\] parameters, and the optimizer's have \[1, 1, 1, 1, 1, 1, 1\]"
    ):
        load(path / "one", split, in_groups)
    assert_equal(contents(split, in_groups), untrained)
    with pytest.raises(ValueError, match=r"accum_steps=4, and this wrapper has accum_steps=5"):
        load(path / "one", *job("plain", accum_steps=5))
    with pytest.raises(ValueError, match=r"reduction=mean, and this wrapper has reduction=sum"):
        load(path / "one", *job("plain", accum_steps=4, reduction="sum"))
    with pytest.raises(
        ValueError, match=r"window holds 4 micro-batches, but here it closes after 1 x 4 .*accum_steps=5"
    ):
        load(path / "one", *job("alone", accum_steps=4))
    with pytest.raises(ValueError, match=r"holds 2 DistributedStates \['a', 'b.c'\]; choose one: key="):
        dcp.load({"a": fa.DistributedState(opt, path / "two")}, checkpoint_id=path / "two")
    with pytest.raises(ValueError, match=r"key='d' is not a DistributedState"):
        dcp.load({"d": fa.DistributedState(opt, path / "two", key="d")}, checkpoint_id=path / "two")
    dcp.load({"a": fa.DistributedState(opt, path / "two", key="a")}, checkpoint_id=path / "two")
    with pytest.raises(RuntimeError, match=r"DistributedState\(opt, path\)"):
        dcp.load({"opt": fa.DistributedState(opt)}, checkpoint_id=path / "one")
    for make in (adamw, sgd):
        plain, fresh = job("plain", make)
        with pytest.raises(RuntimeError, match=r"step an optimizer .*fusedaccum\.DistributedState\(opt\)"):
            get_optimizer_state_dict(plain, fresh)
    with pytest.raises(RuntimeError, match=r"called state_dict\(\)"):
        get_optimizer_state_dict(module, opt)

    part = stream()[0]
    opt.backward(loss_of(module, part, "plain"), weight=part[2])
    with pytest.raises(RuntimeError, match=r"inside a micro-batch; call opt\.step\(\) first"):
        save(path / "three", module, opt)
    opt.step()
    assert_equal(contents(module, opt), before)
    module, opt = job("plain")
    train(module, opt, "plain", 0, 3)  # two for the first rank, one for the second
    with pytest.raises(ValueError, match=r"have accumulated \[2, 1\] micro-batches in the open window"):
        save(path / "three", module, opt)


def test_what_cannot_be_meant_is_refused(worlds, tmp_path):
    worlds(2).run(refused, path=tmp_path)


def held_back(rank, path):
    module, opt = job("fsdp")
    module.set_requires_gradient_sync(False)
    train(module, opt, "fsdp", 0, 2)
    with pytest.raises(RuntimeError, match=r"state_dict\(\) would lose gradients.*set_requires_gradient_sync\(True\)"):
        opt.state_dict()
    module.set_requires_gradient_sync(True)
    train(module, opt, "fsdp", 2, 4)
    save(path, module, opt)


def test_what_fsdp2_holds_back_is_not_lost(worlds, tmp_path):
    worlds(2).run(held_back, path=tmp_path)


def listed_twice(rank, path):
    """PyTorch's state counts twice a parameter listed twice: the next one's index is one more."""
    made, factor = [], torch.randn(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        for _ in range(2):
            a, b = (nn.Parameter(torch.randn(n)) for n in (2, 3))
            opt = fa.AccumulatingOptimizer(torch.optim.SGD([a, a, b], lr=0.1, momentum=0.9), accum_steps=2)
            made.append((a, b, opt))
    (a, b, opt), (a_there, b_there, other) = made
    for _ in range(3):
        (a.square().sum() + (b * factor).sum()).backward()
        opt.step()
    dcp.save({"opt": fa.DistributedState(opt)}, checkpoint_id=path)
    dcp.load({"opt": fa.DistributedState(other, path)}, checkpoint_id=path)
    for p, q in ((a, a_there), (b, b_there)):
        assert_equal([other.state[q]["momentum_buffer"], q.grad], [opt.state[p]["momentum_buffer"], p.grad])


def test_a_parameter_that_its_group_lists_twice(worlds, tmp_path):
    worlds(1).run(listed_twice, path=tmp_path)


class Local(torch.optim.Optimizer):
    """Keeps of each gradient this rank's part (as kernels that know no DTensors do), or a list."""

    def __init__(self, params, listed):
        super().__init__(params, {})
        self.kept = (lambda grad: [grad.clone()]) if listed else (lambda grad: grad.to_local().clone())

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["kept"] = self.kept(p.grad)


def kept_in_parts(rank, path, listed):
    module, opt = job("fsdp", lambda params: Local(params, listed))
    train(module, opt, "fsdp", 0, COUNT)
    with pytest.raises(ValueError, match=r"keeps its state 'kept' of parameter .* in parts.*use torch\.save"):
        save(path, module, opt)


@pytest.mark.parametrize("listed", [False, True], ids=["local", "list"])
def test_state_of_which_only_one_ranks_part_would_be_written_is_refused(worlds, tmp_path, listed):
    worlds(2).run(kept_in_parts, path=tmp_path, listed=listed)


def to_fill_saved(rank, path):
    module, opt = job("plain")
    save(path, module, opt)
    with pytest.raises(dcp.api.CheckpointException, match=r"save DistributedState\(opt\)"):
        dcp.save({"opt": fa.DistributedState(opt, path)}, checkpoint_id=path / "other")


def test_room_for_what_is_read_is_not_taken_for_a_checkpoint(worlds, tmp_path):
    worlds(1).run(to_fill_saved, path=tmp_path)


@pytest.mark.filterwarnings("ignore:.*in a single process")
@pytest.mark.parametrize("at", [1, 2], ids=["inside", "window's end"])
@pytest.mark.parametrize("settings", [{}, {"master_weights": True}, {"master_weights": "split"}], ids=str)
def test_state_keeps_the_strides_by_which_fused_optimizers_go(tmp_path, settings, at):
    def build(seed):
        torch.manual_seed(seed)
        net = nn.Conv2d(3, 4, 3).to(torch.bfloat16 if settings else torch.float32, memory_format=torch.channels_last)
        return net, fa.AccumulatingOptimizer(torch.optim.AdamW(net.parameters(), lr=0.1, fused=True), 2, **settings)

    def train(net, opt, begin, end):
        for i in range(begin, end):
            torch.manual_seed(i)
            net(torch.randn(2, 3, 5, 5, dtype=net.weight.dtype)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    net, opt = build(0)
    train(net, opt, 0, 2 + at)
    dcp.save({"opt": fa.DistributedState(opt)}, checkpoint_id=tmp_path, no_dist=True)
    weights = {name: x.clone() for name, x in net.state_dict().items()}
    again, resumed = build(1)
    dcp.load({"opt": fa.DistributedState(resumed, tmp_path)}, checkpoint_id=tmp_path, no_dist=True)
    again.load_state_dict(weights)
    for model, its in ((net, opt), (again, resumed)):
        train(model, its, 2 + at, 6)
    assert all(map(torch.equal, net.parameters(), again.parameters()))
