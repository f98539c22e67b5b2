"""The mnist recipe: idx files read and refused, training on ranks, and the sweep over batches."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.recipes.batch_sweep import Point, draw, sweep_table
from paceline.recipes.idx_files import FILES, read_idx, read_mnist
from paceline.recipes.mnist import BATCHES, MnistConfig
from processes import paceline
from real_data import real_data


def idx(tensor: Tensor) -> bytes:
    header = bytes([0, 0, 8, tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return header + tensor.to(torch.uint8).numpy().tobytes()


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images whose class is the row and column of a bright square: easy to learn in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randint(60, (count, 28, 28), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[14 * (label // 5) :, 5 * (label % 5) :][:9, :5] = 250
    return images, labels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    tensors = [*digits(256, 0), *digits(100, 1)]
    for (name, _), tensor in zip(FILES.values(), tensors, strict=True):
        (data / f"{name}.gz").write_bytes(gzip.compress(idx(tensor)))
    return data


def test_images_and_labels_are_read_plain_and_compressed(folder: Path) -> None:
    (images, labels), (held_out, _) = read_mnist(folder)
    expected, expected_labels = digits(256, 0)
    assert torch.equal(images[:, 0], expected.to(torch.uint8))
    assert torch.equal(labels, expected_labels)
    assert held_out.shape == (100, 1, 28, 28)
    for file in folder.iterdir():
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert torch.equal(read_mnist(folder)[0][0], images)


def test_the_real_files_are_read() -> None:
    (images, labels), (held_out, answers) = read_mnist(real_data("mnist"))
    assert (images.shape, held_out.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert answers.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"<html>", "begins with 3c 68 74 6d"),
        (idx(torch.zeros(3, 2, 2)), "no idx file of 1 dimension of bytes"),
        (idx(torch.zeros(9))[:-1], "should hold 9 = 9 bytes, but has 8"),
        (idx(torch.zeros(9)) + b"x", "but has 10"),
        (idx(torch.zeros(0)), "should hold 0 = 0 bytes"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "labels"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_idx(file, 1)
    assert str(file) in str(caught.value)


def test_a_cut_archive_and_files_that_do_not_belong_together_are_named(folder: Path) -> None:
    labels = folder / "train-labels-idx1-ubyte.gz"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-9])
    with pytest.raises(UsageError, match=r"train-labels-idx1-ubyte.gz cannot be read"):
        read_mnist(folder)
    labels.write_bytes(gzip.compress(idx(torch.zeros(255))))
    with pytest.raises(UsageError, match=r"has 256 images but .*train-labels-idx1-ubyte.gz has 255 labels"):
        read_mnist(folder)
    labels.write_bytes(gzip.compress(idx(torch.full((256,), 10))))
    with pytest.raises(UsageError, match="has the label 10"):
        read_mnist(folder)
    labels.unlink()
    with pytest.raises(UsageError, match=r"neither train-labels-idx1-ubyte.gz nor train-labels-idx1-ubyte"):
        read_mnist(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": None}, "--data is missing"),
        ({"data": "nowhere"}, "--data nowhere: there is no such folder"),
        ({"limit": 0}, "--limit must be at least 1, not 0"),
        ({"sweep": "rate"}, "--sweep must be batch, not 'rate'"),
        ({"plot": "x.svg"}, "--plot needs --sweep batch"),
        ({"plot": "x.png", "sweep": "batch"}, "a file that ends with .svg"),
        ({"sweep": "batch", "checkpoint_dir": "points"}, "--checkpoint-dir is for one training and --sweep runs many"),
        ({"sweep": "batch", "wandb": "project"}, "--wandb is for one training"),
    ],
)
def test_bad_options_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        MnistConfig(**{"data": str(folder), **options}).check()
    assert message in str(caught.value)


@pytest.mark.slow
def test_ranks_learn_and_agree_with_one(folder: Path, tmp_path: Path) -> None:
    reports = []
    for nproc in ("1", "2"):
        options = [
            "--nproc",
            nproc,
            "--data",
            str(folder),
            "--epochs",
            "6",
            "--batch-size",
            "32",
            "--warmup-steps",
            "8",
        ]
        done = paceline(tmp_path, "train", "mnist", *options, "--json", "out.json", fork="all", OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        reports.append(json.loads((tmp_path / "out.json").read_text()))
    assert all(report["accuracy"] > 0.9 and report["replicas_identical"] for report in reports)
    assert reports[1]["test_loss"] == pytest.approx(reports[0]["test_loss"], rel=1e-3)


@pytest.mark.slow
def test_the_sweep_trains_every_batch_with_and_without_the_rule(folder: Path, tmp_path: Path) -> None:
    options = ["--nproc", "2", "--data", str(folder), "--epochs", "1", "--sweep", "batch", "--json", "out.json"]
    done = paceline(tmp_path, "train", "mnist", *options, "--plot", "out.svg", fork="all", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["batch"], run["is_scaled"]) for run in runs] == [
        (b, rule) for b in BATCHES[:4] for rule in (False, True)
    ]
    assert [run["lr"] for run in runs[:4]] == pytest.approx([0.05, 0.05, 0.05, 0.1])
    assert [run["steps"] for run in runs] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


def test_runs_that_diverged_are_shown_as_such() -> None:
    points = [
        Point(batch, rule, 0.1, None if rule and batch == 64 else 0.9, 5, 1.0)
        for batch in (32, 64)
        for rule in (False, True)
    ]
    assert draw(points).count("diverged") == 1
    column = list(sweep_table(points, 2).columns[3].cells)
    assert column == ["0.9000", "diverged"]
