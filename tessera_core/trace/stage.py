"""The ``trace`` stage: a model in, a trace artifact out."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tessera_core.program.ir import Trace
from tessera_core.program.store import trace_tables
from tessera_core.report.facts import Facts, FactTable
from tessera_core.trace.build import check_requests, trace_model
from tessera_core.trace.capture.stage import CaptureStage
from tessera_core.trace.factory import build, parse_dtype
from tessera_core.trace.fake import new_fake_mode
from tessera_core.trace.inputs import input_kind
from tessera_core.trace.inputs.export import ExportedModel
from tessera_core.trace.parallel.shard import build_shard
from tessera_core.trace.parallel.shares import parse_shard
from tessera_core.trace.ptx_targets import check_targets, target_tables
from tessera_core.trace.request import ProgramRequest
from tessera_formats.errors import InputError
from tessera_formats.trace import write_trace

_PACKAGES = ("tessera-toolchain", "torch", "triton", "transformers", "diffusers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStage:
    """Trace ``model`` (a catalogue name, ``file.py:factory`` or a ``.pt2``) for each of ``programs``.

    No programs at all: those that a ``.pt2`` was exported for.
    ``dtype`` None is the model's own. ``fake`` traces without the memory of weights and state.
    ``ptx_targets`` names architectures (``sm_90``) for which the model's Triton kernels are compiled to PTX.
    ``capture`` adds what it captures to the trace once that is written. ``tensor_parallel`` (``2``, or uneven
    shares, ``2,1``) traces the part of ``rank``.
    """

    model: str
    programs: tuple[ProgramRequest, ...]
    dtype: str | None = None
    seed: int = 0
    fake: bool = False
    ptx_targets: tuple[str, ...] = ()
    capture: CaptureStage | None = None
    tensor_parallel: str | None = None
    rank: int = 0

    def run(self, output: Path, progress: Callable[[str], None] = lambda message: None) -> Facts:
        """Write the trace to ``output``; raises :class:`InputError` and :class:`ModelError`."""
        started = time.perf_counter()
        programs = self.programs
        if programs or input_kind(self.model) != "export":
            check_requests(programs)
        check_targets(self.ptx_targets)
        if self.capture is not None:
            self.capture.check()
        dtype = parse_dtype(self.dtype)
        if self.tensor_parallel is None and self.rank:
            raise InputError(f"rank {self.rank}: there is one rank; add --tensor-parallel")
        shard = None if self.tensor_parallel is None else parse_shard(self.tensor_parallel, self.rank)
        fake_mode = new_fake_mode() if self.fake else None
        progress(f"building {self.model}")
        if shard is None:
            built = build(self.model, dtype, self.seed, fake_mode)
        else:
            built = build_shard(self.model, dtype, self.seed, shard, fake_mode)
        if isinstance(built.model, ExportedModel):
            programs = programs or (built.model.own_request(),)
        traced = trace_model(
            built,
            programs,
            seed=self.seed,
            fake_mode=fake_mode,
            versions=package_versions(),
            progress=progress,
        )
        captured = target_tables(traced, self.ptx_targets, progress)
        progress(f"writing {output}")
        info = dict(traced.trace.info)
        write_trace(output, info, {**trace_tables(traced.trace), **captured}, traced.trace.constants)
        modules = {
            name.split("/")[1]: table.num_rows for name, table in captured.items() if "modules" in name
        }
        facts = trace_facts(traced.trace, modules, output, time.perf_counter() - started)
        if self.capture is None:
            return facts
        more = self.capture.run(output, output, progress)
        return Facts(facts.title, {**facts.values, **more.values}, (*facts.tables, *more.tables))


def package_versions() -> dict[str, str]:
    """Versions of what took part, for a reader's information only."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def trace_facts(trace: Trace, modules: dict[str, int], output: Path, seconds: float) -> Facts:
    """What was traced: sizes once, and a row per program."""
    weights = {weight.buffer for weight in trace.weights}
    rows = []
    for program in trace.programs:
        state = {trace.tensors[b.tensor].buffer for b in program.io if b.role == "state"}
        rows.append(
            (
                program.name,
                len(program.ops),
                len(program.kernels),
                len({kernel.signature for kernel in program.kernels}),
                sum(kernel.flops for kernel in program.kernels),
                sum(kernel.read_bytes for kernel in program.kernels),
                sum(trace.buffers[buffer].bytes for buffer in state),
                len(program.guards),
            )
        )
    values = {
        "model": trace.info["model"],
        "output": str(output),
        "dtype": trace.info["dtype"],
        "fake": trace.info["fake"],
        **{name: trace.info[name] for name in ("tensor_parallel", "rank") if name in trace.info},
        "weight_bytes": sum(trace.buffers[buffer].bytes for buffer in weights),
        "signatures": len({k.signature for p in trace.programs for k in p.kernels}),
        "ptx_modules": modules,
        "replayable": trace.info["replayable"],
        "notes": trace.info["notes"],
        "seconds": round(seconds, 2),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    columns = ("program", "ops", "kernels", "signatures", "flops", "read_bytes", "state_bytes", "guards")
    return Facts("trace", values, (FactTable("programs", columns, tuple(rows)),))
