"""The fitted coefficients that the toolchain ships, read from ``coefficients.toml`` beside this file.

One set per class of kernels and GPU with published tables; and per class one set for the GPUs of a kind of memory,
for those without tables. ``python -m benchmarks.predictor --fit`` writes the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tessera_core.profile.model.physical import NAMES, Chip, Coefficients
from tessera_formats.document import Field, Record, check_record, parse_toml
from tessera_formats.files import read_file

COEFFICIENTS = Path(__file__).with_name("coefficients.toml")

_RANGES = Record((), open=True)
_FIT = Record(tuple(Field(name=name, type="number", meaning="fitted", minimum=0) for name in NAMES))
_SET = Record(
    (
        Field(name="kind", type="string", meaning="class of kernels"),
        Field(name="name", type="string", meaning="device type, or kind of memory"),
        Field(name="members", type="strings", meaning="device types whose tables it was fitted to"),
        Field(name="tables", type="strings", meaning="framework and version of each"),
        Field(name="points", type="integer", meaning="points of those tables", minimum=1),
        Field(name="fitted", type="record", meaning="coefficients", inner=_FIT),
        Field(name="carried", type="number", meaning="share of a residual carried over", minimum=0),
        Field(name="half_width", type="number", meaning="of the logarithm's 90% interval", minimum=0),
        Field(name="half_width_carried", type="number", meaning="with a residual carried over", minimum=0),
        Field(name="scatter_factor", type="number", meaning="half-width over scatter", minimum=0),
        Field(name="range", type="record", meaning="least and largest size seen", inner=_RANGES),
    )
)
_SOURCE = Record(
    (
        Field(name="package", type="string", meaning="package and version of the tables"),
        Field(name="command", type="string", meaning="what wrote the file"),
    )
)
_DOCUMENT = Record(
    (
        Field(name="date", type="string", meaning="day of the fit, YYYY-MM-DD"),
        Field(name="source", type="record", meaning="provenance", inner=_SOURCE),
        Field(name="set", type="records", meaning="fitted sets", inner=_SET),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSet:
    """Coefficients of one class of kernels for one GPU, or for the GPUs of one kind of memory.

    ``carried``: share of another GPU's residual (log of time over physical time) that holds here as well.
    ``half_width``: of the 90% interval of the logarithm, on shapes that no fit saw; ``half_width_carried``: with a
    residual carried over. ``scatter_factor``: the same over the scatter of table points around, where there are any
    (0: never calibrated). ``ranges``: least and largest of each size in the tables.
    """

    kind: str
    name: str
    members: tuple[str, ...]
    tables: tuple[str, ...]
    points: int
    fitted: Coefficients
    carried: float
    half_width: float
    half_width_carried: float
    scatter_factor: float
    ranges: Mapping[str, tuple[float, float]]

    @property
    def own(self) -> bool:
        """Whether it was fitted to one GPU, whose name it bears."""
        return self.members == (self.name,)

    def distance(self, sizes: Mapping[str, float]) -> float:
        """Natural logarithm of the largest factor by which a size lies outside the tables' range; 0: inside."""
        factors = [0.0]
        for name, (least, largest) in self.ranges.items():
            size = max(sizes[name], 0.5)
            factors += [math.log(max(least, 0.5) / size), math.log(size / max(largest, 0.5))]
        return max(factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """All fitted sets. ``package``: of the tables that they were fitted to."""

    date: str
    package: str
    command: str
    sets: tuple[FittedSet, ...]

    def best(self, kind: str, device_type: str, chip: Chip) -> FittedSet:
        """The GPU's own set, a slice's whole GPU's; else that of the memory whose GPUs are most like it.

        Alike is how many bytes a second a multiprocessor has: three times as many with stacked memory (HBM) as
        with GDDR.
        """
        base = device_type.partition("/")[0]
        own = [each for each in self.sets if each.kind == kind and each.own and each.name == base]
        if own:
            return own[0]
        return self.shared(kind, chip)

    def shared(self, kind: str, chip: Chip) -> FittedSet:
        """The set of the kind of memory that ``chip`` seems to have."""
        memory = memory_kind(chip)
        return next(each for each in self.sets if each.kind == kind and each.name == memory)


BETWEEN_BYTES_PER_S = 14e9
"""Bytes per second of one multiprocessor, between GDDR's (5 to 11 GB/s) and HBM's (19 to 52 GB/s)."""


def memory_kind(chip: Chip) -> str:
    """``hbm`` or ``gddr``."""
    return "hbm" if chip.memory_bytes_per_s / chip.multiprocessors > BETWEEN_BYTES_PER_S else "gddr"


@cache
def fits() -> Fits:
    """The sets that the toolchain ships."""
    return read_fits(COEFFICIENTS)


def read_fits(path: Path) -> Fits:
    """Read and check a file of fitted sets; raises ``ArtifactError`` with the place of what is wrong."""
    content = parse_toml(read_file(path), path, "fitted coefficients")
    check_record(content, _DOCUMENT, str(path))
    return Fits(
        date=content["date"],
        package=content["source"]["package"],
        command=content["source"]["command"],
        sets=tuple(_fitted_set(row) for row in content["set"]),
    )


def _fitted_set(row: Mapping[str, Any]) -> FittedSet:
    return FittedSet(
        kind=row["kind"],
        name=row["name"],
        members=tuple(row["members"]),
        tables=tuple(row["tables"]),
        points=row["points"],
        fitted=Coefficients(**{name: float(row["fitted"][name]) for name in NAMES}),
        carried=float(row["carried"]),
        half_width=float(row["half_width"]),
        half_width_carried=float(row["half_width_carried"]),
        scatter_factor=float(row["scatter_factor"]),
        ranges={name: (float(least), float(largest)) for name, (least, largest) in row["range"].items()},
    )


def fits_document(found: Fits) -> dict[str, Any]:
    """A set of fits as the file has it."""
    return {
        "date": found.date,
        "source": {"package": found.package, "command": found.command},
        "set": [
            {
                "kind": each.kind,
                "name": each.name,
                "members": list(each.members),
                "tables": list(each.tables),
                "points": each.points,
                "carried": each.carried,
                "half_width": each.half_width,
                "half_width_carried": each.half_width_carried,
                "scatter_factor": each.scatter_factor,
                "fitted": {name: getattr(each.fitted, name) for name in NAMES},
                "range": {name: list(ends) for name, ends in each.ranges.items()},
            }
            for each in found.sets
        ],
    }
