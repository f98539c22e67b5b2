"""The sentence pairs of MRPC (rows, files, batches, baseline), and ``paceline train mrpc`` without a network."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
import torch

from insides import DEFAULT_MODEL, datasets
from paceline.errors import UsageError
from processes import paceline
from real_data import real_data

HEADER = "\t".join(datasets.COLUMNS)


def row(number: int, label: int = 1) -> str:
    return f"{label}\t{number}\t{number + 1000}\tOne {number} .\tAnother {number} ."


def write(file: Path, *lines: str, header: str = HEADER, end: str = "\n") -> None:
    file.write_bytes(end.join([header, *lines, ""]).encode())


def ids(pairs: list[datasets.Pair]) -> list[int]:
    return [int(pair.ids[0]) for pair in pairs]


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", row(1), row(2, 0), header="\ufeff" + HEADER, end="\r\n")
    pairs = [datasets.Pair((str(at), f"100{at}"), f"One {at} .", f"Another {at} .", 2 - at) for at in (1, 2)]
    assert datasets.read_pairs(tmp_path / "train.tsv") == pairs


def test_quotation_marks_and_unusual_line_separators_are_text(tmp_path: Path) -> None:
    # A CSV reader merged everything between two quotation marks into one cell, and lost rows.
    write(tmp_path / "a.tsv", '1\t1\t2\t" He said\x0b no\tShe "" said\u2028 yes \x85 .', row(3))
    first, second = datasets.read_pairs(tmp_path / "a.tsv")
    assert (first.first, first.second) == ('" He said\x0b no', 'She "" said\u2028 yes \x85 .')
    assert second.ids == ("3", "1003")


BROKEN = {
    "four columns": b"1\t2\t3\tsentence",
    "spaces for tabs": b"1 2 3 a b",
    "another quality": b"2\t2\t3\ta\tb",
    "an empty sentence": b"1\t2\t3\t \tb",
    "latin-1": b"1\t2\t3\tna\xefve\tb",
    "an empty line": b"",
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_malformed_row_is_reported_with_file_and_line(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "train.tsv"
    file.write_bytes(b"\n".join([HEADER.encode(), row(1).encode(), line, row(2).encode(), b""]))
    with pytest.raises(UsageError) as refused:
        datasets.read_pairs(file)
    assert f"{file}, line 3: not Quality, #1 ID, #2 ID" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_file_without_a_header_is_refused(tmp_path: Path) -> None:
    # One such file is GLUE's test.tsv, which also lacks labels.
    write(tmp_path / "train.tsv", row(2), header=row(1))
    with pytest.raises(UsageError, match="line 1: not Quality, #1 ID"):
        datasets.read_pairs(tmp_path / "train.tsv")


def fill(folder: Path, files: dict[str, list[int]]) -> None:
    for name, numbers in files.items():
        write(folder / name, *map(row, numbers))


@pytest.mark.parametrize(("numbers", "trained"), [([1, 2, 3], [1, 2, 3]), ([1, 4, 3], [1, 3])])
def test_training_and_held_out_pairs_are_disjoint(tmp_path: Path, numbers: list[int], trained: list[int]) -> None:
    fill(tmp_path, {"train.tsv": numbers, "dev.tsv": [4]})
    splits = datasets.read_folder(tmp_path)
    assert (ids(splits.train), ids(splits.dev)) == (trained, [4])


LACKING = [
    ({}, "dev.tsv cannot be read: No such file or directory; give a folder with MRPC's"),
    ({"dev.tsv": [1]}, "train.tsv cannot be read"),
    ({"train.tsv": [1], "dev.tsv": [1]}, "train.tsv or dev.tsv has no pairs of its own"),
    ({"train.tsv": [1], "dev.tsv": []}, "train.tsv or dev.tsv has no pairs of its own"),
    ({"train.tsv": [], "dev.tsv": [1]}, "train.tsv or dev.tsv has no pairs of its own"),
]


@pytest.mark.parametrize(("files", "message"), LACKING)
def test_folder_with_a_missing_part_is_refused(tmp_path: Path, files: dict[str, list[int]], message: str) -> None:
    fill(tmp_path, files)
    with pytest.raises(UsageError) as refused:
        datasets.read_folder(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert message in str(refused.value)


def test_real_files_are_the_glue_corpus() -> None:
    train, dev = datasets.read_folder(real_data("mrpc"))
    assert (len(train), sum(pair.label for pair in train)) == (3668, 2474)
    assert (len(dev), sum(pair.label for pair in dev)) == (408, 279)
    assert train[0].first.startswith('Amrozi accused his brother , whom he called " the witness " ,')


def test_changed_token_or_label_changes_the_fingerprint() -> None:
    rows = [{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}]
    others = [
        [{"input_ids": [5], "label": 1}, {"input_ids": [6, 7], "label": 0}],
        [{"input_ids": [5, 6], "label": 0}, {"input_ids": [7], "label": 0}],
        rows[::-1],
    ]
    assert len({datasets.TokenizedPairs(variant).fingerprint for variant in [rows, *others]}) == 4


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    # labels, answers, precision and recall of class 1
    cases: list[tuple[list[int], list[int], float, float]] = [
        ([1, 1, 0, 0], [1, 0, 1, 0], 1 / 2, 1 / 2),
        ([1, 1, 1, 0], [1, 1, 1, 1], 3 / 4, 1),
        ([1, 1, 1, 0], [0, 1, 0, 0], 1, 1 / 3),
    ]
    for labels, answers, precision, recall in cases:
        truth, said = torch.tensor(labels), torch.tensor(answers)
        f1 = datasets.f1_score(*(float(part.double().mean()) for part in (truth & said, said, truth)))
        assert f1 == pytest.approx(2 / (1 / precision + 1 / recall), rel=1e-12)
    assert datasets.f1_score(0, 0, 0) == 0, "all pairs rejected"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files of a model, whose contents do not matter before ranks start."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


# -- the command -------------------------------------------------------------------------------------------------------


def refused_command(folder: Path, *options: str, **environment: str) -> str:
    done = paceline(folder, "train", "mrpc", *options, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def silent_port() -> tuple[socket.socket, str]:
    """Return a server that accepts connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    return server, f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_missing_network_error_names_the_flags_that_help(tmp_path: Path, model: Path) -> None:
    home = str(tmp_path / "home")
    offline = {"HF_HOME": home, "HF_ENDPOINT": "http://127.0.0.1:9"}
    said = refused_command(tmp_path, **offline)
    assert f"the model {DEFAULT_MODEL} is not on this machine" in said
    assert "--model FOLDER" in said
    assert "--random-init FOLDER" in said
    assert "http://127.0.0.1:9 cannot be reached" in said
    said = refused_command(tmp_path, "--model", str(model), HF_HOME=home, HF_HUB_OFFLINE="1")
    assert "the data glue/mrpc is not on this machine, and HF_HUB_OFFLINE is set" in said
    assert "--model FOLDER" not in said
    assert not (tmp_path / "home").exists()


def test_unresponsive_hub_times_out_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from insides import hub

    server, url = silent_port()
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    with server:
        begin = time.monotonic()
        assert f"{url} cannot be reached" in str(hub.out_of_reach())
        assert time.monotonic() - begin < 60
