"""Tables: parts per rank, operators, memory, and the figures of the device."""

from __future__ import annotations

from html import escape

from paceline.core.output.wording import nbytes
from paceline.profiler.page.elements import Section, folded, metered, table
from paceline.profiler.report import step_parts
from paceline.profiler.report.formatting import ms, percent, rank_parts, share
from paceline.profiler.report.report import Operator, Report

FIRST_OPERATORS, MOST_OPERATORS = 12, 60
"""Operators that are shown at once, and after a click; the others are in report.json."""
DEVICE = {
    "utilization": ("GPU utilization", "time in which a kernel ran"),
    "sm_efficiency": ("SM efficiency", "multiprocessors with work, in the whole time"),
    "occupancy": ("occupancy", "warps on a multiprocessor, of those that it can hold"),
    "tensor_cores": ("tensor cores", "kernel time on matrix units"),
}


def parts(report: Report) -> str:
    """Return the mean step of each rank as figures."""
    heads = ["rank", "host", "device", "threads", "cores", "step", *(step_parts.NAMES[part] for part in step_parts.ALL)]
    if report.collecting:
        heads.append("of it garbage collection")
    rows = []
    for at, info in enumerate(report.ranks):
        row = rank_parts(report, at)
        figures = ["no steps", *("–" for _ in step_parts.ALL)]
        if row is not None:
            total = sum(row.values()) or 1.0
            figures = [
                ms(total),
                *(f"{ms(row[part])}{_small_share(report, row[part] / total)}" for part in step_parts.ALL),
            ]
        about = [str(info.rank), escape(info.host), escape(info.device), f"{info.threads}", f"{info.cores}"]
        rows.append([*about, *figures, *(ms(seconds) for seconds in report.collecting[at : at + 1])])
    return table(heads, rows, "Parts of the step on each rank", words=3)


def _small_share(report: Report, value: float) -> str:
    return f"<small>{percent(value)}</small>" if report.is_firm else ""


def operators(report: Report) -> Section | None:
    """List the operators that took most, with the share of all-reduces."""
    if not report.operators:
        return None
    found = sorted(report.operators, key=lambda one: -one.seconds)
    reduced = f"<b>{percent(share(report, 'allreduce'))}</b> of the time in which they or computing run."
    all_reduces = f"All-reduces take {reduced}" if report.is_firm else ""
    body = (
        '<p class="reading">The mean of a step on a rank, without the operators that each one called. '
        f"{all_reduces}</p>{_operator_table(found[:FIRST_OPERATORS])}"
    )
    if len(found) > FIRST_OPERATORS:
        rest = found[FIRST_OPERATORS:MOST_OPERATORS]
        body += folded(f"{len(rest)} more of {len(found)} operators", _operator_table(rest))
    return Section("operators", "Operators", "Operators", body)


def _operator_table(found: list[Operator]) -> str:
    rows = []
    for one in found:
        name = f"<code>{escape(one.name)}</code>"
        rows.append([name, f"{one.calls:,.4g}", ms(one.seconds), metered(percent(one.share), one.share)])
    return table(["operator", "calls", "time", "share"], rows, "Operators")


def memory(report: Report) -> Section | None:
    """Show the contents of rank 0's memory, and the peak of each rank."""
    peaks = {one.rank: one.peak_memory for one in report.ranks if one.peak_memory is not None}
    if not report.memory and not peaks:
        return None
    body = ""
    if report.memory:
        largest = max(report.memory.values()) or 1
        rows = [
            [escape(name.replace("_", " ")), metered(nbytes(size), size / largest)]
            for name, size in report.memory.items()
        ]
        body += '<p class="reading">Rank 0:</p>' + table(["", "bytes"], rows, "Memory of rank 0")
    if peaks:
        top, low = max(peaks, key=lambda rank: peaks[rank]), min(peaks, key=lambda rank: peaks[rank])
        said = f"The peak is {nbytes(peaks[top])} on rank {top}"
        said += f", and {nbytes(peaks[low])} on rank {low}, where it is lowest." if low != top else "."
        body += f"<p>{said}</p>"
        rows = [[f"{rank}", metered(nbytes(size), size / peaks[top])] for rank, size in peaks.items()]
        body += folded("Each rank's peak", table(["rank", "peak"], rows, "Peak memory of each rank"))
    return Section("memory", "Memory", "Memory", body)


def device(report: Report) -> Section | None:
    """Show how much of the GPUs was used."""
    if not report.device_figures:
        return None
    rows = []
    for name, value in report.device_figures.items():
        title, meaning = DEVICE.get(name, (name.replace("_", " "), ""))
        rows.append([f"{escape(title)}<small>{escape(meaning)}</small>", metered(percent(value), value)])
    return Section(
        "device", "Device", "Device", table(["", "mean of the ranks"], rows, "How much of the device was used")
    )
