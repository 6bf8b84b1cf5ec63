"""Tests a target's dependencies on a GPU: every kernel's claimed accesses undergo the poison test.

The iteration runs kernel by kernel from the stored launches, on random weights, inputs and state; before a kernel of
a signature that was not tested yet runs for real, it runs on copies of its buffers. Launches of Triton kernels are
compiled from the stored PTX; a library's binaries can be launched only in the process that captured them, so kernels
with such launches are tested where the capturing session's functions are given, and else named as not run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from tessera_core.deps.accesses import PRIVATE_KINDS, fold_ops
from tessera_core.deps.graph import Access
from tessera_core.deps.ptx_evidence import target_evidence
from tessera_core.deps.stage import used_accesses
from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.memory import view_of
from tessera_core.program.weights import fill, materialise_weights, random_inputs
from tessera_core.report.facts import Facts, FactTable, rows_of
from tessera_core.trace.capture.driver import call, driver
from tessera_core.trace.capture.rebuild import StoredLaunch, build_graph, load_ptx, run_graph, stored_launches
from tessera_core.validate.poison import Boxes, Claims, PoisonResult, poison_test
from tessera_formats.bundle import Bundle
from tessera_formats.errors import InputError

Functions = Mapping[tuple[str | None, str], int]
Progress = Callable[[str], None]

PADDING_BYTES = 512  # vectorised kernels may read a little past a view's end, within the allocation
_COLUMNS = ("program", "kernel", "name", "launches", "holds", "poisoned", "must", "deterministic", "where")


def validate_target(
    trace: Trace,
    bundle: Bundle,
    target: str,
    accesses: Mapping[int, Sequence[Access]] | None = None,
    *,
    device: str = "cuda:0",
    functions: Functions | None = None,
    progress: Progress = lambda message: None,
) -> Facts:
    """Run the poison test over the kernels of ``target``, one of each signature.

    ``accesses``: by program, as the deps of this target hold them; else analysed here. ``functions``: handles of
    loaded functions by (module hash, entry name), as a capturing session has them. Raises :class:`InputError`
    without a GPU.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "--validate: this machine has no CUDA device that PyTorch can use; validate where there is one"
        )
    driver()
    torch.cuda.init()
    torch.zeros(1, device=device)  # the driver's calls below need PyTorch's context to be current
    names = ("launches", "launch_edges", "pointers", "workspaces", "launch_attributes", "modules")
    rows = {name: bundle.table(f"targets/{target}/{name}").to_pylist() for name in names}
    claimed = target_accesses(trace, bundle, target) if accesses is None else accesses
    loaded = dict(functions or {})
    loaded |= {key: value for key, value in _from_ptx(rows).items() if key not in loaded}
    tested: dict[str, dict[str, Any]] = {}
    skipped: list[tuple[str, int, str]] = []
    for program in trace.programs:
        run = Iteration(trace, program, rows, loaded, device)
        for kernel in program.kernels:
            absent = run.missing(kernel.id)
            if absent:
                skipped.append((program.name, kernel.id, absent))
                continue
            if kernel.signature not in tested and run.launches.get(kernel.id):
                progress(f"{program.name}: kernel {kernel.id} ({kernel.name})")
                mine = [a for a in claimed.get(program.id, ()) if a.kernel == kernel.id]
                result = run.test(kernel, claims_of(mine))
                tested[kernel.signature] = {
                    "program": program.name,
                    "kernel": kernel.id,
                    "name": kernel.name,
                    "launches": len(run.launches[kernel.id]),
                    "holds": result.holds,
                    **{k: v for k, v in asdict(result).items() if k in _COLUMNS and k != "where"},
                    "where": "; ".join(result.where),
                }
            run.advance(kernel)
    found = list(tested.values())
    values = {
        "target": target,
        "device": torch.cuda.get_device_name(device),
        "kernels_tested": len(found),
        "launches_tested": sum(row["launches"] for row in found),
        "kernels_refuted": sum(not row["holds"] for row in found),
        "kernels_not_run": len(skipped),
    }
    tables = [FactTable("poison", _COLUMNS, rows_of(found, _COLUMNS))]
    if skipped:
        tables.append(FactTable("not_run", ("program", "kernel", "function"), tuple(skipped)))
    return Facts("validate", values, tuple(tables))


def target_accesses(trace: Trace, bundle: Bundle, target: str) -> dict[int, list[Access]]:
    """By program, every kernel's accesses that the deps of ``target`` rest on: its own, else schemas' and declared."""
    evidence = target_evidence(trace, bundle, target)
    return {
        program.id: used_accesses(trace, program, fold_ops(trace, program), evidence)
        for program in trace.programs
    }


def claims_of(accesses: Sequence[Access]) -> Claims:
    """A kernel's accesses as claims. A may-write keeps what it leaves, which is no read of its own kernel's."""
    reads: dict[int, Boxes] = {}
    writes: dict[int, Boxes] = {}
    must: dict[int, Boxes] = {}
    for access in accesses:
        _join(reads if access.mode == "read" else writes, access.buffer, access.boxes)
        if access.mode == "write" and access.must:
            _join(must, access.buffer, access.boxes)
    return Claims(reads=reads, writes=writes, must=must)


def _join(into: dict[int, Boxes], buffer: int, boxes: Boxes) -> None:
    known = into.get(buffer, ())
    into[buffer] = None if boxes is None or known is None else (*known, *boxes)


