"""Added, removed or replaced parameters train as in plain PyTorch; everything else goes on."""

import copy
import functools
import gc
import math
import weakref

import fusedaccum as fa
import pytest
import torch
from adding import Adding, marked
from fusedaccum.extensions.noise_scale import NoiseScale
from torch import nn
from torch.nn import Parameter
from training import assert_same_parameters, data, masters_of, mean_loss, model, parts, sgd, twin, wrapped, wrapper_of

pytestmark = pytest.mark.usefixtures("each_intake")


class Cloud:
    """Coloured points, as in 3D Gaussian splatting: a change of number replaces both parameters."""

    def __init__(self, dtype):
        g = torch.Generator().manual_seed(3)
        self.params = {k: Parameter(torch.randn(5, n, generator=g).to(dtype)) for k, n in (("xyz", 3), ("rgb", 2))}

    def groups(self):
        return [{"params": [p], "name": name} for name, p in self.params.items()]

    def loss(self, target):
        xyz, rgb = (p.double() for p in self.params.values())
        return ((xyz.sigmoid().sum(0) - target) ** 2).sum() + ((xyz[:, :1] * rgb).sum(0) + target).pow(2).sum()

    def densify(self, opt, keep, more):
        """What such scripts do to an optimizer, new points with empty state."""

        def changed(old, fill):
            return torch.cat([old[keep:], torch.full_like(old[:more], fill)])

        for group in opt.param_groups:
            (old,) = group["params"]
            state = opt.state.pop(old, None)
            new = self.params[group["name"]] = Parameter(changed(old.detach(), 0.25))
            if state is not None:
                opt.state[new] = {k: changed(v, 0.0) if v.dim() == 2 else v for k, v in state.items()}
            group["params"] = [new]


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float64, {}),
        (torch.float64, {"max_grad_norm": 0.5}),
        (torch.float64, {"nonfinite": "skip_micro_batch"}),
        (torch.float32, {"buffer_dtype": torch.float64}),
        (torch.bfloat16, {"master_weights": True}),
    ],
)
def test_replaced_parameters_train_as_under_plain_pytorch(dtype, settings):
    clouds = Cloud(dtype), Cloud(torch.float32 if "master_weights" in settings else dtype)
    inner, plain = (torch.optim.Adam(cloud.groups(), lr=0.01) for cloud in clouds)
    opt = fa.AccumulatingOptimizer(inner, accum_steps=2, **settings)
    targets = torch.rand(12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for window, pair in enumerate(targets.split(2)):
        for target in pair:
            opt.backward(clouds[0].loss(target))
            opt.step()
            opt.zero_grad()
        assert opt.updated
        sum(clouds[1].loss(target) for target in pair).div(2).backward()
        if "max_grad_norm" in settings:
            norm = nn.utils.clip_grad_norm_(clouds[1].params.values(), settings["max_grad_norm"])
            torch.testing.assert_close(opt.last_window.grad_norm, norm.double())
        plain.step()
        plain.zero_grad()
        if window % 2:
            clouds[0].densify(opt, window, 2 * window)
            opt.param_groups = opt.param_groups
            clouds[1].densify(plain, window, 2 * window)
        for ours, theirs in zip(*(cloud.params.values() for cloud in clouds), strict=True):
            assert ours.shape == theirs.shape
            near = 1e-2 if dtype == torch.bfloat16 else 1e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=near, atol=near)


@pytest.mark.parametrize("place", [0, 1])
def test_a_removed_parameter_counts_for_nothing_and_belongs_to_nobody(place):
    net, (x, y) = model(), data()
    first, last = list(net[0].parameters()), [*net[2].parameters(), *net[4].parameters()]
    groups = [{"params": last}]
    groups.insert(place, {"params": first})
    opt = fa.AccumulatingOptimizer(sgd(groups), 1, max_grad_norm=math.inf)
    mean_loss(net, x, y).backward()
    opt.step()
    buffer, memory = weakref.ref(first[0].grad), weakref.ref(first[0].grad._base)
    opt.param_groups = [opt.param_groups[1 - place]]
    assert first[0].grad is None and buffer() is None and memory() is None
    mean_loss(net, x, y).backward()
    expected = torch.autograd.grad(mean_loss(net, x, y), first)
    for p, gradient in zip(first, expected, strict=True):  # as plain PyTorch leaves it there
        torch.testing.assert_close(p.grad, gradient)
    total = torch.stack([p.grad.norm() for p in last]).norm()
    before = first[0].clone()
    opt.step()
    torch.testing.assert_close(opt.last_window.grad_norm, total)
    torch.testing.assert_close(first[0], before, rtol=0, atol=0)
    first[0].grad = first[1].grad = None
    other = fa.AccumulatingOptimizer(sgd(first), 1)
    mean_loss(net, x, y).backward()
    other.step()
    assert other.updated and not torch.equal(first[0], before)


