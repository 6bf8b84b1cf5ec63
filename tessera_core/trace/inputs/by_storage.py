"""A recorded iteration with its ExecutionTrace: operands are views of storages, read and written as schemas say.

A launch that no operator call of the ExecutionTrace explains may touch whatever other kernels write. What a composite
call shares with the calls inside it, and what the host reads and sends back, is tied together conservatively.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tessera_core.program.ir import Evidence, IoBinding, Kernel, Mode, Operand, State, Weight
from tessera_core.program.operators import resolve_operator
from tessera_core.trace.inputs.builder import (
    Builder,
    RecordedProgram,
    access,
    conservative,
    shown_arguments,
)
from tessera_core.trace.inputs.chain import chained
from tessera_core.trace.inputs.execution_trace import Node, StorageView, views_in
from tessera_core.trace.inputs.iteration import Group, Iteration
from tessera_core.trace.inputs.storages import Life, Resolved, Storages
from tessera_core.trace.operands import schema_operands
from tessera_core.trace.recorder import RecordedOp
from tessera_core.trace.registry import BufferEntry
from tessera_formats.errors import ArtifactError, TrustError

BOTH: tuple[Mode, Mode] = ("read", "write")
_UNKNOWN = {"kind": "unknown"}
MOST_BARRIER_ACCESSES = 200_000
"""Launches that nothing explains times calls that are known: beyond it, their accesses would fill a trace."""


def with_storages(iteration: Iteration, nodes: Mapping[int, Node]) -> RecordedProgram:
    """The kernels with the storages that their operators were given; as :func:`chained` where most have none."""
    storages = Storages.follow(iteration, nodes)
    builder = StorageBuilder(iteration, storages)
    unknown = [group for group in iteration.groups if builder.resolved(group) is None]
    too_many = len(unknown) * len(builder.calls) > MOST_BARRIER_ACCESSES
    if too_many or 2 * len(unknown) > len(iteration.groups):
        plain = chained(iteration)
        said = f"{len(unknown)} of {len(iteration.groups)} kernels"
        note = f"the ExecutionTrace says nothing of {said}, so it is not used"
        return replace(plain, notes=(note, *plain.notes))
    return builder.build(len(unknown))


class StorageBuilder(Builder):
    """The same over storages."""

    def __init__(self, iteration: Iteration, storages: Storages) -> None:
        super().__init__(iteration)
        self.calls = storages.calls
        self.entries: dict[int, tuple[BufferEntry, Life]] = {}
        self.parts = Counter(group.op.record for group in iteration.groups if group.op is not None)
        launched = {record for record in self.parts if record is not None}
        found = [call for record, call in self.calls.items() if record in launched]
        self.launching = sorted(found, key=lambda call: call.op.start_us)
        self.starts = [call.op.start_us for call in self.launching]

    def resolved(self, group: Group) -> Resolved | None:
        """The call that made a group's launches, if the ExecutionTrace says what it was given."""
        call = None if group.op is None or group.op.record is None else self.calls.get(group.op.record)
        return call if call is not None and (call.inputs or call.outputs) else None

    def build(self, unknown: int) -> RecordedProgram:
        """The program; ``unknown`` kernels have no resolved call."""
        barriers = []
        for number, group in enumerate(self.iteration.groups):
            call = self.resolved(group)
            if call is None:
                barriers.append(number)
                self.add(group, "", [a.described() for a in shown_arguments(group)], (), (), ())
            else:
                self._explained(group, call)
        self._host_order()
        self._barriers(barriers)
        io, weights, states = self._kinds()
        notes = [
            "storages that the iteration did not make are taken for weights if it only reads them, else for state"
        ]
        if unknown:
            notes.append(
                f"{unknown} kernels were launched outside any operator call of the ExecutionTrace: each may read and"
                " write whatever other kernels write, but is taken to leave weights alone"
            )
        return self.finish(io, tuple(notes), weights, states)

    def _view(self, view: StorageView, life: Life) -> int | None:
        if view.scalar_on_host and life.born_us is None:
            return None
        if id(life) not in self.entries:
            self.entries[id(life)] = (self.buffer("activation", life.bytes, ""), life)
        return self.tensor(self.entries[id(life)][0], view.dtype, view.shape, view.stride, view.offset)

    def _explained(self, group: Group, call: Resolved) -> None:
        lives = iter(call.inputs)
        args = [self._encoded(value, lives) for value in call.node.inputs]
        made = [self._view(view, life) for view, life in zip(call.node.outputs, call.outputs)]
        outputs = tuple(number for number in made if number is not None)
        inputs = tuple(_ids(args))
        operands = self._operands(call.node.schema, args, inputs, outputs)
        if self.parts[call.op.record] > 1:
            operands = [replace(operand, must=False) for operand in operands]
        operands += self._shared_with_callees(call)
        self.add(group, call.node.schema, args, inputs, outputs, operands)

    def _encoded(self, value: Any, lives: Iterator[Life]) -> Any:
        if isinstance(value, StorageView):
            number = self._view(value, next(lives))
            return "scalar" if number is None else {"tensor": number}
        if isinstance(value, tuple):
            return [self._encoded(item, lives) for item in value]
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

    def _operands(
        self, schema: str, args: list[Any], inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> list[Operand]:
        """Accesses by the schema: with what the tracer's tables know, if this version has that very operator."""
        if not schema:
            touched = dict.fromkeys((*inputs, *outputs))
            return [conservative(number, mode) for number in touched for mode in BOTH]
        known = _operator(schema)
        if known is not None:
            return list(schema_operands(self.registry, known, {"args": args, "kwargs": {}}, outputs))
        try:
            parsed = torch._C.parse_schema(schema)
        except RuntimeError:  # written by a version whose schemas this one cannot read
            return self._operands("", args, inputs, outputs)
        evidence: Evidence = "schema" if schema.startswith("aten::") else "declared"
        found = []
        for argument, value in zip(parsed.arguments, args):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for number in _ids([value]):
                found += [access(number, mode, evidence) for mode in (BOTH if writes else BOTH[:1])]
        given = {self.registry.tensors[number].buffer for number in inputs}
        fresh = [number for number in outputs if self.registry.tensors[number].buffer not in given]
        return found + [access(number, "write", evidence) for number in fresh]

    def _shared_with_callees(self, call: Resolved) -> list[Operand]:
        """Accesses to scratch storages that a composite call made and its launching callees were given."""
        own = {*call.inputs, *call.outputs}
        found = []
        first = bisect.bisect_left(self.starts, call.op.start_us)
        last = bisect.bisect_right(self.starts, call.op.end_us)
        for callee in self.launching[first:last]:
            same = callee.op.thread == call.op.thread and callee is not call
            if not same or callee.op.end_us > call.op.end_us:
                continue
            views = zip(
                (*views_in(callee.node.inputs), *callee.node.outputs), (*callee.inputs, *callee.outputs)
            )
            for view, life in views:
                if life in own or life.born_us is None or life.born_us < call.op.start_us:
                    continue
                number = self._view(view, life)
                found += [] if number is None else [conservative(number, mode) for mode in BOTH]
        return found

    def _host_order(self) -> None:
        """What is copied to the device may rest on what was copied to the host before."""
        to_host = [n for n, group in enumerate(self.iteration.groups) if _copies(group, "DtoH")]
        if not to_host:
            return
        host: int | None = None
        for number, group in enumerate(self.iteration.groups):
            mode: Mode | None = "write" if number in to_host else "read" if _copies(group, "HtoD") else None
            if mode is None or (mode == "read" and number < to_host[0]):
                continue
            host = self.whole(self.buffer("activation", 1, "host")) if host is None else host
            self.ops[number].operands += (conservative(host, mode),)

    def _barriers(self, numbers: Sequence[int]) -> None:
        """Launches that nothing is known of may touch every buffer that kernels write and that is born by then."""
        written = {
            self.registry.tensors[operand.tensor].buffer
            for op in self.ops
            for operand in op.operands
            if operand.mode == "write"
        }
        first: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            for operand in op.operands:
                first.setdefault(self.registry.tensors[operand.tensor].buffer, number)
        external = {entry.id for entry, life in self.entries.values() if life.born_us is None}
        for number in numbers:
            reached = [b for b in sorted(written) if b in external or first[b] < number]
            whole = [self.whole(self.registry.buffers[buffer]) for buffer in reached]
            self.ops[number].inputs = tuple(whole)
            self.ops[number].operands = tuple(conservative(t, mode) for t in whole for mode in BOTH)

    def _kinds(self) -> tuple[tuple[IoBinding, ...], tuple[Weight, ...], tuple[State, ...]]:
        """What each buffer is, by who writes and reads it.

        Outputs are what nobody reads again and is copied to the host, or left by the last kernel.
        """
        writers: dict[int, list[int]] = defaultdict(list)
        readers: dict[int, list[int]] = defaultdict(list)
        for number, op in enumerate(self.ops):
            for operand in op.operands:
                touched = writers if operand.mode == "write" else readers
                touched[self.registry.tensors[operand.tensor].buffer].append(number)
        io: list[IoBinding] = []
        weights: list[Weight] = []
        states: list[State] = []
        results = []
        for entry, life in self.entries.values():
            # What compiled code allocates has no birth that is recorded, but it is filled before it is read.
            first = min((*readers[entry.id], *writers[entry.id]))
            host = life.device == "cpu"
            external = life.born_us is None and not self._fills(first, entry)
            if not writers[entry.id] and host:
                entry.kind, entry.name = "input", f"host {entry.id}"
                io.append(IoBinding(role="input", name=entry.name, tensor=self.whole(entry), feeds=None))
            elif not writers[entry.id]:
                entry.kind, entry.name, entry.program = "weight", f"storage {entry.id}", None
                whole = self.whole(entry)
                weights.append(
                    Weight(name=entry.name, aliases=(), buffer=entry.id, tensor=whole, init=_UNKNOWN)
                )
            elif external and not host:
                entry.kind, entry.name = "state", f"storage {entry.id}"
                states.append(State(name=entry.name, batch_axis=None, sequence_axis=None, init=_UNKNOWN))
                io.append(IoBinding(role="state", name=entry.name, tensor=self.whole(entry), feeds=None))
            elif max(readers[entry.id], default=-1) < (last := max(writers[entry.id])) and (
                _copies(self.iteration.groups[last], "DtoH") or last == len(self.ops) - 1
            ):
                results.append(entry)
        for entry in results:
            entry.kind, entry.name = "output", f"result {entry.id}"
            io.append(IoBinding(role="output", name=entry.name, tensor=self.whole(entry), feeds=None))
        return tuple(io), tuple(weights), tuple(states)

    def _fills(self, number: int, entry: BufferEntry) -> bool:
        """Whether an op writes all of a buffer without reading it, for certain or as its ``out`` argument."""
        op = self.ops[number]
        own = [o for o in op.operands if self.registry.tensors[o.tensor].buffer == entry.id]
        whole = any(
            (operand.must or op.target.endswith("out"))
            and self.registry.tensors[operand.tensor].elements
            * self.registry.tensors[operand.tensor].item_bytes
            == entry.bytes
            for operand in own
        )
        return whole and all(operand.mode == "write" for operand in own)

    def made(self, op: RecordedOp, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """See the base class; here results were recorded."""
        return self.registry.tensors[op.outputs[0]].shape if op.outputs else super().made(op, shapes)

    def traffic(
        self, kernel: Kernel, group: Group, kind: str, made: tuple[int, ...], dtype: str
    ) -> tuple[int, int]:
        """See the base class; here the accesses say it."""
        if self.resolved(group) is None:
            return super().traffic(kernel, group, kind, made, dtype)
        return kernel.read_bytes, kernel.written_bytes


def _operator(schema: str) -> torch._ops.OpOverload | None:
    """The operator with exactly this schema, of the namespaces that a trace may name."""
    name = schema.partition("(")[0].replace("::", ".")
    try:
        found = resolve_operator(name if name.count(".") == 2 else f"{name}.default")
    except (ArtifactError, TrustError):
        return None
    return found if str(found._schema) == schema else None


def _ids(args: Iterable[Any]) -> list[int]:
    found: list[int] = []
    for value in args:
        if isinstance(value, dict):
            found.append(value["tensor"])
        elif isinstance(value, list):
            found += _ids(value)
    return found


def _copies(group: Group, direction: str) -> bool:
    return any(launch.kind == "memcpy" and direction in launch.name for launch in group.launches)
