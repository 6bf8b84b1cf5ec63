"""The dated catalogue of device types: what each can hold and how fast it is said, or was seen, to be.

``catalogue.toml`` beside this file holds the figures with their kind (datasheet or measured) and source; it is
checked against the records declared here whenever it is read. No figure is repeated in code.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tessera_formats.document import Field, Record, check_record, parse_toml
from tessera_formats.errors import ArtifactError, InputError
from tessera_formats.files import read_file

CATALOGUE = Path(__file__).with_name("catalogue.toml")

_ID = Field(name="id", type="string", meaning="name that figures refer to")
_SOURCE_FIELD = Field(name="source", type="string", meaning="id of a source")
_RATES = Record((), open=True)
_PEAKS = Record(
    (
        _SOURCE_FIELD,
        Field(name="memory_gbyte_per_s", type="number", meaning="memory bandwidth", minimum=0.001),
        Field(name="tflop_per_s", type="record", meaning="dense rate by dtype", inner=_RATES),
    )
)
_FLOOR = Record(
    (
        Field(name="pointwise", type="number", meaning="pointwise kernels and copies", minimum=0),
        Field(name="other", type="number", meaning="any other kernel", minimum=0),
        _SOURCE_FIELD,
    )
)
_OVERHEAD = Record((Field(name="value", type="number", meaning="per segment", minimum=0), _SOURCE_FIELD))
_KIND = Record(
    (
        Field(name="floor_per", type="string", meaning="what pays the floor", choices=("kernel", "op")),
        Field(name="launch_floor_us", type="record", meaning="least time of a kernel", inner=_FLOOR),
        Field(name="segment_overhead_us", type="record", meaning="fixed cost", inner=_OVERHEAD),
    )
)
_LINKS = Record(
    (
        Field(name="host", type="number", meaning="to the host over PCIe, each way", minimum=0),
        Field(name="peer", type="number", meaning="to a peer over NVLink", required=False, minimum=0),
    )
)
_PRICE = Record(
    (
        _SOURCE_FIELD,
        Field(name="low_usd_per_hour", type="number", meaning="lowest seen", minimum=0),
        Field(name="high_usd_per_hour", type="number", meaning="highest seen", minimum=0),
    )
)
_TYPE = Record(
    (
        Field(name="name", type="string", meaning="device type"),
        Field(name="kind", type="string", meaning="what it is", choices=("gpu", "cpu")),
        Field(name="hardware", type="string", meaning="product, or what was measured"),
        Field(name="reported", type="strings", meaning="how CUDA names it", required=False),
        Field(name="memory_gb", type="number", meaning="capacity, 1e9 bytes", minimum=0.001),
        Field(name="l2_mb", type="number", meaning="last private or shared cache, 1e6 bytes", minimum=0.001),
        Field(name="multiprocessors", type="integer", meaning="SMs, or cores", minimum=1),
        Field(name="substitute", type="record", meaning="dtype used instead", required=False, inner=_RATES),
        Field(name="link_gbyte_per_s", type="record", meaning="links", required=False, inner=_LINKS),
        Field(name="datasheet", type="record", meaning="what the maker states", required=False, inner=_PEAKS),
        Field(name="measured", type="record", meaning="best rates seen", required=False, inner=_PEAKS),
        Field(name="price", type="record", meaning="dated price range", required=False, inner=_PRICE),
    )
)
_ERROR = Record(
    (
        _SOURCE_FIELD,
        Field(name="large", type="number", meaning="median relative error, large data", minimum=0),
        Field(name="small", type="number", meaning="median relative error otherwise", minimum=0),
        Field(name="large_from_l2_multiple", type="number", meaning="large: data per L2", minimum=0),
    )
)
_COLLECTIVE = Record(
    (
        _SOURCE_FIELD,
        Field(name="start_us", type="number", meaning="time of a collective without steps", minimum=0),
        Field(name="step_us", type="number", meaning="time that a step of the ring adds", minimum=0),
        Field(name="peer_share", type="number", meaning="share of NVLink's rate", minimum=0.001),
        Field(name="peer_error", type="number", meaning="median relative error over NVLink", minimum=0),
        Field(name="host_share", type="number", meaning="share of PCIe's rate", minimum=0.001),
        Field(name="host_error", type="number", meaning="median relative error over PCIe", minimum=0),
    )
)
_DOCUMENT = Record(
    (
        Field(name="date", type="string", meaning="day of the last change, YYYY-MM-DD"),
        Field(
            name="source",
            type="records",
            meaning="where figures come from",
            inner=Record((_ID, Field(name="title", type="string", meaning="document or measurement"))),
        ),
        Field(
            name="kind",
            type="record",
            meaning="figures that all types of a kind share",
            inner=Record(
                (
                    Field(name="gpu", type="record", meaning="GPUs", inner=_KIND),
                    Field(name="cpu", type="record", meaning="CPU workers", inner=_KIND),
                )
            ),
        ),
        Field(name="roofline_error", type="record", meaning="how far rooflines miss", inner=_ERROR),
        Field(name="collective", type="record", meaning="between GPUs of one host", inner=_COLLECTIVE),
        Field(name="type", type="records", meaning="device types", inner=_TYPE),
    )
)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates of one kind and source: bytes per second, and floating-point operations per second by dtype."""

    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One catalogued device type.

    ``reported``: names under which CUDA reports it.
    ``floor_per``: whether each kernel or each op pays ``pointwise_floor_us`` or ``other_floor_us``.
    ``substitute``: dtype -> the dtype that stands in for it. ``peer_gbyte_per_s`` None: no NVLink.
    ``price_usd_per_hour``: lowest and highest seen on the catalogue's date; None: not listed.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    hardware: str
    reported: tuple[str, ...]
    memory_bytes: int
    l2_bytes: int
    multiprocessors: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All types, by name, and what is known of the model's error.

    ``memory`` and ``compute`` say what share of a datasheet rate is reached where no peak was measured.
    """

    date: str
    types: Mapping[str, DeviceType]
    memory: Efficiency
    compute: Efficiency
    large_error: float
    small_error: float
    large_from_l2_multiple: float
    collective: CollectiveFigures

    def type(self, name: str) -> DeviceType:
        """The type called ``name``; raises :class:`InputError` that lists near names."""
        if name in self.types:
            return self.types[name]
        near = difflib.get_close_matches(name.lower(), self.types, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(self.types)}"
        raise InputError(f"device type {name!r}: is not in the catalogue of {self.date}; {hint}")

    def reported(self, name: str) -> DeviceType | None:
        """The type of the GPU that CUDA calls ``name``; None where it is not catalogued."""
        return next((kind for kind in self.types.values() if name in kind.reported), None)


@cache
def catalogue() -> Catalogue:
    """The catalogue that the toolchain ships."""
    return read_catalogue(CATALOGUE)


def device_type(name: str) -> DeviceType:
    """The shipped catalogue's type ``name``; raises :class:`InputError` that lists near names."""
    return catalogue().type(name)


