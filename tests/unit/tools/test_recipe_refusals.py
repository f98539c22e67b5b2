"""Recipes refuse bad settings in one line before any rank starts."""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from insides import COLUMNS, DEFAULT_MODEL, DigitsConfig, LmConfig, MrpcConfig
from paceline.errors import MissingExtra, UsageError, installing

ROW = "1\t1\t2\tA cat .\tThe cat ."


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with acceptable and unacceptable files."""
    files: dict[str, bytes] = {
        "text.txt": b"so we'll live, and pray, and sing, and tell old tales, and laugh\n" * 60,
        "empty.txt": b"",
        "latin.txt": b"na\xefve " * 100,
        "short.txt": b"to be, or not",
        "untokenized/config.json": b"{}",
        "weightless/config.json": b'{"model_type": "llama"}',
        "weightless/tokenizer.json": b"{}",
    }
    # The contents of model files do not matter before ranks start.
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        files[f"model/{name}"] = b"{}"
    files["model/config.json"] = json.dumps({"model_type": "llama"}).encode()
    for data, last in (("data", ""), ("broken", "1\t2\t3\n")):
        for name, ids in (("train", "1\t2"), ("dev", "3\t4")):
            rows = ["\t".join(COLUMNS), ROW.replace("1\t2", ids), last if name == "dev" else ""]
            files[f"{data}/{name}.tsv"] = "\n".join(rows).encode()
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digits(**options: Any) -> DigitsConfig:
    return DigitsConfig(**options)


def mrpc(**options: Any) -> MrpcConfig:
    return MrpcConfig(**{"data": "data", "model": "model", **options})


def lm(**options: Any) -> LmConfig:
    return LmConfig(**{"data": "text.txt", **options})


REFUSED: list[tuple[DigitsConfig | LmConfig | MrpcConfig, str]] = [
    (digits(batch_size=0), "--batch-size must be at least 1, not 0"),
    (digits(batch_size=32, micro_batches=3), "cut into --micro-batches 3; give a multiple of 3"),
    (digits(lr=math.nan), "--lr must be a finite number greater than 0, not nan"),
    (digits(seed=2**64), "--seed must be at least 0 and below 2**63"),
    (digits(json="nowhere/report.json"), "nowhere does not exist"),
    # Options shared with the Trainer, by the names of its settings:
    (digits(decay="step"), "--decay must be none, linear, cosine or wsd, not 'step'"),
    (digits(warmup_steps=-1), "--warmup-steps must be at least 0, not -1"),
    (digits(resume=True), "--resume needs --checkpoint-dir"),
    (digits(resume=True, checkpoint_dir="runs/7"), "the folder runs/7 to resume from does not exist; check it"),
    (digits(epochs=2, max_steps=9), "--epochs 2 and --max-steps 9 both set the length; give one"),
    (digits(evaluate_every=0), "--evaluate-every must be at least 1, not 0"),
    (digits(precision="fp8"), "--precision must be fp32, bf16 or fp16, not 'fp8'"),
    (digits(metrics=""), "--metrics must not be empty"),
    (digits(checkpoint_dir="d", checkpoint_every=0), "--checkpoint-every must be at least 1, not 0"),
    (digits(virtual_ranks=64), "--batch-size 32 cannot be cut into --virtual-ranks 64"),
    (lm(data=None), "--data is missing; give a text file: --data file.txt"),
    (lm(data="nowhere.txt"), "--data nowhere.txt cannot be read: No such file or directory"),
    (lm(data="empty.txt"), "have 0 characters but need 129"),
    (lm(data="latin.txt"), "--data latin.txt is not in UTF-8: byte 2 is 0xef; convert it"),
    (lm(data="short.txt"), "have 11 characters but need 129, one more than --context"),
    (lm(heads=0), "--heads must be at least 1, not 0"),
    (lm(width=24, heads=8), "--width 24 must be a multiple of twice --heads 8"),
    (lm(sample=-1), "--sample must be at least 0, not -1"),
    (lm(sharded=True), "--sharded cannot shard Muon"),
    (lm(sync_every=0), "--sync-every must be at least 1, not 0"),
    (lm(sync_every=4, virtual_ranks=2), "--virtual-ranks 2 averages in every step, but --sync-every 4 does not"),
    (mrpc(max_length=0), "--max-length must be at least 8, not 0"),
    (mrpc(dropout=1.0), "--dropout must be at least 0 and below 1, not 1.0"),
    (mrpc(virtual_ranks=8, balance=True), "--balance cuts batches into unequal slices"),
    (mrpc(data="nowhere"), "--data nowhere: no such folder"),
    (mrpc(data="broken"), "broken/dev.tsv, line 3: not Quality, #1 ID"),
    (mrpc(model="./nowhere"), "'./nowhere' is neither a folder nor the name of a model: "),
    (mrpc(random_init="nowhere", model=DEFAULT_MODEL), "--random-init nowhere has no config.json"),
    (mrpc(random_init="nowhere", model="org/name"), "exclude each other"),
    (mrpc(model="data"), "has no config.json; give the folder of a Hugging Face model"),
    (mrpc(model="untokenized"), "has no tokenizer"),
    (mrpc(model="weightless"), "the folder has no weights; give one that save_pretrained() wrote"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_wrong_option_is_refused_before_the_start(config: DigitsConfig | LmConfig | MrpcConfig, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        config.check()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_valid_options_are_accepted() -> None:
    for config in (digits(), lm(), mrpc(), MrpcConfig(data="data", random_init="weightless")):
        config.check()


NEEDS = {
    "sklearn": (digits(), "digits"),
    "transformers": (mrpc(), "recipes"),
    "tensorboard": (mrpc(tensorboard="board"), "tensorboard"),
    "datasets": (mrpc(data="glue/mrpc"), "recipes"),
}


@pytest.mark.parametrize("package", NEEDS)
def test_missing_package_error_names_the_pip_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    present = lambda name: None if name == package else find_spec(name)  # noqa: E731
    monkeypatch.setattr("paceline.tools.recipes.configs.find_spec", present)
    config, extra = NEEDS[package]
    with pytest.raises(MissingExtra, match=rf"'{package}'.*{re.escape(installing(extra))}"):
        config.check()


def test_virtual_ranks_must_divide_evenly_among_ranks() -> None:
    with pytest.raises(UsageError, match="--virtual-ranks must be a power of two"):
        digits(virtual_ranks=6).environment(2)
    with pytest.raises(UsageError, match="3 ranks do not divide virtual_ranks=8; start 1 or 2"):
        digits(virtual_ranks=8).environment(3)
