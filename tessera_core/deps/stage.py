"""The ptx-deps stage: which kernel needs which bytes of which other, per target, and what that rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from tessera_core.deps.accesses import fold_ops, without_internal
from tessera_core.deps.graph import LOOSEST_FIRST, WEAKEST_FIRST, Access, Edge, Precision
from tessera_core.deps.hazards import Hazards, find_hazards, precision_counts, with_ties
from tessera_core.deps.ptx_evidence import LaunchBlocks, TargetEvidence, target_evidence
from tessera_core.deps.races import check_races
from tessera_core.program.ir import Evidence, Program, Trace
from tessera_core.program.store import boxes_to_rows, trace_from_bundle
from tessera_core.report.facts import Facts, FactTable
from tessera_formats.bundle import Bundle
from tessera_formats.deps import DEPS, OPS_TARGET, write_deps
from tessera_formats.errors import ArtifactError, InputError, VerificationError
from tessera_formats.trace import read_trace

Validator = Callable[[Trace, Bundle, str], Facts]

FALLBACKS_SHOWN = 12
"""Reasons listed in the summary; all are in the artifact, one per access."""


@dataclass(frozen=True, slots=True)
class DepsStage:
    """Dependencies by schema and declaration (always) and by the PTX of ``targets`` (None: all captured ones).

    ``resolve``: look addresses that depend on data up in the constants that the trace stores. ``validator``: puts
    a target's result to the test on a GPU, before anything is written; its facts say ``kernels_refuted``.
    """

    targets: tuple[str, ...] | None = None
    resolve: bool = False
    validator: Validator | None = None

    def run(self, trace: Path, output: Path, progress: Callable[[str], None] = lambda _: None) -> Facts:
        """Analyse ``trace`` and write the deps artifact to ``output``.

        Raises InputError for a target that the trace lacks, PtxSyntaxError for a module that is not PTX,
        ModelError for a race between streams and where a declaration and the PTX contradict each other; to
        validate, InputError without a GPU and VerificationError where it refutes an access. Nothing is written
        then.
        """
        bundle = read_trace(trace)
        program_trace = trace_from_bundle(bundle)
        captured = bundle.targets()
        chosen = captured if self.targets is None else tuple(dict.fromkeys(self.targets))
        for name in chosen:
            if name != OPS_TARGET and name not in captured:
                raise InputError(
                    f"{trace}: has no target {name} (it has {', '.join((OPS_TARGET, *captured))});"
                    f" add it with tessera trace --ptx-target {name}"
                )
        by_ops = {program.id: fold_ops(program_trace, program) for program in program_trace.programs}
        results = [analyse_target(program_trace, None, by_ops)]
        content = stored_content(program_trace) if self.resolve else {}
        if self.validator is not None and not set(chosen) - {OPS_TARGET}:
            raise InputError(
                f"{trace}: has no captured target to validate; add one with tessera trace --capture"
            )
        for name in sorted(set(chosen) - {OPS_TARGET}):
            progress(f"analysing the PTX of {name}")
            results.append(
                analyse_target(program_trace, target_evidence(program_trace, bundle, name, content), by_ops)
            )
        # What PTX bounds closer than a declaration may be no race after all.
        for result in results[1:] or results:
            for number, found in result.hazards.items():
                check_races(program_trace, program_trace.programs[number], found.edges)
        tested = (
            []
            if self.validator is None
            else [
                _validated(self.validator(program_trace, bundle, r.target), bundle, r.target)
                for r in results[1:]
            ]
        )
        info = {
            "program_digest": program_trace.digest,
            "targets": [result.target for result in results],
            "modules": sorted({module for result in results for module in result.modules}),
            "unknown_opcodes": sorted({opcode for result in results for opcode in result.unknown_opcodes}),
        }
        write_deps(output, info, deps_tables(results))
        facts = _facts(output, program_trace, info, results)
        facts = replace(facts, tables=(*facts.tables, *(table for found in tested for table in found.tables)))
        return _with_resolved(facts, results, content) if self.resolve else facts


def _validated(facts: Facts, bundle: Bundle, target: str) -> Facts:
    """A validator's tables under the target's name, where it refuted nothing."""
    if facts.values["kernels_refuted"]:
        raise VerificationError(
            f"{bundle.path}: {facts.values['kernels_refuted']} of {facts.values['kernels_tested']} kernels of"
            f" {target} touch other bytes than was concluded from their launches; report this as a bug"
        )
    tables = (FactTable(f"{t.title}, {target}", t.columns, t.rows) for t in facts.tables)
    return replace(facts, tables=tuple(tables))


def stored_content(trace: Trace) -> dict[int, bytes]:
    """The bytes of the buffers that the trace stores and that no op writes."""
    written = {
        trace.tensors[operand.tensor].buffer
        for program in trace.programs
        for op in program.ops
        for operand in op.operands
        if operand.mode == "write"
    }
    try:
        stored = load_safetensors(trace.constants)
    except (SafetensorError, ValueError) as problem:
        raise ArtifactError(f"trace constants are damaged ({problem}); trace again") from problem
    found = {int(name.removeprefix("buffer.")): value.tobytes() for name, value in stored.items()}
    return {buffer: value for buffer, value in found.items() if buffer not in written}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """A target's findings. ``own``: the accesses that rest on this target alone, by kernel.

    ``hazards`` by program and ``coverage``, (evidence, precision) -> (accesses, kernels, edges), rest on these and,
    for kernels that the target says nothing about, on the schemas and declarations.
    """

    target: str
    own: tuple[Access, ...]
    hazards: Mapping[int, Hazards]
    coverage: Mapping[tuple[Evidence, Precision], tuple[int, int, int]]
    blocks: tuple[LaunchBlocks, ...] = ()
    resolved: int = 0
    modules: tuple[str, ...] = ()
    unknown_opcodes: tuple[str, ...] = ()
    fallbacks: tuple[tuple[int, str], ...] = ()


def analyse_target(
    trace: Trace, evidence: TargetEvidence | None, by_ops: Mapping[int, Sequence[Access]] | None = None
) -> TargetResult:
    """Accesses and hazards of all programs: by schema and declaration, or with a target's evidence in their place.

    ``by_ops``: what :func:`fold_ops` says of each program, where that is known already.
    """
    by_ops = by_ops or {program.id: fold_ops(trace, program) for program in trace.programs}
    own: list[Access] = []
    hazards: dict[int, Hazards] = {}
    counts: dict[tuple[Evidence, Precision], list[int]] = defaultdict(lambda: [0, 0, 0])
    fallbacks: dict[str, set[tuple[int, int]]] = defaultdict(set)
    sizes = [buffer.bytes for buffer in trace.buffers]
    homed = frozenset(buffer.id for buffer in trace.buffers if buffer.kind == "state")
    for program in trace.programs:
        used = used_accesses(trace, program, by_ops[program.id], evidence)
        target = OPS_TARGET if evidence is None else evidence.target
        own.extend(access for access in used if access.target == target)
        by_scratch = () if evidence is None else evidence.chains.get(program.id, ())
        found = with_ties(find_hazards(used, sizes, homed), [*program.ties(), *by_scratch])
        hazards[program.id] = found
        kernels: dict[tuple[Evidence, Precision], set[int]] = defaultdict(set)
        for access in used:
            if access.valid_for == "shapes":
                key = (access.evidence, access.precision)
                counts[key][0] += 1
                kernels[key].add(access.kernel)
                if access.precision == "fallback" and access.target == OPS_TARGET and evidence is None:
                    fallbacks[access.detail].add((program.id, access.kernel))
        for key, members in kernels.items():
            counts[key][1] += len(members)
        for key, number in precision_counts(found).items():
            counts[key][2] += number
    counted = sorted(
        ((len(found), reason) for reason, found in fallbacks.items()), key=lambda f: (-f[0], f[1])
    )
    return TargetResult(
        target=OPS_TARGET if evidence is None else evidence.target,
        own=tuple(own),
        hazards=hazards,
        coverage={key: (a, k, e) for key, (a, k, e) in counts.items()},
        blocks=() if evidence is None else evidence.blocks,
        resolved=0 if evidence is None else evidence.resolved,
        modules=() if evidence is None else evidence.modules,
        unknown_opcodes=() if evidence is None else evidence.unknown_opcodes,
        fallbacks=tuple(counted) if evidence is None else evidence.fallbacks,
    )


def deps_tables(results: Sequence[TargetResult]) -> dict[str, Any]:
    """The deps artifact's tables, in a fixed order of rows."""
    rows: dict[str, list[dict[str, Any]]] = {schema.name: [] for schema in DEPS.tables}
    for result in results:
        rows["accesses"].extend(_access_row(access) for access in result.own)
        for program, found in sorted(result.hazards.items()):
            rows["edges"].extend({"target": result.target, **_edge_row(edge)} for edge in found.edges)
            for number, chain in enumerate(found.chains):
                rows["chains"].extend(
                    {"target": result.target, "program": program, "chain": number, "kernel": kernel}
                    for kernel in chain
                )
        for launch in result.blocks:
            rows["block_footprints"].extend(_block_rows(result.target, launch))
            rows["splits"].append(_split_row(result.target, launch))
        rows["coverage"].extend(
            dict(zip(_COVERAGE, (result.target, *key, *numbers), strict=True))
            for key, numbers in sorted(result.coverage.items(), key=_strongest_first)
        )
    return {schema.name: schema.build(rows[schema.name]) for schema in DEPS.tables}


