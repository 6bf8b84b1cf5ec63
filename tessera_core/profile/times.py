"""Profiles as the later stages read them: times of kernels, links between device types, overheads.

:mod:`tessera_core.profile.merge` makes them of one or several artifacts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessera_formats.deps import WHOLE
from tessera_formats.errors import InputError
from tessera_formats.profile import CACHES, CONDITIONS

Condition = Literal["alone", "beside", "copies"]
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
    while it copies. ``residual``: median relative error of :meth:`transfer_us`. ``detail``: times and errors by size.
    ``dated``: when measured (UTC).
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
    detail: str = ""
    dated: str = ""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two profiles that measured the same thing and do not agree: by more than their intervals explain.

    ``subject``: the signature of a kernel, or the transport of a link. ``kept``/``other``: profile, hardware and date
    of the value that counts and of the one that does not.
    """

    subject: str
    device_type: str
    condition: str
    kept_us: float
    other_us: float
    kept: tuple[str, str, str]
    other: tuple[str, str, str]

    @property
    def ratio(self) -> float:
        """By what factor they differ, at least 1."""
        return max(self.kept_us, self.other_us) / min(self.kept_us, self.other_us)


@dataclass(frozen=True, kw_only=True)
class Times:
    """One or several profiles of one trace, merged.

    ``program_digest``: the trace's. ``digest``: of all that was merged. ``conflicts``: where they did not agree.
    ``links``: those that count for a pair of types; ``every_link``: also those of its other transports.
    """

    program_digest: str
    digest: str
    rows: Mapping[tuple[str, str, str], tuple[TimeRow, ...]]
    links: Mapping[tuple[str, str], LinkRow]
    devices: Mapping[str, DeviceRow]
    every_link: tuple[LinkRow, ...] = ()
    conflicts: tuple[Conflict, ...] = ()

    def time(
        self, signature: str, device_type: str, condition: Condition = "beside", part: str = WHOLE
    ) -> TimeRow:
        """The time of ``signature`` on ``device_type``; ``condition`` is preferred, any other will do.

        Of others that nearest in how much works beside it, the busier of two. As it runs within iterations is
        preferred to repeated alone, and that to cold caches. Raises :class:`InputError` where the profiles
        hold no such kernel for the type.
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
        wanted = CONDITIONS.index(condition)

        def preference(row: TimeRow) -> tuple[int, int, int]:
            held = CONDITIONS.index(row.condition)
            return abs(held - wanted), -held, CACHES.index(row.cache)

        return min(rows, key=preference)

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


def fields_of(row: TimeRow | LinkRow | DeviceRow) -> dict[str, Any]:
    """A row as the artifact takes it."""
    return {name: getattr(row, name) for name in row.__slots__}
