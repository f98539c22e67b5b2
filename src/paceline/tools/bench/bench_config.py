"""The options of ``paceline bench collectives``, checked before a rank starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from paceline.core.output.charts import check_chart
from paceline.core.output.files import check_file
from paceline.errors import UsageError
from paceline.tools.shared.program import ProgramConfig

OPS = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
BACKENDS = ("algorithms", "gloo", "paceline")
SIZES = "1K,4K,16K,64K,256K,1M,4M,25M"
ELEMENT = 4
"""Bytes of a float32, the only dtype that is measured."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
COPIES = 4
"""Tensors of the size that a rank may hold at once: three variants' and a backend's own."""


@dataclass(frozen=True)
class BenchConfig(ProgramConfig):
    """The options of ``paceline bench collectives``."""

    sizes: list[int]
    """Bytes of the whole tensor."""
    ops: list[str] = field(default_factory=lambda: ["all_reduce"])
    backends: list[str] = field(default_factory=lambda: list(BACKENDS))
    json: str | None = None
    plot: str | None = None

    def check(self, ranks: int) -> None:
        """Refuse options that cannot work on `ranks` ranks."""
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if max(self.sizes) * ranks * COPIES > available:
            raise UsageError(
                f"--sizes: {max(self.sizes)} bytes on {ranks} ranks need {COPIES} times that a rank, and this host has "
                f"{available // 2**30} GiB of memory; give smaller sizes"
            )
        check_file("--json", self.json)
        check_chart("--plot", self.plot)


def parse_sizes(text: str) -> list[int]:
    """Read sizes in bytes, and return them in ascending order: ``"4K,1M"`` is ``[4096, 1048576]``."""
    sizes = set()
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+)\s*([KMG]?)(I?B)?", part.strip().upper())
        if matched is None:
            raise UsageError(f"--sizes: {part.strip()!r} is no size; give bytes with K, M or G, such as 4K,1M,25M")
        size = int(matched[1]) * UNITS[matched[2]]
        if size < ELEMENT or size % ELEMENT:
            raise UsageError(
                f"--sizes: {part.strip()!r} is no whole number of float32, which take {ELEMENT} bytes each"
            )
        sizes.add(size)
    return sorted(sizes)


def parse_names(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Read the names in `text`, separated by commas; returns each once, in the order of `known`."""
    names = [part.strip().replace("-", "_") for part in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: {name!r} is unknown; choose among {', '.join(known)}")
    return [name for name in known if name in names]
