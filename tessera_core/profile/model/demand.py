"""What a kernel asks of a GPU: blocks of work for its multiprocessors, bytes of its memory and L2, a serial chain.

A library picks one of several kernels for the same sizes, so a demand has one row per candidate (tile and split of a
matrix product; one row for all else). Sizes come as columns, so that one kernel and a whole table take one way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Sizes: TypeAlias = Mapping[str, Floats]

TILES = ((16, 64), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256))
"""Rows and columns of the output that one block computes: the usual ones of matrix products on tensor cores."""

SPLITS = (1, 2, 4, 8)
"""Into how many blocks the sum over k of one tile is split."""

QUERY_TILE = 128
"""Queries that one block of prefill attention takes; also the rows to which a routed expert's tokens are padded."""

TENSOR_ROWS = 16
"""Rows of the smallest tile of tensor cores: fewer query heads per key head cost as much."""

CHAIN = 1024
"""Unit of a serial chain: elements that one block adds up, or keys that it passes, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Arrays of shape (candidates, kernels), or (kernels,) where all candidates are alike.

    ``flops``: of one block, which makes ``tile_rows`` by ``tile_columns`` of the output. ``blocks``: how many there
    are. ``chain``: length of the longest serial chain, in units of :data:`CHAIN`. ``data_bytes``: what must
    come from memory where no cache holds it. ``cache_bytes``: what moves between L2 and multiprocessors.
    ``splits``: blocks that share one result.
    """

    flops: Floats
    tile_rows: Floats
    tile_columns: Floats
    blocks: Floats
    chain: Floats
    data_bytes: Floats
    cache_bytes: Floats
    splits: Floats


def product_demand(sizes: Sizes, item_bytes: float) -> Demand:
    """``m, n, k`` and, where there are several products, ``count``; with ``weight_bytes`` an item of n × k."""
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    count = sizes.get("count", np.ones_like(m))
    choices = np.array(
        [(rows, columns, split) for rows, columns in TILES for split in SPLITS], dtype=np.float64
    )
    rows, columns, splits = (choices[:, index, None] for index in range(3))
    down, across = np.ceil(m / rows), np.ceil(n / columns)
    partial = np.where(splits > 1, 2 * splits * m * n * 4, 0.0)
    return Demand(
        flops=2 * rows * columns * k / splits,
        tile_rows=rows,
        tile_columns=columns,
        blocks=count * down * across * splits,
        chain=k / splits / CHAIN,
        data_bytes=count * item_bytes * (m * k + n * k + m * n),
        cache_bytes=count * (item_bytes * (m * k * across + n * k * down + m * n) + partial),
        splits=splits,
    )


def _single(
    *, flops: Floats, blocks: Floats, chain: Floats, data_bytes: Floats, cache_bytes: Floats | None = None
) -> Demand:
    """One candidate without tiles; ``flops``: of all blocks together."""
    one = np.ones_like(flops)
    return Demand(
        flops=flops / blocks,
        tile_rows=one * QUERY_TILE,
        tile_columns=one * QUERY_TILE,
        blocks=blocks,
        chain=chain,
        data_bytes=data_bytes,
        cache_bytes=data_bytes if cache_bytes is None else cache_bytes,
        splits=one,
    )


def _visible(context: Floats, window: Floats) -> Floats:
    """Keys that one query sees; a window of 0 is none."""
    return np.where(window > 0, np.minimum(window, context), context)


def decode_demand(sizes: Sizes, item_bytes: float) -> Demand:
    """Attention of one new position to ``context`` keys: ``batch, heads, kv_heads, head_dim, window``."""
    batch, heads, kv_heads, width = (sizes[name] for name in ("batch", "heads", "kv_heads", "head_dim"))
    keys = _visible(sizes["context"], sizes["window"])
    rows = TENSOR_ROWS * np.ceil(heads / kv_heads / TENSOR_ROWS)
    cache = 2 * batch * kv_heads * keys * width * item_bytes
    return _single(
        flops=4 * batch * kv_heads * rows * keys * width,
        blocks=batch * kv_heads,
        chain=keys / CHAIN,
        data_bytes=cache + 2 * batch * heads * width * item_bytes,
    )


def prefill_demand(sizes: Sizes, item_bytes: float) -> Demand:
    """Attention of ``queries`` positions to ``context`` keys, the last ones their own; ``causal``: 1 or 0."""
    batch, heads, kv_heads, width = (sizes[name] for name in ("batch", "heads", "kv_heads", "head_dim"))
    queries, context, causal = sizes["queries"], sizes["context"], sizes["causal"]
    tiles = np.ceil(queries / QUERY_TILE)
    # The mean over queries of the keys that one sees: causal ones see those before their own tile's end.
    later = np.minimum(queries, context) - QUERY_TILE
    seen = np.where(causal > 0, context - np.maximum(later, 0) / 2, context)
    keys = _visible(seen, sizes["window"])
    moved = 2 * batch * (heads * queries + kv_heads * context) * width * item_bytes
    return _single(
        flops=4 * batch * heads * tiles * QUERY_TILE * keys * width,
        blocks=batch * heads * tiles,
        chain=keys / CHAIN,
        data_bytes=moved,
        cache_bytes=moved + 2 * batch * heads * tiles * keys * width * item_bytes,
    )


def experts_demand(sizes: Sizes, item_bytes: float) -> Demand:
    """A routed feed-forward layer, gated: three products of ``hidden`` by ``intermediate`` in each expert."""
    tokens, hidden, inner = sizes["tokens"], sizes["hidden"], sizes["intermediate"]
    count, chosen = sizes["experts"], sizes["top_k"]
    routed = tokens * chosen
    touched = count * -np.expm1(tokens * np.log1p(-np.minimum(chosen / count, 1 - 1e-9)))
    # Each touched expert's rows are padded to a tile, which is small where few tokens come.
    tile = np.clip(2.0 ** np.ceil(np.log2(np.maximum(routed / touched, 1))), TENSOR_ROWS, QUERY_TILE)
    rows = routed + touched * tile / 2
    return _single(
        flops=6 * rows * hidden * inner,
        blocks=np.ceil(rows / tile) * np.maximum(1.0, np.ceil(2 * inner / QUERY_TILE)),
        chain=(hidden + inner) / CHAIN,
        data_bytes=item_bytes * (3 * touched * hidden * inner + 2 * routed * (hidden + inner)),
        cache_bytes=item_bytes * 3 * hidden * inner * np.maximum(touched, rows / tile),
    )


DEMANDS: Mapping[str, Callable[[Sizes, float], Demand]] = {
    "products": product_demand,
    "attention-decode": decode_demand,
    "attention-prefill": prefill_demand,
    "experts": experts_demand,
}
"""How the sizes of each class become a demand; classes are named like the families of published tables."""
