"""The example runs as its docstring says, and its marks are true."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import paceline

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"
RESILIENT = EXAMPLE.with_name("resilient_loop.py")


def accuracy(
    folder: Path, *arguments: str, program: tuple[str, ...] = (), fork: str = "launcher", strike: str = ""
) -> str:
    done = paceline(folder, *arguments, program=program, fork=fork, OMP_NUM_THREADS="1", PACELINE_FAILPOINTS=strike)
    assert done.returncode == 0, done.stderr
    assert ("starting all ranks again from step 99" in done.stderr) == bool(strike)
    [line] = [line for line in done.stdout.splitlines() if "accuracy" in line]
    return line


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The line that the script prints as an ordinary one, without a launcher."""
    return accuracy(tmp_path_factory.mktemp("alone"), program=(str(EXAMPLE),))


@pytest.mark.parametrize("size", [1, 2])
def test_the_plain_loop_ends_with_the_same_accuracy_on_any_number_of_ranks(
    alone: str, tmp_path: Path, size: int
) -> None:
    assert accuracy(tmp_path, "run", "--nproc", str(size), str(EXAMPLE), fork="all") == alone
    assert alone.startswith("accuracy 0.9")


def test_the_lines_without_a_mark_are_those_of_an_ordinary_script() -> None:
    _, docstring, code = EXAMPLE.read_text().split('"""', 2)
    assert "Only the lines marked with ## differ" in docstring
    unmarked = [line for line in code.splitlines() if "##" not in line]
    assert not [line for line in unmarked if "paceline" in line or "world" in line]
    # An indented block belongs to its head, which differs, so it is marked, too.
    lines = code.splitlines()
    heads = [number for number, line in enumerate(lines) if line.strip().startswith("with ") and "##" in line]
    assert heads
    assert all("##" in lines[number + 1] for number in heads)


def test_the_resilient_loop_ends_with_the_same_accuracy_though_a_rank_is_killed(alone: str, tmp_path: Path) -> None:
    assert accuracy(tmp_path, "run", "--nproc", "2", str(RESILIENT), strike="forward rank=1 at=100") == alone


def test_the_resilient_loop_needs_five_marked_lines_more() -> None:
    plain, resilient = (file.read_text().split('"""', 2)[2].splitlines() for file in (EXAMPLE, RESILIENT))
    assert sum("##" in line for line in resilient) <= sum("##" in line for line in plain) + 5
    unmarked = [line for line in resilient if "##" not in line]
    assert all(line in plain for line in unmarked)
