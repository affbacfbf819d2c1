"""fa.explain against what happens: bytes allocated, bytes passed to ops, real optimizer state."""

import fusedaccum as fa
import pytest
import torch
from fusedaccum.recipes import calibration
from sizes import limits
from torch import nn
from training import masters_of

pytest.importorskip("tqdm")

from benchmarks import memory

pytestmark = pytest.mark.long

BATCH, MICRO_BATCH = 32, 8
SETTINGS = {
    "FP32 buffers": {},
    "24-bit sums": {"buffer_dtype": torch.bfloat16, "rounding": "compensated"},
    "16-bit buffers": {"buffer_dtype": None, "rounding": "stochastic"},
    "master weights": {"master_weights": True},
    "split masters": {"master_weights": "split"},
    "24-bit sums, split masters": {
        "buffer_dtype": torch.bfloat16,
        "rounding": "compensated",
        "master_weights": "split",
    },
    "skip_micro_batch": {"nonfinite": "skip_micro_batch"},
    "fused layers": {},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Measures speed on little data, as these tests are not about seconds."""
    monkeypatch.setattr("fusedaccum.recipes.calibration.SAMPLE", 1 << 12)
    monkeypatch.setattr("fusedaccum.recipes.calibration.HOOKED", 4)


class Tokens(nn.Module):
    def forward(self, x):
        return x[:, 0].abs().long()


def layers(dtype, width=96, tied=False):
    """Deep enough that a bucket, all gradients and the largest gradient differ in size.

    The last layer may be tied to an embedding.
    """
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 3 * width))
    if tied:
        net = nn.Sequential(Tokens(), nn.Embedding(3 * width, width), *net)
        net[1].weight = net[-1].weight
    return net.to(dtype)


def offered(name, dtype, embedding=False):
    """Does fa.explain offer this mode for parameters of this dtype on the CPU?"""
    if name == "fused layers":  # there the product has one dtype
        return embedding or dtype == "fp32"
    wide = ("FP32 buffers", "skip_micro_batch", "plain p.grad")
    return dtype in ("bf16", "mixed") or name in wide


def modes(model, **how):
    found = fa.explain(model, **{"desired_batch": BATCH, "micro_batch": MICRO_BATCH, **how})
    return {mode.name: mode for mode in found.modes}


def window(model, step, micro_batches=BATCH // MICRO_BATCH):
    """Run one window of a model from :func:`layers`."""
    p = next(model.parameters())
    for _ in range(micro_batches):
        model(torch.randn(2, p.shape[1]).to(p.dtype)).float().square().mean().backward()
        step()


def temporaries(layer):
    """Bytes that this processor's products take beside results, in forward and backward."""
    x = torch.randn(2, layer.in_features).to(layer.weight.dtype).requires_grad_()
    with memory.recorded("cpu") as timeline, memory.mark("pass"):
        out = layer(x)
        out.backward(torch.ones_like(out))
    results = [out, out, x.grad, *(p.grad for p in layer.parameters())]  # and the gradient of the first
    return timeline.peak_of("pass") - sum(result.nbytes for result in results)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", [*SETTINGS, "plain p.grad"])
@pytest.mark.usefixtures(
    "one_thread"
)  # with several, PyTorch's own bf16 products take more temporaries on some processors
@limits(bucket=1 << 16)
def test_memory_is_what_a_window_allocates(name, dtype, tied):
    said = modes(layers(DTYPES[dtype], tied=tied), optimizer=torch.optim.AdamW)
    assert (name in said) is offered(name, dtype, tied)
    if name not in said:
        return
    with memory.recorded("cpu") as timeline:
        model = layers(DTYPES[dtype], tied=tied)
        opt = torch.optim.AdamW(model.parameters(), fused=True)
        if name != "plain p.grad":
            opt = fa.AccumulatingOptimizer(opt, accum_steps=4, **SETTINGS[name])
        if name == "fused layers":
            fa.fuse_embedding(fa.fuse_linear(model))
        step = opt.step if name != "plain p.grad" else lambda: None
        window(model, step)
        if name == "plain p.grad":
            opt.step()
            opt.zero_grad()
        with memory.mark("second window"):  # by now the optimizer has its state
            window(model, step)
    # Where the shared weight's parts make the peak, products and their temporaries, which depend on
    # the processor, are no part of it.
    exact = tied and name != "fused layers"
    tolerance = 1e-3 if exact else 0.1
    measured = timeline.peak_of("second window")
    assert said[name].peak * (1 - tolerance) <= measured
    assert measured - max(0, temporaries(layers(DTYPES[dtype])[-1])) <= said[name].peak * (1 + tolerance)


OPTIMIZERS = {"SGD": {}, "fused AdamW": {"fused": True}}


@pytest.mark.parametrize(("micro_batches", "optimizer"), [(1, "SGD"), (4, "SGD"), (4, "fused AdamW")])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64", "mixed"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "fused layers"])
def test_bytes_moved_are_those_of_the_calls(monkeypatch, name, dtype, micro_batches, optimizer):
    model = layers(DTYPES.get(dtype, torch.bfloat16), width=64)
    if dtype == "mixed":
        model[0].weight = nn.Parameter(model[0].weight.float())
    opt = getattr(torch.optim, optimizer.split()[-1])(model.parameters(), lr=1e-3, **OPTIMIZERS[optimizer])
    said = modes(model, desired_batch=micro_batches * MICRO_BATCH, optimizer=opt)
    assert (name in said) is offered(name, dtype)
    if name not in said:
        return
    opt = fa.AccumulatingOptimizer(opt, accum_steps=micro_batches, **SETTINGS[name])
    counted = counts(monkeypatch)
    for _ in range(micro_batches):
        sum((p.float() ** 2).sum() for p in model.parameters()).backward()
        opt.step()
    assert said[name].moved == pytest.approx(sum(counted), rel=0.1 if dtype == "mixed" else 0.01)


@pytest.mark.parametrize("name", ["FP32 buffers", "master weights"])
@pytest.mark.parametrize("hooked", [False, True])
def test_bytes_moved_by_fused_optimizers_that_do_not_scale_gradients_themselves(monkeypatch, name, hooked):
    model = layers(torch.float32 if name == "FP32 buffers" else torch.bfloat16, width=64)
    kind = (
        torch.optim.AdamW
        if hooked
        else type("Own", (torch.optim.AdamW,), {"step": lambda self: super(kind, self).step()})
    )
    opt = kind(model.parameters(), fused=True)
    if hooked:
        opt.register_step_pre_hook(lambda *_: None)
    said = modes(model, optimizer=opt)[name]
    opt = fa.AccumulatingOptimizer(opt, accum_steps=4, **SETTINGS[name])
    counted = counts(monkeypatch)
    for _ in range(4):
        sum((p.float() ** 2).sum() for p in model.parameters()).backward()
        opt.step()
    assert said.moved == pytest.approx(sum(counted), rel=0.01)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "fused layers"])
