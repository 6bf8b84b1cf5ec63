"""Published tables as neighbours of what they don't hold: read where the extra ``silicon`` is installed."""

from __future__ import annotations

from collections.abc import Mapping

from tessera_core.profile.model.demand import Floats
from tessera_core.profile.model.neighbours import Correction

ORDER: Mapping[str, tuple[str, ...]] = {
    "products": ("n", "k", "m"),
    "attention-decode": ("head_dim", "window", "heads", "kv_heads", "batch", "context"),
    "attention-prefill": ("head_dim", "window", "heads", "kv_heads", "batch", "queries"),
    "experts": ("experts", "top_k", "hidden", "intermediate", "tokens"),
}
"""Sizes that place a point among its neighbours, by class."""

LEAST_SCATTER = 0.02
"""What the points around can't tell: two versions of a framework differ by that at least."""


def half_widths(found: Correction, scatter_factor: float, half_width: float) -> Floats:
    """Half-widths of the logarithm's 90% interval: the scatter around, and without points near ``half_width``."""
    return scatter_factor * (found.scatter + LEAST_SCATTER) + (1 - found.near) * half_width
