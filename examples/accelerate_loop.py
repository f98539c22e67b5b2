"""Hugging Face Accelerate with Paceline's wrapper around the model. Accelerate does everything else.

paceline run --nproc 2 examples/accelerate_loop.py                          two ranks on this machine
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py        the same

``accelerator.prepare(net)`` would wrap the model in torch DDP. ``prepare_model(net, evaluation_mode=True)`` does the
same without wrapping: it moves the model to the device, sets up mixed precision, and registers the model for
``save_state``. Accelerate accepts Paceline's wrapper in place of torch DDP, because it is a subclass. Call
``paceline.init()`` first, because Accelerate uses the existing process group. On CPUs, this is Paceline's own group.

Tested with accelerate 1.15 on two ranks on CPUs, also with mixed_precision="bf16". Tests on GPUs: docs/gpu-status.md.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    """Learn which points of a square are inside a circle, and print the accuracy."""
    world = paceline.init()  # before the Accelerator
    accelerator = Accelerator(cpu=world.device.type == "cpu", gradient_accumulation_steps=2)
    with paceline.set_seed(0):
        x = torch.rand(1024, 2) * 2 - 1
        y = (x.norm(dim=1) < 0.8).long()
        net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))

    net = accelerator.prepare_model(net, evaluation_mode=True)  # like prepare, but without torch DDP
    model = paceline.DistributedDataParallel(net)
    optimizer, loader = accelerator.prepare(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True),  # per rank
    )
    for _ in range(12):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                if accelerator.sync_gradients:
                    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()

    module = accelerator.unwrap_model(model)
    with torch.no_grad():
        predicted = module(x.to(accelerator.device)).argmax(1).cpu()
    accelerator.print(f"accuracy {(predicted == y).float().mean().item():.3f} on {accelerator.num_processes} ranks")
    world.close()


if __name__ == "__main__":
    main()
