"""Published tables as neighbours of what they don't hold: read where the extra ``silicon`` is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tessera_core.profile.model.coefficients import FittedSet
from tessera_core.profile.model.demand import Floats, Sizes
from tessera_core.profile.model.neighbours import Correction, Neighbours, neighbours
from tessera_core.profile.silicon.tables import SiliconTable, find_package, read_table, sources

ORDER: Mapping[str, tuple[str, ...]] = {
    "products": ("n", "k", "m"),
    "attention-decode": ("head_dim", "window", "heads", "kv_heads", "batch", "context"),
    "attention-prefill": ("head_dim", "window", "heads", "kv_heads", "batch", "queries"),
    "experts": ("experts", "top_k", "hidden", "intermediate", "tokens"),
}
"""Sizes that place a point among its neighbours, by class."""

LEAST_SCATTER = 0.015
"""What the points around can't tell, as they may agree by chance; chosen as the figures of the neighbours are."""


def half_widths(found: Correction, scatter_factor: float, half_width: float) -> Floats:
    """Half-widths of the logarithm's 90% interval: the scatter around, and without points near ``half_width``."""
    return scatter_factor * (found.scatter + LEAST_SCATTER) + (1 - found.near) * half_width


def table_sizes(table: SiliconTable) -> Sizes:
    """A table's sizes as the model takes them."""
    sizes = {name: column.astype(np.float64) for name, column in table.sizes.items()}
    if table.source.family == "attention-prefill":  # all queries attend to themselves and those before
        sizes |= {"context": sizes["queries"], "causal": np.ones(len(table))}
    return sizes


def table_neighbours(best: FittedSet, physical: Callable[[Sizes], Floats]) -> Neighbours | None:
    """The points of the table to which ``best``, a GPU's own set, was fitted; None where it is not installed.

    ``physical``: the model's times in microseconds at the sizes given.
    """
    table = _table_of(best)
    if table is None:
        return None
    sizes, time_us = table_sizes(table), table.time_us

    def residual_at(index: npt.NDArray[np.intp]) -> Floats:
        asked = {name: column[index] for name, column in sizes.items()}
        found: Floats = np.log(time_us[index] / physical(asked))
        return found

    return neighbours(sizes, ORDER[best.kind], residual_at)


def _table_of(best: FittedSet) -> SiliconTable | None:
    package = find_package()
    if package is None:
        return None
    for source in sources(package, best.name, best.kind):
        if f"{source.framework} {source.version}" in best.tables:
            return read_table(source, "bfloat16")
    return None
