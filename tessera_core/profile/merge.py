"""Merging profiles of one trace that were made on several machines and days.

Nothing is averaged. Of two rows for the same thing the better source wins (measured, then silicon tables, then
modelled); of two measured ones the newest; then the one of more samples, then the one that was named first. Of links
over several transports that count which runs take between devices of one host, however new another is. Where two
measurements differ by more than their intervals explain, that is reported: one of them is not of the machine, the
clock or the load that its reader believes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from tessera_core.profile.times import Conflict, DeviceRow, LinkRow, TimeRow, Times, fields_of
from tessera_core.report.facts import FactTable
from tessera_formats.artifact import TableArtifact
from tessera_formats.document import document_checksum
from tessera_formats.errors import InputError
from tessera_formats.profile import CACHES, CONDITIONS, SOURCES, TIMES, TRANSPORTS, read_profile
from tessera_formats.trace import check_same_program

DIFFERENCE = 1.1
"""Factor from which two measurements are told to differ; below it, machines of one type differ among themselves."""

LINK_BYTES = 1 << 20
"""Size of the transfer in which two measurements of a link are compared."""

_TimeKey: TypeAlias = tuple[str, str, str, str, str]
_Rank: TypeAlias = tuple[int, float, int]


def load_profiles(paths: Sequence[Path | str]) -> Times:
    """Read and merge profiles of one trace (one may be ``-``).

    Raises :class:`InputError` for none at all, :class:`OriginError` naming two of different programs, and the
    errors of :func:`tessera_formats.profile.read_profile`.
    """
    if not paths:
        raise InputError("no profile was named; run tessera profile and name its output")
    return merge_profiles({str(path): read_profile(path) for path in paths})


def merge_profiles(artifacts: Mapping[str, TableArtifact]) -> Times:
    """Merge opened profiles, by name, in the order given; see the module's text for what wins."""
    program = check_same_program({name: item.header["program_digest"] for name, item in artifacts.items()})
    rows: dict[_TimeKey, list[tuple[str, TimeRow]]] = {}
    links: dict[tuple[str, str, str], list[tuple[str, LinkRow]]] = {}
    devices: dict[str, DeviceRow] = {}
    for name, item in artifacts.items():
        for fields in item.table.to_pylist():
            row = TimeRow(**fields)
            key = (row.signature, row.part, row.device_type, row.condition, row.cache)
            rows.setdefault(key, []).append((name, row))
        for fields in item.header["links"]:
            link = LinkRow(**fields)
            links.setdefault((link.source, link.destination, link.transport), []).append((name, link))
        for fields in item.header["devices"]:
            device = DeviceRow(**fields)
            held = devices.get(device.device_type)
            if held is None or _rank(device.source, device.date, 0) < _rank(held.source, held.date, 0):
                devices[device.device_type] = device
    best: list[TimeRow] = []
    conflicts: list[Conflict] = []
    for times in rows.values():
        kept = min(times, key=lambda named: _rank(named[1].source, named[1].dated, named[1].samples))
        best.append(kept[1])
        conflicts += [found for other in times for found in _time_conflict(kept, other)]
    best_links: list[LinkRow] = []
    for states in links.values():
        first = min(states, key=lambda named: _rank(named[1].origin, named[1].dated, named[1].samples))
        best_links.append(first[1])
        conflicts += [found for other in states for found in _link_conflict(first, other)]
    counting = sorted(best_links, key=_link_rank, reverse=True)  # of a pair the last one stays
    digests = sorted({item.digest for item in artifacts.values()})
    return Times(
        program_digest=program,
        digest=digests[0] if len(digests) == 1 else document_checksum({"profiles": digests}),
        rows=_grouped(best),
        links={(link.source, link.destination): link for link in counting},
        every_link=tuple(best_links),
        devices=devices,
        conflicts=tuple(conflicts),
    )


def profile_content(
    program_digest: str, rows: Iterable[TimeRow], links: Iterable[LinkRow], devices: Iterable[DeviceRow]
) -> tuple[dict[str, Any], pa.Table]:
    """Header and table as :func:`tessera_formats.profile.write_profile` takes them."""
    header = {
        "program_digest": program_digest,
        "links": [fields_of(link) for link in links],
        "devices": [fields_of(device) for device in devices],
    }
    return header, TIMES.build([fields_of(row) for row in rows])


