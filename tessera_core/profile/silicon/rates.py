"""How many operations and bytes the sizes of a published row stand for, and the roofline that a table itself spans.

Times are interpolated relative to this roofline: a time grows with its sizes by powers of ten, the share of the
roofline that a kernel reaches changes little from one measured point to the next. No datasheet figure enters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tessera_core.profile.silicon.families import Columns

Floats: TypeAlias = NDArray[np.float64]

ITEM_BYTES: Mapping[str, float] = {
    "bfloat16": 2,
    "fp8": 1,
    "fp8_block": 1,
    "nvfp4": 0.5,
    "sq": 1,
    "int8_wo": 1,
    "int4_wo": 0.5,
    "w4a16_mxfp4": 0.5,
}
"""Bytes of a weight by the tables' dtypes."""

ACTIVATION_BYTES = 2
LATENT_WIDTH, LATENT_RANK, LATENT_KEY, LATENT_VALUE = 576, 512, 192, 128
"""Multi-head latent attention's channels: of a cached row, of its latent part, of a head's key, and of its value
(arXiv 2412.19437, section 4.2)."""

PEAK_QUANTILE = 0.995
"""A table's best rate, but for the few rows that beat it by an error of measurement or by staying in a cache."""


def _products(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    m, n, k = s["m"], s["n"], s["k"]
    return 2 * m * n * k, weight * n * k + ACTIVATION_BYTES * (m * k + m * n)


def _seen(queries: Floats, window: Floats) -> Floats:
    """(query, key) pairs of a causal prompt under a window; 0: none."""
    limit = np.where(window > 0, np.minimum(window, queries), queries)
    pairs: Floats = limit * (limit + 1) / 2 + (queries - limit) * limit
    return pairs


def _prefill(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    pairs = s["batch"] * _seen(s["queries"], s["window"])
    rows = s["batch"] * s["queries"] * s["head_dim"]
    return 4 * pairs * s["heads"] * s["head_dim"], ACTIVATION_BYTES * 2 * rows * (s["heads"] + s["kv_heads"])


def _decode(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    keys = np.where(s["window"] > 0, np.minimum(s["window"], s["context"]), s["context"])
    each = s["batch"] * keys * s["head_dim"]
    return 4 * each * s["heads"], ACTIVATION_BYTES * 2 * each * s["kv_heads"]


def _encoder(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    each = s["batch"] * s["queries"] * s["heads"] * s["head_dim"]
    return 4 * each * s["queries"], ACTIVATION_BYTES * 4 * each


def _latent_prefill(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    rows = s["batch"] * s["queries"] * s["heads"]
    width = LATENT_KEY + LATENT_VALUE
    return rows * (s["queries"] + 1) * width, ACTIVATION_BYTES * 2 * rows * width


def _latent_decode(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    keys = s["batch"] * s["context"] * LATENT_WIDTH
    return 4 * keys * s["heads"], ACTIVATION_BYTES * keys


def _latent_products(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    """One product a head with its own (128, 512) factor, of keys or of values (arXiv 2412.19437)."""
    factor = LATENT_VALUE * LATENT_RANK
    rows = s["tokens"] * (LATENT_VALUE + LATENT_RANK)
    return 2 * s["heads"] * s["tokens"] * factor, s["heads"] * (weight * factor + ACTIVATION_BYTES * rows)


def _experts(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    """Weights of the experts that evenly routed tokens reach, and the tokens' rows."""
    reached = s["experts"] * -np.expm1(s["tokens"] * np.log1p(-s["top_k"] / (s["experts"] + 1e-9)))
    each = 3 * s["hidden"] * s["intermediate"]
    rows = s["tokens"] * s["top_k"] * (2 * s["hidden"] + 3 * s["intermediate"])
    return 2 * s["tokens"] * s["top_k"] * each, weight * reached * each + ACTIVATION_BYTES * rows


def _convolution(s: Mapping[str, Floats], weight: float) -> tuple[Floats, Floats]:
    each = s["batch"] * s["length"] * s["channels"]
    return 8 * each, ACTIVATION_BYTES * 2 * each


WORK: Mapping[str, Callable[[Mapping[str, Floats], float], tuple[Floats, Floats]]] = {
    "products": _products,
    "attention-prefill": _prefill,
    "attention-decode": _decode,
    "attention-encoder": _encoder,
    "latent-prefill": _latent_prefill,
    "latent-decode": _latent_decode,
    "latent-keys": _latent_products,
    "latent-values": _latent_products,
    "experts": _experts,
    "convolution-prefill": _convolution,
    "convolution-decode": _convolution,
}
"""(operations, bytes) of each family's rows, from their sizes and the bytes of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Floor plus operations plus bytes, at the best rates that a table's own rows reach; in microseconds."""

    family: str
    dtype: str
    floor_us: float
    operations_per_us: float
    bytes_per_us: float

    def time_us(self, sizes: Mapping[str, Floats]) -> Floats:
        """The time at each row of ``sizes``; a sum, not a maximum, so that it has no kinks."""
        operations, moved = WORK[self.family](sizes, ITEM_BYTES[self.dtype])
        return self.floor_us + operations / self.operations_per_us + moved / self.bytes_per_us


def spanned_roofline(family: str, dtype: str, sizes: Columns, time_us: Floats) -> Roofline:
    """The roofline of a table's rows."""
    floats = {name: values.astype(np.float64) for name, values in sizes.items()}
    operations, moved = WORK[family](floats, ITEM_BYTES[dtype])
    return Roofline(
        family=family,
        dtype=dtype,
        floor_us=float(time_us.min()),
        operations_per_us=float(np.quantile(operations / time_us, PEAK_QUANTILE)),
        bytes_per_us=float(np.quantile(moved / time_us, PEAK_QUANTILE)),
    )
