"""Recorded launches as the ops, buffers and kernels of a trace: what both ways of tying them together share.

Every kernel is one op, the operator call that made its launches; what was launched is part of the op's arguments, and
so of the kernel's signature. Kinds, names and cost come from the recorded arguments. Nothing here can be replayed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera_core.program.ir import (
    ITEM_BYTES,
    BufferKind,
    Evidence,
    IoBinding,
    Kernel,
    Mode,
    Op,
    Operand,
    State,
    TensorRef,
    Weight,
)
from tessera_core.trace.inputs.cost import recorded_flops, recorded_kind, result_shape
from tessera_core.trace.inputs.iteration import Group, Iteration
from tessera_core.trace.inputs.kineto import Shown
from tessera_core.trace.kernels import build_kernels
from tessera_core.trace.recorder import RecordedOp
from tessera_core.trace.registry import BufferEntry, Registry
from tessera_formats.errors import InputError

_MOST = (1 << 63) - 1
"""Largest count of operations or bytes that a table of a trace holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgram:
    """The parts of a trace that one recorded iteration gives; ``notes`` say what they rest on."""

    ops: tuple[Op, ...]
    kernels: tuple[Kernel, ...]
    io: tuple[IoBinding, ...]
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    registry: Registry
    dtype: str
    notes: tuple[str, ...]


class Builder:
    """Collects ops and buffers, and finishes them into kernels of one op each."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self.registry = Registry()
        self.ops: list[RecordedOp] = []
        seen = Counter(
            dtype for group in iteration.groups for dtype, _ in shown_tensors(group) if "float" in dtype
        )
        self.dtype = max(sorted(seen), key=lambda name: seen[name]) if seen else "float32"
        self._tensors: dict[tuple[object, ...], int] = {}

    def buffer(self, kind: BufferKind, size: int, name: str) -> BufferEntry:
        """A new buffer of ``size`` bytes."""
        entry = BufferEntry(len(self.registry.buffers), 0, kind, size, name, True, False)
        self.registry.buffers.append(entry)
        return entry

    def tensor(
        self, entry: BufferEntry, dtype: str, shape: Sequence[int], stride: Sequence[int], offset: int
    ) -> int:
        """The id of a view of a buffer; extents, strides and offset in elements."""
        key = (entry.id, dtype, tuple(shape), tuple(stride), offset)
        if key not in self._tensors:
            self._tensors[key] = len(self.registry.tensors)
            self.registry.tensors.append(
                TensorRef(
                    id=self._tensors[key], buffer=entry.id, dtype=dtype, shape=tuple(shape), stride=tuple(stride),
                    offset=offset,
                )
            )  # fmt: skip
        return self._tensors[key]

    def whole(self, entry: BufferEntry) -> int:
        """The id of the buffer as one row of bytes."""
        return self.tensor(entry, "uint8", (entry.bytes,), (1,), 0)

    def add(
        self,
        group: Group,
        schema: str,
        args: list[Any],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        operands: Iterable[Operand],
    ) -> None:
        """Append the op of a kernel; ``args`` is JSON, with tensors as in any trace or merely described."""
        launches = [[launch.name, list(launch.grid), list(launch.block)] for launch in group.launches]
        self.ops.append(
            RecordedOp(
                target=target_of(group, schema),
                schema=schema,
                arguments={"args": args, "kwargs": {}, "launches": launches},
                inputs=inputs,
                outputs=outputs,
                operands=tuple(dict.fromkeys(operands)),
                scope="",
                stream=0,
            )
        )

    def finish(
        self,
        io: tuple[IoBinding, ...],
        notes: tuple[str, ...],
        weights: tuple[Weight, ...] = (),
        states: tuple[State, ...] = (),
    ) -> RecordedProgram:
        """The program of all ops that were added, one kernel each."""
        groups = [(number,) for number in range(len(self.ops))]
        ops, kernels = build_kernels(self.ops, self.registry, groups)
        return RecordedProgram(
            ops=ops,
            kernels=tuple(
                self._described(kernel, group) for kernel, group in zip(kernels, self.iteration.groups)
            ),
            io=io,
            weights=weights,
            states=states,
            registry=self.registry,
            dtype=self.dtype,
            notes=notes,
        )

    def _described(self, kernel: Kernel, group: Group) -> Kernel:
        """The kernel with its kind, name and cost from what was recorded of the call, rather than from views."""
        op = self.ops[kernel.id]
        shown = shown_tensors(group)
        shapes = [shape for _, shape in shown]
        dtypes = [dtype or self.dtype for dtype, _ in shown]
        floats = [dtype for dtype in dtypes if "float" in dtype]
        dtype = (floats or dtypes or ["uint8"])[0]
        made = self.made(op, shapes)
        if group.op is None and group.launches[0].kind != "kernel":
            kind, flops = "copy", 0
        elif group.op is None:
            kind, flops = "other", 0
        else:
            kind, flops = recorded_kind(op.target), recorded_flops(op.target, shapes, made, bool(floats))
        read, written = self.traffic(kernel, group, kind, made, dtype)
        name = _name(group, shapes)
        if max(flops, read, written) > _MOST:
            raise InputError(
                f"the recorded call {name}: its arguments are larger than any GPU's memory; pass the profile as"
                " export_chrome_trace wrote it"
            )
        return replace(
            kernel,
            kind=kernel.kind if kernel.kind == "counter" else kind,
            name=name,
            flops=flops,
            dtype=dtype,
            read_bytes=read,
            written_bytes=written,
        )

    def made(self, op: RecordedOp, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of an op's result."""
        return result_shape(op.target, shapes)

    def traffic(
        self, kernel: Kernel, group: Group, kind: str, made: tuple[int, ...], dtype: str
    ) -> tuple[int, int]:
        """Bytes read and written at least, from the shapes of the arguments."""
        shown = dict.fromkeys(shown_tensors(group))
        if not shown:
            return group_bytes(group), group_bytes(group)
        written = dense_bytes(dtype, made)
        read = sum(dense_bytes(given or self.dtype, shape) for given, shape in shown)
        if kind == "embedding":
            read = min(read, 2 * written)
        return read, written


