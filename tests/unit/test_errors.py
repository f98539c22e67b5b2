"""What an error says that is not in its caller's words."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest

from paceline.errors import MissingExtra

CLONE = {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}}
COPY = {"url": "file:///home/me/clone", "dir_info": {}}
WHEEL = {"url": "file:///tmp/paceline-0.1.0-py3-none-any.whl", "archive_info": {}}
COMMIT = {"url": "https://host/paceline.git", "vcs_info": {"vcs": "git", "commit_id": "4002d00"}}
ORIGINS = {
    "an index": (None, "run: pip install 'paceline[wandb]'"),
    "a clone": (CLONE, "in /home/me/my clone run: pip install -e '.[wandb]'"),
    "a copy of a clone": (COPY, "run: pip install 'paceline[wandb] @ file:///home/me/clone'"),
    "a wheel": (WHEEL, f"run: pip install 'paceline[wandb] @ {WHEEL['url']}'"),
    "a commit": (COMMIT, "run: pip install 'paceline[wandb] @ git+https://host/paceline.git'"),
}


@pytest.mark.parametrize(("origin", "words"), ORIGINS.values(), ids=ORIGINS)
def test_a_missing_package_is_installed_as_paceline_was(
    origin: dict[str, Any] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # «pip install 'paceline[wandb]'» found nothing from a clone: no index has it under that name.
    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if origin is not None and name == "direct_url.json" else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert str(MissingExtra("wandb", "wandb", "--wandb")).endswith(f", which is not installed; {words}")


def test_without_metadata_the_name_is_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    assert "run: pip install 'paceline[wandb]'" in str(MissingExtra("wandb", "wandb", "--wandb"))
