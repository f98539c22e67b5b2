"""An empty backend of torch.distributed for groups of one rank, so that a step's remaining time is the reducer's.

It is written in C++, like Gloo and NCCL, because calls into Python would slow down torch's reducer but not ours.
torch's ``fake`` backend does not work with torch DDP, because its futures hold no tensors. It is compiled at the first
use, which takes a compiler, ninja and a minute.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils import cpp_extension

NAME = "nothing"
SOURCE = """
#include <torch/csrc/distributed/c10d/Backend.hpp>

using namespace c10d;
using Tensors = std::vector<at::Tensor>;

struct Done : Work {
  Tensors tensors;
  explicit Done(Tensors given) : Work(-1, OpType::ALLREDUCE), tensors(std::move(given)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors));
    return future;
  }
};

struct Nothing : Backend {
  using Backend::Backend;
  const std::string getBackendName() const override { return "nothing"; }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions&) override {
    return c10::make_intrusive<Done>(tensors);
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions&) override {
    return c10::make_intrusive<Done>(tensors);
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& out, Tensors& tensors, const AllgatherOptions&) override {
    out[0][0].copy_(tensors[0]);
    return c10::make_intrusive<Done>(tensors);
  }
  c10::intrusive_ptr<Work> barrier(const BarrierOptions&) override { return c10::make_intrusive<Done>(Tensors()); }
};

c10::intrusive_ptr<Backend> make(int rank, int size) { return c10::make_intrusive<Nothing>(rank, size); }
"""


def register() -> None:
    """Register the backend with torch.distributed under :data:`NAME`."""
    compiled = cpp_extension.load_inline("paceline_nothing", SOURCE, functions="make", extra_cflags=["-O2"])

    def make(_store: Any, rank: int, size: int, _timeout: Any) -> Any:
        if size > 1:
            raise ValueError(f"the backend {NAME!r} does not communicate, so it cannot serve a group of {size} ranks")
        return compiled.make(rank, size)

    dist.Backend.register_backend(NAME, make, devices=["cpu"])
