"""`paceline profile analyze FILE.csv`: the verdict on times that any program wrote, or one line about what is wrong."""

import json
import random

import pytest

from paceline.errors import UsageError
from paceline.profiler.analyze_csv import read_times, run_analyze


def write(path, rows, header="step,rank,seconds"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def rows(steps=60, ranks=4, slow=None, first=0, order="{step},{rank},{seconds:.6f}"):
    draw = random.Random(0)
    return [
        order.format(
            step=step,
            rank=rank,
            seconds=0.1 * draw.uniform(0.97, 1.03) * (1.5 if rank == slow and step >= first else 1),
            host=f"host-{rank // 2}",
        )
        for step in range(steps)
        for rank in range(ranks)
    ]


def test_the_verdict_is_one_sentence_and_a_table(tmp_path, capsys):
    file = write(
        tmp_path / "a.csv", rows(slow=2, first=30, order="{step},{rank},{seconds},{host}"), "step,rank,seconds,host"
    )
    assert run_analyze(file) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("rank 2 (host-1) computed 1.5")
    assert "x as long as the median of the others from step 30 on: 1." in printed[0]
    assert printed[0].endswith("s lost, emerging")
    assert any("emerging" in line and "host-1" in line and "1.5" in line for line in printed[2:])


def test_a_clean_file_says_so(tmp_path, capsys):
    assert run_analyze(write(tmp_path / "a.csv", rows())) == 0
    assert capsys.readouterr().out == "no straggler among 4 ranks in 60 steps\n"


@pytest.mark.parametrize(
    ("steps", "ranks", "said"), [(60, 1, "rank 0 alone"), (1, 4, "from 1 step:"), (4, 4, "4 steps:")]
)
def test_too_little_to_compare_says_why(tmp_path, capsys, steps, ranks, said):
    assert run_analyze(write(tmp_path / "a.csv", rows(steps, ranks))) == 0
    assert said in capsys.readouterr().out


def test_json_has_every_field(tmp_path, capsys):
    run_analyze(write(tmp_path / "a.csv", rows(slow=1)), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["steps"], document["ranks"], document["straggler_rank"]) == (60, 4, 1)
    (straggler,) = document["stragglers"]
    assert straggler["kind"] == "persistent"
    assert straggler["slowdown"] == pytest.approx(1.5, rel=0.02)
    run_analyze(write(tmp_path / "b.csv", rows()), as_json=True)
    clean = json.loads(capsys.readouterr().out)
    assert clean["straggler_rank"] is None
    assert clean["stragglers"] == []


@pytest.mark.parametrize(
    ("header", "order"),
    [
        ("Seconds, RANK ,gpu,Step", "{seconds},{rank},A100,{step}"),
        ("step;rank;seconds", "{step};{rank};{seconds}"),
        ("step\trank\tseconds", "{step}\t{rank}\t{seconds}"),
        ('"step","rank","seconds"', '"{step}","{rank}","{seconds}"'),
        (",step,rank,seconds", "0,{step}.0,{rank}.0,{seconds}"),
        ("\ufeffstep,rank,seconds", "{step},{rank},{seconds}\r"),
    ],
)
def test_columns_are_found_in_any_order_and_case(tmp_path, header, order):
    times = read_times(write(tmp_path / "a.csv", rows(order=order), header))
    assert times.seconds.shape == (60, 4)
    assert not times.seconds.isnan().any()


def test_lines_may_come_in_any_order_and_steps_have_any_number(tmp_path, capsys):
    lines = [line for line in rows(steps=900, ranks=4, slow=3, first=600) if int(line.split(",")[0]) % 10 == 0]
    random.Random(1).shuffle(lines)
    run_analyze(write(tmp_path / "a.csv", lines))
    assert "rank 3 computed 1." in (out := capsys.readouterr().out)
    assert "from step 600 on" in out


def test_missing_and_repeated_times_are_said(tmp_path, capsys):
    """Ranks restart and repeat steps, and lines get lost; the rest still has its verdict."""
    lines = [line for line in rows(ranks=8, slow=5) if line.split(",")[1] not in ("2", "3")]
    run_analyze(write(tmp_path / "a.csv", [*lines[6:], lines[-1], "7,0,", "8,0,NaN", "9,4,null"]))
    out = capsys.readouterr().out
    assert out.startswith("rank 5 computed 1.5")
    assert "note: the file has no line of ranks 2, 3\n" in out
    assert "note: 3 of 354 times are missing (0.8%)" in out
    assert "note: 4 times are there twice" in out


def test_a_name_is_no_markup(tmp_path, capsys):
    run_analyze(write(tmp_path / "a.csv", [f"{row},[red]x[/]" for row in rows(slow=1)], "step,rank,seconds,name"))
    assert capsys.readouterr().out.count("[red]x[/]") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        ("step,rank,seconds\n", "has no times"),
        ("time,worker\n1,2\n", r"no column 'step' .*time, worker"),
        ("0,0,0.1\n", "no column 'step'"),
        ("step,rank,seconds,rank\n0,0,0.1,0\n", "'rank' 2 times"),
        ("step,rank,seconds\n0,0,0.1\n0,1,fast\n", "line 3: seconds is 'fast'"),
        ("step,rank,seconds\n\n\n0,0,-1\n", "line 4: seconds is -1"),
        ("step,rank,seconds\n0,0,inf\n", "line 2: seconds is inf"),
        ("step,rank,seconds\n0,,0.1\n", "line 2: rank is ''"),
        ("step,rank,seconds\n0,1.5,0.1\n", "line 2: rank is '1.5'"),
        ("step,rank,seconds\n0,-1,0.1\n", "line 2: rank is '-1'"),
        ("step,rank,seconds\nnan,1,0.1\n", "line 2: step is 'nan'"),
        ("step,rank,seconds\n0,99999999999999999999,0.1\n", "line 2: rank is '9999"),
        ("step,rank,seconds\n0,1\n", "line 2 has 2 of 3 columns"),
    ],
)
def test_bad_input_is_one_line(tmp_path, text, message):
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        run_analyze(str(file))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_none_is_one_line(tmp_path):
    for file, message in ((tmp_path / "no.csv", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(UsageError, match=message):
            run_analyze(str(file))
    binary = tmp_path / "a.bin"
    for content in (
        bytes(range(256)) * 4,
        "step,rank,seconds\n0,0,1\n".encode("utf-16"),
        b"step,rank,seconds\n0,0,\xff\n",
    ):
        binary.write_bytes(content)
        with pytest.raises(UsageError, match="no text in UTF-8"):
            run_analyze(str(binary))


def test_a_step_column_that_ranks_do_not_share_is_refused(tmp_path, monkeypatch):
    """As with a time stamp in place of the step: the table would have a row for each line, and take all memory."""
    monkeypatch.setattr("paceline.profiler.analyze_csv.MOST_TIMES", 99)
    with pytest.raises(UsageError, match="10 different steps and 10 different ranks"):
        read_times(write(tmp_path / "a.csv", [f"{number},{number},0.1" for number in range(10)]))