def read_catalogue(path: Path) -> Catalogue:
    """Read and check a catalogue; raises :class:`ArtifactError` with the place of what is wrong."""
    content = parse_toml(read_file(path), path, "device catalogue")
    check_record(content, _DOCUMENT, str(path))
    _check_sources(content, path)
    kinds = content["kind"]
    types: dict[str, DeviceType] = {}
    for row in content["type"]:
        if row["name"] in types:
            raise ArtifactError(f"{path}: type {row['name']} is there twice; remove one")
        if "datasheet" not in row and "measured" not in row:
            raise ArtifactError(f"{path}: type {row['name']} has neither datasheet nor measured rates")
        types[row["name"]] = _device_type(row, kinds[row["kind"]], path)
    error = content["roofline_error"]
    return Catalogue(
        date=content["date"],
        types=types,
        memory=_efficiency([_memory_ratio(t) for t in types.values()]),
        compute=_efficiency([_compute_ratio(t) for t in types.values()]),
        large_error=float(error["large"]),
        small_error=float(error["small"]),
        large_from_l2_multiple=float(error["large_from_l2_multiple"]),
        collective=CollectiveFigures(
            **{name: float(value) for name, value in content["collective"].items() if name != "source"}
        ),
    )


def _device_type(row: Mapping[str, Any], kind: Mapping[str, Any], path: Path) -> DeviceType:
    links, price = row.get("link_gbyte_per_s", {}), row.get("price")
    return DeviceType(
        name=row["name"],
        kind=row["kind"],
        hardware=row["hardware"],
        reported=tuple(row.get("reported", ())),
        memory_bytes=round(row["memory_gb"] * 1e9),
        l2_bytes=round(row["l2_mb"] * 1e6),
        multiprocessors=row["multiprocessors"],
        floor_per=kind["floor_per"],
        pointwise_floor_us=float(kind["launch_floor_us"]["pointwise"]),
        other_floor_us=float(kind["launch_floor_us"]["other"]),
        segment_overhead_us=float(kind["segment_overhead_us"]["value"]),
        substitute=dict(row.get("substitute", {})),
        datasheet=_peaks(row, "datasheet", path),
        measured=_peaks(row, "measured", path),
        host_gbyte_per_s=links.get("host"),
        peer_gbyte_per_s=links.get("peer"),
        price_usd_per_hour=(price["low_usd_per_hour"], price["high_usd_per_hour"]) if price else None,
    )


def _peaks(row: Mapping[str, Any], kind: str, path: Path) -> Peaks | None:
    if kind not in row:
        return None
    rates = row[kind]["tflop_per_s"]
    one = Field(name="rate", type="number", meaning="1e12 operations a second", minimum=0.001)
    for dtype, value in rates.items():
        check_record({"rate": value}, Record((one,)), f"{path}: type {row['name']}, {kind}.{dtype}")
    return Peaks(
        row[kind]["memory_gbyte_per_s"] * 1e9,
        {dtype: value * 1e12 for dtype, value in rates.items()},
        row[kind]["source"],
    )


def _check_sources(content: Mapping[str, Any], path: Path) -> None:
    known = {source["id"] for source in content["source"]}
    pending: list[Any] = [content["kind"], content["roofline_error"], content["collective"], *content["type"]]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            if "source" in item and item["source"] not in known:
                raise ArtifactError(f"{path}: source {item['source']!r} is not declared; add a [[source]]")
            pending.extend(item.values())


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
