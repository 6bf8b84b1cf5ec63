"""Capture as a stage: launches of a device added to a trace that exists, and targets merged between traces."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from torch._inductor.utils import clear_caches

from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.store import trace_from_bundle
from tessera_core.report.facts import Facts, FactTable
from tessera_core.trace.capture.driver import driver
from tessera_core.trace.capture.reconcile import Reconciled, reconcile
from tessera_core.trace.capture.session import Session
from tessera_core.trace.capture.tables import Captured, target_tables
from tessera_formats.bundle import Bundle
from tessera_formats.errors import InputError
from tessera_formats.trace import TRACE, check_same_program, read_trace, write_trace

_DEVICE = re.compile(r"cuda:\d+")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStage:
    """Add to a trace the launches that ``device`` (``cuda:0``) makes of it, and targets of other traces.

    ``compiled``: by ``torch.compile``, else as PyTorch runs ops eagerly. ``trusted``: user code that the trace
    names may be imported. ``reconciled``: the whole eager iteration is captured and checked too.
    """

    device: str | None = None
    compiled: bool = True
    trusted: bool = False
    reconciled: bool = True
    add_targets: tuple[Path, ...] = ()

    def check(self) -> None:
        """Refuse, before anything long is done, what :meth:`run` could not do; raises :class:`InputError`."""
        if self.device is not None:
            check_device(self.device)
        for other in self.add_targets:
            read_trace(other)

    def run(self, path: Path, output: Path, progress: Progress = lambda message: None) -> Facts:
        """Read the trace at ``path``, write it with its new targets to ``output``."""
        started = time.perf_counter()
        bundle = read_trace(path)
        if bundle.info["source"] == "kineto":
            raise InputError(
                f"{path}: was made from a profile, so there is nothing to capture or to merge; trace the model itself"
            )
        self.check()
        tables = {name: bundle.table(name) for name in bundle.entries}
        for other in self.add_targets:
            tables |= merged_targets(bundle, read_trace(other))
        values: dict[str, object] = {"trace": str(path), "output": str(output)}
        found: tuple[FactTable, ...] = ()
        if self.device is not None:
            trace = trace_from_bundle(bundle)
            name, added, session, captured = self.capture(trace, progress)
            tables = {key: table for key, table in tables.items() if not key.startswith(f"targets/{name}/")}
            tables |= {f"targets/{name}/{key}": table for key, table in added.items()}
            values |= capture_values(name, added, captured, session)
            if self.reconciled:
                found, note = self._reconcile(trace, progress)
                values["reconciliation"] = note
        progress(f"writing {output}")
        info = {key: value for key, value in bundle.info.items() if key != "program_digest"}
        write_trace(output, info, tables, bundle.file("data.safetensors"))
        values |= {"targets": sorted({key.split("/")[1] for key in tables if key.startswith("targets/")})}
        values["seconds"] = round(time.perf_counter() - started, 2)
        return Facts("capture", values, found)

    def _reconcile(self, trace: Trace, progress: Progress) -> tuple[tuple[FactTable, ...], str]:
        """The table of eager launches, or why there is none: the whole model has to fit the device."""
        assert self.device is not None
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        needed = iteration_bytes(trace)
        if needed > free:
            return (), f"not done: needs about {needed} bytes of the device, {free} are free"
        if trace.info["source"] not in ("catalogue", "embedded", "factory"):
            return (), f"not done: a trace of source {trace.info['source']} has no model to run"
        progress("capturing the whole iteration")
        return (_reconciled_table(reconcile(trace, self.device, self.trusted)),), "done"

    def capture(
        self, trace: Trace, progress: Progress = lambda message: None
    ) -> tuple[str, dict[str, pa.Table], Session, list[Captured]]:
        """Capture every signature: the target's name, its tables, and what they were made from.

        Raises :class:`InputError` where there is no such device or no cuda-bindings,
        :class:`UntracedLaunchError` and ModelError where a kernel can't be captured.
        """
        assert self.device is not None
        check_device(self.device)
        session = Session(trace=trace, device=self.device, compiled=self.compiled, trusted=self.trusted)
        if self.compiled:
            # A kernel that this process has loaded already would not be loaded again, and its PTX not be seen.
            torch.compiler.reset()
            clear_caches()
        captured = []
        first = first_of_each_signature(trace)
        for number, (program, kernel) in enumerate(first):
            progress(f"capturing {number + 1} of {len(first)}: {kernel.name}")
            captured.append(session.capture(program, kernel))
        architecture, name = target_name(self.device, self.compiled)
        facts = machine_facts(self.device, self.compiled)
        tables = target_tables(trace, captured, session.modules.by_handle, architecture, facts)
        return name, tables, session, captured


def iteration_bytes(trace: Trace) -> int:
    """Bytes of weights and constants, and of everything that the largest program touches besides."""
    sizes: Counter[int | None] = Counter()
    for buffer in trace.buffers:
        sizes[buffer.program] += buffer.bytes
    return sizes.pop(None, 0) + max(sizes.values(), default=0)


def first_of_each_signature(trace: Trace) -> list[tuple[Program, Kernel]]:
    """The first kernel of every signature, in program order."""
    found: dict[str, tuple[Program, Kernel]] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            found.setdefault(kernel.signature, (program, kernel))
    return list(found.values())


def check_device(device: str) -> None:
    """Refuse what is no CUDA device of this machine; raises :class:`InputError`."""
    if not _DEVICE.fullmatch(device):
        raise InputError(f"--capture {device!r}: is not a CUDA device; write it as cuda:0")
    if not torch.cuda.is_available():
        raise InputError(
            f"--capture {device}: this machine has no CUDA device that PyTorch can use; capture where there is one,"
            " and merge with --add-target"
        )
    if torch.device(device).index >= torch.cuda.device_count():
        raise InputError(
            f"--capture {device}: this machine has {torch.cuda.device_count()} CUDA device(s); choose a lower number"
        )
    driver()


def target_name(device: str, compiled: bool) -> tuple[str, str]:
    """The architecture (``sm_90``) and the target's name (``sm_90-h200``, eager ones end in ``-eager``)."""
    major, minor = torch.cuda.get_device_capability(device)
    model = torch.cuda.get_device_name(device).lower().removeprefix("nvidia ")
    slug = re.sub(r"[^a-z0-9]+", "-", model).strip("-")
    return f"sm_{major}{minor}", f"sm_{major}{minor}-{slug}" + ("" if compiled else "-eager")


