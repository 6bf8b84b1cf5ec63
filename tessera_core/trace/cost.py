"""What a kernel does in numbers: floating-point operations, and bytes that cross its border."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tessera_core.program.boxes import Box, union_bytes
from tessera_core.program.ir import TensorRef
from tessera_core.trace.encode import encoded_tensors
from tessera_core.trace.fused.table import fused_operator
from tessera_core.trace.operators import INDEXED_COPIES, LOOKUPS, base_name, is_allocation, op_kind


def op_flops(target: str, arguments: Any, outputs: Sequence[int], tensors: Sequence[TensorRef]) -> int:
    """Floating-point operations of one op; a multiply-add counts as two.

    Matrix products 2mnk; attention 4 per (query, key, channel), half of that where causal; convolutions 2 per
    output element and weight of its channel; fused operators as their table says; other work one per element
    of the largest operand.
    """
    fused = fused_operator(target)
    if fused is not None:
        return fused.flops(_shapes(arguments, tensors))
    shapes = [tensors[t].shape for t in encoded_tensors(arguments)]
    made = math.prod(tensors[outputs[0]].shape) if outputs else 0
    name, kind = base_name(target), op_kind(target)
    if kind == "matmul" and len(shapes) >= 2:
        first = shapes[1] if name.startswith(("add", "badd")) and len(shapes) >= 3 else shapes[0]
        return 2 * made * (first[-1] if first else 1)
    if kind == "attention" and len(shapes) >= 3:
        query, key, value = shapes[0], shapes[1], shapes[2]
        pairs = math.prod(query[:-1]) * key[-2]
        args = arguments["args"]
        causal = (len(args) > 5 and args[5] is True) or arguments["kwargs"].get("is_causal") is True
        return pairs * 2 * (query[-1] + value[-1]) // (2 if causal else 1)
    if kind == "convolution" and len(shapes) >= 2:
        return 2 * made * math.prod(shapes[1][1:])
    if kind in ("embedding", "copy") or is_allocation(target):
        return 0
    largest = max([math.prod(s) for s in shapes] + [made], default=0)
    return largest if any("float" in tensors[t].dtype for t in (*outputs, *encoded_tensors(arguments))) else 0


def traffic(accesses: Iterable[tuple[TensorRef, Box, int | None]], buffer_bytes: Mapping[int, int]) -> int:
    """Bytes of the union of accesses per buffer; a limit says that no more than so many bytes are touched."""
    boxes: dict[int, list[Box]] = defaultdict(list)
    limits: dict[int, int] = {}
    for tensor, box, limit in accesses:
        if limit is None:
            boxes[tensor.buffer].append(box)
        else:
            limits[tensor.buffer] = limits.get(tensor.buffer, 0) + limit
    total = 0
    for buffer in sorted({*boxes, *limits}):
        whole = buffer_bytes[buffer]
        total += min(whole, union_bytes(list(dict.fromkeys(boxes[buffer])), whole) + limits.get(buffer, 0))
    return total


def access_limit(
    target: str, mode: str, tensor: int, arguments: Any, outputs: Sequence[int], tensors: Sequence[TensorRef]
) -> int | None:
    """Bytes that an op touches at most in ``tensor`` where indices choose the rows; None: the tensor's box."""
    fused = fused_operator(target)
    if fused is not None:
        index = next((i for i, a in enumerate(arguments["args"]) if a == {"tensor": tensor}), None)
        if mode != "read" or index is None:
            return None
        elements = fused.reads(_shapes(arguments, tensors), index)
        return None if elements is None else elements * tensors[tensor].item_bytes
    name, given = base_name(target), encoded_tensors(arguments)
    if not target.startswith("aten.") or not given or given[0] != tensor:
        return None
    if mode == "write" and name in INDEXED_COPIES and len(given) > 1:
        source = tensors[given[-1]]
        return source.elements * source.item_bytes
    if mode == "read" and name in LOOKUPS and outputs:
        return tensors[outputs[0]].elements * tensors[outputs[0]].item_bytes
    return None


def _shapes(arguments: Any, tensors: Sequence[TensorRef]) -> list[Any]:
    """Positional arguments, each tensor as its shape."""
    return [
        tensors[value["tensor"]].shape if isinstance(value, dict) and "tensor" in value else value
        for value in arguments["args"]
    ]
