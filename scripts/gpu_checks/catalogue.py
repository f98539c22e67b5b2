"""All checks: name, ranks, time limit, memory, and the remedy after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from gpu_checks import bits, failures, graphs, one_rank, several_ranks, speed, stand_in, syncs
from gpu_checks.rows import Place, Row
from gpu_checks.timing import mlp, resnet50, smollm2


class Ranks(Enum):
    """The number of ranks, and how they use GPUs."""

    ONE = "one rank"
    SHARED = "two ranks on one GPU, over Gloo"
    HOSTS = "two ranks on one GPU, over NCCL, each as if on a separate host"
    SEVERAL = "a rank on each GPU, over NCCL"


@dataclass(frozen=True)
class Check:
    """One check, which runs in separate processes."""

    part: str
    name: str
    run: Callable[[Place], Iterator[Row]]
    remedy: str
    """Advice to the user if a line of the check fails."""
    ranks: Ranks = Ranks.ONE
    seconds: int = 90
    """Time limit."""
    gib: float = 2.0
    """Memory that must be free on each GPU."""
    joined: bool = True
    """Whether ``paceline.init()`` is called before the check."""

    @property
    def path(self) -> str:
        """The name on the command line."""
        return f"{self.part}/{self.name}"


PARTS = {
    "one": "one rank",
    "stand-in": "one rank, with a late collective on a separate stream instead of NCCL",
    "share": "two ranks that share the GPU, over Gloo",
    "syncs": "waits of the host, and kernels of a step",
    "speed": "speed and host time compared with torch's DDP",
    "memory": "peak memory in bf16",
    "graphs": "CUDA graphs and torch.compile",
    "failures": "jobs of two ranks that share the GPU: a rank is killed or hangs, or the job gets SIGTERM",
    "hosts": "two ranks that share the GPU, over NCCL, which treats them as two hosts",
    "several": "the same checks with a GPU for each rank, over NCCL, and overlap",
}
"""The parts, in execution order."""

NUMBERS = "do not train with this build here; send us the JSON"
BITS = "do not rely on bit-identical results with this build here; send us the JSON"
STREAM = "memory is read or freed too early: do not train with this build; send us the JSON"
SLOW = "correct but slower than expected; send us the JSON"
WAITS = "correct but slow: the host waits at the named lines; send us the JSON"
HANG = "send us the JSON, which has the stacks if it hung"
GRAPH = "do not capture this kind of step; send us the JSON"
RESTART = "restart jobs from checkpoints yourself; send us the JSON"


def _anywhere(part: str, ranks: Ranks) -> list[Check]:
    """Return the checks for any number of ranks."""
    return [
        Check(part, "equality", one_rank.equality, NUMBERS, ranks),
        Check(part, "check-finite", one_rank.finite, NUMBERS, ranks),
        Check(part, "checkpoint", one_rank.checkpoint, NUMBERS, ranks),
        Check(part, "same-bits", bits.same_bits, BITS, ranks),
    ]


def _among(part: str, ranks: Ranks) -> list[Check]:
    """Return the checks that need several ranks."""
    checks = [
        Check(part, "one-process", several_ranks.one_process, NUMBERS, ranks),
        Check(part, "sparse", several_ranks.sparse, NUMBERS, ranks),
        Check(part, "sync-batch-norm", several_ranks.batch_norm, NUMBERS, ranks),
        Check(part, "sharded", several_ranks.sharded, NUMBERS, ranks),
        Check(part, "abort", several_ranks.abort, HANG, ranks),
        Check(part, "compressors", stand_in.compressors, STREAM, ranks, seconds=180),
        *_anywhere(part, ranks),
    ]
    if ranks is Ranks.SHARED:
        return checks
    checks = [
        Check(part, "leave", one_rank.leave, HANG, ranks, joined=False),
        *checks,
        Check(part, "late-gradients", stand_in.late_gradients, STREAM, ranks),
        Check(part, "own-group", one_rank.own_group, NUMBERS, ranks),
    ]
    if ranks is Ranks.HOSTS:  # times mean little, because NCCL uses sockets and the ranks share a GPU
        return checks
    return [
        *checks,
        Check(part, "smollm2-2k", speed.speed_of(smollm2, 2048), SLOW, ranks, seconds=150, gib=30),
        Check(part, "resnet-32", speed.speed_of(resnet50, 32), SLOW, ranks, seconds=150, gib=10),
        Check(part, "overlap", speed.overlap, SLOW, ranks, seconds=240, gib=40),
    ]


CHECKS: Sequence[Check] = (
    Check("one", "start", one_rank.start, "start ranks with torchrun, and one visible GPU for each", joined=False),
    *_anywhere("one", Ranks.ONE),
    Check("one", "own-group", one_rank.own_group, NUMBERS),
    Check("stand-in", "late-gradients", stand_in.late_gradients, STREAM),
    Check("stand-in", "doubled", stand_in.doubled, STREAM),
    Check("stand-in", "compressors", stand_in.compressors, STREAM, seconds=180),
    *_among("share", Ranks.SHARED),
    Check("syncs", "counted", syncs.syncs, WAITS, seconds=180),
    Check("syncs", "kernels", speed.kernels, SLOW, seconds=120, gib=10),
    Check("speed", "smollm2-2k", speed.speed_of(smollm2, 2048), SLOW, seconds=150, gib=30),
    Check("speed", "smollm2-16k", speed.speed_of(smollm2, 16384), SLOW, seconds=240, gib=70),
    Check("speed", "resnet-32", speed.speed_of(resnet50, 32), SLOW, seconds=150, gib=10),
    Check("speed", "resnet-256", speed.speed_of(resnet50, 256), SLOW, seconds=240, gib=30),
    Check("speed", "mlp", speed.speed_of(mlp, 8, 1024, 256), SLOW),
    Check("speed", "host-bound", speed.host_bound, SLOW, seconds=150),
    Check("speed", "host", speed.host, SLOW, seconds=150, gib=20),
    Check("memory", "peak", speed.memory, SLOW, seconds=150, gib=15),
    Check("graphs", "torch-ddp", graphs.peer, GRAPH),
    Check("graphs", "alone", graphs.alone, GRAPH),
    Check("graphs", "buckets", graphs.buckets, GRAPH),
    Check("graphs", "check-finite", graphs.checked, GRAPH),
    Check("graphs", "compressor", graphs.compressed, GRAPH),
    Check("graphs", "sync-batch-norm", graphs.normed, GRAPH),
    Check("graphs", "callables", graphs.callables, GRAPH),
    Check("graphs", "compile", graphs.compiled, NUMBERS, seconds=240),
    Check("failures", "killed", failures.killed, RESTART, seconds=160, joined=False),
    Check("failures", "stuck-kernel", failures.stuck_kernel, RESTART, seconds=160, joined=False),
    Check("failures", "stopped", failures.stopped, RESTART, seconds=240, joined=False),
    *_among("hosts", Ranks.HOSTS),
    *_among("several", Ranks.SEVERAL),
)


def chosen(parts: Sequence[str]) -> list[Check]:
    """Return the checks that `parts` names, as whole parts or single checks. If it is empty, return all checks."""
    names = {*PARTS, *(check.path for check in CHECKS)}
    if unknown := [part for part in parts if part not in names]:
        raise ValueError(f"no part or check is named {', '.join(unknown)}; --list shows all names")
    return [check for check in CHECKS if not parts or check.part in parts or check.path in parts]
