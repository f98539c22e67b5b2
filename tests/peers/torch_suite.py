"""Torch's own DistributedDataParallel tests, from the installed wheel, run with Paceline's class.

Torch spawns new processes for each test. Here running ranks execute the tests one after another, with the same methods
and assertions. GPU operations run on the CPU (:mod:`cpu_as_cuda`).
"""

from __future__ import annotations

import ast
import functools
import os
import random
import re
import shutil
import sys
import tempfile
import textwrap
import types
import unittest
import unittest.mock
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh

import paceline
from cpu_as_cuda import Cuda, CudaToCpu, Device, View, autocast, grad_scaler
from paceline import World

# Replacements in torch's source, by method: smaller sizes and fewer repetitions for the CPU.
SHORTER = {
    "test_ddp_uneven_inputs": {
        "dim = 1000": "dim = 20",
        "iteration_offsets = [2, 3, 10]": "iteration_offsets = [4]",
    },
    "test_DistributedDataParallel_non_default_stream": {"in range(1000)": "in range(50)"},
    # property/test_compiled_equals_eager.py covers inductor.
    "test_ddp_compile_static_graph": {
        "torch.compile(ddp)": 'torch.compile(ddp, backend="aot_eager")',
        "torch.compile(ddp_static)": 'torch.compile(ddp_static, backend="aot_eager")',
    },
    "_test_ddp_hook_parity": {"for i in range(100)": "for i in range(20)"},  # the last change happens after 10 steps
}
MODULE = "torch.testing._internal.distributed.distributed_test"
SOURCE = Path(torch.__file__).parent.joinpath(*MODULE.split(".")[1:]).with_suffix(".py")


class Ours(paceline.DistributedDataParallel):
    """Paceline's wrapper without device arguments, because the GPU is the CPU."""

    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(module, None, None, *arguments, **options)


# -- the list of tests -------------------------------------------------------------------------------------------------


def ddp_tests() -> list[str]:
    """Return the names of the tests that use DistributedDataParallel directly or through a helper."""
    methods = _methods()
    return [name for name in methods if name.startswith("test_") and _uses_ddp(name, methods, set())]


@functools.cache
def _methods() -> dict[str, str]:
    """Return the source of every method of torch's test class; parsed because importing it takes seconds."""
    source = SOURCE.read_text()
    lines = source.splitlines(keepends=True)
    (outer,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "DistributedTest")
    (inner,) = (n for n in outer.body if isinstance(n, ast.ClassDef))
    methods = (n for n in inner.body if isinstance(n, ast.FunctionDef))
    return {method.name: "".join(lines[method.lineno - 1 : method.end_lineno]) for method in methods}


def _uses_ddp(name: str, methods: dict[str, str], seen: set[str]) -> bool:
    seen.add(name)
    if re.search("DistributedDataParallel|ddp", name + methods[name]):
        return True
    called = set(re.findall(r"self\.(\w+)\(", methods[name])) & methods.keys() - seen
    return any(_uses_ddp(helper, methods, seen) for helper in called)


def shortened(name: str) -> str:
    """Return the source of the method `name` with the replacements of :data:`SHORTER`."""
    source = _methods()[name]
    for long, short in SHORTER[name].items():
        assert source.count(long) == 1, f"torch's {name} has no {long!r} anymore"
        source = source.replace(long, short)
    return textwrap.dedent(source)


# -- running a test on a rank ------------------------------------------------------------------------------------------


def run_test(world: World, name: str, wrapper: type[nn.Module] = Ours) -> str | None:
    """Run the test `name` on this rank with `wrapper` as torch's class; return the reason if it was skipped."""
    suite = _suite(world.rank, world.size)
    with _surroundings(world), _in_place_of_torchs(wrapper):
        try:
            getattr(suite(name), name)()
        except unittest.SkipTest as skip:
            return str(skip)
        except SystemExit as skip:
            return f"it ended with exit code {skip.code}"
    return None


@contextmanager
def _surroundings(world: World) -> Iterator[None]:
    """Set up what torch's runner sets up for a test, with a temporary folder per world; restore it afterwards."""
    from torch.testing._internal.common_utils import set_rng_seed

    folder = Path(tempfile.gettempdir(), f"torch-suite-{os.environ['MASTER_PORT']}")
    folder.mkdir(exist_ok=True)
    states, level = (torch.get_rng_state(), random.getstate()), dist.get_debug_level()
    # Torch's runner allows tests to load their own pickles.
    with ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"))
        stack.enter_context(unittest.mock.patch.object(tempfile, "tempdir", str(folder)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        set_rng_seed()
        try:
            yield
        finally:
            dist.set_debug_level(level)
            torch.set_rng_state(states[0])
            random.setstate(states[1])
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)
    dist.barrier()


@contextmanager
def _in_place_of_torchs(wrapper: type[nn.Module]) -> Iterator[None]:
    """Make torch's tests use `wrapper`, Paceline's SyncBatchNorm, and the CPU instead of GPUs."""
    module: Any = sys.modules[MODULE]
    world_size, rank = dist.get_world_size(), dist.get_rank()
    parallel = View(nn.parallel, DistributedDataParallel=wrapper)
    view = View(nn, parallel=parallel, SyncBatchNorm=paceline.SyncBatchNorm)
    init_mesh, new_subgroups = device_mesh.init_device_mesh, dist.new_subgroups
    patch = unittest.mock.patch
    with (
        patch.multiple(
            module,
            torch=View(torch, nn=view, device=Device, cuda=Cuda(rank, world_size)),
            nn=view,
            DistributedDataParallel=wrapper,
            autocast=autocast,
            GradScaler=grad_scaler,
            init_multigpu_helper=lambda size, _backend: {gpu: [gpu] for gpu in range(size)},
        ),
        patch.object(device_mesh, "init_device_mesh", lambda _device, *shape: init_mesh("cpu", *shape)),
        # The default is the number of GPUs of the host.
        patch.object(dist, "new_subgroups", lambda group_size=world_size, **named: new_subgroups(group_size, **named)),
        CudaToCpu(),
    ):
        yield


@functools.cache
def _suite(rank: int, size: int) -> Any:
    """Return torch's test class, based on torch's TestCase."""
    module: Any = _load(size)

    class Suite(module.DistributedTest._DistTestBase, module.MultiProcessTestCase.__base__):  # type: ignore[misc]
        world_size = size

        def __init__(self, name: str) -> None:
            unittest.TestCase.__init__(self, name)
            self.rank = rank

        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

    for name in SHORTER:
        short: dict[str, Any] = {}
        exec(shortened(name), module.__dict__, short)  # resolves torch's names and their replacements
        setattr(Suite, name, short[name])
    return Suite


def _load(size: int) -> types.ModuleType:
    """Import torch's module, which reads the environment, with decorators that do not skip without a GPU."""
    # "gloo" only selects the expected capabilities; the ranks keep their own backend.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=tempfile.gettempdir())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_distributed as common
        import torch.testing._internal.common_utils as utils

        def always(function: Any) -> Any:
            return function

        patch = unittest.mock.patch
        with (
            patch.multiple(common, skip_if_no_gpu=always, skip_if_lt_x_gpu=lambda *_, **__: always),
            # Tests skipped on Linux are flaky only in torch's own runs with torch's class.
            patch.object(utils, "IS_LINUX", False),
        ):
            __import__(MODULE)
    return sys.modules[MODULE]
