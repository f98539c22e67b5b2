"""``paceline train mrpc`` without a network, without data, and with an unresponsive hub."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from paceline.tools.recipes.configs import DEFAULT_MODEL
from processes import paceline


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
    from paceline.tools import hub

    server, url = silent_port()
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    with server:
        begin = time.monotonic()
        assert f"{url} cannot be reached" in str(hub.out_of_reach())
        assert time.monotonic() - begin < 60
