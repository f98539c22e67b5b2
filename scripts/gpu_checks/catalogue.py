"""Every check: its name, the places of its ranks, its longest time, and the remedy where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from gpu_checks import bits, endurance, failures, graphs, one_rank, several_ranks, speed, stand_in, syncs, trainer
from gpu_checks.rows import Place, Row


class Ranks(Enum):
    """Where the ranks of a check are."""

    ONE = "one rank"
    SHARED = "two ranks on one GPU, over Gloo"
    HOSTS = "two ranks on one GPU, over NCCL, each as if on a host of its own"
    SEVERAL = "a rank on each GPU, over NCCL"


@dataclass(frozen=True)
class Check:
    """One check, which runs in processes of its own."""

    part: str
    name: str
    run: Callable[[Place], Iterator[Row]]
    remedy: str
    """Advice to the user where a line of the check fails."""
    ranks: Ranks = Ranks.ONE
    seconds: int = 90
    """It is ended after so long."""
    gib: float = 2.0
    """GPU memory that each GPU needs to have free."""
    joined: bool = True
    """Whether ``paceline.init()`` is called before it."""

    @property
    def path(self) -> str:
        """Its name on the command line."""
        return f"{self.part}/{self.name}"


PARTS = {
    "one": "one rank as it is",
    "stand-in": "one rank, with a late collective on a stream of its own in NCCL's place",
    "share": "two ranks that share the GPU, over Gloo",
    "syncs": "waits of the host, and kernels of a step",
    "speed": "speed and host time beside torch's DDP",
    "memory": "peak memory in bf16",
    "graphs": "CUDA graphs and torch.compile",
    "endurance": "200 aborted backwards; wrappers made and dropped",
    "failures": "jobs of two ranks that share the GPU: a rank is killed, hangs, or all are asked to end",
    "hosts": "two ranks that share the GPU, over NCCL, which takes them for two hosts",
    "several": "the same with a GPU for each rank, over NCCL, and overlap",
}
"""In the order in which they run; each takes less than ten minutes."""

NUMBERS = "do not train with this build here; send us the JSON"
BITS = "do not rely on the same bits with this build here; send us the JSON"
STREAM = "something reads too early or frees too early: do not train with this build; send us the JSON"
SLOW = "right but slower than it should be; send us the JSON"
WAITS = "right but slow: the host waits where file and line say; send us the JSON"
HANG = "if it hung, its stacks are in the JSON; send it to us"
GRAPH = "do not capture such a step; send us the JSON"
RESTART = "start such jobs from checkpoints by hand; send us the JSON"
LEAK = "something is left behind; restart long runs from checkpoints, and send us the JSON"


def _trainings(part: str, ranks: Ranks) -> list[Check]:
    """The checks of whole trainings, on one rank or several."""
    return [
        Check(part, "same-bits", bits.same_bits, BITS, ranks),
        Check(part, "compute-check", bits.checked, BITS, ranks),
        Check(part, "trainer", trainer.precisions, NUMBERS, ranks),
        Check(part, "trainer-resumed", trainer.resumed, NUMBERS, ranks),
    ]


def _among(part: str, ranks: Ranks) -> list[Check]:
    """The checks of several ranks."""
    checks = [
        Check(part, "equality", one_rank.equality, NUMBERS, ranks),
        Check(part, "one-process", several_ranks.one_process, NUMBERS, ranks),
        Check(part, "sparse", several_ranks.sparse, NUMBERS, ranks),
        Check(part, "sync-batch-norm", several_ranks.batch_norm, NUMBERS, ranks),
        Check(part, "sharded", several_ranks.sharded, NUMBERS, ranks),
        Check(part, "checkpoint", one_rank.checkpoint, NUMBERS, ranks),
        Check(part, "abort", several_ranks.abort, HANG, ranks),
        Check(part, "check-finite", one_rank.finite, NUMBERS, ranks),
        Check(part, "compressors", stand_in.compressors, STREAM, ranks, seconds=180),
        Check(part, "late-gradients", stand_in.late_gradients, STREAM, ranks),
        Check(part, "aborts", endurance.aborts, LEAK, ranks, seconds=180),
        Check(part, "wrappers", endurance.wrappers, LEAK, ranks, seconds=180),
        *_trainings(part, ranks),
    ]
    if ranks is Ranks.SHARED:
        return [check for check in checks if check.name not in ("late-gradients", "aborts", "wrappers")]
    over_nccl = [
        Check(part, "leave", one_rank.leave, HANG, ranks, joined=False),
        *checks,
        Check(part, "own-group", one_rank.own_group, NUMBERS, ranks),
        Check(part, "nccl-options", one_rank.nccl_options, "leave the option out; send us the JSON", ranks),
    ]
    if ranks is Ranks.HOSTS:  # their collectives go through sockets, and their kernels by turns: nothing to time
        return over_nccl
    return [
        *over_nccl,
        Check(part, "smollm2-2k", speed.smollm2_2k, SLOW, ranks, seconds=150, gib=30),
        Check(part, "resnet-32", speed.resnet_32, SLOW, ranks, seconds=150, gib=10),
        Check(part, "overlap", speed.overlap, SLOW, ranks, seconds=240, gib=40),
    ]


CHECKS: Sequence[Check] = (
    Check("one", "start", one_rank.start, "start ranks with torchrun, and one visible GPU for each", joined=False),
    Check("one", "equality", one_rank.equality, NUMBERS),
    Check("one", "own-group", one_rank.own_group, NUMBERS),
    Check("one", "check-finite", one_rank.finite, NUMBERS),
    Check("one", "checkpoint", one_rank.checkpoint, NUMBERS),
    Check("one", "nccl-options", one_rank.nccl_options, "leave the option out; send us the JSON"),
    *_trainings("one", Ranks.ONE),
    Check("stand-in", "late-gradients", stand_in.late_gradients, STREAM),
    Check("stand-in", "doubled", stand_in.doubled, STREAM),
    Check("stand-in", "compressors", stand_in.compressors, STREAM, seconds=180),
    *_among("share", Ranks.SHARED),
    Check("syncs", "counted", syncs.syncs, WAITS, seconds=180),
    Check("syncs", "kernels", speed.kernels, SLOW, seconds=120, gib=10),
    Check("speed", "smollm2-2k", speed.smollm2_2k, SLOW, seconds=150, gib=30),
    Check("speed", "smollm2-16k", speed.smollm2_16k, SLOW, seconds=240, gib=70),
    Check("speed", "resnet-32", speed.resnet_32, SLOW, seconds=150, gib=10),
    Check("speed", "resnet-256", speed.resnet_256, SLOW, seconds=240, gib=30),
    Check("speed", "mlp", speed.mlp, SLOW),
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
    Check("endurance", "aborts", endurance.aborts, LEAK, seconds=180),
    Check("endurance", "wrappers", endurance.wrappers, LEAK, seconds=180),
    Check("failures", "killed", failures.killed, RESTART, seconds=160, joined=False),
    Check("failures", "stuck-kernel", failures.stuck_kernel, RESTART, seconds=160, joined=False),
    Check("failures", "stopped", failures.stopped, RESTART, seconds=240, joined=False),
    *_among("hosts", Ranks.HOSTS),
    *_among("several", Ranks.SEVERAL),
)


def chosen(parts: Sequence[str]) -> list[Check]:
    """The checks of `parts`, which are names of parts or of single checks; all without any.

    Raises:
        ValueError: for a name that there is not.
    """
    names = {*PARTS, *(check.path for check in CHECKS)}
    if unknown := [part for part in parts if part not in names]:
        raise ValueError(f"there is no {', '.join(unknown)}; --list shows all names")
    return [check for check in CHECKS if not parts or check.part in parts or check.path in parts]
