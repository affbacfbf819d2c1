"""``fa.cached_backward`` refuses what cannot be meant, and leaves nothing behind."""

import re

import fusedaccum as fa
import pytest
import torch
from contrastive import SAMPLES, SupCon, Tower, clip
from torch import nn

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


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
        (2.0, ValueError, "got the float 2.0; write 2; it is the samples"),
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
    refused("weight=3 is for a wrapper's micro-batch", weight=3)
    refused(
        "got a SGD; with a plain optimizer, leave it out",
        error=TypeError,
        opt=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
        weight=3,
    )
