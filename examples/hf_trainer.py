"""Hugging Face's Trainer with a wrapped optimizer, beside its own big batch.

Texts differ in how many of their tokens count, and the last window is not full. The Trainer sees
to both. Run it: `python examples/hf_trainer.py`.
"""

from __future__ import annotations

import tempfile

import fusedaccum as fa
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (42, 16), generator=generator)
    counted = torch.arange(16) < torch.randint(2, 16, (42, 1), generator=generator)
    return [{"input_ids": i, "labels": i.where(c, -100)} for i, c in zip(ids, counted, strict=True)]


def train(micro_batch: int, accum_steps: int, wrap: bool) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if wrap:
        # The Trainer divides the loss, clips the gradient and moves the scheduler; a window ends
        # when it calls step().
        optimizer = fa.AccumulatingOptimizer(optimizer, reduction="none")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accum_steps,
            num_train_epochs=2,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=texts(), optimizers=(optimizer, None))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> tuple[list[float], list[float]]:
    losses, big = train(2, 4, wrap=True), train(8, 1, wrap=False)
    print("step   4 micro-batches of 2   one batch of 8")
    for step, (ours, theirs) in enumerate(zip(losses, big, strict=True), 1):
        print(f"{step:4d} {ours:22.6f} {theirs:16.6f}")
    return losses, big


if __name__ == "__main__":
    main()
