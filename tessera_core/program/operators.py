"""Which operators a trace may name, and how their recorded arguments become call templates.

A trace is data from somewhere else: it may only name operators of an allow-list of namespaces, none that
touches files, and every leaf of its arguments is one of a handful of shapes. Anything else is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessera_formats.errors import ArtifactError, TrustError

TRUSTED_NAMESPACES = frozenset({"aten", "prims", "tessera"})
"""Namespaces whose operators compute on tensors and do nothing else."""

# Strings are how an operator would be told a file or a process; these arguments are modes of arithmetic.
_TEXT_ARGUMENTS = frozenset(
    {"approximate", "compute_mode", "driver", "equation", "indexing", "mode", "pad_mode", "reduce", "side"}
    | {"ord", "padding_mode", "rounding_mode", "UPLO", "norm_type"}
)
_REFUSED_NAMES = frozenset(
    {"from_file", "save", "set_", "set", "set_data", "resize_", "resize_as_", "resize_as_sparse_"}
    | {"_resize_output_", "_pin_memory", "record_stream"}
)

Operator = Callable[..., Any]


def resolve_operator(target: str, *, trusted: bool = False) -> torch._ops.OpOverload:
    """The operator called ``NAMESPACE.NAME.OVERLOAD``.

    Raises :class:`TrustError` for a namespace outside the allow-list (``trusted`` lifts that for custom
    operators that the user's own code has registered), and :class:`ArtifactError` for an operator that does
    not exist here or that touches files.
    """
    parts = target.split(".")
    if len(parts) != 3 or not all(part.isidentifier() for part in parts):
        raise ArtifactError(f"op {target!r}: is not NAMESPACE.NAME.OVERLOAD; trace again")
    namespace, name, overload_name = parts
    if namespace == "tessera":
        # Registers the fused operators of the catalogue's models and the collectives; late, because only they
        # need them.
        importlib.import_module("tessera_core.trace.fused.operators")
        importlib.import_module("tessera_core.trace.parallel.collectives")
    if namespace not in TRUSTED_NAMESPACES and not trusted:
        raise TrustError(
            f"op {target}: namespace {namespace!r} is not one that replay trusts;"
            " pass --trust-model if you wrote the model yourself"
        )
    try:
        overload = getattr(getattr(getattr(torch.ops, namespace), name), overload_name)
    except (AttributeError, RuntimeError):
        raise ArtifactError(
            f"op {target}: torch {torch.__version__} has no such operator; trace again with this version"
        ) from None
    if not isinstance(overload, torch._ops.OpOverload):
        raise ArtifactError(f"op {target}: is not an operator; trace again")
    if namespace in TRUSTED_NAMESPACES and _touches_more_than_tensors(name, overload):
        raise ArtifactError(
            f"op {target}: is refused in replay because it does more than compute; trace again"
        )
    return overload


def refuse_view(target: str, overload: torch._ops.OpOverload) -> None:
    """Refuse an operator that makes or changes a view, which no trace has as an op; raises :class:`ArtifactError`.

    Some of them (``_reshape_alias``) don't look where a storage ends.
    """
    returns = overload._schema.returns
    views = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if views or torch.Tag.inplace_view in overload.tags:
        raise ArtifactError(f"op {target}: only looks at a tensor, which is no op of a trace; trace again")


def _touches_more_than_tensors(name: str, overload: torch._ops.OpOverload) -> bool:
    if name in _REFUSED_NAMES:
        return True
    written = any(a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments)
    if not overload._schema.returns and not written:
        return True
    return any(
        "str" in str(argument.type) and argument.name not in _TEXT_ARGUMENTS
        for argument in overload._schema.arguments
    )


@dataclass(frozen=True, slots=True)
class Template:
    """A call's arguments with holes for tensors.

    ``positional`` and ``named`` hold the constants; ``holes`` are (position, tensor id), ``named_holes``
    (name, tensor id), and ``nested`` / ``named_nested`` lists of tensors with None where there is none.
    """

    positional: list[Any]
    named: dict[str, Any]
    holes: tuple[tuple[int, int], ...]
    named_holes: tuple[tuple[str, int], ...]
    nested: tuple[tuple[int, tuple[int | None, ...]], ...]
    named_nested: tuple[tuple[str, tuple[int | None, ...]], ...]

    @property
    def tensors(self) -> tuple[int, ...]:
        """Every tensor id in the arguments."""
        direct = [tensor for _, tensor in (*self.holes, *self.named_holes)]
        lists = [tensors for _, tensors in (*self.nested, *self.named_nested)]
        return (*direct, *(tensor for tensors in lists for tensor in tensors if tensor is not None))


def decode_arguments(arguments: object, *, tensors: int, device: torch.device, where: str) -> Template:
    """Turn an op's recorded ``{"args": [...], "kwargs": {...}}`` into a :class:`Template`.

    ``tensors`` is how many tensor ids the trace has; ``where`` names the op in :class:`ArtifactError`.
    """
    if not isinstance(arguments, Mapping):
        raise ArtifactError(f"{where}: arguments are not an object; trace again")
    args, kwargs = arguments.get("args"), arguments.get("kwargs")
    if not isinstance(args, list) or not isinstance(kwargs, Mapping):
        raise ArtifactError(f"{where}: arguments lack 'args' or 'kwargs'; trace again")
    positional, holes, nested = _split(list(enumerate(args)), tensors, device, where)
    named, named_holes, named_nested = _split(list(kwargs.items()), tensors, device, where)
    return Template(
        [positional.get(index) for index in range(len(args))],
        named,
        tuple(holes),
        tuple(named_holes),
        tuple(nested),
        tuple(named_nested),
    )


def _split(
    items: list[tuple[Any, Any]], tensors: int, device: torch.device, where: str
) -> tuple[dict[Any, Any], list[tuple[Any, int]], list[tuple[Any, tuple[int | None, ...]]]]:
    """Constants, single tensors and lists of tensors among (key, recorded leaf) pairs."""
    constants: dict[Any, Any] = {}
    holes: list[tuple[Any, int]] = []
    nested: list[tuple[Any, tuple[int | None, ...]]] = []
    for key, leaf in items:
        if _is_tensor(leaf):
            holes.append((key, _tensor_id(leaf, tensors, where)))
        elif isinstance(leaf, list) and any(_is_tensor(entry) for entry in leaf):
            entries = [None if entry is None else _tensor_id(entry, tensors, where) for entry in leaf]
            nested.append((key, tuple(entries)))
        else:
            constants[key] = _constant(leaf, device, where)
    return constants, holes, nested


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Mapping) and "tensor" in leaf


def _tensor_id(leaf: Any, tensors: int, where: str) -> int:
    identity = leaf.get("tensor") if _is_tensor(leaf) and len(leaf) == 1 else None
    if type(identity) is not int or not 0 <= identity < tensors:
        raise ArtifactError(f"{where}: {leaf!r} is not a tensor of this trace; trace again")
    return identity


def _constant(leaf: Any, device: torch.device, where: str) -> Any:
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    if isinstance(leaf, list):
        return [_constant(entry, device, where) for entry in leaf]
    if isinstance(leaf, Mapping) and len(leaf) == 1:
        ((kind, name),) = leaf.items()
        if kind == "device" and name == "any":
            return device
        expected = _NAMED_CONSTANTS.get(kind)
        value = getattr(torch, name, None) if expected is not None and isinstance(name, str) else None
        if expected is not None and isinstance(value, expected):
            return value
    raise ArtifactError(f"{where}: argument {leaf!r} is of no known form; trace again")


_NAMED_CONSTANTS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def dtype_named(name: str, where: str) -> torch.dtype:
    """The dtype that PyTorch calls ``name``; raises :class:`ArtifactError` naming ``where``."""
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise ArtifactError(f"{where}: {name!r} is not a dtype; trace again")
    return value
