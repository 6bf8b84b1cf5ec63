"""The dated catalogue of device types: what each can hold and how fast it is said, or was seen, to be.

``catalogue.toml`` beside this file holds the figures with their kind (datasheet or measured) and source; users add
types or change figures in files of the same schema. No figure is repeated in code.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tessera_core.profile.catalogue_file import CatalogueContent, Figure, read_content
from tessera_core.profile.precision import PRECISIONS
from tessera_core.profile.type_name import TypeName
from tessera_formats.errors import ArtifactError, InputError

CATALOGUE = Path(__file__).with_name("catalogue.toml")

USER_FILES = "TESSERA_CATALOGUE"
"""Environment variable that names files of users' entries, separated as in PATH."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates of one kind and source: bytes per second, and floating-point operations per second by dtype."""

    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str

    def share(self, compute: float, bandwidth: float) -> Peaks:
        """What a part of the GPU reaches."""
        return replace(
            self,
            memory_bytes_per_s=self.memory_bytes_per_s * bandwidth,
            flops_per_s={dtype: rate * compute for dtype, rate in self.flops_per_s.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One catalogued device type, or a slice of one, or one that computes products in another dtype.

    ``name``: in full. ``base``: the catalogue's name; memory, L2 and links are the base's. ``dtype``: in which matrix
    products are computed; None: the model's own. ``whole_multiprocessors``: of the base; a slice's rates are parts of
    the base's. ``figures``: where each figure of the base comes from, by its place (``datasheet.memory_gbyte_per_s``).
    ``reported``: names under which CUDA reports it.
    ``floor_per``: whether each kernel or each op pays ``pointwise_floor_us`` or ``other_floor_us``.
    ``substitute``: dtype -> the dtype that stands in for it. ``peer_gbyte_per_s`` None: no NVLink.
    ``price_usd_per_hour``: lowest and highest seen on the catalogue's date; None: not listed.
    """

    name: str
    base: str
    dtype: str | None
    kind: Literal["gpu", "cpu"]
    hardware: str
    reported: tuple[str, ...]
    memory_bytes: int
    l2_bytes: int
    multiprocessors: int
    whole_multiprocessors: int
    floor_per: Literal["kernel", "op"]
    pointwise_floor_us: float
    other_floor_us: float
    segment_overhead_us: float
    substitute: Mapping[str, str]
    datasheet: Peaks | None
    measured: Peaks | None
    host_gbyte_per_s: float | None
    peer_gbyte_per_s: float | None
    price_usd_per_hour: tuple[float, float] | None
    figures: Mapping[str, Figure]

    def rates(self) -> tuple[str, ...]:
        """Dtypes with a rate of their own."""
        known = [peaks for peaks in (self.datasheet, self.measured) if peaks is not None]
        return tuple(dict.fromkeys(dtype for peaks in known for dtype in peaks.flops_per_s))


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Measured peak over datasheet rate, over the types for which both are known."""

    low: float
    typical: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFigures:
    """What collectives between GPUs of one host take; shares of the rate of NVLink (peer) and PCIe (host)."""

    start_us: float
    step_us: float
    peer_share: float
    peer_error: float
    host_share: float
    host_error: float


@dataclass(frozen=True, slots=True)
class SliceShape:
    """Rates of a slice: its share of the multiprocessors to these powers, times the whole GPU's."""

    compute_exponent: float
    bandwidth_exponent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All types, by name, and what is known of the model's error.

    ``memory`` and ``compute`` say what share of a datasheet rate is reached where no peak was measured.
    ``entries``: files of users' entries, in the order in which they were laid over the shipped ones.
    """

    date: str
    entries: tuple[Path, ...]
    types: Mapping[str, DeviceType]
    memory: Efficiency
    compute: Efficiency
    large_error: float
    small_error: float
    large_from_l2_multiple: float
    collective: CollectiveFigures
    slice: SliceShape

    def type(self, name: str) -> DeviceType:
        """The type called ``name``, in full (see :mod:`tessera_core.profile.type_name`).

        Raises :class:`InputError` for a name that is none, with near ones, and for a slice or dtype that the type
        does not have.
        """
        parsed = TypeName.parse(name)
        if parsed.base not in self.types:
            near = difflib.get_close_matches(parsed.base.lower(), self.types, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(self.types)}"
            raise InputError(f"device type {name!r}: is not in the catalogue of {self.date}; {hint}")
        found = self.types[parsed.base]
        if parsed.multiprocessors is not None:
            found = self._slice(found, parsed.multiprocessors)
        if parsed.dtype is not None:
            found = _computing_in(found, parsed.dtype)
        return replace(found, name=name)

    def _slice(self, whole: DeviceType, multiprocessors: int) -> DeviceType:
        name = TypeName(base=whole.base, multiprocessors=multiprocessors)
        if whole.kind != "gpu":
            raise InputError(f"device type {name}: {whole.base} is no GPU, so it has no slices")
        if multiprocessors >= whole.multiprocessors:
            raise InputError(
                f"device type {name}: {whole.base} has {whole.multiprocessors} multiprocessors;"
                f" ask for fewer, or for {whole.base}"
            )
        share = multiprocessors / whole.multiprocessors
        compute, bandwidth = share**self.slice.compute_exponent, share**self.slice.bandwidth_exponent
        return replace(
            whole,
            multiprocessors=multiprocessors,
            datasheet=None if whole.datasheet is None else whole.datasheet.share(compute, bandwidth),
            measured=None if whole.measured is None else whole.measured.share(compute, bandwidth),
        )

    def reported(self, name: str) -> DeviceType | None:
        """The type of the GPU that CUDA calls ``name``; None where it is not catalogued."""
        return next((kind for kind in self.types.values() if name in kind.reported), None)


def catalogue(entries: Sequence[Path] = ()) -> Catalogue:
    """The catalogue that the toolchain ships, with users' entries laid over it.

    ``entries``: files of them, beside those that the environment's ``TESSERA_CATALOGUE`` names; the last wins.
    Raises the errors of :func:`read_catalogue`.
    """
    named = [Path(name) for name in os.environ.get(USER_FILES, "").split(os.pathsep) if name]
    files = tuple(dict.fromkeys([*named, *entries]))
    return _unchanged(files, tuple(_stamp(path) for path in files))


def device_type(name: str) -> DeviceType:
    """The catalogue's type ``name``; raises :class:`InputError` that lists near names."""
    return catalogue().type(name)


def read_catalogue(path: Path, entries: Sequence[Path] = ()) -> Catalogue:
    """Read and check a catalogue and files of entries to lay over it.

    Raises :class:`ArtifactError` with the place of what is wrong.
    """
    read = read_content(path, entries)
    content = read.content
    types = {
        row["name"]: _device_type(row, read, entries[-1] if entries else path) for row in content["type"]
    }
    # How much of a datasheet is reached is the shipped types' to say: an entry changes its own type and no other.
    shipped = types if not entries else read_catalogue(path).types
    error = content["roofline_error"]
    return Catalogue(
        date=content["date"],
        entries=tuple(entries),
        types=types,
        memory=_efficiency([_memory_ratio(t) for t in shipped.values()]),
        compute=_efficiency([_compute_ratio(t) for t in shipped.values()]),
        large_error=float(error["large"]),
        small_error=float(error["small"]),
        large_from_l2_multiple=float(error["large_from_l2_multiple"]),
        collective=CollectiveFigures(
            **{name: float(value) for name, value in content["collective"].items() if name != "source"}
        ),
        slice=SliceShape(
            float(content["slice"]["compute_exponent"]), float(content["slice"]["bandwidth_exponent"])
        ),
    )


@cache
def _unchanged(entries: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> Catalogue:
    """Read once as long as the files stay as they are, which their stamps say."""
    return read_catalogue(CATALOGUE, entries)


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of change; zeros for a file that reading will refuse."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


def _computing_in(kind: DeviceType, dtype: str) -> DeviceType:
    if dtype not in PRECISIONS:
        near = difflib.get_close_matches(dtype.lower(), PRECISIONS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(PRECISIONS)}"
        raise InputError(f"device type {kind.base}/dtype={dtype}: is no dtype of products; {hint}")
    rate = PRECISIONS[dtype].rate
    if rate not in kind.rates():
        usable = [name for name, precision in PRECISIONS.items() if precision.rate in kind.rates()]
        raise InputError(
            f"device type {kind.base}/dtype={dtype}: {kind.base} has no {rate} rate;"
            f" it computes in {', '.join(usable)}"
        )
    return replace(kind, dtype=dtype)


def _device_type(row: Mapping[str, Any], read: CatalogueContent, path: Path) -> DeviceType:
    if "datasheet" not in row and "measured" not in row:
        raise ArtifactError(f"{path}: type {row['name']} has neither datasheet nor measured rates")
    table = "datasheet" if "datasheet" in row else "measured"
    if "float32" not in row[table]["tflop_per_s"]:
        raise ArtifactError(
            f"{path}: type {row['name']}: {table}.tflop_per_s has no float32, the rate of all that is no product"
            " and of dtypes without a rate of their own; add it"
        )
    links, price, kind = row.get("link_gbyte_per_s", {}), row.get("price"), read.content["kind"][row["kind"]]
    own = f"type.{row['name']}."
    return DeviceType(
        name=row["name"],
        base=row["name"],
        dtype=None,
        kind=row["kind"],
        hardware=row["hardware"],
        reported=tuple(row.get("reported", ())),
        memory_bytes=round(row["memory_gb"] * 1e9),
        l2_bytes=round(row["l2_mb"] * 1e6),
        multiprocessors=row["multiprocessors"],
        whole_multiprocessors=row["multiprocessors"],
        floor_per=kind["floor_per"],
        pointwise_floor_us=float(kind["launch_floor_us"]["pointwise"]),
        other_floor_us=float(kind["launch_floor_us"]["other"]),
        segment_overhead_us=float(kind["segment_overhead_us"]["value"]),
        substitute=dict(row.get("substitute", {})),
        datasheet=_peaks(row, "datasheet"),
        measured=_peaks(row, "measured"),
        host_gbyte_per_s=links.get("host"),
        peer_gbyte_per_s=links.get("peer"),
        price_usd_per_hour=(price["low_usd_per_hour"], price["high_usd_per_hour"]) if price else None,
        figures={
            place.removeprefix(own): figure for place, figure in read.figures.items() if place.startswith(own)
        },
    )


def _peaks(row: Mapping[str, Any], kind: str) -> Peaks | None:
    if kind not in row:
        return None
    return Peaks(
        row[kind]["memory_gbyte_per_s"] * 1e9,
        {dtype: value * 1e12 for dtype, value in row[kind]["tflop_per_s"].items()},
        row[kind]["source"],
    )


def _memory_ratio(kind: DeviceType) -> float | None:
    if kind.datasheet is None or kind.measured is None:
        return None
    return kind.measured.memory_bytes_per_s / kind.datasheet.memory_bytes_per_s


def _compute_ratio(kind: DeviceType) -> float | None:
    if kind.datasheet is None or kind.measured is None:
        return None
    shared = kind.datasheet.flops_per_s.keys() & kind.measured.flops_per_s.keys()
    ratios = [kind.measured.flops_per_s[name] / kind.datasheet.flops_per_s[name] for name in shared]
    return median(ratios) if ratios else None


def _efficiency(ratios: list[float | None]) -> Efficiency:
    known = [ratio for ratio in ratios if ratio is not None]
    return Efficiency(min(known), median(known), max(known)) if known else Efficiency(1.0, 1.0, 1.0)
