"""What an operator call writes: what its schema marks, what a table knows, and what watching it run finds.

A schema may be silent about a write: PyTorch's batch norm changes its running statistics unmarked, and so may
anybody's custom operator. Calls that are not known to be complete are therefore compared before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from tessera_core.trace.encode import tensors_in
from tessera_core.trace.operators import argument_values
from tessera_core.trace.place import calling_place
from tessera_core.trace.registry import storage_key
from tessera_formats.errors import ModelError

_STATISTICS = ("running_mean", "running_var")
_UNMARKED_WRITES: Mapping[str, tuple[str, ...]] = {
    "native_batch_norm": _STATISTICS,
    "cudnn_batch_norm": _STATISTICS,
    "miopen_batch_norm": _STATISTICS,
    "batch_norm_update_stats": _STATISTICS,
    "batch_norm_gather_stats": _STATISTICS,
    "batch_norm_gather_stats_with_counts": _STATISTICS,
}


def written_names(func: OpOverload, values: Mapping[str, Any]) -> frozenset[str]:
    """Names of the arguments that a call may write. ``values``: its arguments by name, in any form."""
    names = {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if func.namespace == "aten" and values.get("training", True):
        names.update(_UNMARKED_WRITES.get(func._schema.name.removeprefix("aten::"), ()))
    return frozenset(names)


def written_tensors(func: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call may write, in the order of the schema."""
    values = argument_values(func, args, kwargs)
    written = written_names(func, values)
    return [
        tensor
        for argument in func._schema.arguments
        if argument.name in written
        for tensor in tensors_in(values.get(argument.name))
    ]


class Watch:
    """The content of a call's arguments before it runs; afterwards only ``written`` may have changed."""

    __slots__ = ("_before", "_tensors", "_written")

    def __init__(self, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        self._written = written
        self._tensors = {storage_key(tensor): tensor for tensor in tensors}
        with _disable_current_modes():
            self._before = {key: _bytes(tensor).clone() for key, tensor in self._tensors.items()}

    def check(self, op: str) -> None:
        """Raise :class:`ModelError` where anything else has changed."""
        with _disable_current_modes():
            for tensor in map(_without_repeats, self._written):
                known = torch.empty(0, dtype=tensor.dtype).set_(
                    self._before[storage_key(tensor)].untyped_storage(),
                    tensor.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
                known.copy_(tensor)
            same = all(torch.equal(_bytes(t), self._before[key]) for key, t in self._tensors.items())
        if not same:
            raise ModelError(
                f"{op} at {calling_place()}: changes an argument that its schema does not mark as written;"
                " name it in mutates_args of the custom op, or let the op return a new tensor"
            )


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with one element along each axis that repeats it (stride zero)."""
    for axis, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a real tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
