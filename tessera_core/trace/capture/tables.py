"""From captured signatures to a target's tables: the same launches for every kernel of a signature.

Kernels of one signature have equal structure, so the n-th buffer of one plays the role of the n-th of another;
offsets count from the first byte that a kernel sees of a buffer, as in the signature itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tessera_core.program.ir import Kernel, Program, Trace
from tessera_core.program.replay import TRITON, local_buffers
from tessera_core.trace.capture.addresses import Pointer, Scratch
from tessera_core.trace.capture.graph import RawLaunch
from tessera_core.trace.capture.modules import LoadedModule
from tessera_core.trace.operators import is_allocation
from tessera_formats.errors import UntracedLaunchError
from tessera_formats.trace import (
    CAPTURE,
    LAUNCH_ATTRIBUTES,
    LAUNCH_EDGES,
    LAUNCHES,
    MODULES,
    POINTERS,
    WORKSPACES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One kernel as captured. ``parameters[i]`` and ``pointers[i]`` belong to ``launches[i]``.

    ``unread``: buffers that the schema says are read and that no launch can reach.
    """

    program: int
    kernel: int
    launches: tuple[RawLaunch, ...]
    parameters: tuple[bytes, ...]
    pointers: tuple[tuple[Pointer, ...], ...]
    edges: tuple[tuple[int, int], ...]
    scratch: tuple[Scratch, ...]
    unread: tuple[int, ...]


def places(trace: Trace, program: Program, kernel: Kernel) -> dict[int, int]:
    """Buffers of a kernel in the order of their first use, with the lowest byte that the kernel sees."""
    lowest: dict[int, int] = {}
    for number in kernel.ops:
        op = program.ops[number]
        for tensor in (*op.inputs, *op.outputs):
            reference = trace.tensors[tensor]
            start = reference.offset * reference.item_bytes
            lowest[reference.buffer] = min(lowest.get(reference.buffer, start), start)
    return lowest


def check_boundary(
    trace: Trace, program: Program, kernel: Kernel, pointers: Sequence[Sequence[Pointer]]
) -> tuple[int, ...]:
    """Compare what launches can reach with what the schema says; returns buffers read but not reachable.

    Raises :class:`UntracedLaunchError` where a buffer that outlives the kernel is written by no launch, or
    where a launch points into a buffer that no op of the kernel touches.
    """
    reached = {p.buffer for found in pointers for p in found if p.buffer is not None}
    local = set(local_buffers(trace, program)[kernel.id])
    touched: set[int] = set()
    written: set[int] = set()
    read: set[int] = set()
    fresh: set[int] = set()
    for number in kernel.ops:
        op = program.ops[number]
        given = {trace.tensors[tensor].buffer for tensor in op.inputs}
        fresh |= {trace.tensors[tensor].buffer for tensor in op.outputs} - given
        touched |= given | fresh
        for operand in op.operands:
            reference = trace.tensors[operand.tensor]
            if operand.valid_for == "content" or not reference.elements or is_allocation(op.target):
                continue
            (written if operand.mode == "write" else read).add(reference.buffer)
    where = f"{program.name}, kernel {kernel.id} ({kernel.name})"
    if reached - touched:
        raise UntracedLaunchError(
            f"{where}: a launch points into buffer {min(reached - touched)}, which no op of it touches;"
            " register the call that makes it as a custom op"
        )
    lost = written - local - reached
    if lost:
        raise UntracedLaunchError(
            f"{where}: no launch can write buffer {min(lost)}, which its ops write; report this as a bug"
        )
    return tuple(sorted(read - fresh - reached))


