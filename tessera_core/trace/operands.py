"""What each op reads and writes: from its schema for any content, and exact rows for the traced content."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from tessera_core.program.boxes import Box, tensor_box
from tessera_core.program.ir import Mode, Operand
from tessera_core.trace.encode import encoded_tensors
from tessera_core.trace.operators import (
    ALLOCATIONS,
    INDEXED_COPIES,
    accumulates,
    argument_values,
    fills_what_it_writes,
    is_overwrite,
    reads_values,
)
from tessera_core.trace.registry import Registry
from tessera_core.trace.writes import written_names

# More boxes than this for one write tell a reader nothing; the whole tensor is said instead.
_MAX_CONTENT_BOXES = 256
# A marker run costs as much as the op, so it is left out for tensors that make tracing slow.
_MAX_MARKED_ELEMENTS = 1 << 26


def schema_operands(
    registry: Registry, func: OpOverload, arguments: Any, outputs: tuple[int, ...]
) -> tuple[Operand, ...]:
    """Accesses that the operator's schema, or the table of unmarked writers, states: *may*, or *must* where the
    table says that all is filled.

    A fresh result is certainly filled by the op that makes it, except by an allocation.
    """
    operands: list[Operand] = []
    values = argument_values(func, arguments["args"], arguments["kwargs"])
    written = written_names(func, values)
    for argument in func._schema.arguments:
        for tensor in encoded_tensors(values.get(argument.name)):
            if argument.name in written:
                if not is_overwrite(func, values):
                    operands.append(_operand(tensor, "read", False))
                operands.append(_operand(tensor, "write", fills_what_it_writes(func)))
            elif reads_values(func):
                operands.append(_operand(tensor, "read", False))
    arguments_buffers = {registry.tensors[t].buffer for t in encoded_tensors(arguments)}
    must = func._schema.name.removeprefix("aten::") not in ALLOCATIONS
    for tensor in outputs:
        if registry.tensors[tensor].buffer not in arguments_buffers:
            operands.append(_operand(tensor, "write", must))
    return tuple(dict.fromkeys(operands))


def content_operands(registry: Registry, func: OpOverload, args: Any, kwargs: Any) -> tuple[Operand, ...]:
    """The exact bytes that an indexed copy wrote, found by running it once on a marker.

    The destination is zeros and the source ones, so what is one afterwards was written. The boxes hold for
    the traced index values only.
    """
    name = func._schema.name.removeprefix("aten::")
    if name not in INDEXED_COPIES:
        return ()
    _, source_name = INDEXED_COPIES[name]
    values = argument_values(func, args, kwargs)
    destination, source = values["self"], values.get(source_name)
    if accumulates(values) or not isinstance(source, torch.Tensor):
        return ()
    if destination.numel() == 0 or destination.numel() > _MAX_MARKED_ELEMENTS:
        return ()
    with _disable_current_modes():
        marker = torch.zeros(tuple(destination.shape), dtype=destination.dtype)
        values = {**values, "self": marker, source_name: torch.ones_like(source)}
        func(*list(values.values())[: len(args)], **{name: values[name] for name in kwargs})
        mask = marker.ne(0).numpy()
    boxes = marked_boxes(
        mask, tuple(destination.stride()), destination.storage_offset(), destination.element_size()
    )
    entry = registry.find(destination)
    if boxes is None or entry is None:
        return ()
    tensor = registry.view(destination, entry)
    return (
        Operand(tensor=tensor, mode="write", must=False, valid_for="content", evidence="schema", boxes=boxes),
    )


def marked_boxes(
    mask: npt.NDArray[np.bool_], stride: tuple[int, ...], offset: int, item_bytes: int
) -> tuple[Box, ...] | None:
    """The marked elements of a strided tensor as boxes of bytes; None where they are too many to say.

    ``mask`` has the tensor's shape; ``stride`` and ``offset`` are in elements. A mask that is a product of
    one set per axis (rows of a cache, for every head) gives one box per run of consecutive indices.
    """
    if not mask.any():
        return ()
    axes = [
        np.asarray(mask.any(axis=tuple(a for a in range(mask.ndim) if a != axis)))
        for axis in range(mask.ndim)
    ]
    product = np.ones((), dtype=np.bool_)
    for axis in axes:
        product = product[..., None] & axis
    boxes: list[Box] = []
    if mask.ndim and bool((product == mask).all()):
        starts: list[tuple[int, tuple[int, ...]]] = [(offset, ())]
        for axis, step in zip(axes, stride):
            starts = [
                (base + low * step, (*shape, high - low))
                for base, shape in starts
                for low, high in _runs(axis)
            ]
            if len(starts) > _MAX_CONTENT_BOXES:
                return None
        for base, shape in starts:
            box = tensor_box(item_bytes, shape, stride, base)
            assert box is not None
            boxes.append(box)
        return tuple(boxes)
    elements = offset + sum(index * step for index, step in zip(np.nonzero(mask), stride))
    ordered = np.unique(np.asarray(elements).ravel())
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    if len(breaks) + 1 > _MAX_CONTENT_BOXES:
        return None
    for run in np.split(ordered, breaks):
        boxes.append(Box.interval(int(run[0]) * item_bytes, len(run) * item_bytes))
    return tuple(boxes)


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open runs of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return [(int(low), int(high)) for low, high in zip(edges[::2], edges[1::2])]


def _operand(tensor: int, mode: Mode, must: bool) -> Operand:
    return Operand(tensor=tensor, mode=mode, must=must, valid_for="shapes", evidence="schema", boxes=None)
