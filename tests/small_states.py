"""Optimizers with state smaller than FP32: all kinds of FP32 masters against FP32 parameters."""

import io

import fusedaccum as fa
import torch
from torch.nn import Parameter

SHAPES = ((64, 256), (16,), (128, 64))
MICRO_BATCHES = 4
WINDOWS = 6
MASTERS = {
    "copies": {"master_weights": True},
    "split": {"master_weights": "split"},
    "split, 24-bit sums": {"master_weights": "split", "buffer_dtype": torch.bfloat16, "rounding": "compensated"},
}


def gradient(window, micro_batch, i):
    """Parameter i's, in multiples of 1/8: sums are exact in 24 bits, so equal for all masters."""
    seeded = torch.Generator().manual_seed(100 * window + 10 * micro_batch + i)
    return torch.randint(-128, 129, SHAPES[i], generator=seeded) / 8


def parameters(shapes=SHAPES):
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).bfloat16()) for shape in shapes]


def by_hand(make):
    """FP32 parameters that the optimizer has stepped in plain PyTorch."""
    masters = [Parameter(p.detach().float()) for p in parameters()]
    opt = make(masters)
    for window in range(WINDOWS):
        for i, p in enumerate(masters):
            p.grad = sum(gradient(window, m, i) for m in range(MICRO_BATCHES)) / MICRO_BATCHES
        opt.step()
    return masters


def train(ps, opt, windows):
    for window in windows:
        for m in range(MICRO_BATCHES):
            opt.backward(sum((p.float() * gradient(window, m, i)).sum() for i, p in enumerate(ps)))
            opt.step()


def masters(opt):
    return [master.clone() for _, master in sorted(opt.state_dict()["fusedaccum"]["masters"].items())]


def straight(make, settings):
    """The wrapper after all windows, and its parameters."""
    ps = parameters()
    opt = fa.AccumulatingOptimizer(make(ps), MICRO_BATCHES, **settings)
    train(ps, opt, range(WINDOWS))
    return ps, opt


def resumed(make, settings):
    """As :func:`straight`, but through a file after half of the windows."""
    half = WINDOWS // 2
    ps = parameters()
    opt = fa.AccumulatingOptimizer(make(ps), MICRO_BATCHES, **settings)
    train(ps, opt, range(half))
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in ps], "optimizer": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    ps = parameters()
    opt = fa.AccumulatingOptimizer(make(ps), MICRO_BATCHES, **settings)
    with torch.no_grad():
        for p, values in zip(ps, saved["model"], strict=True):
            p.copy_(values)
    opt.load_state_dict(saved["optimizer"])
    train(ps, opt, range(half, WINDOWS))
    return ps, opt


def assert_same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def bytes_of_state(make, settings, shape=(1024, 1024)):
    """Bytes a parameter, of all memory that the state of one parameter holds after a window."""
    (p,) = parameters((shape,))
    opt = fa.AccumulatingOptimizer(make([p]), **settings)
    opt.backward(p.float().sum())
    opt.step()
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(opt.state[p])}
    return sum(found.values()) / p.numel()


def _tensors(held):
    if isinstance(held, dict):
        return [x for value in held.values() for x in _tensors(value)]
    if hasattr(held, "__tensor_flatten__"):  # a tensor made of others
        return [x for name in held.__tensor_flatten__()[0] for x in _tensors(getattr(held, name))]
    return [held] if isinstance(held, torch.Tensor) else []
