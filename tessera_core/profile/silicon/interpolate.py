"""Times between the points of a published table, with intervals that the table's own points have calibrated.

Half an interval is proportional to the difference of the two neighbours between which a size lies. The factor is such
that 90% of a sample of the table's points, each predicted from its neighbours as if it were not there, lie inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tessera_core.profile.silicon.lattice import Lattice
from tessera_core.profile.silicon.rates import Floats, Roofline, spanned_roofline
from tessera_core.profile.silicon.tables import SiliconTable

LEVELS: Mapping[str, tuple[str, ...]] = {
    "products": ("n", "k", "m"),
    "attention-prefill": ("head_dim", "window", "kv_heads", "heads", "batch", "queries"),
    "attention-decode": ("head_dim", "window", "kv_heads", "heads", "batch", "context"),
    "attention-encoder": ("head_dim", "heads", "batch", "queries"),
    "latent-prefill": ("heads", "batch", "queries"),
    "latent-decode": ("heads", "batch", "context"),
    "latent-keys": ("heads", "tokens"),
    "latent-values": ("heads", "tokens"),
    "experts": ("experts", "top_k", "hidden", "intermediate", "tokens"),
    "convolution-prefill": ("channels", "batch", "length"),
    "convolution-decode": ("channels", "batch", "length"),
}
"""Sizes of each family in the order in which they are bracketed: the coarsest grid first."""

EXACT = frozenset({"head_dim", "window", "experts", "top_k"})
"""Sizes that choose another kernel, or another routing, rather than more of the same."""

GROWING = frozenset({"n", "k", "m", "queries", "context", "tokens", "length"})
"""Sizes of which more is more of the same work, so that past the last a time may follow its roofline."""

COVERAGE = 0.9
SAMPLE, SAMPLE_WHOLE = 400, 1200
"""Points that calibrate a table: along each size, and with all sizes at play. With half as many of the latter, coverage
scatters by three hundredths."""

FEWEST = 20
"""With fewer points that calibrate a size, :data:`UNCALIBRATED` stands in."""

UNCALIBRATED = 1.0
SCATTER = 0.05
"""More work takes no less time, so an interval ends where the points around do, and this much (as a logarithm) further:
points that differ by one row scatter by about that."""

HIDDEN = math.log(2)
"""What lies past the largest size is calibrated by the largest, predicted from sizes of at most half of it."""

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpolated:
    """A time and its 90% interval, in microseconds: of what the table would have held there.

    ``distance``: natural logarithm of the largest factor in size to the nearest measured point. ``continued``:
    beyond the largest measured size.
    """

    time_us: float
    low_us: float
    high_us: float
    distance: float
    continued: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftOut:
    """Points of a table as predicted by the others: times and interval ends in microseconds, one entry per point.

    ``outside``: how many points that were left out the others could not predict.
    """

    predicted: Floats
    low: Floats
    high: Floats
    actual: Floats
    outside: int

    @property
    def errors(self) -> Floats:
        """Relative errors, without sign."""
        return np.abs(self.predicted / self.actual - 1)

    @property
    def covered(self) -> float:
        """Share of the points inside their intervals."""
        return float(np.mean((self.low <= self.actual) & (self.actual <= self.high)))

    @property
    def width(self) -> float:
        """Median width of the intervals, relative to the prediction."""
        return float(np.median((self.high - self.low) / self.predicted))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interpolator:
    """A table made ready to be asked: shares of its own roofline on a lattice of logarithmic sizes.

    ``scale``: by what to multiply an interval where several sizes play together.
    """

    table: SiliconTable
    levels: tuple[str, ...]
    roofline: Roofline
    lattice: Lattice
    scale: float = 1.0

    def covers(self, sizes: Mapping[str, int]) -> bool:
        """Whether :meth:`at` has a time at ``sizes``."""
        return self.lattice.at([_coordinate(sizes[name]) for name in self.levels]) is not None

    def at(self, sizes: Mapping[str, int]) -> Interpolated | None:
        """The time at ``sizes`` (every size of the table's family); None outside the table."""
        found = self.lattice.at([_coordinate(sizes[name]) for name in self.levels])
        if found is None:
            return None
        bound = self.roofline.time_us({name: np.array(float(sizes[name])) for name in self.levels})
        time_us = float(bound) * math.exp(found.value)
        factor = math.exp(self.scale * math.sqrt(found.variance))
        low_us, high_us = time_us / factor, time_us * factor
        if found.distance > 0:
            low_us = max(low_us, min(time_us, math.exp(found.least - SCATTER)))
            high_us = min(high_us, max(time_us, math.exp(found.most + SCATTER)))
        return Interpolated(
            time_us=time_us,
            low_us=low_us,
            high_us=high_us,
            distance=found.distance,
            continued=found.continued,
        )


@cache
def prepared(table: SiliconTable) -> Interpolator:
    """``table`` on its lattice, once per process: it says what it covers, its intervals are not calibrated yet."""
    return _prepared(table, np.ones(len(table), dtype=np.bool_))


@cache
def interpolator(table: SiliconTable) -> Interpolator:
    """``table`` ready to be asked, once per process."""
    return _calibrated(prepared(table))


def time_at(table: SiliconTable, sizes: Mapping[str, int]) -> Interpolated | None:
    """The time of ``table`` at ``sizes``, None outside; where a point was met nothing needs to be calibrated."""
    found = prepared(table).at(sizes)
    return found if found is None or found.distance == 0 else interpolator(table).at(sizes)


def leave_out(
    table: SiliconTable, fraction: float, seed: int, what: Literal["point", "curve"] = "point"
) -> LeftOut:
    """Predict ``fraction`` of a table's points, chosen by ``seed``, from the rest.

    ``point``: single ones, so that most have neighbours in their last size. ``curve``: all points that share the
    other sizes, as for a layer whose widths nobody measured.
    """
    random = np.random.default_rng(seed)
    levels = LEVELS[table.source.family]
    if what == "curve":
        keys = np.stack([table.sizes[name] for name in levels[:-1]])
        _, curve = np.unique(keys, axis=1, return_inverse=True)
        curve = np.ravel(curve)
        held = (random.random(curve.max() + 1) < fraction)[curve]
    else:
        held = random.random(len(table)) < fraction
    ready = _calibrated(_prepared(table, ~held))
    found = [
        (ready.at({name: int(table.sizes[name][row]) for name in levels}), float(table.time_us[row]))
        for row in np.flatnonzero(held)
    ]
    known = [(value, actual) for value, actual in found if value is not None]
    return LeftOut(
        predicted=np.array([value.time_us for value, _ in known]),
        low=np.array([value.low_us for value, _ in known]),
        high=np.array([value.high_us for value, _ in known]),
        actual=np.array([actual for _, actual in known]),
        outside=len(found) - len(known),
    )


def _prepared(table: SiliconTable, kept: NDArray[np.bool_]) -> Interpolator:
    levels = LEVELS[table.source.family]
    sizes = {name: table.sizes[name][kept] for name in levels}
    time_us = table.time_us[kept]
    order = np.lexsort([sizes[name] for name in reversed(levels)])
    sizes, time_us = {name: values[order] for name, values in sizes.items()}, time_us[order]
    roofline = spanned_roofline(table.source.family, table.dtype, sizes, time_us)
    floats = {name: values.astype(np.float64) for name, values in sizes.items()}
    lattice = Lattice(
        coordinates=np.stack([np.log(np.maximum(floats[name], 0.5)) for name in levels]),
        values=np.log(time_us / roofline.time_us(floats)),
        limits=np.log(time_us),
        exact=frozenset(index for index, name in enumerate(levels) if name in EXACT),
        growing=frozenset(index for index, name in enumerate(levels) if name in GROWING),
        between=(1.0,) * len(levels),
        beyond=(1.0,) * len(levels),
    )
    return Interpolator(table=table, levels=levels, roofline=roofline, lattice=lattice)


def _coordinate(size: int) -> float:
    """A size's logarithm; of 0, which stands for "no window", a number below all others'."""
    return math.log(max(size, 0.5))


def _calibrated(ready: Interpolator) -> Interpolator:
    """``ready`` with the factors for which its own points, left out one by one, lie inside their intervals."""
    random = np.random.default_rng(SEED)
    lattice = ready.lattice
    count = len(lattice.values)
    between, beyond = [], []
    for level, own in enumerate(lattice.coordinates):
        inner = random.permutation(count)[: 0 if level in lattice.exact else SAMPLE]
        between.append(_factor(_misses(lattice, inner, level, 0.0)) or UNCALIBRATED)
        outer = random.permutation(np.flatnonzero(own == own.max()))[
            : SAMPLE if level in lattice.growing else 0
        ]
        beyond.append(_factor(_misses(lattice, outer, level, HIDDEN)) or between[-1])
    lattice = replace(lattice, between=tuple(between), beyond=tuple(beyond))
    misses = []
    for row in random.permutation(count)[:SAMPLE_WHOLE].tolist():
        found = lattice.at(lattice.coordinates[:, row].tolist(), without=row)
        if found is not None:
            misses.append(abs(found.value - float(lattice.values[row])) / math.sqrt(found.variance))
    return replace(ready, lattice=lattice, scale=_factor(misses) or UNCALIBRATED)


def _misses(lattice: Lattice, rows: NDArray[np.int64], level: int, hidden: float) -> list[float]:
    """How far each of ``rows`` lies from what its neighbours at ``level`` say, in uncalibrated half intervals."""
    found = []
    for row in rows.tolist():
        value = lattice.at(lattice.coordinates[:, row].tolist(), skip=level, hidden=hidden)
        if value is not None and value.continued == (hidden > 0):
            found.append(abs(value.value - float(lattice.values[row])) / math.sqrt(value.variance))
    return found


def _factor(misses: list[float]) -> float | None:
    return float(np.quantile(misses, COVERAGE)) if len(misses) >= FEWEST else None