@pytest.mark.parametrize("asked", [(torch.bfloat16, "nothing"), (torch.float32, "nothing"), (None, torch.float64)])
@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
def test_bytes_moved_are_those_of_the_dtypes_that_groups_ask_for(monkeypatch, name, asked, optimizer):
    model = layers(torch.bfloat16, width=64)
    ps = list(model.parameters())
    groups = [
        {"params": ps[i::2], **({} if dtype == "nothing" else {"buffer_dtype": dtype})} for i, dtype in enumerate(asked)
    ]
    opt = getattr(torch.optim, optimizer.split()[-1])(groups, lr=1e-3, **OPTIMIZERS[optimizer])
    said = modes(model, optimizer=opt)
    if name not in said:
        return
    opt = fa.AccumulatingOptimizer(opt, accum_steps=4, **SETTINGS[name])
    counted = counts(monkeypatch)
    for _ in range(4):
        sum((p.float() ** 2).sum() for p in ps).backward()
        opt.step()
    assert said[name].moved == pytest.approx(sum(counted), rel=0.01)


def counts(monkeypatch):
    """A list to which each call of an op appends the bytes that it reads and writes."""
    found = []
    ops = {name: getattr(fa.ops, name) for name in ("accumulate_", "scale_", "cast_", "stats")}

    def size(tensors):
        return sum(x.nbytes for x in tensors)

    def accumulate_(buffers, grads, *args, overwrite=False, **kwargs):
        found.append(size(grads) + (1 if overwrite else 2) * size([*buffers, *(kwargs.get("low") or ())]))
        return ops["accumulate_"](buffers, grads, *args, overwrite=overwrite, **kwargs)

    def scale_(tensors, *args, **kwargs):
        found.append(2 * size([*tensors, *(kwargs.get("low") or ())]))
        return ops["scale_"](tensors, *args, **kwargs)

    def cast_(outs, ins, *args, **kwargs):
        found.append(size(outs) + size(ins) + size(kwargs.get("low") or ()))
        return ops["cast_"](outs, ins, *args, **kwargs)

    def stats(tensors, **kwargs):
        found.append(size(tensors))
        return ops["stats"](tensors, **kwargs)

    for op in (accumulate_, scale_, cast_, stats):
        monkeypatch.setattr(fa.ops, op.__name__, op)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_fused_layers_leave_only_the_rest_to_be_moved(monkeypatch, tied):
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    if tied:
        model[1].weight = model[0].weight
    said = modes(model)["fused layers"]
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters()), accum_steps=4)
    fa.fuse_embedding(fa.fuse_linear(model))
    counted = counts(monkeypatch)
    for _ in range(4):
        model(torch.arange(8)).sum().backward()
        opt.step()
    zeroing = 0 if tied else 50 * 16 * 4  # the product comes first, and overwrites
    assert said.moved == sum(counted) + zeroing