def conflict_table(conflicts: Sequence[Conflict]) -> tuple[FactTable, ...]:
    """One row per pair of profiles, type and condition that do not agree; no table where all do."""
    groups: dict[tuple[str, ...], list[Conflict]] = {}
    for conflict in conflicts:
        groups.setdefault(
            (conflict.device_type, conflict.condition, *conflict.kept, *conflict.other), []
        ).append(conflict)
    rows = []
    for (device_type, condition, kept, _, kept_date, other, _, other_date), found in groups.items():
        worst = max(found, key=lambda conflict: conflict.ratio)
        rows.append(
            (
                device_type,
                condition,
                len(found),
                f"{kept} ({kept_date or 'no date'})",
                f"{other} ({other_date or 'no date'})",
                worst.subject,
                round(worst.kept_us, 2),
                round(worst.other_us, 2),
            )
        )
    columns = (
        "device_type",
        "condition",
        "differ",
        "kept",
        "not_kept",
        "worst",
        "worst_kept_us",
        "worst_other_us",
    )
    return (FactTable("conflicts", columns, tuple(rows)),) if rows else ()


def moment(dated: str) -> float:
    """Seconds since 1970 of a day or time in ISO 8601, UTC unless it says otherwise; what is none is oldest."""
    try:
        found = datetime.fromisoformat(dated)
    except ValueError:
        return float("-inf")
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _rank(source: str, dated: str, samples: int) -> _Rank:
    return SOURCES.index(source), -moment(dated), -samples


def _link_rank(link: LinkRow) -> tuple[int, int]:
    """Measured before modelled; then the transport that runs take between devices of one host."""
    return SOURCES.index(link.origin), TRANSPORTS.index(link.transport)


def _time_conflict(kept: tuple[str, TimeRow], other: tuple[str, TimeRow]) -> list[Conflict]:
    """Both measured, under one load, with intervals that do not meet and medians further apart than usual."""
    (kept_in, best), (other_in, row) = kept, other
    same = best is row or best.source != "measured" or row.source != "measured" or best.load != row.load
    if same or (best.low_us <= row.high_us and row.low_us <= best.high_us):
        return []
    if max(best.median_us, row.median_us) <= DIFFERENCE * min(best.median_us, row.median_us):
        return []
    if min(best.median_us, row.median_us) <= 0:
        return []
    return [
        Conflict(
            subject=best.signature,
            device_type=best.device_type,
            condition=best.condition,
            kept_us=best.median_us,
            other_us=row.median_us,
            kept=(kept_in, best.hardware, best.dated),
            other=(other_in, row.hardware, row.dated),
        )
    ]


def _link_conflict(kept: tuple[str, LinkRow], other: tuple[str, LinkRow]) -> list[Conflict]:
    """Both measured over one transport, further apart than usual and than either fit misses its own samples."""
    (kept_in, best), (other_in, link) = kept, other
    if best is link or {best.origin, link.origin} != {"measured"}:
        return []
    if min(best.gbit_per_s, link.gbit_per_s) <= 0:
        return []
    times = best.transfer_us(LINK_BYTES), link.transfer_us(LINK_BYTES)
    if max(times) <= max(DIFFERENCE, 1 + best.residual + link.residual) * min(times):
        return []
    return [
        Conflict(
            subject=best.transport,
            device_type=f"{best.source} to {best.destination}",
            condition="1 MiB",
            kept_us=times[0],
            other_us=times[1],
            kept=(kept_in, best.transport, best.dated),
            other=(other_in, link.transport, link.dated),
        )
    ]


def _grouped(rows: Iterable[TimeRow]) -> dict[tuple[str, str, str], tuple[TimeRow, ...]]:
    """Rows by kernel and type. A type's better-sourced conditions displace its worse-sourced ones.

    Otherwise a modelled time alone in one profile would stand beside a measured one of another.
    """
    grouped: dict[tuple[str, str, str], list[TimeRow]] = {}
    for row in sorted(rows, key=lambda r: (CONDITIONS.index(r.condition), CACHES.index(r.cache))):
        grouped.setdefault((row.signature, row.part, row.device_type), []).append(row)
    return {
        key: tuple(r for r in held if r.source == min((h.source for h in held), key=SOURCES.index))
        for key, held in grouped.items()
    }
