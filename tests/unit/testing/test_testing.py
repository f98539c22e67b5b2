"""The pytest plug-in, tested by running pytest inside pytest: the results that users see."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.testing.plugin  # or each run inside would load it, and forget it
from insides import OPTIMIZERS_NEED
from processes import TIMEOUT_S, paceline, script

importlib.import_module(OPTIMIZERS_NEED)  # same reason
BUGGY = Path(__file__).parents[2] / "buggy"
HEAD = """
import logging, os, sys, time, unittest, warnings
import pytest, torch
import torch.distributed as dist
from torch import nn
import paceline
from paceline import testing
"""
OPTIONS = ("-p", "pytest_paceline", "-p", "no:cacheprovider", "-W", "default")  # overrides "error" in this test suite
# After a build, pytest finds this suite's test modules, which are already loaded, in the package's file list.
OPTIONS += ("-W", "ignore:Module already imported so cannot be rewritten")


@pytest.fixture
def outcome(pytester: pytest.Pytester) -> Any:
    """Run a file of tests and return the output of pytest."""

    def run(text: str, *options: str, **counts: int) -> str:
        pytester.makepyfile(test_it=HEAD + text)
        result = pytester.runpytest_inprocess(*OPTIONS, "-rA", *options)
        result.assert_outcomes(**counts)
        return result.stdout.str()

    return run


# -- bodies that pass --------------------------------------------------------------------------------------------------


def test_body_runs_on_ranks_with_fixtures_of_the_test_process(outcome: Any) -> None:
    """This must also work after OpenMP and autograd have started threads in the test process, which a fork loses."""
    outcome(
        """
def test_before():
    torch.set_num_threads(2)
    x = torch.randn(500, 500); (x @ x).sum()
    nn.Linear(300, 300)(torch.randn(400, 300)).sum().backward()

@pytest.fixture(scope="module")
def wide():
    return lambda x: x + 1   # cannot be pickled

@pytest.mark.ranks(2)
def test_body(world, wide, tmp_path, capsys, capfd_disabled, monkeypatch, caplog):
    x = torch.randn(500, 500); (x @ x).sum()
    nn.Linear(300, 300)(torch.randn(400, 300)).sum().backward()
    tensor = torch.full((2,), wide(float(world.rank)))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0, 3.0]
    print("rank", world.rank)
    assert capsys.readouterr().out == f"rank {world.rank}\\n"
    monkeypatch.setenv("OWN", str(world.rank))
    logging.getLogger("mine").warning("of %d", world.rank)
    assert caplog.messages == [f"of {world.rank}"]
    (tmp_path / str(world.rank)).touch()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]

@pytest.fixture
def capfd_disabled():
    yield

def test_nothing_of_the_ranks_is_left():
    assert "OWN" not in os.environ and "RANK" not in os.environ and not dist.is_initialized()

@pytest.mark.ranks(2)
def test_own_descriptors(world, capfd):
    os.system(f"echo {world.rank}")
    print(world.rank)
    assert capfd.readouterr().out.split() == [str(world.rank)] * 2
""",
        passed=4,
    )


def test_several_rank_counts_act_like_parametrization(outcome: Any) -> None:
    printed = outcome(
        """
def with_ranks(*counts):
    return pytest.param(counts, marks=pytest.mark.ranks(*counts))

@pytest.mark.parametrize("counts", [with_ranks(2), with_ranks(1, 2)])
def test_parameters(world, counts):
    assert world.size == counts[0]

@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("value", [pytest.param(1, id="one"), pytest.param(2, marks=pytest.mark.xfail(strict=True))])
def test_it(world, value):
    assert world.size == dist.get_world_size() and value == 1

@pytest.mark.ranks(2)
class TestClass:
    def setup_method(self):
        self.value = 3

    def test_of_class(self, world):
        assert (self.value, world.size) == (3, 2)

    @pytest.mark.ranks(3)
    def test_of_method(self, world):
        assert world.size == 3
""",
        passed=5,
        xfailed=2,
        errors=1,
    )
    assert "test_it[ranks=1-one]" in printed or "test_it[one-ranks=1]" in printed
    assert "the ranks marker on a single parameter takes one number" in printed


def test_fixtures_of_the_world_live_on_ranks_and_records_appear_once(outcome: Any, pytester: pytest.Pytester) -> None:
    printed = outcome(
        """
