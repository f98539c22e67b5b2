"""The command line: help, refusals, and jobs started by ``paceline train``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import typer

import paceline
from insides import Job, Supervision, agent, module_command, option
from insides import commands as recipe_commands
from insides import tools_main as cli
from paceline.errors import UsageError
from processes import TIMEOUT_S
from processes import paceline as run_command


@dataclass(frozen=True)
class Config:
    """Stand-in for the configuration of the digits recipe."""

    summary: ClassVar[str] = "Train."
    needs: ClassVar[tuple[str, ...]] = ()
    epochs: int = 20
    batch_size: int = 64
    lr: float = 0.125
    seed: int = 0
    micro_batches: int = 1
    checkpoint_dir: str | None = None
    checkpoint_every: int = 10
    resume: bool = False
    width: int = option(3, "Features a layer.", "FEATURES")
    shuffle: bool = option(True, "Whether samples are shuffled.")
    json: str | None = None
    backend: str | None = None

    def check(self) -> None:
        if self.epochs < 1:
            raise UsageError(f"epochs={self.epochs} is less than 1; give 1 or more")

    def environment(self, ranks: int) -> dict[str, str]:
        if ranks == 3:
            raise UsageError("3 ranks do not go with the recipe; start 2")
        return {"FOR_RANKS": str(ranks)}

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that the command would have launched."""
    jobs: list[Job] = []
    monkeypatch.setitem(recipe_commands.RECIPES, "digits", Config)  # type: ignore[arg-type]
    monkeypatch.setattr(agent, "launch", lambda job: jobs.append(job) or 0)
    return jobs


REFUSED = {
    "unknown command": (["foo"], "unknown command 'foo'; known commands: explain, estimate-memory, plan, run,"),
    "mistyped command": (["trian", "digits"], "unknown command 'trian'; did you mean train?"),
    "mistyped recipe": (["train", "dgits"], "unknown recipe 'dgits'; did you mean digits?"),
    "no recipe": (["train", "--lr", "3"], "--lr needs a recipe; name one: digits, lm"),
    "no value behind a recipe": (["compare", "digits", "--steps"], "Option '--steps' requires an argument"),
    "mistyped option": (["train", "digits", "--epohcs", "3"], "No such option: --epohcs; did you mean --epochs?"),
    "torchrun's option": (["train", "digits", "--nproc-per-node", "2"], "--nproc-per-node; did you mean --nproc?"),
    "help as a word": (["help"], "unknown command 'help'; did you mean paceline --help?"),
    "a script without run": (["x.py"], "unknown command 'x.py'; did you mean paceline run x.py?"),
    "mpirun's -n": (["run", "-n", "2", "x.py"], "no option -n; did you mean --nproc?"),
    "mpirun's -n without run": (["-n", "2", "x.py"], "No such option: -n; options go after a command, as in: paceline"),
    "several numbers of ranks": (["run", "--nproc", "1,2", "x.py"], "to compare numbers of ranks, use paceline comp"),
    "ranks in words": (["train", "digits", "--nproc", "two"], "--nproc='two' is neither a number nor auto, gpu or cpu"),
    "refused by the recipe": (["train", "digits", "--epochs", "0"], "epochs=0 is less than 1"),
    "ranks refused by the recipe": (["train", "digits", "--nproc", "3"], "3 ranks do not go with the recipe; start 2"),
    # Only the ranks refused it, once each.
    "ranks to profile": (["profile", "digits", "--nproc", "3"], "3 ranks do not go with the recipe; start 2"),
    "noise of one rank": (["profile", "--noise-scale", "--nproc", "1", "digits"], "compares the gradients of ranks"),
}


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_one_line_with_exit_code_2(arguments: list[str], message: str, refusal: Any) -> None:
    assert message in refusal(*arguments)


@pytest.mark.usefixtures("started")
def test_only_a_similar_option_is_suggested(refusal: Any) -> None:
    assert refusal("train", "digits", "--report", "x") == "error: No such option: --report"  # not --epochs


def test_train_supervises_like_run(started: list[Job], run: Any) -> None:
    options = ["--max-restarts", "5", "--hang-timeout", "90", "--min-nproc", "1"]
    assert run("train", "digits", "--nproc", "1", *options) == 0
    assert run("train", "digits", "--nproc", "1") == 0
    asked, usual = started
    assert asked.max_restarts == 5
    assert (asked.supervision.hang_timeout, asked.supervision.min_nproc) == (90.0, 1)
    assert (usual.max_restarts, usual.supervision) == (None, Supervision())
    assert usual.env["PACELINE_TIMEOUT"] == "600"


ORDERS = {
    "around": ("--steps=3 digits --resume --lr 1 --nproc=2", "digits", "2", "--resume --lr 1"),
    "the recipe's help": ("--nproc 2 digits --help", "digits", "2", "--help"),
    "a script's": ("digits.py --nproc 2", "digits.py", "auto", "--nproc 2"),
    "a script's argument like a recipe": ("train.py digits --nproc 2", "train.py", "auto", "digits --nproc 2"),
    "a value like a recipe": ("--nproc lm train.py --steps 1", "train.py", "lm", "--steps 1"),
}


@pytest.mark.parametrize(("given", "target", "nproc", "rest"), ORDERS.values(), ids=ORDERS)
def test_command_options_work_anywhere_around_a_recipe(given: str, target: str, nproc: str, rest: str) -> None:
    command: Any = typer.main.get_command(cli.app)
    context = command.commands["profile"].make_context("profile", given.split())
    assert (context.params["target"], context.params["nproc"], context.args) == (target, nproc, rest.split())


