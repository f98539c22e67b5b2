"""torchrun's options are accepted or refused before anything starts."""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from insides import Job, add_own_options, job, resolve_nproc, run_command, run_options, torchrun_environment
from paceline.errors import UsageError


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    return "script.py"


def parse(*arguments: str) -> run_command.Namespace:
    return run_command.parse(arguments)


TWO_HOSTS = ("--nnodes", "2", "--master-addr", "first")
REFUSED = {
    "no script": ([], "no script given"),
    "missing script": (["nope.py"], "the script 'nope.py' does not exist"),
    "missing module": (["-m", "nope.deep"], "no module named 'nope'"),
    "missing program": (["--no-python", "nope"], "the command 'nope' does not exist"),
    "two kinds": (["--no-python", "-m", "sh"], "contradict each other"),
    "no ranks": (["--nproc", "0", "script.py"], "--nproc=0 is less than 1"),
    "no number": (["--nproc", "x", "script.py"], "--nproc='x' is neither a number nor auto"),
    "restarts": (["--max-restarts", "-1", "script.py"], "max_restarts=-1 is less than 0"),
    "unknown option": (["--bogus", "script.py"], "paceline run has no option --bogus"),
    "misspelt option": (["--nprocs", "2", "script.py"], "no option --nprocs; did you mean --nproc?"),
    "misspelt script": (["scirpt.py"], "the script 'scirpt.py' does not exist; did you mean script.py?"),
    "ambiguous option": (["--n", "2", "script.py"], "ambiguous option: --n"),
    "no value": (["--nproc"], "--nproc"),
    "no time": (["--timeout", "soon", "script.py"], "--timeout='soon' is not a number of seconds"),
    "no time at all": (["--timeout", "0", "script.py"], "--timeout=0 must be above 0 and at most 2,000,000 seconds"),
    "endless time": (["--timeout=inf", "script.py"], "--timeout=inf must be above 0"),
    "hosts": (["--nnodes", "two", "script.py"], "--nnodes='two'"),
    "a second host of one": (["--node-rank", "1", "script.py"], "--node-rank=1, but --nnodes is 1"),
    # On several hosts these were tracebacks, or a ten-minute wait for an unspecified host.
    "no host to meet on": (["--nnodes", "2", "script.py"], "does not say where the hosts meet; give --master-addr"),
    "no endpoint": (["--nnodes", "2", "--rdzv-backend", "c10d", "script.py"], "give --rdzv-endpoint FIRST_HOST:PORT"),
    "a third host of two": ([*TWO_HOSTS, "--node-rank", "2", "script.py"], "--node-rank=2 is not in 0..1 (--nnodes=2)"),
    "restarts on hosts": ([*TWO_HOSTS, "--max-restarts", "-1", "script.py"], "max_restarts=-1 is less than 0"),
    "redirects": (["--redirects", "7", "script.py"], "--redirects='7' is neither"),
    "log folder": (["--log-dir", "script.py", "script.py"], "is a file"),
    "filters to nowhere": (["--duplicate-stdout-filters", "a", "script.py"], "needs a folder"),
    "rank filter": (["--local-ranks-filter", "0,x", "script.py"], "'x' is not an integer"),
    "signal": (["--signals-to-handle", "SIGNOPE", "script.py"], "'SIGNOPE' is not a signal"),
    "uncatchable": (["--signals-to-handle", "SIGKILL", "script.py"], "no process can handle"),
    "run path": (["--run-path", "script.py"], "--run-path is not supported"),
    "logs specs": (["--logs-specs", "mine", "script.py"], "--logs-specs is not supported"),
    "no least number of ranks": (["--nproc", "4", "--min-nproc", "0", "script.py"], "--min-nproc=0 is out of range"),
    "a least number above all": (["--nproc", "4", "--min-nproc", "5", "script.py"], "--min-nproc=5 is out of range"),
    "a least number of ranks on hosts": (["--nnodes", "1:2", "--min-nproc", "1", "script.py"], "works on one host"),
    "a report on hosts": ([*TWO_HOSTS, "--report", "r.json", "script.py"], "--report works on one host only"),
    "interval": (["--monitor-interval", "0", "script.py"], "monitor_interval=0.0 is not positive"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused_before_anything_starts(
    script: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "launch", lambda job: pytest.fail("started"))
    with pytest.raises(UsageError) as refused:
        run_command.start(arguments)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


# Arguments before and after the script.
SPLITS = {
    "nothing after": (["--nproc", "2", "script.py"], []),
    "like an option of ours": (["script.py"], ["--nproc", "4", "--timeout=3", "--help"]),
    "an ambiguous abbreviation": (["--nproc=2", "script.py"], ["--log", "x", "--n"]),
    "a dash and its like": (["script.py"], ["--", "-", "-m", "script.py"]),
    "after a flag": (["-m", "--standalone", "script"], ["--log", "-m", "module"]),
    "after a value like a script": (["--log-dir", "script.py", "script.py"], ["script.py"]),
    "after an abbreviated option": (["--max-res", "1", "-t", "3", "script.py"], ["-r", "3"]),
    "after an attached value": (["-t3", "--tee=3", "script.py"], ["-t3"]),
    "after two dashes": (["--nproc", "2", "--", "script.py"], ["--x", "--"]),
}


@pytest.mark.parametrize(("own", "rest"), SPLITS.values(), ids=SPLITS)
def test_arguments_after_the_script_belong_to_the_script(own: list[str], rest: list[str]) -> None:
    # 'script.py --log x' was refused because the launcher read --log as an abbreviation of its own option.
    parsed = run_command.parse([*own, *rest])
    assert parsed.training_script in ("script.py", "script")
    assert parsed.training_script_args == rest


def test_more_ranks_than_visible_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3")
    job = Job(["true"], 2, virtual_local_rank=True)
    assert torchrun_environment(job, 1, 2, 29500)["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(UsageError, match="3 ranks, but CUDA_VISIBLE_DEVICES=5, 3"):  # formerly an IndexError
        torchrun_environment(job, 2, 3, 29500)


def test_ranks_receive_the_collective_timeout(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def timeout_of(*arguments: str) -> str:
        parsed = parse(*arguments, script)
        return run_command.single_host(parsed, run_command.rank_command(parsed), 1).env["PACELINE_TIMEOUT"]

    monkeypatch.delenv("PACELINE_TIMEOUT", raising=False)
    assert timeout_of() == "600"
    monkeypatch.setenv("PACELINE_TIMEOUT", "90")
    assert timeout_of() == "90"
    assert timeout_of("--timeout", "7.5") == "7.5"


def test_help_lists_only_options_of_torchrun() -> None:
    # The help is not generated by torchrun, which would import torch.
    named = set(re.findall(r"--[a-z-]+", run_options.help_parser().format_help()))
    parser = argparse.ArgumentParser(add_help=False)
    add_own_options(parser)
    for known in (get_args_parser(), parser):
        named -= set(re.findall(r"--[a-z-]+", known.format_help()))
    assert named <= {"--help", "--lr", "--shutdown-timeout"}  # Paceline provides the last one for torch 2.11
    assert run_options.parser().format_help() == run_options.help_parser().format_help()


HOSTS = {
    "nothing": ([], False),
    "standalone": (["--standalone"], False),
    "one host": (["--nnodes", "1"], False),
    "local rendezvous": (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], False),
    "local master": (["--master_addr", "127.0.0.1", "--master_port", "29501"], False),
    "two hosts": (["--nnodes", "2"], True),
    "elastic": (["--nnodes=1:4"], True),
    "remote master": (["--master-addr", "node-0"], True),
    "remote rendezvous": (["--rdzv-endpoint", "node-0:29400"], True),
    "another backend": (["--rdzv-backend", "etcd-v2"], True),
    "an IPv6 master": (["--master-addr", "[2001:db8::1]"], True),
    "an IPv6 master that ends in letters": (["--master-addr", "2001:db8::fe"], True),
}


@pytest.mark.parametrize(("arguments", "several"), HOSTS.values(), ids=HOSTS)
def test_multi_host_options_are_recognized(arguments: list[str], several: bool) -> None:
    assert run_command.several_hosts(parse(*arguments, "script.py")) is several


def test_options_reach_the_job(script: str) -> None:
    parsed = parse(
        *("--nproc", "3", "--max-restarts", "2", "--rdzv-id", "job-7", "--shutdown-timeout", "5"),
        *("--signals-to-handle", "SIGTERM,SIGUSR1", "--role", "rider", "--tee", "0:1,1:2", script, "-a"),
    )
    made = run_command.single_host(parsed, run_command.rank_command(parsed), 3)
    assert list(made.command)[1:] == ["-u", "script.py", "-a"]
    assert (made.nproc, made.max_restarts, made.run_id, made.grace) == (3, 2, "job-7", 5)
    assert made.signals == [signal.SIGTERM, signal.SIGUSR1]
    assert (made.role, made.logs.tee) == ("rider", "0:1,1:2")


def test_nproc_default_and_environment_match_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("script.py").nproc_per_node == "1"
    assert parse("--nproc", "4", "script.py", "--nproc", "9").nproc_per_node == "4"
    monkeypatch.setenv("PET_NPROC_PER_NODE", "6")
    assert parse("script.py").nproc_per_node == "6"


@pytest.mark.parametrize(
    ("wanted", "gpus", "count", "noted"),
    [
        ("auto", 0, 2, False),
        ("auto", 8, 8, False),
        ("gpu", 4, 4, False),
        ("cpu", 4, 2, False),
        ("2", 0, 2, False),
        (4, 0, 4, True),
        ("4", 4, 4, False),
    ],
)
def test_nproc(wanted: str | int, gpus: int, count: int, noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    resolved, note = resolve_nproc(wanted)
    assert (resolved, bool(note)) == (count, noted)
    if note:
        assert note.startswith("note: 4 ranks on 2 cores")


PASSED_ON = {
    "ours": ("--nproc 2", "", ["--nproc", "2"]),
    "attached": ("--lr 1 --nproc=2 --seed 3", "", ["--nproc=2"]),
    "torchrun's": ("--standalone --nnodes 1:2", "", ["--standalone", "--nnodes", "1:2"]),
    "its own by text": ("--timeout 3", 'add_argument("--timeout")', []),
    "its own by field": ("--log-dir x", "class Settings:\n    log_dir: str", []),
    "its own, another one": ("--timeout 3", "timeouts = 3", ["--timeout", "3"]),
    "help": ("--help", "", []),
    "short ones": ("-m x -r 3", "", []),
    "no value": ("--nproc", "", ["--nproc"]),
}


@pytest.mark.parametrize(("given", "text", "found"), PASSED_ON.values(), ids=PASSED_ON)
def test_launcher_options_among_script_arguments_are_detected(given: str, text: str, found: list[str]) -> None:
    assert run_command.own_options_in(given.split(), text) == found


def test_gpu_count_is_not_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UsageError, match="no GPU"):
        resolve_nproc("gpu")
