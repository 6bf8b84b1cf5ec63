"""What a kernel computes, in the terms in which GPU times are published and predicted: a matrix product by its
sizes, attention by heads and lengths, experts by widths, a selective scan by its state; all else by its bytes.

Silicon tables are looked up by these, and models predict from these, so both see a kernel alike. Read off a kernel's
operators in :mod:`tessera_core.profile.operators`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode", "encoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``count`` independent products of (m, k) by (k, n); ``m``: rows that the batch brings, ``n, k``: the weight.

    ``weight``: the right factor is a weight (read once, whatever the batch), not an activation. ``convolution``: the
    product that a convolution implies, whose library may compute it in another way.
    """

    dtype: str
    count: int
    m: int
    n: int
    k: int
    weight: bool
    convolution: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of ``queries`` new positions to ``context`` keys, both per sequence, in ``batch`` sequences.

    ``phase`` decode: one new position each. encoder: not causal. ``window``: keys that a query sees; None: all.
    """

    dtype: str
    phase: Phase
    batch: int
    queries: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A routed feed-forward layer: ``tokens`` each pass ``top_k`` of ``experts`` of width ``intermediate``."""

    dtype: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A Mamba-2 mixer's part: the causal convolution or the state-space recurrence.

    ``channels``: of the convolution, or heads times head_dim. A convolution has no heads, groups or state: 0.
    ``state_item_bytes``: of an element of the recurrence's state.
    """

    dtype: str
    part: Literal["convolution", "recurrence"]
    phase: Literal["prefill", "decode"]
    batch: int
    length: int
    channels: int
    heads: int
    head_dim: int
    state: int
    groups: int
    state_item_bytes: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Anything else: bounded by the bytes that it reads and writes, or by its launch.

    ``pointwise``: without a reduction. ``ops``: how many operators were fused. ``row_bytes``: of the row that one block
    goes through alone for the place of its largest element, 0 where none does. ``sorts``: orders elements.
    """

    dtype: str
    read_bytes: int
    written_bytes: int
    flops: int
    pointwise: bool
    ops: int
    row_bytes: int = 0
    sorts: bool = False


Work = Product | Attention | Experts | Scan | Streaming

POINTWISE_KINDS = frozenset({"pointwise", "copy", "counter", "embedding"})
"""Kinds of kernels without a reduction."""
