"""Published rows become jobs, the fit recovers known constants, and cross-validation leaves sources out."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from insides import ASSUMED, GBIT, MEASURED, PUBLISHED, SPEEDS, Calibration, device
from paceline import UsageError
from published.fit import Columns, Fits
from published.rows import COLUMNS, Row, read
from published.speeds import fitted_speeds, read_pairs, shares_inside
from published.validation import Checked, by_source, covered, cross_validate, score
from published_scaling import report_validation

RESNET = {
    "source": "somebody",
    "model": "ResNet-50",
    "params_millions": "25.6",
    "precision": "FP32",
    "per_device_batch": "128",
    "device": "V100",
    "intra_link": "NVLink2",
    "inter_link": "InfiniBand 100 Gb/s",
    "devices": "16",
    "devices_per_node": "8",
    "throughput": "5600",
    "unit": "images/s",
    "single_device_throughput": "400",
    "efficiency": "0.875",
    "notes": "PyTorch DDP",
}
REAL = Path(__file__).parents[4] / "shared" / "data" / "scaling_published.csv"


def write(path: Path, rows: Sequence[dict[str, str]], columns: Sequence[str] = COLUMNS) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def row(tmp_path: Path, **values: str) -> Row:
    rows, skipped = read(write(tmp_path / "one.csv", [RESNET | values]))
    assert (len(rows), skipped) == (1, 0)
    return rows[0]


# -- one row -----------------------------------------------------------------------------------------------------------


def test_a_row_becomes_the_described_job(tmp_path: Path) -> None:
    found = row(tmp_path)
    work, cluster = found.job.workload, found.job.cluster
    assert work.compute_s == pytest.approx(128 / 400)
    assert work.nbytes == pytest.approx(4 * 25.6e6, rel=1e-6)
    assert (cluster.devices_per_host, cluster.inside.name, cluster.between.kind) == (8, "nvlink2", "rdma")
    assert cluster.between.bytes_per_s == 100 * GBIT
    assert (found.devices, found.baseline, found.efficiency) == (16, 1, 0.875)


@pytest.mark.parametrize(
    ("values", "seconds", "nbytes"),
    [
        ({"notes": "grad_accum=4"}, 4 * 0.32, 102.4e6),
        ({"precision": "FP16"}, 0.32, 51.2e6),
        ({"precision": "AMP/FP16"}, 0.32, 102.4e6),  # autocast keeps gradients in float32
        ({"precision": "FP16 or FP32 not in the excerpt"}, 0.32, 102.4e6),
        ({"params_millions": ""}, 0.32, 102.4e6),
        ({"model": "Some 7B", "params_millions": "", "notes": "FSDP"}, 0.32, 21e9),
        ({"unit": "tokens/s", "notes": "seq_len=10"}, 3.2, 102.4e6),
        ({"single_device_throughput": "", "notes": "baseline_devices=8; baseline_throughput=3200"}, 0.32, 102.4e6),
        ({"unit": "s (lower is better)", "single_device_throughput": "40", "notes": "200 steps"}, 0.2, 102.4e6),
        ({"single_device_throughput": "", "per_device_batch": ""}, 0.3, 102.4e6),
        ({"single_device_throughput": ""}, 128 * 3 * 8.2e9 / device("v100").flops("fp32", SPEEDS["convnet"]), 102.4e6),
        ({"unit": "see README"}, 128 * 3 * 8.2e9 / device("v100").flops("fp32", SPEEDS["convnet"]), 102.4e6),
    ],
)
def test_step_and_bytes_follow_the_row(tmp_path: Path, values: dict[str, str], seconds: float, nbytes: float) -> None:
    work = row(tmp_path, **values).job.workload
    assert work.compute_s == pytest.approx(seconds)
    assert work.nbytes == pytest.approx(nbytes, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "inside", "kind", "gbit"),
    [
        ({"notes": "TCP Horovod"}, "nvlink2", "tcp", 100),
        ({"notes": "RDMA Horovod"}, "nvlink2", "rdma", 100),
        ({"inter_link": "AWS p3.16xlarge TCP"}, "nvlink2", "tcp", 5),
        ({"inter_link": "RDMA 50 Gb/s per GPU"}, "nvlink2", "rdma", 400),
        ({"notes": "PaddlePaddle 1.8"}, "pcie3", "rdma", 100),
        ({"notes": "PaddlePaddle 2.1"}, "nvlink2", "rdma", 100),
        ({"notes": "TensorFlow with Horovod, replicated"}, "nvlink2", "rdma", 100),
        ({"device": "unheard of", "intra_link": ""}, "pcie3", "rdma", 100),
    ],
)
def test_links_follow_from_the_row(tmp_path: Path, values: dict[str, str], inside: str, kind: str, gbit: float) -> None:
    cluster = row(tmp_path, **values).job.cluster
    assert (cluster.inside.name, cluster.between.kind) == (inside, kind)
    assert cluster.between.bytes_per_s == pytest.approx(gbit * GBIT)


def test_the_reported_efficiency_and_throughput_do_not_change_the_prediction(tmp_path: Path) -> None:
    assert row(tmp_path).predict() == row(tmp_path, efficiency="0.1", throughput="640").predict()


def test_an_efficiency_relative_to_several_devices_is_predicted_relative_to_them(tmp_path: Path) -> None:
    alone, relative = row(tmp_path).predict(), row(tmp_path, notes="PyTorch DDP; baseline_devices=8").predict()
    assert relative.efficiency > alone.efficiency
    assert row(tmp_path, devices="8", notes="baseline_devices=8").predict().efficiency == 1


# -- wrong files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"efficiency": "87.5"}, r"rows.csv, line 3 \(ResNet-50, 16 × V100\): efficiency=87.5 is above 1.5"),
        ({"efficiency": "good"}, r"line 3 .*: efficiency=good is not a positive number"),
        ({"devices": "-1"}, r"line 3 .*: devices=-1 is not a positive number"),
        ({"devices_per_node": "nan"}, r"line 3 .*: devices_per_node=nan is not a positive number"),
        ({"devices_per_node": "0.5"}, r"line 3 .*: devices_per_node=0.5 is not a whole number"),
    ],
)
def test_a_wrong_value_names_its_row(tmp_path: Path, values: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(write(tmp_path / "rows.csv", [RESNET, RESNET | values]))


# -- the fit -----------------------------------------------------------------------------------------------------------

TRUTH = Calibration(inside=3.0, between=1.4, contention=0.03, jitter_s=0.0005)


def synthetic(tmp_path: Path, sources: int) -> list[Row]:
    """Return rows with the efficiencies that :data:`TRUTH` predicts."""
    texts = [
        RESNET
        | {
            "source": f"source {source}",
            "params_millions": str(20 * 2**source),
            "precision": ("FP32", "AMP/FP16")[source % 2],
            "inter_link": ("InfiniBand 100 Gb/s", "25 Gbit/s TCP")[source // 2 % 2],
            "intra_link": ("NVLink2", "PCIe")[source % 2],
            "single_device_throughput": str(150 * (1 + source)),
            "devices": str(devices),
            "notes": "baseline_devices=2" if source == 3 else "",
        }
        for source in range(sources)
        for devices in (2, 4, 8, 16, 32, 64, 256)
    ]
    rows, _ = read(write(tmp_path / "synthetic.csv", texts))
    return [replace(one, efficiency=one.predict(TRUTH).efficiency) for one in rows]


def test_columns_and_the_simulation_of_each_row_agree(tmp_path: Path) -> None:
    rows = synthetic(tmp_path, 6)
    for calibration in (PUBLISHED, TRUTH):
        expected = [one.predict(calibration).efficiency for one in rows]
        assert Columns(rows).predict(calibration).tolist() == pytest.approx(expected, abs=1e-9)


def test_the_fit_recovers_known_constants(tmp_path: Path) -> None:
    rows = synthetic(tmp_path, 6)
    found = Fits(rows).without()
    before, after = (
        max(abs(one.predict(constants).efficiency - one.efficiency) for one in rows) for constants in (PUBLISHED, found)
    )
    assert after < 0.03 < before
    assert found.inside == pytest.approx(TRUTH.inside, rel=0.25)


# -- cross-validation --------------------------------------------------------------------------------------------------


def test_an_unknown_source_is_predicted_with_the_shipped_constants(tmp_path: Path) -> None:
    rows = synthetic(tmp_path, 3)
    checked = [one for source, _ in cross_validate(rows) for one in source]
    assert [one.made for one in checked] == [one.shipped for one in checked] == [one.predict() for one in rows]


def test_a_source_of_the_calibration_is_predicted_without_its_own_rows(tmp_path: Path) -> None:
    """Efficiencies of the tested source change only the other source's prediction."""
    torch.set_num_threads(1)
    known = {"source 0": "RaySGD docs", "source 1": "Horovod issue #779"}
    rows = [replace(one, source=known[one.source]) for one in synthetic(tmp_path, 2)]
    changed = [replace(one, efficiency=0.5) if one.source == "RaySGD docs" else one for one in rows]

    def predicted(given: list[Row]) -> dict[str, list[tuple[float, float, float]]]:
        return {
            checked[0].row.source: [(one.made.efficiency, one.made.low, one.made.high) for one in checked]
            for checked, _ in cross_validate(given)
        }

    before, after = predicted(rows), predicted(changed)
    assert before["RaySGD docs"] == after["RaySGD docs"]
    assert before["Horovod issue #779"] != after["Horovod issue #779"]


