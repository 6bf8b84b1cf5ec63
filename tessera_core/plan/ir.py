"""The plan as plain values: what partition writes, and run and adapt read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tessera_core.program.boxes import Box
from tessera_core.program.store import boxes_from_rows, boxes_to_rows
from tessera_formats.deps import WHOLE
from tessera_formats.document import document_checksum
from tessera_formats.plan import read_plan, write_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDevice:
    """A device of the cluster that the plan was made for."""

    name: str
    type: str
    capacity_bytes: int
    memory_domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A way through the devices: which programs, how often each per batch of requests, how many slots."""

    route: int
    share: float
    batch: int
    slots: int
    programs: tuple[str, ...]
    rates: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One kernel on one device; a replicated state writer has one for each home."""

    route: int
    program: str
    kernel: int
    part: str
    device: str
    time_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A buffer (or must-written boxes of it) shipped after ``producer`` from one device to another.

    Outputs that feed the next iteration's inputs are shipped as the output buffer to the consuming devices.
    ``boxes`` None: the whole buffer. ``order``: position in the communicator's order per slot.
    """

    route: int
    program: str
    order: int
    buffer: int
    producer: int
    source: str
    destination: str
    bytes: int
    boxes: tuple[Box, ...] | None
    combine: str
    time_us: float
    part: str = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A device on which a state family of a route lives."""

    route: int
    state: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole plan; ``facts`` holds the remaining top-level fields of the artifact as written."""

    devices: tuple[PlanDevice, ...]
    routes: tuple[Route, ...]
    assignments: tuple[Assignment, ...]
    transfers: tuple[Transfer, ...]
    homes: tuple[Home, ...]
    facts: Mapping[str, Any]

    @property
    def program_digest(self) -> str:
        """Digest of the programs that it places."""
        return str(self.facts["program_digest"])

    @cached_property
    def placement(self) -> dict[tuple[int, str], dict[int, tuple[str, ...]]]:
        """(route, program) -> kernel -> its devices, in order of assignment."""
        placement: dict[tuple[int, str], dict[int, tuple[str, ...]]] = {}
        for item in self.assignments:
            kernels = placement.setdefault((item.route, item.program), {})
            kernels[item.kernel] = (*kernels.get(item.kernel, ()), item.device)
        return placement

    def document(self) -> dict[str, Any]:
        """The artifact's content."""
        return {
            **self.facts,
            "device": [_plain(item) for item in self.devices],
            "route": [_plain(item) for item in self.routes],
            "home": [_plain(item) for item in self.homes],
            "assignment": [_plain(item) for item in self.assignments],
            "transfer": [_transfer_row(item) for item in self.transfers],
        }

    @property
    def digest(self) -> str:
        """Digest of the plan's content."""
        return document_checksum(self.document())


def load_plan(path: Path | str) -> Plan:
    """Read a plan artifact; raises the errors of :func:`tessera_formats.plan.read_plan`."""
    content = read_plan(path)
    parts = {name: content.pop(name) for name in ("device", "route", "assignment", "transfer", "home")}
    return Plan(
        devices=tuple(PlanDevice(**row) for row in parts["device"]),
        routes=tuple(
            Route(**{**row, "programs": tuple(row["programs"]), "rates": tuple(row["rates"])})
            for row in parts["route"]
        ),
        assignments=tuple(Assignment(**row) for row in parts["assignment"]),
        transfers=tuple(
            Transfer(**{**row, "boxes": boxes_from_rows(row.get("boxes"))}) for row in parts["transfer"]
        ),
        homes=tuple(Home(**row) for row in parts["home"]),
        facts=content,
    )


def save_plan(path: Path | str, plan: Plan) -> None:
    """Write a plan artifact."""
    write_plan(path, plan.document())


def _plain(item: Any) -> dict[str, Any]:
    row = {name: getattr(item, name) for name in item.__slots__}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in row.items()}


def _transfer_row(item: Transfer) -> dict[str, Any]:
    row = _plain(item)
    boxes = boxes_to_rows(item.boxes)
    if boxes is None:
        del row["boxes"]
    else:
        row["boxes"] = boxes
    return row