@pytest.mark.parametrize("change", ["inserted", "reordered"])
def test_checkpoints_know_a_parameter_by_its_place_in_the_groups(change):
    """All have one shape, so nothing but their values would tell that two were exchanged."""

    def start():
        params = [Parameter(torch.full((3,), float(i))) for i in range(3)]
        return params, torch.optim.Adam([{"params": params[:1]}, {"params": params[1:2]}], lr=0.1)

    def changed(params, groups):
        a, _, c = params
        one, two = groups
        if change == "inserted":
            return [{**one, "params": [a, c]}, two]
        return [two, one]

    def micro_batch(params, opt, factor):
        sum((i + 1) * factor * (p**2).sum() for i, p in enumerate(params)).backward()
        opt.step()

    params, inner = start()
    opt = fa.AccumulatingOptimizer(inner, 2)
    micro_batch(params, opt, 1)
    micro_batch(params, opt, 2)
    params[2].grad = None  # no optimizer had it yet
    opt.param_groups = changed(params, opt.param_groups)
    micro_batch(params, opt, 3)
    saved = copy.deepcopy(opt.state_dict())
    again, inner = start()
    inner.param_groups = changed(again, inner.param_groups)
    resumed = fa.AccumulatingOptimizer(inner, 2)
    with torch.no_grad():
        for p, q in zip(again, params, strict=True):
            p.copy_(q)
    resumed.load_state_dict(saved)
    for p, o in ((params, opt), (again, resumed)):
        micro_batch(p, o, 4)
        assert o.updated
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p, q)


