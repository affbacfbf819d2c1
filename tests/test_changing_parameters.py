"""Parameters that are added, removed or replaced between windows train as under plain PyTorch, and everything else goes on."""

import copy
import math
import weakref

import fusedaccum as fa
import pytest
import torch
from adding import Adding, marked
from torch import nn
from torch.nn import Parameter
from training import assert_same_parameters, data, mean_loss, model, parts, sgd, twin, wrapped

pytestmark = pytest.mark.usefixtures("each_intake")


class Cloud:
    """Points with a colour each, as in 3D Gaussian splatting, whose number changes: both parameters are then replaced."""

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
    buffer = weakref.ref(first[0].grad)
    opt.param_groups = [opt.param_groups[1 - place]]
    assert first[0].grad is None and buffer() is None
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
    """Window index, loss scale, noise averages, the bits of master weights, and the random numbers of stochastic rounding."""
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
    last, masters = opt.last_window, {p: opt._masters.of[p].detach().clone() for p in net.parameters()}
    averages = opt._closing.noise.averages.clone()
    *most, _ = net.parameters()
    opt.param_groups = [{**opt.param_groups[0], "params": most[::-1]}]
    assert opt.last_window is last and opt.updated and opt.progress["window"] == 2
    assert torch.equal(opt._closing.noise.averages, averages)
    assert list(opt._masters.of) == most[::-1] and all(torch.equal(opt._masters.of[p], masters[p]) for p in most)
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
        seen = opt._sums.buffers.of[kept].draws
        opt.step()
        found.append(seen)
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


@pytest.mark.parametrize("how", ["a bad micro-batch", "zeros"])
def test_what_holds_no_gradient_is_no_open_window(how):
    kept, gone = (Parameter(torch.ones(3)) for _ in range(2))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD([gone, kept], lr=1.0), nonfinite="skip_micro_batch")
    if how == "zeros":
        (kept.sum() + gone.sum()).backward()
        opt.zero_grad(set_to_none=False)
    else:
        (kept * math.nan).sum().backward()
    opt.param_groups = [{**opt.optimizer.param_groups[0], "params": [kept]}]
    assert kept.grad is None
    kept.sum().backward()
    opt.step()
    assert kept.tolist() == [0.0] * 3 and gone.tolist() == [1.0] * 3


@pytest.mark.parametrize("mode", ["counted", "caller-owned", "set by hand"])
def test_an_open_window_keeps_its_parameters(mode):
    """Only additions after the others are taken in; anything else is refused, and changes nothing."""
    nets = model(), model()
    settings = {"accum_steps": 2} if mode == "counted" else {}
    opts = [wrapped(net, **settings) for net in nets]
    (a, b) = parts(*data(), (12, 12))
    for net, opt in zip(nets, opts, strict=True):
        if mode == "set by hand":
            next(net.parameters()).grad = torch.ones(10, 6, dtype=torch.float64)
        else:
            mean_loss(net, *a).backward()
        if mode == "counted":
            opt.step()
    before = opts[0].param_groups
    (group,) = before
    for wrong in (group["params"][1:], group["params"][::-1], [Parameter(torch.ones(2)), *group["params"]]):
        with pytest.raises(RuntimeError, match=r"can only add.*flush\(\) or reset\(\)"):
            opts[0].param_groups = [{**group, "params": wrong}]
        assert opts[0].param_groups is before
    for net, opt in zip(nets, opts, strict=True):
        mean_loss(net, *b).backward()
        opt.step()
        assert opt.updated
    assert_same_parameters(*nets, 0)


def test_a_parameter_that_cannot_be_taken_is_refused_before_anything_changes():
    net, plain = model(), model()
    opt = wrapped(net, 1)
    x, y = data()
    before = opt.param_groups
    with pytest.raises(ValueError, match="complex"):
        opt.param_groups = [{**before[0], "params": [Parameter(torch.zeros(2, dtype=torch.complex64))]}]
    assert opt.param_groups is before
    mean_loss(net, x, y).backward()
    opt.step()
    optimizer = sgd(plain.parameters())
    mean_loss(plain, x, y).backward()
    optimizer.step()
    assert_same_parameters(net, plain, 1e-12)


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
            params = list(n.parameters())
            opt.param_groups = [{**opt.param_groups[0], "params": params[1:] if window else params[::-1]}]
            n[0].weight.requires_grad_(window == 0)  # removed, it has no main_grad that its layer could add to
    assert not hasattr(net[0].weight, "main_grad") and hasattr(net[2].weight, "main_grad")
    assert_same_parameters(net, plain, 1e-12)


def test_no_copy_of_the_model_remains():
    """However often parameters are replaced."""
    net = twin(model())
    opt = wrapped(net, 1)
    alive = []
    for _ in range(3):
        mean_loss(net, *data()).backward()
        opt.step()
        alive += [weakref.ref(p.grad) for p in net.parameters()]
        for layer in (net[0], net[2], net[4]):
            opt.state.pop(layer.weight)
            layer.weight = Parameter(layer.weight.detach().clone())
        net.zero_grad()
        opt.param_groups = [{**opt.param_groups[0], "params": list(net.parameters())}]
    assert not any(ref() is not None for ref in alive)
