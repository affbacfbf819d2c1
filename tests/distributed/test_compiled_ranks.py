"""Compiled models and loops over ranks take the big batch's steps; the wrapper is not traced."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from graphs import compile_anew, compiled_functions
from parts import assert_close, made, mean_loss, share, wrapped
from test_shards import literal, sharded
from torch import nn

WINDOWS, COUNT = 3, 8


def ddp(model):
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def compiled(model):
    return torch.compile(model, backend="aot_eager")


MODELS = {
    "ddp": lambda: ddp(made()),
    "ddp, then compiled": lambda: compiled(ddp(made())),
    "compiled, then ddp": lambda: ddp(compiled(made())),
    "fsdp2": sharded,
    "fsdp2, then compiled": lambda: compiled(sharded()),
}


def train(rank, make, in_loop):
    compile_anew()
    warnings.filterwarnings("ignore", "The .grad attribute")  # the compiler reads the loss's .grad after a graph break
    size = dist.get_world_size()
    model = MODELS[make]()
    opt = wrapped(model, accum_steps=COUNT // size)
    loss_of = functools.partial(mean_loss, model)
    if in_loop:  # how the compiler handles DDP's and FSDP2's own hooks is not tested here
        loss_of = torch.compiler.disable(loss_of)

    def micro_step(x, y):
        x = x * 2
        loss_of(x, y, False).backward()
        opt.step()
        opt.zero_grad()

    if in_loop:
        micro_step = compiled(micro_step)
    for window in range(WINDOWS):
        for x, y, *_ in share(window, COUNT, rank, size, equal=True):
            micro_step(x / 2, y)
        if window == 0:
            at_first, _ = compiled_functions()
    assert opt.last_window.micro_batches == COUNT
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in full], at_first, *compiled_functions()


breaks = pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 itself breaks in compiled loops before 2.13")


@pytest.mark.parametrize(
    "make, in_loop",
    [
        ("ddp", True),
        pytest.param("fsdp2", True, marks=breaks),
        *((name, False) for name in MODELS if "compiled" in name),
    ],
)
def test_compiled_ranks_are_the_big_batch(worlds, make, in_loop):
    theirs, _ = literal(True)
    for parameters, at_first, seen, ours in worlds(2).run(train, make=make, in_loop=in_loop):
        assert_close(parameters, theirs[: len(parameters)])
        assert seen and not ours
        assert seen == at_first  # nothing was recompiled