def test_masters_of_frozen_parameters_take_memory_too():
    model = layers(torch.bfloat16)
    model[0].requires_grad_(False)
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters()), accum_steps=4, master_weights=True)
    made = sum(master.nbytes for master in masters_of(opt).values())
    assert modes(model)["master weights"].memory["masters"] == made == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "build",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, amsgrad=True, fused=True),
        lambda params: torch.optim.RMSprop(params, centered=True),
    ],
)
@pytest.mark.parametrize("masters", [False, True])
def test_the_optimizers_state_is_what_it_keeps(build, masters):
    model = layers(torch.bfloat16, width=16)
    opt = build(model.parameters())
    said = modes(model, optimizer=opt)["master weights" if masters else "FP32 buffers"].memory["optimizer"]
    assert not opt.state  # the user's optimizer was not stepped
    opt = fa.AccumulatingOptimizer(opt, accum_steps=4, master_weights=masters)
    window(model, opt.step)
    kept = sum(x.nbytes for entry in opt.state.values() for x in entry.values() if isinstance(x, torch.Tensor))
    assert said == pytest.approx(kept, rel=0.01)


class Slow(torch.optim.Optimizer):
    """As Lookahead: an optimizer inside, and weights of its own."""

    def __init__(self, params):
        super().__init__(params, {})
        self.optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        self.optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()


def test_state_of_an_optimizer_around_another_is_counted():
    model = layers(torch.float32)
    each = sum(p.nbytes for p in model.parameters())
    momentum = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for opt in (Slow(model.parameters()), momentum):
        assert modes(model, optimizer=opt)["FP32 buffers"].memory["optimizer"] == each