def target_tables(
    trace: Trace,
    captured: Sequence[Captured],
    modules: Mapping[int, LoadedModule],
    architecture: str,
    facts: Mapping[str, str],
) -> dict[str, pa.Table]:
    """A target's tables by short name; every kernel of a captured signature gets its own rows."""
    by_signature = {trace.programs[c.program].kernels[c.kernel].signature: c for c in captured}
    workspaces, numbers = _workspaces(captured)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    used: dict[str, LoadedModule] = {}
    for program in trace.programs:
        for kernel in program.kernels:
            found = by_signature.get(kernel.signature)
            if found is not None:
                _instantiate(trace, program, kernel, found, modules, numbers, rows)
    for launches in (c.launches for c in captured):
        for launch in launches:
            module = modules.get(launch.handle)
            if module is not None:
                used[module.name] = module
    return {
        "launches": LAUNCHES.build(rows["launches"]),
        "modules": MODULES.build([used[name].row(architecture) for name in sorted(used)]),
        "workspaces": WORKSPACES.build(workspaces),
        "pointers": POINTERS.build(rows["pointers"]),
        "launch_edges": LAUNCH_EDGES.build(rows["edges"]),
        "launch_attributes": LAUNCH_ATTRIBUTES.build(rows["attributes"]),
        "capture": CAPTURE.build([{"name": name, "value": facts[name]} for name in sorted(facts)]),
    }


def _workspaces(
    captured: Sequence[Captured],
) -> tuple[list[dict[str, Any]], dict[tuple[int, int, int], int]]:
    """Rows, and the number of each (program, kernel, index); a library's allocation is one row for all."""
    rows: list[dict[str, Any]] = []
    shared: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int, int, int], int] = {}
    for item in captured:
        for index, scratch in enumerate(item.scratch):
            place = (scratch.start, scratch.bytes)
            if scratch.scope == "library" and place in shared:
                numbers[item.program, item.kernel, index] = shared[place]
                continue
            number = len(rows)
            numbers[item.program, item.kernel, index] = number
            if scratch.scope == "library":
                shared[place] = number
            rows.append({"workspace": number, "bytes": scratch.bytes, "scope": scratch.scope})
    return rows, numbers


def _instantiate(
    trace: Trace,
    program: Program,
    kernel: Kernel,
    found: Captured,
    modules: Mapping[int, LoadedModule],
    numbers: Mapping[tuple[int, int, int], int],
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    origin = trace.programs[found.program]
    mine = places(trace, program, kernel)
    theirs = places(trace, origin, origin.kernels[found.kernel])
    twin = dict(zip(theirs, mine, strict=True))
    owner = {"program": program.id, "kernel": kernel.id}
    op = _only_op(program, kernel)
    for number, launch in enumerate(found.launches):
        module = modules.get(launch.handle)
        relocations = []
        for pointer in found.pointers[number]:
            if pointer.buffer is None:
                assert pointer.workspace is not None
                workspace = numbers[found.program, found.kernel, pointer.workspace]
                place = {"offset": pointer.offset, "workspace": workspace, "byte_offset": pointer.byte_offset}
                rows["pointers"].append({**owner, "launch": number, **place})
                continue
            buffer = twin[pointer.buffer]
            shifted = pointer.byte_offset - theirs[pointer.buffer] + mine[buffer]
            relocations.append({"offset": pointer.offset, "buffer": buffer, "byte_offset": shifted})
        rows["launches"].append(
            {
                **owner,
                "launch": number,
                "op": op,
                "kind": launch.kind,
                "module": None if module is None else module.name,
                "function": launch.function,
                "grid": list(launch.grid),
                "block": list(launch.block),
                "cluster": list(launch.cluster),
                "shared_bytes": launch.shared_bytes,
                "parameters": found.parameters[number],
                "relocations": relocations,
            }
        )
        if launch.cooperative:
            rows["attributes"].append({**owner, "launch": number, "attribute": "cooperative"})
        if launch.kind == "kernel" and launch.packed:
            rows["attributes"].append({**owner, "launch": number, "attribute": "packed"})
    rows["edges"] += [{**owner, "source": s, "destination": d} for s, d in found.edges]


def _only_op(program: Program, kernel: Kernel) -> int | None:
    """The op that every launch of the kernel belongs to; None where several work together."""
    working = [op for op in kernel.ops if not is_allocation(program.ops[op].target)]
    launched = [op for op in working if program.ops[op].target.startswith(TRITON)]
    return working[0] if len(working) == 1 and (launched or len(kernel.ops) == 1) else None