def test_scores_weigh_rows_or_sources_equally(tmp_path: Path) -> None:
    one = row(tmp_path)

    def checked(source: str, error: float) -> Checked:
        low, high = (0.0, 0.1) if source == "small" else (0.0, 2.0)
        made = replace(one.predict(), efficiency=one.efficiency + error, low=low, high=high)
        return Checked(replace(one, source=source), made, made, 0.9, None)

    rows = [*(checked("large", 0.01) for _ in range(9)), checked("small", -0.2)]
    result = score(rows, [entry.made.efficiency for entry in rows])
    assert (result.median, result.p90) == (pytest.approx(1), pytest.approx(1))
    assert (result.sources_median, result.sources_p90) == (pytest.approx(1), pytest.approx(20))
    small, large = by_source(rows)
    assert (small.source, large.source) == ("small", "large")
    assert (small.is_best, large.is_best) == (False, True)
    assert (small.bias, small.rows) == (pytest.approx(-20), 1)
    assert [entry.covered for entry in (small, large)] == [0, 1]


@pytest.mark.skipif(not REAL.exists(), reason="the published rows are not part of the repository")
@pytest.mark.slow
def test_the_published_rows_are_predicted_as_documented() -> None:
    torch.set_num_threads(1)
    rows, skipped = read(str(REAL))
    assert (len(rows), skipped) == (813, 14)
    measured, assumed = ([one for pair in cross_validate(rows) for one in pair[place]] for place in (0, 1))
    result = score(measured, [one.made.efficiency for one in measured])
    assert max(result.median, result.sources_median) <= 4.5
    assert max(result.p90, result.sources_p90) <= 15
    sources = by_source(measured)
    assert sum(entry.is_best for entry in sources) >= 0.75 * len(sources)
    assert sum(entry.model < entry.rule for entry in by_source(assumed)) >= len(sources) * 2 / 3
    for shares in (covered(measured), covered(assumed)):
        assert all(share is not None and 0.75 <= share <= 0.87 for share in shares.values())
    fits = Fits(rows)
    assert vars(fits.without()) == {name: pytest.approx(value, rel=0.02) for name, value in vars(PUBLISHED).items()}
    for speed, shipped in (("measured", MEASURED), ("assumed", ASSUMED)):
        assert [pytest.approx(entry, abs=0.02) for entry in fits.intervals(speed)] == list(shipped)


def test_the_speeds_of_one_device_are_those_that_were_published() -> None:
    pairs = read_pairs()
    assert fitted_speeds(pairs) == SPEEDS
    assert 0.75 <= shares_inside(pairs, None)["held_out"] <= 0.85


def test_a_validation_is_printed_drawn_and_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [RESNET, RESNET | {"source": "nobody", "efficiency": "0.9"}, RESNET | {"notes": "flag=suspect"}]
    file, plot = write(tmp_path / "rows.csv", rows), tmp_path / "plot.svg"
    report_validation(file, False, str(plot))
    printed = capsys.readouterr().out
    assert (
        "The file; 1 without an efficiency or a device, or with flag=suspect, left out: 2 rows of 2 sources." in printed
    )
    assert "rule of thumb" in printed
    assert "nobody" in plot.read_text("utf-8")
    report_validation(file, True, None)
    checked = json.loads(capsys.readouterr().out)
    assert {entry["source"] for entry in checked["sources"]} == {"somebody", "nobody"}
    assert checked["errors"]["rule of thumb"]["p90"] == pytest.approx(2.5)
