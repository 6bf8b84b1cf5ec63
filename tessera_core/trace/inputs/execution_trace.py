"""A PyTorch ExecutionTrace (``ExecutionTraceObserver``, Chakra schema): which storages an operator call was given.

A node is tied to an operator call of the profile by its record number (``rf_id``), which both files have if they
were recorded together. A tensor is written there as [tensor, storage, offset, elements, bytes an element, device].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera_core.trace.inputs.json_stream import entries
from tessera_core.trace.inputs.kineto import DTYPES, CpuOp, shape_of, text_of, within
from tessera_formats.errors import InputError

_TENSOR = re.compile(r"Tensor\((.+)\)")
_LIST = re.compile(r"GenericList\[(.*)\]")
_NONE = "<None>"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageView:
    """A tensor: a strided view, in elements, of a storage that has a number only while it is alive."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str

    @property
    def scalar_on_host(self) -> bool:
        """Whether it is one number in the host's memory, which a launch is given by value."""
        return self.device == "cpu" and not self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operator call. ``inputs`` in the order of its schema, views in place of tensors; ``schema`` may be empty."""

    name: str
    schema: str
    inputs: tuple[Any, ...]
    outputs: tuple[StorageView, ...]


def views_in(value: Any) -> list[StorageView]:
    """The tensors of an argument, in order."""
    if isinstance(value, StorageView):
        return [value]
    return [view for item in value for view in views_in(item)] if isinstance(value, tuple) else []


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def read_execution_trace(path: Path, ops: Iterable[CpuOp], profile: Path) -> Mapping[int, Node]:
    """The nodes of the operator calls ``ops``, by record number.

    Raises :class:`InputError` for a file that is damaged or no ExecutionTrace, and for one that was not recorded
    together with ``profile``.
    """
    calls = list(ops)
    wanted = {op.record: op for op in calls if op.record}
    nodes: dict[int, Node] = {}
    schema, count = None, 0
    for key, value in entries(path, ("nodes",)):
        if key == "schema":
            schema = str(value)
        elif key == "nodes":
            count += 1
            try:
                attributes = {item["name"]: item["value"] for item in value["attrs"]}
                record = int(attributes.get("rf_id", 0))
                if record not in wanted:
                    continue
                call = wanted[record]
                if value["name"] != call.name:
                    raise _strangers(
                        path, profile, f"record {record} is {value['name']} there, not {call.name}"
                    )
                nodes[record] = _node(value, text_of(attributes.get("op_schema", "")))
                given, shown = _given(nodes[record]), _shown(call)
                if given is not None and shown is not None and len(given) == len(shown) and given != shown:
                    raise _strangers(
                        path,
                        profile,
                        f"record {record}, {call.name}, was given {_said(given)} there, not {_said(shown)}",
                    )
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as problem:
                raise InputError(
                    f"{path}: node {count} is not as ExecutionTraceObserver writes it ({type(problem).__name__}:"
                    f" {problem}); pass the file as PyTorch wrote it"
                ) from problem
    if schema is None or not count:
        raise InputError(
            f"{path}: is no ExecutionTrace (it has no schema and nodes); pass what ExecutionTraceObserver wrote"
        )
    if calls and not nodes:
        why = (
            "none of the profile's operator calls is in it" if wanted else "the profile has no record numbers"
        )
        raise _strangers(path, profile, why)
    return nodes


_Tensors = list[tuple[str, tuple[int, ...]]]


def _given(node: Node) -> _Tensors | None:
    """Dtype and shape of each tensor argument; None where there are lists, which profiles show in several ways."""
    if any(isinstance(value, tuple) and views_in(value) for value in node.inputs):
        return None
    return [(view.dtype, view.shape) for view in views_in(node.inputs)]


def _shown(call: CpuOp) -> _Tensors | None:
    """The same, as the profile shows it."""
    tensors = [(shown.dtype, shown.shape) for shown in call.arguments if shown.dtype is not None]
    return None if any(not dtype for dtype, _ in tensors) else tensors


def _said(tensors: _Tensors) -> str:
    return " ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in tensors)


def _strangers(path: Path, profile: Path, why: str) -> InputError:
    return InputError(
        f"{path}: was not recorded together with {profile} ({why}); pass the ExecutionTrace of the same run"
    )


def _node(node: dict[str, Any], schema: str) -> Node:
    return Node(
        name=str(node["name"]),
        schema=schema,
        inputs=_values(**node["inputs"]),
        outputs=tuple(views_in(_values(**node["outputs"]))),
    )


def _values(values: list[Any], types: list[str], shapes: list[Any], strides: list[Any]) -> tuple[Any, ...]:
    # Of what was launched through Triton fewer strides are written than arguments.
    padded = strides + [[]] * (len(values) - len(strides))
    return tuple(_value(*item) for item in zip(values, types, shapes, padded, strict=True))


def _value(value: Any, kind: str, shape: Any, stride: Any) -> Any:
    """A tensor as a view, a list as a tuple, anything else as it is."""
    match = _TENSOR.fullmatch(kind)
    if match and match[1].startswith("nullptr"):
        return None
    if match:
        if match[1] not in DTYPES:
            raise ValueError(f"unknown dtype {match[1]}")
        _, storage, offset, _, _, device = value
        extents = shape_of(shape)
        return StorageView(
            storage=int(storage),
            dtype=DTYPES[match[1]],
            shape=extents,
            stride=tuple(within(step, 1 << 50) for step in stride)
            if len(stride) == len(extents)
            else dense(extents),
            offset=within(offset, 1 << 50),
            device=str(device),
        )
    match = _LIST.fullmatch(kind)
    if match and isinstance(value, list):
        kinds = match[1].split(",") if match[1] else []
        if not any(item.startswith("Tensor") for item in kinds):
            return tuple(value)
        return tuple(_value(*item) for item in zip(value, kinds, shape, stride, strict=True))
    return None if value == _NONE else value
