"""Hugging Face's Trainer with a wrapped optimizer.

Token counts, accumulation, clipping, schedulers and checkpoints are the Trainer's.
"""

import fusedaccum as fa
import pytest
import torch
from small import CLIP, GRADIENTS, SUM, TOLERANCE, Weight, adamw, wrapped
from torch import nn
from training import assert_same_parameters, data, model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTH = 16


def llama(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype)


def texts(samples=42):
    """Texts of 16 tokens (2 to 15 count). In micro-batches of 2 the last window is not full."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (samples, LENGTH), generator=g)
    counted = torch.arange(LENGTH) < torch.randint(2, LENGTH, (samples, 1), generator=g)
    return [{"input_ids": i, "labels": i.where(c, -100)} for i, c in zip(ids, counted, strict=True)]


class Inspector(TrainerCallback):
    """Records how often the inner optimizer steps, and the norms of the gradients it gets."""

    def __init__(self, optimizer, parameters):
        self.steps, self.norms, self.parameters = 0, [], list(parameters)
        optimizer.register_step_pre_hook(self.about_to_step)

    def about_to_step(self, *_):
        self.steps += 1
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters]).item())


def trainer(net, optimizer, size, accum_steps, folder, dataset, kind=Trainer, **kwargs):
    settings = {"num_train_epochs": 1, "max_grad_norm": CLIP, "save_strategy": "no", "learning_rate": 1e-2, **kwargs}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True}
    batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accum_steps}
    args = TrainingArguments(output_dir=str(folder), **batches, **settings, **quiet)
    return kind(net, args, train_dataset=dataset, optimizers=(optimizer, None))


def history(made, key):
    return [entry[key] for entry in made.state.log_history if key in entry]


def assert_same_history(ours, big, dtype):
    assert history(ours, "learning_rate") == history(big, "learning_rate")  # at every step
    for key in ("loss", "grad_norm"):
        assert history(ours, key) == pytest.approx(history(big, key), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("autocast", [False, True], ids=["", "bf16=True"])
@DTYPES
def test_window_equals_the_big_batch_with_unequal_token_counts(dtype, autocast, tmp_path):
    runs = []
    for make, size, accum_steps in ((wrapped, 2, 4), (adamw, 8, 1)):
        net = llama(dtype)
        made = trainer(net, make(net.parameters()), size, accum_steps, tmp_path, texts(), bf16=autocast)
        made.train()
        runs.append(made)
    ours, big = runs
    assert ours.state.global_step == big.state.global_step == 6
    coarsest = torch.bfloat16 if autocast else dtype
    assert_same_history(ours, big, coarsest)
    assert_same_parameters(ours.model, big.model, TOLERANCE[coarsest])


def test_steps_clipping_and_the_scheduler_are_once_a_window(tmp_path):
    net = llama()
    opt = wrapped(net.parameters())
    seen = Inspector(opt, net.parameters())
    made = trainer(net, opt, 2, 4, tmp_path, texts())
    made.train()
    assert seen.steps == made.state.global_step == made.lr_scheduler.last_epoch == 6
    assert min(history(made, "grad_norm")) > CLIP  # before clipping
    assert seen.norms == pytest.approx([CLIP] * 6, rel=1e-4)  # clip_grad_norm_ divides by the norm + 1e-6


class OwnLoss(nn.Module):
    """A custom model that takes no token count: the Trainer divides its mean by micro-batches."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


@pytest.mark.parametrize("samples", [48, 42], ids=["full", "last window short"])
def test_model_without_token_counts(samples, tmp_path):
    dataset = [{"x": x, "labels": y} for x, y in zip(*data(samples), strict=True)]
    runs = []
    for make, size, accum_steps in ((wrapped, 2, 4), (adamw, 8, 1)):
        net = OwnLoss()
        made = trainer(net, make(net.parameters()), size, accum_steps, tmp_path, dataset)
        made.train()
        runs.append(made)
    assert_same_history(*runs, torch.float32)  # the Trainer adds up losses in FP32
    assert_same_parameters(runs[0].model, runs[1].model, TOLERANCE[torch.float64])


def test_bf16_gradients_are_added_in_fp32(tmp_path):
    class Exact(Weight):
        def forward(self, x):
            return {"loss": super().forward(x)}

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            assert net.weight.grad.item() == SUM

    net = Exact()
    made = trainer(net, wrapped(net.parameters()), 1, 2, tmp_path, [{"x": x} for x in GRADIENTS], max_grad_norm=0)
    made.add_callback(Looks())
    made.train()
    assert made.state.global_step == 1


class Wrapping(Trainer):
    """Wraps TrainingArguments' optimizer, as in docs/frameworks/huggingface-trainer.md."""

    def create_optimizer(self, *args):
        if self.optimizer is None:
            self.optimizer = fa.AccumulatingOptimizer(super().create_optimizer(*args), reduction="none")
        return self.optimizer


def test_the_trainers_own_optimizer_wrapped(tmp_path):
    runs = []
    settings = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "weight_decay": 0.1}
    for kind, size, accum_steps in ((Wrapping, 2, 4), (Trainer, 8, 1)):
        made = trainer(llama(), None, size, accum_steps, tmp_path, texts(), kind, **settings)
        made.train()
        runs.append(made)
    ours, big = runs
    decays = [group["weight_decay"] for group in ours.optimizer.param_groups]
    assert decays == [group["weight_decay"] for group in big.optimizer.param_groups] == [0.1, 0.0]
    assert_same_parameters(ours.model, big.model, TOLERANCE[torch.float32])


class SaveInsideWindows(TrainerCallback):
    """Asks for a checkpoint after every micro-batch that does not end a window."""

    def on_substep_end(self, args, state, control, **kwargs):
        control.should_save = True


@DTYPES
def test_checkpoints_go_on_bit_by_bit_and_are_of_whole_windows(dtype, tmp_path):
    """The Trainer saves only between windows, even if it is asked to inside one."""

    def made(seed):
        net = llama(dtype, seed)
        return trainer(net, wrapped(net.parameters()), 2, 4, tmp_path, texts(), num_train_epochs=2)

    whole = made(0)
    whole.add_callback(SaveInsideWindows())
    whole.train()
    folders = sorted(tmp_path.glob("checkpoint-*"))
    assert {int(folder.name.split("-")[1]) for folder in folders} >= set(range(1, 6))
    for folder in folders:
        saved = torch.load(folder / "optimizer.pt", weights_only=True)
        assert saved["fusedaccum"]["window"] is None
    for step in (2, 7):
        again = made(9)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert history(again, "loss") == history(whole, "loss")
        assert_same_parameters(again.model, whole.model, 0)
        assert again.state.global_step == again.lr_scheduler.last_epoch == 12
