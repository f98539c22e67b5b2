"""The large-batch benchmark, on scikit-learn's digits in MNIST's files, and its refusal of a folder without them."""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from test_docs import ROOT

from processes import paceline

SCRIPT = ROOT / "benchmarks" / "batch_sweep.py"


def write_idx(folder: Path, part: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write images, (n, 28, 28), and labels as MNIST's two files."""
    header = struct.pack(">4i", 0x803, *images.shape)
    (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, len(labels)) + labels.tobytes())


@pytest.mark.slow
def test_the_sweep_trains_every_batch_with_and_without_the_rule(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.zeros((len(digits.images), 28, 28), np.uint8)
    images[:, 2:26, 2:26] = np.kron(digits.images, np.ones((3, 3))) * 15
    labels = digits.target.astype(np.uint8)
    write_idx(tmp_path, "train", images[:200], labels[:200])
    write_idx(tmp_path, "t10k", images[200:300], labels[200:300])
    for name in ("batch_sweep.py", "dated_results.py"):  # results are kept beside the script
        shutil.copy(SCRIPT.with_name(name), tmp_path)

    options = ("--data", ".", "--plot", "sweep.svg")
    done = paceline(tmp_path, "run", "--nproc", "2", "batch_sweep.py", *options, fork="all", OMP_NUM_THREADS="1")

    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"batch {batch:>5}, ") for batch in (32, 64, 128, 256)] == [2, 2, 2, 0]
    assert "<svg" in (tmp_path / "sweep.svg").read_text("utf-8")
    assert len(list((tmp_path / "results").glob("*-mnist-batch-sweep.json"))) == 1


def test_a_folder_without_the_files_is_refused_before_the_work_starts(tmp_path: Path) -> None:
    done = paceline(tmp_path, program=(str(SCRIPT), "--data", str(tmp_path)), fork="all")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"{tmp_path} has no train-images-idx3-ubyte" in done.stderr
