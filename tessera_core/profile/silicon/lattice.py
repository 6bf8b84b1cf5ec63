"""Values at the points of a ragged lattice, and between them: one size after another is bracketed by its nearest
measured values, the coarsest first, and values are linear in the logarithm of each size.

A size of which the next measured value lacks some finer one is bracketed by the value after it; where no bracket
remains the point is outside the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS = 2
"""How many measured values are tried on either side before a bracket is given up."""

CONTINUED = float(np.log(4.0))
"""Logarithm of the factor by which a size may exceed the largest measured one, where the values have settled."""

SETTLED = 0.1
"""Values have settled where the last two differ by no more: the time follows its roofline from there on."""

SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Reach:
    """Half an interval from the difference of two neighbours: ``factor`` times (``least`` plus the difference)."""

    factor: float = 1.0
    least: float = 0.0

    def half(self, difference: float) -> float:
        """Half the interval, a logarithm."""
        return self.factor * (self.least + difference)


@dataclass(frozen=True, slots=True)
class Value:
    """A value; ``variance``: the square of half its interval; ``distance``: largest logarithmic gap to a point."""

    value: float
    variance: float
    distance: float
    continued: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Points by coordinates (one row per level, lexicographically sorted) and their values.

    ``exact``: levels that are never interpolated. ``between``, ``beyond``: per level, half an interval between two
    neighbours, and past the last of them.
    """

    coordinates: NDArray[np.float64]
    values: NDArray[np.float64]
    exact: frozenset[int]
    between: tuple[Reach, ...]
    beyond: tuple[Reach, ...]
    nodes: dict[tuple[int, int, int], tuple[NDArray[np.float64], NDArray[np.int64]]] = field(
        default_factory=dict
    )

    def at(self, point: Sequence[float], skip: int | None = None) -> Value | None:
        """The value at ``point``, None outside; as if what was met at level ``skip`` were not there."""
        return self._at(0, len(self.values), 0, point, skip)

    def _at(self, low: int, high: int, level: int, point: Sequence[float], skip: int | None) -> Value | None:
        held, starts = self._node(low, high, level)
        wanted = point[level]
        index = int(np.searchsorted(held, wanted - SAME))
        met = index < len(held) and abs(held[index] - wanted) <= SAME
        if met and level != skip:
            found = self._child(starts, index, level, point, skip)
            if found is not None or level in self.exact:
                return found
        if level in self.exact:
            return None
        after = index + 1 if met else index
        below = self._nearest(starts, range(index - 1, index - 1 - NEIGHBOURS, -1), level, point, skip)
        above = self._nearest(starts, range(after, after + NEIGHBOURS), level, point, skip)
        if below is None:
            return None
        if above is None:
            return self._continued(held, starts, below, level, point, skip) if after >= len(held) else None
        (left, first), (right, second) = below, above
        share = (wanted - held[left]) / (held[right] - held[left])
        half = self.between[level].half(abs(first.value - second.value))
        nearer, gap = (
            (first, wanted - held[left]) if 2 * share <= 1 else (second, float(held[right] - wanted))
        )
        return Value(
            (1 - share) * first.value + share * second.value,
            max(first.variance, second.variance) + half**2,
            max(float(gap), nearer.distance),
            first.continued or second.continued,
        )

    def _continued(
        self,
        held: NDArray[np.float64],
        starts: NDArray[np.int64],
        last: tuple[int, Value],
        level: int,
        point: Sequence[float],
        skip: int | None,
    ) -> Value | None:
        """Past the largest measured size: the last value, where values have settled and it is near."""
        index, value = last
        distance = float(point[level] - held[index])
        before = self._nearest(starts, range(index - 1, index - 1 - NEIGHBOURS, -1), level, point, skip)
        if before is None or distance > CONTINUED + SAME:
            return None
        change = abs(value.value - before[1].value)
        if change > SETTLED:
            return None
        half = self.beyond[level].half(change)
        return Value(value.value, value.variance + half**2, max(distance, value.distance), True)

    def _nearest(
        self,
        starts: NDArray[np.int64],
        indices: range,
        level: int,
        point: Sequence[float],
        skip: int | None,
    ) -> tuple[int, Value] | None:
        for index in indices:
            if 0 <= index < len(starts) - 1:
                found = self._child(starts, index, level, point, skip)
                if found is not None:
                    return index, found
        return None

    def _child(
        self, starts: NDArray[np.int64], index: int, level: int, point: Sequence[float], skip: int | None
    ) -> Value | None:
        low, high = int(starts[index]), int(starts[index + 1])
        if level == len(point) - 1:
            return Value(float(self.values[low]), 0.0, 0.0)
        return self._at(low, high, level + 1, point, skip)

    def _node(self, low: int, high: int, level: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The distinct coordinates of rows ``low`` to ``high`` at a level, and where each begins."""
        key = (low, high, level)
        if key not in self.nodes:
            own = self.coordinates[level, low:high]
            starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
            self.nodes[key] = (own[starts], np.r_[starts, high - low] + low)
        return self.nodes[key]