def test_the_rest_of_the_wrapper_goes_on():
    """Window index, loss scale, noise averages, bits of masters, random numbers of rounding."""
    lengths = []

    def steps(index):
        lengths.append(index)
        return 2

    net = model(torch.bfloat16)
    opt = wrapped(net, steps, buffer_dtype=torch.float32, master_weights=True, noise_scale=0.5)
    x, y = data(dtype=torch.bfloat16)

    def window(opt):
        for part in parts(x, y, (12, 12)):
            mean_loss(net, *part).backward()
            opt.step()

    window(opt)
    window(opt)
    last, masters = opt.last_window, {p: masters_of(opt)[p].detach().clone() for p in net.parameters()}
    averages = opt._accumulation.extensions.of(NoiseScale).averages.clone()
    *most, _ = net.parameters()
    opt.param_groups = [{**opt.param_groups[0], "params": most[::-1]}]
    assert opt.last_window is last and opt.updated and opt.progress["window"] == 2
    assert torch.equal(opt._accumulation.extensions.of(NoiseScale).averages, averages)
    assert set(masters_of(opt)) == set(most) and all(torch.equal(masters_of(opt)[p], masters[p]) for p in most)
    window(opt)
    assert opt.updated and set(lengths) >= {0, 1, 2} and max(lengths) <= 3

    torch.manual_seed(5)
    kept, gone = (Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(
        torch.optim.SGD([kept, gone], lr=1.0), 1, buffer_dtype=None, rounding="stochastic", backend="reference"
    )
    found = []
    for _ in range(2):
        (kept * (1 + 2**-9)).float().sum().mul(1 + 2**-9).backward()
        found.append(opt.state_dict()["fusedaccum"]["rounding"]["draws"][0])
        opt.step()
        opt.param_groups = [{**opt.param_groups[0], "params": [kept]}]
    assert found == [1, 2]


def test_masters_of_new_parameters_take_over_the_state_that_the_script_has_made_for_them():
    cloud = Cloud(torch.bfloat16)
    opt = fa.AccumulatingOptimizer(torch.optim.Adam(cloud.groups()), 1, master_weights=True)
    cloud.loss(0.5).backward()
    opt.step()
    cloud.densify(opt, 1, 2)
    for p in cloud.params.values():
        opt.state[p] = {k: v.to(p.dtype) if v.dim() else v for k, v in opt.state[p].items()}
    opt.param_groups = opt.param_groups
    assert all(opt.state[p]["exp_avg"].dtype == torch.float32 for p in cloud.params.values())
    cloud.loss(0.5).backward()
    opt.step()
    assert opt.updated


@pytest.mark.parametrize("mode", ["counted", "caller-owned"])
def test_an_open_window_goes_on_with_what_stays(mode):
    """Like p.grad: what leaves takes its sum along, what is new has none, what stays keeps it."""
    net, (x, y) = model(), data()
    opt = wrapped(net, max_grad_norm=math.inf, **({"accum_steps": 3} if mode == "counted" else {}))
    big, cut = twin(net), parts(x, y, (12, 8, 4))
    plain = sgd(big.parameters())

    def surgery(net, optimizer):
        (group,) = optimizer.param_groups
        net[2].weight.requires_grad_(False)
        net[4].weight = Parameter(net[4].weight.detach() * 2)
        optimizer.param_groups = [{**group, "params": [p for p in net.parameters() if p is not net[2].weight][::-1]}]

    for i, part in enumerate(cut):
        opt.backward(mean_loss(net, *part), weight=len(part[0]))
        (mean_loss(big, *part) * len(part[0]) / 24).backward()
        if mode == "counted":
            opt.step()
        if i == 1:
            surgery(net, opt)
            surgery(big, plain)
            assert net[2].weight.grad is None and net[4].weight.grad is None
    if mode == "caller-owned":
        opt.step()
    plain.step()
    norm = torch.stack([p.grad.norm() for p in plain.param_groups[0]["params"]]).norm()
    torch.testing.assert_close(opt.last_window.grad_norm, norm)
    assert opt.updated
    assert_same_parameters(net, big, 1e-12)


def test_densification_between_backward_and_step():
    """As in INRIA's script: all parameters are new, so the step has no gradients."""
    clouds = [Cloud(torch.float64) for _ in range(2)]
    opts = [torch.optim.Adam(cloud.groups(), lr=0.01) for cloud in clouds]
    opts[0] = fa.AccumulatingOptimizer(opts[0])
    for i in range(6):
        for cloud, opt in zip(clouds, opts, strict=True):
            cloud.loss(0.1 * i).backward()
            if i % 3 == 1:
                cloud.densify(opt, 1, 2)
                opt.param_groups = opt.param_groups
            opt.step()
            opt.zero_grad(set_to_none=True)
    for ours, theirs in zip(*(cloud.params.values() for cloud in clouds), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["a bad micro-batch", "zeros", "by hand", "a closed window"])
def test_what_p_grad_shows_without_an_open_window(how):
    kept, gone = (Parameter(torch.ones(3)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([gone, kept], lr=1.0), nonfinite="skip_micro_batch")
    if how == "zeros":
        (kept.sum() + gone.sum()).backward()
        opt.zero_grad(set_to_none=False)
    elif how == "by hand":
        kept.grad = torch.full((3,), 0.5)
    elif how == "a closed window":
        (0 * (kept + gone).sum()).backward()
        opt.step()
    else:
        (kept * math.nan).sum().backward()
    opt.param_groups = [{**opt.optimizer.param_groups[0], "params": [kept]}]
    assert (kept.grad is None) == (how != "by hand")
    if how == "by hand":
        opt.step()
        assert kept.tolist() == [0.5] * 3
        opt.zero_grad()
        kept.data.fill_(1)
    kept.sum().backward()
    opt.step()
    assert kept.tolist() == [0.0] * 3 and gone.tolist() == [1.0] * 3


def test_batch_statistics_are_pooled_as_before():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    extra = Parameter(torch.ones(2))
    opts = [sgd([extra, *nets[0].parameters()]), sgd([Parameter(torch.ones(2)), *nets[1].parameters()])]
    opts = [fa.AccumulatingOptimizer(opt, 2) for opt in opts]
    for net, opt in zip(nets, opts, strict=True):
        fa.accumulate_batchnorm(net)
        for window in range(3):
            for part in parts(*data(seed=window), (9, 15)):
                mean_loss(net, *part).backward()
                opt.step()
                if net is nets[0]:
                    opt.param_groups = [{**opt.param_groups[0], "params": opt.param_groups[0]["params"][::-1]}]
            net(data(5, seed=window)[0])  # no backward has followed yet: it is part of the next micro-batch
            if net is nets[0]:
                opt.param_groups = [{**opt.param_groups[0], "params": list(net.parameters())[:: -1 if window else 1]}]
    assert_same_parameters(*nets, 1e-12)
    for ours, theirs in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layers_that_add_their_gradients_themselves_get_the_new_buffers():
    torch.manual_seed(0)
    net = marked(nn.Sequential(Adding(6, 4), nn.Tanh(), Adding(4, 3)).double())
    plain = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    plain.load_state_dict(net.state_dict())
    opts = [wrapped(net, 2), wrapped(plain, 2)]
    for window in range(3):
        for n, opt in zip((net, plain), opts, strict=True):
            for part in parts(*data(seed=window), (12, 12)):
                mean_loss(n, *part).backward()
                opt.step()
                (group,) = opt.param_groups
                opt.param_groups = [{**group, "params": group["params"][::-1]}]  # also inside the window
            params = list(n.parameters())
            opt.param_groups = [{**opt.param_groups[0], "params": params[1:] if window else params[::-1]}]
            n[0].weight.requires_grad_(window == 0)  # removed, it has no main_grad that its layer could add to
    assert not hasattr(net[0].weight, "main_grad") and hasattr(net[2].weight, "main_grad")
    assert_same_parameters(net, plain, 1e-12)


def test_the_users_random_numbers_stay_as_they_are():
    net = model(torch.bfloat16)
    opt = wrapped(net, 1, buffer_dtype=None, rounding="stochastic")
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    opt.param_groups = [{**opt.param_groups[0], "params": list(net.parameters())[::-1]}]
    copy.deepcopy((net, opt))
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_optimizers_step_masters_of_parameters_whose_strides_have_changed(make):
    """A model made channels_last after wrapping: gradients had other strides than the masters."""
    torch.manual_seed(0)
    nets = [nn.Conv2d(3, 4, 3).to(torch.bfloat16) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        opt = fa.AccumulatingOptimizer(make(net.parameters(), lr=0.05, fused=True), 1, master_weights=True)
        if net is nets[0]:
            net.to(memory_format=torch.channels_last)
        for i in range(2):
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)
            net(x).float().square().mean().backward()
            opt.step()
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-9)


def test_state_that_a_script_has_made_anew_in_16_bits_is_taken_over():
    net = model(torch.bfloat16)
    opt = fa.AccumulatingOptimizer(torch.optim.Adam(net.parameters()), 1, master_weights=True)
    x, y = data(dtype=torch.bfloat16)
    mean_loss(net, x, y).backward()
    opt.step()
    for p in net.parameters():
        opt.state[p]["exp_avg"] = torch.zeros_like(p)
    opt.param_groups = [{**opt.param_groups[0], "params": list(net.parameters())[::-1]}]
    mean_loss(net, x, y).backward()
    opt.step()
    assert opt.updated


def test_a_group_may_be_added_by_a_step_hook_while_masters_are_at_work():
    p, q = (Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=0.5), 1, master_weights=True)
    hook = opt.register_step_post_hook(lambda *_: opt.add_param_group({"params": [q], "lr": 0.25}))
    p.float().sum().backward()
    opt.step()
    hook.remove()
    (p.float() + q.float()).sum().backward()
    opt.step()
    assert p.tolist() == [0.0] * 3 and q.tolist() == [0.75] * 3


