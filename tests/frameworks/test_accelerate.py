"""Accelerate's own loop with a wrapped optimizer.

`accumulate`, `backward`, clipping, schedulers and `save_state` are Accelerate's.
"""

from contextlib import nullcontext

import fusedaccum as fa
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from small import CLIP, GRADIENTS, IDS, SUM, TOLERANCE, Weight, adamw, unequal, wrapped
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from training import assert_same_parameters, data, model


def accelerator(accum_steps):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accum_steps)


class Run:
    """Trains a model on ``samples`` once, with ``accum_steps`` micro-batches of ``size`` a step."""

    def __init__(self, make, size, accum_steps, dtype=torch.float64, samples=48, scaler=None, seed=0, made_in=None):
        self.accelerator = accelerator(accum_steps)
        self.accelerator.scaler = scaler
        net = model(made_in or dtype, seed)
        self.made = make(net.parameters())
        net.to(dtype)
        self.steps, self.norms, self.losses = 0, [], []
        self.made.register_step_pre_hook(self.about_to_step)
        scheduler = torch.optim.lr_scheduler.StepLR(self.made, step_size=1, gamma=0.9)
        loader = DataLoader(TensorDataset(*data(samples, dtype)), batch_size=size)
        self.net, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, self.made, scheduler, loader
        )
        if (
            scaler is not None
        ):  # Accelerate makes a scaler only on GPUs; set this late, it does not run the model in fp16
            self.accelerator.native_amp, self.accelerator.state._mixed_precision = True, "fp16"

    def about_to_step(self, *_):
        self.steps += 1
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters()]).item())

    def train(self, skip=0, save=None, bad=None):
        """Train from micro-batch ``skip`` on; the loss of micro-batch ``bad`` is infinite.

        ``save``: {micro-batches done: folder}.
        """
        for i, (x, y) in enumerate(self.accelerator.skip_first_batches(self.loader, skip), skip):
            with self.accelerator.accumulate(self.net):
                loss = mse_loss(self.net(x), y)
                self.losses.append(loss.item())
                self.accelerator.backward(loss * torch.inf if i == bad else loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.net.parameters(), CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if save and i + 1 in save:
                self.accelerator.save_state(save[i + 1])
        return self


@pytest.mark.parametrize("dtype", TOLERANCE, ids=IDS)
def test_window_equals_the_big_batch(dtype):
    ours, big = Run(wrapped, 2, 4, dtype).train(), Run(adamw, 8, 1, dtype).train()
    assert_same_parameters(ours.net, big.net, TOLERANCE[dtype])
    windows = torch.tensor(ours.losses, dtype=torch.float64).view(-1, 4).mean(1)
    assert windows.tolist() == pytest.approx(big.losses, rel=TOLERANCE[dtype])


def test_steps_clipping_and_the_scheduler_are_once_a_window():
    ours = Run(wrapped, 2, 4).train()
    assert ours.steps == 6
    assert ours.scheduler.scheduler.last_epoch == 6
    assert ours.made.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**6)
    assert ours.norms == pytest.approx([CLIP] * 6, rel=1e-4)  # clip_grad_norm_ divides by the norm + 1e-6


def test_bf16_gradients_are_added_in_fp32():
    ours = accelerator(2)
    net = Weight()
    net, optimizer = ours.prepare(net, wrapped(net.parameters()))
    for x in GRADIENTS:
        with ours.accumulate(net):
            ours.backward(net(x))
            if ours.sync_gradients:
                assert net.weight.grad.item() == SUM
            optimizer.step()


@pytest.mark.parametrize("samples", [48, 42, 45], ids=["full", "last window short", "last micro-batch short too"])
def test_unequal_micro_batches_and_a_short_last_window(samples):
    """As in docs/frameworks/accelerate.md, "Micro-batches that are not of one size".

    Accelerate alone divides every window by 4.
    """
    big, ours = Run(adamw, 8, 1, samples=samples).train(), Run(unequal, 2, 4, samples=samples)
    for x, y in ours.loader:
        with ours.accelerator.accumulate(ours.net):
            loss = mse_loss(ours.net(x), y)
            with ours.made.micro_batch(weight=len(x)):
                ours.accelerator.backward(loss * ours.accelerator.gradient_accumulation_steps)
            if ours.accelerator.sync_gradients:
                ours.made.normalize_()
                ours.accelerator.clip_grad_norm_(ours.net.parameters(), CLIP)
            ours.optimizer.step()
            ours.scheduler.step()
            ours.optimizer.zero_grad()
    assert ours.steps == big.steps == 6
    assert_same_parameters(ours.net, big.net, TOLERANCE[torch.float64])


def resumed(make, at, folder, dtype):
    """A run from a saved state, and the whole run that saved it after ``at`` micro-batches."""
    whole = Run(make, 2, 4, dtype).train(save={at: folder})
    again = Run(make, 2, 4, dtype, seed=9)
    again.accelerator.load_state(folder)
    again.train(skip=at)
    return again, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("at", range(1, 9))
def test_state_saved_inside_a_window_goes_on_bit_by_bit(at, dtype, tmp_path):
    again, whole = resumed(wrapped, at, tmp_path, dtype)
    assert_same_parameters(again.net, whole.net, 0)
    assert again.losses == whole.losses[at:]
    assert again.scheduler.scheduler.last_epoch == whole.scheduler.scheduler.last_epoch == 6


def test_state_saved_by_accelerate_alone_loses_the_window(tmp_path):
    again, whole = resumed(adamw, 6, tmp_path, torch.float32)
    with pytest.raises(AssertionError, match="relative difference"):
        assert_same_parameters(again.net, whole.net, 1e-3)


def test_an_optimizer_that_accelerate_has_prepared_is_refused():
    """It lets only every fourth step() through, but every one would close a window.

    Without accumulation of its own it lets all through.
    """
    net = model()
    for accum_steps, refused in (
        (4, pytest.raises(ValueError, match=r"before accelerator\.prepare")),
        (1, nullcontext()),
    ):
        prepared = accelerator(accum_steps).prepare(adamw(net.parameters()))
        with refused:
            fa.AccumulatingOptimizer(prepared, reduction="none")


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def test_prepare_takes_a_model_that_was_moved_after_it_was_wrapped():
    """Moved to another dtype here; Accelerate itself moves it to a GPU. Both lose the hooks."""
    moved, ours = Run(wrapped, 2, 4, made_in=torch.float32).train(), Run(wrapped, 2, 4).train()
    assert_same_parameters(moved.net, ours.net, 0)


def test_with_a_grad_scaler_window_equals_the_big_batch():
    ours, big = Run(wrapped, 2, 4, scaler=scaler()).train(), Run(adamw, 8, 1).train()
    assert_same_parameters(ours.net, big.net, TOLERANCE[torch.float64])
    assert ours.norms == pytest.approx([CLIP] * 6, rel=1e-4)


def test_with_a_grad_scaler_an_overflow_costs_its_window_and_nothing_else():
    ours = Run(wrapped, 2, 4, scaler=scaler()).train(bad=1)
    alone = Run(wrapped, 2, 4)
    alone.scheduler.scheduler.step()  # Accelerate counts the skipped window as a step: docs/frameworks/accelerate.md
    alone.train(skip=4)
    assert ours.steps == alone.steps == 5
    assert_same_parameters(ours.net, alone.net, TOLERANCE[torch.float64])