def test_what_an_optimizer_keeps_is_left_out_where_it_cannot_be_told():
    class Refuses(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("not here")

    model = layers(torch.float32)
    found = fa.explain(model, desired_batch=2, micro_batch=1, optimizer=Refuses(model.parameters(), lr=0.1))
    assert "optimizer" not in found.modes[0].memory
    assert "state is left out" in str(found)


# -- elsewhere: bytes on a device that this machine need not have ----------------------------------


def on_meta(dtype, width=4096):
    with torch.device("meta"):
        return layers(dtype, width)


def test_on_meta_nothing_is_measured_and_buffers_may_be_in_cpu_memory():
    found = fa.explain(on_meta(torch.bfloat16), desired_batch=32, micro_batch=8)
    said = {mode.name: mode for mode in found.modes}
    elements = 6 * (4096 * 4096 + 4096) + 3 * (4096 * 4096 + 4096)
    assert "free is not known here) and moves " in str(found)
    assert not found.bandwidths and all(mode.seconds is None for mode in found.modes)
    assert said["FP32 buffers"].peak == 2 * elements + 4 * elements + 3 * 4096 * 4096 * 2 + 3 * 4096 * 2
    away = said["buffers in CPU memory"]
    assert away.memory["model"] == 2 * elements and away.memory["ring"] == away.cpu["ring"] == 96 << 20
    assert away.cpu["buffers"] == 4 * elements
    assert said["masters there too"].cpu["masters"] == 4 * elements


GIB = 2**30


@pytest.mark.parametrize(
    ("dtype", "memory", "name"),
    [
        # 0.3 GiB of bf16, 0.6 GiB of FP32 buffers; layers whose gradients are 96 MiB at most
        ("bf16", None, "FP32 buffers"),
        ("bf16", 2 * GIB, "FP32 buffers"),
        ("bf16", int(1.78 * GIB), "fused layers"),
        ("bf16", int(1.10 * GIB), "24-bit sums"),
        ("bf16", int(0.90 * GIB), "16-bit buffers"),
        ("bf16", int(0.64 * GIB), "buffers in CPU memory"),
        ("fp32", 4 * GIB, "FP32 buffers"),
        ("fp32", int(1.2 * GIB), "buffers in CPU memory"),
    ],
)
def test_recommends_what_fits(dtype, memory, name):
    model = on_meta(DTYPES[dtype])
    if name == "fused layers":
        model.append(nn.Embedding(20000, 4096, dtype=DTYPES[dtype], device="meta"))
    found = fa.explain(model, desired_batch=32, micro_batch=8, memory=memory)
    assert found.recommended.name == name, str(found)
    if memory is not None:
        assert found.recommended.peak <= 0.8 * memory


def test_says_so_where_nothing_fits():
    found = fa.explain(on_meta(torch.bfloat16), desired_batch=32, micro_batch=8, memory=GIB // 8)
    assert "less than a fifth" in found.reason
    assert found.recommended.peak == min(mode.peak for mode in found.modes if mode.name != "plain p.grad")


def test_does_not_trade_exactness_for_memory():
    params = list(layers(torch.float32).parameters())
    plain = modes(params)["plain p.grad"]
    found = fa.explain(params, desired_batch=32, micro_batch=8, memory=int(plain.peak / 0.8) + 8)
    assert plain.peak < min(mode.peak for mode in found.modes if mode.name != plain.name)
    assert found.recommended.name == "FP32 buffers"


def test_a_batch_that_fits_at_once_needs_no_accumulation():
    found = fa.explain(layers(torch.bfloat16), desired_batch=8, micro_batch=8)
    assert found.micro_batches == 1 and found.recommended.name == "plain p.grad"


@pytest.mark.parametrize(("desired", "micro"), [(32, 8), (30, 8), (33, 8)])
def test_the_call_makes_the_window_that_was_asked_for(desired, micro):
    model = layers(torch.float32, width=8)
    found = fa.explain(model, desired_batch=desired, micro_batch=micro)
    names = {"fa": fa, "torch": torch, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
    exec(found.call, names)
    opt, x = names["opt"], torch.randn(desired, 8)
    sizes = [len(part) for part in x.split(micro)]
    assert (found.micro_batches, found.last) == (len(sizes), sizes[-1])
    updates = []
    for part in x.split(micro):
        opt.backward(model(part).square().mean(), weight=len(part))
        opt.step()
        updates.append(opt.updated)
    assert updates == [False] * (len(sizes) - 1) + [True]
    sums = [p.grad.clone() for p in model.parameters()]
    del opt, names
    whole = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for ours, theirs in zip(sums, whole):
        torch.testing.assert_close(ours, theirs)


# -- the text, and what is refused -----------------------------------------------------------------


def test_prints_nothing_and_leaves_the_model_alone(capfd):
    model = layers(torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    found = fa.explain(model, desired_batch=30, micro_batch=8)
    text = repr(found)
    assert capfd.readouterr() == ("", "") and text == str(found)
    assert "the last of 6" in text
    for mode in found.modes:
        assert mode.name in text and mode.formula in text and mode.seconds > 0
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before))
    opt = fa.AccumulatingOptimizer(torch.optim.SGD(model.parameters()), accum_steps=4)  # nothing was left hooked
    assert opt is not None


def test_the_text_begins_with_what_to_take_and_what_it_costs(monkeypatch):
    monkeypatch.setattr(calibration, "hook_seconds", lambda *_: 10.0)  # of each parameter and micro-batch
    model = layers(torch.bfloat16)
    found = fa.explain(model, desired_batch=32, micro_batch=8, memory=GIB)
    taken, costs, call, *rest = str(found).splitlines()
    assert taken == f"Take {found.recommended.name}: {found.reason}." and call.strip() == found.call
    hooks = 10_000 * 4 * len(list(model.parameters()))
    ms, plain = (f"{extra + 1e3 * m.seconds:.1f} ms" for extra, m in ((hooks, found.modes[0]), (0, found.modes[-1])))
    assert f" of the 1.0 GiB available and {ms} per window; plain p.grad takes" in costs and plain in costs
    row = next(line for line in reversed(rest) if line.startswith("FP32 buffers"))
    assert f"{row.split()[-1]} ms" == ms


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_explains_where_no_gradients_are_tracked(block):
    with block():
        known = fa.explain(layers(torch.bfloat16), desired_batch=BATCH, micro_batch=MICRO_BATCH)
    assert all(mode.seconds > 0 for mode in known.modes)


def test_seconds_are_bytes_over_bandwidth():
    found = fa.explain(layers(torch.bfloat16), desired_batch=32, micro_batch=8)
    for mode in found.modes:
        assert mode.seconds == pytest.approx(sum(p.bytes / found.bandwidths[p.kernel] for p in mode.passes))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"desired_batch": 32.0}, ValueError, "desired_batch must be an int.* write 32"),
        ({"micro_batch": 0}, ValueError, "micro_batch must be at least 1, got 0"),
        ({"micro_batch": 64}, ValueError, "micro_batch is 64, more than desired_batch .*use micro_batch=32"),
        ({"desired_batch": "32"}, TypeError, "desired_batch must be an int"),
        ({"desired_batch": True}, TypeError, "desired_batch must be an int"),
        ({"model": nn.ReLU()}, ValueError, "nothing to accumulate; unfreeze"),
        ({"model": torch.zeros(3)}, TypeError, "model must be a torch.nn.Module .*pass model.parameters"),
        ({"model": nn.Linear(2, 2).named_parameters()}, TypeError, "model holds a tuple.*pass model.parameters"),
        ({"model": [{"params": []}]}, TypeError, "model holds a dict.*pass model.parameters"),
        ({"model": "gpt2"}, TypeError, "model holds a str"),
        ({"optimizer": 3}, TypeError, "optimizer must be an optimizer or its class, got 3"),
        (
            {"model": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]},
            ValueError,
            "a parameter is torch.complex64",
        ),
        (
            {"model": [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]},
            ValueError,
            "on cpu and meta; explain those of one device",
        ),
    ],
)
def test_refuses_what_cannot_be_meant(how, error, message):
    arguments = {"model": nn.Linear(2, 2), "desired_batch": 32, "micro_batch": 8, **how}
    model = arguments.pop("model")
    with pytest.raises(error, match=message):
        fa.explain(model, **arguments)


def test_state_that_an_optimizer_makes_for_frozen_parameters_is_counted():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    net[0].requires_grad_(False)
    inner = torch.optim.Adagrad(net.parameters())
    found = fa.explain(net, desired_batch=8, micro_batch=4, optimizer=inner)
    kept = sum(x.nbytes for entry in inner.state.values() for x in entry.values())
    assert found.recommended.memory["optimizer"] == kept


def test_the_hooks_cost_what_a_backward_takes_longer_with_them(monkeypatch):
    seconds = {"wrapped": 5.0, "alone": 3.0}
    monkeypatch.setattr(calibration, "median_seconds", lambda call, _: call() or seconds[call.__name__])
    assert calibration.hook_seconds(torch.float32, torch.device("cpu")) == 2.0 / calibration.HOOKED


def test_the_hooks_of_a_window_are_those_of_its_micro_batches(monkeypatch):
    monkeypatch.setattr(calibration, "hook_seconds", lambda *_: 0.5)
    net = nn.Linear(4, 4)
    found = fa.explain(net, desired_batch=24, micro_batch=8)
    assert found.hook_seconds == 0.5 * len(list(net.parameters())) * 3
