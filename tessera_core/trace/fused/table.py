"""What the tracer knows about the fused operators: kind of kernel, full writes, operations and reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Arguments = Sequence[Any]
"""An op's arguments in order, each tensor as its shape (a tuple)."""


def _read_all(arguments: Arguments, index: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOperator:
    """One operator ``tessera::NAME``.

    ``kind``: of its kernel; attention and matmul say that a GPU computes it on matrix units.
    ``overwrites``: it ignores the old values of what it writes, and fills it for certain. ``fills``: it fills
    what it writes for certain, whether or not it reads it first. ``flops(arguments)``: operations, a
    multiply-add counts as two. ``reads(arguments, index)``: elements that it reads at most of the argument at
    ``index``; None for all.
    """

    kind: Literal["attention", "matmul", "custom", "embedding", "collective"]
    flops: Callable[[Arguments], int]
    fills: bool = False
    overwrites: bool = False
    reads: Callable[[Arguments, int], int | None] = _read_all


def _sink_attention_pairs(arguments: Arguments) -> int:
    """(query, key) pairs of one head that are attended to."""
    query, key, _, _, position, _, window = arguments
    tokens, rows = query[2], key[2]
    limit = min(window or rows, rows)
    if position is not None:
        return int(tokens * limit)
    # Query i sees min(i + 1, window) keys.
    return int(limit * (limit + 1) // 2 + (tokens - limit) * limit)


def _sink_attention_flops(arguments: Arguments) -> int:
    query, value = arguments[0], arguments[2]
    return int(2 * query[0] * query[1] * _sink_attention_pairs(arguments) * (query[3] + value[3]))


def _sink_attention_reads(arguments: Arguments, index: int) -> int | None:
    position, window = arguments[4], arguments[6]
    if index not in (1, 2) or position is None or not window:
        return None
    batch, heads, rows, width = arguments[index]
    return int(batch * heads * min(rows, window) * width)


def _experts_flops(arguments: Arguments) -> int:
    tokens, width = arguments[0]
    inner = arguments[5][1]
    return int(tokens * arguments[1][1] * 6 * width * inner)


def _experts_reads(arguments: Arguments, index: int) -> int | None:
    if index not in (3, 4, 5, 6) or arguments[index] is None:
        return None
    experts = arguments[index][0]
    chosen = min(experts, math.prod(arguments[1]))
    return int(math.prod(arguments[index]) // experts * chosen)


def _gated_experts_flops(arguments: Arguments) -> int:
    tokens, width = arguments[0]
    inner = arguments[4][2]
    return int(tokens * arguments[1][1] * 6 * width * inner)


def _gated_experts_reads(arguments: Arguments, index: int) -> int | None:
    return _experts_reads(arguments, index) if index in (3, 4) else None


def _latent_attention_flops(arguments: Arguments) -> int:
    """Scores over latent and rotary channels, and the weighted sum over latent ones."""
    query, cache, _, _, latent = arguments
    return int(2 * query[0] * query[1] * cache[1] * (query[2] + latent))


def _convolution_flops(arguments: Arguments) -> int:
    return int(2 * math.prod(arguments[0]) * arguments[1][1])


def _scan_flops(arguments: Arguments) -> int:
    """Mamba-2's chunked form (arXiv 2405.21060, section 6), the causal half of each chunk."""
    batch, tokens, heads, width = arguments[0]
    groups, state = arguments[3][2:]
    chunk = min(arguments[8], tokens)
    return int(batch * tokens * (chunk * state * groups + heads * (chunk * width + 4 * state * width)))


def _step_flops(arguments: Arguments) -> int:
    """Per element of the state: decay, input, sum and output."""
    return int(6 * math.prod(arguments[7]))


def _part_reads(arguments: Arguments, index: int) -> int | None:
    return _experts_reads(arguments, index) if index in (3, 4, 5) else None


def _reduce_flops(arguments: Arguments) -> int:
    """What a ring's step adds up on one rank, over all steps."""
    part, ranks = arguments
    return int(math.prod(part) * (ranks - 1) // ranks)


def _no_flops(arguments: Arguments) -> int:
    return 0


def _row_reads(arguments: Arguments, index: int) -> int | None:
    """No more rows of the table than there are tokens."""
    tokens, table = arguments[:2]
    return min(math.prod(tokens), table[0]) * int(table[1]) if index == 1 else None


FUSED: Mapping[str, FusedOperator] = {
    "sink_attention": FusedOperator(
        kind="attention", flops=_sink_attention_flops, reads=_sink_attention_reads
    ),
    "latent_attention": FusedOperator(kind="attention", flops=_latent_attention_flops),
    "clamped_experts": FusedOperator(kind="matmul", flops=_experts_flops, reads=_experts_reads),
    "gated_experts": FusedOperator(kind="matmul", flops=_gated_experts_flops, reads=_gated_experts_reads),
    "clamped_experts_part": FusedOperator(kind="matmul", flops=_experts_flops, reads=_part_reads),
    "causal_convolution": FusedOperator(kind="custom", flops=_convolution_flops, fills=True, overwrites=True),
    "causal_convolution_step": FusedOperator(kind="custom", flops=_convolution_flops, fills=True),
    "selective_scan": FusedOperator(kind="matmul", flops=_scan_flops, fills=True, overwrites=True),
    "selective_step": FusedOperator(kind="custom", flops=_step_flops, fills=True),
    "vocabulary_rows": FusedOperator(kind="embedding", flops=_no_flops, reads=_row_reads),
    "all_reduce": FusedOperator(kind="collective", flops=_reduce_flops),
    "all_gather": FusedOperator(kind="collective", flops=_no_flops),
}
"""All fused operators by name, without their namespace."""

SHARD_OPERATORS = frozenset({"all_gather", "all_reduce", "clamped_experts_part", "vocabulary_rows"})
"""Those that only a rank's part of a model has (tessera_core.trace.parallel)."""


def fused_operator(target: str) -> FusedOperator | None:
    """The operator that an op's target (``tessera.NAME.default``) names, or None."""
    namespace, _, rest = target.partition(".")
    return FUSED.get(rest.partition(".")[0]) if namespace == "tessera" else None
