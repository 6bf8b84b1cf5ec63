"""The time of a demand on a GPU, from the rates that its maker states and a dozen fitted numbers.

A roofline (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009) whose compute bound counts waves: blocks
run in rounds of one per multiprocessor, and the last round takes as long as a full one. Its memory bound has a share
of the data, the larger the less of it fits L2, come from memory and the rest from L2. To these come a launch floor
and a serial chain. Of the kernels that a library could have chosen, the fastest counts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from tessera_core.profile.model.demand import Demand, Floats

Bound = Literal["launch floor", "compute", "memory", "L2", "serial chain"]
BOUNDS: tuple[Bound, ...] = ("launch floor", "compute", "memory", "L2", "serial chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A GPU as its maker states it, at one precision: operations and bytes per second, bytes of L2."""

    flops_per_s: float
    memory_bytes_per_s: float
    l2_bytes: float
    multiprocessors: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What is fitted; all above zero.

    ``compute``, ``memory``, ``cache``: shares of the stated rates that are reached (of L2: as a multiple of memory's).
    ``capacity``: share of L2 that is at hand, ``sharpness``: how suddenly data beyond it miss. ``floor_us``: a
    launch. ``chain_us``: time per 1,024 steps of the serial chain. ``border``: elements around a tile that cost as
    much as its own. ``blend``: exponent of the norm that joins the bounds; large: the largest alone counts.
    ``round_us``: fixed time of a round of blocks. ``split_us``: joining what blocks share.
    """

    compute: float
    memory: float
    cache: float
    capacity: float
    sharpness: float
    floor_us: float
    chain_us: float
    border: float
    blend: float
    round_us: float
    split_us: float


NAMES = tuple(field.name for field in fields(Coefficients))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Times of each bound for every candidate and kernel, in microseconds; shape (candidates, kernels)."""

    floor: Floats
    chain: Floats
    compute: Floats
    memory: Floats
    cache: Floats
    total: Floats


def parts(demand: Demand, chip: Chip, fitted: Coefficients) -> Parts:
    """Every bound of ``demand`` on ``chip``, and what they come to together."""
    data = np.maximum(demand.data_bytes, 1.0)
    with np.errstate(over="ignore"):  # far more or far less data than L2 holds: a share of 1 or 0
        missed = data / (1 + (fitted.capacity * chip.l2_bytes / data) ** fitted.sharpness)
    bandwidth = chip.memory_bytes_per_s / 1e6
    area = demand.tile_rows * demand.tile_columns
    own = area / (area + fitted.border * (demand.tile_rows + demand.tile_columns))
    rate = chip.flops_per_s / 1e6 / chip.multiprocessors * np.minimum(fitted.compute * own, 1.0)
    rounds = np.ceil(demand.blocks / chip.multiprocessors)
    compute = rounds * (demand.flops / rate + fitted.round_us)
    memory = missed / (bandwidth * fitted.memory)
    cache = demand.cache_bytes / (bandwidth * fitted.cache)
    # The largest is taken out of the norm, so that no power overflows.
    largest = np.maximum(np.maximum(compute, memory), cache)
    joined = largest * sum((part / largest) ** fitted.blend for part in (compute, memory, cache)) ** (
        1 / fitted.blend
    )
    floor = fitted.floor_us + np.where(demand.splits > 1, fitted.split_us, 0.0)
    chain = fitted.chain_us * demand.chain
    return Parts(
        floor=floor, chain=chain, compute=compute, memory=memory, cache=cache, total=floor + chain + joined
    )


def physical_time(demand: Demand, chip: Chip, fitted: Coefficients) -> Floats:
    """Times in microseconds, shape (kernels,)."""
    total = np.atleast_2d(parts(demand, chip, fitted).total)
    fastest: Floats = total.min(axis=0)
    return fastest


def largest_bound(demand: Demand, chip: Chip, fitted: Coefficients) -> Bound:
    """What takes the most of the time of a demand of one kernel."""
    found = parts(demand, chip, fitted)
    total = np.atleast_2d(found.total)
    best = int(np.argmin(total[:, 0]))
    bounds = (found.floor, found.compute, found.memory, found.cache, found.chain)
    times = [float(np.broadcast_to(np.atleast_2d(bound), total.shape)[best, 0]) for bound in bounds]
    return BOUNDS[int(np.argmax(times))]