@pytest.fixture
def model(world):
    yield nn.Linear(2, 2)
    print("torn down on", world.rank)

@pytest.fixture
def wrapped(model):
    return paceline.DistributedDataParallel(model)

@pytest.mark.ranks(2)
def test_it(world, wrapped, request, record_property):
    request.addfinalizer(lambda: print("and its request"))
    record_property("size", world.size)
    record_property("rank", world.rank)
    wrapped(torch.ones(1, 2)).sum().backward()
    testing.assert_replicas_equal(wrapped)
""",
        "--junitxml=report.xml",
        "-ojunit_family=legacy",
        passed=1,
    )
    properties = re.findall(r'<property name="(\w+)" value="(\d)"', (pytester.path / "report.xml").read_text())
    assert properties == [("size", "2"), ("rank", "0"), ("rank", "1")]
    for rank in (0, 1):
        section = printed.partition(f"Captured stdout of rank {rank} call")[2].partition("---\n")[2]
        assert section.startswith(f"and its request\ntorn down on {rank}\n")


def test_unittest_cases_run_on_ranks(outcome: Any) -> None:
    printed = outcome(
        """
class TestCase(unittest.TestCase):
    def setUp(self):
        self.rank = dist.get_rank()

    @pytest.mark.ranks(2)
    def test_passes(self):
        self.assertIn(self.rank, (0, 1))

    @pytest.mark.ranks(2)
    def test_fails(self):
        self.assertEqual(self.rank, 0)

    @pytest.mark.ranks(2)
    def test_skips(self):
        self.skipTest("not today")

    @pytest.mark.ranks(2)
    def test_fails_in_a_subtest(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)
""",
        passed=1,
        failed=2,
        skipped=1,
    )
    assert "rank 1: AssertionError: 1 != 0" in printed


def test_test_may_create_the_process_group_itself(outcome: Any) -> None:
    """The setup functions of spawned tests specify a port for the store, which rank 0 must create."""
    ports = [_free_port() for _ in range(2)]
    outcome(
        f"""
from torch.distributed import init_process_group as init, destroy_process_group

