"""From recorded ops to kernels: grouping, signatures, names and numbers."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from tessera_core.program.boxes import Box
from tessera_core.program.ir import ITEM_BYTES, Kernel, Op, StateWriter, TensorRef
from tessera_core.program.store import canonical_json
from tessera_core.trace.cost import access_limit, op_flops, traffic
from tessera_core.trace.formation import Node, Touch, form_kernels
from tessera_core.trace.fused.table import fused_operator
from tessera_core.trace.operators import ANCHOR_KINDS, is_allocation, is_copy_like, op_kind
from tessera_core.trace.recorder import RecordedOp
from tessera_core.trace.registry import BufferEntry, Registry

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
# CUDA's vector loads need 16-byte alignment, so equal kernels share a signature only modulo that.
_ALIGNMENT_BYTES = 16


def build_kernels(ops: Sequence[RecordedOp], registry: Registry) -> tuple[tuple[Op, ...], tuple[Kernel, ...]]:
    """The ops and kernels of one program in the IR; kernels are numbered in an order that can be executed."""
    nodes = [_node(op, registry) for op in ops]
    groups = form_kernels(nodes)
    kernel_of = {op: number for number, group in enumerate(groups) for op in group}
    users: dict[int, set[int]] = defaultdict(set)
    for index, node in enumerate(nodes):
        for touch in node.touches:
            users[touch.buffer].add(kernel_of[index])
    finished = tuple(
        Op(
            id=index,
            kernel=kernel_of[index],
            target=op.target,
            schema=op.schema,
            arguments=op.arguments,
            inputs=op.inputs,
            outputs=op.outputs,
            operands=op.operands,
            stream=op.stream,
        )
        for index, op in enumerate(ops)
    )
    kernels = tuple(
        _kernel(number, group, ops, [nodes[index].kind for index in group], registry, users)
        for number, group in enumerate(groups)
    )
    return finished, kernels


def _node(op: RecordedOp, registry: Registry) -> Node:
    touches = []
    state: list[TensorRef] = []
    for operand in op.operands:
        if operand.valid_for == "content":
            continue
        tensor = registry.tensors[operand.tensor]
        entry = registry.buffers[tensor.buffer]
        box = tensor.box()
        if box is None:
            continue
        whole = box.low == 0 and not box.dims and box.high >= entry.bytes
        touches.append(Touch(tensor.buffer, None if whole else box, operand.mode == "write"))
        if operand.mode == "write" and entry.kind == "state":
            state.append(tensor)
    if state:
        counts = op_kind(op.target) not in ANCHOR_KINDS and all(_integral(t.dtype) for t in state)
        return Node("counter" if counts else "writer", tuple(touches), op.stream)
    return Node("anchor" if op_kind(op.target) in ANCHOR_KINDS else "light", tuple(touches), op.stream)


def _kernel(
    number: int,
    group: tuple[int, ...],
    all_ops: Sequence[RecordedOp],
    node_kinds: Sequence[str],
    registry: Registry,
    users: dict[int, set[int]],
) -> Kernel:
    ops = [all_ops[index] for index in group]
    main = next((op for op, kind in zip(ops, node_kinds) if kind != "light"), ops[-1])
    kind = _kind(ops, main, node_kinds)
    fresh = _born_inside(ops, registry)
    leaves = {
        buffer
        for buffer in users
        if users[buffer] != {number} or registry.buffers[buffer].kind not in ("activation", "workspace")
    }
    tensors = registry.tensors
    reads: list[tuple[TensorRef, Box, int | None]] = []
    writes: list[tuple[TensorRef, Box, int | None]] = []
    for op in ops:
        refined = {o.tensor for o in op.operands if o.valid_for == "content"}
        for operand in op.operands:
            tensor = tensors[operand.tensor]
            limit = access_limit(op.target, operand.mode, operand.tensor, op.arguments, op.outputs, tensors)
            if operand.valid_for == "content":
                writes += [(tensor, box, None) for box in operand.boxes or ()]
                continue
            box = tensor.box()
            if box is None or is_allocation(op.target):
                continue
            if operand.mode == "read" and tensor.buffer not in fresh:
                reads.append((tensor, box, limit))
            if operand.mode == "write" and tensor.buffer in leaves and operand.tensor not in refined:
                writes.append((tensor, box, limit))
    sizes = {entry.id: entry.bytes for entry in registry.buffers}
    return Kernel(
        id=number,
        signature=signature(ops, registry, leaves),
        name=_name(kind, main, ops, tensors),
        kind=kind,
        flops=sum(op_flops(op.target, op.arguments, op.outputs, tensors) for op in ops),
        read_bytes=traffic(reads, sizes),
        written_bytes=traffic(writes, sizes),
        state_writer=_state_writer(ops, node_kinds),
        dtype=_dtype(main, ops, tensors),
        layer=_layer(ops),
        ops=group,
    )


def _kind(ops: Sequence[RecordedOp], main: RecordedOp, node_kinds: Sequence[str]) -> str:
    if "counter" in node_kinds:
        return "counter"
    kinds = {op_kind(op.target) for op in ops if not is_allocation(op.target)}
    main_kind = op_kind(main.target)
    if main_kind in ANCHOR_KINDS or "writer" in node_kinds:
        return main_kind
    if not kinds:
        return "other"
    if "reduction" in kinds:
        return "reduction"
    return "copy" if kinds == {"copy"} else "pointwise"


def _state_writer(ops: Sequence[RecordedOp], node_kinds: Sequence[str]) -> StateWriter:
    if "counter" in node_kinds:
        return "copy"
    if "writer" in node_kinds:
        return "copy" if all(is_copy_like(op.target, op.arguments) for op in ops) else "compute"
    return "none"


def _born_inside(ops: Sequence[RecordedOp], registry: Registry) -> set[int]:
    """Buffers whose storage an op of the kernel makes."""
    born: set[int] = set()
    for op in ops:
        given = {registry.tensors[t].buffer for t in op.inputs}
        born |= {registry.tensors[t].buffer for t in op.outputs} - given
    return born


def signature(ops: Sequence[RecordedOp], registry: Registry, leaves: set[int]) -> str:
    """Hash of a kernel's structure: ops, arguments and layouts, with buffers numbered by first use.

    Offsets count from the first byte that the kernel sees of a buffer, so that equal layers that share one
    storage are equal too; the stride of an extent of one says nothing. What outlives the kernel belongs to
    the structure: a compiler may drop the rest.
    """
    lowest: dict[int, int] = {}
    for op in ops:
        for number in (*op.inputs, *op.outputs):
            tensor = registry.tensors[number]
            start = tensor.offset * ITEM_BYTES[tensor.dtype]
            lowest[tensor.buffer] = min(lowest.get(tensor.buffer, start), start)
    numbers = {buffer: index for index, buffer in enumerate(lowest)}

    def describe(number: int) -> list[Any]:
        tensor = registry.tensors[number]
        low = lowest[tensor.buffer]
        return [
            numbers[tensor.buffer],
            tensor.dtype,
            list(tensor.shape),
            [step if extent > 1 else 0 for extent, step in zip(tensor.shape, tensor.stride)],
            tensor.offset * ITEM_BYTES[tensor.dtype] - low,
            low % _ALIGNMENT_BYTES,
            _role(registry.buffers[tensor.buffer], tensor.buffer in leaves),
        ]

    def canonical(value: Any) -> Any:
        if isinstance(value, dict):
            if len(value) == 1 and isinstance(value.get("tensor"), int):
                return describe(value["tensor"])
            return {key: canonical(item) for key, item in value.items()}
        if isinstance(value, list):
            return [canonical(item) for item in value]
        return value

    structure = [[op.target, canonical(op.arguments), [describe(t) for t in op.outputs]] for op in ops]
    return hashlib.sha256(canonical_json(structure).encode()).hexdigest()


def _role(entry: BufferEntry, outlives: bool) -> str:
    if entry.kind in ("activation", "output", "workspace"):
        return "kept" if outlives else "inner"
    return "state" if entry.kind == "state" else "given"


def _name(kind: str, main: RecordedOp, ops: Sequence[RecordedOp], tensors: Sequence[TensorRef]) -> str:
    scope = ".".join(part for part in main.scope.split(".") if part and not part.isdigit())
    place = ".".join(scope.split(".")[-2:])
    if main.target.startswith("triton."):
        work = f"triton {main.target.rpartition(':')[2]}"
    elif kind == "matmul" and fused_operator(main.target) is None:
        shapes = [tensors[t].shape for t in main.inputs]
        inner = shapes[-1][-2] if len(shapes[-1]) > 1 else shapes[-1][0]
        made = tensors[main.outputs[0]].shape
        work = f"matmul {'x'.join(str(n) for n in (*made[:-1], inner, *made[-1:]))}"
    else:
        shown = main.outputs or main.inputs
        shape = "x".join(str(n) for n in tensors[shown[0]].shape) if shown else ""
        what = main.target.split(".")[1].strip("_") if len(ops) == 1 else f"{kind} of {len(ops)} ops"
        work = f"{what} {shape}".strip()
    return f"{place} {work}".strip()


def _dtype(main: RecordedOp, ops: Sequence[RecordedOp], tensors: Sequence[TensorRef]) -> str:
    """The dtype of the arithmetic: of an anchor's first tensor; else the one with the most elements made."""
    if op_kind(main.target) in ANCHOR_KINDS:
        floats = [tensors[t].dtype for t in main.inputs if "float" in tensors[t].dtype]
        return floats[0] if floats else tensors[(*main.inputs, *main.outputs)[0]].dtype
    made: Counter[str] = Counter()
    for op in ops:
        for number in op.outputs:
            made[tensors[number].dtype] += math.prod(tensors[number].shape)
    return max(sorted(made), key=lambda name: made[name]) if made else "int64"


def _layer(ops: Sequence[RecordedOp]) -> int | None:
    for op in ops:
        match = _LAYER.search(op.scope)
        if match:
            return int(match[1])
    return None


def _integral(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))
