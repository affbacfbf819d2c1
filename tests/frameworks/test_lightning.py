"""Lightning's Trainer with a wrapped optimizer.

Accumulation, clipping, schedulers and checkpoints are Lightning's.
"""

import fusedaccum as fa
import lightning as L
import pytest
import torch
from fusedaccum.integrations.lightning import ResumeInsideWindow
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from small import CLIP, GRADIENTS, IDS, SUM, TOLERANCE, Weight, adamw, unequal, wrapped
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from training import assert_same_parameters, big_batch_step, data, model


class Batches:
    """A loader that Lightning can resume: it saves how many batches it has given out."""

    def __init__(self, size, samples=48):
        self.batches = list(zip(*(t.split(size) for t in data(samples)), strict=True))
        self.at = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Regression(L.LightningModule):
    def __init__(self, make, dtype=torch.float64, seed=0):
        super().__init__()
        self.net, self.make = model(dtype, seed), make
        self.steps, self.losses, self.norms = 0, [], []

    def training_step(self, batch, index):
        x, y = (t.to(self.net[0].weight.dtype) for t in batch)
        loss = mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        self.made = self.make(self.parameters())
        self.made.register_step_pre_hook(self.about_to_step)
        scheduler = torch.optim.lr_scheduler.StepLR(self.made, step_size=1, gamma=0.9)
        return {"optimizer": self.made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def about_to_step(self, *_):
        self.steps += 1
        grads = [
            p.grad for p in self.parameters() if p.grad is not None
        ]  # with a plain optimizer, backward runs inside step()
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())


def trainer(accum_steps, **kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": 1, "gradient_clip_val": CLIP, "enable_checkpointing": False, **kwargs}
    return L.Trainer(accelerator="cpu", accumulate_grad_batches=accum_steps, **settings, **quiet)


def fit(module, size, accum_steps, samples=48, checkpoint=None, **kwargs):
    made = trainer(accum_steps, **kwargs)
    made.fit(module, Batches(size, samples), DataLoader([0]), ckpt_path=checkpoint, weights_only=True)
    return module


@pytest.mark.parametrize("dtype", TOLERANCE, ids=IDS)
def test_window_equals_the_big_batch(dtype):
    ours, big = fit(Regression(wrapped, dtype), 2, 4), fit(Regression(adamw, dtype), 8, 1)
    assert_same_parameters(ours, big, TOLERANCE[dtype])
    windows = torch.tensor(ours.losses, dtype=torch.float64).view(-1, 4).mean(1)
    assert windows.tolist() == pytest.approx(big.losses, rel=TOLERANCE[dtype])


def test_lightnings_own_bf16_precision():
    ours, big = Regression(wrapped), Regression(adamw)
    fit(ours, 2, 4, precision="bf16-true"), fit(big, 8, 1, precision="bf16-true")
    assert ours.net[0].weight.dtype == torch.bfloat16
    assert_same_parameters(ours, big, TOLERANCE[torch.bfloat16])


def test_steps_clipping_and_the_scheduler_are_once_a_window():
    ours = fit(Regression(wrapped), 2, 4)
    assert ours.steps == ours.trainer.global_step == 6
    assert ours.lr_schedulers().last_epoch == 6
    assert ours.made.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**6)
    assert ours.norms == pytest.approx([CLIP] * 6, rel=1e-4)  # clip_grad_norm_ divides by the norm + 1e-6


class Logged(Logger):
    """Keeps what is logged."""

    name, version = "logged", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Scheduled(Regression):
    """Its scheduler is of the returned optimizer, the one inside, or none; of one group or two."""

    def __init__(self, make, of, groups, name):
        super().__init__(make)
        self.of, self.groups, self.name = of, groups, name

    def configure_optimizers(self):
        everything = list(self.parameters())
        made = self.make([{"params": everything[i :: self.groups]} for i in range(self.groups)])
        of = getattr(made, "optimizer", made) if self.of == "inner" else made
        scheduler = torch.optim.lr_scheduler.StepLR(of, step_size=1, gamma=0.9)
        config = {"scheduler": scheduler, "interval": "step", "name": self.name}
        return made if self.of == "none" else {"optimizer": made, "lr_scheduler": config}


