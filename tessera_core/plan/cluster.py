"""A cluster file made concrete: devices with names, types and memory, and one link for every ordered pair.

What the file says wins; memory it leaves open comes from the catalogue, links that it leaves open from the
profile's measured or modelled links between the two device types. A profile's links are those within one host, so
devices of two hosts need one that the file states.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tessera_formats.cluster import cluster_digest, read_cluster
from tessera_formats.errors import InputError

GIGABYTE = 1_000_000_000
"""Bytes; memory is stated in multiples of it."""

BITS_PER_BYTE_MICROSECOND = 8e-3
"""Bytes times this, over Gbit/s, are microseconds."""


class LinkFigures(Protocol):
    """A link as a profile states it (see :mod:`tessera_formats.profile`)."""

    @property
    def latency_us(self) -> float:
        """Time of an empty transfer."""

    @property
    def gbit_per_s(self) -> float:
        """Rate of large transfers."""

    @property
    def send_us(self) -> float:
        """Time the sender is busy beside the copy."""

    @property
    def receive_us(self) -> float:
        """Time the receiver is busy beside the copy."""

    @property
    def occupies_sender(self) -> bool:
        """Whether the sender computes nothing while it copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device of the cluster. ``capacity_bytes``: usable memory. ``price_per_hour``: USD, if stated."""

    name: str
    type: str
    capacity_bytes: int
    memory_domain: str
    price_per_hour: float | None
    host: str | None = None

    def is_apart_from(self, other: Device) -> bool:
        """Whether the two are known to be on different machines."""
        return None not in (self.host, other.host) and self.host != other.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed link. A transfer is on the wire for ``bytes * 8e-3 / gbit_per_s`` us, and arrives
    ``latency_us`` later; where ``occupies_sender``, the sender computes nothing meanwhile."""

    latency_us: float
    gbit_per_s: float
    send_us: float
    receive_us: float
    occupies_sender: bool

    def wire_us(self, size: int) -> float:
        """Microseconds that ``size`` bytes keep the link busy; latency is not occupancy."""
        return size * BITS_PER_BYTE_MICROSECOND / self.gbit_per_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in the file's order, a link for every ordered pair of names, and the capacity of each memory
    domain (devices of one domain share it: the largest capacity that one of them states)."""

    devices: tuple[Device, ...]
    links: Mapping[tuple[str, str], Link]
    domains: Mapping[str, int]
    digest: str

    def device(self, name: str) -> Device:
        """The device called ``name``; ``KeyError`` if there is none."""
        return {device.name: device for device in self.devices}[name]


LinkLookup = Callable[[str, str], LinkFigures | None]
MemoryLookup = Callable[[str], int | None]


def load_cluster(path: Path | str, links: LinkLookup, memory_bytes: MemoryLookup) -> Cluster:
    """Read a cluster file and resolve it (see :func:`resolve_cluster`)."""
    return resolve_cluster(read_cluster(path), str(path), links, memory_bytes)


def resolve_cluster(
    content: Mapping[str, Any], where: str, links: LinkLookup, memory_bytes: MemoryLookup
) -> Cluster:
    """Expand counts, fill in memory and links.

    ``links(source type, destination type)``: the profile's link or None. ``memory_bytes(type)``: the
    catalogue's memory, None for a type that it doesn't know. Raises :class:`InputError` for repeated names,
    a device without known memory, a link to an unknown device, and a pair without a link.
    """
    devices = _devices(content, where, memory_bytes)
    stated = _stated_links(content, where, devices)
    resolved: dict[tuple[str, str], Link] = {}
    for source in devices:
        for destination in devices:
            if source.name == destination.name:
                continue
            apart = source.is_apart_from(destination)
            link = _stated(stated, source, destination)
            if link is None and not apart:
                link = _measured(links(source.type, destination.type))
            if link is None:
                remedy = (
                    f"they are on {source.host} and {destination.host}, so add a [[link]] between them"
                    if apart
                    else "add a [[link]] between them, or profile both types together"
                )
                raise InputError(
                    f"{where}: no link from {source.name} ({source.type}) to {destination.name}"
                    f" ({destination.type}); {remedy}"
                )
            resolved[source.name, destination.name] = link
    domains: dict[str, int] = {}
    for device in devices:
        domains[device.memory_domain] = max(domains.get(device.memory_domain, 0), device.capacity_bytes)
    return Cluster(devices=devices, links=resolved, domains=domains, digest=cluster_digest(dict(content)))


def _devices(content: Mapping[str, Any], where: str, memory_bytes: MemoryLookup) -> tuple[Device, ...]:
    devices: list[Device] = []
    for row in content["device"]:
        names = [f"{row['name']}.{i}" for i in range(row["count"])] if "count" in row else [row["name"]]
        capacity = round(row["memory_gb"] * GIGABYTE) if "memory_gb" in row else memory_bytes(row["type"])
        if capacity is None:
            raise InputError(
                f"{where}: device {row['name']} has type {row['type']!r}, whose memory is not known;"
                " use a catalogued type, name your --catalogue, or state memory_gb"
            )
        for name in names:
            if any(name == other.name for other in devices):
                raise InputError(f"{where}: two devices are called {name}; give each its own name")
            devices.append(
                Device(
                    name=name,
                    type=row["type"],
                    capacity_bytes=capacity,
                    memory_domain=row.get("memory_domain", name),
                    price_per_hour=row.get("price_per_hour"),
                    host=row.get("host"),
                )
            )
    if not devices:
        raise InputError(f"{where}: lists no device; add a [[device]] with name and type")
    return tuple(devices)


def _stated_links(
    content: Mapping[str, Any], where: str, devices: tuple[Device, ...]
) -> dict[tuple[str, str], Link]:
    """Links of the file by (sending, receiving) device, group or type name, as the file writes them."""
    known = {device.name for device in devices} | {device.type for device in devices}
    known |= {row["name"] for row in content["device"]}
    stated: dict[tuple[str, str], Link] = {}
    for index, row in enumerate(content.get("link", ())):
        place = f"{where}: link[{index}]"
        if "between" in row and not ("from" in row or "to" in row) and len(row["between"]) == 2:
            first, second = row["between"]
            pairs = [(first, second), (second, first)]
        elif "between" not in row and "from" in row and "to" in row:
            pairs = [(row["from"], row["to"])]
        else:
            raise InputError(f"{place} needs either between = [A, B], or from = A and to = B")
        for name in pairs[0]:
            if name not in known:
                close = difflib.get_close_matches(name, sorted(known), 1)
                hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
                raise InputError(f"{place} names {name!r}, which is no device or type of this file{hint}")
        if any(pair in stated for pair in pairs):
            raise InputError(f"{place} states the link between {' and '.join(pairs[0])} once more; keep one")
        if pairs[0][0] == pairs[0][1] and pairs[0][0] in {device.name for device in devices}:
            raise InputError(f"{place} leads from {pairs[0][0]} to itself; name two devices, or a type")
        for pair in pairs:
            stated[pair] = Link(
                latency_us=float(row["latency_us"]),
                gbit_per_s=float(row["gbit_per_s"]),
                send_us=float(row.get("send_us", 0.0)),
                receive_us=float(row.get("receive_us", 0.0)),
                occupies_sender=row.get("occupies_sender", False),
            )
    return stated


def _stated(stated: Mapping[tuple[str, str], Link], source: Device, destination: Device) -> Link | None:
    """The most specific link: device names before group names (of ``count``) before types."""
    for sender in (source.name, source.name.rpartition(".")[0], source.type):
        for receiver in (destination.name, destination.name.rpartition(".")[0], destination.type):
            if (sender, receiver) in stated:
                return stated[sender, receiver]
    return None


def _measured(link: LinkFigures | None) -> Link | None:
    if link is None or link.gbit_per_s <= 0:
        return None
    return Link(
        latency_us=link.latency_us,
        gbit_per_s=link.gbit_per_s,
        send_us=link.send_us,
        receive_us=link.receive_us,
        occupies_sender=link.occupies_sender,
    )