@pytest.mark.parametrize("command", ["profile --out {} digits", "train digits --profile {}"])
def test_profile_of_a_recipe_has_the_typed_command(run: Any, started: list[Job], tmp_path: Path, command: str) -> None:
    """Ranks run a module with the whole configuration as JSON, which is unreadable in a title."""
    arguments = [*command.format(tmp_path / "out").split(), "--epochs", "3", "--checkpoint-dir", "my runs", "--resume"]
    run(*arguments)  # fails in the end because no rank started that could leave a record
    settings = json.loads(started[0].command[started[0].command.index("paceline.profiler") + 1])
    assert settings["title"] == "paceline train digits --epochs 3 --checkpoint-dir 'my runs' --resume"
    assert started[0].env["FOR_RANKS"] == str(started[0].nproc)  # missing in the ranks of a profile


def test_recipe_options_match_its_fields(run: Any, started: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    # cli.py listed them by hand, so a new field of a configuration did not become an option.
    assert run("train", "digits", "--help") == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(text in out for text in ("--width FEATURES", "Features a layer. [default: 3]", "--no-shuffle"))
    assert "--no-resume" not in out
    # An option may also precede the name of the recipe.
    assert run("train", "--nproc", "2", "--lr", "2", "digits", "--no-shuffle", "--resume") == 0
    [job] = started
    assert job.nproc == 2
    assert job.command[:-1] == module_command("paceline.tools", "recipes.digits")
    assert json.loads(job.command[-1]) == asdict(Config()) | {"lr": 2.0, "shuffle": False, "resume": True}
    assert run("train", "digits", "--width", "2.5") == 2
    assert "'--width'" in capsys.readouterr().err


def test_env_prints_the_facts_for_a_bug_report(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_TIMEOUT", "90")
    monkeypatch.setenv("PACELINE_SECRET", "hidden")
    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda *_: ("pip", ""))  # pip is slow
    assert run("env") == 0
    out = capsys.readouterr().out
    ours, _, torchs = out.partition("\n\n")
    facts = dict(line.split(": ", 1) for line in ours.splitlines())
    assert f"PyTorch version: {torch.__version__}" in torchs
    assert facts["paceline"].split(",")[0].strip() == paceline.__version__ == version("paceline")
    assert facts["torch"].split(",")[0].strip() == torch.__version__
    assert "paceline, gloo" in facts["backends"]
    assert facts["cores"].split()[0] == str(len(os.sched_getaffinity(0)))
    assert "PACELINE_TIMEOUT=90" in facts["settings"]
    assert "hidden" not in out


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command in and below `group`."""
    yield path
    for name in group.list_commands(None) if hasattr(group, "list_commands") else ():
        yield from commands(group.get_command(None, name), (*path, name))


COMMANDS = [*commands(typer.main.get_command(cli.app))]
NO_TORCH = """
import io, json, os, sys
from contextlib import redirect_stdout
import paceline_command

def shown(words):
    sys.argv, out = ["paceline", *words], io.StringIO()
    with redirect_stdout(out):
        try:
            paceline_command.main()
        except SystemExit as end:
            return [end.code, "torch" in sys.modules, out.getvalue()]

asked, typed = json.load(sys.stdin)
helps = {" ".join(words): shown(words) for words in asked}
os.environ["_PACELINE_COMPLETE"] = "complete_bash"
completions = []
for text in typed:
    os.environ.update(COMP_WORDS=f"paceline {text}", COMP_CWORD=str(len(text.split())))
    completions.append(shown([]))
print(json.dumps([helps, completions]))
"""


def test_help_version_and_completion_import_no_torch() -> None:
    # These took two to five seconds.
    assert 'paceline = "paceline_command:main"\n' in (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert len(COMMANDS) > 15
    asked = [[*words, "--help"] for words in COMMANDS]
    asked += [["--version"], ["--show-completion", "bash"], [], ["train"], ["checkpoint"]]
    typed = {"train di": "digits", "train digits --epo": "--epochs", "run --nproc 2 --hang-t": "--hang-timeout"}
    # Without a terminal there may be no shell among the parent processes.
    environment = {**os.environ, "COLUMNS": "80", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH],
        input=json.dumps([asked, list(typed)]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    helps, completions = json.loads(done.stdout)
    assert {words: [0, False, True] for words in map(" ".join, asked)} == {
        words: [code, loaded, bool(out)] for words, (code, loaded, out) in helps.items()
    }
    for (code, loaded, out), wanted in zip(completions, typed.values(), strict=True):
        assert (code, loaded, wanted in out.split()) == (0, False, True), out


SWALLOWS = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"


def test_ctrl_c_swallowed_by_the_torch_import_ends_the_command_in_one_line(tmp_path: Path) -> None:
    # torch clears every exception around its numpy import, so the command continued.
    (tmp_path / "torch.py").write_text(SWALLOWS)
    code = "import sys\nsys.argv[1:] = ['train', 'digits']\nimport paceline_command\npaceline_command.main()"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_python_m_paceline_runs_the_command(tmp_path: Path) -> None:
    done = run_command(tmp_path, program=("-m", "paceline", "--version"), fork="all")
    assert (done.returncode, done.stdout) == (0, f"paceline {version('paceline')}\n")