def setup(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{ports[0]}"
    init("gloo", rank=rank, world_size=size)

@pytest.mark.ranks(2, timeout=20)
@pytest.mark.parametrize("again", [False, True])
def test_environment(world, again):
    setup(world.rank, world.size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 2
    destroy_process_group()

@pytest.mark.ranks(2, timeout=20)
def test_address(world):
    dist.init_process_group("gloo", "tcp://127.0.0.1:{ports[1]}", rank=world.rank, world_size=world.size)
    dist.barrier()
""",
        passed=3,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_warnings_of_ranks_are_passed_on_once(outcome: Any) -> None:
    """Includes warnings that pytest makes of exceptions in threads and destructors."""
    printed = outcome(
        """
import threading

def fail():
    raise OSError("aside")

class Odd:
    def __del__(self):
        fail()

@pytest.mark.ranks(2)
def test_three():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    Odd()
    warnings.warn("careful", FutureWarning)

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error")
def test_error():
    warnings.warn("careful", FutureWarning)
""",
        passed=1,
        failed=1,
        warnings=3,
    )
    assert "PytestUnhandledThreadExceptionWarning" in printed
    assert "PytestUnraisableExceptionWarning" in printed
    assert len(re.findall(r"test_it.py:\d+: FutureWarning: careful\n", printed)) == 1


# -- failing bodies ----------------------------------------------------------------------------------------------------


def test_traceback_of_the_failing_rank_comes_before_the_positions_of_the_others(outcome: Any) -> None:
    printed = outcome(
        """
@pytest.mark.ranks(2)
def test_it(world):
    print("printed by", world.rank)
    value = {"rank": world.rank}
    if world.rank == 1:
        assert value == {"rank": 0}
    dist.all_reduce(torch.ones(1))
""",
        failed=1,
    )
    order = [
        "AssertionError: assert {'rank': 1} == {'rank': 0}",
        "rank 1 of 2 raised this; the others",
        "rank 0 is in all_reduce, its collective 1, called at test_it.py:",
        "printed by 1",
        "FAILED test_it.py::test_it - rank 1: AssertionError: assert {'rank': 1} ==",
    ]
    places = [printed.index(text) for text in order]
    assert places == sorted(places)
    assert "_pytest/" not in printed


@pytest.mark.slow
def test_timeout_ends_a_hang_and_shows_the_stack_of_every_rank(outcome: Any) -> None:
    printed = outcome(
        """
def deep():
    time.sleep(600)

@pytest.mark.ranks(2, timeout=2)
def test_it(world):
    dist.barrier() if world.rank == 0 else deep()
""",
        failed=1,
    )
    assert re.search(
        r"no end within 2 s: rank 0 is in barrier, its collective 1, called at test_it.py:\d+; "
        r"rank 1 is at test_it.py:\d+ in deep",
        printed,
    )
    assert printed.count("in test_it\n") == 2


@pytest.mark.slow
def test_collective_skipped_by_a_rank_is_named(outcome: Any, pytester: pytest.Pytester) -> None:
    """Immediately if another rank waits for it, and also if none waits, in a module that uses a function of torch."""
    helper = "from torch.distributed import all_reduce\n\ndef send(x):\n    return all_reduce(x, async_op=True)\n"
    pytester.makepyfile(helper_of_it=helper)
    printed = outcome(
        """
from helper_of_it import send

@pytest.mark.ranks(2)
def test_waited_for(world):
    if world.rank == 0:
        dist.barrier()

@pytest.mark.ranks(2, backend="gloo")
def test_not_waited_for(world):
    if world.rank == 0:
        send(torch.ones(1))

@pytest.mark.ranks(2)
def test_among_part_of_the_ranks(world):
    group = dist.new_group([0])
    if world.rank == 0:
        dist.barrier(group)

""",
        failed=2,
        passed=1,
    )
    assert "rank 1 never joined a collective: rank 0 is in barrier, its collective 1, called at" in printed
    unmatched = "left a collective unmatched: .* rank 0 called all_reduce at helper_of_it.py:4; rank 1 called none"
    assert re.search(unmatched, printed)


def test_crashed_rank_is_named_although_others_fail_as_a_consequence(outcome: Any) -> None:
    printed = outcome(
        """
@pytest.mark.ranks(2, backend="gloo")
def test_exits(world):
    if world.rank == 1:
        os._exit(3)
    dist.barrier()

@pytest.mark.ranks(2)
def test_crashes(world):
    if world.rank == 1:
        import ctypes
        ctypes.string_at(0)
    dist.barrier()
""",
        failed=2,
    )
    assert "rank 1 ended with exit code 3 before the end of the test" in printed
    assert "rank 1 was killed by SIGSEGV before the end of the test" in printed
    assert "in test_crashes" in printed  # the stack of the crash


def test_skips_expected_failures_and_exits_behave_as_usual(outcome: Any) -> None:
    printed = outcome(
        """
class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")

@pytest.mark.ranks(2)
def test_skips(world):
    pytest.skip("not here")

@pytest.mark.ranks(2)
def test_all_know_it(world):
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_expected(world):
    raise ValueError("this")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_another_than_expected(world):
    raise KeyError("that")

@pytest.mark.ranks(2)
def test_not_picklable(world):
    raise Odd(1, world.rank)

@pytest.mark.ranks(2)
def test_ends_itself(world):
    sys.exit(0)
""",
        "--tb=native",
        skipped=1,
        xfailed=2,
        failed=3,
    )
    # Native tracebacks are on separate lines.
    assert re.search(r"Odd: 1 \d\n-+ rank \d of 2 raised this; the others -+\nrank \d also raised", printed, re.M)


@pytest.mark.slow
def test_test_skipped_by_only_some_ranks_fails_and_names_them(outcome: Any) -> None:
    """It passed, or counted as an expected failure, although some ranks had not run it."""
    printed = outcome(
        """
import unittest

@pytest.mark.ranks(3)
def test_skipped_while_others_wait(world):
    if world.rank:
        raise unittest.SkipTest("no data")
    dist.barrier()

@pytest.mark.ranks(2)
def test_in_two_ways(world):
    (pytest.xfail if world.rank else pytest.skip)("known")

@pytest.mark.ranks(2)
def test_another_error_comes_first(world):
    if world.rank:
        pytest.skip("no data")
    assert world.size == 3

@pytest.mark.ranks(2)
def test_another_rank_was_ordered_to_end(world, kill):
    kill(1, at="optimizer")
    if world.rank == 0:
        pytest.skip("rank 1 is to end")
    parameter = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([parameter]).step()
""",
        failed=3,
        skipped=1,
    )
    for line in (
        "ranks 1, 2 skipped (no data), and rank 0 did not; use a skip condition that is the same on all",
        "rank 0 skipped (known), rank 1 xfailed (known); use a skip",
        "E       AssertionError: assert 2 == 3",
    ):
        assert line in printed, line


# -- bad input ---------------------------------------------------------------------------------------------------------


WRONG = {
    "ranks": "the ranks marker got (), not one or more whole numbers above 0",
    "ranks(0)": "the ranks marker got (0,), not one or more whole numbers above 0",
    "ranks(2.0)": "not one or more whole numbers",
    "ranks(2, 2)": "got (2, 2); give each number only once",
    "ranks(2, time=3)": "the ranks marker has no argument time",
    "ranks(2, timeout=0)": "the ranks marker's timeout must be a finite number greater than 0, not 0",
    "ranks(2, backend='mpi')": "the ranks marker's backend must be paceline, gloo or nccl, not 'mpi'",
}


def test_invalid_markers_are_one_line(outcome: Any) -> None:
    tests = [f"@pytest.mark.{mark}\ndef test_{number}(): pass\n" for number, mark in enumerate(WRONG)]
    drawn = "from hypothesis import given, strategies as st\n@pytest.mark.ranks(2)\n@given(st.integers())\n"
    tests.append(f"{drawn}def test_drawn(world, x): pass\n")
    printed = outcome("".join(tests), errors=len(tests) + 1)  # a marker with two counts makes two tests
    refused = [*WRONG.values(), "Hypothesis cannot draw examples on ranks; remove the marker"]
    for said in refused:
        lines = {line for line in printed.splitlines() if said in line and not line.startswith("ERROR")}
        assert lines, said
        assert all(line.startswith("test_") for line in lines)


def test_fixtures_unavailable_on_ranks_are_refused(outcome: Any) -> None:
    printed = outcome(
        """
def test_without_ranks(world): pass

@pytest.fixture(scope="module")
def wide(world): pass

@pytest.mark.ranks(2)
def test_wide(wide): pass

class TestCase(unittest.TestCase):
    @pytest.mark.ranks(1, 2)
    def test_counts(self): pass

@pytest.mark.ranks(2, backend="nccl")
def test_needs_gpus(world): pass

def test_joins(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)

@pytest.mark.ranks(2)
def test_forked(world): pass

def test_leaves():
    dist.destroy_process_group()

@pytest.mark.ranks(2)
def test_forked_too_late(world):
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
""",
        passed=2,
        skipped=1,
        failed=3,
        errors=2,
    )
    assert "the fixture 'world' is for tests with ranks; mark the test with @pytest.mark.ranks(2)" in printed
    assert "ScopeMismatch: You tried to access the function scoped fixture world with a module scoped" in printed
    assert "a method of a unittest.TestCase cannot run with several numbers of ranks (1, 2); give one number" in printed
    assert "NCCL needs 2 GPUs, and this host has 0" in printed
    assert "the test process itself is in a process group, which ranks would inherit" in printed
    assert "run the tests with ranks separately (pytest -m ranks) or" in printed


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rank_is_killed_at_the_requested_moment(outcome: Any) -> None:
    outcome(
        """
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("at", "step"), [("forward", 2), ("backward", 1), ("optimizer", 2), ("sharded optimizer", 2)])
def test_it(world, kill, at, step, tmp_path):
    kind, _, at = at.rpartition(" ")
    kill(1, at=at, step=step)
    model = paceline.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind:  # the nested optimizer does not count as a separate moment
        optimizer = paceline.optim.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(paceline.errors.CommunicationError, match="rank 1"):
        for number in range(1, 4):
            (tmp_path / f"{world.rank}-{number}").touch()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (tmp_path / f"1-{step}").exists() and not (tmp_path / f"1-{step + 1}").exists()

@pytest.mark.ranks(2, timeout=2)
def test_hangs(world, faults):
    faults.hang(1, at="forward")
    nn.Linear(2, 2)(torch.ones(2))
    assert world.rank == 0

@pytest.mark.ranks(2)
def test_nobody(world, kill):
    with pytest.raises(paceline.UsageError, match="rank 2 does not exist; give one from 0 to 1"):
        kill(2)
    with pytest.raises(paceline.UsageError, match="'bucket' is unknown; give one of"):
        kill(1, at="bucket")
""",
        passed=6,
    )


# -- assertions --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_assertions_hold_for_both_wrappers(outcome: Any) -> None:
    outcome(
        """
OURS = paceline.DistributedDataParallel

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", [OURS, nn.parallel.DistributedDataParallel])
def test_it(world, wrapper):
    testing.assert_equals_one_process(build, data, 3, wrap=wrapper)
    model = wrapper(build())
    testing.assert_replicas_equal(model)
    with torch.no_grad():
        model.module[0].bias[1] += world.rank
    with pytest.raises(AssertionError, match="'0.bias' on rank 1 differs from rank 0's by up to 1; 1 of 4 tensors"):
        testing.assert_replicas_equal(model)

@pytest.mark.ranks(2)
def test_unequal_beginnings(world):
    torch.manual_seed(world.rank)
    with pytest.raises(AssertionError, match="before the first step, replicas differ: '0.weight' on rank 1"):
        testing.assert_equals_one_process(build, data, 3, wrap=lambda module: module)

@pytest.mark.ranks(2)
def test_uneven(world):
    with pytest.raises(paceline.UsageError, match="has 7 samples, which 2 ranks cannot divide evenly"):
        testing.assert_equals_one_process(build, [(torch.ones(7, 4), torch.ones(7, 2))], 1, wrap=OURS)

def test_alone():
    with pytest.raises(paceline.UsageError, match="needs a process group"):
        testing.assert_replicas_equal(build())
""",
        passed=5,
    )


FOUND = {
    "clipped_locally": "parameter '0.bias' .* has different bits on rank 1 than on rank 0",
    "learning_rate_on_rank_0": "rank 0 has 0.05, rank 1 has 0.1 as lr in group 0 of SGD",
    "loss_not_divided": "gradient of '0.weight' .* it is 2 times as large",
    "no_sampler": "ranks 0 and 1 share 32 of 32 samples",
    "seeds_of_samplers": "ranks 0 and 1 share 11 of 16 samples",
    "set_epoch_forgotten": "epoch 1 has the same samples in the same order as epoch 0",
    "stale_gradients": "step 1, rank 0: the gradient of '0.weight' differs from one process's",
    "summed_loss": "gradient of '0.weight' .* it is 1/2 of it",
}
HARMLESS = {"batch_norm_drift", "branch_by_rank"}
"""Mistakes under torch DDP that Paceline's wrapper handles like a single process."""


@pytest.mark.slow
def test_buggy_training_is_named_in_one_line(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.delenv("BUGGY_UNDER", raising=False)
    config = pytester.makeini("[pytest]")  # overrides this suite, where warnings are errors
    result = pytester.runpytest_inprocess(*OPTIONS, "-c", str(config), "--tb=no", "-rfp", str(BUGGY / "run_buggy.py"))
    lines = dict(re.findall(r"^(?:FAILED|PASSED) \S*::test_finds\[(\w+)\](.*)$", result.stdout.str(), re.MULTILINE))
    assert lines.keys() == FOUND.keys() | HARMLESS
    for name, pattern in FOUND.items():
        assert re.search(pattern, lines[name]), f"{name}: {lines[name]}"
    assert not any(lines[name] for name in HARMLESS)


# -- beside other tools ------------------------------------------------------------------------------------------------


def test_plugin_loads_lazily(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
import sys

def test_it(request):
    assert not {"torch", "paceline"} & sys.modules.keys()
    assert not request.config.pluginmanager.has_plugin("paceline ranks")
"""
    )
    command = (sys.executable, "-m", "pytest", *OPTIONS)
    pytester.run(*command, timeout=TIMEOUT_S).assert_outcomes(passed=1)


# -- beside GPUs -------------------------------------------------------------------------------------------------------

DEVICE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
struct Idle final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {type(), 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return *std::getenv("CUDA_VISIBLE_DEVICES") ? 1 : 0; }
} idle;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, &idle);
"""
"""A device without effects. As with a GPU, the first backward pass starts a thread for it, unless it is hidden."""


def use_device(library: Path, visible: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    ctypes.CDLL(str(library))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_fork_after_backward_with_a_visible_device_names_a_working_remedy(tmp_path: Path) -> None:
    """torch only reported "Unable to handle autograd's threading in combination with fork-based multiprocessing"."""
    library, home = tmp_path / "idle.so", Path(torch.__file__).parent
    source = script(tmp_path, DEVICE, "idle.cpp")
    place = ("-I", home / "include", "-L", home / "lib", tmp_path / source, "-lc10", "-o", library)
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *map(str, place)], check=True)
    text = """
def test_before():
    torch.ones(1, requires_grad=True).sum().backward()

@pytest.mark.ranks(2)
def test_step(world):
    model = paceline.DistributedDataParallel(nn.Linear(4, 2))
    model(torch.ones(2, 4)).sum().backward()

@pytest.mark.ranks(2)
def test_sum(world):
    dist.all_reduce(torch.ones(1))
"""
    for visible, options, said in (
        ("0", (), "1 failed, 2 passed"),
        ("0", ("-m", "ranks"), "2 passed"),
        ("", (), "3 passed"),
    ):
        printed = in_a_process(tmp_path, text, partial(use_device, library, visible), *OPTIONS, *options)
        assert said in printed, printed
        assert ("hide the GPUs (CUDA_VISIBLE_DEVICES= pytest)" in printed) == ("failed" in said), printed
        assert "Unable to handle" not in printed


# -- separate processes ------------------------------------------------------------------------------------------------


def test_gpus_are_hidden_before_the_tests_of_the_project_can_use_torch() -> None:
    root = Path(__file__).parents[3]
    commands = [line for line in (root / "Makefile").read_text().splitlines() if "-m pytest" in line]
    assert len(commands) == 3
    assert all("$(TESTED) " in line for line in commands)
    assert "\nTESTED := CUDA_VISIBLE_DEVICES= " in (root / "Makefile").read_text()
    check = "import conftest, os, sys; assert os.environ['CUDA_VISIBLE_DEVICES'] == '' and 'torch' not in sys.modules"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": str(root / "tests")}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=TIMEOUT_S)


def in_a_process(folder: Path, text: str, first: Callable[[], None], *options: str) -> str:
    """Run pytest on a file of tests in a separate process, after a call of `first`; return the output."""
    command = (*options, "--basetemp", "base", script(folder, HEAD + text, "test_it.py"))
    done = paceline(folder, *command, program=("-m", "pytest"), fork="all", first=first)
    return done.stdout + done.stderr


def typed(commands: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, commands)
    os.close(writer)
    os.dup2(reader, 0)


@pytest.mark.slow
def test_debugger_opens_on_one_rank(tmp_path: Path) -> None:
    text = """
@pytest.mark.ranks(2, timeout=3)
def test_it(world):
    secret = 41
    assert secret == world.rank
"""
    commands = b"p 'it is', secret\nimport time; time.sleep(3.5)\np 'still', secret\nq\n"
    printed = in_a_process(tmp_path, text, partial(typed, commands), *OPTIONS, "-x", "--pdb")
    assert printed.count("entering PDB") == 1
    assert "('it is', 41)" in printed
    assert "('still', 41)" in printed
    assert "Quitting debugger" in printed


def measure() -> None:
    """Measure this process like ``coverage run``, with warnings as errors."""
    from coverage import Coverage

    warnings.simplefilter("error")
    sys.path.insert(0, "src")
    process = Coverage(config_file="rc.ini", data_file="whole")
    process.start()
    atexit.register(process.save)


def test_coverage_includes_ranks_in_any_working_directory(tmp_path: Path) -> None:
    """A rank resolved relative paths in its own folder, which lost all its lines, often most of a report.

    A rank that ran no measured source was ended by a warning.
    """
    coverage = pytest.importorskip("coverage")
    text = """
import judged

@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

@pytest.mark.ranks(2)
def test_it(world, elsewhere):
    assert judged.f(world.rank) == world.rank

@pytest.mark.ranks(2)
def test_nothing(world): pass
"""
    (tmp_path / "src").mkdir()
    script(tmp_path, "def f(rank):\n    if rank:\n        return 1\n    return 0\n", "src/judged.py")
    script(tmp_path, "[run]\nbranch = true\nsource = src\nrelative_files = true\n", "rc.ini")
    printed = in_a_process(tmp_path, text, measure, *(word.replace("default", "error") for word in OPTIONS))
    assert "2 passed" in printed, printed
    assert not list(tmp_path.glob("*coverage*"))
    data = coverage.CoverageData(basename=str(tmp_path / "whole"))
    data.read()
    [file] = data.measured_files()
    assert {arc for arc in data.arcs(file) if min(arc) > 0} == {(2, 3), (2, 4)}
