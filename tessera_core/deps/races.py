"""Races in the user's program: accesses that conflict, of ops on streams that nothing orders.

A trace is a list of ops, so it always has an order; the user's streams may not have it. Ops of one stream follow
each other, and a wait for an event orders ops of two. Where two ops conflict and neither reaches the other that
way, the result on a GPU depends on timing, and a dependency in the order of the list would only hide that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tessera_core.deps.accesses import Touch, op_step
from tessera_core.deps.graph import Edge
from tessera_core.program.boxes import may_overlap
from tessera_core.program.ir import Op, Program, Trace
from tessera_formats.errors import ModelError


class StreamOrder:
    """Which ops of a program certainly run before which, by streams and the waits between them."""

    def __init__(self, program: Program) -> None:
        sources: dict[int, list[int]] = {}
        for wait in program.stream_waits:
            sources.setdefault(wait.destination, []).append(wait.source)
        self._stream = [op.stream for op in program.ops]
        self._done: list[dict[int, int]] = []  # by op and stream, the last op that is done before or with it
        latest: dict[int, dict[int, int]] = {}
        for op in program.ops:
            done = dict(latest.get(op.stream, {}))
            for source in sources.get(op.id, ()):
                for stream, other in self._done[source].items():
                    done[stream] = max(other, done.get(stream, -1))
            done[op.stream] = op.id
            latest[op.stream] = done
            self._done.append(done)

    def ordered(self, earlier: int, later: int) -> bool:
        """Whether op ``earlier`` is certainly done before op ``later``, which comes after it in the program."""
        return self._done[later].get(self._stream[earlier], -1) >= earlier


def check_races(trace: Trace, program: Program, edges: Iterable[Edge]) -> None:
    """Refuse dependencies that the user's streams leave open; ``edges``: all hazards of the program.

    Raises :class:`ModelError` for the first one, with both ops, the buffer and what to add.
    """
    if all(op.stream == program.ops[0].stream for op in program.ops):
        return
    order = StreamOrder(program)
    for edge in edges:
        first, second = (
            [program.ops[op] for op in program.kernels[kernel].ops]
            for kernel in (edge.source, edge.destination)
        )
        if first[0].stream == second[0].stream:  # a kernel holds ops of one stream
            continue
        pairs = _conflicts(trace, first, second, edge.buffer) or [
            (first[-1], second[0], edge.hazard != "RAW")
        ]
        for one, other, writes in pairs:
            earlier, later = sorted((one, other), key=lambda op: op.id)
            if not order.ordered(earlier.id, later.id):
                raise ModelError(_race(trace, program, earlier, later, edge.buffer, writes))


def _conflicts(
    trace: Trace, first: Sequence[Op], second: Sequence[Op], buffer: int
) -> list[tuple[Op, Op, bool]]:
    """Pairs of ops that may touch the same bytes of ``buffer``, one of them writing, and whether the second does."""
    theirs = [(op, touch) for op in second for touch in _touches(trace, op, buffer)]
    return [
        (one, other, touch.mode == "write")
        for one in first
        for mine in _touches(trace, one, buffer)
        for other, touch in theirs
        if "write" in (mine.mode, touch.mode) and _overlap(mine, touch)
    ]


def _touches(trace: Trace, op: Op, buffer: int) -> list[Touch]:
    return [t for t in op_step(trace, op) if t.buffer == buffer and t.valid_for == "shapes"]


def _overlap(first: Touch, second: Touch) -> bool:
    if first.boxes is None or second.boxes is None:
        return True
    return any(may_overlap(one, other) for one in first.boxes for other in second.boxes)


def _race(trace: Trace, program: Program, earlier: Op, later: Op, buffer: int, later_writes: bool) -> str:
    entry = trace.buffers[buffer]
    called = f"{entry.kind} {entry.name}" if entry.name else f"{entry.kind} buffer {buffer}"
    does = "writes" if later_writes else "reads"
    return (
        f"{program.name}: op {later.id} ({later.target}, stream {later.stream}) {does} {called}, which op"
        f" {earlier.id} ({earlier.target}, stream {earlier.stream}) also uses, and nothing orders the two: a race;"
        f" let stream {later.stream} wait before op {later.id}, by wait_stream or for an event recorded after op"
        f" {earlier.id}, and trace again"
    )
