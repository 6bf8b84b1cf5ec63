"""Profiles as the later stages read them: one or several artifacts merged into times, links and overheads.

Merging never averages. Of two rows for the same thing the better source wins (measured, then silicon tables,
then modelled), then the one with more samples, then the one named first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera_formats.artifact import TableArtifact
from tessera_formats.deps import WHOLE
from tessera_formats.document import document_checksum
from tessera_formats.errors import InputError
from tessera_formats.profile import CACHES, CONDITIONS, SOURCES, read_profile
from tessera_formats.trace import check_same_program

Z_90 = 1.6448536269514722
"""Standard deviations from a normal distribution's median to either end of its 90% interval."""

Condition = Literal["alone", "beside"]
Source = Literal["measured", "silicon", "modelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """The time of a kernel signature (or a part of it) on a device type.

    ``low_us`` to ``high_us``: 90% interval of the typical time. ``p10_us``, ``p90_us``: spread of single runs;
    equal to the median where nothing was run (``samples`` 0). ``dtype``: in which it computes there.
    ``hardware``: what was measured. ``dated``: when that was (UTC, ISO 8601), or the table's or model's date.
    ``load``: what ran beside it. ``table``: package, version, framework and its version. ``distance``: natural
    logarithm of the largest factor in size to the nearest measured point of a table.
    """

    signature: str
    part: str
    device_type: str
    condition: Condition
    cache: str
    median_us: float
    p10_us: float
    p90_us: float
    low_us: float
    high_us: float
    samples: int
    flops: int
    bytes: int
    dtype: str
    source: Source
    hardware: str
    dated: str
    detail: str
    load: str = ""
    table: str = ""
    distance: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """What a transfer between two device types costs; see :meth:`transfer_us`.

    ``send_us``/``receive_us``: time that the sender/receiver is busy beside the copy. ``latency_us``: from the
    sender's last instruction until a waiting receiver runs. ``occupies_sender``: the sender computes nothing
    while it copies. ``residual``: median relative error of :meth:`transfer_us`.
    """

    source: str
    destination: str
    latency_us: float
    gbit_per_s: float
    send_us: float
    receive_us: float
    occupies_sender: bool
    samples: int
    residual: float
    origin: Source
    transport: str

    def copy_us(self, size_bytes: int) -> float:
        """Time of moving ``size_bytes`` at the link's rate, without its latency."""
        return size_bytes * 8e-3 / self.gbit_per_s

    def transfer_us(self, size_bytes: int) -> float:
        """Time from the start of a transfer until a waiting receiver runs."""
        return self.send_us + self.copy_us(size_bytes) + self.latency_us


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """A device type of the profile. ``overhead_us``: what a segment costs beside its kernels."""

    device_type: str
    hardware: str
    threads: int
    overhead_us: float
    date: str
    source: Source


@dataclass(frozen=True, kw_only=True)
class Times:
    """One or several profiles of one trace, merged.

    ``program_digest``: the trace's. ``digest``: of all that was merged.
    """

    program_digest: str
    digest: str
    rows: Mapping[tuple[str, str, str], tuple[TimeRow, ...]]
    links: Mapping[tuple[str, str], LinkRow]
    devices: Mapping[str, DeviceRow]

    def time(
        self, signature: str, device_type: str, condition: Condition = "beside", part: str = WHOLE
    ) -> TimeRow:
        """The time of ``signature`` on ``device_type``; ``condition`` is preferred, any other will do.

        As it runs within iterations is preferred to repeated alone, and that to cold caches. Raises
        :class:`InputError` where the profiles hold no such kernel for the type.
        """
        rows = self.rows.get((signature, part, device_type))
        if rows is None:
            if device_type not in self.devices:
                known = ", ".join(sorted(self.devices)) or "none"
                raise InputError(
                    f"profile: has no device type {device_type} (it has {known});"
                    f" run tessera profile --device {device_type} and name that profile too"
                )
            raise InputError(
                f"profile: has no time of kernel {signature} on {device_type}; run tessera profile again"
            )
        return min(rows, key=lambda row: (row.condition != condition, CACHES.index(row.cache)))

    def link(self, source_type: str, destination_type: str) -> LinkRow:
        """The link between two types; raises :class:`InputError` naming the pair where there is none."""
        link = self.links.get((source_type, destination_type))
        if link is None:
            raise InputError(
                f"profile: has no link from {source_type} to {destination_type};"
                " add a [[link]] between them to the cluster file"
            )
        return link

    def overhead_us(self, device_type: str) -> float:
        """Fixed time that a segment on ``device_type`` costs beside its kernels."""
        if device_type not in self.devices:
            raise InputError(
                f"profile: has no device type {device_type}; run tessera profile --device {device_type}"
            )
        return self.devices[device_type].overhead_us


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
    best: dict[tuple[str, str, str, str, str], TimeRow] = {}
    links: dict[tuple[str, str], LinkRow] = {}
    devices: dict[str, DeviceRow] = {}
    for item in artifacts.values():
        for fields in item.table.to_pylist():
            row = TimeRow(**fields)
            key = (row.signature, row.part, row.device_type, row.condition, row.cache)
            if key not in best or _rank(row.source, row.samples) < _rank(best[key].source, best[key].samples):
                best[key] = row
        for fields in item.header["links"]:
            link = LinkRow(**fields)
            pair = (link.source, link.destination)
            if pair not in links or _rank(link.origin, link.samples) < _rank(
                links[pair].origin, links[pair].samples
            ):
                links[pair] = link
        for fields in item.header["devices"]:
            device = DeviceRow(**fields)
            held = devices.get(device.device_type)
            if held is None or _rank(device.source, 0) < _rank(held.source, 0):
                devices[device.device_type] = device
    digests = sorted({item.digest for item in artifacts.values()})
    return Times(
        program_digest=program,
        digest=digests[0] if len(digests) == 1 else document_checksum({"profiles": digests}),
        rows=_grouped(best.values()),
        links=links,
        devices=devices,
    )


def _rank(source: str, samples: int) -> tuple[int, int]:
    return SOURCES.index(source), -samples


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


def fields_of(row: TimeRow | LinkRow | DeviceRow) -> dict[str, Any]:
    """A row as the artifact takes it."""
    return {name: getattr(row, name) for name in row.__slots__}