def rates(make, of, groups=1, name=None, interval=None):
    module, log = Scheduled(make, of, groups, name), Logged()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accumulate_grad_batches": 4, "log_every_n_steps": 1, "callbacks": [LearningRateMonitor(interval)]}
    made = L.Trainer(accelerator="cpu", max_epochs=2, logger=log, **settings, **quiet)
    made.fit(module, Batches(2), DataLoader([0]))
    return log.rows


@pytest.mark.parametrize("interval", [None, "step", "epoch"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("of", ["inner", "none"])
def test_the_learning_rate_is_shown_as_with_the_plain_optimizer(of, groups, interval):
    plain = rates(adamw, of, groups, interval=interval)
    assert plain and rates(wrapped, of, groups, interval=interval) == plain


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", [None, "lr-AdamW"])
def test_the_learning_rate_of_a_scheduler_of_the_wrapper_is_shown_once(name, groups):
    shown = rates(wrapped, "wrapper", groups, name)
    plain = rates(adamw, "wrapper", groups, name)
    if name is None:
        plain = [
            (step, {key.replace("AdamW", "AccumulatingOptimizer"): rate for key, rate in row.items()})
            for step, row in plain
        ]
    assert plain and shown == plain


def test_bf16_gradients_are_added_in_fp32():
    class Exact(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = Weight(), []

        def training_step(self, x, index):
            return self.net(x)

        def configure_optimizers(self):
            return wrapped(self.parameters())

        def on_before_optimizer_step(self, optimizer):
            self.seen.append(self.net.weight.grad.item())

    ours = Exact()
    trainer(2).fit(ours, DataLoader(GRADIENTS, batch_size=1))
    assert ours.seen == [SUM]


@pytest.mark.parametrize("samples", [48, 42, 45], ids=["full", "last window short", "last micro-batch short too"])
def test_unequal_micro_batches_and_a_short_last_window(samples):
    """As in docs/frameworks/lightning.md, "Micro-batches that are not of one size".

    Lightning alone divides every window by 4.
    """

    class Weighed(Regression):
        def training_step(self, batch, index):
            self.weight = len(batch[0])
            return super().training_step(batch, index) * self.trainer.accumulate_grad_batches

        def backward(self, loss):
            self.optimizers().backward(loss, weight=self.weight)

        def on_before_optimizer_step(self, optimizer):
            optimizer.normalize_()

    ours, big = fit(Weighed(unequal), 2, 4, samples), fit(Regression(adamw), 8, 1, samples)
    assert ours.steps == big.steps == 6
    assert_same_parameters(ours, big, TOLERANCE[torch.float64])


class SaveAfter(L.Callback):
    """Has Lightning save a checkpoint after a given micro-batch, wherever in a window that is."""

    def __init__(self, micro_batches, path):
        self.micro_batches, self.path = micro_batches, path

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index + 1 == self.micro_batches:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("at", range(1, 9))
def test_checkpoint_saved_inside_a_window_goes_on_bit_by_bit(at, dtype, tmp_path):
    path = tmp_path / "saved.ckpt"
    whole = fit(Regression(wrapped, dtype), 2, 4, callbacks=[SaveAfter(at, path)])
    again = fit(Regression(wrapped, dtype, seed=9), 2, 4, checkpoint=path, callbacks=[ResumeInsideWindow()])
    assert again.losses == whole.losses[at:]
    assert_same_parameters(again, whole, 0)
    assert again.trainer.global_step == again.lr_schedulers().last_epoch == 6


def test_checkpoint_that_model_checkpoint_saves_at_a_validation_inside_a_window(tmp_path):
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", monitor=None)
    settings = {"val_check_interval": 6, "enable_checkpointing": True, "default_root_dir": tmp_path / "again"}
    whole = fit(Regression(wrapped), 2, 4, callbacks=[saves], **settings)
    path = tmp_path / "step=1.ckpt"  # after 6 micro-batches: one window and a half
    assert torch.load(path, weights_only=True)["optimizer_states"][0]["fusedaccum"]["window"]["micro_batches"] == 2
    again = fit(Regression(wrapped, seed=9), 2, 4, checkpoint=path, callbacks=[ResumeInsideWindow()], **settings)
    assert again.losses == whole.losses[6:]
    assert_same_parameters(again, whole, 0)


class AtTheStart(L.Callback):
    """Sets a learning rate before the first batch, if told to; notes what there is then."""

    def __init__(self, lr=None):
        self.lr = lr

    def on_train_start(self, trainer, module):
        (optimizer,) = trainer.optimizers
        if self.lr is not None:
            optimizer.param_groups[0]["lr"] = self.lr
        self.found = optimizer.param_groups[0]["lr"], optimizer.progress["micro_batch"], len(optimizer.state)


def test_the_callback_restores_the_window_and_leaves_what_another_has_set(tmp_path):
    path, after = tmp_path / "saved.ckpt", AtTheStart()
    fit(Regression(wrapped), 2, 4, callbacks=[SaveAfter(6, path)])
    fit(Regression(wrapped), 2, 4, checkpoint=path, callbacks=[AtTheStart(0.5), ResumeInsideWindow(), after])
    assert after.found == (0.5, 2, 6)


def test_a_validation_of_a_checkpoint_leaves_a_fit_that_follows_alone(tmp_path):
    path, start = tmp_path / "saved.ckpt", AtTheStart()
    whole = fit(Regression(wrapped), 2, 4, callbacks=[SaveAfter(6, path)])
    module, t = Regression(wrapped), trainer(4, callbacks=[ResumeInsideWindow(), start])
    t.validate(module, Batches(2), ckpt_path=path, weights_only=False, verbose=False)
    t.fit(module, Batches(2))
    assert whole.made.param_groups[0]["lr"] < start.found[0]
    assert start.found[1:] == (0, 0)


def test_without_the_callback_lightning_drops_the_window_and_the_wrapper_says_so(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(Regression(wrapped), 2, 4, callbacks=[SaveAfter(6, path)])
    with pytest.warns(RuntimeWarning, match="set to None inside an open window"):
        fit(Regression(wrapped), 2, 4, checkpoint=path)


def test_checkpoint_of_lightning_alone_loses_the_window(tmp_path):
    path = tmp_path / "saved.ckpt"
    whole = fit(Regression(adamw), 2, 4, callbacks=[SaveAfter(6, path)])
    again = fit(Regression(adamw), 2, 4, checkpoint=path, callbacks=[ResumeInsideWindow()])
    with pytest.raises(AssertionError, match="relative difference"):
        assert_same_parameters(again, whole, 1e-3)


def test_manual_optimization_flushes_through_lightnings_own_optimizer():
    """Lightning's stand-in for the wrapper is of a subclass made on the fly, without own state."""

    class Manual(Regression):
        def __init__(self, make):
            super().__init__(make)
            self.automatic_optimization = False

        def training_step(self, batch, index):
            self.manual_backward(super().training_step(batch, index))
            self.optimizers().step()

        def on_validation_model_zero_grad(self):
            """Lightning's own would set all gradients to None, inside a window unknown to it."""

        def on_train_epoch_end(self):
            self.optimizers().flush()
            assert self.optimizers().updated and self.optimizers().last_window.micro_batches == 1

    ours = fit(Manual(lambda ps: fa.AccumulatingOptimizer(adamw(ps), accum_steps=4)), 2, 1, 42, gradient_clip_val=None)
    assert ours.steps == 6
    big = model()
    plain = adamw(big.parameters())
    for x, y in Batches(8, 42):
        big_batch_step(big, plain, x, y)
    assert_same_parameters(ours.net, big, TOLERANCE[torch.float64])
