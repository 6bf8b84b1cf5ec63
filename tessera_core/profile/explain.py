"""Where one kernel's time comes from on each device type: what counts, and what every other source would say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tessera_core.profile.binding import parse_bindings
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
from tessera_formats.profile import SOURCES, read_profile
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
        bindings = parse_bindings(tuple(dict.fromkeys(named)), None, question.catalogue)
        for binding in bindings:
            if binding.hardware is not None:
                raise InputError(
                    f"device {binding.type.name}={binding.hardware.name}: --explain measures nothing; name the type"
                    f" alone, and with --merge a profile that holds its measured times"
                )
        kinds = [binding.type for binding in bindings]
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
) -> dict[TimeRow, list[str]]:
    """Every row that some source has for the one kernel of ``question``, with where it was found."""
    (signature,) = question.kernels
    found: dict[TimeRow, list[str]] = {}
    for name, item in artifacts.items():
        for content in item.table.to_pylist():
            row = TimeRow(**content)
            if (row.signature, row.device_type) == (signature, kind.name):
                found.setdefault(row, []).append(name)
    for row in recorded(question, kind)[0]:
        found.setdefault(row, []).append("the trace")
    table = looked.rows.get((kind.name, signature))
    for row in [*([] if table is None else [table]), *modelled(question, kind, [signature])]:
        found.setdefault(row, []).append("now")
    return found


def _counting(program_digest: str, candidates: Mapping[TimeRow, Sequence[str]]) -> Times:
    """The candidates merged as profiles are, each standing alone."""
    artifacts = {}
    for number, (row, names) in enumerate(candidates.items(), 1):
        header, table = profile_content(program_digest, [row], (), ())
        artifacts[f"{number}: {names[0]}"] = TableArtifact(header, table)
    return merge_profiles(artifacts)


def _candidate_table(
    kind: DeviceType, candidates: Mapping[TimeRow, Sequence[str]], counting: Times
) -> FactTable:
    """What counts first, then the others in order of trust."""
    (held,) = counting.rows.values()
    order = sorted(candidates, key=lambda row: (row not in held, SOURCES.index(row.source)))
    counted = order[0].median_us
    rows = tuple(
        (
            row in held,
            row.source,
            ", ".join(candidates[row]),
            row.condition,
            row.cache,
            round(row.median_us, 2),
            round(row.low_us, 2),
            round(row.high_us, 2),
            round(row.median_us / counted - 1, 4) if counted else None,
            row.dtype,
            row.hardware or row.table,
            row.load,
            row.dated,
            round(math.exp(row.distance), 2) if row.source == "silicon" else None,
            row.detail,
        )
        for row in order
    )
    columns = (
        "counts", "source", "found_in", "condition", "cache", "median_us", "low_us", "high_us", "apart_share",
        "dtype", "origin", "beside", "dated", "nearest", "how",
    )  # fmt: skip
    return FactTable(kind.name, columns, rows)


def _figure_table(kinds: Sequence[DeviceType]) -> FactTable:
    """What the catalogue says of the types, and who says so."""
    said: dict[tuple[str, str], list[str]] = {}
    for kind in kinds:
        for place, figure in kind.figures.items():
            if place.startswith(_FIGURES):
                said.setdefault((kind.base, figure.source), []).append(f"{place} {figure.value:,}")
    rows = tuple(
        (base, ", ".join(dict.fromkeys(figures)), source) for (base, source), figures in said.items()
    )
    return FactTable("catalogue", ("device_type", "figures", "said_by"), rows)


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
