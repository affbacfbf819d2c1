"""Run by torchrun on two ranks: a framework's own loop over DistributedDataParallel.

With a wrapped optimizer, or its own big batch.
"""

import sys

import fusedaccum as fa
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments


def samples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    return TensorDataset(x, x @ torch.randn(6, 2, generator=generator))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def accelerate(wrap):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4 if wrap else 1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wrap:
        optimizer = fa.AccumulatingOptimizer(optimizer, reduction="none")
    loader = DataLoader(samples(), batch_size=2 if wrap else 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    norms = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, [p.detach() for p in model.module.parameters()], accelerator.is_main_process


def accelerate_alone(wrap):
    """Two forwards within no_sync(), the last backward synchronised all the same.

    Then Accelerate's LocalSGD, which averages at the end.
    """
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wrap:
        optimizer = fa.AccumulatingOptimizer(optimizer, reduction="none")
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=2))
    batches = list(loader)
    norms = []
    for pair in zip(batches[:4:2], batches[1:4:2], strict=True):
        with accelerator.no_sync(model):
            first, last = [nn.functional.mse_loss(model(x), y) for x, y in pair]
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(last)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        for x, y in batches[4:]:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    return norms, [p.detach() for p in model.module.parameters()], accelerator.is_main_process


class Regression(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self):
        super().__init__(PretrainedConfig())
        self.net = net()

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def trainer(wrap, folder):
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wrap:
        optimizer = fa.AccumulatingOptimizer(optimizer, reduction="none")
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2 if wrap else 8,
        gradient_accumulation_steps=4 if wrap else 1,
        max_grad_norm=0.5,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    data = [{"x": x, "labels": y} for x, y in samples()]
    run = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    run.train()
    return [], [p.detach() for p in model.parameters()], run.is_world_process_zero()


if __name__ == "__main__":
    which, wrap, out = sys.argv[1], sys.argv[2] == "wrapped", sys.argv[3]
    loops = {"accelerate": accelerate, "accelerate_alone": accelerate_alone}
    norms, params, first = loops[which](wrap) if which in loops else trainer(wrap, out + "-trainer")
    if first:
        torch.save((norms, params), out)
    torch.distributed.destroy_process_group()
