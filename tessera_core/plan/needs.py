"""What one program asks for, whatever the devices: who hands what to whom, which kernels touch which state and
weights, and how much memory its activations take at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tessera_core.deps.graph import Deps
from tessera_core.program.boxes import Box
from tessera_core.program.ir import Program, Trace


@dataclass(frozen=True, kw_only=True)
class ProgramNeeds:
    """What one program asks for, whatever the devices. Kernel ids are the program's.

    ``chains``, ``output_writers``: kernels that share a device, because they fill one buffer inexactly or a
    collective ties them, or because together they make one output, which is taken from the device of its last
    writer.
    """

    program: Program
    weights: dict[int, frozenset[int]]
    families: dict[int, frozenset[str]]
    written: dict[int, frozenset[str]]
    family_bytes: dict[str, int]
    computed: frozenset[str]
    flows: tuple[tuple[int, int, tuple[Box, ...] | None, frozenset[int]], ...]
    chains: tuple[tuple[int, ...], ...]
    output_writers: tuple[tuple[int, ...], ...]
    activation_bytes: int
    readers: dict[int, frozenset[int]]
    writers: dict[int, tuple[int, ...]]
    edges: tuple[tuple[int, int], ...]


def program_needs(trace: Trace, deps: Deps, program: Program) -> ProgramNeeds:
    """Flows, state, weights and activations of a program, from its accesses and RAW dependencies."""
    buffers = trace.buffers
    family_of: dict[int, set[str]] = defaultdict(set)
    for binding in program.bindings("state").values():
        family_of[trace.tensors[binding.tensor].buffer].add(binding.name)
    weights: dict[int, set[int]] = defaultdict(set)
    families: dict[int, set[str]] = defaultdict(set)
    readers: dict[int, set[int]] = defaultdict(set)
    writers: dict[int, set[int]] = defaultdict(set)
    written: dict[int, set[str]] = defaultdict(set)
    computed: set[str] = set()
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for access in deps.accesses(program.id):
        kernel, buffer = access.kernel, buffers[access.buffer]
        (readers if access.mode == "read" else writers)[buffer.id].add(kernel)
        if buffer.program is None:
            weights[kernel].add(buffer.id)
        elif buffer.kind == "state":
            families[kernel] |= family_of[buffer.id]
            if access.mode == "write":
                written[kernel] |= family_of[buffer.id]
                if program.kernels[kernel].state_writer != "copy":
                    computed |= family_of[buffer.id]
        else:
            first[buffer.id] = min(kernel, first.get(buffer.id, kernel))
            last[buffer.id] = max(kernel, last.get(buffer.id, kernel))
    outputs = {
        buffers[trace.tensors[binding.tensor].buffer] for binding in program.bindings("output").values()
    }
    ends = len(program.kernels) - 1
    for binding in program.io:
        buffer = buffers[trace.tensors[binding.tensor].buffer]
        if buffer.kind != "state" and buffer.program is not None:
            first[buffer.id] = 0 if binding.role == "input" else first.get(buffer.id, 0)
            last[buffer.id] = ends if binding.role == "output" else last.get(buffer.id, 0)
    raw = [e for e in deps.edges(program.id) if e.hazard == "RAW" and e.source != e.destination]
    shipped: dict[tuple[int, int], tuple[set[int], list[tuple[Box, ...] | None]]] = {}
    for edge in raw:
        if buffers[edge.buffer].kind != "state":
            consumers, boxes = shipped.setdefault((edge.source, edge.buffer), (set(), []))
            consumers.add(edge.destination)
            boxes.append(edge.boxes if edge.must else None)
    return ProgramNeeds(
        program=program,
        weights={kernel: frozenset(ids) for kernel, ids in weights.items()},
        families={kernel: frozenset(names) for kernel, names in families.items() if names},
        written={kernel: frozenset(names) for kernel, names in written.items() if names},
        family_bytes={
            b.name: buffers[trace.tensors[b.tensor].buffer].bytes for b in program.bindings("state").values()
        },
        computed=frozenset(computed),
        flows=tuple(
            (kernel, buffer, _united(boxes), frozenset(consumers))
            for (kernel, buffer), (consumers, boxes) in sorted(shipped.items())
        ),
        chains=tuple(tuple(chain) for chain in deps.chains(program.id)),
        output_writers=tuple(
            tuple(sorted(writers[buffer.id]))
            for buffer in sorted(outputs, key=lambda item: item.id)
            if buffer.kind != "state" and len(writers[buffer.id]) > 1
        ),
        activation_bytes=_peak([(first[b], last[b], buffers[b].bytes) for b in sorted(first)]),
        readers={buffer: frozenset(ids) for buffer, ids in readers.items()},
        writers={buffer: tuple(sorted(ids)) for buffer, ids in writers.items()},
        edges=tuple(sorted({(edge.source, edge.destination) for edge in raw})),
    )


def feeding(trace: Trace, needs: Sequence[ProgramNeeds]) -> list[tuple[int, int, int, int]]:
    """Outputs that become inputs: (program, output buffer, next program, input buffer), by position.

    An output feeds the next program of the route; the last program's feeds itself.
    """
    found: list[tuple[int, int, int, int]] = []
    for p, need in enumerate(needs):
        q = min(p + 1, len(needs) - 1)
        inputs = needs[q].program.bindings("input")
        for output in need.program.bindings("output").values():
            target = inputs.get(output.feeds) if output.feeds is not None else None
            if target is not None:
                found.append((p, trace.tensors[output.tensor].buffer, q, trace.tensors[target.tensor].buffer))
    return found


def _united(boxes: Sequence[tuple[Box, ...] | None]) -> tuple[Box, ...] | None:
    """Boxes that serve every consumer; None (whole buffer) where any consumer needs it."""
    united: dict[Box, None] = {}
    for some in boxes:
        if some is None:
            return None
        united.update(dict.fromkeys(some))
    return tuple(sorted(united, key=lambda box: (box.start, box.dims, box.run)))


def _peak(intervals: Sequence[tuple[int, int, int]]) -> int:
    """Largest sum of bytes over (first, last, bytes) that are live at one time."""
    changes: dict[int, int] = defaultdict(int)
    for start, end, size in intervals:
        changes[start] += size
        changes[end + 1] -= size
    live = peak = 0
    for moment in sorted(changes):
        live += changes[moment]
        peak = max(peak, live)
    return peak
