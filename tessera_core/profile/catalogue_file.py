"""Catalogue files as plain checked content: their schema, the shipped file, and users' entries laid over it.

A user's file has the shipped one's schema, but states only what it adds or changes: a type of a new name, or single
figures of a known one. Every table that states a figure names its source, there as here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from tessera_core.profile.precision import RATES
from tessera_formats.document import Field, Record, check_record, parse_toml
from tessera_formats.errors import ArtifactError
from tessera_formats.files import read_file

_ID = Field(name="id", type="string", meaning="name that figures refer to")
_SOURCE_FIELD = Field(name="source", type="string", meaning="id of a source")
_RATES = Record((), open=True)
_OTHER_SOURCES = Field(
    name="sources",
    type="record",
    meaning="figure -> its own source, where that is not the table's",
    required=False,
    inner=Record((), open=True),
)
_PEAKS = Record(
    (
        _SOURCE_FIELD,
        _OTHER_SOURCES,
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
        _SOURCE_FIELD,
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
        _SOURCE_FIELD,
        _OTHER_SOURCES,
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
_SLICE = Record(
    (
        _SOURCE_FIELD,
        Field(name="compute_exponent", type="number", meaning="of the share of multiprocessors", minimum=0),
        Field(name="bandwidth_exponent", type="number", meaning="of the share of multiprocessors", minimum=0),
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
DOCUMENT = Record(
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
        Field(name="slice", type="record", meaning="rates of a part of a GPU", inner=_SLICE),
        Field(name="type", type="records", meaning="device types", inner=_TYPE),
    )
)

_NAMES = frozenset({"id", "title", "name"})
_LABELS = frozenset({"name", "kind", "hardware", "reported", "source", "sources", "substitute", "floor_per"})
"""Keys that state no figure, so that they need no source."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number as a file states it, and the title of its source; users' files are named beside it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class CatalogueContent:
    """Checked content in the schema's form, and every figure by its place (``type.l4.l2_mb``) with its source."""

    content: Mapping[str, Any]
    figures: Mapping[str, Figure]


def read_content(shipped: Path, entries: Sequence[Path]) -> CatalogueContent:
    """The shipped catalogue with users' entries laid over it, the last winning.

    Raises :class:`ArtifactError` with the place of what is wrong, in the file that says it.
    """
    content = _read(shipped)
    check_record(content, DOCUMENT, str(shipped))
    _check_date(content["date"], shipped)
    _check_types(content["type"], shipped)
    found = dict(_figures(content, content["source"], shipped, ""))
    for path in entries:
        own = _read(path)
        check_record(own, _partial(DOCUMENT), str(path))
        _check_date(own.get("date", content["date"]), path)
        _check_types(own.get("type", ()), path)
        sources = [*content["source"], *own.get("source", ())]
        found |= dict(_figures(own, sources, path, f" ({path})"))
        content = _laid_over(content, own)
        for row in content["type"]:
            check_record(row, _TYPE, f"{path}: type {row['name']}")
        check_record(content, DOCUMENT, str(path))
    return CatalogueContent(content, found)


def _read(path: Path) -> dict[str, Any]:
    return parse_toml(read_file(path), path, "device catalogue")


def _check_date(text: str, path: Path) -> None:
    try:
        date.fromisoformat(text)
    except ValueError as problem:
        raise ArtifactError(f"{path}: date is {text!r}; write the day as 2026-12-01") from problem


def _check_types(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    one = Field(name="rate", type="number", meaning="1e12 operations a second", minimum=0.001)
    names = [row["name"] for row in rows]
    for row in rows:
        if names.count(row["name"]) > 1:
            raise ArtifactError(f"{path}: type {row['name']} is there twice; remove one")
        if "/" in row["name"] or "=" in row["name"] or not row["name"].strip():
            raise ArtifactError(
                f"{path}: type {row['name']!r}: a name holds neither / nor =, which ask for a slice or a dtype"
            )
        for kind in ("datasheet", "measured"):
            for dtype, value in row.get(kind, {}).get("tflop_per_s", {}).items():
                _check_dtype(dtype, f"{path}: type {row['name']}, {kind}")
                check_record({"rate": value}, Record((one,)), f"{path}: type {row['name']}, {kind}.{dtype}")
        for dtype, stand_in in row.get("substitute", {}).items():
            for name in (dtype, stand_in):
                _check_dtype(name, f"{path}: type {row['name']}, substitute")


def _check_dtype(name: Any, place: str) -> None:
    """A rate under a name that no kernel has would count for nothing, and nobody would see it."""
    if name not in RATES:
        near = difflib.get_close_matches(str(name), RATES, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(RATES)}"
        raise ArtifactError(f"{place}: {name!r} is no dtype that has a rate; {hint}")


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables key by key; lists of named tables name by name, new ones last; anything else is replaced."""
    result = dict(below)
    for key, value in above.items():
        held = result.get(key)
        if isinstance(held, Mapping) and isinstance(value, Mapping):
            result[key] = _laid_over(held, value)
        elif isinstance(held, list) and key in ("source", "type"):
            name = "id" if key == "source" else "name"
            rows = {row[name]: row for row in held}
            for row in value:
                rows[row[name]] = _laid_over(rows.get(row[name], {}), row)
            result[key] = list(rows.values())
        else:
            result[key] = value
    return result


def _figures(
    content: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], path: Path, note: str
) -> Iterator[tuple[str, Figure]]:
    """Every figure of a file with its source; a table's own source goes for the tables in it."""
    titles = {source["id"]: source["title"] for source in sources}

    def known(source: Any) -> str:
        if source not in titles:
            raise ArtifactError(f"{path}: source {source!r} is not declared; add a [[source]]")
        return f"{titles[source]}{note}"

    def figures(
        table: Mapping[str, Any], place: str, source: str | None, others: Mapping[str, Any]
    ) -> Iterator[tuple[str, Figure]]:
        source, others = table.get("source", source), table.get("sources", others)
        if source is not None:
            known(source)
        for key, value in table.items():
            if key in _LABELS:
                continue
            if isinstance(value, Mapping):
                # A table of a type states its own source: the type's is of the figures beside it.
                inner = key == "tflop_per_s"
                yield from figures(
                    value, f"{place}.{key}", source if inner else None, others if inner else {}
                )
            elif source is None:
                raise ArtifactError(f"{path}: {place}.{key} has no source; add source = ID to its table")
            else:
                yield f"{place}.{key}", Figure(value, known(others.get(key, source)))

    for kind, table in content.get("kind", {}).items():
        yield from figures(table, f"kind.{kind}", None, {})
    for name in ("roofline_error", "collective", "slice"):
        yield from figures(content.get(name, {}), name, None, {})
    for row in content.get("type", ()):
        yield from figures(row, f"type.{row['name']}", None, {})


def _partial(record: Record) -> Record:
    """The same record with nothing required but names: what a file of changes has to keep to."""
    fields = tuple(
        replace(
            field,
            required=field.name in _NAMES,
            inner=None if field.inner is None else _partial(field.inner),
        )
        for field in record.fields
    )
    return Record(fields, record.open)
