"""Where one kernel's time comes from on each device type: what counts, and what every other source would say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tessera_core.profile.catalogue import DeviceType, catalogue
from tessera_core.profile.merge import conflict_table, merge_profiles, profile_content
from tessera_core.profile.question import Question
from tessera_core.profile.sources import Looked, modelled, recorded, silicon
from tessera_core.profile.times import TimeRow, Times
from tessera_core.profile.work import Work
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.store import trace_from_bundle
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.artifact import TableArtifact
from tessera_formats.errors import InputError
from tessera_formats.profile import read_profile
from tessera_formats.trace import check_same_program, read_trace

LEAST_PREFIX = 4
"""Characters from which the beginning of a signature names a kernel."""

_FIGURES = ("memory_gb", "l2_mb", "multiprocessors", "datasheet.", "measured.")
"""Figures of a device type that times are made of; prices and links are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainStage:
    """``kernel``: an id like ``decode/12``, a name, or the beginning of a signature.

    ``devices``: types to explain; none: those of ``merged``, which are profiles of the trace. Other fields are those
    of :class:`~tessera_core.profile.stage.ProfileStage`.
    """

    kernel: str
    devices: tuple[str, ...] = ()
    merged: tuple[Path | str, ...] = ()
    references: tuple[Path | str, ...] = ()
    catalogues: tuple[Path, ...] = ()
    tables: bool = True

    def run(self, trace: Path) -> Facts:
        """All candidates; raises :class:`InputError` for a kernel or type that is not there, or no type at all."""
        bundle = read_trace(trace)
        question = Question.of(trace_from_bundle(bundle), bundle, catalogue(self.catalogues))
        program, kernel = find_kernel(question.trace, self.kernel)
        artifacts = {str(path): read_profile(path) for path in self.merged}
        check_same_program(
            {
                str(trace): question.trace.digest,
                **{name: item.header["program_digest"] for name, item in artifacts.items()},
            }
        )
        named = self.devices or tuple(
            dict.fromkeys(row["device_type"] for item in artifacts.values() for row in item.header["devices"])
        )
        if not named:
            raise InputError(
                "no device was named; add --device TYPE, or --merge PROFILE for the types of a profile"
            )
        kinds = [question.catalogue.type(name) for name in dict.fromkeys(named)]
        only = question.only(kernel.signature)
        looked = silicon(only, kinds) if self.tables else Looked({}, ())
        tables: list[FactTable] = []
        for kind in kinds:
            candidates = _candidates(only, kind, artifacts, looked)
            counting = _counting(question.trace.digest, candidates)
            tables.append(_candidate_table(kind, candidates, counting))
            tables += conflict_table(counting.conflicts)
        if looked.missing:
            tables.append(FactTable("not found", ("what",), tuple((line,) for line in looked.missing)))
        tables.append(_figure_table(kinds))
        return Facts("explain", _described(question, program, kernel), tuple(tables))


def find_kernel(trace: Trace, text: str) -> tuple[Program, Kernel]:
    """The kernel that ``text`` names: ``PROGRAM/ID`` with a program's name or phase, a name, a signature's beginning.

    Raises :class:`InputError` where there is none, or several that are not alike.
    """
    place, slash, number = text.rpartition("/")
    if slash and number.isdecimal():
        programs = [program for program in trace.programs if place in (program.name, program.phase)]
        if len(programs) > 1:
            names = " or ".join(f"{program.name}/{number}" for program in programs[:3])
            raise InputError(f"kernel {text}: {len(programs)} programs are called {place}; write {names}")
        if programs:
            (program,) = programs
            if int(number) >= len(program.kernels):
                raise InputError(
                    f"kernel {text}: {program.name} has kernels 0 to {len(program.kernels) - 1}; name one of them"
                )
            return program, program.kernels[int(number)]
    found: dict[str, tuple[Program, Kernel]] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            prefix = len(text) >= LEAST_PREFIX and kernel.signature.startswith(text)
            if prefix or kernel.name == text:
                found.setdefault(kernel.signature, (program, kernel))
    if not found:
        names = ", ".join(
            f"{program.phase}/0 to {program.phase}/{len(program.kernels) - 1}" for program in trace.programs
        )
        raise InputError(
            f"kernel {text}: is not in the trace; name one by its place ({names}), name or signature"
        )
    if len(found) > 1:
        first = ", ".join(f"{program.name}/{kernel.id}" for program, kernel in list(found.values())[:3])
        raise InputError(f"kernel {text}: {len(found)} different kernels are called so; name one: {first}")
    return next(iter(found.values()))


