"""Predicted goodput against a replay of a trace of host failures.

    python benchmarks/goodput_replay.py infinitehbd.csv

The trace (InfiniteHBD, arXiv 2502.03885) has the fault_start and fault_end events of 400 servers over 348 days. Jobs of
several sizes run on servers drawn at random. A job stops at each fault of its servers, loses everything since its last
save, and takes a while to restart. Two replays:

    same    the faulty server counts as repaired after the restart, so its later faults also stop the job
    spare   a working spare server replaces the faulty one until no spare is left

The prediction knows the number of servers, the times of a save and of a restart, and a failure rate: the default, which
is another cluster's, or the one of the jobs themselves.
"""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from harness import parser_of, report
from paceline.checkpoint.due_saves import DAY_S
from paceline.planner.goodput import RESTART_S, goodput

SERVERS, DRAWS = 400, 40
SIZES, SAVES_S, INTERVALS_S = (1, 8, 50, 100, 200, 350, 400), (1.0, 30.0, 300.0), (None, 600.0, 3600.0, 10800.0)


class Event(NamedTuple):
    """A fault of a server begins or ends."""

    time: float
    server: int
    begins: bool


def events_of(path: str) -> list[Event]:
    """Return the events of a trace in order."""
    with Path(path).open() as file:
        rows = list(csv.DictReader(file))
    return sorted(Event(DAY_S * float(row["day"]), int(row["node"]), row["event"] == "fault_start") for row in rows)


def stops(events: Sequence[Event], members: set[int], draw: random.Random, has_spares: bool) -> Iterator[float]:
    """Yield the times when a job on `members` stops."""
    faults = dict.fromkeys(range(SERVERS), 0)
    for time, server, begins in events:
        faults[server] += 1 if begins else -1
        if not begins or server not in members:
            continue
        yield time
        free = [other for other, count in faults.items() if not count and other not in members]
        if has_spares and free:
            members = members - {server} | {draw.choice(free)}


def replayed(stopped: Sequence[float], end: float, interval: float, save_s: float) -> float:
    """Return the useful share of the time until `end`."""
    useful, begin = 0.0, 0.0
    for stop in [*stopped, end]:
        useful += max(0.0, stop - begin) // (interval + save_s) * interval
        begin = stop + RESTART_S
    return useful / end


def rows_of(hosts: int, has_spares: bool, events: Sequence[Event], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the results of jobs on `hosts` servers."""
    end = events[-1].time
    jobs = [set(draw.sample(range(SERVERS), hosts)) for _ in range(DRAWS if hosts < SERVERS else 1)]
    stopped = [list(stops(events, job, draw, has_spares)) for job in jobs]
    rate = statistics.fmean(len(set(times)) for times in stopped) / hosts / (end / DAY_S)
    for save_s in SAVES_S:
        for chosen in INTERVALS_S:
            predicted = goodput(hosts, save_s, interval_s=chosen)
            useful = statistics.fmean(replayed(times, end, predicted.interval_s, save_s) for times in stopped)
            informed = goodput(hosts, save_s, failures_per_host_day=rate, interval_s=predicted.interval_s)
            yield {
                "servers": hosts,
                "replay": "spare" if has_spares else "same",
                "stops_per_server_and_day": round(rate, 5),
                "save_s": save_s,
                "interval_s": round(predicted.interval_s),
                "is_best_interval": chosen is None,
                "replayed": round(useful, 4),
                "predicted": round(predicted.useful, 4),
                "predicted_from_own_rate": round(informed.useful, 4),
            }


def largest_errors(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the largest errors of the predictions, in points."""
    names = ("predicted", "predicted_from_own_rate")
    return {name: round(max(100 * abs(row[name] - row["replayed"]) for row in rows), 2) for name in names}


def main() -> None:
    parser = parser_of(__doc__, rounds=None)
    parser.add_argument("trace", help="the CSV file of the trace")
    events, draw, rows = events_of(parser.parse_args().trace), random.Random(0), []
    table = Table("servers", "replay", "intervals", "largest error, points", "with the job's own rate")
    for has_spares in (False, True):
        for hosts in SIZES:
            if has_spares and hosts > 0.9 * SERVERS:
                continue
            made = list(rows_of(hosts, has_spares, events, draw))
            rows += made
            for intervals, kept in (("all", made), ("best", [row for row in made if row["is_best_interval"]])):
                errors = map(str, largest_errors(kept).values())
                table.add_row(str(hosts), made[0]["replay"], intervals, *errors)
    report(table, "goodput", {"restart_s": RESTART_S, "largest_errors": largest_errors(rows), "rows": rows}, ranks=1)


if __name__ == "__main__":
    main()
