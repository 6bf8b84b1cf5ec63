"""Tables as iterations meet them: weights and caches come from memory, where the collector found them in L2.

A collector launches one kernel again and again over few copies of its weights, so what fits L2 stays there: half of the
L40S's short products read their weights at up to 2.4 times the rate of its memory. Between two uses of a weight an
iteration reads all the others, and must fetch it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from tessera_core.devices.modelled import ModelledDevice
from tessera_core.profile.model.sizes import compute_dtype
from tessera_core.profile.silicon.rates import ACTIVATION_BYTES, ITEM_BYTES, LATENT_WIDTH, WORK, Floats
from tessera_core.profile.silicon.tables import SiliconTable


def _weights(s: Mapping[str, Floats], weight: float) -> Floats:
    return weight * s["n"] * s["k"]


def _cached_rows(s: Mapping[str, Floats], weight: float) -> Floats:
    keys = np.where(s["window"] > 0, np.minimum(s["window"], s["context"]), s["context"])
    found: Floats = ACTIVATION_BYTES * 2 * s["batch"] * keys * s["kv_heads"] * s["head_dim"]
    return found


def _latent_rows(s: Mapping[str, Floats], weight: float) -> Floats:
    return ACTIVATION_BYTES * s["batch"] * s["context"] * LATENT_WIDTH


FETCHED: Mapping[str, Callable[[Mapping[str, Floats], float], Floats]] = {
    "products": _weights,
    "attention-decode": _cached_rows,
    "latent-decode": _latent_rows,
}
"""Bytes that an iteration left in memory alone, by family: of weights and of caches of keys. Activations may be in L2.

Experts are not among them: which of them tokens reach is the router's choice.
"""

COMPUTED = frozenset(FETCHED) | {"attention-prefill", "attention-encoder", "latent-prefill"}
"""Families whose operations all run on matrix units."""


@cache
def from_memory(table: SiliconTable) -> SiliconTable:
    """``table`` with no row faster than memory, at the rate measured of it, brings what L2 doesn't hold."""
    if table.source.family not in FETCHED:
        return table
    sizes = {name: values.astype(np.float64) for name, values in table.sizes.items()}
    rate = ModelledDevice.of(table.source.device_type).memory().per_s
    least = FETCHED[table.source.family](sizes, ITEM_BYTES[table.dtype]) / rate * 1e6
    return replace(table, time_us=np.maximum(table.time_us, least))


def fetched_us(table: SiliconTable, sizes: Mapping[str, int]) -> float:
    """Microseconds in which memory brings the weights or caches of a kernel of ``sizes``; 0 in families without any."""
    if table.source.family not in FETCHED:
        return 0.0
    rate = ModelledDevice.of(table.source.device_type).memory().per_s
    return _fetched_bytes(table, sizes) / rate * 1e6


def _fetched_bytes(table: SiliconTable, sizes: Mapping[str, int]) -> float:
    floats = {name: np.array(float(size)) for name, size in sizes.items()}
    return float(FETCHED[table.source.family](floats, ITEM_BYTES[table.dtype]))


def least_us(table: SiliconTable, sizes: Mapping[str, int], dtype: str, cold: bool) -> float:
    """What a kernel in ``dtype`` (ours) takes at least at the rates that the GPU's maker states, in microseconds.

    ``cold``: its weights or caches come from memory.
    """
    family, device = table.source.family, ModelledDevice.of(table.source.device_type)
    floats = {name: np.array(float(size)) for name, size in sizes.items()}
    bounds = [0.0]
    if family in COMPUTED:
        operations, _ = WORK[family](floats, ITEM_BYTES[table.dtype])
        bounds.append(float(operations) / device.stated_flops_per_s(compute_dtype(dtype)) * 1e6)
    if cold and family in FETCHED and device.type.datasheet is not None:
        bounds.append(_fetched_bytes(table, sizes) / device.type.datasheet.memory_bytes_per_s * 1e6)
    return max(bounds)
