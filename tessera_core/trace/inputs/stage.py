"""A recorded profile as a trace for planning: kernels, recorded times, and what is known of dependencies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import safetensors.numpy

from tessera_core.profile.catalogue import catalogue
from tessera_core.program.guards import NOT_REPLAYABLE
from tessera_core.program.ir import Program, Trace
from tessera_core.program.store import trace_tables
from tessera_core.report.facts import Facts
from tessera_core.trace.inputs.builder import RecordedProgram
from tessera_core.trace.inputs.by_storage import with_storages
from tessera_core.trace.inputs.chain import chained
from tessera_core.trace.inputs.execution_trace import read_execution_trace
from tessera_core.trace.inputs.iteration import Group, Iteration, choose_iteration
from tessera_core.trace.inputs.kineto import Profile, read_profile
from tessera_core.trace.request import ProgramRequest
from tessera_core.trace.stage import package_versions, trace_facts
from tessera_formats.errors import InputError
from tessera_formats.trace import TRACE, write_trace

OVERLAP_WORTH_A_NOTE = 0.02
"""Share of the launches' time that lies beside other launches; less is the tail of one under the head of the next."""
REMEDY = "a profile has times but no values; trace the model itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStage:
    """Make a trace of the profile ``path`` and the ExecutionTrace that was recorded with it, if there is one.

    ``program``: what the iteration is (None: one request of a step). ``iteration``: the number of its
    ``ProfilerStep``. ``gpu_type``: the catalogue's type of the GPU, where its reported name does not tell.
    ``catalogues``: files of users' device types.
    """

    path: Path
    execution_trace: Path | None = None
    program: ProgramRequest | None = None
    iteration: int | None = None
    gpu_type: str | None = None
    catalogues: tuple[Path, ...] = ()

    def run(self, output: Path, progress: Callable[[str], None] = lambda message: None) -> Facts:
        """Write the trace to ``output``; raises :class:`InputError` for files that cannot be used."""
        started = time.perf_counter()
        if self.gpu_type is not None:
            catalogue(self.catalogues).type(self.gpu_type)
        progress(f"reading {self.path}")
        profile = read_profile(self.path)
        chosen = choose_iteration(profile, self.iteration)
        gpu_type = self._type(profile, chosen)
        if self.execution_trace is None:
            recorded = chained(chosen)
        else:
            progress(f"reading {self.execution_trace}")
            nodes = read_execution_trace(self.execution_trace, chosen.ops, self.path)
            recorded = with_storages(chosen, nodes)
        trace = self._trace(chosen, recorded, self._type_note(profile, chosen))
        target = "recorded-" + gpu_type.replace("/", "-").replace("=", "")  # a folder's name
        tables = {
            f"targets/{target}/{name}": table for name, table in _target(profile, chosen, gpu_type).items()
        }
        progress(f"writing {output}")
        write_trace(output, dict(trace.info), {**trace_tables(trace), **tables}, trace.constants)
        facts = trace_facts(trace, {}, output, time.perf_counter() - started)
        launches = sum(len(group.launches) for group in chosen.groups)
        recorded_us = sum(launch.duration_us for group in chosen.groups for launch in group.launches)
        more = {"gpu_type": gpu_type, "launches": launches, "recorded_us": round(recorded_us, 1)}
        return Facts(facts.title, {**facts.values, **more}, facts.tables)

    def _type(self, profile: Profile, chosen: Iteration) -> str:
        if self.gpu_type is not None:
            return self.gpu_type
        name = profile.gpus.get(chosen.device)
        found = None if name is None else catalogue(self.catalogues).reported(name)
        if found is None:
            what = (
                "does not name its GPU"
                if name is None
                else f"was recorded on {name!r}, which is not in the catalogue"
            )
            raise InputError(f"{self.path}: {what}; say which type it is: --gpu-type TYPE")
        return found.name

    def _type_note(self, profile: Profile, chosen: Iteration) -> str | None:
        """Whether the user's ``gpu_type`` is another than the one that the profile itself names."""
        name = profile.gpus.get(chosen.device)
        found = None if name is None else catalogue(self.catalogues).reported(name)
        if self.gpu_type is None or found is None or found.name == self.gpu_type:
            return None
        return f"times of {name} (type {found.name}) count as measured times of {self.gpu_type}: so asked by --gpu-type"

    def _trace(self, chosen: Iteration, recorded: RecordedProgram, type_note: str | None) -> Trace:
        request = self.program or ProgramRequest("step", 1, 1)
        notes = [f"{NOT_REPLAYABLE}{REMEDY}", f"recorded: {chosen.said}", *recorded.notes]
        notes += [note for note in (type_note, overlap_note(chosen)) if note]
        if self.program is None:
            notes.append(
                f"nothing says how many requests the iteration served; taken as {request.name} (--program)"
            )
        program = Program(
            id=0,
            name=request.name,
            phase=request.phase,
            batch=request.batch,
            context=request.context,
            ops=recorded.ops,
            kernels=recorded.kernels,
            io=recorded.io,
            guards=(),
        )
        info: dict[str, Any] = {
            "model": str(self.path),
            "source": "kineto",
            "seed": 0,
            "dtype": recorded.dtype,
            "fake": True,
            "replayable": False,
            "notes": notes,
            "versions": package_versions(),
        }
        return Trace(
            info=info,
            programs=(program,),
            buffers=tuple(entry.freeze(entry.id) for entry in recorded.registry.buffers),
            tensors=tuple(recorded.registry.tensors),
            weights=recorded.weights,
            states=recorded.states,
            constants=safetensors.numpy.save({}),
        )


