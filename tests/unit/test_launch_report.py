"""How a rank of ours ends, alone and under the launcher."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from paceline.launch import record
from processes import paceline, script

SCRIPT = """
import os, sys, time
from paceline import UsageError
from paceline.launch.report import rank_main

def work():
    if sys.argv[1] == "usage" and os.environ.get("RANK", "0") in sys.argv[2]:
        raise UsageError("lr=-1.0 is negative; give a positive number")
    if sys.argv[1] == "error":
        raise OSError("no data")
    if sys.argv[1] == "exit":
        sys.exit("enough")
    if sys.argv[1] == "usage":
        time.sleep(60)
    print("done")

rank_main(work)
"""


def test_a_usage_error_on_every_rank_is_one_line_and_code_2_and_no_restart(tmp_path: Path) -> None:
    name = script(tmp_path, SCRIPT)
    done = paceline(tmp_path, "run", "--nproc", "2", "--max-restarts", "3", name, "usage", "01")
    assert (done.returncode, done.stderr) == (2, "error: lr=-1.0 is negative; give a positive number\n")


def test_a_usage_error_on_one_rank_ends_the_others_at_once(tmp_path: Path) -> None:
    name = script(tmp_path, SCRIPT)
    begin = time.monotonic()
    done = paceline(tmp_path, "run", "--nproc", "2", name, "usage", "1")
    assert time.monotonic() - begin < 30
    assert (done.returncode, done.stderr) == (2, "error: lr=-1.0 is negative; give a positive number\n")


def test_a_rank_without_launcher_prints_its_own_error(tmp_path: Path) -> None:
    name = script(tmp_path, SCRIPT)
    done = paceline(tmp_path, "usage", "0", program=(name,))
    assert (done.returncode, done.stderr) == (2, "error: lr=-1.0 is negative; give a positive number\n")
    done = paceline(tmp_path, "exit", program=(name,))
    assert (done.returncode, done.stderr) == (1, "enough\n")
    done = paceline(tmp_path, "fine", program=(name,))
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_other_errors_are_reported_with_their_traceback(tmp_path: Path) -> None:
    name = script(tmp_path, SCRIPT)
    done = paceline(tmp_path, "run", name, "error")
    assert done.returncode == 1
    assert "error: rank 0 failed first (exit code 1: OSError: no data)" in done.stderr
    assert 'rank 0 |     raise OSError("no data")' in done.stderr


def test_a_record_is_read_as_it_was_written_and_torchs_own_is_understood(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    note = record.Record("ValueError: x", "Traceback …", 1234.5, usage=True)
    record.write(path, note)
    assert record.read(path) == note
    content = json.loads(Path(path).read_text())
    for ours in ("at", "usage"):
        del content[ours]
    Path(path).write_text(json.dumps(content))
    assert record.read(path) == record.Record("ValueError: x", "Traceback …", 1234.0)


def test_a_half_written_record_is_none_and_a_full_disk_hides_no_error(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert record.read(str(path)) is None
    for text in ("", '{"message": {"mess', "[]", "{}", '{"message": {}}'):
        path.write_text(text)
        assert record.read(str(path)) is None
    record.write(os.path.join(str(tmp_path), "no", "folder"), record.of(ValueError("x")))