def test_hooks_do_not_pile_up():
    """A parameter that stays is hooked once, and one that left is left alone."""
    net, (x, y) = model(), data()
    opt = wrapped(net, 1)
    *most, last = net.parameters()
    for turn in range(6):
        opt.param_groups = [{**opt.param_groups[0], "params": [*most, last] if turn % 2 else most[::-1]}]
        if turn % 2:
            mean_loss(net, x, y).backward()
            assert all(p.grad is opt._sums.buffers.of[p].buffer for p in net.parameters())
            opt.step()
            opt.zero_grad()
        else:
            mean_loss(net, x, y).backward()
            assert last.grad is not None and last not in opt._sums.buffers.of
            opt.reset()
            last.grad = None
    assert len({id(slot) for slot in opt._sums.buffers.slots}) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"noise_scale": 0.9},
        {"skip_norm": 9.0},
        {"nonfinite": "skip_window"},
        {"nonfinite": "skip_micro_batch"},
        {"nonfinite": "raise"},
        {"buffer_dtype": torch.bfloat16},
        {"buffer_dtype": torch.bfloat16, "rounding": "stochastic"},
        {"buffer_dtype": torch.bfloat16, "rounding": "compensated"},
        {"master_weights": True},
        {"master_weights": "split"},
        {"buffer_device": "cpu", "master_weights": True},
        {"optimizer_device": "cpu"},
    ],
    ids=str,
)
def test_a_parameter_that_is_gone_is_freed(settings):
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    opt = fa.AccumulatingOptimizer(torch.optim.AdamW(parameters), 2, **settings)
    for _ in range(4):
        opt.backward(sum(p.sum() for p in parameters), weight=2)
        opt.step()
        opt.zero_grad()
    alive = weakref.ref(parameters.pop())
    opt.param_groups = [opt.param_groups[0] | {"params": parameters}]
    opt.state.pop(alive())
    gc.collect()
    assert alive() is None