_COVERAGE = ("target", "evidence", "precision", "accesses", "kernels", "edges")


def used_accesses(
    trace: Trace, program: Program, by_ops: Sequence[Access], evidence: TargetEvidence | None
) -> list[Access]:
    """Accesses of a program that a target's deps rest on: its own, and for other kernels those ``by_ops``."""
    if evidence is not None:
        replaced = evidence.kernels.get(program.id, frozenset())
        own = evidence.accesses.get(program.id, ())
        by_ops = [*(access for access in by_ops if access.kernel not in replaced), *own]
    return without_internal(trace, program, by_ops)


def _access_row(access: Access) -> dict[str, Any]:
    return {name: getattr(access, name) for name in _ACCESS_FIELDS} | {"boxes": boxes_to_rows(access.boxes)}


def _block_rows(target: str, launch: LaunchBlocks) -> Iterator[dict[str, Any]]:
    for found in launch.footprints:
        yield {
            "target": target,
            "program": launch.program,
            "kernel": launch.kernel,
            "launch": launch.launch,
            "buffer": found.buffer,
            "mode": found.mode,
            "must": found.must,
            "first": found.first,
            "last": found.last,
            "boxes": boxes_to_rows(found.boxes),
            "step": found.step,
        }


def _split_row(target: str, launch: LaunchBlocks) -> dict[str, Any]:
    split = launch.split
    return {
        "target": target,
        "program": launch.program,
        "kernel": launch.kernel,
        "launch": launch.launch,
        "blocks": split.blocks,
        "independent": split.independent,
        "disjoint_writes": split.disjoint_writes,
        "reads_apart": split.reads_apart,
        "atomics": split.atomics,
        "reason": split.reason,
    }


