"""What the tracer knows about operators beyond their schemas: kinds of work, full writes, pure copies.

The schema says which arguments *may* be written. The tables here say which are certainly filled, which
old values a write ignores, and how operators are grouped into kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload

from tessera_core.program.operators import resolve_operator
from tessera_core.trace.fused.table import fused_operator

MATMULS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul"}
    | {"_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "addr", "ger"}
)
ATTENTIONS = frozenset({"scaled_dot_product_attention"})
CONVOLUTIONS = frozenset({"convolution", "_convolution", "conv2d", "conv1d", "conv3d"})
EMBEDDINGS = frozenset({"embedding"})
SORTS = frozenset({"sort", "topk", "argsort", "kthvalue", "unique_consecutive", "_unique2", "msort"})
REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "var", "std"}
    | {"var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "aminmax"}
    | {"_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm", "rms_norm"}
)
ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Operators whose result has no defined values."""

COPIES = frozenset(
    {
        "copy_",
        "clone",
        "cat",
        "stack",
        "index_copy_",
        "index_put_",
        "_index_put_impl_",
        "scatter_",
        "slice_scatter",
    }
    | {"select_scatter", "index_copy", "index_put", "scatter", "_to_copy", "index", "index_select", "gather"}
    | {"fill_", "zero_", "repeat", "flip", "roll", "constant_pad_nd", "masked_fill_", "index_fill_"}
)
"""Operators that only move or convert values."""

INDEXED_COPIES: Mapping[str, tuple[str, str]] = {
    "index_copy_": ("index", "source"),
    "index_put_": ("indices", "values"),
    "_index_put_impl_": ("indices", "values"),
    "scatter_": ("index", "src"),
}
"""Writes of rows that indices choose: operator -> names of the index and of the source argument."""

LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "take"})
"""Reads of rows that indices choose: of the first tensor no more is read than is returned."""

_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})
_FACTORIES_WITH_TENSOR = frozenset(
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "new_ones"}
)
_KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("matmul", MATMULS),
    ("attention", ATTENTIONS),
    ("convolution", CONVOLUTIONS),
    ("embedding", EMBEDDINGS),
    ("sort", SORTS),
    ("reduction", REDUCTIONS),
    ("copy", COPIES),
)
ANCHOR_KINDS = frozenset(
    {"matmul", "attention", "convolution", "embedding", "sort", "triton", "custom", "collective"}
)
"""Kinds of which every op is a kernel of its own."""


def base_name(target: str) -> str:
    """``aten.add_.Tensor`` -> ``add_``."""
    return target.split(".")[1] if target.count(".") >= 2 else target


@lru_cache(maxsize=4096)
def op_kind(target: str) -> str:
    """The kernel kind of one op, by its target."""
    namespace = target.split(".")[0]
    if namespace == "triton":
        return "triton"
    if namespace in ("c10d", "_c10d_functional"):
        return "collective"
    if namespace not in ("aten", "prims"):
        fused = fused_operator(target)
        return "custom" if fused is None else fused.kind
    name = base_name(target)
    for kind, names in _KINDS:
        if name in names:
            return kind
    return "pointwise"


def is_allocation(target: str) -> bool:
    """Whether the op only allocates."""
    return target.startswith("aten.") and base_name(target) in ALLOCATIONS


def is_view(func: OpOverload) -> bool:
    """Whether the operator only looks at its argument in another way."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def reads_values(func: OpOverload) -> bool:
    """Whether an op reads the values of its tensors at all (``zeros_like`` only looks at their shape)."""
    name = func._schema.name.removeprefix("aten::")
    return name not in _FACTORIES_WITH_TENSOR and name not in ALLOCATIONS


def argument_values(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by their schema names, as tensors or in JSON form; defaults are left out."""
    return dict(zip([argument.name for argument in func._schema.arguments], args)) | dict(kwargs)


def accumulates(values: Mapping[str, Any]) -> bool:
    """Whether an indexed copy combines with the old values (``accumulate=True``, ``reduce="add"``)."""
    return bool(values.get("accumulate")) or values.get("reduce") is not None


def is_overwrite(func: OpOverload, values: Mapping[str, Any]) -> bool:
    """Whether a written argument's old values are ignored. ``values``: the call's arguments by name."""
    fused = fused_operator(str(func))
    if fused is not None:
        return fused.overwrites
    name = func._schema.name.removeprefix("aten::")
    if func.namespace != "aten" or accumulates(values):
        return False
    # torch.Tag.out says the same, but torch 2.11 lacks it.
    given = any(argument.is_out for argument in func._schema.arguments)
    return name in _OVERWRITES or name in INDEXED_COPIES or given


def fills_what_it_writes(func: OpOverload) -> bool:
    """Whether every element of each written argument is certainly written (the *must* table)."""
    if func.namespace != "aten":
        fused = fused_operator(str(func))
        return fused is not None and fused.fills
    name = func._schema.name.removeprefix("aten::")
    return name in _OVERWRITES or (torch.Tag.pointwise in func.tags and name != "masked_fill_")


def is_copy_like(target: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an in-place op only moves values (so that it may run on every home of a state).

    ``arguments``: the recorded ones.
    """
    if not target.startswith("aten.") or base_name(target) not in COPIES:
        return False
    return not accumulates(argument_values(resolve_operator(target), arguments["args"], arguments["kwargs"]))


def schema_says_all(func: OpOverload) -> bool:
    """Whether the schema is known to mark every argument that is written.

    True for PyTorch's core and pointwise operators, which are functional by definition but for what they mark,
    and for those of the tables here. Others, custom ones above all, are watched while they run.
    """
    if func.namespace not in ("aten", "prims"):
        return False
    functional = {torch.Tag.core, torch.Tag.pointwise} & set(func.tags)
    return bool(functional) or op_kind(str(func)) != "pointwise" or is_allocation(str(func))
