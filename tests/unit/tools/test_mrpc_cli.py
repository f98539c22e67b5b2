"""``paceline train mrpc``: what it takes from the hub, and what it says without a network."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from forked import call
from hub_server import Hub
from paceline.errors import UsageError
from paceline.tools.recipes.configs import DEFAULT_MODEL, MrpcConfig
from paceline.tools.recipes.pairs import COLUMNS
from processes import paceline

ROW = "1\t1\t2\tA cat .\tThe cat ."


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, ids in (("train.tsv", "1\t2"), ("dev.tsv", "3\t4")):
        lines = ["\t".join(COLUMNS), ROW.replace("1\t2", ids)]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files of a model; what is in them does not matter before ranks start."""
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
    """A server that takes connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    return server, f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
def test_without_network_one_line_says_which_flags_make_it_run(tmp_path: Path, model: Path) -> None:
    home = str(tmp_path / "home")
    nobody = {"HF_HOME": home, "HF_ENDPOINT": "http://127.0.0.1:9"}
    said = refused_command(tmp_path, **nobody)
    assert f"the model {DEFAULT_MODEL} is not on this machine" in said
    assert "--model FOLDER" in said
    assert "--random-init FOLDER" in said
    assert "http://127.0.0.1:9 cannot be reached" in said
    said = refused_command(tmp_path, "--model", str(model), HF_HOME=home, HF_HUB_OFFLINE="1")
    assert "the data glue/mrpc is not on this machine, and HF_HUB_OFFLINE is set" in said
    assert "--model FOLDER" not in said
    assert not (tmp_path / "home").exists()


def test_a_hub_that_does_not_answer_is_waited_for_seconds_not_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.tools.shared import hub

    server, url = silent_port()
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    with server:
        begin = time.monotonic()
        assert f"{url} cannot be reached" in str(hub.out_of_reach())
        assert time.monotonic() - begin < 60


# -- the hub -----------------------------------------------------------------------------------------------------------


def check_with_hub(environment: dict[str, str], options: list[dict[str, Any]], again: bool = False) -> Any:
    """Check in a process of its own, as the command does; the refusals. With `again`, read as ranks do afterwards."""
    os.environ.update({**environment, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    refusals = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries while they are imported
        for config in [MrpcConfig(**each) for each in options]:
            try:
                config.check()
            except UsageError as error:
                refusals.append(str(error))
        return (config.folder(), config.pairs()) if again else refusals


def test_a_model_of_the_hub_is_fetched_once_and_then_found_without_network(
    tmp_path: Path, data: Path, model: Path
) -> None:
    options, unknown = ({"data": str(data), "model": name} for name in ("org/name", "org/unknown"))
    environment = {"HF_HOME": str(tmp_path / "home")}
    with Hub({"models/org/name": model}) as hub:
        environment["HF_ENDPOINT"] = hub.url
        [refusal] = call(check_with_hub, environment, [options, unknown])
        assert "cannot download the model org/unknown" in refusal
        assert "\n" not in refusal
        assert any("resolve" in request and request.endswith("model.safetensors") for request in hub.requests)
    weights, _ = call(check_with_hub, environment, [options], True)  # by a hub that has ended
    assert (weights / "model.safetensors").read_text() == "{}"


@pytest.mark.slow
def test_the_data_of_the_hub_are_fetched_once_and_then_found_without_network(tmp_path: Path, model: Path) -> None:
    glue = tmp_path / "glue"
    (glue / "mrpc").mkdir(parents=True)
    files = "\n".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl" for split in ("train", "validation"))
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}\n---\n")
    for split, label in (("train", 1), ("validation", 0)):
        row = {"sentence1": f'A "{split}"', "sentence2": "B", "label": label, "idx": label}
        (glue / "mrpc" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    options = {"model": str(model), "data": "glue/mrpc"}
    environment = {"HF_HOME": str(tmp_path / "home")}
    with Hub({"datasets/nyu-mll/glue": glue}) as hub:
        assert call(check_with_hub, environment | {"HF_ENDPOINT": hub.url}, [options]) == []
    environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "1"}  # as in the ranks
    _, (train, dev) = call(check_with_hub, environment, [options], True)
    assert [(pair.first, pair.second, pair.label) for pair in (*train, *dev)] == [
        ('A "train"', "B", 1),
        ('A "validation"', "B", 0),
    ]