def _candidates(
    question: Question, kind: DeviceType, artifacts: Mapping[str, TableArtifact], looked: Looked
) -> list[tuple[str, TimeRow]]:
    """Every row that some source has for the one kernel of ``question``, with where it was found; best source first."""
    (signature,) = question.kernels
    rows: list[tuple[str, TimeRow]] = []
    for name, item in artifacts.items():
        for fields_of_row in item.table.to_pylist():
            row = TimeRow(**fields_of_row)
            if (row.signature, row.device_type) == (signature, kind.name):
                rows.append((name, row))
    rows += [("the trace", row) for row in recorded(question, kind)[0]]
    table = looked.rows.get((kind.name, signature))
    rows += [] if table is None else [("now", table)]
    return rows + [("now", row) for row in modelled(question, kind, [signature])]


def _counting(program_digest: str, candidates: Sequence[tuple[str, TimeRow]]) -> Times:
    """The candidates merged as profiles are, each standing alone."""
    artifacts = {}
    for number, (name, row) in enumerate(candidates):
        header, table = profile_content(program_digest, [row], (), ())
        artifacts[f"{name} ({number})"] = TableArtifact(header, table)
    return merge_profiles(artifacts)


def _candidate_table(
    kind: DeviceType, candidates: Sequence[tuple[str, TimeRow]], counting: Times
) -> FactTable:
    held = [row for rows in counting.rows.values() for row in rows]
    first = held[0].median_us
    seen: list[TimeRow] = []
    lines = []
    for name, row in candidates:
        counts = row in held and row not in seen
        seen.append(row)
        lines.append(
            (
                "counts" if counts else "",
                row.source,
                name,
                row.condition,
                row.cache,
                round(row.median_us, 2),
                round(row.low_us, 2),
                round(row.high_us, 2),
                round(row.median_us / first - 1, 4) if first else None,
                row.dtype,
                "; ".join(
                    part for part in (row.hardware or row.table, row.load and f"beside {row.load}") if part
                ),
                row.dated,
                round(math.exp(row.distance), 2) if row.source == "silicon" else None,
                row.detail,
            )
        )
    columns = (
        "counts", "source", "found_in", "condition", "cache", "median_us", "low_us", "high_us", "against_first_share",
        "dtype", "origin", "dated", "nearest_factor", "how",
    )  # fmt: skip
    return FactTable(kind.name, columns, tuple(lines))


def _figure_table(kinds: Sequence[DeviceType]) -> FactTable:
    """What the catalogue says of the types, and who says so."""
    rows = [
        (kind.base, place, figure.value, figure.source)
        for kind in {kind.base: kind for kind in kinds}.values()
        for place, figure in sorted(kind.figures.items())
        if place.startswith(_FIGURES)
    ]
    return FactTable("catalogue", ("device_type", "figure", "value", "says"), tuple(rows))


def _described(question: Question, program: Program, kernel: Kernel) -> dict[str, object]:
    alike = sum(k.signature == kernel.signature for p in question.trace.programs for k in p.kernels)
    return {
        "kernel": f"{program.name}/{kernel.id}",
        "name": kernel.name,
        "kind": kernel.kind,
        "signature": kernel.signature,
        "kernels_alike": alike,
        "work": _in_words(question.works[kernel.signature]),
        "dtype": kernel.dtype,
        "flops": kernel.flops,
        "bytes": kernel.read_bytes + kernel.written_bytes,
    }


def _in_words(work: Work) -> str:
    parts = [f"{field.name} {getattr(work, field.name)}" for field in fields(work) if field.name != "dtype"]
    return f"{type(work).__name__.lower()}: {', '.join(parts)}"
