"""Files for the ranks' output and errors. They are unnamed unless the user gives a log folder."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from typing import IO, Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import to_map

from paceline.errors import UsageError
from paceline.launch.rank.failure_record import FILE
from paceline.launch.rank.printed_lines import PrintedLines


@dataclass(frozen=True)
class Logs:
    """Destinations of the ranks' output: torchrun's options, in torchrun's format.

    ``only`` contains the ranks whose output is shown. ``prefix`` is added to each teed line. With ``prefix_ranks``,
    every printed line starts with its rank.
    """

    folder: str | None = None
    redirects: str = "0"
    tee: str = "0"
    only: frozenset[int] = frozenset()
    prefix: str = ""
    prefix_ranks: bool = False

    def __post_init__(self) -> None:
        for option, value in (("--redirects", self.redirects), ("--tee", self.tee)):
            try:
                Std.from_str(value)
            except ValueError:
                raise UsageError(
                    f"{option}={value!r} is neither 0..3 nor a list such as 0:3,1:1; "
                    "give 1 for stdout, 2 for stderr or 3 for both"
                ) from None
        if self.redirects != "0" and not self.folder:
            raise UsageError(f"--redirects={self.redirects!r} needs a folder; give one with --log-dir")
        if self.folder and os.path.exists(self.folder) and not os.path.isdir(self.folder):
            raise UsageError(f"--log-dir {self.folder!r} is a file; name a folder")


class RankFiles(LogsSpecs):
    """Creates the files of each start: an error file for each rank, and the user's logs.

    On Linux an unnamed file is passed as ``/proc/<launcher>/fd/<n>``, so that no file is left behind, even after ``kill
    -9``. On other systems, temporary files are removed when the job ends.

    Args:
        logs: destinations of the output.
        printed: prints output without any other destination; None if ranks inherit the launcher's streams.
    """

    def __init__(self, logs: Logs, printed: PrintedLines | None = None) -> None:
        redirects, tee = Std.from_str(logs.redirects), Std.from_str(logs.tee)
        shown = set(logs.only) or None
        super().__init__(logs.folder, redirects, tee, shown)
        self._named = DefaultLogsSpecs(logs.folder, redirects, tee, shown) if logs.folder else None
        self.prefix = logs.prefix or None
        self._printed = printed
        self._open: list[IO[Any]] = []
        self.errors: dict[int, str] = {}
        self.teed: set[int] = set()
        """Ranks whose stderr torchelastic shows, with their tracebacks."""

    @contextmanager
    def teeing(self) -> Iterator[None]:
        """Make torchelastic copy logs to channels, because the launcher's own streams may block. Not thread-safe.

        Call this for each start, because it closes the files of the previous one.
        """
        self.close()
        channels = self._printed.open(None, [1, 2]) if self._printed is not None and self._tee != Std.NONE else {}
        raw = {number: FileIO(channel.writer, "w", closefd=False) for number, channel in channels.items()}
        out, err = (TextIOWrapper(raw[n], "utf-8", write_through=True) if n in raw else None for n in (1, 2))
        with redirect_stdout(out or sys.stdout), redirect_stderr(err or sys.stderr):
            yield

    @property
    def root_log_dir(self) -> str:
        """The user's log folder, or an empty string."""
        return str(self._root_log_dir or "")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the files of a start."""
        if self._named is not None:
            dest = self._named.reify(envs)
        else:
            dest = self._unnamed(len(envs))
            for rank, environment in envs.items():
                environment[FILE] = dest.error_files[rank]
        self.errors, self.teed = dest.error_files, set(dest.tee_stderrs)
        if self._printed is not None:
            for rank in envs:
                streams = {number: paths for number, paths in ((1, dest.stdouts), (2, dest.stderrs)) if not paths[rank]}
                for number, channel in self._printed.open(rank, streams).items():
                    streams[number][rank] = f"/dev/fd/{channel.writer}"
        return dest

    def _unnamed(self, size: int) -> LogsDest:
        dest = LogsDest(dict.fromkeys(range(size), ""), dict.fromkeys(range(size), ""))
        tee = to_map(self._tee, size)
        for rank in range(size):
            dest.error_files[rank] = self._slot(memory=True)
            shown = not self._local_ranks_filter or rank in self._local_ranks_filter
            for stream, paths, tailed in (
                (Std.OUT, dest.stdouts, dest.tee_stdouts),
                (Std.ERR, dest.stderrs, dest.tee_stderrs),
            ):
                if not shown:
                    paths[rank] = os.devnull
                elif tee[rank] & stream:
                    paths[rank] = tailed[rank] = self._slot(memory=False)
        return dest

    def _slot(self, memory: bool) -> str:
        """Return the path of a new empty file. With `memory`, writes succeed even if the disk is full."""
        file: IO[Any]
        if sys.platform == "linux":
            file = os.fdopen(os.memfd_create("paceline"), "w") if memory else tempfile.TemporaryFile()  # noqa: SIM115
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile(prefix="paceline-")  # noqa: SIM115
            path = file.name
        self._open.append(file)
        return path

    def close(self) -> None:
        """Close the unnamed files."""
        for file in self._open:
            file.close()
        self._open = []
        if self._printed is not None:
            self._printed.end_start()
