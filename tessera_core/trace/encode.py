"""Operator arguments as canonical JSON values, with tensors as references (the portable form of an op)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tessera_core.trace.place import calling_place
from tessera_core.trace.registry import dtype_name
from tessera_formats.errors import ModelError


def encode(value: Any, tensor_id: Callable[[torch.Tensor], int], op: str) -> Any:
    """JSON form of one argument; raises :class:`ModelError` naming ``op`` for what has none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor_id(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item, tensor_id, op) for item in value]
    if isinstance(value, torch.dtype):
        try:
            return {"dtype": dtype_name(value)}
        except ModelError as problem:
            raise ModelError(f"{op} at {calling_place()}: {problem}") from None
    if isinstance(value, torch.device):
        return {"device": "any"}
    if isinstance(value, torch.layout):
        return {"layout": str(value).removeprefix("torch.")}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    what = "a random generator" if isinstance(value, torch.Generator) else f"a {type(value).__name__}"
    raise ModelError(
        f"{op} at {calling_place()}: takes {what}, which a trace cannot hold;"
        " make the step depend on its inputs and state only"
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order of occurrence."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def encoded_tensors(value: Any) -> list[int]:
    """Ids of every tensor in arguments that :func:`encode` has made, in order of occurrence, with repeats."""
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(value.get("tensor"), int):
            return [value["tensor"]]
        return [number for item in value.values() for number in encoded_tensors(item)]
    if isinstance(value, list):
        return [number for item in value for number in encoded_tensors(item)]
    return []


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value
