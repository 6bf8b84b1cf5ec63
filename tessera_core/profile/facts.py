"""What a profile found, as facts: each type's time per iteration with its share by source, devices, links, and what no
table holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera_core.profile.merge import conflict_table
from tessera_core.profile.question import Question
from tessera_core.profile.times import Conflict, DeviceRow, LinkRow, TimeRow
from tessera_core.program.ir import Kernel
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.profile import CONDITIONS, SOURCES

if TYPE_CHECKING:
    from tessera_core.profile.measure.cpu import WholeTime

_SHARES = tuple(f"{source}_share" for source in SOURCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The content of a profile, and what is to be said of it.

    ``whole``: measured times of whole iterations by (device type, program id, condition). ``missing``: what could not
    be looked up or measured, a line each.
    """

    rows: Sequence[TimeRow]
    links: Sequence[LinkRow]
    devices: Sequence[DeviceRow]
    whole: Mapping[tuple[str, int, str], WholeTime]
    missing: Sequence[str]
    conflicts: Sequence[Conflict] = ()


def profile_facts(question: Question, answer: Answer) -> Facts:
    """What the profile command prints of ``answer``."""
    tables = [
        FactTable(
            "iterations",
            ("device_type", "program", "condition", "kernels", "total_us", "low_us", "high_us", *_SHARES,
             "whole_us", "disturbed_share"),
            tuple(_iteration_rows(question, answer)),
        ),
        FactTable(
            "devices",
            ("device_type", "source", "hardware", "rows", "overhead_us"),
            tuple(
                (
                    device.device_type,
                    device.source,
                    device.hardware,
                    sum(row.device_type == device.device_type for row in answer.rows),
                    round(device.overhead_us, 2),
                )
                for device in answer.devices
            ),
        ),
    ]  # fmt: skip
    if answer.links:
        tables.append(_link_table(answer.links))
    if answer.missing:
        tables.append(FactTable("not found", ("what",), tuple((line,) for line in answer.missing)))
    known = question.catalogue
    values = {
        "model": question.trace.info["model"],
        "kernels": sum(len(program.kernels) for program in question.trace.programs),
        "signatures": len(question.kernels),
        "rows": len(answer.rows),
        "catalogue": ", with ".join((known.date, *(str(path) for path in known.entries))),
    }
    return Facts("profile", values, (*tables, *conflict_table(answer.conflicts)))


def _iteration_rows(question: Question, answer: Answer) -> Iterable[tuple[object, ...]]:
    held: dict[tuple[str, str], dict[str, TimeRow]] = {}
    for row in answer.rows:
        held.setdefault((row.device_type, row.condition), {})[row.signature] = row
    for device in answer.devices:
        for condition in CONDITIONS:
            under = held.get((device.device_type, condition))
            if under is None:
                continue
            own = {**held.get((device.device_type, "alone"), {}), **under}
            for program in question.trace.programs:
                time = answer.whole.get((device.device_type, program.id, condition))
                yield (
                    device.device_type,
                    program.name,
                    condition,
                    len(program.kernels),
                    *_totals(program.kernels, own),
                    None if time is None else round(time.median_us, 1),
                    None if time is None else round(time.disturbed, 3),
                )


def _totals(kernels: Sequence[Kernel], own: Mapping[str, TimeRow]) -> tuple[float | None, ...]:
    """Time of an iteration, its interval were all kernels off alike, and the share of the time by source.

    Nones where a merged profile has no time of some kernel under the condition.
    """
    if any(kernel.signature not in own for kernel in kernels):
        return (None,) * (3 + len(SOURCES))
    found = [own[kernel.signature] for kernel in kernels]
    total = sum(row.median_us for row in found)
    shares = [sum(row.median_us for row in found if row.source == source) for source in SOURCES]
    return (
        round(total, 1),
        round(sum(row.low_us for row in found), 1),
        round(sum(row.high_us for row in found), 1),
        *(round(share / total, 4) if total else 0.0 for share in shares),
    )


LINK_FIGURES = ("latency_us", "gbit_per_s", "send_us", "receive_us", "residual_share")
"""Columns of :func:`link_figures`."""


def link_figures(link: LinkRow) -> tuple[float, ...]:
    """What a link costs, as tables show it."""
    return (
        round(link.latency_us, 2),
        round(link.gbit_per_s, 2),
        round(link.send_us, 2),
        round(link.receive_us, 2),
        round(link.residual, 3),
    )


def _link_table(links: Sequence[LinkRow]) -> FactTable:
    return FactTable(
        "links",
        ("source", "destination", "transport", *LINK_FIGURES),
        tuple((link.source, link.destination, link.transport, *link_figures(link)) for link in links),
    )