def _from_ptx(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[Any, int]:
    entries: dict[str, list[str]] = defaultdict(list)
    for row in rows["launches"]:
        if row["module"] is not None and row["function"] not in entries[row["module"]]:
            entries[row["module"]].append(row["function"])
    return load_ptx(rows["modules"], entries)


class Iteration:
    """One iteration of a program on a device, advanced kernel by kernel."""

    def __init__(
        self,
        trace: Trace,
        program: Program,
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        functions: Functions,
        device: str,
    ) -> None:
        self.trace, self.program, self.functions = trace, program, functions
        self.edges: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for edge in rows["launch_edges"]:
            if edge["program"] == program.id:
                self.edges[edge["kernel"]].append(edge)
        self.rows = rows
        self.memory = _values(trace, program, device)
        wanted = {
            place["buffer"]
            for row in rows["launches"]
            if row["program"] == program.id
            for place in row["relocations"]
        }
        for buffer in sorted(wanted - set(self.memory)):
            size = trace.buffers[buffer].bytes + PADDING_BYTES
            self.memory[buffer] = torch.randint(0, 64, (size,), dtype=torch.uint8, device=device)
        self.scratch = {
            row["workspace"]: torch.zeros(row["bytes"], dtype=torch.uint8, device=device)
            for row in rows["workspaces"]
        }
        self.stream = torch.cuda.Stream(device)
        self.launches = self.bound(self.memory)

    def missing(self, kernel: int) -> str:
        """The first function of a kernel's launches that is not loaded here; empty where all are."""
        for launch in self.launches.get(kernel, ()):
            key = (launch.row["module"], launch.row["function"])
            if launch.row["kind"] == "kernel" and key not in self.functions:
                return str(launch.row["function"])
        return ""

    def buffers(self, kernel: int) -> set[int]:
        """Those that a kernel's launches are given pointers into."""
        return {place["buffer"] for launch in self.launches[kernel] for place in launch.row["relocations"]}

    def advance(self, kernel: Kernel) -> None:
        """Run a kernel's launches on the iteration's own memory."""
        if self.launches.get(kernel.id):
            self.run(kernel.id, self.launches[kernel.id], self.edges[kernel.id])

    def test(self, kernel: Kernel, claims: Claims) -> PoisonResult:
        """The poison test of a kernel on copies of the buffers that it is given. Buffers that no other kernel sees are
        its own affair: the deps say nothing about them."""
        buffers = self.buffers(kernel.id)
        elsewhere = {
            place["buffer"]
            for other, launches in self.launches.items()
            if other != kernel.id
            for launch in launches
            for place in launch.row["relocations"]
        }
        private = {b for b in buffers - elsewhere if self.trace.buffers[b].kind in PRIVATE_KINDS}
        buffers -= private - set(claims.reads) - set(claims.writes)

        def run(contents: Mapping[int, torch.Tensor]) -> None:
            self.run(kernel.id, self.bound({**self.memory, **contents})[kernel.id], self.edges[kernel.id])

        return poison_test({buffer: self.memory[buffer] for buffer in sorted(buffers)}, claims, run)

    def bound(self, memory: Mapping[int, torch.Tensor]) -> dict[int, list[StoredLaunch]]:
        """All launches by kernel, their pointers filled in for ``memory``."""
        return stored_launches(
            self.rows,
            self.program.id,
            lambda buffer: memory[buffer].data_ptr(),
            lambda workspace: self.scratch[workspace].data_ptr(),
        )

    def run(
        self,
        kernel: int,
        launches: Sequence[StoredLaunch],
        edges: Sequence[Mapping[str, Any]],
        functions: Functions | None = None,
    ) -> None:
        """Run launches of a kernel in the order of ``edges`` and wait for them."""
        graph = build_graph({kernel: launches}, edges, functions or self.functions)
        torch.cuda.synchronize()
        try:
            run_graph(graph, self.stream.cuda_stream)
        finally:
            call(driver().cuGraphDestroy, graph)


def _values(trace: Trace, program: Program, device: str) -> dict[int, torch.Tensor]:
    """Weights, constants, inputs and state of one iteration, as bytes on the device; the cache half full."""
    found: dict[int, torch.Tensor] = {}

    def storage(buffer: int) -> torch.UntypedStorage:
        if buffer not in found:
            size = trace.buffers[buffer].bytes + PADDING_BYTES
            found[buffer] = torch.zeros(size, dtype=torch.uint8, device=device)
        return found[buffer].untyped_storage()

    generator = torch.Generator(device).manual_seed(1)
    constants = [buffer.id for buffer in trace.buffers if buffer.kind == "constant"]
    for weight in trace.weights:
        if weight.init["kind"] == "constant":
            constants.append(weight.buffer)
            continue
        target = view_of(storage(weight.buffer), trace.tensors[weight.tensor])
        host = torch.empty(target.shape, dtype=target.dtype)
        fill(host, weight.name, weight.init, 0)
        target.copy_(host)
    for buffer, host_storage in materialise_weights(trace, constants).items():
        count = trace.buffers[buffer].bytes
        storage(buffer)
        host_bytes = torch.empty(0, dtype=torch.uint8).set_(host_storage, 0, (count,), (1,))
        found[buffer][:count].copy_(host_bytes)
    for name, tensor in random_inputs(trace, program, 7, list(range(program.batch))).items():
        reference = trace.tensors[program.bindings("input")[name].tensor]
        view_of(storage(reference.buffer), reference).copy_(tensor)
    for binding in program.bindings("state").values():
        reference = trace.tensors[binding.tensor]
        target = view_of(storage(reference.buffer), reference)
        if target.dtype.is_floating_point:
            target.normal_(generator=generator)
        else:
            target.fill_(program.context // 2 if program.phase == "decode" else 0)
    return found
