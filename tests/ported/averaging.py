"""A data-parallel wrapper by hand, as courses have one write it: broadcast at the start, all-reduce after backward."""

import torch
import torch.distributed as dist
from torch import nn


class Averaging(nn.Module):
    def __init__(self, module: nn.Module, overlap: bool) -> None:
        super().__init__()
        self.module = module
        self.overlap = overlap
        self.waiting: list[tuple[dist.Work, torch.Tensor]] = []
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        for parameter in module.parameters():
            if overlap and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._send)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)

    def _send(self, parameter: torch.Tensor) -> None:
        parameter.grad /= dist.get_world_size()
        self.waiting.append((dist.all_reduce(parameter.grad, async_op=True), parameter.grad))

    def finish(self) -> None:
        """Wait until all gradients are averaged; call it between backward and step."""
        if not self.overlap:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    self._send(parameter)
        for work, _ in self.waiting:
            work.wait()
        self.waiting.clear()