def group_bytes(group: Group) -> int:
    """Bytes that the copies and fills among a group's launches move."""
    return sum(launch.moved_bytes for launch in group.launches)


def target_of(group: Group, schema: str) -> str:
    """``aten.mm.default`` by the schema; without one the overload is unknown, and without a call the operator too."""
    if group.op is None:
        return f"cuda.{group.launches[0].kind}.unknown"
    name = schema.partition("(")[0] or group.op.name
    namespace, colons, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    base = "".join(c if c.isalnum() or c == "_" else "_" for c in base)
    namespace = "".join(c if c.isalnum() or c == "_" else "_" for c in namespace)
    known = (overload or "default") if schema else "unknown"
    return f"{namespace if colons else 'annotation'}.{base}.{known}"


def access(tensor: int, mode: Mode, evidence: Evidence) -> Operand:
    """An access that may touch the whole tensor."""
    return Operand(tensor=tensor, mode=mode, must=False, valid_for="shapes", evidence=evidence, boxes=None)


def conservative(tensor: int, mode: Mode) -> Operand:
    """An access to the tensor's buffer that nothing describes."""
    return access(tensor, mode, "conservative")


def shown_arguments(group: Group) -> Sequence[Shown]:
    """The arguments of a group's call."""
    return () if group.op is None else group.op.arguments


def shown_tensors(group: Group) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor among them; an empty dtype is one that the profile does not tell."""
    return [(shown.dtype, shown.shape) for shown in shown_arguments(group) if shown.dtype is not None]


def dense_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor without gaps."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def _name(group: Group, shapes: Sequence[tuple[int, ...]]) -> str:
    if group.op is None:
        return f"{group.launches[0].kind} {group.launches[0].name}"[:120]
    sizes = " ".join("x".join(map(str, shape)) for shape in shapes[:3] if shape)
    return f"{group.op.name.rpartition('::')[2].strip('_')} {sizes}".strip()[:120]
