"""Lookup of devices and links by name or description; errors for unknown ones list the known names."""

from __future__ import annotations

import re

import pytest

from insides import (
    GBIT,
    SPEEDS,
    UNKNOWN,
    between_link,
    described_step,
    device,
    device_or_unknown,
    inside_link,
    links,
    table,
)
from paceline import UsageError


@pytest.mark.parametrize("name", ["devices", "links"])
def test_entries_have_a_source_and_a_date(name: str) -> None:
    for row in table(name):
        assert row["source"], row
        assert re.fullmatch(r"20\d\d-\d\d", row["date"]), row


def test_devices_are_found_by_name_and_have_links() -> None:
    for row in table("devices"):
        kind = device(row["name"])
        assert kind.name == row["name"]
        assert list(kind.peaks.values()) == sorted(kind.peaks.values())
        assert kind.peaks["fp32"] / 500 < kind.memory < kind.peaks["fp32"]
        assert kind.capacity == float(row["memory_gib"]) * 2**30
        for name in (kind.nvlink, kind.pcie):
            assert not name or inside_link(name, UNKNOWN).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA RTX A1000", "unknown"),
        ("8xA100", "a100"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("A10G", "a10"),
        ("T4", "t4"),
    ],
)
def test_device_is_recognized_by_its_driver_name(text: str, name: str) -> None:
    assert device_or_unknown(text).name == name


def test_device_can_be_described_by_its_peak() -> None:
    assert device("400tflops").peak("bf16") == 400e12
    assert device("37.5 TFLOPS", "fp32").peak("fp32") == 37.5e12


def test_unknown_device_error_lists_known_devices_and_flags() -> None:
    with pytest.raises(UsageError, match=r"unknown device 'abacus'; known .*h100, a100.*--device 400tflops --links"):
        device("abacus")
    assert device_or_unknown("abacus") is UNKNOWN


def test_peak_depends_on_the_precision() -> None:
    kind = device("v100")
    assert (kind.peak("fp32"), kind.peak("fp16"), kind.half) == (15.7e12, 125e12, "fp16")
    with pytest.raises(UsageError, match="--precision bf16: v100 does not compute in bf16; give fp32 or fp16"):
        kind.peak("bf16")
    assert device("a100").peak("tf32") == 8 * device("a100").peak("fp32")
    assert device("k80").half is None


def test_capacity_is_that_of_the_named_variant() -> None:
    assert (device("a100-40gb").capacity, device("a100").capacity) == (40 * 2**30, 80 * 2**30)


def test_lower_precision_speeds_up_by_the_calibrated_power() -> None:
    kind, speed = device("v100"), SPEEDS["transformer"]
    ratio = kind.flops("fp16", speed) / kind.flops("fp32", speed)
    assert ratio == pytest.approx((125 / 15.7) ** speed.exponent)


@pytest.mark.parametrize(
    ("text", "name", "gbit"),
    [
        ("", "v100", 100),
        ("", "h100", 3200),
        ("25gbit", "v100", 25),
        ("8x200gbit", "v100", 1600),
        ("edr", "h100", 100),
        ("InfiniBand 100 Gb/s (4X EDR, one HCA per node)", "v100", 100),
        ("4 x 25 GbE", "v100", 100),
        ("8x InfiniBand HDR 200Gb/s", "v100", 1600),
        ("4 x EDR", "v100", 400),
        ("1.6 Tbps", "v100", 1600),
        ("12.5 GB/s", "v100", 100),
        ("AWS p3dn.24xlarge network (speed not stated)", "v100", 100),
    ],
)
def test_host_link_speed_is_the_given_or_the_usual_one(text: str, name: str, gbit: float) -> None:
    link = between_link(text, device(name))
    assert link.bytes_per_s == pytest.approx(gbit * GBIT)
    assert link.kind == "rdma"


def test_tcp_has_more_latency_than_rdma() -> None:
    assert between_link("25gbit-tcp", device("v100")).kind == "tcp"
    assert between_link("25gbit-tcp", device("v100")).latency_s > between_link("25gbit", device("v100")).latency_s


@pytest.mark.parametrize(
    ("text", "name", "link", "kind"),
    [
        ("", "h100", "nvlink4", "peer"),
        ("", "a6000", "pcie4", "peer"),
        ("", "rtx3090", "pcie4", "staged"),  # GeForce copies through host memory
        ("nvlink", "v100", "nvlink2", "peer"),
        ("nvlink", "rtx3090", "nvlink-bridge", "peer"),
        ("pcie", "a100", "pcie4", "peer"),
        ("PCIe (NVLink disabled)", "v100", "pcie3", "peer"),
    ],
)
def test_local_link_is_the_named_one_or_the_fastest_of_the_device(text: str, name: str, link: str, kind: str) -> None:
    inside = inside_link(text, device(name))
    assert (inside.name, inside.kind) == (link, kind)


@pytest.mark.parametrize(
    ("text", "inside", "between"),
    [
        ("", "nvlink4", "3200gbit"),
        ("pcie5", "pcie5", "3200gbit"),
        ("400gbit", "nvlink4", "400gbit"),
        ("nvlink4,ndr", "nvlink4", "ndr"),
        (",25gbit-tcp", "nvlink4", "25gbit-tcp"),
    ],
)
def test_user_may_name_one_link_or_both(text: str, inside: str, between: str) -> None:
    chosen = links(text, device("h100"))
    assert [link.name for link in chosen] == [inside, between]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("nvlink9,100gbit", "h100", "'nvlink9' is unknown; write INSIDE,BETWEEN, where INSIDE is one of nvlink5"),
        ("100gbit,nvlink4", "h100", "'100gbit' connects hosts, not devices"),
        ("nvlink4,nvlink4", "h100", "'nvlink4' connects devices, not hosts"),
        ("nvlink4,fast", "h100", "'fast' is unknown; .*such as 100gbit"),
        ("nvlink3,100gbit", "h100", "contradicts --device h100, which has nvlink4"),
        ("nvlink2,100gbit", "t4", "contradicts --device t4, which has no NVLink"),
    ],
)
def test_invalid_or_contradictory_links_are_refused(text: str, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        links(text, device(name))
    assert "\n" not in str(caught.value)


def test_described_step_takes_the_given_time() -> None:
    work = described_step(1e9, 0.1, device("400tflops"), 16)
    assert work.compute_s == pytest.approx(0.1)
    assert work.nbytes == pytest.approx(4e9, rel=1e-6)
    assert 0 < work.optimizer_s <= work.compute_s / 2