def test_no_copy_of_the_model_remains():
    """However often parameters are replaced."""
    net = twin(model())
    opt = wrapped(net, 1)
    alive = []
    for _ in range(3):
        mean_loss(net, *data()).backward()
        opt.step()
        alive += [weakref.ref(p.grad) for p in net.parameters()]
        alive += [weakref.ref(layer.weight) for layer in (net[0], net[2], net[4])]
        for layer in (net[0], net[2], net[4]):
            opt.state.pop(layer.weight)
            layer.weight = Parameter(layer.weight.detach().clone())
        net.zero_grad()
        opt.param_groups = [{**opt.param_groups[0], "params": list(net.parameters())}]
    assert not any(ref() is not None for ref in alive)


def test_a_window_that_loses_parameters_measures_no_noise():
    """The norm of its first micro-batch is of other parameters than that of the window."""
    net = model()
    opt = wrapped(net, 2, noise_scale=0.5)
    for cut in (False, True):
        for i, part in enumerate(parts(*data(), (12, 12))):
            mean_loss(net, *part).backward()
            opt.step()
            if cut and i == 0:
                averages = opt._accumulation.extensions.of(NoiseScale).averages.clone()
                opt.param_groups = [{**opt.param_groups[0], "params": opt.param_groups[0]["params"][1:]}]
    assert torch.equal(opt._accumulation.extensions.of(NoiseScale).averages, averages)


@pytest.mark.parametrize("loads", [False, True])
def test_a_wrapper_that_is_built_again_keeps_its_seed(loads):
    """As Accelerate does it: the model is cast, and then a plain optimizer's state is loaded.

    ``loads``: a seed was loaded before.
    """
    make = functools.partial(wrapped, buffer_dtype=None, rounding="stochastic")
    net = model(torch.bfloat16)
    opt = make(net, 1)
    if loads:
        opt.load_state_dict(make(model(torch.bfloat16), 1).state_dict())
    seed = opt.state_dict()["fusedaccum"]["rounding"]["seed"]
    net.half()
    opt.load_state_dict(sgd(net.parameters()).state_dict())
    assert opt.state_dict()["fusedaccum"]["rounding"]["seed"] == seed


def test_a_wrapper_without_parameters_is_freed_although_a_hook_of_theirs_refers_to_it():
    p = Parameter(torch.zeros(3))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([p], lr=1.0))
    p.register_hook(lambda grad, opt=opt: None)
    p.sum().backward()
    opt.step()
    opt.param_groups = []
    freed = weakref.ref(opt), weakref.ref(p)
    del opt, p
    gc.collect()
    assert [x() for x in freed] == [None, None]


@pytest.mark.parametrize("at", ["inside a window", "between windows"])
def test_parameters_become_channels_last_under_a_fused_optimizer(at):
    """It walks through parameter and gradient in memory order, so their strides must agree."""

    def make(ps):
        return torch.optim.SGD(ps, lr=0.1, fused=True)

    net = torch.nn.Conv2d(4, 6, 3).double()
    big, x = copy.deepcopy(net), torch.randn(3, 4, 4, 5, 5, dtype=torch.float64)
    opt, plain = wrapper_of(list(net.parameters()), 2, make=make), make(big.parameters())
    for window, batch in enumerate(x):
        for i, part in enumerate(batch.chunk(2)):
            if window == 1 and i == (at == "inside a window"):
                net.to(memory_format=torch.channels_last)
            net(part).square().mean().backward()
            opt.step()
            opt.zero_grad()
        plain.zero_grad()
        big(batch).square().mean().backward()
        plain.step()
    assert net.weight.is_contiguous(memory_format=torch.channels_last)
    for p, q in zip(net.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(p, q)