def overlap_note(chosen: Iteration) -> str | None:
    """That recorded times hold what launches took from each other, where some ran at the same time."""
    spans = sorted(
        (launch.start_us, launch.start_us + launch.duration_us)
        for group in chosen.groups
        for launch in group.launches
    )
    together_us, until = 0.0, -math.inf
    for start, end in spans:
        together_us += max(0.0, min(end, until) - start)
        until = max(until, end)
    total_us = sum(end - start for start, end in spans)
    if together_us < OVERLAP_WORTH_A_NOTE * total_us or not together_us:
        return None
    return (
        f"launches ran side by side: {together_us:.1f} of {total_us:.1f} µs lie beside others, and such times hold what"
        " the launches took from each other; a plan's time of one device is the sum of all"
    )


def _target(profile: Profile, chosen: Iteration, gpu_type: str) -> Mapping[str, pa.Table]:
    """The target's tables: launches without parameters, and their recorded times."""
    rows: dict[str, list[dict[str, Any]]] = {schema.name: [] for schema in TRACE.target_tables}
    first = min(launch.start_us for group in chosen.groups for launch in group.launches)
    for kernel, group in enumerate(chosen.groups):
        for number, launch in enumerate(group.launches):
            key = {"program": 0, "kernel": kernel, "launch": number}
            rows["launches"].append(
                {
                    **key,
                    "op": kernel,
                    "kind": launch.kind,
                    "module": None,
                    "function": launch.name,
                    "grid": list(launch.grid),
                    "block": list(launch.block),
                    "cluster": [1, 1, 1],
                    "shared_bytes": launch.shared_bytes,
                    "parameters": b"",
                    "relocations": [],
                }
            )
            rows["recorded"].append(
                {
                    **key,
                    "stream": launch.stream,
                    "start_us": launch.start_us - first,
                    "duration_us": launch.duration_us,
                }
            )
        rows["launch_edges"] += _edges(kernel, group)
    facts = {"device": profile.gpus.get(chosen.device, ""), "device_type": gpu_type, **profile.facts}
    rows["capture"] = [{"name": name, "value": value} for name, value in sorted(facts.items())]
    return {schema.name: schema.build(rows[schema.name]) for schema in TRACE.target_tables}


def _edges(kernel: int, group: Group) -> list[dict[str, int]]:
    """Launches of a kernel follow each other as they were issued."""
    return [
        {"program": 0, "kernel": kernel, "source": number, "destination": number + 1}
        for number in range(len(group.launches) - 1)
    ]
