"""Values at the points of a ragged lattice, and between them: one size after another is bracketed by its nearest
measured values, the coarsest first, and values are linear in the logarithm of each size.

A size of which the next measured value lacks some finer one is bracketed by the value after it; where no bracket
remains the point is outside the table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS = 2
"""How many measured values are tried on either side before a bracket is given up."""

CONTINUED = float(np.log(4.0))
"""Logarithm of the factor by which a size may exceed the largest measured one, where the values have settled."""

SETTLED = 0.1
"""Values have settled where the last two differ by no more: the time follows its roofline from there on."""

SAME = 1e-9
Node: TypeAlias = tuple[list[float], list[int]]


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
    nodes: dict[tuple[int, int, int], Node] = field(default_factory=dict)

    def at(self, point: Sequence[float], skip: int | None = None, without: int | None = None) -> Value | None:
        """The value at ``point``; None outside.

        ``skip``: as if the value met at that level were not there, so that only its neighbours there speak.
        ``without``: as if that row were not there.
        """
        return self._at(_Asked(point, skip, without), 0, len(self.values), 0)

    def _at(self, asked: _Asked, low: int, high: int, level: int) -> Value | None:
        held, starts = self._node(low, high, level)
        wanted = asked.point[level]
        index = bisect_left(held, wanted - SAME)
        met = index < len(held) and held[index] <= wanted + SAME
        own = self._child(asked, starts, index, level) if met and level != asked.skip else None
        if level in self.exact or (own is not None and (own.distance == 0 or asked.skip is not None)):
            return own
        after = index + 1 if met else index
        below = self._nearest(asked, starts, range(index - 1, index - 1 - NEIGHBOURS, -1), level)
        above = self._nearest(asked, starts, range(after, after + NEIGHBOURS), level)
        if below is None:
            return own
        if above is None:
            if own is not None or after < len(held):
                return own
            return self._continued(asked, held, starts, below, level)
        (left, first), (right, second) = below, above
        if own is not None:
            if first.distance or second.distance or own.continued:
                return own  # the neighbours lack the same finer size, and would only repeat what it says
            return _together(own, self._between(held, left, right, first, second, wanted, level))
        return self._between(held, left, right, first, second, wanted, level)

    def _between(
        self,
        held: Sequence[float],
        left: int,
        right: int,
        first: Value,
        second: Value,
        wanted: float,
        level: int,
    ) -> Value:
        share = (wanted - held[left]) / (held[right] - held[left])
        half = self.between[level].half(abs(first.value - second.value))
        nearer, gap = (first, wanted - held[left]) if 2 * share <= 1 else (second, held[right] - wanted)
        return Value(
            (1 - share) * first.value + share * second.value,
            max(first.variance, second.variance) + half**2,
            max(gap, nearer.distance),
            first.continued or second.continued,
        )

    def _continued(
        self, asked: _Asked, held: Sequence[float], starts: Sequence[int], last: tuple[int, Value], level: int
    ) -> Value | None:
        """Past the largest measured size: the last value, where values have settled and it is near."""
        index, value = last
        distance = asked.point[level] - held[index]
        before = self._nearest(asked, starts, range(index - 1, index - 1 - NEIGHBOURS, -1), level)
        if before is None or distance > CONTINUED + SAME:
            return None
        change = abs(value.value - before[1].value)
        if change > SETTLED:
            return None
        half = self.beyond[level].half(change)
        return Value(value.value, value.variance + half**2, max(distance, value.distance), True)

    def _nearest(
        self, asked: _Asked, starts: Sequence[int], indices: range, level: int
    ) -> tuple[int, Value] | None:
        for index in indices:
            if 0 <= index < len(starts) - 1:
                found = self._child(asked, starts, index, level)
                if found is not None:
                    return index, found
        return None

    def _child(self, asked: _Asked, starts: Sequence[int], index: int, level: int) -> Value | None:
        low, high = starts[index], starts[index + 1]
        if level == len(asked.point) - 1:
            return None if low == asked.without else Value(float(self.values[low]), 0.0, 0.0)
        return self._at(asked, low, high, level + 1)

    def _node(self, low: int, high: int, level: int) -> Node:
        """The distinct coordinates of rows ``low`` to ``high`` at a level, and where each begins, with the end."""
        key = (low, high, level)
        found = self.nodes.get(key)
        if found is None:
            own = self.coordinates[level, low:high]
            starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
            found = (own[starts].tolist(), [*(starts + low).tolist(), high])
            self.nodes[key] = found
        return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """A point, and what to pass over; see :meth:`Lattice.at`."""

    point: Sequence[float]
    skip: int | None
    without: int | None


def _together(first: Value, second: Value) -> Value:
    """Two estimates from different sides, each by the weight of its certainty."""
    one, other = 1 / (first.variance + SAME), 1 / (second.variance + SAME)
    return Value(
        (one * first.value + other * second.value) / (one + other),
        1 / (one + other),
        min(first.distance, second.distance),
    )