def _edge_row(edge: Edge) -> dict[str, Any]:
    return {name: getattr(edge, name) for name in _EDGE_FIELDS} | {"boxes": boxes_to_rows(edge.boxes)}


_ACCESS_FIELDS = tuple(column.name for column in DEPS.tables[0].columns)
_EDGE_FIELDS = tuple(column.name for column in DEPS.tables[1].columns if column.name != "target")


def _strongest_first(entry: tuple[tuple[Evidence, Precision], object]) -> tuple[int, int]:
    evidence, precision = entry[0]
    return -WEAKEST_FIRST.index(evidence), -LOOSEST_FIRST.index(precision)


def _facts(output: Path, trace: Trace, info: Mapping[str, Any], results: Sequence[TargetResult]) -> Facts:
    coverage = tuple(
        (result.target, *key, *numbers)
        for result in results
        for key, numbers in sorted(result.coverage.items(), key=_strongest_first)
    )
    hazards = []
    for result in results:
        edges = [edge for found in result.hazards.values() for edge in found.edges]
        raw = [edge for edge in edges if edge.hazard == "RAW"]
        proven = {(a.program, a.kernel, a.buffer) for a in result.own if a.evidence == "ptx"}
        hazards.append(
            (
                result.target,
                len(raw),
                sum(edge.must for edge in raw),
                sum(
                    (e.program, e.source, e.buffer) in proven
                    or (e.program, e.destination, e.buffer) in proven
                    for e in raw
                ),
                sum(edge.hazard == "WAR" for edge in edges),
                sum(edge.hazard == "WAW" for edge in edges),
                sum(len(found.chains) for found in result.hazards.values()),
            )
        )
    fallbacks = [(result.target, count, reason) for result in results for count, reason in result.fallbacks]
    tables = [
        FactTable("coverage", _COVERAGE, coverage),
        FactTable(
            "dependencies",
            ("target", "RAW", "RAW shipped alone", "RAW with an end from PTX", "WAR", "WAW", "chains"),
            tuple(hazards),
        ),
    ]
    if fallbacks:
        shown = tuple(fallbacks[:FALLBACKS_SHOWN])
        tables.append(FactTable("not exact", ("target", "kernels", "reason"), shown))
    values = {
        "deps": str(output),
        "program_digest": info["program_digest"],
        "targets": list(info["targets"]),
        "programs": len(trace.programs),
        "kernels": sum(len(program.kernels) for program in trace.programs),
        "modules": len(info["modules"]),
        "unknown_opcodes": list(info["unknown_opcodes"]),
        "reasons_not_exact": len(fallbacks),
    }
    return Facts("dependencies between kernels", values, tuple(tables))


def _with_resolved(facts: Facts, results: Sequence[TargetResult], content: Mapping[int, bytes]) -> Facts:
    """The facts with what ``--resolve`` found, and how much it had to go by."""
    values = {**facts.values, "stored_buffers": len(content), "resolved": sum(r.resolved for r in results)}
    loose = sum(
        access.precision == "bounded" and access.evidence == "ptx" and access.valid_for == "shapes"
        for result in results
        for access in result.own
    )
    return replace(facts, values={**values, "not_resolved": max(0, loose - values["resolved"])})