def machine_facts(device: str, compiled: bool) -> dict[str, str]:
    """Facts about machine and build for the table ``capture``."""
    import triton

    cuda = driver()
    number = int(cuda.cuDriverGetVersion()[1])
    return {
        "device": torch.cuda.get_device_name(device),
        "multiprocessors": str(torch.cuda.get_device_properties(device).multi_processor_count),
        "driver": _driver_version(),
        "driver_cuda": f"{number // 1000}.{number % 1000 // 10}",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "compiled": "torch.compile" if compiled else "eager",
    }


def _driver_version() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else "unknown"


def merged_targets(bundle: Bundle, other: Bundle) -> dict[str, pa.Table]:
    """Target tables of ``other`` for a trace of the same program; raises :class:`OriginError` otherwise."""
    check_same_program(
        {
            str(bundle.path): str(bundle.info["program_digest"]),
            str(other.path): str(other.info["program_digest"]),
        }
    )
    known = {schema.name for schema in TRACE.target_tables}
    return {
        name: other.table(name)
        for name in other.entries
        if name.startswith("targets/") and name.split("/")[2] in known
    }


def capture_values(
    name: str, tables: Mapping[str, pa.Table], captured: list[Captured], session: Session
) -> dict[str, object]:
    """Counts of what was captured, distinct launches by kind and by whether PTX is known."""
    distinct = [launch for item in captured for launch in item.launches]
    kernels = [launch for launch in distinct if launch.kind == "kernel"]
    with_ptx = [launch for launch in kernels if session.modules.has_ptx(launch.handle)]
    texts = {row["module"] for row in tables["modules"].to_pylist() if row["language"] == "ptx"}
    modules = [
        module
        for module, kind in zip(
            tables["launches"]["module"].to_pylist(), tables["launches"]["kind"].to_pylist()
        )
        if kind == "kernel"
    ]
    return {
        "target": name,
        "signatures": len(captured),
        "launches": tables["launches"].num_rows,
        "distinct_launches": dict(Counter(launch.kind for launch in distinct)),
        "modules": tables["modules"].num_rows,
        "ptx_share": round(sum(module in texts for module in modules) / max(len(modules), 1), 4),
        "ptx_share_distinct": round(len(with_ptx) / max(len(kernels), 1), 4),
        "workspaces": tables["workspaces"].num_rows,
        "pointers": sum(len(found) for item in captured for found in item.pointers),
        "reads_out_of_reach": sum(len(item.unread) for item in captured),
    }


def _reconciled_table(found: tuple[Reconciled, ...]) -> FactTable:
    rows = tuple((item.program, item.launches, len(item.by_op)) for item in found)
    return FactTable("reconciled", ("program", "eager_launches", "operators"), rows)
