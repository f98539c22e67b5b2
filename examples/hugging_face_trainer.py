"""The Hugging Face Trainer with Paceline's wrapper, by overriding one method.

paceline run --nproc 2 examples/hugging_face_trainer.py                     two ranks on this machine
torchrun --standalone --nproc-per-node 2 examples/hugging_face_trainer.py   the same

If ``_wrap_model`` returns a wrapped model, the Trainer does not wrap it again. There is no public method for this.
Call ``paceline.init()`` first, because the Trainer uses the existing process group. On CPUs, this is Paceline's own.

A small BERT with random weights learns whether most numbers in a sequence are large. It needs no download. The final
weights are bit-identical to training with torch DDP.

Tested with transformers 5.23 on two ranks on CPUs, also with bf16=True. Not tested: FSDP and DeepSpeed, which have
their own wrappers. Tests on GPUs: docs/gpu-status.md.
"""

import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import paceline


class PacelineTrainer(Trainer):
    """The Trainer with Paceline's wrapper around the model."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training or isinstance(model, paceline.DistributedDataParallel) or self.accelerator.num_processes == 1:
            return super()._wrap_model(model, training, dataloader)
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)  # mixed precision without torch DDP
        return paceline.DistributedDataParallel(prepared)


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 16 numbers, labeled by whether more than half of the numbers are large."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shares = torch.rand(count, 1, generator=generator)
        large = torch.rand(count, 16, generator=generator) < shares
        self.ids = torch.where(large, 32, 0) + torch.randint(0, 32, (count, 16), generator=generator)
        self.labels = (large.sum(1) > 8).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the accuracy in the form that the Trainer expects."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    """Train for one epoch, and print the accuracy on held-out sequences."""
    world = paceline.init()  # before TrainingArguments, which uses an existing process group
    with paceline.set_seed(0):
        config = BertConfig(
            vocab_size=64,
            max_position_embeddings=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=world.device.type == "cpu",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            num_train_epochs=3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = PacelineTrainer(
            model=model,
            args=arguments,
            train_dataset=Sequences(1024, seed=1),
            eval_dataset=Sequences(256, seed=2),
            compute_metrics=accuracy,
        )
        trainer.train()
        metrics = trainer.evaluate()
    world.print(f"accuracy {metrics['eval_accuracy']:.3f} on {world.size} ranks")
    world.close()


if __name__ == "__main__":
    main()
